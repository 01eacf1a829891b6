"""The lease on the host: three deadlines, kept by the watchdog (B-70, B-71, B-72).

lifecycle.md, *Lease*::

    held ──renewal──▶ held          the deadline moves to receipt + ttl, never past the hard wall
      │ deadline reached                       │ ended
      ▼                                        ▼
    expired (lease | hard wall | idle)       ended

Kept here and, independently, by PID 1 in the container; whichever fires first decides the
code.  All times are CLOCK_BOOTTIME milliseconds.  The key lives in this object only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from forge_core.wire.codes import FailureCode
from forge_core.wire.from_hub import MAX_WALL_MS, LeaseUpdate
from forge_core.wire.lease_mac import lease_message, verify_lease


class Deadline(StrEnum):
    """Which deadline."""

    LEASE = "lease"
    HARD_WALL = "hardWall"
    IDLE = "idle"

    @property
    def failure_code(self) -> FailureCode:
        """The three distinct codes of B-71."""
        return {
            Deadline.LEASE: FailureCode.LEASE_EXPIRED,
            Deadline.HARD_WALL: FailureCode.HARD_WALL_EXPIRED,
            Deadline.IDLE: FailureCode.IDLE_EXPIRED,
        }[self]


class Refusal(StrEnum):
    """Why a renewal changed nothing."""

    WRONG_ATTEMPT = "wrong_attempt"
    WRONG_MAC = "wrong_mac"
    OLD_SEQUENCE = "old_sequence"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to go on."""

    attempt_id: str
    fence: int
    key: bytes = field(repr=False)
    sequence: int
    deadline_ms: int
    hard_wall_ms: int
    idle_ms: int
    hard_wall_at_ms: int | None = None
    idle_at_ms: int | None = None

    def next_deadline(self) -> tuple[int, Deadline]:
        """The earliest deadline and which it is; the wall and idle count from agent start."""
        candidates = [(self.deadline_ms, Deadline.LEASE)]
        if self.hard_wall_at_ms is not None:
            candidates.append((self.hard_wall_at_ms, Deadline.HARD_WALL))
        if self.idle_at_ms is not None:
            candidates.append((self.idle_at_ms, Deadline.IDLE))
        rank = {Deadline.HARD_WALL: 0, Deadline.LEASE: 1, Deadline.IDLE: 2}
        return min(candidates, key=lambda c: (c[0], rank[c[1]]))

    def expired(self, now_ms: int) -> Deadline | None:
        """Which deadline has passed, if any; the earliest one."""
        at_ms, which = self.next_deadline()
        return which if now_ms >= at_ms else None


def grant(
    *,
    attempt_id: str,
    fence: int,
    key: bytes,
    sequence: int,
    ttl_ms: int,
    hard_wall_ms: int,
    idle_ms: int,
    now_ms: int,
) -> Lease:
    """The lease runs from the receipt of ``Start``, so it covers builds and everything."""
    wall = min(hard_wall_ms, MAX_WALL_MS)
    return Lease(attempt_id, fence, key, sequence, now_ms + ttl_ms, wall, min(idle_ms, wall))


def renew(
    lease: Lease, update: LeaseUpdate, now_ms: int, *, received_ms: int | None = None
) -> tuple[Lease, Refusal | None]:
    """Accept or refuse a renewal; a refused one changes nothing and revives nothing.

    :param received_ms: when it came, if it has waited since: the new deadline counts from there
        (protocol.md, Lease).
    """
    if (update.attempt_id, update.fence) != (lease.attempt_id, lease.fence):
        return lease, Refusal.WRONG_ATTEMPT
    message = lease_message(
        update.attempt_id, update.fence, update.sequence, update.ttl_ms, update.issued_at
    )
    if not verify_lease(lease.key, message, update.mac):
        return lease, Refusal.WRONG_MAC
    if lease.expired(now_ms) is not None:
        return lease, Refusal.EXPIRED
    if update.sequence <= lease.sequence:
        return lease, Refusal.OLD_SEQUENCE
    deadline_ms = (now_ms if received_ms is None else received_ms) + update.ttl_ms
    if lease.hard_wall_at_ms is not None:
        deadline_ms = min(deadline_ms, lease.hard_wall_at_ms)
    return replace(lease, sequence=update.sequence, deadline_ms=deadline_ms), None


def agent_started(lease: Lease, now_ms: int) -> Lease:
    """The hard wall and the idle clock begin, once: a second start moves no deadline."""
    if lease.hard_wall_at_ms is not None:
        return lease
    wall_at_ms = now_ms + lease.hard_wall_ms
    return replace(
        lease,
        hard_wall_at_ms=wall_at_ms,
        idle_at_ms=now_ms + lease.idle_ms,
        deadline_ms=min(lease.deadline_ms, wall_at_ms),
    )


def agent_ended(lease: Lease) -> Lease:
    """It prints nothing any more; what its output takes still counts to the wall (B-36)."""
    return replace(lease, idle_at_ms=None)


def output_seen(lease: Lease, now_ms: int) -> Lease:
    """The agent printed something; what has expired is not revived by it."""
    if lease.idle_at_ms is None or lease.expired(now_ms) is not None:
        return lease
    return replace(lease, idle_at_ms=now_ms + lease.idle_ms)
