"""What the image stage costs beyond the build itself, and what it costs without one.

    python benchmarks/image_stage.py TOOLING BASE [--host unix://…] [--docker docker] [--rounds 8]
        [--json]

``TOOLING`` and ``BASE`` are pinned images that the engine has.  Each round takes, interleaved:
``docker buildx build`` by hand and an attempt, both of a Dockerfile that nobody has built yet
(*cold*: its step runs for a second); both again of the same files, so that every step is in the
cache (*cached*; the contract changes, so that the key does); and an attempt with the same key
(*warm*).  The stage's time is the one that the bridge reports; no gates are configured.
Goals: cold and cached ≤ 1.15 of the build by hand, warm < 50 ms.
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
from pathlib import Path
from typing import Any

import aiohttp
import anyio
from anyio.to_thread import run_sync as in_thread

from attempt_overhead import hub_and_bridge
from forge_bridge.logs import configure_logging
from forge_bridge.repositories import add_repository
from forge_bridge.settings_table import LogLevel
from forge_hub.server import RunningHub

FILES, FILE_BYTES = 200, 4_096
BY_HAND = "forge-benchmark:by-hand"


class Repository:
    """A project, committed anew for every build."""

    def __init__(self, path: Path, base: str) -> None:
        self.path = path
        self._base = base
        (path / ".forge").mkdir(parents=True)
        for n in range(FILES):
            (path / f"{n}.bin").write_bytes(os.urandom(FILE_BYTES))
        self._git("init", "-q")

    def commit(self, number: int, revision: int) -> str:
        """A Dockerfile of its own for each number, a contract of its own for each revision."""
        step = f"RUN n=0; while [ $n -lt 1000000 ]; do n=$((n + 1)); done; echo {number} > /made"
        dockerfile = f"FROM {self._base}\nUSER root\nCOPY . /project\n{step}\n"
        contract = f"# revision {revision}\nversion: 1\nimage:\n  dockerfile: .forge/Dockerfile\n"
        (self.path / ".forge" / "Dockerfile").write_text(dockerfile)
        (self.path / ".forge" / "forge.sandbox.yml").write_text(contract)
        # What is compared has the same context: the contract is not part of it.
        (self.path / ".dockerignore").write_text(".forge\n")
        self._git("add", "-A")
        self._git("commit", "-q", "--allow-empty", "-m", "next")
        return self._git("rev-parse", "HEAD")

    def _git(self, *arguments: str) -> str:
        git = ["git", "-C", str(self.path), "-c", "user.name=b", "-c", "user.email=b@localhost"]
        done = subprocess.run([*git, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()


def by_hand_ms(docker: str, repository: Repository) -> float:
    """The same build as an operator would run it."""
    command = [docker, "buildx", "build", "--network=none", "--load", "--provenance=false"]
    command += ["--file=.forge/Dockerfile", f"--tag={BY_HAND}", "-q", "."]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=repository.path)
    return (time.perf_counter() - began) * 1000


async def stage_ms(http: aiohttp.ClientSession, hub: RunningHub, commit: str) -> float:
    """The image stage of one attempt, as its result tells."""
    body = {
        "projectId": "p",
        "trustDomainId": "benchmark",
        "policy": "sandbox_preferred",
        "repository": "project",
        "inputCommit": commit,
        "approvedCommit": commit,
        "branch": "b",
        "agent": {"provider": "command", "argv": ["true"]},
    }
    async with http.post("/api/v1/sessions", json=body) as answer:
        session_id = (await answer.json())["sessionId"]
    with hub.board.feed.subscribe(session_id) as news:
        async for _ in news:
            async with http.get(f"/api/v1/sessions/{session_id}") as answer:
                result = (await answer.json())["result"]
            if result and result["cleanup"] == "complete":
                assert result["outcome"] == "succeeded", result
                return float(result["timings"]["image"]["durationMs"])
    raise AssertionError("the hub ended")


async def measure(docker: str, tooling: str, base: str, rounds: int) -> dict[str, list[float]]:
    """Every kind, as often as there are rounds; the first round is thrown away."""
    directory = Path(tempfile.mkdtemp(prefix="forge-bench-"))
    took: dict[str, list[float]] = {}
    try:
        (directory / "state").mkdir(mode=0o700)
        repository = Repository(directory / "project", base)
        repository.commit(0, 0)
        add_repository(directory / "state", "project", repository.path)
        async with (
            hub_and_bridge(directory, tooling, docker_executable=docker) as hub,
            aiohttp.ClientSession(hub.url) as http,
        ):
            while not any(r["connected"] for r in await (await http.get("/api/v1/runners")).json()):
                await anyio.sleep(0.05)

            def note(kind: str, ms: float) -> None:
                took.setdefault(kind, []).append(ms)

            async def build() -> float:
                return await in_thread(by_hand_ms, docker, repository)

            for n in range(rounds + 1):
                # Neither finds what the other has built: the Dockerfiles differ by their number.
                await in_thread(repository.commit, 2 * n, 0)
                note("cold by hand", await build())
                note("cached by hand", await build())
                fresh = await in_thread(repository.commit, 2 * n + 1, 0)
                note("cold", await stage_ms(http, hub, fresh))
                again = await in_thread(repository.commit, 2 * n + 1, 1)
                note("cached", await stage_ms(http, hub, again))
                note("warm", await stage_ms(http, hub, again))
    finally:
        subprocess.run([docker, "rmi", BY_HAND], check=False, capture_output=True)
        _remove_images(docker)
        shutil.rmtree(directory)
    return {kind: times[1:] for kind, times in took.items()}


def _remove_images(docker: str) -> None:
    """What the bridge has built here; the trust domain is this benchmark's own."""
    mine = ["--filter=label=dev.forge.managed=image"]
    mine += [
        "--filter=label=dev.forge.trust-domain-id=benchmark",
        "--format={{.Repository}}:{{.Tag}}",
    ]
    listed = subprocess.run([docker, "images", *mine], check=True, capture_output=True, text=True)
    names = listed.stdout.split()
    if names:
        subprocess.run([docker, "rmi", *names], check=True, capture_output=True)


def summary(took: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the ratio to the build by hand."""
    median = {kind: statistics.median(times) for kind, times in took.items()}
    return {
        "coldByHandMs": round(median["cold by hand"], 1),
        "coldMs": round(median["cold"], 1),
        "coldRatio": round(median["cold"] / median["cold by hand"], 2),
        "cachedByHandMs": round(median["cached by hand"], 1),
        "cachedMs": round(median["cached"], 1),
        "cachedRatio": round(median["cached"] / median["cached by hand"], 2),
        "warmMs": round(median["warm"], 1),
        "warmFastestMs": round(min(took["warm"]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("tooling")
    parser.add_argument("base")
    parser.add_argument("--host", default=os.environ.get("DOCKER_HOST", ""))
    parser.add_argument("--docker", default="docker")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["DOCKER_HOST"] = options.host
    configure_logging(log_level=LogLevel.ERROR)
    took = anyio.run(measure, options.docker, options.tooling, options.base, options.rounds)
    found = summary(took)
    if options.json:
        print(json.dumps(found))
        return
    for kind in ("cold", "cached"):
        hand, stage, ratio = (found[f"{kind}{what}"] for what in ("ByHandMs", "Ms", "Ratio"))
        print(f"{kind:<6} by hand {hand} ms, stage {stage} ms: {ratio} x")
    print(f"warm   stage {found['warmMs']} ms, fastest {found['warmFastestMs']} ms")


if __name__ == "__main__":
    main()
