"""Tells a wall clock that was stepped, and a host that slept, from time that passed; for the log.

Nothing is decided by it.  Deadlines are on CLOCK_BOOTTIME, which no step moves and which counts a
suspend (protocol.md, Lease); but a reader of logs should learn why their times jump, or why leases
ended at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forge_core.ports import Clock

NOTICED_MS: Final = 5_000
"""Less is what reading three clocks one after the other, or slewing one of them, can cost."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment on three clocks, milliseconds each (clock_gettime(2)).

    :param wall_ms: CLOCK_REALTIME: what people read; can be stepped.
    :param boot_ms: CLOCK_BOOTTIME: counts suspend.
    :param running_ms: CLOCK_MONOTONIC: stands still during a suspend.
    """

    wall_ms: int
    boot_ms: int
    running_ms: int


def read(clock: Clock, running_s: float) -> Reading:
    """This moment.

    :param running_s: the event loop's clock, which is CLOCK_MONOTONIC, in seconds.
    """
    return Reading(clock.unix_seconds() * 1000, clock.now_ms(), int(running_s * 1000))


@dataclass(frozen=True, slots=True)
class Jump:
    """What happened between two readings.

    :param stepped_ms: how far the wall clock was set, back if negative; 0: it was not.
    :param suspended_ms: how long the host slept; 0: it did not.
    """

    stepped_ms: int
    suspended_ms: int


def jump_between(earlier: Reading, later: Reading) -> Jump | None:
    """What is worth a line in the log; None: time just passed."""
    passed_ms = later.boot_ms - earlier.boot_ms
    stepped_ms = later.wall_ms - earlier.wall_ms - passed_ms
    suspended_ms = passed_ms - (later.running_ms - earlier.running_ms)
    jump = Jump(
        stepped_ms if abs(stepped_ms) >= NOTICED_MS else 0,
        suspended_ms if suspended_ms >= NOTICED_MS else 0,
    )
    return jump if jump.stepped_ms or jump.suspended_ms else None
