"""What an attempt costs beyond its container: offer → result for ``true``, ÷ the raw cycle.

    python benchmarks/attempt_overhead.py IMAGE [--host unix://…] [--rounds 15] [--json]

The floor is the fastest raw engine cycle (create, attach, start, read, wait, remove; see
engine_cycle.py) of *the same* container request, taken in the same run, its rounds interleaved
with the attempts.  A hub and a bridge run in this process and speak over a loopback socket; the
time is taken at the hub, from the moment at which the session is asked for to the arrival of the
durable result (revision 1).  ``workspace`` repeats it with 500 files of 10 KB.  Goal: ≤ 2 now,
≤ 1.2 in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
from pydantic import SecretStr

from engine_cycle import raw_cycle_ms
from forge_bridge.app import open_bridge
from forge_bridge.logs import configure_logging
from forge_bridge.repositories import add_repository
from forge_bridge.settings import default_bridge_service_config
from forge_bridge.settings_table import LogLevel
from forge_core.labels import Owner
from forge_core.sandbox_spec import ContainerSpec, Hardening, container_request
from forge_edges.docker_context import resolve_endpoint
from forge_hub.server import RunningHub, running_hub
from forge_hub.settings import HubSettings

FILES, FILE_BYTES = 500, 10_240


def make_repository(path: Path, *, files: int) -> str:
    """A repository with one commit; returns its id."""
    path.mkdir()
    for n in range(files):
        folder = path / f"d{n % 25}"
        folder.mkdir(exist_ok=True)
        (folder / f"{n}.bin").write_bytes(os.urandom(FILE_BYTES))
    (path / "README").write_text("hello\n")
    git = ["git", "-C", str(path), "-c", "user.name=b", "-c", "user.email=b@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return head.stdout.strip()


def floor_request(image: str) -> tuple[str, dict[str, Any]]:
    """A container like the agent's, whose PID 1 does nothing."""
    owner = Owner("benchmark", uuid.uuid4().hex, "benchmark", 1, "benchmark", "benchmark")
    spec = ContainerSpec(
        owner=owner,
        role="helper",
        image=image,
        argv=("/bin/sh", "-c", "exit 0"),
        memory_bytes=1 << 30,
        cpu_millis=1000,
        pids=256,
    )
    return spec.name, container_request(spec, Hardening())


@asynccontextmanager
async def hub_and_bridge(directory: Path, image: str, **more: Any) -> AsyncIterator[RunningHub]:
    """Both in this process, over a loopback socket.

    :param more: settings of the bridge.
    """
    settings = default_bridge_service_config(
        server_url="http://127.0.0.1:1",
        trust_domain_id="benchmark",
        agent_tooling_image=image,
        sandbox_state_root=directory / "state",
        minimum_workspace_bytes=0,
        disk_high_watermark_percent=99,
        **more,
    )
    database = SecretStr(f"sqlite:///{directory}/hub.sqlite3")
    async with running_hub(HubSettings(port=0, database_url=database)) as hub:
        located = settings.model_copy(update={"server_url": hub.url})
        async with open_bridge(located) as bridge, anyio.create_task_group() as tasks:
            stop = anyio.Event()
            tasks.start_soon(bridge.run, stop)
            yield hub
            stop.set()


async def attempt_ms(
    http: aiohttp.ClientSession, hub: RunningHub, repository: str, commit: str
) -> float:
    """One attempt of ``true``, from the request to the first result."""
    body = {
        "projectId": "p",
        "trustDomainId": "benchmark",
        "policy": "sandbox_preferred",
        "repository": repository,
        "inputCommit": commit,
        "branch": "b",
        "agent": {"provider": "command", "argv": ["true"]},
    }
    began = time.perf_counter()
    async with http.post("/api/v1/sessions", json=body) as answer:
        session_id = (await answer.json())["sessionId"]
    result_ms = 0.0
    with hub.board.feed.subscribe(session_id) as news:
        path = f"/api/v1/sessions/{session_id}"
        async for _ in news:
            async with http.get(path) as answer:
                result = (await answer.json())["result"]
            if result and not result_ms:
                result_ms = (time.perf_counter() - began) * 1000
            if result and result["cleanup"] == "complete":
                assert result["outcome"] == "succeeded", result
                break
    return result_ms


async def measure(host: str, image: str, rounds: int) -> dict[str, Any]:
    """Both repositories, and the floor between every two attempts."""
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": host})
    assert endpoint.socket_path, "only a Unix socket can be measured"
    directory = Path(tempfile.mkdtemp(prefix="forge-bench-"))
    name, request = floor_request(image)
    floor: list[float] = []
    took: dict[str, list[float]] = {"small": [], "workspace": []}
    try:
        commits = {
            "small": make_repository(directory / "small", files=0),
            "workspace": make_repository(directory / "workspace", files=FILES),
        }
        (directory / "state").mkdir(mode=0o700)
        for repository in commits:
            add_repository(directory / "state", repository, directory / repository)
        async with (
            hub_and_bridge(directory, image) as hub,
            aiohttp.ClientSession(hub.url) as http,
        ):
            while not any(r["connected"] for r in await (await http.get("/api/v1/runners")).json()):
                await anyio.sleep(0.05)
            for _ in range(rounds + 1):
                floor.append(raw_cycle_ms(endpoint.socket_path, name, request)["totalMs"])
                for repository, commit in commits.items():
                    took[repository].append(await attempt_ms(http, hub, repository, commit))
    finally:
        shutil.rmtree(directory)
    fastest = min(floor)
    return {
        "rawFastestMs": round(fastest, 1),
        "rawMedianMs": round(statistics.median(floor[1:]), 1),
        **{
            repository: {
                "fastestMs": round(min(times[1:]), 1),
                "medianMs": round(statistics.median(times[1:]), 1),
                "fastestRatio": round(min(times[1:]) / fastest, 2),
                "medianRatio": round(statistics.median(times[1:]) / fastest, 2),
            }
            for repository, times in took.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("image")
    parser.add_argument("--host", default=os.environ.get("DOCKER_HOST", ""))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["DOCKER_HOST"] = options.host
    configure_logging(log_level=LogLevel.ERROR)
    found = anyio.run(measure, options.host, options.image, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    print(f"raw cycle: fastest {found['rawFastestMs']} ms, median {found['rawMedianMs']} ms")
    for repository in ("small", "workspace"):
        one = found[repository]
        print(
            f"{repository:<10} offer → result: median {one['medianMs']} ms "
            f"({one['medianRatio']} x the fastest raw cycle), fastest {one['fastestMs']} ms "
            f"({one['fastestRatio']} x)"
        )


if __name__ == "__main__":
    main()
