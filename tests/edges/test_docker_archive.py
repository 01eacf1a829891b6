"""Archives into real containers: flat memory, early refusals, sources that fail."""

from __future__ import annotations

import tarfile
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import pytest

from engines import Engine as BedEngine
from forge_core.errors import EngineNotFound
from forge_core.labels import Owner
from forge_core.sandbox_spec import (
    WORKSPACE_VOLUME,
    ContainerSpec,
    Hardening,
    VolumeMount,
    container_request,
)
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine

MIB = 1 << 20
BIG_BYTES = 128 * MIB
FLAT_BYTES = 8 * MIB

pytestmark = pytest.mark.engine("d26", "d20")


@pytest.fixture
async def door(engine: BedEngine) -> AsyncIterator[DockerEngine]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    async with DockerEngine.connect(endpoint) as door:
        yield door


@pytest.fixture
async def container(door: DockerEngine, engine: BedEngine, runner_id: str) -> AsyncIterator[str]:
    """A created container with a volume at the usual place."""
    owner = Owner(runner_id, "instance", "attempt", 1, "project", "domain")
    volume = await door.create_volume(owner.name("workspace"), owner.labels("workspace"))
    spec = ContainerSpec(
        owner=owner,
        role="agent",
        image=engine.busybox_image,
        argv=("/bin/sh", "-c", f"wc -c < {WORKSPACE_VOLUME}/big"),
        memory_bytes=64 * MIB,
        cpu_millis=1000,
        pids=64,
    )
    spec = replace(spec, mounts=(VolumeMount(volume, WORKSPACE_VOLUME, read_only=False),))
    container = await door.create_container(spec.name, container_request(spec, Hardening()))
    yield container
    await door.remove_container(container)
    await door.remove_volume(volume)


async def big_archive(size_bytes: int) -> AsyncIterator[bytes]:
    entry = tarfile.TarInfo("big")
    entry.size, entry.uid, entry.gid = size_bytes, 1000, 1000
    yield entry.tobuf()
    for _ in range(size_bytes // MIB):
        yield bytes(MIB)
    yield bytes(2 * tarfile.BLOCKSIZE)


async def test_memory_stays_flat_whatever_the_size(door: DockerEngine, container: str) -> None:
    await door.path_kind(container, "/")  # everything is imported and connected once
    tracemalloc.start()
    try:
        await door.put_archive(container, WORKSPACE_VOLUME, big_archive(BIG_BYTES))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < FLAT_BYTES
    async with door.attach(container) as attachment:
        await door.start_container(container)
        assert await attachment.receive() == (1, f"{BIG_BYTES}\n".encode())


async def test_the_container_is_free_until_there_is_something_to_unpack(
    door: DockerEngine, container: str
) -> None:
    """The engine holds it from the request to the last byte: it would not even start it."""
    may_come = anyio.Event()

    async def late() -> AsyncIterator[bytes]:
        await may_come.wait()
        async for piece in big_archive(MIB):
            yield piece

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(door.put_archive, container, WORKSPACE_VOLUME, late())
            await anyio.wait_all_tasks_blocked()
            await door.start_container(container)
            assert await door.inspect_container(container)
            may_come.set()
    assert await door.path_kind(container, f"{WORKSPACE_VOLUME}/big") == "other"


async def test_a_refusal_is_heard_while_an_endless_archive_is_sent(
    door: DockerEngine, container: str
) -> None:
    with anyio.fail_after(20), pytest.raises(EngineNotFound, match="Could not find"):
        await door.put_archive(container, "/nowhere", big_archive(1 << 40))


async def test_a_source_that_fails_fails_the_call_with_its_own_error(
    door: DockerEngine, container: str
) -> None:
    class SourceError(Exception):
        pass

    async def failing() -> AsyncIterator[bytes]:
        yield tarfile.TarInfo("file").tobuf()
        raise SourceError

    with pytest.raises(SourceError):
        await door.put_archive(container, WORKSPACE_VOLUME, failing())
    assert await door.path_kind(container, WORKSPACE_VOLUME)


async def test_a_cancelled_archive_lets_go_at_once(door: DockerEngine, container: str) -> None:
    started = anyio.Event()

    async def endless() -> AsyncIterator[bytes]:
        async for piece in big_archive(1 << 40):
            yield piece
            started.set()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(door.put_archive, container, WORKSPACE_VOLUME, endless())
            await started.wait()
            tasks.cancel_scope.cancel()
