"""The way from one bridge process to the engine: :class:`forge_core.ports.Engine`.

A request that was sent is carried out by the engine, whether or not its sender still waits, or
lives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

import anyio

from forge_core.errors import EngineTimedOut, EngineUnreachable, ForgeError
from forge_core.ports import EngineImage, EngineResource, ExitStatus, PathKind
from forge_core.wire.shapes import EngineFacts, EngineLimits

from .engine import PROCESS, SimulatedEngine, settle
from .points import LOOKS, engine_point

TIMEOUT_S: Final = 32.0
"""As the real door gives up."""

FAST_S: Final = (0.001, 0.03)
SLOW_S: Final = (20.0, 90.0)
STREAM_S: Final = 0.002

T = TypeVar("T")
Before = Callable[[str, tuple[Any, ...]], Awaitable[None]]


class EngineDoor:
    """See the module.

    :param before: called before anything leaves the process; a dead one's never returns.
    :param reach: called with the name of each point at which a request stands.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        before: Before,
        reach: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._engine = engine
        self._reach = reach
        self._before = before
        self._id: str | None = None
        self._rng = engine.rng

    @property
    def engine_id(self) -> str | None:
        """Of the engine that answered first."""
        return self._id

    async def facts(self) -> EngineFacts:
        """Who stands there now."""
        facts = await self._ask("read the engine's facts", self._facts)
        self._id = self._id or facts.id
        return facts

    async def info(self) -> Mapping[str, Any]:
        """No more than its id."""
        return await self._ask("read the engine's info", lambda: {"ID": self._engine.id})

    async def inspect_image(self, reference: str) -> Mapping[str, Any]:
        """See the port."""
        return await self._ask("inspect_image", self._engine.inspect_image, reference)

    async def list_images(self, labels: Mapping[str, str]) -> Sequence[EngineImage]:
        """See the port."""
        return await self._ask("list_images", self._list_images, labels)

    async def tag_image(self, image: str, name: str) -> None:
        """See the port."""
        await self._ask("tag_image", self._engine.tag_image, image, name)

    async def remove_image(self, name: str) -> None:
        """See the port."""
        await self._ask("remove_image", self._engine.remove_image, name)

    async def create_container(self, name: str, request: Mapping[str, Any]) -> str:
        """See the port."""
        return await self._ask("create_container", self._engine.create_container, name, request)

    async def start_container(self, container: str) -> None:
        """See the port."""
        await self._ask("start_container", self._engine.start_container, container)

    async def inspect_container(self, container: str) -> Mapping[str, Any]:
        """See the port."""
        return await self._ask("inspect_container", self._engine.inspect_container, container)

    async def wait_container(self, container: str, *, timeout_ms: int) -> ExitStatus:
        """See the port."""
        engine = self._engine
        with anyio.move_on_after(timeout_ms / 1000):
            while True:
                status = await self._ask("wait_container", engine.exit_status, container)
                if status is not None:
                    return status
                found = engine.container(container, "wait for")
                end = asyncio.get_running_loop().create_future()
                found.ended.append(partial(settle, end, lambda: None))
                engine.broken.append(partial(_fail, end, _broken("wait")))
                await end
        raise EngineTimedOut(f"cannot wait for container {container}: no end in {timeout_ms} ms")

    async def remove_container(self, container: str) -> None:
        """See the port."""
        await self._ask("remove_container", self._engine.remove_container, container)

    @asynccontextmanager
    async def attach(self, container: str) -> AsyncIterator[AttachedStreams]:
        """See the port."""
        found = await self._ask("attach", self._engine.container, container, "attach to")
        streams = AttachedStreams(self._engine, found, self._before)
        try:
            yield streams
        finally:
            streams.detach()

    async def put_archive(self, container: str, path: str, archive: AsyncIterable[bytes]) -> None:
        """See the port."""
        content = b"".join([piece async for piece in archive])
        await self._ask("put_archive", self._engine.put_archive, container, path, content)

    async def path_kind(self, container: str, path: str) -> PathKind | None:
        """See the port."""
        return await self._ask("path_kind", self._engine.path_kind, container, path)

    async def create_volume(
        self, name: str, labels: Mapping[str, str], *, size_bytes: int | None = None
    ) -> str:
        """See the port; there are no quotas here."""
        assert size_bytes is None
        return await self._ask("create_volume", self._engine.create_volume, name, labels)

    async def remove_volume(self, name: str) -> None:
        """See the port."""
        await self._ask("remove_volume", self._engine.remove_volume, name)

    async def create_network(self, name: str, request: Mapping[str, Any]) -> str:
        """See the port."""
        return await self._ask("create_network", self._engine.nets.create, name, request)

    async def inspect_network(self, network: str) -> Mapping[str, Any]:
        """See the port."""
        return await self._ask("inspect_network", self._engine.nets.inspect, network)

    async def connect_network(
        self, network: str, container: str, *, address: str, aliases: Sequence[str] = ()
    ) -> None:
        """See the port."""
        await self._ask("connect_network", self._engine.nets.connect, network, container, address)

    async def remove_network(self, network: str) -> None:
        """See the port."""
        await self._ask("remove_network", self._engine.nets.remove, network)

    async def disconnect_network(self, network: str, container: str) -> None:
        """See the port."""
        nets = self._engine.nets
        await self._ask("disconnect_network", nets.disconnect, network, container)

    async def network_endpoints(self, network: str) -> Sequence[str]:
        """See the port."""
        return await self._ask("network_endpoints", self._engine.nets.endpoints, network)

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        """See the port."""
        return await self._ask("list_resources", self._list, labels)

    def _list_images(self, labels: Mapping[str, str]) -> list[EngineImage]:
        self._require_same_engine()
        images = self._engine.images.values()
        return [image for image in images if labels.items() <= image.labels.items()]

    def _require_same_engine(self) -> None:
        if self._id not in (None, self._engine.id):
            raise EngineUnreachable(f"cannot list anything: {self._engine.id} is not {self._id}")

    def _list(self, labels: Mapping[str, str]) -> list[EngineResource]:
        self._require_same_engine()
        return [r for r in self._engine.resources() if labels.items() <= r.labels.items()]

    def _facts(self) -> EngineFacts:
        return EngineFacts(
            id=self._engine.id,
            version="26.1",
            api_version="1.45",
            rootless=True,
            desktop=False,
            cgroup_version="2",
            storage_driver="none",
            limits=EngineLimits(memory=True, pids=True, cpu=True),
        )

    async def _ask(self, what: str, call: Callable[..., T], *arguments: Any) -> T:
        """Send a request and wait for its answer, for a bounded time."""
        await anyio.lowlevel.checkpoint()
        engine, rng, faults = self._engine, self._rng, self._engine.faults
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        slow, lost = rng.random() < faults.engine_slow, rng.random() < faults.engine_lost
        there_s, back_s = rng.uniform(*(SLOW_S if slow else FAST_S)), rng.uniform(*FAST_S)
        epoch = engine.epoch
        point = self._point(what, arguments)
        self._pass(point, "before")
        await self._before(what, arguments)

        def arrive() -> None:
            if not engine.up or engine.epoch != epoch:
                _fail(answer, _broken(what))
                return
            if lost and rng.random() < 0.5:
                _fail(answer, _broken(what))
                return
            done: asyncio.Future[T] = engine.world.loop.create_future()
            settle(done, lambda: call(*arguments))
            engine.world.later(PROCESS, back_s, leave, done)

        def leave(done: asyncio.Future[T]) -> None:
            if lost or engine.epoch != epoch:
                done.exception()  # seen; nobody is told
                _fail(answer, _broken(what))
            else:
                settle(answer, done.result)

        engine.world.later(PROCESS, there_s, arrive)
        self._pass(point, "sent")
        with anyio.move_on_after(TIMEOUT_S):
            result = await answer
            self._pass(point, "after")
            return result
        engine.world.note("door", f"gives up on {what}")
        raise EngineTimedOut(f"cannot {what}: no answer within {TIMEOUT_S:.0f} s")

    def _point(self, what: str, arguments: tuple[Any, ...]) -> str | None:
        if what in LOOKS:
            return None
        container = self._engine.containers.get(arguments[0])
        return engine_point(what, arguments[0] if container is None else container.name)

    def _pass(self, point: str | None, moment: str) -> None:
        if point is not None:
            self._reach(f"{point}:{moment}")


class AttachedStreams:
    """One attachment (:class:`forge_core.ports.Attachment`): in order, until either end goes."""

    def __init__(
        self,
        engine: Any,
        container: Any,
        before: Before,
    ) -> None:
        """To a container of the engine, or to a process of the machine."""
        self._engine = engine
        self._container = container
        self._before = before
        self._epoch = engine.epoch
        self._pieces: deque[tuple[int, bytes] | None] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._in_s = self._out_s = engine.world.loop.time()
        if container.status == "exited":
            self._pieces.append(None)
        else:
            container.outputs.append(self._on_output)
        engine.broken.append(self._on_break)

    async def send(self, data: bytes) -> None:
        """See the port."""
        await anyio.lowlevel.checkpoint()
        await self._before("send", (self._container, data))
        if self._epoch != self._engine.epoch or self._container.status == "exited":
            raise _broken(f"write to container {self._container.name}")
        self._in_s = self._soon(self._in_s)
        self._later(self._in_s, self._to_program, data)

    async def receive(self) -> tuple[int, bytes] | None:
        """See the port."""
        while not self._pieces:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        await anyio.lowlevel.checkpoint()
        piece = self._pieces[0]
        if piece is not None:
            self._pieces.popleft()
        return piece

    def detach(self) -> None:
        """The container notices nothing."""
        if self._on_output in self._container.outputs:
            self._container.outputs.remove(self._on_output)
        if self._on_break in self._engine.broken:
            self._engine.broken.remove(self._on_break)

    def _to_program(self, data: bytes) -> None:
        program = self._container.program
        if self._container.status != "exited" and program is not None:
            self._engine.world.later(self._container.process, 0, program.stdin, data)

    def _on_output(self, piece: tuple[int, bytes] | None) -> None:
        self._out_s = self._soon(self._out_s)
        self._later(self._out_s, self._push, piece)

    def _on_break(self) -> None:
        self._engine.world.later("world", STREAM_S, self._push, None)

    def _push(self, piece: tuple[int, bytes] | None) -> None:
        self._pieces.append(piece)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _soon(self, earlier_s: float) -> float:
        now_s = self._engine.world.loop.time()
        soon_s: float = max(earlier_s, now_s) + self._engine.rng.uniform(0, STREAM_S)
        return soon_s

    def _later(self, at_s: float, call: Callable[..., None], argument: Any) -> None:
        loop, world = self._engine.world.loop, self._engine.world
        loop.call_at(at_s, call, argument, context=world.context(self._engine.process))


def _broken(what: str) -> EngineUnreachable:
    return EngineUnreachable(f"cannot {what}: the connection to the engine broke")


def _fail(answer: asyncio.Future[Any], error: ForgeError) -> None:
    if not answer.done():
        answer.set_exception(error)
