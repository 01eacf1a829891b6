"""The floor under every attempt: one life of a hardened container, and what our door adds to it.

    python benchmarks/engine_cycle.py IMAGE [--host unix:///run/docker.sock] [--rounds 20] [--json]

IMAGE is pinned (``repository@sha256:…`` or ``sha256:…``) and has ``/bin/sh``.  One cycle is
create, attach, start, read to the end, wait, remove.  *raw* speaks HTTP to the socket with
nothing in between; *door* is ``DockerEngine``.  The rounds of all are interleaved, so that a
busy machine slows them alike; absolute figures belong to the machine, the ratio is what to
compare.  Other benchmarks divide by :func:`raw_cycle_ms` of the same run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio

from forge_core.labels import Owner
from forge_core.sandbox_spec import ContainerSpec, Hardening, container_request
from forge_edges.docker_context import DockerEndpoint, resolve_endpoint
from forge_edges.docker_engine import DockerEngine

API = "/v1.41"
MIB = 1 << 20


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def call(connection: Connection, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
    connection.request(
        method,
        API + path,
        body=None if body is None else json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    answer = response.read()
    assert response.status < 300, answer
    return answer


def read_attached(socket_path: str, container: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(socket_path)
    head = f"POST {API}/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1"
    stream.sendall(f"{head}\r\nHost: d\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += stream.recv(4096)
    assert b" 101 " in answer, answer
    return stream


def raw_cycle_ms(socket_path: str, name: str, request: Mapping[str, Any]) -> dict[str, float]:
    """One cycle with nothing in between: ``createMs``, ``startMs``, … and ``totalMs``."""
    connection = Connection(socket_path)
    marks = [time.perf_counter()]
    container = json.loads(call(connection, "POST", f"/containers/create?name={name}", request))[
        "Id"
    ]
    marks.append(time.perf_counter())
    with read_attached(socket_path, container) as stream:
        call(connection, "POST", f"/containers/{container}/start", None)
        marks.append(time.perf_counter())
        while stream.recv(65536):
            pass
    call(connection, "POST", f"/containers/{container}/wait", None)
    marks.append(time.perf_counter())
    call(connection, "DELETE", f"/containers/{container}?force=1&v=1", None)
    marks.append(time.perf_counter())
    connection.close()
    steps = ("createMs", "startMs", "runMs", "removeMs")
    took = {
        step: (after - before) * 1000
        for step, before, after in zip(steps, marks, marks[1:], strict=False)
    }
    return {**took, "totalMs": (marks[-1] - marks[0]) * 1000}


async def door_cycle_ms(door: DockerEngine, name: str, request: Mapping[str, Any]) -> float:
    """The same through the door."""
    began = time.perf_counter()
    container = await door.create_container(name, request)
    async with door.attach(container) as attachment:
        await door.start_container(container)
        while await attachment.receive() is not None:
            pass
    await door.wait_container(container, timeout_ms=60_000)
    await door.remove_container(container)
    return (time.perf_counter() - began) * 1000


async def measure(endpoint: DockerEndpoint, image: str, rounds: int) -> dict[str, Any]:
    assert endpoint.socket_path, "only a Unix socket can be measured"
    owner = Owner("benchmark", uuid.uuid4().hex, "benchmark", 1, "benchmark", "benchmark")
    spec = ContainerSpec(
        owner=owner,
        role="helper",
        image=image,
        argv=("/bin/sh", "-c", "exit 0"),
        memory_bytes=64 * MIB,
        cpu_millis=1000,
        pids=64,
    )
    request = container_request(spec, Hardening())
    bare = container_request(replace(spec, resolves_localhost=False), Hardening())
    raw, without_hosts, through = [], [], []
    async with DockerEngine.connect(endpoint) as door:
        facts = await door.facts()
        for _ in range(rounds + 1):
            raw.append(raw_cycle_ms(endpoint.socket_path, spec.name, request))
            without_hosts.append(raw_cycle_ms(endpoint.socket_path, spec.name, bare)["totalMs"])
            through.append(await door_cycle_ms(door, spec.name, request))
    steps = {step: round(statistics.median(cycle[step] for cycle in raw[1:]), 1) for step in raw[0]}
    return {
        "engine": f"{facts.version}{' rootless' if facts.rootless else ''}",
        "rawFastestMs": round(min(cycle["totalMs"] for cycle in raw[1:]), 1),
        "raw": steps,
        "rawWithoutHostsMs": round(statistics.median(without_hosts[1:]), 1),
        "doorFastestMs": round(min(through[1:]), 1),
        "doorMs": round(statistics.median(through[1:]), 1),
        "ratio": round(min(through[1:]) / min(cycle["totalMs"] for cycle in raw[1:]), 2),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image")
    parser.add_argument("--host", help="default: DOCKER_HOST, else the Docker CLI's own choice")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    environ = {**os.environ, **({"DOCKER_HOST": arguments.host} if arguments.host else {})}
    endpoint = resolve_endpoint(None, environ)
    result = anyio.run(measure, endpoint, arguments.image, arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
        return
    print("Engine {engine}: raw cycle at best {rawFastestMs} ms, median {raw}".format(**result))
    print("without /etc/hosts (network disabled) {rawWithoutHostsMs} ms".format(**result))
    print("door at best {doorFastestMs} ms, median {doorMs} ms".format(**result))
    print("ratio of the best {ratio} ({rounds} rounds)".format(**result))


if __name__ == "__main__":
    main()
