"""What a dispatch writes into its ledger: the shape of each record, for writer and reader alike.

Events, results and cleanup reports are recorded exactly as they are sent, so that the outbox
can be made again from the ledger (:func:`forge_core.ready.messages_of`).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from forge_core.labels import Owner
from forge_core.ready import Message, Record, RecordKind
from forge_core.resources import ResourceVector
from forge_core.wire.base import Commit, Fence, Id, Name, Timestamp, WireModel
from forge_core.wire.codes import (
    CleanupState,
    CleanupTrigger,
    EventType,
    PublicationOutcome,
    ResourceKind,
    Runtime,
    outcome_of,
)
from forge_core.wire.from_bridge import (
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitDispatchResult,
    SubmitPublication,
)
from forge_core.wire.from_hub import Branch
from forge_core.wire.limits import cut_text
from forge_core.wire.shapes import MAX_LIST, RemovedResource

if TYPE_CHECKING:
    from forge_core.attempt import Attempt, Now

MAX_SUMMARY_BYTES = 4_000
FINAL_REVISION = 2
"""The revision of a result that says that the cleanup is complete."""


class Owned(WireModel):
    """How a ledger begins: whose dispatch it is, and where it runs."""

    runner_id: Id
    runner_instance_id: Id
    attempt_id: Id
    fence: Fence
    project_id: Id
    trust_domain_id: Id
    runtime: Runtime

    @property
    def owner(self) -> Owner:
        """As the labels of its resources say it."""
        return Owner(
            self.runner_id,
            self.runner_instance_id,
            self.attempt_id,
            self.fence,
            self.project_id,
            self.trust_domain_id,
        )


class Reserved(Owned):
    """``reserved``: what it holds."""

    offer_id: Id
    resources: ResourceVector


class Orphaned(Owned):
    """``orphaned``: only resources of it were found, which the facts after this one name.

    :ivar cleanup_id: random: one dispatch may be found like this more than once.
    """

    cleanup_id: Id


class Moment(WireModel):
    """``started`` and ``released``: the wall clock, for people."""

    at: Timestamp


class Intended(WireModel):
    """``intent``: the engine is about to be asked for this."""

    kind: ResourceKind
    name: Name
    role: Annotated[str, Field(min_length=1, max_length=64)]


class Created(Intended):
    """``fact``: the engine has it, under this id."""

    id: Name


class Push(WireModel):
    """``push_intent``: the remote is about to be asked to move this branch."""

    branch: Branch
    result_commit: Commit


class Removed(WireModel):
    """``removal``: what a teardown or a pass did."""

    resources: Annotated[tuple[RemovedResource, ...], Field(max_length=MAX_LIST)]


def reserved_record(attempt: Attempt, resources: ResourceVector) -> Record:
    """The first line of the ledger of a dispatch that was reserved here."""
    reserved = Reserved(
        **asdict(attempt.owner),
        runtime=attempt.runtime,
        offer_id=attempt.offer_id,
        resources=resources,
    )
    return Record(RecordKind.RESERVED, reserved.to_wire())


def orphaned_record(owner: Owner, cleanup_id: str, runtime: Runtime) -> Record:
    """The first line of the ledger of a dispatch of which only resources are known."""
    orphaned = Orphaned(**asdict(owner), runtime=runtime, cleanup_id=cleanup_id)
    return Record(RecordKind.ORPHANED, orphaned.to_wire())


def moment_record(kind: RecordKind, now: Now) -> Record:
    """A line that says no more than when."""
    return Record(kind, Moment(at=now.utc).to_wire())


def event_record(attempt: Attempt, event_type: EventType, payload: WireModel, now: Now) -> Record:
    """A durable event, under the attempt's ``sequence``."""
    assert event_type.durable, event_type
    event = _event(attempt, event_type, payload, now, number=attempt.sequence)
    return Record(RecordKind.EVENT, event.to_wire())


def stream_message(
    attempt: Attempt, event_type: EventType, payload: WireModel, now: Now
) -> Message:
    """An event that is sent or dropped, under the attempt's ``stream_sequence``."""
    assert not event_type.durable, event_type
    event = _event(attempt, event_type, payload, now, number=attempt.stream_sequence)
    return Message(event.event_id, "SubmitDispatchEvent", event.to_wire(), durable=False)


def result_record(attempt: Attempt, cleanup: CleanupState) -> Record:
    """How it ended, under the attempt's ``revision``; a failed one has no commit to show."""
    summary, _ = cut_text(attempt.failure_detail or "", MAX_SUMMARY_BYTES)
    result = SubmitDispatchResult(
        attempt_id=attempt.owner.attempt_id,
        fence=attempt.owner.fence,
        resource_runner_instance_id=attempt.owner.runner_instance_id,
        revision=attempt.revision,
        outcome=outcome_of(attempt.failure),
        failure_code=attempt.failure,
        exit_code=attempt.exit_code,
        signal=attempt.signal,
        result_commit=attempt.result_commit if attempt.failure is None else None,
        cleanup=cleanup,
        summary=summary or None,
        timings=dict(attempt.timings),
    )
    return Record(RecordKind.RESULT, result.to_wire())


def publication_record(attempt: Attempt, push: Push, outcome: PublicationOutcome) -> Record:
    """What came of a publication; there is one for each dispatch at most."""
    told = SubmitPublication(
        attempt_id=attempt.owner.attempt_id,
        fence=attempt.owner.fence,
        resource_runner_instance_id=attempt.owner.runner_instance_id,
        branch=push.branch,
        result_commit=push.result_commit,
        outcome=outcome,
    )
    return Record(RecordKind.PUBLICATION, told.to_wire())


def removal_records(
    attempt: Attempt, trigger: CleanupTrigger, resources: tuple[RemovedResource, ...], now: Now
) -> tuple[Record, Record]:
    """What was removed, and the report that tells it, the attempt's ``reports``-th."""
    owner = attempt.owner
    series = "report" if attempt.cleanup_id is None else f"orphans|{attempt.cleanup_id}"
    report = SubmitCleanupReport(
        report_id=_digest(f"{_key(attempt)}|{series}|{attempt.reports}"),
        attempt_id=owner.attempt_id,
        fence=owner.fence,
        resource_runner_instance_id=owner.runner_instance_id,
        runner_id=owner.runner_id,
        runner_instance_id=owner.runner_instance_id,
        part=1,
        parts=1,
        created_at=now.utc,
        trigger=trigger,
        resources=resources,
    )
    removed = Removed(resources=resources)
    return (
        Record(RecordKind.REMOVAL, removed.to_wire()),
        Record(RecordKind.CLEANUP_REPORT, report.to_wire()),
    )


def _event(
    attempt: Attempt, event_type: EventType, payload: WireModel, now: Now, *, number: int
) -> SubmitDispatchEvent:
    owner, stream = attempt.owner, "durable" if event_type.durable else "stream"
    return SubmitDispatchEvent(
        event_id=_digest(f"{_key(attempt)}|{stream}|{number}"),
        attempt_id=owner.attempt_id,
        fence=owner.fence,
        resource_runner_instance_id=owner.runner_instance_id,
        sequence=number if event_type.durable else None,
        stream_sequence=None if event_type.durable else number,
        at=now.utc,
        type=event_type,
        payload=payload.to_wire(),
    )


def _key(attempt: Attempt) -> str:
    """One dispatch; no id contains the separator."""
    owner = attempt.owner
    return f"{owner.runner_instance_id}|{owner.attempt_id}|{owner.fence}"


def _digest(material: str) -> str:
    return hashlib.sha256(material.encode()).hexdigest()[:32]
