"""The crash matrix: a death at every point that the code passes through (crash-matrix.md).

A run without any fault lists the points as they are reached, so that a new one cannot be
forgotten: before and after each record, between its write and its sync, around each message that
is stored or forgotten, around each action, each call that is not durable and each effect on Git,
and before an effect on the engine, when it was sent, and after.  Then one run each dies at one of
them; and for the recovery, at one of them and then at another.  Of points between which the
process does nothing, the first stands for all.

A recovery that *forgets* finds no ledger: only labels tell what its predecessor has left.
A life that *finds* begins with a container and a volume that an engine was late to make, of an
attempt that was over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from forge_core.labels import Owner

from .builds import BUILT
from .containers import AgentPlan
from .setup import IMAGE, THIS_RUNNER
from .simulation import Outcome, Simulation, simulate
from .work import Attempt

SEED = 1


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """The ``occurrence``-th time that a life of the bridge comes by."""

    life: int
    name: str
    occurrence: int


PLAIN: Final = Attempt(
    "attempt-1",
    AgentPlan(runs_s=3.0, prints_every_s=1.0),
    15_000,
    600_000,
    600_000,
    has_secret=True,
    publishes=True,
)
"""Passes through every stage that needs nothing around the agent."""

SURROUNDED: Final = replace(PLAIN, policy="public_allowlist", services=("redis",))
"""Passes through all of them."""

ENDED: Final = replace(PLAIN, hard_wall_ms=1_500)
"""Is ended while its agent runs."""

ON_HOST: Final = replace(PLAIN, runs_on="host")
"""Has no container at all."""

BUILDING: Final = replace(PLAIN, approved=BUILT)
"""Is run in an image that has to be built first."""

VARIANTS: Final = (SURROUNDED, ENDED, ON_HOST, BUILDING)


def crash_points(attempt: Attempt = PLAIN) -> tuple[CrashPoint, ...]:
    """All that an undisturbed life reaches, in order."""
    return _points_of_life(attempt, 1, (), forgets=False)


def more_crash_points(attempt: Attempt) -> tuple[CrashPoint, ...]:
    """What a life with this attempt reaches besides."""
    plain = {point.name for point in crash_points()}
    return tuple(point for point in crash_points(attempt) if point.name not in plain)


def names(attempt: Attempt, *deaths: CrashPoint, finds: bool = False) -> frozenset[str]:
    """All that these lives come by, also of those for which another stands."""
    reached: set[str] = set()

    def note(point: CrashPoint, _step: int) -> None:
        reached.add(point.name)

    _run(attempt, deaths, note, power_cut=False, forgets=False, finds=finds)
    return frozenset(reached)


def finding_points() -> tuple[CrashPoint, ...]:
    """All that a life reaches which finds what an engine was late to make."""
    return _points_of_life(PLAIN, 2, (), forgets=False, finds=True)


def recovery_points(
    attempt: Attempt, first: CrashPoint, *, forgets: bool
) -> tuple[CrashPoint, ...]:
    """All that the next life reaches after a death at ``first``, until it takes new work."""
    points = _points_of_life(attempt, 2, (first,), forgets=forgets)
    return tuple(takewhile(lambda point: not point.name.startswith("reserved"), points))


def one_of_each(points: Iterable[CrashPoint]) -> tuple[CrashPoint, ...]:
    """The first of those that differ in nothing but a number."""
    kinds: dict[str, CrashPoint] = {}
    for point in points:
        kinds.setdefault("".join(c for c in point.name if not c.isdigit()), point)
    return tuple(kinds.values())


def crash_at(
    attempt: Attempt,
    points: Sequence[CrashPoint],
    *,
    power_cut: bool,
    forgets: bool = False,
    finds: bool = False,
) -> Outcome:
    """One run with these deaths."""
    return _run(attempt, points, _note_nothing, power_cut=power_cut, forgets=forgets, finds=finds)


def _note_nothing(_point: CrashPoint, _step: int) -> None:
    """The points are known."""


def _points_of_life(
    attempt: Attempt,
    life: int,
    deaths: Sequence[CrashPoint],
    *,
    forgets: bool,
    finds: bool = False,
) -> tuple[CrashPoint, ...]:
    reached: dict[tuple[int, bool], CrashPoint] = {}

    def note(point: CrashPoint, step: int) -> None:
        if point.life == life:
            # What was sent is carried out, however soon its sender dies.
            reached.setdefault((step, point.name.endswith(":sent")), point)

    outcome = _run(attempt, deaths, note, power_cut=False, forgets=forgets, finds=finds)
    assert not outcome.violations, outcome.violations
    return tuple(reached.values())


def _run(
    attempt: Attempt,
    deaths: Sequence[CrashPoint],
    note: Callable[[CrashPoint, int], None],
    *,
    power_cut: bool,
    forgets: bool,
    finds: bool = False,
) -> Outcome:
    """A calm run of one attempt."""
    counts: Counter[tuple[int, str]] = Counter()

    def prepare(simulation: Simulation) -> None:
        simulation.hub.attempts[:] = [replace(attempt)]
        simulation.host.setup = replace(simulation.host.setup, allows_host=True, has_engine=True)

        def come_by(name: str) -> None:
            life = len(simulation.host.lives)
            counts[life, name] += 1
            point = CrashPoint(life, name, counts[life, name])
            note(point, simulation.world.processes.steps)
            if point in deaths:
                simulation.world.note("nemesis", f"strikes at {name}")
                simulation.host.kill(power_cut=power_cut)
                if forgets and life == 1:
                    simulation.disk.forget_ledgers()
                    simulation.checkers.ledgers_forgotten()

        simulation.host.on_point = come_by
        if finds:
            _make_late(simulation)

    return simulate(SEED, faults=False, prepare=prepare)


def _make_late(simulation: Simulation) -> None:
    """Between the first life and the second."""
    host, engine = simulation.host, simulation.engine
    boot = host.boot

    def boot_after_it() -> None:
        if len(host.lives) == 1 and host.life is None:
            instance_id = host.lives[0].instance_id
            owner = Owner(THIS_RUNNER, instance_id, PLAIN.id, 1, "project", "domain")
            request = {"Image": IMAGE, "Labels": owner.labels("late"), "HostConfig": {"Mounts": []}}
            engine.create_container(owner.name("late"), request)
            engine.create_volume(owner.name("late-too"), owner.labels("late-too"))
        boot()

    host.boot = boot_after_it  # type: ignore[method-assign]
