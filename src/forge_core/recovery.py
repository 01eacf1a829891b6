"""What a dispatch was when the process died, read back from its ledger (recovery.md, A start).

A restart does not adopt anything: the dispatch is ended with ``bridge_stopped`` (unless its
result was already durable), its resources are removed, and the same machine that runs live
dispatches says what is recorded and told about it.  A push that was intended and whose end was
not recorded is told as ``unknown``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from forge_core.attempt import Attempt, Phase, orphaned
from forge_core.attempt_records import (
    Created,
    Intended,
    Moment,
    Orphaned,
    Push,
    Removed,
    Reserved,
)
from forge_core.errors import RefusedError
from forge_core.ready import Record, RecordKind
from forge_core.resources import ResourceVector
from forge_core.wire.base import Model, parse
from forge_core.wire.codes import EventType, RemovalOutcome
from forge_core.wire.events import AgentExited, OutputImported
from forge_core.wire.from_bridge import (
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitDispatchResult,
    SubmitPublication,
)

_FIRST: Final = (RecordKind.RESERVED, RecordKind.ORPHANED)


def restore(records: Iterable[Record]) -> tuple[Attempt, ResourceVector | None]:
    """The dispatch and the resources that it holds; None: nobody knows what it may use.

    :raises RefusedError: code ``ledger_suspect``: the ledger does not begin as one does, or a
        record is not what its kind must be.
    """
    lines = tuple(records)
    if not lines or lines[0].kind not in _FIRST:
        raise RefusedError(
            "cannot restore a dispatch: its ledger does not begin with a reservation",
            code="ledger_suspect",
        )
    try:
        attempt, resources = _begin(lines[0])
        for record in lines[1:]:
            attempt = _apply(attempt, record)
    except RefusedError as error:
        raise RefusedError(
            f"cannot restore a dispatch from its ledger: {error}", code="ledger_suspect"
        ) from error
    return attempt, resources


def _begin(first: Record) -> tuple[Attempt, ResourceVector | None]:
    if first.kind is RecordKind.RESERVED:
        reserved = _read(Reserved, first.data, first.kind)
        attempt = Attempt(reserved.owner, reserved.offer_id, reserved.runtime)
        return attempt, reserved.resources
    found = _read(Orphaned, first.data, first.kind)
    return orphaned(found.owner, found.cleanup_id, (), found.runtime)[0], None


def _apply(attempt: Attempt, record: Record) -> Attempt:
    kind, data = record.kind, record.data
    match kind:
        case RecordKind.STARTED:
            _read(Moment, data, kind)
            return replace(attempt, phase=Phase.RUNNING)
        case RecordKind.INTENT:
            _read(Intended, data, kind)
            return attempt
        case RecordKind.FACT:
            _read(Created, data, kind)
            return attempt
        case RecordKind.PUSH_INTENT:
            return replace(attempt, push=_read(Push, data, kind))
        case RecordKind.PUBLICATION:
            told = _read(SubmitPublication, data, kind)
            return replace(attempt, push=None, published=told.outcome)
        case RecordKind.EVENT:
            return _event(attempt, _read(SubmitDispatchEvent, data, kind))
        case RecordKind.RESULT:
            return _result(attempt, _read(SubmitDispatchResult, data, kind))
        case RecordKind.REMOVAL:
            return _removal(attempt, _read(Removed, data, kind))
        case RecordKind.CLEANUP_REPORT:
            _read(SubmitCleanupReport, data, kind)
            return replace(attempt, reports=attempt.reports + 1)
        case RecordKind.RELEASED:
            _read(Moment, data, kind)
            return replace(attempt, phase=Phase.ENDED)
        case RecordKind.RESERVED | RecordKind.ORPHANED:
            raise RefusedError("it begins twice", code="ledger_suspect")


def _event(attempt: Attempt, event: SubmitDispatchEvent) -> Attempt:
    if event.sequence is None:
        raise RefusedError("an event of it has no sequence", code="ledger_suspect")
    attempt = replace(attempt, sequence=max(attempt.sequence, event.sequence))
    match event.type:
        case EventType.AGENT_EXITED:
            exited = parse(AgentExited, event.payload, what=event.type)
            return replace(attempt, exit_code=exited.exit_code, signal=exited.signal)
        case EventType.OUTPUT_IMPORTED:
            imported = parse(OutputImported, event.payload, what=event.type)
            return replace(attempt, result_commit=imported.result_commit)
        case _:
            return attempt


def _result(attempt: Attempt, result: SubmitDispatchResult) -> Attempt:
    return replace(
        attempt,
        phase=Phase.ENDING,
        revision=result.revision,
        failure=result.failure_code,
        failure_detail=result.summary,
        exit_code=result.exit_code,
        signal=result.signal,
        timings=result.timings,
    )


def _removal(attempt: Attempt, removed: Removed) -> Attempt:
    if all(r.outcome is not RemovalOutcome.FAILED for r in removed.resources):
        return replace(attempt, resisting=frozenset())
    observed = frozenset((r.kind, r.id, r.outcome) for r in removed.resources)
    return replace(attempt, phase=Phase.DEGRADED, resisting=observed)


def _read(model: type[Model], data: Mapping[str, Any], kind: RecordKind) -> Model:
    return parse(model, dict(data), what=f"a record of kind {kind}")
