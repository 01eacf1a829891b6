"""Another engine behind the same socket: its list says nothing about the first one's things."""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from forge_core.errors import EngineUnreachable
from forge_core.labels import runner_filter
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine


class Answers(http.server.BaseHTTPRequestHandler):
    """As much of an engine as a list takes; it holds nothing."""

    engine_id: ClassVar[str] = "first"

    def do_GET(self) -> None:
        bodies: dict[str, object] = {
            "version": {"Version": "26.1.0", "ApiVersion": "1.45", "MinAPIVersion": "1.24"},
            "info": {"ID": self.engine_id, "ServerVersion": "26.1.0", "Driver": "overlay2"},
            "json": [],
            "networks": [],
            "volumes": {"Volumes": [], "Warnings": []},
        }
        body = json.dumps(bodies[self.path.partition("?")[0].rpartition("/")[2]]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quietly."""


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def get_request(self) -> tuple[socket.socket, Any]:
        request, _ = super().get_request()
        return request, ("engine", 0)


@pytest.fixture
def engine_socket(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "engine.sock"
    with Server(str(path), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield path
        server.shutdown()
        thread.join()
    Answers.engine_id = "first"


@pytest.mark.requirement("B-86")
async def test_a_list_of_another_engine_is_none(engine_socket: Path) -> None:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": f"unix://{engine_socket}"})
    async with DockerEngine.connect(endpoint, timeout_ms=5_000) as door:
        with anyio.fail_after(20):
            assert (await door.facts()).id == "first"
            assert await door.list_resources(runner_filter("runner")) == []
            Answers.engine_id = "second"
            with pytest.raises(EngineUnreachable, match="engine second stands in its place"):
                await door.list_resources(runner_filter("runner"))
            assert (await door.facts()).id == "second"
            with pytest.raises(EngineUnreachable):
                await door.list_resources(runner_filter("runner"))
            Answers.engine_id = "first"
            assert await door.list_resources(runner_filter("runner")) == []
