"""What runners report and replay: events, results, cleanup reports, publications."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import RowMapping, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from forge_core.wire.base import WireModel
from forge_core.wire.from_bridge import (
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitDispatchResult,
    SubmitPublication,
)
from forge_hub.store.statements import insert_new, insert_new_returning
from forge_hub.store.tables import cleanup_reports, events, publications, results


async def add_event(
    connection: AsyncConnection,
    message: SubmitDispatchEvent,
    payload: WireModel,
    *,
    session_id: str,
    now: str,
) -> int | None:
    """Keep a durable event; returns its ordinal, None: its id or its sequence is taken."""
    row = await insert_new_returning(
        connection,
        events,
        {
            "event_id": message.event_id,
            "attempt_id": message.attempt_id,
            "fence": message.fence,
            "sequence": message.sequence,
            "session_id": session_id,
            "type": message.type,
            "at": message.at,
            "payload": payload.to_wire(),
            "received_at": now,
        },
        events.c.ordinal,
    )
    return None if row is None else row[0]


async def find_event(connection: AsyncConnection, event_id: str) -> RowMapping | None:
    """One event's row."""
    rows = await connection.execute(select(events).where(events.c.event_id == event_id))
    return rows.mappings().first()


async def events_of(
    connection: AsyncConnection, session_id: str, *, after: int = 0, limit: int
) -> Sequence[RowMapping]:
    """A session's events in the order of arrival, from behind the ordinal ``after``."""
    rows = await connection.execute(
        select(events)
        .where(events.c.session_id == session_id, events.c.ordinal > after)
        .order_by(events.c.ordinal)
        .limit(limit)
    )
    return rows.mappings().all()


async def find_result(
    connection: AsyncConnection, attempt_id: str, fence: int
) -> RowMapping | None:
    """The result of one dispatch, in its highest revision."""
    rows = await connection.execute(
        select(results).where(results.c.attempt_id == attempt_id, results.c.fence == fence)
    )
    return rows.mappings().first()


async def put_result(
    connection: AsyncConnection, message: SubmitDispatchResult, *, now: str
) -> bool:
    """Keep a result; False: there is one of the same or a higher revision."""
    values = message.model_dump(mode="json", exclude={"resource_runner_instance_id", "timings"})
    values["timings"] = message.to_wire().get("timings", {})
    values["received_at"] = now
    if await insert_new(connection, results, values):
        return True
    replaced = await connection.execute(
        update(results)
        .where(
            results.c.attempt_id == message.attempt_id,
            results.c.fence == message.fence,
            results.c.revision < message.revision,
        )
        .values(values)
    )
    return replaced.rowcount == 1


async def results_of(
    connection: AsyncConnection, keys: Sequence[tuple[str, int]]
) -> Sequence[RowMapping]:
    """The results of these (attempt, fence)."""
    key = tuple_(results.c.attempt_id, results.c.fence)
    rows = await connection.execute(select(results).where(key.in_(keys)).order_by(results.c.fence))
    return rows.mappings().all()


async def add_cleanup_part(
    connection: AsyncConnection, report: SubmitCleanupReport, *, now: str
) -> bool:
    """Keep one part of a report; False: that part is there already."""
    return await insert_new(
        connection,
        cleanup_reports,
        {
            "report_id": report.report_id,
            "part": report.part,
            "parts": report.parts,
            "attempt_id": report.attempt_id,
            "fence": report.fence,
            "resource_instance_id": report.resource_runner_instance_id,
            "runner_id": report.runner_id,
            "reporting_instance_id": report.runner_instance_id,
            "trigger_code": report.trigger,
            "resources": [item.to_wire() for item in report.resources],
            "created_at": report.created_at,
            "received_at": now,
        },
    )


async def cleanup_parts_of_report(
    connection: AsyncConnection, report_id: str
) -> Sequence[RowMapping]:
    """All parts of one report that have come."""
    rows = await connection.execute(
        select(cleanup_reports).where(cleanup_reports.c.report_id == report_id)
    )
    return rows.mappings().all()


async def cleanup_parts_of(
    connection: AsyncConnection, keys: Sequence[tuple[str, int]]
) -> Sequence[RowMapping]:
    """The parts of all reports about these (attempt, fence), in the order of arrival."""
    key = tuple_(cleanup_reports.c.attempt_id, cleanup_reports.c.fence)
    rows = await connection.execute(
        select(cleanup_reports).where(key.in_(keys)).order_by(cleanup_reports.c.ordinal)
    )
    return rows.mappings().all()


async def add_publication(
    connection: AsyncConnection, message: SubmitPublication, *, now: str
) -> bool:
    """Keep what came of a push; False: that is known."""
    values = message.model_dump(mode="json", exclude={"resource_runner_instance_id"})
    return await insert_new(connection, publications, {**values, "received_at": now})


async def publications_of(
    connection: AsyncConnection, keys: Sequence[tuple[str, int]]
) -> Sequence[RowMapping]:
    """What came of the pushes of these (attempt, fence)."""
    key = tuple_(publications.c.attempt_id, publications.c.fence)
    rows = await connection.execute(
        select(publications).where(key.in_(keys)).order_by(publications.c.received_at)
    )
    return rows.mappings().all()
