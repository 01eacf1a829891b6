"""When a project's permission to run on the host counts (B-53)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.host_fallback import CLOCK_SKEW_MS, refuse_fallback, unix_ms
from forge_core.wire.from_hub import HostFallback

pytestmark = pytest.mark.requirement("B-53")

NOW = "2026-11-29T14:00:00.000Z"


def fallback(expires_at: str, reason: str = "migration") -> HostFallback:
    return HostFallback(reason=reason, expires_at=expires_at)


@pytest.mark.parametrize(
    "expires_at",
    [
        "2026-11-29T14:00:00.001Z",
        "2026-11-29T15:00:01+01:00",
        "2026-12-29T14:00:00.000Z",
        "2026-12-29T14:05:00.000Z",
    ],
)
def test_a_reason_and_a_future_end_within_thirty_days_count(expires_at: str) -> None:
    assert refuse_fallback(fallback(expires_at), utc=NOW) is None


@pytest.mark.parametrize(
    ("permission", "why"),
    [
        (None, "not there"),
        (fallback("2026-12-01T00:00:00Z", reason=" "), "no reason"),
        (fallback(NOW), "ended at"),
        (fallback("2026-11-29T14:59:59+01:00"), "ended at"),
        (fallback("2026-12-29T14:05:00.001Z"), "more than 30 days"),
        (fallback("9999-12-31T23:59:59Z"), "more than 30 days"),
        (fallback("2026-02-29T00:00:00Z"), "no moment"),
        (fallback("2026-13-01T00:00:00Z"), "no moment"),
        (fallback("2026-12-01T24:00:00Z"), "no moment"),
        (fallback("2026-12-01T00:00:60Z"), "no moment"),
        (fallback("2026-12-01T00:00:00+24:00"), "no moment"),
    ],
)
def test_everything_else_fails_closed(permission: HostFallback | None, why: str) -> None:
    found = refuse_fallback(permission, utc=NOW)
    assert found is not None
    assert why in found


def test_a_clock_that_cannot_be_read_gives_no_permission() -> None:
    assert refuse_fallback(fallback("2026-12-01T00:00:00Z"), utc="") is not None


def test_who_saves_it_is_given_no_tolerance() -> None:
    late = fallback("2026-12-29T14:00:00.001Z")
    assert refuse_fallback(late, utc=NOW, skew_ms=0) is not None
    assert refuse_fallback(late, utc=NOW, skew_ms=CLOCK_SKEW_MS) is None


@given(
    st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),  # noqa: DTZ001 - the zone is drawn
    st.integers(-23 * 60, 23 * 60),
)
def test_timestamps_are_read_as_the_standard_library_reads_them(
    moment: datetime, offset_minutes: int
) -> None:
    zone = timezone(timedelta(minutes=offset_minutes))
    text = moment.replace(tzinfo=zone).isoformat()
    expected = moment.replace(tzinfo=zone) - datetime(1970, 1, 1, tzinfo=UTC)
    assert unix_ms(text) == expected // timedelta(milliseconds=1)
    assert unix_ms(moment.isoformat() + "Z") == (
        moment - datetime(1970, 1, 1)  # noqa: DTZ001
    ) // timedelta(milliseconds=1)
