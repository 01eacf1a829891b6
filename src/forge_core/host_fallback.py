"""Whether a project's permission to run on the host counts at this moment (B-53).

A permission without a reason, without a moment at which it ends, over, or further ahead than
thirty days, counts as none.  It is the one thing here that is decided by the wall clock: a date
that a person has chosen means nothing on any other.  The hub asks by its clock when the
permission is saved and when it offers, the runner by its own when it decides and when it starts,
and the first of them that says no is right.  A wrong clock on one side alone therefore only
shortens a permission; one that is late on both lengthens it by as much.
"""

from __future__ import annotations

import re
from typing import Final

from forge_core.wire.from_hub import HostFallback

DAY_MS: Final = 86_400_000
MAX_AHEAD_MS: Final = 30 * DAY_MS
"""How far ahead a permission may end when it is saved."""

CLOCK_SKEW_MS: Final = 300_000
"""How far ahead of a runner's clock a hub's may be: what was just saved for thirty days counts."""

_TIMESTAMP: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(\.[0-9]{1,9})?"
    r"(?:Z|([+-])([0-9]{2}):([0-9]{2}))\Z"
)
_MONTH_DAYS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def refuse_fallback(
    fallback: HostFallback | None, *, utc: str, skew_ms: int = CLOCK_SKEW_MS
) -> str | None:
    """Why the permission does not count, in words that follow its subject; None: it counts.

    :param utc: the wall clock of whoever asks, RFC 3339.
    :param skew_ms: tolerated beyond the thirty days; 0 where the permission is saved.
    """
    if fallback is None:
        return "is not there: nobody has saved a reason and an expiry for the project"
    if not fallback.reason.strip():
        return "has no reason"
    try:
        now_ms, end_ms = unix_ms(utc), unix_ms(fallback.expires_at)
    except ValueError as error:
        return f"does not say when it ends: {error}"
    if end_ms <= now_ms:
        return f"ended at {fallback.expires_at}"
    if end_ms - now_ms > MAX_AHEAD_MS + skew_ms:
        return f"ends at {fallback.expires_at}, more than {MAX_AHEAD_MS // DAY_MS} days ahead"
    return None


def unix_ms(timestamp: str) -> int:
    """An RFC 3339 timestamp as milliseconds since 1970, rounded down; no leap seconds (POSIX).

    :raises ValueError: there is no such moment.
    """
    match = _TIMESTAMP.match(timestamp)
    if match is None:
        raise ValueError(f"{timestamp[:40]!r} is no RFC 3339 timestamp")
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    offset_hour, offset_minute = int(match[9] or 0), int(match[10] or 0)
    is_day = 1 <= month <= 12 and 1 <= day <= _month_days(year, month)
    if not is_day or max(hour, offset_hour) > 23 or max(minute, offset_minute, second) > 59:
        raise ValueError(f"there is no moment {timestamp}")
    offset_minutes = (offset_hour * 60 + offset_minute) * (-1 if match[8] == "-" else 1)
    minutes = (_days_since_1970(year, month, day) * 24 + hour) * 60 + minute - offset_minutes
    return (minutes * 60 + second) * 1000 + int(f"{match[7] or '.'}000"[1:4])


def _month_days(year: int, month: int) -> int:
    return _MONTH_DAYS[month - 1] + (month == 2 and _is_leap(year))


def _is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def _days_since_1970(year: int, month: int, day: int) -> int:
    """In the proleptic Gregorian calendar."""
    before = year - 1
    days = before * 365 + before // 4 - before // 100 + before // 400
    days += sum(_month_days(year, earlier) for earlier in range(1, month)) + day
    return days - 719_163
