"""The crash matrix: a kill at every fault point that the performer has (lifecycle.md).

A first run without any fault lists the points as the code reaches them, so that a new one cannot
be forgotten; then one run each dies at one of them, by SIGKILL or by a power cut.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .containers import AgentPlan
from .hub import Attempt
from .simulation import Outcome, Simulation, simulate

SEED = 1


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """The ``occurrence``-th time that the code comes by."""

    name: str
    occurrence: int


def crash_points() -> tuple[CrashPoint, ...]:
    """All that a calm run reaches, in order."""
    reached: Counter[str] = Counter()
    points: list[CrashPoint] = []

    def note(name: str) -> None:
        reached[name] += 1
        points.append(CrashPoint(name, reached[name]))

    def prepare(simulation: Simulation) -> None:
        _one_attempt(simulation)
        simulation.host.on_point = note

    outcome = simulate(SEED, faults=False, prepare=prepare)
    assert not outcome.violations, outcome.violations
    return tuple(points)


def crash_at(point: CrashPoint, *, power_cut: bool) -> Outcome:
    """The same run, but for one death."""
    reached: Counter[str] = Counter()

    def prepare(simulation: Simulation) -> None:
        def come_by(name: str) -> None:
            reached[name] += 1
            if (name, reached[name]) == (point.name, point.occurrence):
                simulation.world.note("nemesis", f"strikes at {point.name}")
                simulation.host.kill(power_cut=power_cut)

        _one_attempt(simulation)
        simulation.host.on_point = come_by

    return simulate(SEED, faults=False, prepare=prepare)


def _one_attempt(simulation: Simulation) -> None:
    """A life that passes through every stage."""
    plan = AgentPlan(runs_s=3.0, prints_every_s=1.0)
    attempt = Attempt("attempt-1", plan, 15_000, 600_000, 600_000, has_secret=True)
    simulation.hub.attempts[:] = [attempt]
