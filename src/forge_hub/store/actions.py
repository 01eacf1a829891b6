"""What people ask of a runner directly: reap passes and v1 commands."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, RowMapping, insert, select, update

from forge_core.wire.from_bridge import SubmitLegacyResult, SubmitReapOutcome
from forge_core.wire.from_hub import Dispatch, Reap
from forge_hub.store.statements import insert_new
from forge_hub.store.tables import legacy_dispatches, legacy_results, reap_requests


def add_reap(connection: Connection, request: Reap, *, now: str) -> None:
    """Keep a reap request before it is sent."""
    connection.execute(
        insert(reap_requests).values(
            request_id=request.request_id,
            runner_id=request.runner_id,
            instance_id=request.runner_instance_id,
            scope=request.scope,
            attempt_id=request.attempt_id,
            fence=request.fence,
            requested_at=now,
        )
    )


def find_reap(connection: Connection, request_id: str) -> RowMapping | None:
    """One reap request with its outcome, if that has come."""
    rows = connection.execute(select(reap_requests).where(reap_requests.c.request_id == request_id))
    return rows.mappings().first()


def answer_reap(connection: Connection, outcome: SubmitReapOutcome, *, now: str) -> bool:
    """Keep the outcome of a request; False: it has one."""
    counts = outcome.to_wire()
    del counts["requestId"], counts["runnerInstanceId"]
    changed = connection.execute(
        update(reap_requests)
        .where(
            reap_requests.c.request_id == outcome.request_id,
            reap_requests.c.answered_at.is_(None),
        )
        .values(outcome=counts, answered_at=now)
    )
    return changed.rowcount == 1


def reaps_of(connection: Connection, runner_id: str, limit: int) -> Sequence[RowMapping]:
    """The newest reap requests of a runner, newest first."""
    rows = connection.execute(
        select(reap_requests)
        .where(reap_requests.c.runner_id == runner_id)
        .order_by(reap_requests.c.requested_at.desc())
        .limit(limit)
    )
    return rows.mappings().all()


def add_legacy(connection: Connection, dispatch: Dispatch, *, runner_id: str, now: str) -> None:
    """Keep a v1 command before it is sent; not its environment."""
    connection.execute(
        insert(legacy_dispatches).values(
            dispatch_id=dispatch.dispatch_id,
            runner_id=runner_id,
            repository=dispatch.repository,
            command=list(dispatch.command),
            timeout_ms=dispatch.timeout_ms,
            created_at=now,
        )
    )


def find_legacy(connection: Connection, dispatch_id: str) -> RowMapping | None:
    """One v1 command."""
    rows = connection.execute(
        select(legacy_dispatches).where(legacy_dispatches.c.dispatch_id == dispatch_id)
    )
    return rows.mappings().first()


def find_legacy_result(connection: Connection, dispatch_id: str) -> RowMapping | None:
    """The result of a v1 command, if that has come."""
    rows = connection.execute(
        select(legacy_results).where(legacy_results.c.dispatch_id == dispatch_id)
    )
    return rows.mappings().first()


def add_legacy_result(connection: Connection, result: SubmitLegacyResult, *, now: str) -> bool:
    """Keep a v1 result; False: there is one."""
    values = {**result.model_dump(mode="json"), "received_at": now}
    return insert_new(connection, legacy_results, values)
