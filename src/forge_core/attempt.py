"""One dispatch of one attempt: what is recorded, told and done as it goes (lifecycle.md, Attempt).

::

    reserved ──Started──▶ running ──StagesEnded──▶ ending ──ResourcesRemoved──▶ ended
       │                     │                        │  something resisted
       │ expired, cancelled  │ the first reason       ▼
       └──▶ ended            │ to end wins         degraded ──ResourcesRemoved──▶ ended

Resources of a dispatch that no ledger tells of begin one in *ending*.

The result is durable before teardown begins (``cleanup: pending``) and again after it
(``complete``); its outcome never changes.  A push whose end nobody has seen is told as
``unknown`` before the result.  Whatever came from outside is refused before
:func:`step`; an impossible (phase, event) pair here is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from forge_core import lease as leases
from forge_core.attempt_events import (
    AgentEnded,
    AgentStarted,
    DegradeReservation,
    EndRequested,
    Event,
    ForwardRenewal,
    FreeReservation,
    Happened,
    OutputAccepted,
    OutputSeen,
    Published,
    PushIntended,
    RenewalArrived,
    ResourceCreated,
    ResourceIntended,
    ResourcesRemoved,
    StageEntered,
    StagesEnded,
    Started,
    StopStages,
    TearDown,
    Tick,
)
from forge_core.attempt_records import (
    FINAL_REVISION,
    Created,
    Intended,
    Push,
    event_record,
    moment_record,
    orphaned_record,
    publication_record,
    removal_records,
    reserved_record,
    result_record,
    stream_message,
)
from forge_core.labels import Key, Owner
from forge_core.lease import Lease, Refusal
from forge_core.ready import Action, Message, Ready, Record, RecordKind, recorded
from forge_core.resources import ResourceVector
from forge_core.wire.base import WireModel
from forge_core.wire.codes import (
    CleanupState,
    EventType,
    FailureCode,
    PublicationOutcome,
    RemovalOutcome,
    ResourceKind,
    Runtime,
    Stage,
    WarningCode,
)
from forge_core.wire.events import EMPTY, PAYLOADS, AgentExited, OutputImported, Warning_
from forge_core.wire.limits import cut_detail, fitting_payloads
from forge_core.wire.shapes import StageTiming


class Phase(StrEnum):
    """Where a dispatch stands."""

    RESERVED = "reserved"
    RUNNING = "running"
    ENDING = "ending"
    DEGRADED = "degraded"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Now:
    """The moment of a step: CLOCK_BOOTTIME milliseconds, and the wall clock for people."""

    ms: int
    utc: str


Observed = tuple[ResourceKind, str, RemovalOutcome]
"""A resource, by its id, and what came of its last removal."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """All that is known of one dispatch.

    :ivar runtime: where it runs, and so who holds what it leaves.
    :ivar sequence: of the last durable event; ``stream_sequence`` of the last one sent or dropped.
    :ivar revision: of the last result; 0: its outcome is still open.
    :ivar push: was intended, and nobody has said what came of it.
    :ivar published: what came of the publication, which is told once.
    :ivar reports: how many cleanup reports were made.
    :ivar resisting: what the last report said, when something resisted.
    :ivar cleanup_id: of a dispatch of which only resources were found; None: it was reserved.
    """

    owner: Owner
    offer_id: str
    runtime: Runtime = Runtime.DOCKER
    phase: Phase = Phase.RESERVED
    lease: Lease | None = None
    sequence: int = 0
    stream_sequence: int = 0
    revision: int = 0
    failure: FailureCode | None = None
    failure_detail: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    result_commit: str | None = None
    push: Push | None = None
    published: PublicationOutcome | None = None
    refused_renewals: int = 0
    stage: Stage | None = None
    stage_since: Now | None = None
    timings: Mapping[Stage, StageTiming] = field(default_factory=dict)
    reports: int = 0
    resisting: frozenset[Observed] = frozenset()
    cleanup_id: str | None = None

    @property
    def key(self) -> Key:
        """The dispatch that it is."""
        return self.owner.key


def reserve(
    owner: Owner,
    offer_id: str,
    resources: ResourceVector,
    now: Now,
    runtime: Runtime = Runtime.DOCKER,
) -> tuple[Attempt, Ready]:
    """A reservation was made: its ledger begins."""
    attempt = Attempt(owner, offer_id, runtime)
    reserved = reserved_record(attempt, resources)
    attempt, ready = _tell(attempt, EventType.OFFER_RESERVED, EMPTY, now)
    return attempt, recorded(reserved).then(ready)


def orphaned(
    owner: Owner,
    cleanup_id: str,
    found: Iterable[ResourceCreated],
    runtime: Runtime = Runtime.DOCKER,
) -> tuple[Attempt, Ready]:
    """Resources were found that no ledger tells of: one begins, before any of them is removed.

    It says nothing of the outcome, which nobody here knows.
    """
    records = (orphaned_record(owner, cleanup_id, runtime), *map(_fact, found))
    attempt = Attempt(
        owner, "", runtime, Phase.ENDING, revision=FINAL_REVISION, cleanup_id=cleanup_id
    )
    return attempt, recorded(*records)


def step(attempt: Attempt, event: Event, now: Now) -> tuple[Attempt, Ready]:
    """The next state, and what must be recorded, told and done for it."""
    match attempt.phase, event:
        case Phase.RESERVED, Started(lease):
            running = replace(attempt, phase=Phase.RUNNING, lease=lease)
            return running, recorded(moment_record(RecordKind.STARTED, now))
        case Phase.RESERVED, EndRequested(failure, detail):
            return _conclude(_blame(attempt, failure, detail), now)
        case Phase.RESERVED, Tick() | RenewalArrived():
            return attempt, Ready()
        case Phase.RUNNING, StagesEnded(failure, detail):
            attempt = _blame(attempt, _expired_at(attempt, now), None)
            return _conclude(_blame(attempt, failure, detail), now)
        case Phase.RUNNING, _:
            # Whatever happens, time has passed: a deadline that came first is the first reason.
            attempt, ended = _end(attempt, _expired_at(attempt, now), None)
            attempt, ready = _running(attempt, event, now)
            return attempt, ended.then(ready)
        case Phase.ENDING | Phase.DEGRADED, ResourcesRemoved():
            return _removed(attempt, event, now)
        case Phase.ENDING | Phase.DEGRADED, ResourceCreated():
            # A create that was cancelled or timed out and happened all the same.
            return attempt, recorded(_fact(event))
        case (
            (Phase.ENDING | Phase.DEGRADED | Phase.ENDED),
            (EndRequested() | RenewalArrived() | Tick() | OutputSeen() | Happened()),
        ):
            return attempt, Ready()
        case Phase.ENDED, Started():
            # It was ended while the start waited for its turn.
            return attempt, Ready()
    raise AssertionError(f"attempt {attempt.key}: {event} in phase {attempt.phase}")


def next_wake_ms(attempt: Attempt) -> int | None:
    """When :class:`Tick` is due; never again once a reason to end is there."""
    if attempt.phase is not Phase.RUNNING or attempt.lease is None or attempt.failure is not None:
        return None
    return attempt.lease.next_deadline()[0]


def stream_event(
    attempt: Attempt, event_type: EventType, payload: WireModel, now: Now
) -> tuple[Attempt, Message]:
    """A log chunk or a deadline notice: sent or dropped, never stored."""
    attempt = replace(attempt, stream_sequence=attempt.stream_sequence + 1)
    return attempt, stream_message(attempt, event_type, payload, now)


def _running(attempt: Attempt, event: Event, now: Now) -> tuple[Attempt, Ready]:
    match event:
        case Tick():
            return attempt, Ready()
        case EndRequested(failure, detail):
            return _end(attempt, failure, detail)
        case RenewalArrived():
            return _renew(attempt, event, now)
        case StageEntered(stage):
            return replace(_close_stage(attempt, now), stage=stage, stage_since=now), Ready()
        case ResourceIntended(kind, name, role):
            intended = Intended(kind=kind, name=name, role=role)
            return attempt, recorded(Record(RecordKind.INTENT, intended.to_wire()))
        case ResourceCreated():
            return attempt, recorded(_fact(event))
        case Happened(event_type, payload):
            return _tell(attempt, event_type, payload, now)
        case AgentStarted() | OutputSeen() | AgentEnded():
            return _agent(attempt, event, now)
        case OutputAccepted(output):
            attempt = replace(attempt, result_commit=output.result_commit)
            imported = OutputImported(
                result_commit=output.result_commit, files=output.files, bytes=output.size_bytes
            )
            return _tell(attempt, EventType.OUTPUT_IMPORTED, imported, now)
        case PushIntended(branch, result_commit):
            assert attempt.published is None, f"attempt {attempt.key}: is published already"
            push = Push(branch=branch, result_commit=result_commit)
            record = Record(RecordKind.PUSH_INTENT, push.to_wire())
            return replace(attempt, push=push), recorded(record)
        case Published(branch, result_commit, outcome):
            return _published(attempt, Push(branch=branch, result_commit=result_commit), outcome)
    raise AssertionError(f"attempt {attempt.key}: {event} in phase {attempt.phase}")


def _agent(
    attempt: Attempt, event: AgentStarted | OutputSeen | AgentEnded, now: Now
) -> tuple[Attempt, Ready]:
    lease = attempt.lease
    assert lease is not None, f"attempt {attempt.key}: {event} without a lease"
    match event:
        case AgentStarted():
            attempt = replace(attempt, lease=leases.agent_started(lease, now.ms))
            return _tell(attempt, EventType.AGENT_STARTED, EMPTY, now)
        case OutputSeen():
            return replace(attempt, lease=leases.output_seen(lease, now.ms)), Ready()
        case AgentEnded(exit_code, signal):
            attempt = replace(
                attempt, exit_code=exit_code, signal=signal, lease=leases.agent_ended(lease)
            )
            payload = AgentExited(exit_code=exit_code, signal=signal)
            return _tell(attempt, EventType.AGENT_EXITED, payload, now)


def _published(attempt: Attempt, push: Push, outcome: PublicationOutcome) -> tuple[Attempt, Ready]:
    assert attempt.published is None, f"attempt {attempt.key}: is published already"
    told = recorded(publication_record(attempt, push, outcome))
    return replace(attempt, push=None, published=outcome), told


def _expired_at(attempt: Attempt, now: Now) -> FailureCode | None:
    deadline = attempt.lease.expired(now.ms) if attempt.lease is not None else None
    return deadline.failure_code if deadline is not None else None


def _blame(attempt: Attempt, failure: FailureCode | None, detail: str | None) -> Attempt:
    """The first reason wins."""
    if attempt.failure is not None or failure is None:
        return attempt
    return replace(attempt, failure=failure, failure_detail=detail)


def _end(
    attempt: Attempt, failure: FailureCode | None, detail: str | None
) -> tuple[Attempt, Ready]:
    blamed = _blame(attempt, failure, detail)
    return blamed, Ready() if blamed is attempt else Ready(actions=(StopStages(),))


def _renew(attempt: Attempt, event: RenewalArrived, now: Now) -> tuple[Attempt, Ready]:
    assert attempt.lease is not None, f"attempt {attempt.key}: a renewal without a lease"
    renewed, refusal = leases.renew(
        attempt.lease, event.update, now.ms, received_ms=event.received_ms
    )
    if refusal is None:
        actions: tuple[Action, ...] = (ForwardRenewal(event.update),)
        return replace(attempt, lease=renewed), Ready(actions=actions)
    return _count_refusal(attempt, refusal, now)


def _count_refusal(attempt: Attempt, refusal: Refusal, now: Now) -> tuple[Attempt, Ready]:
    """Counted always, told once per attempt: a hostile sender must not fill the outbox."""
    attempt = replace(attempt, refused_renewals=attempt.refused_renewals + 1)
    if attempt.refused_renewals > 1:
        return attempt, Ready()
    warning = Warning_(code=WarningCode.LEASE_RENEWAL_REFUSED, detail=refusal.value)
    return _tell(attempt, EventType.WARNING, warning, now)


def _conclude(attempt: Attempt, now: Now) -> tuple[Attempt, Ready]:
    """The outcome is decided: durable before anything is torn down."""
    if attempt.phase is Phase.RESERVED:
        return _release(attempt, now)
    attempt = _close_stage(attempt, now)
    attempt = replace(attempt, phase=Phase.ENDING, stage=Stage.TEARDOWN, stage_since=now)
    published = Ready()
    if attempt.push is not None:
        attempt, published = _published(attempt, attempt.push, PublicationOutcome.UNKNOWN)
    attempt, told = _tell(attempt, EventType.TEARDOWN_STARTED, EMPTY, now)
    attempt = replace(attempt, revision=1)
    result = recorded(result_record(attempt, CleanupState.PENDING), actions=(TearDown(),))
    return attempt, published.then(told).then(result)


def _removed(attempt: Attempt, event: ResourcesRemoved, now: Now) -> tuple[Attempt, Ready]:
    resources = tuple(map(cut_detail, event.resources))
    observed = frozenset((r.kind, r.id, r.outcome) for r in resources)
    resists = any(r.outcome is RemovalOutcome.FAILED for r in resources)
    ready = Ready()
    # A pass that finds the same things resisting has no news: the ledger must not grow with it.
    # The first one is reported even when nothing was there to remove: under an old fence a hub
    # takes nothing else as the proof that nothing is left (protocol.md, Attempts and fences).
    if observed != attempt.resisting or not attempt.reports:
        ready = recorded(*removal_records(attempt, event.trigger, resources, now))
        attempt = replace(attempt, reports=attempt.reports + 1)
    if resists:
        attempt = replace(attempt, phase=Phase.DEGRADED, resisting=observed)
        return attempt, ready.then(Ready(actions=(DegradeReservation(),)))
    if attempt.revision < FINAL_REVISION:
        attempt, told = _tell(attempt, EventType.TEARDOWN_FINISHED, EMPTY, now)
        ready = ready.then(told)
    attempt, released = _release(_close_stage(attempt, now), now)
    return attempt, ready.then(released)


def _release(attempt: Attempt, now: Now) -> tuple[Attempt, Ready]:
    """Nothing is held any more; a crash may have come between these two records."""
    records = [moment_record(RecordKind.RELEASED, now)]
    if attempt.revision < FINAL_REVISION:
        attempt = replace(attempt, revision=FINAL_REVISION)
        records.insert(0, result_record(attempt, CleanupState.COMPLETE))
    ended = replace(attempt, phase=Phase.ENDED)
    return ended, recorded(*records, actions=(FreeReservation(),))


def _tell(
    attempt: Attempt, event_type: EventType, payload: WireModel, now: Now
) -> tuple[Attempt, Ready]:
    """A durable event, or as many as it takes: one that cannot be sent would stop all others."""
    assert isinstance(payload, PAYLOADS[event_type]), (event_type, payload)
    records = []
    for part in fitting_payloads(payload):
        attempt = replace(attempt, sequence=attempt.sequence + 1)
        records.append(event_record(attempt, event_type, part, now))
    return attempt, recorded(*records)


def _fact(event: ResourceCreated) -> Record:
    created = Created(kind=event.kind, id=event.id, name=event.name, role=event.role)
    return Record(RecordKind.FACT, created.to_wire())


def _close_stage(attempt: Attempt, now: Now) -> Attempt:
    if attempt.stage is None or attempt.stage_since is None:
        return attempt
    timing = StageTiming(
        started_at=attempt.stage_since.utc, duration_ms=max(0, now.ms - attempt.stage_since.ms)
    )
    timings = {**attempt.timings, attempt.stage: timing}
    return replace(attempt, stage=None, stage_since=None, timings=timings)
