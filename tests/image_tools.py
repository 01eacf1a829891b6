"""Real parts for the image gates: Cosign from Debian's packages, images in the bed's registry."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lib.debian import Packages
from lib.layout import BedError, Layout

from engines import REPOSITORY, Engine, describe
from needs import unavailable

SYFT = Path(sys.executable).with_name("syft")
TRIVY = REPOSITORY / "tests/standin_trivy.py"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_ACCEPT = f"{MANIFEST}, application/vnd.oci.image.index.v1+json"


def cosign_path() -> Path:
    """Debian's Cosign, unpacked into the cache of the test bed; outside CI a skip without it."""
    layout = Layout.from_environment()
    there = next((layout.cache / "packages").glob(f"cosign-trixie-{'[0-9a-f]' * 12}"), None)
    if there is None:  # else nobody has to wait for who else uses the cache
        try:
            with layout.locked():
                there = Packages(layout.cache).unpack([("cosign", "trixie")])
        except BedError as error:
            unavailable(f"Cosign: {error}")
    return there / "usr/bin/cosign"


@dataclass(frozen=True, slots=True)
class Registry:
    """The test bed's registry, with a repository that is this test's own."""

    address: str
    repository: str
    pushed: list[str] = field(default_factory=list)

    def push(self) -> str:
        """An image of its own, which can be signed though it holds nothing; by digest."""
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "rootfs": {"type": "layers", "diff_ids": []},
                "author": secrets.token_hex(8),
            }
        ).encode()
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {
                    "mediaType": "application/vnd.oci.image.config.v1+json",
                    **self._put_blob(config),
                },
                "layers": [],
            }
        ).encode()
        self.put_manifest(_digest(manifest), manifest)
        self.pushed.append(_digest(manifest))
        return f"{self.address}/{self.repository}@{_digest(manifest)}"

    def copy(self, reference: str, *more: bytes) -> str:
        """An image that the registry has elsewhere, here, with these layers on top; by digest."""
        repository, _, digest = reference.partition("/")[2].partition("@")
        manifest = json.loads(self._call("GET", f"/v2/{repository}/manifests/{digest}")[0])
        for blob in manifest["layers"]:
            query = f"mount={blob['digest']}&from={repository}"
            self._call("POST", f"/v2/{self.repository}/blobs/uploads/?{query}")
        config = json.loads(
            self._call("GET", f"/v2/{repository}/blobs/{manifest['config']['digest']}")[0]
        )
        for layer in more:
            config["rootfs"]["diff_ids"].append(_digest(layer))
            described = {"mediaType": "application/vnd.oci.image.layer.v1.tar"}
            manifest["layers"].append({**described, **self._put_blob(layer)})
        manifest["config"] |= self._put_blob(json.dumps(config).encode())
        content = json.dumps(manifest).encode()
        self.put_manifest(_digest(content), content, manifest["mediaType"])
        self.pushed.append(_digest(content))
        return f"{self.address}/{self.repository}@{_digest(content)}"

    def put_manifest(self, name: str, manifest: bytes, media_type: str = MANIFEST) -> None:
        """Store a manifest under a digest or a tag."""
        self._call("PUT", f"/v2/{self.repository}/manifests/{name}", manifest, media_type)

    def replay_signature(self, signed: str, onto: str) -> None:
        """Attach the signature of one image to another, as one could who can only push."""
        manifest = self._call("GET", self._manifest(_signature_tag(signed)))[0]
        self.put_manifest(_signature_tag(onto), manifest)

    def clear(self) -> None:
        """Remove every manifest: the images, and the signatures, which have tags."""
        listing = self._call("GET", f"/v2/{self.repository}/tags/list", missing_ok=True)[0]
        for name in [*(json.loads(listing).get("tags") or ()), *self.pushed]:
            # Two tags may name one manifest, which is gone with the first of them.
            headers = self._call("HEAD", self._manifest(name), missing_ok=True)[1]
            if digest := headers.get("Docker-Content-Digest"):
                self._call("DELETE", self._manifest(digest))

    def _put_blob(self, content: bytes) -> dict[str, Any]:
        upload = self._call("POST", f"/v2/{self.repository}/blobs/uploads/")[1]["Location"]
        place = upload.removeprefix(f"http://{self.address}")
        self._call("PUT", f"{place}&digest={_digest(content)}", content)
        return {"digest": _digest(content), "size": len(content)}

    def _manifest(self, name: str) -> str:
        return f"/v2/{self.repository}/manifests/{name}"

    def _call(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        content_type: str = "application/octet-stream",
        *,
        missing_ok: bool = False,
    ) -> tuple[bytes, Any]:
        connection = http.client.HTTPConnection(self.address, timeout=20)
        try:
            headers = {"Content-Type": content_type, "Accept": _ACCEPT}
            connection.request(method, target, body=body, headers=headers)
            response = connection.getresponse()
            answer = response.read()
            if missing_ok and response.status == 404:
                return b"{}", response.headers
            assert response.status < 300, f"{method} {target}: {response.status} {answer!r}"
            return answer, response.headers
        finally:
            connection.close()


@contextmanager
def own_repository() -> Iterator[Registry]:
    """A repository in the registry of the bed; empty again afterwards; outside CI a skip."""
    status = describe()["registry"]
    if not status["up"]:
        unavailable("the registry of the test bed is not up")
    registry = Registry(status["address"], f"forge-test/{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield registry
    finally:
        registry.clear()


@contextmanager
def guarded(registry: Registry, user: str, password: str) -> Iterator[Registry]:
    """The same registry behind a door that asks for a name and a password (RFC 7617)."""
    wanted = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") != wanted:
                self._answer(401, {"WWW-Authenticate": 'Basic realm="test"'}, b"")
                return
            inner = http.client.HTTPConnection(registry.address, timeout=20)
            inner.request(
                self.command, self.path, headers={"Accept": self.headers.get("Accept", "*/*")}
            )
            response = inner.getresponse()
            self._answer(response.status, dict(response.headers), response.read())
            inner.close()

        do_HEAD = do_GET  # noqa: N815 - as http.server calls them

        def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Not to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Registry(f"127.0.0.1:{server.server_port}", registry.repository)
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True, slots=True)
class Cosign:
    """The real program, as an operator uses it to sign."""

    path: Path
    home: Path

    def new_key(self, name: str) -> Path:
        """A key pair; the path of the public half."""
        self._run("generate-key-pair", "--output-key-prefix", name)
        return self.home / f"{name}.pub"

    def sign(self, reference: str, name: str) -> None:
        """Sign an image with the key ``name``, and with nothing else."""
        key = f"{name}.key"
        self._run("sign", "--key", key, "--tlog-upload=false", "--yes", reference)

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            [self.path, *arguments],
            cwd=self.home,
            env={"HOME": str(self.home), "COSIGN_PASSWORD": "", "PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=60,
        )


def debian_layer(packages: Mapping[str, str], *, version: str = "12") -> bytes:
    """A layer with a package database of Debian, and nothing that could be run.

    :param packages: name → version of what is installed.
    """
    status = "\n".join(
        f"Package: {name}\nStatus: install ok installed\nVersion: {of}\nArchitecture: amd64\n"
        f"Maintainer: nobody\nDescription: {name}\n"
        for name, of in packages.items()
    )
    release = f"ID=debian\nVERSION_ID={version}\n"
    return layer({"etc/os-release": release, "var/lib/dpkg/status": status})


def layer(files: Mapping[str, str]) -> bytes:
    """A layer of these files, by path; ``.wh.NAME`` takes NAME away (OCI image layer 1.1)."""
    return _tar({path: text.encode() for path, text in files.items()})


@contextmanager
def loaded_image(engine: Engine, layers: Sequence[bytes]) -> Iterator[tuple[str, str, bytes]]:
    """An image of these layers in the engine: its id, its only tag, its configuration."""
    tag = f"forge.invalid/gate-test:{os.getpid()}-{secrets.token_hex(4)}"
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in layers]},
        }
    ).encode()
    names = [f"{n}/layer.tar" for n in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": names}]
    archive = _tar(
        {
            "manifest.json": json.dumps(manifest).encode(),
            "config.json": config,
            **dict(zip(names, layers, strict=True)),
        }
    )
    engine.api.load([archive], tag)
    try:
        yield engine.api.get(f"/images/{tag}/json")["Id"], tag, config
    finally:
        engine.api.call("DELETE", f"/images/{tag}")


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _signature_tag(reference: str) -> str:
    return reference.rpartition("@")[2].replace(":", "-") + ".sig"


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
