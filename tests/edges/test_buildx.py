"""Builds on real engines: what they give, what they may not take, and how they end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from buildx_parts import (
    LIMITS,
    MIB,
    Build,
    from_busybox,
    opened,
    remove_image,
    try_once_only,
)

import processes
from engines import Engine
from forge_core.errors import EngineOutOfDisk, RefusedError
from forge_core.ports import DiskUsage
from forge_edges.buildx import BuildxBuilder
from forge_edges.disk import FileSystemDisks

pytestmark = pytest.mark.engine("d26", "r26")
ENDS_WITHIN_S = 15.0
BRIDGE = Path(__file__).with_name("buildx_bridge.py")


@pytest.fixture
async def builder(engine: Engine, tmp_path: Path, runner_id: str) -> AsyncIterator[BuildxBuilder]:
    """The engine's own, as it is where no BuildKit image is configured."""
    async with opened(engine, tmp_path, runner_id) as opened_builder:
        yield opened_builder


@pytest.fixture(autouse=True)
def _no_images_left(engine: Engine) -> Iterator[None]:
    yield
    remove_image(engine, "forge-test-build:1")


def marker_of(runner_id: str) -> str:
    """How long a step sleeps, and a number that nobody else has."""
    return f"600.{runner_id.replace('-', '')[4:]}"


async def gone(marker: str) -> None:
    with anyio.fail_after(ENDS_WITHIN_S):
        while processes.saying(marker):
            await anyio.lowlevel.checkpoint()


@pytest.mark.requirement("B-33")
async def test_an_image_is_built_and_named(builder: BuildxBuilder, engine: Engine) -> None:
    steps = ("COPY greeting /greeting", "RUN cat /greeting && ulimit -n && ulimit -d")
    build = Build(engine, from_busybox(engine, *steps), files={"greeting": b"hello there\n"})
    build.options = {"labels": {"a": "1", "b": "x=y"}}
    image_id = await build.on(builder)
    image = engine.api.get("/images/forge-test-build:1/json")
    assert image["Id"] == image_id
    assert image["Config"]["Labels"] == {"a": "1", "b": "x=y"}
    assert "hello there" in build.said
    # What each process of a step has, read back from inside.
    assert re.search(rf" {LIMITS.nofile}$", build.said, re.MULTILINE)
    assert re.search(rf" {LIMITS.memory_bytes // 1024}$", build.said, re.MULTILINE)


async def test_the_engines_builder_says_what_it_lacks(
    builder: BuildxBuilder, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = await builder.facts()
    assert (facts.identity, facts.dedicated) == (f"engine:{engine.version}", False)
    assert not facts.limits_hold
    assert len(facts.shortcomings) == 1
    assert "FORGE_SANDBOX_BUILDKIT_IMAGE" in facts.shortcomings[0]
    try_once_only(monkeypatch)
    assert await builder.facts() == facts


@pytest.mark.requirement("B-32")
@pytest.mark.parametrize("asked", ["", "--network=default "])
async def test_a_step_has_no_network(builder: BuildxBuilder, engine: Engine, asked: str) -> None:
    build = Build(engine, from_busybox(engine, f"RUN {asked}ip -o link"))
    await build.on(builder)
    links = re.findall(r"\d+: (\S+): <", build.said)
    assert "lo" in links
    assert not any(link.startswith("eth") for link in links)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ("RUN --network=host true", "network.host is not allowed"),
        ("RUN --security=insecure true", "unknown flag: security"),
        ("ADD http://127.0.0.1:9/x /x", "denied by policy"),
        ("ADD https://example.org/x /x", "denied by policy"),
        ("ADD https://example.org/x.git /x", "denied by policy"),
        ("ADD git@example.org:x.git /x", "denied by policy"),
        ("COPY --from={tooling} /etc/passwd /x", "denied by policy"),
        ("RUN --mount=from={tooling},target=/x true", "denied by policy"),
        ("FROM {tooling}", "denied by policy"),
        ("FROM busybox", "denied by policy"),
        ("FROM forge/tooling:testbed", "denied by policy"),
    ],
)
@pytest.mark.engine("d26")
@pytest.mark.requirement("B-32")
async def test_the_builder_itself_refuses_what_is_not_listed(
    builder: BuildxBuilder, engine: Engine, step: str, why: str
) -> None:
    step = step.format(tooling=engine.tooling_image)
    build = Build(engine, from_busybox(engine, step, "RUN true"))
    with pytest.raises(RefusedError, match=why) as refused:
        await build.on(builder)
    assert refused.value.code == "image_build_failed"
    assert not engine.api.has_image("forge-test-build:1")


async def test_a_frontend_that_is_not_listed_is_not_run(
    builder: BuildxBuilder, engine: Engine
) -> None:
    syntax = f"# syntax={engine.tooling_image}\n"
    with pytest.raises(RefusedError, match="denied by policy"):
        await Build(engine, syntax + from_busybox(engine)).on(builder)


async def test_what_is_listed_may_be_used(builder: BuildxBuilder, engine: Engine) -> None:
    build = Build(engine, from_busybox(engine, f"COPY --from={engine.tooling_image} /etc /tooling"))
    build.sources = (engine.busybox_image, engine.tooling_image)
    await build.on(builder)


async def test_a_tag_beside_the_digest_changes_nothing(
    builder: BuildxBuilder, engine: Engine
) -> None:
    name, _, digest = engine.busybox_image.partition("@")
    tagged = f"{name}:sometime@{digest}"
    build = Build(engine, f"FROM {tagged}\nCOPY nonce /tmp/\nRUN true\n", sources=(tagged,))
    await build.on(builder)


async def test_one_build_never_finds_the_cache_mount_of_another(
    builder: BuildxBuilder, engine: Engine, runner_id: str
) -> None:
    step = "RUN --mount=type=cache,target=/cache ls /cache; touch /cache/left-by-the-first"
    first = Build(engine, from_busybox(engine, step), tag=f"forge-test-build:1-{runner_id}")
    await first.on(builder)
    again, other = replace(first, output=bytearray()), replace(first, output=bytearray())
    other.tag = f"forge-test-build:2-{runner_id}"
    await again.on(builder)
    await other.on(builder)
    assert re.search(r"\d left-by-the-first", again.said)
    assert not re.search(r"\d left-by-the-first", other.said)
    for build in (first, other):
        remove_image(engine, build.tag)


async def test_every_image_that_is_listed_can_be_taken_from(
    builder: BuildxBuilder, engine: Engine
) -> None:
    tooling = engine.tooling_image
    taken = f"COPY --link --from={tooling} /usr/lib /opt/lib\nRUN test -d /opt/lib && echo taken"
    build = Build(engine, from_busybox(engine, taken), sources=(engine.busybox_image, tooling))
    await build.on(builder)
    assert "taken" in build.said


async def test_a_base_that_nobody_has_is_named(builder: BuildxBuilder, engine: Engine) -> None:
    repository = engine.busybox_image.partition("@")[0]
    missing = f"{repository}@sha256:{'0' * 64}"
    build = Build(engine, f"FROM {missing}\n", sources=(missing,))
    with pytest.raises(RefusedError, match=f"cannot fetch base image {missing}: ") as refused:
        await build.on(builder)
    assert refused.value.code == "image_build_failed"


async def test_nothing_of_the_bridge_reaches_a_step(builder: BuildxBuilder, engine: Engine) -> None:
    build = Build(engine, from_busybox(engine, "RUN env; cat /proc/*/environ; mount"))
    image_id = await build.on(builder)
    assert "PATH=/usr" in build.said
    assert "canary" not in build.said
    assert "DOCKER" not in build.said
    assert "canary" not in str(engine.api.get(f"/images/{image_id}/json"))
    assert "canary" not in str(engine.api.get(f"/images/{image_id}/history"))


async def test_a_step_that_fails_is_said(builder: BuildxBuilder, engine: Engine) -> None:
    build = Build(engine, from_busybox(engine, "RUN echo no space left on device; exit 3"))
    with pytest.raises(RefusedError, match=r"forge-test-build:1: process .* exit code: 3") as said:
        await build.on(builder)
    assert said.value.code == "image_build_failed"


async def test_a_cancelled_build_ends_in_the_builder(
    builder: BuildxBuilder, engine: Engine, runner_id: str
) -> None:
    marker = marker_of(runner_id)
    build = Build(engine, from_busybox(engine, f"RUN trap '' TERM; sleep {marker} & wait"))
    async with anyio.create_task_group() as group:
        group.start_soon(build.on, builder)
        with anyio.fail_after(30):
            while not processes.saying(f"sleep\0{marker}"):
                await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    await gone(marker)


async def test_a_build_ends_with_the_bridge_that_was_killed(
    engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    marker = marker_of(runner_id)
    facts = json.dumps(asdict(engine), default=str)
    arguments = (facts, str(tmp_path), runner_id, f"RUN trap '' TERM; sleep {marker} & wait")
    program = await anyio.open_process([sys.executable, str(BRIDGE), *arguments], stderr=None)
    try:
        with anyio.fail_after(30):
            while not processes.saying(f"sleep\0{marker}"):
                await anyio.lowlevel.checkpoint()
        assert processes.saying("buildx\0build")
        program.kill()
        await gone(marker)
        with anyio.fail_after(ENDS_WITHIN_S):
            while processes.saying(str(tmp_path)):
                await anyio.lowlevel.checkpoint()
    finally:
        if program.returncode is None:
            program.kill()
        await program.aclose()
    async with opened(engine, tmp_path, runner_id) as builder:
        await Build(engine, from_busybox(engine)).on(builder)


async def test_a_build_that_takes_too_long_is_ended(builder: BuildxBuilder, engine: Engine) -> None:
    build = Build(engine, from_busybox(engine, "RUN sleep 601.5"), options={"timeout_ms": 3_000})
    with pytest.raises(RefusedError, match="took longer than 3000 ms") as refused:
        await build.on(builder)
    assert refused.value.code == "image_build_failed"
    await gone("sleep\x00601.5")


async def test_output_without_end_and_without_lines_costs_nothing(
    builder: BuildxBuilder, engine: Engine
) -> None:
    build = Build(engine, from_busybox(engine, "RUN tr '\\0' x < /dev/zero | head -c 200000000"))
    await build.on(builder)
    # The engine cuts what one step may say; whatever it lets through arrives.
    assert 1_000 < build.output_bytes < 16 * MIB


async def test_a_memory_eater_is_stopped(builder: BuildxBuilder, engine: Engine) -> None:
    build = Build(engine, f"FROM {engine.tooling_image}\n")
    build.sources = (engine.tooling_image,)
    build.dockerfile += "RUN python3 -c 'b = bytearray(2 * 10**9); print(len(b))'\n"
    with pytest.raises(RefusedError, match="exit code: 1"):
        await build.on(builder)
    assert "MemoryError" in build.said


async def test_a_build_that_fills_the_disk_is_ended_before_it_is_full(
    engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    disk = FileSystemDisks([Path(engine.api.get("/info")["DockerRootDir"])])
    floor = (await disk.usage()).free_bytes - 400 * MIB
    async with opened(engine, tmp_path, runner_id, disk=disk, minimum_free_bytes=floor) as builder:
        step = (
            "RUN i=0; while dd if=/dev/zero of=/$i bs=1M count=8 2>/dev/null; do i=$((i+1)); done"
        )
        with pytest.raises(EngineOutOfDisk, match=f"{floor} must remain"):
            await Build(engine, from_busybox(engine, step)).on(builder)
        await gone("of=/")
    with anyio.fail_after(ENDS_WITHIN_S):
        while (await disk.usage()).free_bytes < floor + 100 * MIB:
            await anyio.lowlevel.checkpoint()


@pytest.mark.requirement("B-25")
async def test_fetching_a_base_that_fills_the_disk_is_ended_as_well(
    engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    marker = marker_of(runner_id)
    slow = tmp_path / "slow-docker"
    slow.write_text(
        f'#!/bin/sh\n[ $1 != pull ] || exec sleep {marker}\nexec {engine.docker_executable} "$@"\n'
    )
    slow.chmod(0o755)

    class FillingDisk:
        async def usage(self) -> DiskUsage:
            return DiskUsage(0, 100 if processes.saying(marker) else 1000)

    missing = f"{engine.busybox_image.partition('@')[0]}@sha256:{'3' * 64}"
    build = Build(engine, f"FROM {missing}\n", sources=(missing,))
    settings: dict[str, Any] = {"minimum_free_bytes": 500, "docker_executable": str(slow)}
    async with opened(engine, tmp_path, runner_id, disk=FillingDisk(), **settings) as builder:
        with anyio.fail_after(ENDS_WITHIN_S), pytest.raises(EngineOutOfDisk, match="must remain"):
            await build.on(builder)
    await gone(marker)


async def test_the_folder_goes_with_the_builder(
    engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    folder = tmp_path / "builder"
    folder.mkdir()
    (folder / "left-by-an-earlier-life").touch()
    async with opened(engine, tmp_path, runner_id) as builder:
        await Build(engine, from_busybox(engine)).on(builder)
        assert sorted(path.name for path in folder.iterdir()) == ["bin", "config"]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.mark.engine("d20")
async def test_an_engine_that_ignores_policies_builds_nothing(
    builder: BuildxBuilder, engine: Engine
) -> None:
    facts = await builder.facts()
    assert "it ignores source policies" in facts.shortcomings[-1]
    with pytest.raises(RefusedError, match="it ignores source policies"):
        await Build(engine, from_busybox(engine)).on(builder)
    assert not engine.api.has_image("forge-test-build:1")
