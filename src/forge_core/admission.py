"""Reservations: who may run here, and what it holds (lifecycle.md, Reservation; B-10, B-21, B-22).

::

            offer fits            start             teardown begins        all removed
  (none) ────────────▶ reserved ────────▶ starting ─▶ active ─▶ releasing ────────▶ (gone)
                         │ offer expires                │           │ something resisted
                         └────────▶ (gone)              └──▶   degraded ── pass succeeds ──▶ (gone)

Deciding and reserving are one step, so two offers that arrive together can never both take
the last slot.  A reservation holds its whole vector until it is freed; degraded still counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from forge_core.resources import ResourceCapacity, ResourceVector, exceeded_component
from forge_core.wire.codes import (
    NetworkPolicy,
    Policy,
    PublicationMode,
    RejectionCode,
    ReservationState,
    Runtime,
    ServiceName,
)
from forge_core.wire.from_hub import Offer

Key = tuple[str, int]
"""An attempt id and a fence: one dispatch."""

REMEMBERED_DECISIONS: Final = 256
REMEMBERED_FENCES: Final = 4096

DEFAULT_REQUEST: Final = ResourceVector(
    slots=1, pids=256, memory_bytes=1 << 30, cpu_millis=1000, disk_bytes=0
)
"""What a component that the offer leaves at zero is taken for: every container has limits."""

_NO_HOST_EXECUTION: Final = (
    "the operator has not set FORGE_ALLOW_HOST_EXECUTION=true on this runner"
)

_COMPONENT_CODES: Final = {
    "slots": RejectionCode.CAPACITY_SLOTS,
    "builds": RejectionCode.CAPACITY_BUILDS,
    "pids": RejectionCode.CAPACITY_PIDS,
    "memory_bytes": RejectionCode.CAPACITY_MEMORY,
    "cpu_millis": RejectionCode.CAPACITY_CPU,
    "disk_bytes": RejectionCode.CAPACITY_DISK,
}


@dataclass(frozen=True, slots=True)
class Reservation:
    """Capacity held for one dispatch."""

    key: Key
    offer_id: str
    resources: ResourceVector
    state: ReservationState
    expires_at_ms: int
    runtime: Runtime = Runtime.DOCKER


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What a decision looks at besides the reservations; the advertisement says the same."""

    trust_domain_id: str
    capacity: ResourceCapacity
    repositories: frozenset[str]
    runtimes: frozenset[Runtime]
    blockers: tuple[str, ...] = ()
    network_policies: frozenset[NetworkPolicy] = frozenset({NetworkPolicy.NONE})
    services: frozenset[ServiceName] = frozenset()
    publication_modes: frozenset[PublicationMode] = frozenset()
    host_execution_allowed: bool = False
    draining: bool = False
    stopping: bool = False
    disk_pressure: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one offer: accepted, or a code from the closed list with its detail."""

    runtime: Runtime | None = None
    code: RejectionCode | None = None
    detail: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether capacity is now held for the offer."""
        return self.code is None


class Admission:
    """All reservations of this runner instance, and what was decided lately.

    No clock, no I/O; one owner calls it from one thread.  It changes in place because a copy
    of the remembered fences with every decision would cost more than the decision.
    """

    __slots__ = ("_decided", "_highest_fence", "_reservations", "used")

    def __init__(self) -> None:
        self._reservations: dict[Key, Reservation] = {}
        self._decided: dict[str, Verdict] = {}
        self._highest_fence: dict[str, int] = {}
        self.used = ResourceVector()

    @property
    def reservations(self) -> Mapping[Key, Reservation]:
        """Everything held, oldest first."""
        return self._reservations

    def count(self, *states: ReservationState) -> int:
        """How many reservations are in one of these states."""
        return sum(1 for r in self._reservations.values() if r.state in states)

    def highest_fence(self, attempt_id: str) -> int:
        """The highest fence seen for this attempt; 0: never seen."""
        return self._highest_fence.get(attempt_id, 0)

    def superseded_by(self, attempt_id: str, fence: int) -> tuple[Key, ...]:
        """The reservations of this attempt under lower fences."""
        return tuple(k for k in self._reservations if k[0] == attempt_id and k[1] < fence)

    def decide(self, offer: Offer, facts: RunnerFacts, now_ms: int) -> Verdict:
        """Answer an offer and, when the answer is yes, hold its resources: one step.

        The same offer again gets the same answer and holds nothing more.
        """
        earlier = self._decided.get(offer.offer_id)
        if earlier is not None:
            return earlier
        verdict = self._refuse_fence(offer) or _refuse_unfit(offer, facts)
        self._see_fence(offer.attempt_id, offer.fence)
        if verdict is None:
            requested = effective_request(offer.resources)
            verdict = self._refuse_capacity(requested, facts.capacity)
            if verdict is None:
                verdict = Verdict(runtime=Runtime.DOCKER)
                self._hold(
                    Reservation(
                        (offer.attempt_id, offer.fence),
                        offer.offer_id,
                        requested,
                        ReservationState.RESERVED,
                        now_ms + offer.expires_in_ms,
                    )
                )
        self._remember(offer.offer_id, verdict)
        return verdict

    def hold_legacy(self, dispatch_id: str, facts: RunnerFacts) -> Verdict:
        """A v1 dispatch takes one slot and runs on the host (protocol.md, Legacy v1)."""
        key = (dispatch_id, 0)
        if key in self._reservations:
            return _no(RejectionCode.STALE_FENCE, f"dispatch {dispatch_id} is running")
        if not facts.host_execution_allowed:
            return _no(RejectionCode.HOST_EXECUTION_DENIED, _NO_HOST_EXECUTION)
        if facts.stopping or facts.draining:
            return _no(RejectionCode.STOPPING if facts.stopping else RejectionCode.DRAINING)
        one_slot = ResourceVector(slots=1)
        refusal = self._refuse_capacity(one_slot, facts.capacity)
        if refusal is not None:
            return refusal
        self._hold(
            Reservation(key, dispatch_id, one_slot, ReservationState.ACTIVE, 0, Runtime.HOST)
        )
        return Verdict(runtime=Runtime.HOST)

    def hold_degraded(self, key: Key, resources: ResourceVector) -> None:
        """Something of an older instance resisted removal: its capacity stays taken."""
        if key not in self._reservations:
            self._hold(Reservation(key, "", resources, ReservationState.DEGRADED, 0))

    def transition(self, key: Key, state: ReservationState) -> None:
        """Move a reservation on; moving it to the state that it has is a no-op."""
        self._reservations[key] = replace(self._reservations[key], state=state)

    def free(self, key: Key) -> None:
        """Give the resources back: everything of the dispatch was observed gone.  Idempotent."""
        reservation = self._reservations.pop(key, None)
        if reservation is not None:
            self.used -= reservation.resources

    def expired(self, now_ms: int) -> tuple[Key, ...]:
        """The reservations whose offer ran out before a start came."""
        return tuple(
            r.key
            for r in self._reservations.values()
            if r.state is ReservationState.RESERVED and now_ms >= r.expires_at_ms
        )

    def next_expiry_ms(self) -> int | None:
        """When the next unstarted reservation runs out."""
        return min(
            (
                r.expires_at_ms
                for r in self._reservations.values()
                if r.state is ReservationState.RESERVED
            ),
            default=None,
        )

    def _refuse_fence(self, offer: Offer) -> Verdict | None:
        if offer.fence < self.highest_fence(offer.attempt_id):
            return _no(RejectionCode.STALE_FENCE)
        if (offer.attempt_id, offer.fence) in self._reservations:
            return _no(
                RejectionCode.STALE_FENCE,
                f"attempt {offer.attempt_id} already holds a reservation under this fence",
            )
        return None

    def _refuse_capacity(
        self, requested: ResourceVector, capacity: ResourceCapacity
    ) -> Verdict | None:
        component = exceeded_component(self.used, requested, capacity)
        if component is None:
            return None
        free = getattr(capacity, component) - getattr(self.used, component)
        return _no(
            _COMPONENT_CODES[component],
            f"{component}: {getattr(requested, component)} asked for, {max(free, 0)} free",
        )

    def _hold(self, reservation: Reservation) -> None:
        self._see_fence(*reservation.key)
        self._reservations[reservation.key] = reservation
        self.used += reservation.resources

    def _see_fence(self, attempt_id: str, fence: int) -> None:
        highest = max(fence, self._highest_fence.pop(attempt_id, 0))
        _make_room(self._highest_fence, REMEMBERED_FENCES)
        self._highest_fence[attempt_id] = highest

    def _remember(self, offer_id: str, verdict: Verdict) -> None:
        _make_room(self._decided, REMEMBERED_DECISIONS)
        self._decided[offer_id] = verdict


def _make_room(memory: dict[str, Any], limit: int) -> None:
    while len(memory) >= limit:
        del memory[next(iter(memory))]


def effective_request(requested: ResourceVector) -> ResourceVector:
    """What is reserved: at least one slot, and a default for what the offer leaves at zero."""
    return ResourceVector(
        max(requested.slots, DEFAULT_REQUEST.slots),
        requested.builds,
        requested.pids or DEFAULT_REQUEST.pids,
        requested.memory_bytes or DEFAULT_REQUEST.memory_bytes,
        requested.cpu_millis or DEFAULT_REQUEST.cpu_millis,
        requested.disk_bytes,
    )


@dataclass(frozen=True, slots=True)
class DiskPressure:
    """High and low watermark with hysteresis (B-25)."""

    high_percent: int
    low_percent: int
    minimum_free_bytes: int
    latched: bool = False

    def observe(self, used_percent: int, free_bytes: int) -> DiskPressure:
        """Latches above the high mark or below the minimum; unlatches only below the low one."""
        short = free_bytes < self.minimum_free_bytes
        if used_percent > self.high_percent or short:
            return replace(self, latched=True)
        if used_percent < self.low_percent:
            return replace(self, latched=False)
        return self


def _refuse_unfit(offer: Offer, facts: RunnerFacts) -> Verdict | None:
    if facts.stopping:
        return _no(RejectionCode.STOPPING)
    if facts.draining:
        return _no(RejectionCode.DRAINING)
    if offer.trust_domain_id != facts.trust_domain_id:
        return _no(
            RejectionCode.TRUST_DOMAIN_MISMATCH,
            f"this runner belongs to trust domain {facts.trust_domain_id}",
        )
    if offer.repository not in facts.repositories:
        return _no(
            RejectionCode.UNKNOWN_REPOSITORY,
            f"no repository {offer.repository} here; forge-bridge add-repo adds one",
        )
    return _refuse_policy(offer, facts) or _refuse_disk(facts)


def _refuse_policy(offer: Offer, facts: RunnerFacts) -> Verdict | None:
    if offer.policy is Policy.HOST:
        if not facts.host_execution_allowed:
            return _no(RejectionCode.HOST_EXECUTION_DENIED, _NO_HOST_EXECUTION)
        return _no(RejectionCode.RUNTIME_UNAVAILABLE, "attempts run in the sandbox only")
    if Runtime.DOCKER not in facts.runtimes:
        if offer.policy is Policy.SANDBOX_PREFERRED and offer.host_fallback is not None:
            return _no(RejectionCode.HOST_FALLBACK_DENIED, "attempts run in the sandbox only")
        return _no(RejectionCode.RUNTIME_UNAVAILABLE, "; ".join(facts.blockers)[:2000] or None)
    if offer.policy is Policy.SANDBOX_REQUIRED:
        missing = list(facts.blockers)
        if offer.approved_commit is None:
            missing.append("approved_commit")
        if missing:
            return _no(RejectionCode.POLICY_UNSATISFIED, ", ".join(missing)[:2000])
    wanted = offer.requirements
    if wanted.network_policy not in facts.network_policies:
        return _no(RejectionCode.POLICY_UNSATISFIED, f"network policy {wanted.network_policy}")
    if absent := [s.name for s in wanted.services if s.name not in facts.services]:
        return _no(RejectionCode.POLICY_UNSATISFIED, f"services {', '.join(absent)}")
    if wanted.publication_mode not in facts.publication_modes:
        return _no(RejectionCode.POLICY_UNSATISFIED, f"publication mode {wanted.publication_mode}")
    return None


def _refuse_disk(facts: RunnerFacts) -> Verdict | None:
    return _no(RejectionCode.DISK_PRESSURE) if facts.disk_pressure else None


def _no(code: RejectionCode, detail: str | None = None) -> Verdict:
    return Verdict(code=code, detail=detail)
