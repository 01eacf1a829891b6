"""One dispatch of one attempt: what is recorded, told and done as it goes (lifecycle.md, Attempt).

::

    reserved ──Started──▶ running ──StagesEnded──▶ ending ──ResourcesRemoved──▶ ended
       │                     │                        │  something resisted
       │ expired, cancelled  │ the first reason       ▼
       └──▶ ended            │ to end wins         degraded ──ResourcesRemoved──▶ ended

The result is durable before teardown begins (``cleanup: pending``) and again after it
(``complete``); its outcome never changes.  Whatever came from outside is refused before
:func:`step`; an impossible (phase, event) pair here is a bug of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

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
from forge_core.labels import Owner
from forge_core.lease import Lease, Refusal
from forge_core.ready import Action, Message, Ready, Record, RecordKind, recorded
from forge_core.resources import ResourceVector
from forge_core.wire.base import WireModel
from forge_core.wire.codes import (
    CleanupState,
    EventType,
    FailureCode,
    RemovalOutcome,
    Stage,
    outcome_of,
)
from forge_core.wire.events import EMPTY, AgentExited, OutputImported, Warning_
from forge_core.wire.from_bridge import (
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitDispatchResult,
)
from forge_core.wire.from_hub import LeaseUpdate
from forge_core.wire.limits import cut_text
from forge_core.wire.shapes import StageTiming

MAX_SUMMARY_BYTES = 4_000


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


@dataclass(frozen=True, slots=True)
class Attempt:
    """All that is known of one dispatch."""

    owner: Owner
    offer_id: str
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
    refused_renewals: int = 0
    stage: Stage | None = None
    stage_since: Now | None = None
    timings: Mapping[Stage, StageTiming] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        """The attempt id and its fence."""
        return self.owner.attempt_id, self.owner.fence


def reserve(
    owner: Owner, offer_id: str, resources: ResourceVector, now: Now
) -> tuple[Attempt, Ready]:
    """A reservation was made: its ledger begins."""
    attempt = Attempt(owner, offer_id)
    data = {
        "offerId": offer_id,
        "runnerId": owner.runner_id,
        "runnerInstanceId": owner.runner_instance_id,
        "attemptId": owner.attempt_id,
        "fence": owner.fence,
        "projectId": owner.project_id,
        "trustDomainId": owner.trust_domain_id,
        "resources": {name: getattr(resources, name) for name in ResourceVector.__slots__},
    }
    attempt, ready = _tell(attempt, EventType.OFFER_RESERVED, EMPTY, now)
    return attempt, recorded(Record(RecordKind.RESERVED, data)).then(ready)


def step(attempt: Attempt, event: Event, now: Now) -> tuple[Attempt, Ready]:
    """The next state, and what must be recorded, told and done for it."""
    match attempt.phase, event:
        case Phase.RESERVED, Started(lease):
            running = replace(attempt, phase=Phase.RUNNING, lease=lease)
            return running, recorded(Record(RecordKind.STARTED, {"at": now.utc}))
        case Phase.RESERVED, EndRequested(failure, detail):
            return _conclude(replace(attempt, failure=failure, failure_detail=detail), now)
        case Phase.RUNNING, EndRequested(failure, detail):
            return _end(attempt, failure, detail)
        case Phase.RUNNING, Tick():
            expired = attempt.lease.expired(now.ms) if attempt.lease else None
            return _end(attempt, expired.failure_code, None) if expired else (attempt, Ready())
        case Phase.RUNNING, RenewalArrived(update):
            return _renew(attempt, update, now)
        case Phase.RUNNING, StagesEnded(failure, detail):
            if attempt.failure is None:
                attempt = replace(attempt, failure=failure, failure_detail=detail)
            return _conclude(attempt, now)
        case Phase.RUNNING, _:
            return _running(attempt, event, now)
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
        case (Phase.RESERVED, Tick() | RenewalArrived()):
            return attempt, Ready()
    raise AssertionError(f"attempt {attempt.key}: {event} in phase {attempt.phase}")


def next_wake_ms(attempt: Attempt) -> int | None:
    """When :class:`Tick` is due."""
    if attempt.phase is not Phase.RUNNING or attempt.lease is None:
        return None
    return attempt.lease.next_deadline()[0]


def stream_event(
    attempt: Attempt, event_type: EventType, payload: WireModel, now: Now
) -> tuple[Attempt, Message]:
    """A log chunk or a deadline notice: sent or dropped, never stored."""
    attempt = replace(attempt, stream_sequence=attempt.stream_sequence + 1)
    body = _event_body(attempt, event_type, payload, now, durable=False)
    return attempt, Message(body["eventId"], "SubmitDispatchEvent", body, durable=False)


def _running(attempt: Attempt, event: Event, now: Now) -> tuple[Attempt, Ready]:
    lease = attempt.lease
    assert lease is not None
    match event:
        case StageEntered(stage):
            return replace(_close_stage(attempt, now), stage=stage, stage_since=now), Ready()
        case ResourceIntended(kind, name, role):
            data = {"kind": kind, "name": name, "role": role}
            return attempt, recorded(Record(RecordKind.INTENT, data))
        case ResourceCreated():
            return attempt, recorded(_fact(event))
        case Happened(event_type, payload):
            return _tell(attempt, event_type, payload, now)
        case AgentStarted():
            attempt = replace(attempt, lease=leases.agent_started(lease, now.ms))
            return _tell(attempt, EventType.AGENT_STARTED, EMPTY, now)
        case OutputSeen():
            return replace(attempt, lease=leases.output_seen(lease, now.ms)), Ready()
        case AgentEnded(exit_code, signal):
            attempt = replace(
                attempt,
                exit_code=exit_code,
                signal=signal,
                lease=leases.agent_ended(lease),
            )
            payload = AgentExited(exit_code=exit_code, signal=signal)
            return _tell(attempt, EventType.AGENT_EXITED, payload, now)
        case OutputAccepted(output):
            attempt = replace(attempt, result_commit=output.result_commit)
            imported = OutputImported(
                result_commit=output.result_commit, files=output.files, bytes=output.size_bytes
            )
            return _tell(attempt, EventType.OUTPUT_IMPORTED, imported, now)
    raise AssertionError(f"attempt {attempt.key}: {event} while running")


def _end(attempt: Attempt, failure: FailureCode, detail: str | None) -> tuple[Attempt, Ready]:
    if attempt.failure is not None:
        return attempt, Ready()
    ended = replace(attempt, failure=failure, failure_detail=detail)
    return ended, Ready(actions=(StopStages(),))


def _renew(attempt: Attempt, update: LeaseUpdate, now: Now) -> tuple[Attempt, Ready]:
    assert attempt.lease is not None
    renewed, refusal = leases.renew(attempt.lease, update, now.ms)
    if refusal is None:
        actions: tuple[Action, ...] = (ForwardRenewal(update),)
        return replace(attempt, lease=renewed), Ready(actions=actions)
    return _count_refusal(attempt, refusal, now)


def _count_refusal(attempt: Attempt, refusal: Refusal, now: Now) -> tuple[Attempt, Ready]:
    """Counted always, told once per attempt: a hostile sender must not fill the outbox."""
    attempt = replace(attempt, refused_renewals=attempt.refused_renewals + 1)
    if attempt.refused_renewals > 1:
        return attempt, Ready()
    warning = Warning_(code="lease_renewal_refused", detail=refusal.value)
    return _tell(attempt, EventType.WARNING, warning, now)


def _conclude(attempt: Attempt, now: Now) -> tuple[Attempt, Ready]:
    """The outcome is decided: durable before anything is torn down."""
    started = attempt.phase is Phase.RUNNING
    attempt = _close_stage(attempt, now)
    if not started:
        attempt = replace(attempt, phase=Phase.ENDED)
        attempt, result = _result(attempt, CleanupState.COMPLETE)
        released = Record(RecordKind.RELEASED, {"at": now.utc})
        return attempt, recorded(result, released, actions=(FreeReservation(),))
    attempt = replace(attempt, phase=Phase.ENDING, stage=Stage.TEARDOWN, stage_since=now)
    attempt, result = _result(attempt, CleanupState.PENDING)
    attempt, told = _tell(attempt, EventType.TEARDOWN_STARTED, EMPTY, now)
    return attempt, recorded(result).then(told).then(Ready(actions=(TearDown(),)))


def _removed(attempt: Attempt, event: Event, now: Now) -> tuple[Attempt, Ready]:
    assert isinstance(event, ResourcesRemoved)
    records: list[Record] = []
    if event.resources:
        listed = [resource.to_wire() for resource in event.resources]
        records.append(Record(RecordKind.REMOVAL, {"resources": listed}))
        records.append(_report(attempt, event, now))
    if any(r.outcome is RemovalOutcome.FAILED for r in event.resources):
        attempt = replace(attempt, phase=Phase.DEGRADED)
        return attempt, recorded(*records, actions=(DegradeReservation(),))
    ready = recorded(*records)
    attempt, told = _tell(attempt, EventType.TEARDOWN_FINISHED, EMPTY, now)
    attempt = replace(_close_stage(attempt, now), phase=Phase.ENDED)
    attempt, result = _result(attempt, CleanupState.COMPLETE)
    released = Record(RecordKind.RELEASED, {"at": now.utc})
    return attempt, ready.then(told).then(recorded(result, released, actions=(FreeReservation(),)))


def _report(attempt: Attempt, event: ResourcesRemoved, now: Now) -> Record:
    owner = attempt.owner
    material = f"{attempt.key}|{owner.runner_instance_id}|{event.trigger}|{attempt.sequence}"
    report = SubmitCleanupReport(
        report_id=hashlib.sha256(f"{material}|{now.utc}".encode()).hexdigest()[:32],
        attempt_id=owner.attempt_id,
        fence=owner.fence,
        resource_runner_instance_id=owner.runner_instance_id,
        runner_id=owner.runner_id,
        runner_instance_id=owner.runner_instance_id,
        part=1,
        parts=1,
        created_at=now.utc,
        trigger=event.trigger,
        resources=event.resources,
    )
    return Record(RecordKind.CLEANUP_REPORT, report.to_wire())


def _result(attempt: Attempt, cleanup: CleanupState) -> tuple[Attempt, Record]:
    revision = 1 if cleanup is CleanupState.PENDING else 2
    attempt = replace(attempt, revision=revision)
    summary, _ = cut_text(attempt.failure_detail or "", MAX_SUMMARY_BYTES)
    result = SubmitDispatchResult(
        attempt_id=attempt.owner.attempt_id,
        fence=attempt.owner.fence,
        resource_runner_instance_id=attempt.owner.runner_instance_id,
        revision=revision,
        outcome=outcome_of(attempt.failure),
        failure_code=attempt.failure,
        exit_code=attempt.exit_code,
        signal=attempt.signal,
        result_commit=attempt.result_commit if attempt.failure is None else None,
        cleanup=cleanup,
        summary=summary or None,
        timings=dict(attempt.timings),
    )
    return attempt, Record(RecordKind.RESULT, result.to_wire())


def _tell(
    attempt: Attempt, event_type: EventType, payload: WireModel, now: Now
) -> tuple[Attempt, Ready]:
    attempt = replace(attempt, sequence=attempt.sequence + 1)
    body = _event_body(attempt, event_type, payload, now, durable=True)
    return attempt, recorded(Record(RecordKind.EVENT, body))


def _event_body(
    attempt: Attempt, event_type: EventType, payload: WireModel, now: Now, *, durable: bool
) -> dict[str, Any]:
    owner = attempt.owner
    number = attempt.sequence if durable else attempt.stream_sequence
    stream = "durable" if durable else "stream"
    material = f"{owner.runner_instance_id}|{attempt.key}|{stream}|{number}"
    return SubmitDispatchEvent(
        event_id=hashlib.sha256(material.encode()).hexdigest()[:32],
        attempt_id=owner.attempt_id,
        fence=owner.fence,
        resource_runner_instance_id=owner.runner_instance_id,
        sequence=number if durable else None,
        stream_sequence=None if durable else number,
        at=now.utc,
        type=event_type,
        payload=payload.to_wire(),
    ).to_wire()


def _fact(event: Event) -> Record:
    assert isinstance(event, ResourceCreated)
    data = {"kind": event.kind, "id": event.id, "name": event.name, "role": event.role}
    return Record(RecordKind.FACT, data)


def _close_stage(attempt: Attempt, now: Now) -> Attempt:
    if attempt.stage is None or attempt.stage_since is None:
        return attempt
    timing = StageTiming(
        started_at=attempt.stage_since.utc, duration_ms=max(0, now.ms - attempt.stage_since.ms)
    )
    timings = {**attempt.timings, attempt.stage: timing}
    return replace(attempt, stage=None, stage_since=None, timings=timings)
