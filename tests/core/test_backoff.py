"""When to try again: full jitter, bounded, and patient where haste is pointless."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.backoff import BACKOFF_FIRST_MS, BACKOFF_MAX_MS, STABLE_AFTER_MS, Backoff

jitters = st.floats(0, 1, exclude_max=True)


def after_failures(count: int) -> Backoff:
    backoff = Backoff()
    for _ in range(count):
        backoff = backoff.failed()
    return backoff


@pytest.mark.requirement("B-01")
@pytest.mark.parametrize(
    ("failures", "ceiling_ms"),
    [(0, 1_000), (1, 1_000), (2, 2_000), (3, 4_000), (6, 32_000), (7, 60_000), (1_000, 60_000)],
)
def test_the_ceiling_doubles_up_to_a_minute(failures: int, ceiling_ms: int) -> None:
    backoff = after_failures(failures)
    assert backoff.delay_ms(0.0) == 0
    assert backoff.delay_ms(0.5) == ceiling_ms // 2
    assert ceiling_ms - 2 <= backoff.delay_ms(1 - 2**-53) < ceiling_ms


@pytest.mark.requirement("B-01")
@given(st.integers(0, 100), jitters, st.none() | st.integers(-(2**63), 2**63), st.booleans())
def test_a_delay_is_never_negative_and_always_bounded(
    failures: int, jitter: float, retry_after_ms: int | None, for_good: bool
) -> None:
    backoff = after_failures(failures).failed(for_good=for_good)
    delay_ms = backoff.delay_ms(jitter, retry_after_ms)
    assert 0 <= delay_ms <= 6 * BACKOFF_MAX_MS
    if retry_after_ms is not None:
        assert delay_ms >= min(retry_after_ms, 5 * BACKOFF_MAX_MS)
    if for_good:
        assert delay_ms >= BACKOFF_MAX_MS


@pytest.mark.requirement("B-01")
def test_only_a_connection_that_stayed_resets() -> None:
    tired = after_failures(5)
    assert tired.online_for(STABLE_AFTER_MS) == Backoff()
    assert tired.online_for(STABLE_AFTER_MS - 1).failures == 6
    assert tired.online_for(-1).failures == 6


@pytest.mark.requirement("B-01")
def test_a_refusal_for_good_is_forgotten_by_the_next_ordinary_failure() -> None:
    refused = Backoff().failed(for_good=True)
    assert refused.delay_ms(0.0) == BACKOFF_MAX_MS
    assert refused.failed().delay_ms(0.999) < 2 * BACKOFF_FIRST_MS
