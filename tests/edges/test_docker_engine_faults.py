"""An engine that freezes, dies and comes back, behind the Docker door."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from forge_core.errors import EngineTimedOut, EngineUnreachable
from forge_core.labels import Owner, runner_filter
from forge_core.sandbox_spec import ContainerSpec, Hardening, container_request
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from needs import require_root
from own_daemon import OwnDaemon

TIMEOUT_MS = 800
PATIENCE_S = 30

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnDaemon]:
    require_root("run a private Docker daemon")
    own = OwnDaemon(tmp_path_factory.mktemp("bed"))
    yield own
    own.remove()


@pytest.fixture
async def engine_door(daemon: OwnDaemon) -> AsyncIterator[DockerEngine]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": daemon.host})
    async with DockerEngine.connect(endpoint, timeout_ms=TIMEOUT_MS, max_calls=2) as door:
        await door.facts()
        yield door


@pytest.fixture
def spec(daemon: OwnDaemon, runner_id: str) -> ContainerSpec:
    return ContainerSpec(
        owner=Owner(runner_id, "instance", "attempt", 1, "project", "domain"),
        role="agent",
        image=daemon.image,
        argv=("/bin/sh", "-c", "sleep 600"),
        memory_bytes=64 * 2**20,
        cpu_millis=1000,
        pids=64,
        resolves_localhost=False,
    )


@asynccontextmanager
async def frozen(daemon: OwnDaemon) -> AsyncIterator[None]:
    daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.signal(signal.SIGCONT)


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """The engine tells nobody when it has caught up, so it is asked again and again."""
    with anyio.fail_after(PATIENCE_S):
        while not await condition():
            await anyio.lowlevel.checkpoint()


async def test_a_create_that_timed_out_happens_later_and_is_found_by_its_name(
    daemon: OwnDaemon, engine_door: DockerEngine, spec: ContainerSpec
) -> None:
    listed = runner_filter(spec.owner.runner_id)
    async with frozen(daemon):
        with pytest.raises(EngineTimedOut, match=f"cannot create container {spec.name}: "):
            await engine_door.create_container(spec.name, container_request(spec, Hardening()))

    async def it_is_there() -> bool:
        return [item.name for item in await engine_door.list_resources(listed)] == [spec.name]

    await until(it_is_there)
    await engine_door.remove_container(spec.name)
    assert await engine_door.list_resources(listed) == []


async def test_nothing_waits_for_a_frozen_engine(
    daemon: OwnDaemon, engine_door: DockerEngine, spec: ContainerSpec
) -> None:
    async def attach() -> None:
        async with engine_door.attach("c1"):
            pytest.fail("attached to a frozen engine")

    async def tar() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 20)

    async with frozen(daemon):
        with anyio.fail_after(PATIENCE_S):
            for attempt in (
                engine_door.facts(),
                engine_door.list_resources(runner_filter("r1")),
                engine_door.wait_container("c1", timeout_ms=3_600_000),
                engine_door.path_kind("c1", "/"),
                engine_door.put_archive("c1", "/", tar()),
                attach(),
            ):
                with pytest.raises(EngineTimedOut):
                    await attempt


async def test_cancelled_calls_end_at_once_and_do_not_pile_up_threads(
    daemon: OwnDaemon, engine_door: DockerEngine
) -> None:
    refused = 0
    async with frozen(daemon):
        for _ in range(6):
            with anyio.move_on_after(TIMEOUT_MS / 10_000) as scope:
                try:
                    await engine_door.info()
                except EngineTimedOut as error:
                    refused += "earlier calls still wait" in str(error)
            assert scope.cancelled_caught or refused
    assert refused == 2

    async def it_answers() -> bool:
        try:
            return bool(await engine_door.info())
        except EngineTimedOut:
            return False

    await until(it_answers)


@pytest.mark.requirement("B-72")
async def test_a_killed_engine_ends_every_wait_and_the_door_works_again_after_its_restart(
    daemon: OwnDaemon, engine_door: DockerEngine, spec: ContainerSpec
) -> None:
    container = await engine_door.create_container(spec.name, container_request(spec, Hardening()))
    ended: dict[str, object] = {}
    async with engine_door.attach(container) as attachment:
        await engine_door.start_container(container)
        process_id = (await engine_door.inspect_container(container))["State"]["Pid"]

        async def wait() -> None:
            try:
                await engine_door.wait_container(container, timeout_ms=3_600_000)
            except EngineUnreachable as error:
                ended["wait"] = error

        async def receive() -> None:
            try:
                ended["receive"] = await attachment.receive()
            except EngineUnreachable as error:
                ended["receive"] = error

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                tasks.start_soon(receive)
                await engine_door.inspect_container(container)
                daemon.signal(signal.SIGKILL)
    assert isinstance(ended["wait"], EngineUnreachable)
    assert ended["receive"] is None or isinstance(ended["receive"], EngineUnreachable)
    with pytest.raises(EngineUnreachable, match="cannot list containers"):
        await engine_door.list_resources(runner_filter(spec.owner.runner_id))
    os.kill(process_id, signal.SIGKILL)  # the container has outlived its engine
    await anyio.to_thread.run_sync(daemon.start)
    status = await engine_door.wait_container(container, timeout_ms=PATIENCE_S * 1000)
    assert status.exit_code in {137, 255, 0}  # what engines make of an exit they did not see
    await engine_door.remove_container(container)
