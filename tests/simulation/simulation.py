"""One seed, from the first step to the verdict."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import structlog

from forge_bridge.host.place import AGENT as HOST_AGENT
from forge_core.labels import Owner
from forge_core.ports import EngineResource
from forge_core.subnet_pool import SUBNET_PREFIX
from forge_core.wire.codes import ResourceKind

from .bridge import BridgeHost
from .builds import BUILT, COPIED, PROJECTS, REFERRED, UNBUILT, SimulatedBuilds
from .checkers import Checkers
from .containers import Helper, Pid1
from .disk import SimulatedDisk
from .egress import EGRESS_PROGRAMS, PROXY_IMAGE
from .engine import Container, Program, SimulatedEngine, Thing
from .faults import Faults
from .git import SimulatedGit
from .host import HostProcess, Machine
from .hub import SimulatedHub
from .loop import NothingLeftError, virtual_loop
from .nemesis import Nemesis
from .network import Network
from .remote import SimulatedRemote
from .services import SERVICE_ROLES, SERVICES, TOOLING_PROGRAMS, ServicePid1
from .setup import IMAGE, THIS_RUNNER, Setup
from .work import COMMIT, Dispatch, planned, use_host
from .world import World

BESIDE: Final[dict[str, Callable[[World, Faults, Container], Program]]] = {
    **EGRESS_PROGRAMS,
    **TOOLING_PROGRAMS,
}
IMAGES: Final = frozenset({IMAGE, PROXY_IMAGE, *(s.image_id for s in SERVICES.values())})
HOST_SHARE: Final = {False: 0.15, True: 0.6}
"""Of the attempts may run on the host, if its operator says so, too."""

APPROVED: Final = (BUILT, BUILT, COPIED, REFERRED, UNBUILT)
BUILDS_SHARE: Final = 0.6
"""Of the seeds have projects with contracts."""

MAX_STEPS: Final = 2_000_000
TROUBLE_S: Final = 240.0
"""How long things go wrong."""

SETTLE_S: Final = 3_600.0
"""Within which everything must come to rest afterwards."""

CHECK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one seed.

    :ivar tail: the end of the trace; ``digest`` is of all of it.
    :ivar ends: how the hub's dispatches ended, and how often.
    :ivar lives: of the bridge.
    """

    seed: int
    steps: int
    virtual_s: float
    violations: tuple[str, ...]
    tail: tuple[str, ...]
    digest: str
    ends: Mapping[str, int]
    lives: int


class Simulation:
    """All parts of one seed's world, wired together."""

    def __init__(self, world: World, *, faults: bool, max_steps: int) -> None:
        self.world = world
        self._max_steps = max_steps
        self.faults_are_on = True
        self._restarts_asked = False
        self.faults = Faults()
        if faults:
            self.faults = Faults.of(world.rng("faults"), world.rng("faults of builds"))
        self.engine_may_be_late = self.faults.engine_slow > 0
        self.checkers = Checkers(world)
        self.checkers.simulation = self
        self.hub = SimulatedHub(world, self.checkers.secret, lambda: self.remote.branches)
        self.network = Network(world, self.faults, self.hub, self.checkers.delivered)
        self.disk = SimulatedDisk(world, self.faults, self.checkers)
        self.remote = SimulatedRemote(world, self.faults)
        self.remote.on_move = self.checkers.moves
        self.git = SimulatedGit(world, self.faults, self.remote)
        self.git.on_push = self.checkers.before_push
        self.engine = SimulatedEngine(world, self.faults, self.checkers, self._program, IMAGES)
        self.git.commits = PROJECTS
        self.builds = SimulatedBuilds(world, self.faults, self.engine)
        self.builds.on_build = self.checkers.images.build_begins
        self.machine = Machine(world, self.faults, self.checkers, self._host_program)
        walls = world.rng("setup")
        login = self.checkers.secret(f"canary-{walls.getrandbits(96):x}")
        self.setup = Setup.of(walls, login)
        self.foreign = tuple(self._foreign())
        self.host = BridgeHost(
            world,
            self.disk,
            self.engine,
            self.git,
            self.network,
            self.setup,
            self.machine,
            self.builds,
            self.checkers.before_effect,
            self.checkers.before_send,
        )
        self._plan_work()
        self.nemesis = Nemesis(self) if faults else None
        world.note("world", f"faults: {self.faults}")
        if self.nemesis is not None:
            world.note("world", f"nemesis: {', '.join(self.nemesis.kinds)}")
        world.processes.after_step = self._after_step
        world.later("world", 0, self.host.boot)
        world.later("world", CHECK_S, self._check)
        world.later("world", TROUBLE_S, self._stop_trouble)

    def _after_step(self) -> None:
        self.checkers.after_step()
        if self.world.processes.steps >= self._max_steps:
            self.world.violate("progress", f"not at rest after {self._max_steps} steps")

    def _check(self) -> None:
        self.world.later("world", CHECK_S, self._check)
        self.checkers.every_second()
        if self.faults_are_on:
            if self.nemesis is None and all(attempt.done for attempt in self.hub.attempts):
                self._stop_trouble()
            return
        if not self._restarts_asked and self.checkers.is_quiet():
            # What could not be forgotten on a full disk is forgotten by the next life.
            self._restarts_asked = True
            self.world.note("world", "one more start")
            assert self.host.life is not None
            self.host.life.stop()
        elif (self._restarts_asked and self.checkers.is_quiet(on_disk_too=True)) or (
            self.world.now_s > TROUBLE_S + SETTLE_S
        ):
            self.checkers.at_the_end()
            self.world.note("world", "at rest")
            self.world.loop.stop()

    def _stop_trouble(self) -> None:
        if not self.faults_are_on:
            return
        self.world.note("world", "from here on nothing goes wrong")
        self.faults_are_on = False
        self.faults.stop()
        if self.nemesis is not None:
            self.nemesis.stop()
        self.hub.working = False

    def _plan_work(self) -> None:
        rng, walls = self.world.rng("work"), self.world.rng("walls")
        projects = self.world.rng("projects")
        approved = APPROVED if projects.random() < BUILDS_SHARE else (None,)
        self.hub.settings["hostFallbackEnabled"] = walls.random() < 0.8
        for attempt in planned(rng, walls):
            if walls.random() < HOST_SHARE[self.setup.allows_host]:
                use_host(attempt, walls)
            attempt.approved = projects.choice(approved)
            self.hub.attempts.append(attempt)
            if (at := rng.choice((None, None, COMMIT, COMMIT, "a" * 40))) is not None:
                self.remote.branches[attempt.branch] = at

    def _program(self, container: Container) -> Program | None:
        if container.role == "agent":
            return Pid1(self.world, self.faults, container, self.checkers)
        if container.role == "helper":
            return Helper(self.world, self.faults, container)
        if container.role in SERVICE_ROLES:
            return ServicePid1(self.world, self.faults, container, self.checkers)
        if (program := BESIDE.get(container.role)) is not None:
            return program(self.world, self.faults, container)
        return None

    def _host_program(self, process: HostProcess) -> Program:
        if process.role == HOST_AGENT:
            return Pid1(self.world, self.faults, process, self.checkers)
        return Helper(self.world, self.faults, process)

    def _foreign(self) -> Iterator[EngineResource]:
        """What is in the engine besides: of another runner, and ours only by its labels."""
        other = Owner("runner-2", "other", "attempt-1", 1, "project", "domain")
        ours = Owner(THIS_RUNNER, "old", "attempt-1", 1, "project", "domain")
        volumes: tuple[tuple[str, dict[str, str]], ...] = (
            (other.name("workspace"), other.labels("workspace")),
            ("precious", ours.labels("workspace")),
            ("plain", {}),
        )
        for name, labels in volumes:
            resource = EngineResource(ResourceKind.VOLUME, name, name, labels, self.world.utc())
            self.engine.volumes[name] = Thing(resource)
            yield resource
        taken = next(self.setup.pool.subnets(new_prefix=SUBNET_PREFIX))
        yield self.engine.networks[self.engine.nets.add_foreign("stranger", taken)].resource


def simulate(
    seed: int,
    *,
    faults: bool = True,
    max_steps: int = MAX_STEPS,
    show: Callable[[str], None] | None = None,
    prepare: Callable[[Simulation], None] = lambda _simulation: None,
) -> Outcome:
    """Run one seed to its end.

    :param max_steps: a run that takes more is broken too: it does not come to rest.
    :param show: called with every line of the trace as it comes.
    :param prepare: called before the first step.
    """
    with virtual_loop() as loop:
        world = World(seed, loop, show)
        with _logging_into(world):
            simulation = Simulation(world, faults=faults, max_steps=max_steps)
            prepare(simulation)
            try:
                loop.run_forever()
            except NothingLeftError:
                world.violate("progress", "everybody waits for ever")
        if world.failure is not None:
            for line in traceback.format_exception(world.failure):
                world.tail.extend(line.rstrip().splitlines())
        return Outcome(
            seed,
            loop.steps,
            world.now_s,
            tuple(world.violations),
            tuple(world.tail),
            world.digest,
            Counter(_end_of(dispatch) for dispatch in simulation.hub.dispatches.values()),
            len(simulation.host.lives),
        )


def _end_of(dispatch: Dispatch) -> str:
    for result in dispatch.results.values():
        return str(result.get("failureCode", result["outcome"]))
    return "no result" if dispatch.accepted else "not taken"


@contextmanager
def _logging_into(world: World) -> Iterator[None]:
    """What the bridge logs becomes part of the trace."""

    def tell(_logger: object, method: str, event: Any) -> Any:
        failed = event.pop("exc_info", None)
        more = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        world.note("log", f"{method}: {event['event']} {more}")
        if failed:
            world.note("log", traceback.format_exc())
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[tell])
    try:
        yield
    finally:
        structlog.configure(**before)
