"""The host of a simulated bridge, with what runs on it without a container (B-53).

Fault model: what a bridge has started ends with it, but for what its agent has helped to stay;
that carries its labels all the same, and is killed by whoever looks for them.  A process may
resist for a while.  A power cut ends all of it, and leaves the directories.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from forge_core.errors import EngineConflict, EngineNotFound, EngineTimedOut, RefusedError
from forge_core.labels import ROLE
from forge_core.ports import EngineResource, ExitStatus, HostProgram, HostResult
from forge_core.wire.codes import ResourceKind

from .engine import EngineWatch, Program, settle
from .engine_door import AttachedStreams, Before
from .faults import Faults
from .world import World

SIGKILL_STATUS = 137


class NoHostCommands:
    """:class:`forge_core.ports.HostCommands`: protocol v1 is off."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        directory: str,
        environment: Mapping[str, str],
        timeout_ms: int,
        max_output_bytes: int,
    ) -> HostResult:
        """Nobody may ask."""
        raise AssertionError(argv)


@dataclass(eq=False)
class HostProcess:
    """A program with everything below it; to what runs in it, a container like any other.

    :ivar stays: whether something of it goes on when it has ended, or its bridge has.
    """

    machine: Machine
    name: str
    labels: Mapping[str, str]
    parent: str
    stays: bool
    status: str = "running"
    exit_code: int = 0
    stuck_until_s: float = 0.0
    program: Program | None = None
    ended: list[Callable[[], None]] = field(default_factory=list)
    outputs: list[Callable[[tuple[int, bytes] | None], None]] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its name: process ids are nobody's for long."""
        return self.name

    @property
    def role(self) -> str:
        """What it is for."""
        return self.labels[ROLE]

    @property
    def process(self) -> str:
        """As the loop knows it."""
        return f"host-{self.name[-8:]}"

    @property
    def resource(self) -> EngineResource:
        """As it is listed."""
        kind = ResourceKind.CONTAINER
        return EngineResource(kind, self.name, self.name, dict(self.labels), "")

    def output(self, channel: int, data: bytes) -> None:
        """Somebody reads it, or nobody."""
        for output in tuple(self.outputs):
            output((channel, data))

    def exit(self, exit_code: int, *, oom_killed: bool = False) -> None:
        """Its first process has ended."""
        assert self.status == "running", self.status
        self.status, self.exit_code = "exited", exit_code
        self.machine.world.note(self.process, f"{self.role} exits with {exit_code}")
        for output in tuple(self.outputs):
            output(None)
        for ended in tuple(self.ended):
            ended()

    def kill(self) -> None:
        """SIGKILL to all of it."""
        self.stays = False
        assert self.program is not None
        self.program.kill()
        if self.status == "running":
            self.exit(SIGKILL_STATUS)


class Machine:
    """What is there whichever bridge lives.

    :ivar directories: by name; ``processes`` likewise, from their start to their removal.
    """

    process = "world"

    def __init__(
        self,
        world: World,
        faults: Faults,
        watch: EngineWatch,
        programs: Callable[[HostProcess], Program],
    ) -> None:
        self.world = world
        self.faults = faults
        self.rng = world.rng("machine")
        self.epoch = 0
        self.broken: list[Callable[[], None]] = []
        self.directories: dict[str, EngineResource] = {}
        self.processes: dict[str, HostProcess] = {}
        self.watch = watch
        self._programs = programs

    def resources(self) -> list[EngineResource]:
        """Everything that carries a mark."""
        living = (p for p in self.processes.values() if p.status == "running" or p.stays)
        return [*self.directories.values(), *(one.resource for one in living)]

    def start(self, name: str, labels: Mapping[str, str], parent: str) -> HostProcess:
        """A program of a bridge."""
        stays = self.rng.random() < self.faults.host_stays
        process = HostProcess(self, name, dict(labels), parent, stays)
        process.program = self._programs(process)
        self.processes[name] = process
        self.world.note(process.process, f"{process.role} starts")
        self.watch.created(process.resource)
        process.program.start()
        return process

    def parent_died(self, parent: str) -> None:
        """What a bridge has started hears of its end (PR_SET_PDEATHSIG, prctl(2))."""
        for process in self.processes.values():
            if process.parent == parent and not process.stays:
                self.world.later("world", self.rng.uniform(0.001, 0.3), process.kill)

    def power_cut(self) -> None:
        """Nothing runs any more."""
        for process in self.processes.values():
            process.kill()
        self.processes.clear()

    def remove(self, name: str, *, is_known: bool) -> None:
        """Kill all that carries the name's mark.

        :param is_known: the caller has started it, so that its end is no news.
        """
        process = self.processes.get(name)
        is_there = process is not None and (process.status == "running" or process.stays)
        if process is None or not (is_there or is_known):
            raise EngineNotFound(f"cannot end {name}: nothing of it runs on this host")
        if is_there and self.rng.random() < self.faults.host_resists:
            process.stuck_until_s = self.world.now_s + self.rng.uniform(5, 60)
        if self.world.now_s < process.stuck_until_s:
            raise RefusedError(f"cannot end {name}: it hides", code="process_resists")
        process.kill()
        del self.processes[name]
        if is_there:
            self.watch.removed(process.resource)


class SimulatedHost:
    """:class:`forge_core.ports.HostRuntime` of one bridge.

    :param parent: its process; ``before`` is told of every effect, and never returns to a dead one.
    """

    def __init__(self, machine: Machine, parent: str, before: Before) -> None:
        self._machine = machine
        self._parent = parent
        self._before = before
        self._own: dict[str, HostProcess] = {}

    def environment(self) -> Mapping[str, str]:
        """A path."""
        return {"PATH": "/bin"}

    def path(self, volume: str) -> str:
        """Below the state root."""
        return f"/host/{volume}"

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> str:
        """See the port."""
        await self._take_time("host create_volume", name, labels)
        if name in self._machine.directories:
            raise EngineConflict(f"cannot make directory {name}: there is one")
        utc = self._machine.world.utc()
        directory = EngineResource(ResourceKind.VOLUME, name, name, dict(labels), utc)
        self._machine.directories[name] = directory
        self._machine.watch.created(directory)
        return name

    async def unpack(self, volume: str, archive: AsyncIterable[bytes]) -> None:
        """See the port."""
        async for _ in archive:
            await self._take_time("host unpack", volume)

    async def create_container(self, name: str, program: HostProgram) -> str:
        """See the port."""
        if name in self._own:
            raise EngineConflict(f"cannot start {name}: it runs")
        await self._take_time("host create_container", name, program)
        self._own[name] = self._machine.start(name, program.labels, self._parent)
        return name

    async def start_container(self, container: str) -> None:
        """It waits for its orders already."""
        self._find(container)

    async def inspect_container(self, container: str) -> Mapping[str, Any]:
        """No more than whether it runs."""
        return {"State": {"Running": self._find(container).status == "running"}}

    async def wait_container(self, container: str, *, timeout_ms: int) -> ExitStatus:
        """See the port."""
        process = self._find(container)
        end = asyncio.get_running_loop().create_future()
        process.ended.append(partial(settle, end, lambda: None))
        with anyio.move_on_after(timeout_ms / 1000):
            if process.status == "running":
                await end
            return ExitStatus(process.exit_code, oom_killed=False)
        raise EngineTimedOut(f"cannot see the end of {container} within {timeout_ms} ms")

    @asynccontextmanager
    async def attach(self, container: str) -> AsyncIterator[AttachedStreams]:
        """See the port."""
        streams = AttachedStreams(self._machine, self._find(container), self._before)
        try:
            yield streams
        finally:
            streams.detach()

    async def remove_container(self, container: str) -> None:
        """See the port."""
        await self._take_time("host remove_container", container)
        self._machine.remove(container, is_known=container in self._own)
        self._own.pop(container, None)

    async def remove_volume(self, name: str) -> None:
        """See the port."""
        await self._take_time("host remove_volume", name)
        directory = self._machine.directories.pop(name, None)
        if directory is None:
            raise EngineNotFound(f"cannot remove directory {name}: there is none")
        self._machine.watch.removed(directory)

    async def remove_network(self, network: str) -> None:
        """There are none on a host."""
        raise EngineNotFound(f"cannot remove network {network}: there are none on a host")

    async def network_endpoints(self, network: str) -> Sequence[str]:
        """Likewise."""
        return ()

    async def disconnect_network(self, network: str, container: str) -> None:
        """Likewise."""
        raise EngineNotFound(f"cannot disconnect {container}: there are no networks on a host")

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        """See the port."""
        await self._take_time("host list_resources")
        return [r for r in self._machine.resources() if labels.items() <= r.labels.items()]

    def _find(self, container: str) -> HostProcess:
        if container not in self._own:
            raise EngineNotFound(f"cannot find {container}: this bridge does not run it")
        return self._own[container]

    async def _take_time(self, what: str, *arguments: Any) -> None:
        await anyio.sleep(self._machine.rng.uniform(0.0005, 0.02))
        await self._before(what, arguments)
