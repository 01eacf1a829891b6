"""The few Docker Engine API calls that the test bed needs, over a unix socket.

Only the standard library: this runs before any virtual environment exists.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from lib.layout import BedError

API_TIMEOUT_S = 120.0
PING_TIMEOUT_S = 2.0
ANSWER_MAX_BYTES = 64 << 20


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class EngineApi:
    """A Docker Engine behind ``socket_path``."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: float = API_TIMEOUT_S,
    ) -> tuple[int, bytes]:
        """One request.

        :returns: HTTP status and answer.
        :raises OSError: the engine cannot be reached.
        """
        connection = _UnixConnection(self.socket_path, timeout_s)
        try:
            target = f"{path}?{urlencode(query)}" if query else path
            connection.request(method, target, body=body, headers={"Content-Type": content_type})
            response = connection.getresponse()
            return response.status, response.read(ANSWER_MAX_BYTES)
        except http.client.HTTPException as error:
            raise ConnectionError(f"no HTTP answer from {self.socket_path}: {error!r}") from error
        finally:
            connection.close()

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """The JSON answer to a GET.

        :raises BedError: any status but 200.
        """
        status, answer = self.call("GET", path, query)
        if status != 200:
            raise BedError(f"cannot read {path} of {self.socket_path}: {status} {answer[:300]!r}")
        return json.loads(answer)

    def answers(self, timeout_s: float = PING_TIMEOUT_S) -> bool:
        """Whether the engine answers a ping in this time."""
        try:
            return self.call("GET", "/_ping", timeout_s=timeout_s)[0] == 200
        except OSError:
            return False

    def has_image(self, reference: str) -> bool:
        """Whether the engine holds this image (id, name or digest reference)."""
        return self.call("GET", f"/images/{quote(reference)}/json")[0] == 200

    def remove_containers_and_volumes(self) -> None:
        """Remove every one there is; what resists stays."""
        for container in self.get("/containers/json", {"all": "1"}):
            self.call("DELETE", f"/containers/{container['Id']}", {"force": "1", "v": "1"})
        for volume in self.get("/volumes")["Volumes"] or []:
            self.call("DELETE", f"/volumes/{quote(volume['Name'])}", {"force": "1"})

    def pull(self, reference: str) -> None:
        """Pull ``repository@sha256:…``.

        :raises BedError: with the engine's reason.
        """
        query = {"fromImage": reference}
        status, answer = self.call("POST", "/images/create", query)
        self._check_stream(f"pull {reference}", status, answer)

    def load(self, archive: Iterable[bytes], what: str) -> None:
        """Load a ``docker save`` archive, given in pieces.

        :raises BedError: with the engine's reason.
        """
        query = {"quiet": "1"}
        tar = "application/x-tar"
        status, answer = self.call("POST", "/images/load", query, body=archive, content_type=tar)
        self._check_stream(f"load {what}", status, answer)

    def _check_stream(self, what: str, status: int, answer: bytes) -> None:
        # A failure midway is an object with "error" in a stream that began with 200.
        failures = [
            message["error"]
            for message in map(_json_object, answer.splitlines())
            if "error" in message
        ]
        if status != 200 or failures:
            reason = failures[-1] if failures else answer[:300].decode(errors="replace")
            raise BedError(f"cannot {what} into {self.socket_path}: {reason}")


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
