"""Builds on an engine whose disk is full, and on one that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from buildx_parts import MIB, Build, from_busybox, opened, remove_image

import processes
from engines import Engine
from forge_core.errors import EngineOutOfDisk, EngineUnreachable, RefusedError
from needs import require_root
from own_daemon import OwnDaemon

DISK_BYTES = 700 * MIB
pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnDaemon]:
    """An engine with a small disk of its own."""
    require_root("run a private Docker daemon on a disk of its own")
    folder = tmp_path_factory.mktemp("small")
    disk, root = folder / "disk", folder / "root"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    root.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(disk)], check=True)
    subprocess.run(["mount", "-o", "loop", str(disk), str(root)], check=True)
    try:
        own = OwnDaemon(root / "bed")
        yield own
        own.remove()
    finally:
        subprocess.run(["umount", str(root)], check=True)


@pytest.fixture
def small_engine(daemon: OwnDaemon) -> Engine:
    return daemon.engine()


@pytest.fixture
def full(daemon: OwnDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nearly nothing is free on the engine's disk."""
    ballast = Path(daemon.environment["FORGE_TESTBED_ROOT"]) / "ballast"
    facts = os.statvfs(ballast.parent)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize - 4 * MIB)
    yield
    ballast.unlink()


@pytest.mark.requirement("B-25")
@pytest.mark.usefixtures("full")
async def test_an_engine_without_space_is_told_from_a_failing_build(
    small_engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    async with opened(small_engine, tmp_path, runner_id) as builder:
        large = Build(small_engine, from_busybox(small_engine, "COPY large /"))
        large.files = {"large": os.urandom(8 * MIB)}
        with pytest.raises(EngineOutOfDisk, match="no space left on device"):
            await large.on(builder)
        # A step's own complaint is its own: what it prints proves nothing.
        step = Build(small_engine, from_busybox(small_engine, "RUN dd if=/dev/zero of=/x"))
        with pytest.raises((RefusedError, EngineOutOfDisk)):
            await step.on(builder)


async def test_only_a_missing_base_is_fetched_with_the_operators_credentials(
    small_engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    calls, helpers = tmp_path / "calls", tmp_path / "helpers"
    helpers.mkdir()
    helper = helpers / "docker-credential-spy"
    helper.write_text(f"#!/bin/sh\ncat >> {calls}\necho credentials not found >&2\nexit 1\n")
    helper.chmod(0o755)
    image = small_engine.tooling_image
    registry = image.partition("/")[0]
    config = json.loads((Path(small_engine.docker_config) / "config.json").read_text())
    config["credHelpers"] = {registry: "spy"}
    (helpers / "config.json").write_text(json.dumps(config))
    remove_image(small_engine, image)
    environment = {
        "DOCKER_CONFIG": str(helpers),
        "PATH": f"{helpers}:{os.environ['PATH']}",
    }
    build = Build(small_engine, f"FROM {image}\nCOPY nonce /tmp/\n", sources=(image,))
    async with opened(small_engine, tmp_path, runner_id, environment=environment) as builder:
        await build.on(builder)
        assert calls.read_text().strip() == registry
        calls.unlink()
        await build.on(builder)
        assert not calls.exists()
    remove_image(small_engine, build.tag)


async def test_an_engine_that_dies_is_no_failing_build(
    daemon: OwnDaemon, small_engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    build = Build(small_engine, from_busybox(small_engine, "RUN sleep 602.25"))
    errors: list[Exception] = []

    async def attempt() -> None:
        try:
            await build.on(builder)
        except (EngineUnreachable, RefusedError) as error:
            errors.append(error)

    try:
        async with opened(small_engine, tmp_path, runner_id) as builder:
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(attempt)
                    while not processes.saying("sleep\x00602.25"):
                        await anyio.lowlevel.checkpoint()
                    daemon.signal(signal.SIGKILL)
            assert [type(error) for error in errors] == [EngineUnreachable], errors
            with pytest.raises(EngineUnreachable):
                await build.on(builder)
    finally:
        daemon.start()
