"""A bounded number of seeds on each run, every crash point, and that bugs would be found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from .crash_points import (
    BUILDING,
    ON_HOST,
    PLAIN,
    SURROUNDED,
    VARIANTS,
    CrashPoint,
    crash_at,
    crash_points,
    finding_points,
    more_crash_points,
    names,
    one_of_each,
    recovery_points,
)
from .mutations import MUTATIONS, mutated
from .simulation import Outcome, simulate
from .work import Attempt

ROOT = Path(__file__).parents[2]
SEEDS = range(1, 61)
SEEDS_TO_FIND_A_BUG = 60
FIRST_DEATHS = ("create_container agent:sent", "start_container agent:after", "TearDown:before")
ON_HOST_DEATH = "create_container host-agent:after"
MORE_FIRST_DEATHS = ("start_container service:after", "create_network egress:sent")
FOUND_LATE = frozenset({"tidy-nothing"})
"""The mutations that take tens of seeds."""
HOW = pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power-cut"])
HOW_OF_MANY = pytest.mark.parametrize(
    "power_cut", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["kill", "power-cut"]
)
RECORDED = ROOT / "tests/crash/points.txt"
SCENARIOS = (
    "succeeds",
    "builds",
    "has_a_network",
    "is_cancelled",
    "recovers",
    "finds",
    "replays",
    "runs_on_host",
    "recovers_on_host",
)
"""Of the real matrix, all but the one that waits for a start which gets lost on its way."""
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
@HOW
def test_a_death_at_any_point_loses_nothing_and_leaves_nothing(power_cut: bool) -> None:
    points = crash_points()
    stages = {point.name.partition(":")[2] for point in points}
    assert {"before", "after", "written", "sent"} <= stages
    for point in points:
        outcome = crash_at(PLAIN, [point], power_cut=power_cut)
        assert verdict(outcome) == "", f"a death at {point}"


@pytest.mark.requirement("B-54", "B-55", "B-82", "B-83")
@HOW_OF_MANY
def test_nor_does_one_with_walls_and_services_or_at_an_early_end(power_cut: bool) -> None:
    for attempt in VARIANTS:
        for point in more_crash_points(attempt):
            outcome = crash_at(attempt, [point], power_cut=power_cut)
            assert verdict(outcome) == "", f"a death at {point}"


@pytest.mark.requirement("B-82", "B-83")
@HOW
def test_nor_does_one_where_something_turns_up_after_all_was_over(power_cut: bool) -> None:
    for point in finding_points():
        outcome = crash_at(PLAIN, [point], power_cut=power_cut, finds=True)
        assert verdict(outcome) == "", f"a death at {point}"


def test_the_points_of_the_matrix_with_real_parts_are_among_these() -> None:
    of_recoveries = names(PLAIN, finds=True)
    for attempt, name in ((PLAIN, FIRST_DEATHS[1]), (ON_HOST, ON_HOST_DEATH)):
        of_recoveries |= names(attempt, CrashPoint(life=1, name=name, occurrence=1))
    reached = of_recoveries.union(*(names(attempt) for attempt in (PLAIN, *VARIANTS)))
    # There nobody knows what a container is for that an earlier life has made.
    reached |= {re.sub(r"^(remove_container) \S+:", r"\1:", name) for name in of_recoveries}
    for scenario in SCENARIOS:
        _, _, rest = RECORDED.read_text().partition(f"[{scenario}]\n")
        points = [line.split("\t") for line in rest.partition("\n[")[0].splitlines() if line]
        # The preflight is not simulated.
        recorded = {name for place, name, _ in points if place != "preflight"}
        assert recorded, scenario
        assert recorded <= reached, scenario


@pytest.mark.requirement("B-24", "B-82", "B-83")
@HOW
@pytest.mark.parametrize("forgets", [False, True], ids=["with ledger", "without"])
def test_a_death_at_any_point_of_a_recovery_neither(power_cut: bool, forgets: bool) -> None:
    for name in FIRST_DEATHS:
        first = CrashPoint(life=1, name=name, occurrence=1)
        seconds = recovery_points(PLAIN, first, forgets=forgets)
        _die_twice(PLAIN, first, one_of_each(seconds), power_cut=power_cut, forgets=forgets)


@pytest.mark.slow
@pytest.mark.requirement("B-24", "B-54", "B-55", "B-82", "B-83")
@HOW
@pytest.mark.parametrize("forgets", [False, True], ids=["with ledger", "without"])
def test_nor_does_one_of_a_recovery_with_walls(power_cut: bool, forgets: bool) -> None:
    deaths = [(PLAIN, name) for name in FIRST_DEATHS]
    deaths += [(SURROUNDED, name) for name in MORE_FIRST_DEATHS]
    deaths.append((ON_HOST, ON_HOST_DEATH))
    deaths.append((BUILDING, "create_container image:after"))
    if not forgets:
        # Then nothing is in the engine that only a label tells of.
        deaths.append((BUILDING, "tag_image:after"))
    for attempt, name in deaths:
        first = CrashPoint(life=1, name=name, occurrence=1)
        seconds = recovery_points(attempt, first, forgets=forgets)
        _die_twice(attempt, first, seconds, power_cut=power_cut, forgets=forgets)


def _die_twice(
    attempt: Attempt,
    first: CrashPoint,
    seconds: Sequence[CrashPoint],
    *,
    power_cut: bool,
    forgets: bool,
) -> None:
    assert any("orphaned" in second.name for second in seconds) == forgets
    for second in seconds:
        outcome = crash_at(attempt, [first, second], power_cut=power_cut, forgets=forgets)
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in FOUND_LATE else [])
        for name in sorted(MUTATIONS)
    ],
)
def test_a_bug_would_be_found(name: str) -> None:
    with mutated(name):
        outcomes = (simulate(seed) for seed in range(1, SEEDS_TO_FIND_A_BUG + 1))
        assert any(outcome.violations for outcome in outcomes)
