"""Reservations: who may run here, and what it holds (lifecycle.md, Reservation; B-10, B-21, B-22).

::

            offer fits            start             teardown begins        all removed
  (none) ────────────▶ reserved ────────▶ starting ─▶ active ─▶ releasing ────────▶ (gone)
                         │ offer expires                │           │ something resisted
                         └────────▶ (gone)              └──▶   degraded ── pass succeeds ──▶ (gone)

Deciding and reserving are one step, so two offers that arrive together can never both take
the last slot.  A reservation holds its whole vector until it is freed, but for ``builds``, which
it needs until its image is there; degraded still counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from forge_core.labels import Key
from forge_core.offer_rules import (
    NO_HOST_EXECUTION,
    RunnerFacts,
    Verdict,
    judge,
    refuse_shares,
    refused,
)
from forge_core.resources import (
    CAPACITY_CODES,
    ResourceCapacity,
    ResourceVector,
    exceeded_component,
)
from forge_core.subnet_pool import MOST_NETWORKS, SubnetPool, networks_needed
from forge_core.wire.base import MAX_INT
from forge_core.wire.codes import RejectionCode, ReservationState, Runtime
from forge_core.wire.from_hub import Offer

__all__ = ["Admission", "DiskPressure", "Key", "Reservation", "RunnerFacts", "Verdict"]

_OfferKey = tuple[str, str, int]

REMEMBERED_DECISIONS: Final = 256
REMEMBERED_ATTEMPTS: Final = 4096

DEFAULT_REQUEST: Final = ResourceVector(
    slots=1, pids=256, memory_bytes=1 << 30, cpu_millis=1000, disk_bytes=0
)
"""What a component that the offer leaves at zero is taken for: every container has limits."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Capacity held for one dispatch."""

    key: Key
    offer_id: str
    resources: ResourceVector
    state: ReservationState
    expires_at_ms: int
    runtime: Runtime = Runtime.DOCKER


@dataclass(slots=True)
class _Fences:
    """What is remembered of an attempt: the highest fence seen, and the highest held or spent."""

    seen: int = 0
    held: int = -1


class Admission:
    """All reservations of this runner instance, and what was decided lately.

    No clock, no I/O; one owner calls it from one thread.  It changes in place because a copy
    of the remembered fences with every decision would cost more than the decision.  Memory is
    bounded: of attempts that hold nothing, the ones not heard of for longest are forgotten.
    """

    __slots__ = ("_decided", "_fences", "_reservations", "subnets", "used")

    def __init__(self, subnets: SubnetPool | None = None) -> None:
        self.subnets = SubnetPool() if subnets is None else subnets
        self._reservations: dict[Key, Reservation] = {}
        self._decided: dict[_OfferKey, Verdict] = {}
        self._fences: dict[str, _Fences] = {}
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
        fences = self._fences.get(attempt_id)
        return 0 if fences is None else fences.seen

    def was_held(self, key: Key) -> bool:
        """Nothing runs twice under one fence, also when its message comes late again."""
        attempt_id, fence = key
        fences = self._fences.get(attempt_id)
        return fences is not None and fence <= fences.held

    def spend(self, key: Key) -> None:
        """Its result was given without a run: nothing is taken on under this fence any more."""
        attempt_id, fence = key
        fences = self._see_fence(attempt_id, fence)
        fences.held = max(fences.held, fence)

    def superseded_by(self, attempt_id: str, fence: int) -> tuple[Key, ...]:
        """The reservations of this attempt under lower fences."""
        return tuple(k for k in self._reservations if k[0] == attempt_id and k[1] < fence)

    def decide(self, offer: Offer, facts: RunnerFacts, now_ms: int) -> Verdict:
        """Answer an offer and, when the answer is yes, hold its resources: one step.

        The same offer again gets the same answer and holds nothing more.
        """
        earlier = self._decided_earlier(offer)
        if earlier is not None:
            return earlier
        verdict = self._refuse_fence(offer) or judge(offer, facts)
        self._see_fence(offer.attempt_id, offer.fence)
        if verdict.runtime is not None:
            requested, networks = effective_request(offer.resources), _networks(offer, verdict)
            refusal = (
                refuse_shares(requested, offer.requirements.services)
                or self._refuse_capacity(requested, facts.capacity)
                or self._refuse_networks(networks)
            )
            if refusal is None:
                self._hold(
                    Reservation(
                        (offer.attempt_id, offer.fence),
                        offer.offer_id,
                        requested,
                        ReservationState.RESERVED,
                        now_ms + offer.expires_in_ms,
                        verdict.runtime,
                    ),
                    networks,
                )
            verdict = refusal or verdict
        self._remember(_offer_key(offer), verdict)
        return verdict

    def withdraw(self, offer: Offer, code: RejectionCode, detail: str) -> Verdict:
        """Take a yes back that nobody has heard: free what it holds, and say no from now on."""
        self.free((offer.attempt_id, offer.fence))
        verdict = refused(code, detail)
        self._remember(_offer_key(offer), verdict)
        return verdict

    def hold_legacy(self, dispatch_id: str, facts: RunnerFacts) -> Verdict:
        """A v1 dispatch takes one slot and runs on the host, once (protocol.md, Legacy v1)."""
        key = (dispatch_id, 0)
        if self.was_held(key):
            return refused(RejectionCode.STALE_FENCE, f"dispatch {dispatch_id} was taken before")
        if not facts.host_execution_allowed:
            return refused(RejectionCode.HOST_EXECUTION_DENIED, NO_HOST_EXECUTION)
        if facts.stopping or facts.draining:
            return refused(RejectionCode.STOPPING if facts.stopping else RejectionCode.DRAINING)
        one_slot = ResourceVector(slots=1)
        refusal = self._refuse_capacity(one_slot, facts.capacity)
        if refusal is not None:
            return refusal
        self._hold(
            Reservation(key, dispatch_id, one_slot, ReservationState.ACTIVE, 0, Runtime.HOST)
        )
        return Verdict(runtime=Runtime.HOST)

    def hold_degraded(self, key: Key, resources: ResourceVector, runtime: Runtime) -> None:
        """Something of an older instance resisted removal: its capacity stays taken."""
        if key not in self._reservations:
            degraded = ReservationState.DEGRADED
            networks = MOST_NETWORKS if runtime is Runtime.DOCKER else 0
            self._hold(Reservation(key, "", resources, degraded, 0, runtime), networks)

    def hold_orphaned(self, key: Key, capacity: ResourceCapacity) -> None:
        """Something resists that no ledger accounts for: it may use all there is.

        Its dispatch does not count as held here, so that the hub is told of its end.
        """
        if key not in self._reservations:
            self._see_fence(*key)
            self._add(Reservation(key, "", capacity.whole, ReservationState.DEGRADED, 0))

    def transition(self, key: Key, state: ReservationState) -> None:
        """Move a reservation on; moving it to the state that it has is a no-op."""
        self._reservations[key] = replace(self._reservations[key], state=state)

    def release_builds(self, key: Key) -> None:
        """Its image is there: give back what it held to build it.  Idempotent."""
        reservation = self._reservations.get(key)
        if reservation is not None and reservation.resources.builds:
            builds = ResourceVector(builds=reservation.resources.builds)
            rest = replace(reservation, resources=reservation.resources - builds)
            self._reservations[key] = rest
            self.used -= builds

    def free(self, key: Key) -> None:
        """Give the resources back: everything of the dispatch was observed gone.  Idempotent."""
        reservation = self._reservations.pop(key, None)
        if reservation is not None:
            self.used -= reservation.resources
            self.subnets.release(key)

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
        highest = self.highest_fence(offer.attempt_id)
        if offer.fence < highest:
            return refused(
                RejectionCode.STALE_FENCE, f"attempt {offer.attempt_id} is at fence {highest}"
            )
        key = (offer.attempt_id, offer.fence)
        if self.was_held(key) or key in self._reservations:
            return refused(
                RejectionCode.STALE_FENCE,
                f"attempt {offer.attempt_id} was accepted under fence {offer.fence} before",
            )
        return None

    def _decided_earlier(self, offer: Offer) -> Verdict | None:
        held = self._reservations.get((offer.attempt_id, offer.fence))
        if held is not None and held.offer_id == offer.offer_id:
            return Verdict(runtime=held.runtime)
        return self._decided.get(_offer_key(offer))

    def _refuse_capacity(
        self, requested: ResourceVector, capacity: ResourceCapacity
    ) -> Verdict | None:
        component = exceeded_component(self.used, requested, capacity)
        if component is None:
            return None
        ceiling = getattr(capacity, component)
        free = (MAX_INT if ceiling is None else ceiling) - getattr(self.used, component)
        return refused(
            CAPACITY_CODES[component],
            f"{component}: {getattr(requested, component)} asked for, {max(free, 0)} free",
        )

    def _refuse_networks(self, count: int) -> Verdict | None:
        free = self.subnets.free
        if count <= free:
            return None
        return refused(
            RejectionCode.CAPACITY_NETWORKS,
            f"networks: {count} asked for, {free} free; FORGE_SANDBOX_SUBNET_POOL has "
            f"{self.subnets.size}",
        )

    def _hold(self, reservation: Reservation, networks: int = 0) -> None:
        attempt_id, fence = reservation.key
        fences = self._see_fence(attempt_id, fence)
        fences.held = max(fences.held, fence)
        self.subnets.hold(reservation.key, networks)
        self._add(reservation)

    def _add(self, reservation: Reservation) -> None:
        self._reservations[reservation.key] = reservation
        self.used += reservation.resources

    def _see_fence(self, attempt_id: str, fence: int) -> _Fences:
        fences = self._fences.pop(attempt_id, None)
        if fences is None:
            fences = _Fences()
            if len(self._fences) >= REMEMBERED_ATTEMPTS + len(self._reservations):
                self._forget_oldest()
        fences.seen = max(fences.seen, fence)
        self._fences[attempt_id] = fences
        return fences

    def _forget_oldest(self) -> None:
        live = {attempt_id for attempt_id, _ in self._reservations}
        del self._fences[next(a for a in self._fences if a not in live)]

    def _remember(self, key: _OfferKey, verdict: Verdict) -> None:
        self._decided.pop(key, None)
        if len(self._decided) >= REMEMBERED_DECISIONS:
            del self._decided[next(iter(self._decided))]
        self._decided[key] = verdict


def _networks(offer: Offer, verdict: Verdict) -> int:
    """On the host there are none."""
    if verdict.runtime is not Runtime.DOCKER:
        return 0
    return networks_needed(offer.requirements.network_policy, offer.requirements.services)


def _offer_key(offer: Offer) -> _OfferKey:
    return offer.offer_id, offer.attempt_id, offer.fence


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
