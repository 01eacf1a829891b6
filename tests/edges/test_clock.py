"""The clock of the host: suspend counts, steps of the wall clock do not."""

from __future__ import annotations

import re
import time

import anyio
import pytest

from forge_core.wire.base import ID_PATTERN, TIME_PATTERN
from forge_edges import clock as clock_module
from forge_edges.clock import SystemClock


@pytest.mark.requirement("B-70")
def test_deadlines_are_on_the_clock_that_counts_suspend() -> None:
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    now_ms = SystemClock().now_ms()
    assert before <= now_ms <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def test_the_wall_clock_reads_as_the_wire_wants_it() -> None:
    utc = SystemClock().utc()
    assert re.match(TIME_PATTERN, utc)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", utc)


def test_ids_are_long_fresh_and_fit_for_the_wire() -> None:
    ids = {SystemClock().new_id() for _ in range(1_000)}
    assert len(ids) == 1_000
    assert all(re.match(ID_PATTERN, each) and len(each) >= 26 for each in ids)


def test_jitter_is_a_fraction() -> None:
    values = [SystemClock().jitter() for _ in range(1_000)]
    assert 0 <= min(values) < 0.1
    assert 0.9 < max(values) < 1


@pytest.mark.requirement("B-70")
async def test_a_sleeper_never_wakes_early() -> None:
    clock = SystemClock()
    for wait_ms in (0, 1, 2, 17):
        deadline_ms = clock.now_ms() + wait_ms
        await clock.sleep_until_ms(deadline_ms)
        assert clock.now_ms() >= deadline_ms


@pytest.mark.requirement("B-70")
async def test_after_a_suspend_a_deadline_is_seen_within_one_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's timers stand still during a suspend; only the boot clock jumps."""
    asked: list[float] = []
    jumped_ms = 0

    class Suspended(SystemClock):
        def now_ms(self) -> int:
            return super().now_ms() + jumped_ms

    async def sleep(seconds: float) -> None:
        nonlocal jumped_ms
        asked.append(seconds)
        jumped_ms += 3_600_000 if len(asked) == 3 else int(seconds * 1_000)

    monkeypatch.setattr(anyio, "sleep", sleep)
    clock = Suspended()
    await clock.sleep_until_ms(clock.now_ms() + 1_800_000)
    assert len(asked) == 3
    assert max(asked) <= clock_module.TICK_MS / 1_000


async def test_a_sleeper_whose_deadline_has_passed_still_lets_others_run() -> None:
    clock = SystemClock()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await clock.sleep_until_ms(0)
        pytest.fail("a cancelled sleeper went on")
    assert scope.cancelled_caught
