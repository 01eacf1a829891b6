"""A bounded number of seeds on each run, every crash point, and that bugs would be found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .crash_points import crash_at, crash_points, recovery_points
from .mutations import MUTATIONS, mutated
from .simulation import Outcome, simulate

ROOT = Path(__file__).parents[2]
SEEDS = range(1, 61)
SEEDS_TO_FIND_A_BUG = 60
FIRST_DEATHS = ("create_container:sent", "start_container:answered", "TearDown:before")
GUARANTEES = ("B-04", "B-70", "B-72", "B-80", "B-81", "B-82", "B-83", "B-86", "B-87", "B-88")


def verdict(outcome: Outcome) -> str:
    """What a person needs to go on: the end of the trace, and how to see all of it."""
    if not outcome.violations:
        return ""
    again = f"python -m tests.simulation --first {outcome.seed} --seeds 1 --trace"
    return "\n".join((*outcome.tail[-80:], *outcome.violations, again))


@pytest.mark.requirement(*GUARANTEES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_seed_breaks_an_invariant(seed: int) -> None:
    outcome = simulate(seed)
    assert verdict(outcome) == ""
    assert outcome.steps > 500


@pytest.mark.requirement(*GUARANTEES)
@pytest.mark.slow
def test_thousands_of_seeds_break_nothing() -> None:
    for seed in range(1_000, 6_000):
        assert verdict(simulate(seed)) == ""


def test_without_faults_everything_succeeds_as_planned() -> None:
    for seed in range(1, 4):
        outcome = simulate(seed, faults=False)
        assert verdict(outcome) == ""
        assert outcome.lives == 2  # the one more start at the end
        planned = {"succeeded", "agent_failed", "idle_expired", "hard_wall_expired", "output_limit"}
        assert outcome.ends.keys() <= {*planned, "publication_stale", "not taken"}


@pytest.mark.requirement("B-24", "B-82", "B-83")
@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power-cut"])
def test_a_death_at_any_point_loses_nothing_and_leaves_nothing(power_cut: bool) -> None:
    points = crash_points()
    stages = {point.name.partition(":")[2] for point in points}
    assert {"before", "after", "written", "enqueued", "sent", "answered"} <= stages
    for point in points:
        outcome = crash_at([point], power_cut=power_cut)
        assert verdict(outcome) == "", f"a death at {point}"


@pytest.mark.requirement("B-24", "B-82", "B-83")
@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power-cut"])
@pytest.mark.parametrize("forgets", [False, True], ids=["with ledger", "without"])
def test_a_death_at_any_point_of_a_recovery_neither(power_cut: bool, forgets: bool) -> None:
    points = crash_points()
    firsts = [next(p for p in points if p.name == name) for name in FIRST_DEATHS]
    for first in firsts:
        seconds = recovery_points(first, forgets=forgets)
        assert any("orphaned" in second.name for second in seconds) == forgets
        for second in seconds:
            outcome = crash_at([first, second], power_cut=power_cut, forgets=forgets)
            assert verdict(outcome) == "", f"deaths at {first} and {second}"


def test_a_seed_replays_exactly_whatever_the_hashes_are() -> None:
    here = [simulate(seed).digest for seed in (3, 5)]
    assert [simulate(seed).digest for seed in (3, 5)] == here
    code = (
        "from tests.simulation.simulation import simulate;"
        "print(*(simulate(seed).digest for seed in (3, 5)))"
    )
    for hash_seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert printed.stdout.split() == here


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_bug_would_be_found(name: str) -> None:
    with mutated(name):
        outcomes = (simulate(seed) for seed in range(1, SEEDS_TO_FIND_A_BUG + 1))
        assert any(outcome.violations for outcome in outcomes)
