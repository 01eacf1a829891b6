"""What a log says about clocks that jump."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.clock_watch import NOTICED_MS, Jump, Reading, jump_between

DAY_MS = 86_400_000
START = Reading(wall_ms=1_700_000_000_000, boot_ms=50_000, running_ms=40_000)


def later(*, passed_ms: int = 5_000, stepped_ms: int = 0, suspended_ms: int = 0) -> Reading:
    return Reading(
        START.wall_ms + passed_ms + suspended_ms + stepped_ms,
        START.boot_ms + passed_ms + suspended_ms,
        START.running_ms + passed_ms,
    )


@pytest.mark.requirement("B-70")
@pytest.mark.parametrize(
    ("reading", "jump"),
    [
        (later(), None),
        (later(passed_ms=10 * DAY_MS), None),
        (later(stepped_ms=DAY_MS), Jump(DAY_MS, 0)),
        (later(stepped_ms=-DAY_MS), Jump(-DAY_MS, 0)),
        (later(suspended_ms=DAY_MS), Jump(0, DAY_MS)),
        (later(suspended_ms=DAY_MS, stepped_ms=-DAY_MS), Jump(-DAY_MS, DAY_MS)),
        (later(stepped_ms=NOTICED_MS - 1), None),
    ],
)
def test_a_step_and_a_suspend_are_told_apart(reading: Reading, jump: Jump | None) -> None:
    assert jump_between(START, reading) == jump


@given(st.integers(0, 10 * DAY_MS), st.integers(1 - NOTICED_MS, NOTICED_MS - 1))
def test_time_that_passes_is_nothing_to_tell(passed_ms: int, slewed_ms: int) -> None:
    assert jump_between(START, later(passed_ms=passed_ms, stepped_ms=slewed_ms)) is None
