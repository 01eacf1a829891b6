"""What runners report and replay: events, results, cleanup reports, publications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, select, tuple_, update

from forge_core.wire.base import MAX_INT, WireModel
from forge_core.wire.codes import EventType, PublicationOutcome
from forge_core.wire.from_bridge import (
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitDispatchResult,
)
from forge_hub.states import PublicationSource
from forge_hub.store.statements import insert_new, insert_new_returning
from forge_hub.store.tables import cleanup_reports, events, publications, results

_PARTS = select(cleanup_reports).where(cleanup_reports.c.report_id == bindparam("report"))


def add_event(
    connection: Connection,
    message: SubmitDispatchEvent,
    payload: WireModel,
    *,
    session_id: str,
    now: str,
) -> int | None:
    """Keep a durable event; returns its ordinal, None: its id or its sequence is taken."""
    row = insert_new_returning(
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


def find_event(connection: Connection, event_id: str) -> RowMapping | None:
    """One event's row."""
    rows = connection.execute(select(events).where(events.c.event_id == event_id))
    return rows.mappings().first()


def events_of(
    connection: Connection, session_id: str, *, after: int = 0, until: int = MAX_INT, limit: int
) -> Sequence[RowMapping]:
    """A session's events in the order of arrival, behind the ordinal ``after`` up to ``until``."""
    rows = connection.execute(
        select(events)
        .where(
            events.c.session_id == session_id, events.c.ordinal > after, events.c.ordinal <= until
        )
        .order_by(events.c.ordinal)
        .limit(limit)
    )
    return rows.mappings().all()


def dispatches_with(
    connection: Connection, session_id: str, event_type: EventType
) -> frozenset[tuple[str, int]]:
    """The (attempt, fence) of a session of which an event of this type is kept."""
    rows = connection.execute(
        select(events.c.attempt_id, events.c.fence).where(
            events.c.session_id == session_id, events.c.type == event_type
        )
    )
    return frozenset((attempt_id, fence) for attempt_id, fence in rows)


def payloads_of(
    connection: Connection, attempt_id: str, fence: int, event_type: EventType
) -> Sequence[Mapping[str, Any]]:
    """The payloads of a dispatch's events of this type."""
    rows = connection.execute(
        select(events.c.payload).where(
            events.c.attempt_id == attempt_id,
            events.c.fence == fence,
            events.c.type == event_type,
        )
    )
    return rows.scalars().all()


def find_result(connection: Connection, attempt_id: str, fence: int) -> RowMapping | None:
    """The result of one dispatch, in its highest revision."""
    rows = connection.execute(
        select(results).where(results.c.attempt_id == attempt_id, results.c.fence == fence)
    )
    return rows.mappings().first()


def put_result(connection: Connection, message: SubmitDispatchResult, *, now: str) -> bool:
    """Keep a result; False: there is one of the same or a higher revision."""
    values = message.model_dump(mode="json", exclude={"resource_runner_instance_id", "timings"})
    values["timings"] = message.to_wire().get("timings", {})
    values["received_at"] = now
    if insert_new(connection, results, values):
        return True
    replaced = connection.execute(
        update(results)
        .where(
            results.c.attempt_id == message.attempt_id,
            results.c.fence == message.fence,
            results.c.revision < message.revision,
        )
        .values(values)
    )
    return replaced.rowcount == 1


def results_of(connection: Connection, keys: Sequence[tuple[str, int]]) -> Sequence[RowMapping]:
    """The results of these (attempt, fence)."""
    key = tuple_(results.c.attempt_id, results.c.fence)
    rows = connection.execute(select(results).where(key.in_(keys)).order_by(results.c.fence))
    return rows.mappings().all()


def add_cleanup_part(connection: Connection, report: SubmitCleanupReport, *, now: str) -> bool:
    """Keep one part of a report; False: that part is there already."""
    return insert_new(
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


def cleanup_parts_of_report(connection: Connection, report_id: str) -> Sequence[RowMapping]:
    """All parts of one report that have come."""
    return connection.execute(_PARTS, {"report": report_id}).mappings().all()


def cleanup_parts_of(
    connection: Connection, keys: Sequence[tuple[str, int]]
) -> Sequence[RowMapping]:
    """The parts of all reports about these (attempt, fence), in the order of arrival."""
    key = tuple_(cleanup_reports.c.attempt_id, cleanup_reports.c.fence)
    rows = connection.execute(
        select(cleanup_reports).where(key.in_(keys)).order_by(cleanup_reports.c.ordinal)
    )
    return rows.mappings().all()


def add_publication(
    connection: Connection,
    grant: RowMapping,
    outcome: PublicationOutcome,
    source: PublicationSource,
    *,
    now: str,
) -> None:
    """Keep what came of the push that a grant was redeemed for, and who says so."""
    names = ("attempt_id", "fence", "branch", "result_commit")
    values = {name: grant[name] for name in names}
    insert_new(
        connection,
        publications,
        {**values, "outcome": outcome, "source": source, "received_at": now},
    )


def has_publication(
    connection: Connection, key: tuple[str, int], outcome: PublicationOutcome
) -> bool:
    """Whether this outcome of a dispatch's push was told before."""
    rows = connection.execute(
        select(publications.c.outcome).where(
            publications.c.attempt_id == key[0],
            publications.c.fence == key[1],
            publications.c.outcome == outcome,
        )
    )
    return rows.first() is not None


def publications_of(
    connection: Connection, keys: Sequence[tuple[str, int]]
) -> Sequence[RowMapping]:
    """What came of the pushes of these (attempt, fence); ``unknown`` before what settled it."""
    key = tuple_(publications.c.attempt_id, publications.c.fence)
    order = (publications.c.received_at, publications.c.outcome != PublicationOutcome.UNKNOWN)
    rows = connection.execute(select(publications).where(key.in_(keys)).order_by(*order))
    return rows.mappings().all()
