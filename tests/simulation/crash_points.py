"""The crash matrix: a death at every point that the code passes through (crash-matrix.md).

A run without any fault lists the points as they are reached, so that a new one cannot be
forgotten: before and after each record, between its write and its sync, after each message that
is enqueued, around each action, and when a request to the engine was sent and answered.  Then one
run each dies at one of them; and for the recovery, at one of them and then at another.

A recovery that *forgets* finds no ledger: only labels tell what its predecessor has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from .containers import AgentPlan
from .simulation import Outcome, Simulation, simulate
from .work import Attempt

SEED = 1


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """The ``occurrence``-th time that a life of the bridge comes by."""

    life: int
    name: str
    occurrence: int


def crash_points() -> tuple[CrashPoint, ...]:
    """All that an undisturbed life reaches, in order."""
    return _points_of_life(1, (), forgets=False)


def recovery_points(first: CrashPoint, *, forgets: bool) -> tuple[CrashPoint, ...]:
    """All that the next life reaches after a death at ``first``, until it takes new work."""
    points = _points_of_life(2, (first,), forgets=forgets)
    return tuple(takewhile(lambda point: not point.name.startswith("reserved"), points))


def crash_at(points: Sequence[CrashPoint], *, power_cut: bool, forgets: bool = False) -> Outcome:
    """One run with these deaths."""
    return _run(points, lambda _point: None, power_cut=power_cut, forgets=forgets)


def _points_of_life(
    life: int, deaths: Sequence[CrashPoint], *, forgets: bool
) -> tuple[CrashPoint, ...]:
    reached: list[CrashPoint] = []
    outcome = _run(deaths, reached.append, power_cut=False, forgets=forgets)
    assert not outcome.violations, outcome.violations
    return tuple(point for point in reached if point.life == life)


def _run(
    deaths: Sequence[CrashPoint],
    note: Callable[[CrashPoint], None],
    *,
    power_cut: bool,
    forgets: bool,
) -> Outcome:
    """A calm run of one attempt that passes through every stage."""
    counts: Counter[tuple[int, str]] = Counter()

    def prepare(simulation: Simulation) -> None:
        plan = AgentPlan(runs_s=3.0, prints_every_s=1.0)
        attempt = Attempt(
            "attempt-1", plan, 15_000, 600_000, 600_000, has_secret=True, publishes=True
        )
        simulation.hub.attempts[:] = [attempt]

        def come_by(name: str) -> None:
            life = len(simulation.host.lives)
            counts[life, name] += 1
            point = CrashPoint(life, name, counts[life, name])
            note(point)
            if point in deaths:
                simulation.world.note("nemesis", f"strikes at {name}")
                simulation.host.kill(power_cut=power_cut)
                if forgets and life == 1:
                    simulation.disk.forget_ledgers()

        simulation.host.on_point = come_by

    return simulate(SEED, faults=False, prepare=prepare)
