"""The dedicated builder, with a real BuildKit: its limits hold, and hostile builds stay in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import pytest
from buildx_parts import (
    LIMITS,
    MIB,
    TRUST_DOMAIN,
    Build,
    environ,
    from_busybox,
    opened,
    remove_image,
    try_once_only,
)

import processes
from engines import Engine, describe, run_testbed
from forge_core.errors import RefusedError
from forge_core.labels import BUILDER, Owner, build_cache, runner_filter
from forge_core.reap import Claim, claim_of
from forge_edges.buildx import BuildxBuilder
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine

pytestmark = [pytest.mark.slow, pytest.mark.engine("d26", "r26"), pytest.mark.timeout(900)]
ENDS_WITHIN_S = 15.0
BOMB = b"""
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.1)
"""
BRIDGE = Path(__file__).with_name("buildx_bridge.py")


@pytest.fixture(scope="module")
def buildkit(engine: Engine) -> str:
    """BuildKit in the engine, by digest; compiled the first time."""
    done = run_testbed("up", "--parts", f"buildkit,{engine.name}")
    assert done.returncode == 0, done.stderr
    return str(describe()["images"]["buildkit"]["reference"])


@pytest.fixture(autouse=True)
def _nothing_left(engine: Engine, runner_id: str) -> Iterator[None]:
    yield
    remove_image(engine, "forge-test-build:1")
    volume, _ = build_cache(runner_id, TRUST_DOMAIN)
    engine.api.call("DELETE", f"/volumes/{volume}", {"force": "1"})


class Dedicated:
    """A builder of its own for one test."""

    def __init__(self, engine: Engine, folder: Path, runner_id: str, image: str) -> None:
        self.engine = engine
        self.name = Owner.of_runner(BUILDER, runner_id, "instance-1", TRUST_DOMAIN).name("builder")
        self._arguments = (engine, folder, runner_id)
        self._image = image

    def opened(self, **config: Any) -> AbstractAsyncContextManager[BuildxBuilder]:
        return opened(*self._arguments, **{"buildkit_image": self._image, **config})

    def build(self, *steps: str, **more: Any) -> Build:
        return Build(self.engine, from_busybox(self.engine, *steps), **more)

    def inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.api.get(f"/containers/{self.name}/json")
        return found

    def inside(self, *argv: str) -> str:
        command = [self.engine.docker_executable, "exec", self.name, *argv]
        done = subprocess.run(
            command, env=environ(self.engine), check=True, capture_output=True, text=True
        )
        return done.stdout

    @property
    def exists(self) -> bool:
        return self.engine.api.call("GET", f"/containers/{self.name}/json")[0] == 200


@pytest.fixture
def dedicated(engine: Engine, tmp_path: Path, runner_id: str, buildkit: str) -> Dedicated:
    return Dedicated(engine, tmp_path, runner_id, buildkit)


async def seen(marker: str) -> int:
    with anyio.fail_after(30):
        while not (found := processes.saying(f"sleep\0{marker}")):
            await anyio.lowlevel.checkpoint()
    return found[0]


async def gone(marker: str) -> None:
    with anyio.fail_after(ENDS_WITHIN_S):
        while processes.saying(marker):
            await anyio.lowlevel.checkpoint()


def marker_of(runner_id: str) -> str:
    return f"600.{runner_id.replace('-', '')[4:]}"


def cgroups(process_id: int) -> dict[str, str]:
    """Controller to path, as the host sees it."""
    lines = Path(f"/proc/{process_id}/cgroup").read_text().splitlines()
    return {line.split(":")[1]: line.split(":", 2)[2] for line in lines}


@pytest.mark.requirement("B-33")
async def test_limits_are_what_was_read_back(
    dedicated: Dedicated, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with dedicated.opened() as builder:
        facts = await builder.facts()
        assert facts.dedicated
        assert facts.identity == f"buildkit:{dedicated.inspect()['Image']}"
        assert facts.limits_hold is engine.limits_enforced
        if engine.limits_enforced:
            assert facts.shortcomings == ()
        else:
            assert any(text.startswith("memory: ") for text in facts.shortcomings)
        try_once_only(monkeypatch)
        assert await builder.facts() == facts
    assert not dedicated.exists


@pytest.mark.requirement("B-32", "B-33")
async def test_a_build_in_it_is_bounded_and_alone(dedicated: Dedicated, engine: Engine) -> None:
    build = dedicated.build("RUN env; ulimit -n; ip -o link; cat /proc/self/status", files={})
    build.options = {"labels": {"a": "1"}}
    async with dedicated.opened() as builder:
        image_id = await build.on(builder)
    image = engine.api.get("/images/forge-test-build:1/json")
    assert (image["Id"], image["Config"]["Labels"]) == (image_id, {"a": "1"})
    assert re.search(rf" {LIMITS.nofile}$", build.said, re.MULTILINE)
    assert re.findall(r"\d+: (\S+): <", build.said) == ["lo"]
    assert re.search(r"Seccomp:\s+2", build.said)
    assert "canary" not in build.said


async def test_images_of_the_engine_reach_it_without_a_network(
    dedicated: Dedicated, engine: Engine
) -> None:
    async with dedicated.opened() as builder:
        agent = Build(
            engine,
            f"FROM {engine.busybox_image}\n"
            f"COPY --link --from={engine.tooling_image} /usr/lib/git-core /opt/git\n"
            f"RUN --mount=from={engine.tooling_image},target=/t cat /t/etc/passwd\n",
            sources=(engine.busybox_image, engine.tooling_image),
        )
        await agent.on(builder)
        name, _, digest = engine.busybox_image.partition("@")
        tagged = f"{name}:sometime@{digest}"
        await Build(engine, f"FROM {tagged}\nRUN true\n", sources=(tagged,)).on(builder)
    assert "agent:x:1000" in agent.said


@pytest.mark.requirement("B-32")
@pytest.mark.parametrize(
    ("step", "why"),
    [
        ("RUN --network=host true", "network.host is not allowed"),
        ("RUN --security=insecure true", "(unknown flag: security|insecure is not allowed)"),
        ("ADD http://127.0.0.1:9/x /x", "denied by policy"),
        ("COPY --from={tooling} /etc/passwd /x", "denied by policy"),
        ("FROM busybox", "denied by policy"),
    ],
)
async def test_it_refuses_what_is_not_listed(
    dedicated: Dedicated, engine: Engine, step: str, why: str
) -> None:
    build = dedicated.build(step.format(tooling=engine.tooling_image), "RUN true")
    async with dedicated.opened() as builder:
        with pytest.raises(RefusedError, match=why):
            await build.on(builder)


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-33")
async def test_every_step_is_in_the_builders_own_cgroup(
    dedicated: Dedicated, runner_id: str
) -> None:
    marker = marker_of(runner_id)
    async with dedicated.opened() as builder, anyio.create_task_group() as group:
        await builder.facts()
        group.start_soon(dedicated.build(f"RUN sleep {marker}").on, builder)
        step = cgroups(await seen(marker))
        container = cgroups(dedicated.inspect()["State"]["Pid"])
        for controller in ("memory", "cpu", "pids"):
            assert step[controller].startswith(f"{container[controller]}/"), controller
        group.cancel_scope.cancel()
    await gone(marker)


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-33")
async def test_a_fork_bomb_stays_within_the_builder(
    dedicated: Dedicated, engine: Engine, runner_id: str
) -> None:
    marker = marker_of(runner_id)
    bomb = Build(
        engine,
        f"FROM {engine.tooling_image}\nCOPY bomb.py /\nRUN python3 /bomb.py {marker}\n",
        files={"bomb.py": BOMB},
        sources=(engine.tooling_image,),
        options={"timeout_ms": 8_000},
    )
    most = 0
    async with dedicated.opened() as builder:
        await builder.facts()
        failed = anyio.Event()

        async def attempt() -> None:
            with pytest.raises(RefusedError) as refused:
                await bomb.on(builder)
            assert refused.value.code == "image_build_failed"
            failed.set()

        async with anyio.create_task_group() as group:
            group.start_soon(attempt)
            while not failed.is_set():
                most = max(most, len(processes.saying(f"/bomb.py\0{marker}")))
                await anyio.sleep(0.1)
        await gone(marker)
        assert 50 < most <= LIMITS.pids
        # Whether BuildKit itself survived or not, the next build finds a builder.
        await dedicated.build("RUN true").on(builder)


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-33")
async def test_a_memory_eater_is_killed_and_the_builder_lives(
    dedicated: Dedicated, engine: Engine
) -> None:
    eater = "import os\nparts = []\nwhile True: parts.append(os.urandom(1 << 20))"
    build = Build(engine, f"FROM {engine.tooling_image}\nCOPY eat.py /\nRUN python3 /eat.py\n")
    build.files = {"eat.py": eater.encode()}
    build.sources = (engine.tooling_image,)
    async with dedicated.opened() as builder:
        await builder.facts()
        started_at = dedicated.inspect()["State"]["StartedAt"]
        with pytest.raises(RefusedError, match=r"exit code: 137|cannot allocate memory"):
            await build.on(builder)
        await dedicated.build("RUN true").on(builder)
        assert dedicated.inspect()["State"]["StartedAt"] == started_at


async def test_cancelling_ends_the_step(dedicated: Dedicated, runner_id: str) -> None:
    marker = marker_of(runner_id)
    async with dedicated.opened() as builder:
        async with anyio.create_task_group() as group:
            step = f"RUN trap '' TERM; sleep {marker} & wait"
            group.start_soon(dedicated.build(step).on, builder)
            await seen(marker)
            group.cancel_scope.cancel()
        await gone(marker)
        await dedicated.build("RUN true").on(builder)


async def test_a_builder_that_dies_is_made_anew(dedicated: Dedicated, runner_id: str) -> None:
    marker = marker_of(runner_id)
    async with dedicated.opened() as builder:
        async with anyio.create_task_group() as group:

            async def attempt() -> None:
                with pytest.raises(RefusedError, match="the builder ended while it built"):
                    await dedicated.build(f"RUN sleep {marker}").on(builder)

            group.start_soon(attempt)
            await seen(marker)
            dedicated.engine.api.call("POST", f"/containers/{dedicated.name}/kill")
        await gone(marker)
        await dedicated.build("RUN true").on(builder)


@pytest.mark.requirement("B-82")
async def test_the_builder_of_a_killed_bridge_ends_its_build_and_is_found(
    dedicated: Dedicated, engine: Engine, tmp_path: Path, runner_id: str, buildkit: str
) -> None:
    marker = marker_of(runner_id)
    facts = json.dumps(asdict(engine), default=str)
    config = json.dumps({"buildkit_image": buildkit})
    step = f"RUN trap '' TERM; sleep {marker} & wait"
    arguments = (facts, str(tmp_path), runner_id, step, config)
    program = await anyio.open_process([sys.executable, str(BRIDGE), *arguments], stderr=None)
    try:
        await seen(marker)
        program.kill()
        await gone(marker)
        assert dedicated.exists
        endpoint = resolve_endpoint(None, environ(engine))
        async with DockerEngine.connect(endpoint) as door:
            for resource in await door.list_resources(runner_filter(runner_id)):
                claim, _ = claim_of(
                    resource,
                    runner_id=runner_id,
                    runner_instance_id="instance-2",
                    reservations={},
                )
                cache = resource.name.startswith("forge-build-cache-")
                assert claim is (Claim.FOREIGN if cache else Claim.OLD_INSTANCE)
            await door.remove_container(dedicated.name)
    finally:
        if program.returncode is None:
            program.kill()
        await program.aclose()


@pytest.mark.requirement("B-34")
async def test_the_cache_outlives_a_builder_and_is_given_back(
    dedicated: Dedicated, engine: Engine
) -> None:
    step = "RUN head -c 20000000 /dev/urandom > /cached"
    build = Build(engine, f"FROM {engine.busybox_image}\nUSER 0\n{step}\n")
    async with dedicated.opened() as builder:
        first = await build.on(builder)
    async with dedicated.opened() as builder:
        assert await build.on(builder) == first
        assert "CACHED" in build.said

        def cached_bytes() -> int:
            records = json.loads(dedicated.inside("buildctl", "du", "--format={{json .}}"))
            return sum(int(record.get("size", 0)) for record in records)

        before = cached_bytes()
        assert before > 20 * 10**6
        await builder.prune_cache(keep_bytes=10 * MIB, free_bytes=0)
        assert cached_bytes() <= 10 * MIB
        assert engine.api.has_image("forge-test-build:1")


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-32")
async def test_a_step_has_a_network_only_where_both_say_so(dedicated: Dedicated) -> None:
    async with dedicated.opened(network=True) as builder:
        without = dedicated.build("RUN ip -o link")
        await without.on(builder)
        assert re.findall(r"\d+: (\S+): <", without.said) == ["lo"]
        with_network = dedicated.build("RUN ip -o link", options={"network": True})
        await with_network.on(builder)
        assert "eth0" in with_network.said


async def test_a_missing_image_is_named_with_the_remedy(
    dedicated: Dedicated, engine: Engine
) -> None:
    missing = f"127.0.0.1:1/buildkit@sha256:{'0' * 64}"
    async with dedicated.opened(buildkit_image=missing) as builder:
        with pytest.raises(RefusedError, match=f"docker pull {missing}") as refused:
            await builder.facts()
    assert refused.value.code == "builder_unusable"
    async with dedicated.opened(buildkit_image=engine.busybox_image) as builder:
        with pytest.raises(RefusedError) as refused:
            await builder.facts()
    assert refused.value.code in {"builder_unusable", "engine_refused"}
    assert not dedicated.exists
