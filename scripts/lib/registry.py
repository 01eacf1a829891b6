"""A local image registry: one store on disk, a process in every network namespace that needs it.

The address is ``127.0.0.1:<port>`` everywhere, so one reference means the same image on the host
and in every engine; engines accept 127.0.0.0/8 without TLS.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from lib import processes
from lib.images import MANIFEST_TYPE, Image
from lib.layout import BedError, say

API_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 10.0


def start(
    binary: Path, store: Path, port: int, *, run: Path, prepare: Sequence[str] = ()
) -> processes.Process:
    """Start a registry process over ``store`` and wait until it listens.

    :param run: folder for its configuration and process record (``registry.json``).
    :param prepare: a command that enters another network namespace first.
    :raises BedError: with the last lines of the log.
    """
    store.mkdir(parents=True, exist_ok=True)
    run.mkdir(parents=True, exist_ok=True)
    settings = {
        "version": "0.1",
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(store)}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    configuration = run / "registry.yml"
    configuration.write_text(json.dumps(settings))  # JSON is YAML
    log = store.with_name(f"registry-{run.name}.log")
    process = processes.start(
        [str(binary), "serve", str(configuration)],
        record=run / "registry.json",
        log=log,
        environment={"PATH": "/usr/bin:/bin"},
        prepare=prepare,
    )
    what, ready = f"registry of {run.name}", lambda: _listens(process, binary, port)
    processes.wait_ready(what, ready, process, log, READY_TIMEOUT_S)
    return process


def _listens(process: processes.Process, binary: Path, port: int) -> bool:
    """Whether the port is open in the network namespace of ``process``, wherever that is."""
    try:
        if not Path(f"/proc/{process.pid}/exe").samefile(binary):
            return False  # still nsenter, which looks at the host's sockets
        sockets = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    except FileNotFoundError:
        return False
    # proc(5), /proc/net/tcp: local address as HEX:PORT, then the remote one, then 0A for LISTEN.
    fields = [line.split() for line in sockets]
    return any(
        local.endswith(f":{port:04X}") and state == "0A" for _, local, _, state, *_ in fields
    )


class Pusher:
    """Puts packed images into a registry (OCI distribution specification 1.1, Pushing)."""

    def __init__(self, port: int) -> None:
        self._address = f"127.0.0.1:{port}"

    def push(self, image: Image) -> str:
        """Push ``image`` unless it is there.

        :returns: its reference, ``127.0.0.1:<port>/forge/<name>@sha256:…``.
        :raises BedError: the registry refused it.
        """
        repository = f"/v2/forge/{image.name}"
        manifest = (image.folder / "manifest.json").read_bytes()
        target = f"{repository}/manifests/{image.digest}"
        if self._call("HEAD", target)[0] != 200:
            say(f"Pushing image forge/{image.name}")
            self._push_blob(repository, image.layer_digest, image.folder / "layer.tar")
            self._push_blob(repository, image.image_id, image.folder / "config.json")
            self._expect(201, "PUT", target, manifest, MANIFEST_TYPE)
        return f"{self._address}/forge/{image.name}@{image.digest}"

    def _push_blob(self, repository: str, digest: str, path: Path) -> None:
        if self._call("HEAD", f"{repository}/blobs/{digest}")[0] == 200:
            return
        upload = urlsplit(self._expect(202, "POST", f"{repository}/blobs/uploads/"))
        target = f"{upload.path}?{upload.query}&digest={digest}"
        with path.open("rb") as file:
            self._expect(201, "PUT", target, file)

    def _expect(
        self,
        status: int,
        method: str,
        target: str,
        body: bytes | BinaryIO | None = None,
        content_type: str = "application/octet-stream",
    ) -> str:
        got, location, answer = self._call(method, target, body, content_type)
        if got != status:
            raise BedError(f"cannot {method} {target} at registry {self._address}: {got} {answer}")
        return location

    def _call(
        self,
        method: str,
        target: str,
        body: bytes | BinaryIO | None = None,
        content_type: str = "application/octet-stream",
    ) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection(self._address, timeout=API_TIMEOUT_S)
        headers = {"Content-Type": content_type, "Accept": MANIFEST_TYPE}
        if not isinstance(body, bytes | None):
            headers["Content-Length"] = str(os.fstat(body.fileno()).st_size)
        try:
            connection.request(method, target, body=body, headers=headers)
            response = connection.getresponse()
            answer = response.read(4096).decode(errors="replace")
            return response.status, response.headers.get("Location", ""), answer
        except OSError as error:
            raise BedError(f"cannot reach registry {self._address}: {error}") from error
        finally:
            connection.close()
