"""What a dispatch was when the process died, read back from its ledger (lifecycle.md, Crash).

A restart does not adopt anything: the dispatch is ended with ``bridge_stopped`` (unless its
result was already durable), its resources are removed, and the same machine that runs live
dispatches says what is recorded and told about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from forge_core.attempt import Attempt, Phase
from forge_core.errors import RefusedError
from forge_core.labels import Owner
from forge_core.ready import Record, RecordKind
from forge_core.resources import ResourceVector
from forge_core.wire.codes import FailureCode


def restore(records: Iterable[Record]) -> tuple[Attempt, ResourceVector]:
    """The dispatch and the resources that it holds.

    :raises RefusedError: code ``ledger_suspect``: the ledger does not begin with a reservation,
        or a record lacks what its kind must have.
    """
    lines = tuple(records)
    if not lines or lines[0].kind is not RecordKind.RESERVED:
        raise RefusedError(
            "cannot restore a dispatch: its ledger does not begin with a reservation",
            code="ledger_suspect",
        )
    try:
        attempt, resources = _reserved(lines[0].data)
        for record in lines[1:]:
            attempt = _apply(attempt, record)
    except (KeyError, ValueError, TypeError) as error:
        raise RefusedError(
            f"cannot restore a dispatch: a record of its ledger is incomplete ({error})",
            code="ledger_suspect",
        ) from error
    return attempt, resources


def _reserved(data: Mapping[str, Any]) -> tuple[Attempt, ResourceVector]:
    owner = Owner(
        runner_id=data["runnerId"],
        runner_instance_id=data["runnerInstanceId"],
        attempt_id=data["attemptId"],
        fence=data["fence"],
        project_id=data["projectId"],
        trust_domain_id=data["trustDomainId"],
    )
    return Attempt(owner, data["offerId"]), ResourceVector(**data["resources"])


def _apply(attempt: Attempt, record: Record) -> Attempt:
    data = record.data
    match record.kind:
        case RecordKind.STARTED:
            return replace(attempt, phase=Phase.RUNNING)
        case RecordKind.EVENT:
            return replace(attempt, sequence=max(attempt.sequence, data["sequence"]))
        case RecordKind.RESULT:
            failure = data.get("failureCode")
            return replace(
                attempt,
                phase=Phase.ENDING,
                revision=data["revision"],
                failure=FailureCode(failure) if failure is not None else None,
                failure_detail=data.get("summary"),
                exit_code=data.get("exitCode"),
                signal=data.get("signal"),
                result_commit=data.get("resultCommit"),
            )
        case RecordKind.RELEASED:
            return replace(attempt, phase=Phase.ENDED)
        case _:
            return attempt
