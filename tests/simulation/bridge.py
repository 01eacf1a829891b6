"""The bridge under test: the production flows, stages and performer over simulated ports.

Each life is a process of its own to the loop.  It ends when it is killed, when it stops in
order, or when it cannot start; the supervisor of services starts the next one after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import anyio

from forge_bridge.assembly import BridgeService, Ports, assemble, until_reachable
from forge_bridge.flows.replay import Replay
from forge_bridge.images.gates import Gates
from forge_bridge.runner import Identity, Runner
from forge_core.errors import ForgeError

from .builds import BuilderDoor, SimulatedBuilds, gate_tools
from .disk import SimulatedDisk, SimulatedLedgers, SimulatedMessages, WatchedDisk
from .engine import SimulatedEngine
from .engine_door import EngineDoor
from .git import SimulatedGit
from .host import Machine, NoHostCommands, SimulatedHost
from .images import ATTESTATIONS, LOGS, SimulatedEvidence, SimulatedIndex
from .network import ConnectionFactory, Network
from .points import (
    BUILDER_POINTS,
    EVIDENCE_POINTS,
    GIT_POINTS,
    HOST_POINTS,
    LEDGER_POINTS,
    MESSAGE_POINTS,
    RECORD_POINTS,
    Surrounded,
)
from .remote import URL
from .setup import SANDBOX, THIS_RUNNER, Setup
from .world import SimulatedClock, World

OPERATOR_S: Final = 30.0
"""How often somebody looks after the bridge."""


class OneRepository:
    """:class:`forge_bridge.runner.Repositories`."""

    async def refresh(self) -> None:
        """Nothing changes."""

    def paths(self) -> Mapping[str, str]:
        """The one that the hub names."""
        return {"sample": "/sample"}

    def remotes(self) -> Mapping[str, str]:
        """Where its results go."""
        return {"sample": URL}


class Life:
    """One process of the bridge, from its start to its end.

    :ivar service: once it is assembled.
    :ivar ended: whether nothing of it runs any more, and ``failure`` why, if it was no kill.
    """

    def __init__(self, host: BridgeHost, number: int) -> None:
        self.process = f"bridge-{number}"
        self.instance_id = ""
        self.engine = EngineDoor(host.engine, self._before, self._reach)
        self.service: BridgeService | None = None
        self.ended = False
        self.failure: BaseException | None = None
        self._host = host
        self._stop: anyio.Event | None = None
        world = host.world
        world.context(self.process).run(self._begin)

    @property
    def runner(self) -> Runner | None:
        """The state that the flows share, while it lives."""
        return None if self.service is None or self.ended else self.service.runner

    @property
    def unacknowledged(self) -> int:
        """How many of its messages the hub has not acknowledged."""
        if self.service is None:
            return 0
        outbox = self.service.runner.outbox
        assert isinstance(outbox, Replay)
        return outbox.pending

    def stop(self) -> None:
        """SIGTERM."""
        if self._stop is not None:
            self._host.world.later(self.process, 0, self._stop.set)

    def _begin(self) -> None:
        task = self._host.world.loop.create_task(self._run())
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self.ended = True
        self.failure = None if task.cancelled() else task.exception()
        self._host.on_end(self)

    async def _run(self) -> None:
        host = self._host
        clock = SimulatedClock(host.world, self.process)
        self.instance_id = clock.new_id()
        self._stop = anyio.Event()
        identity = Identity(THIS_RUNNER, self.instance_id, "domain", "0", "host", "simulated")
        await until_reachable(self.engine, clock)
        ports = Ports(
            clock=clock,
            engine=self.engine,
            git=Surrounded(host.git, self._reach, GIT_POINTS),
            host=Surrounded(
                SimulatedHost(host.machine, self.process, self._before), self._reach, HOST_POINTS
            ),
            host_commands=NoHostCommands(),
            disk=WatchedDisk(host.disk),
            messages=Surrounded(SimulatedMessages(host.disk), self._reach, MESSAGE_POINTS),
            ledgers=Surrounded(SimulatedLedgers(host.disk, clock.utc), self._reach, LEDGER_POINTS),
            repositories=OneRepository(),
            connections=ConnectionFactory(host.network, self.process, self._sent, self._reach),
            builder=Surrounded(
                BuilderDoor(host.builds, self.process, self._before), self._reach, BUILDER_POINTS
            ),
            gates=Gates(
                self.engine,
                gate_tools(host.builds),
                enforced=True,
                trust_domain_id=identity.trust_domain_id,
                runner_id=identity.runner_id,
                utc=clock.utc,
            ),
            images=Surrounded(SimulatedIndex(host.disk), self._reach, RECORD_POINTS),
            build_logs=self._evidence(LOGS, clock),
            attestations=self._evidence(ATTESTATIONS, clock),
        )
        async with anyio.create_task_group() as tasks:
            self.service = await assemble(
                host.setup.settings,
                identity,
                ports,
                SANDBOX,
                host.setup.capabilities,
                tasks,
                self._reach,
            )
            host.setup.show(self.service.runner)
            await self.service.run(self._stop)
            tasks.cancel_scope.cancel()

    def _evidence(self, directory: str, clock: SimulatedClock) -> Surrounded:
        store = SimulatedEvidence(self._host.disk, directory, lambda: clock.unix_seconds() * 1000)
        return Surrounded(store, self._reach, EVIDENCE_POINTS)

    async def _before(self, what: str, arguments: tuple[Any, ...]) -> None:
        await self._never_if_dead()
        self._host.before_effect(self, what, arguments)

    async def _sent(self, method: str, payload: Mapping[str, object]) -> None:
        await self._never_if_dead()
        self._host.before_send(self, method, payload)

    async def _never_if_dead(self) -> None:
        """What was killed in the middle of this step goes no further."""
        if self._host.world.processes.is_dead(self.process):
            await asyncio.get_running_loop().create_future()

    def _reach(self, point: str) -> None:
        self._host.on_point(point)


class BridgeHost:
    """The machine of the runner: its disk, its engine, and one life of the bridge at a time.

    :param before_effect: told what a life asks the engine for; ``before_send``: what it sends.
    :ivar on_point: called at every fault point of the performer.
    """

    def __init__(
        self,
        world: World,
        disk: SimulatedDisk,
        engine: SimulatedEngine,
        git: SimulatedGit,
        network: Network,
        setup: Setup,
        machine: Machine,
        builds: SimulatedBuilds,
        before_effect: Callable[[Life, str, tuple[Any, ...]], None],
        before_send: Callable[[Life, str, Mapping[str, object]], None],
    ) -> None:
        self.world = world
        self.disk = disk
        self.engine = engine
        self.git = git
        self.network = network
        self.setup = setup
        self.machine = machine
        self.builds = builds
        self.before_effect = before_effect
        self.before_send = before_send
        self.lives: list[Life] = []
        self.on_point: Callable[[str], None] = lambda _point: None
        disk.on_written = lambda: self.on_point("record:written")
        self._rng = world.rng("host")
        world.later("world", OPERATOR_S, self._operate)

    @property
    def life(self) -> Life | None:
        """The one that lives now."""
        return self.lives[-1] if self.lives and not self.lives[-1].ended else None

    def boot(self) -> None:
        """Start the bridge, if none runs."""
        if self.life is None:
            self.world.note("host", "starts the bridge")
            self.lives.append(Life(self, len(self.lives) + 1))

    def _operate(self) -> None:
        """Restart a bridge that began with an engine which does not come back."""
        self.world.later("world", OPERATOR_S, self._operate)
        life = self.life
        if life is None or self.engine.is_replaced:
            return
        if life.engine.engine_id not in (None, self.engine.id):
            self.kill(power_cut=False)

    def kill(self, *, power_cut: bool) -> None:
        """SIGKILL, or the end of the whole machine."""
        life = self.life
        if life is not None:
            life.ended = True
            self.world.processes.kill(life.process)
        self.world.note("host", "power cut" if power_cut else "kill -9 of the bridge")
        if life is not None:
            self.machine.parent_died(life.process)
        if power_cut:
            self.machine.power_cut()
            self.disk.power_cut()
            self.engine.die()
            self.world.later("world", 8.0, lambda: self.engine.restart(keeps_containers=False))
        if life is not None:
            silence_s = 30.0 if power_cut else 0.01
            self.world.later("world", silence_s, self.network.vanish, life.process)
        self._boot_later()

    def on_end(self, life: Life) -> None:
        """A life has ended by itself: in order, or because it could not go on."""
        self.world.note("host", f"{life.process} has ended: {life.failure!r}")
        self.machine.parent_died(life.process)
        self.network.vanish(life.process)
        leaves = _leaves(life.failure)
        if any(not isinstance(error, ForgeError) for error in leaves) or (
            leaves and life.service is not None
        ):
            self.world.failure = life.failure
            self.world.violate("no surprise", f"{life.process} has died of {leaves!r}")
        self._boot_later()

    def _boot_later(self) -> None:
        self.world.later("world", self._rng.uniform(0.5, 20.0), self.boot)


def _leaves(error: BaseException | None) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [] if error is None else [error]
