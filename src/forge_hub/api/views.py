"""From rows to what the API shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping

from forge_core.wire.codes import CleanupState, EventType, RemovalOutcome
from forge_hub.api.models import (
    AttemptView,
    CleanupReportView,
    DispatchView,
    EventView,
    GrantView,
    PublicationView,
    ResultView,
    RunnerView,
    SessionSummary,
    SessionView,
)
from forge_hub.store import dispatches, evidence, runners, sessions

Key = tuple[str, int]


def runner_view(row: RowMapping) -> RunnerView:
    """A runner's row."""
    counts: Mapping[str, int] = row["counts"]
    return RunnerView.model_validate(
        {
            **row,
            "runner_instance_id": row["instance_id"],
            "settings": runners.settings_of(row),
            "used_resources": row["used"],
            "resource_capacity": row["capacity"],
            "reserved_count": counts.get("reserved", 0),
            "starting_count": counts.get("starting", 0),
            "active_count": counts.get("active", 0),
            "degraded_reservation_count": counts.get("degraded", 0),
        }
    )


def session_summary(row: RowMapping) -> SessionSummary:
    """A session's row."""
    return SessionSummary.model_validate(dict(row))


def session_view(
    connection: Connection, row: RowMapping
) -> tuple[SessionView, list[CleanupReportView]]:
    """A session with its attempts, and the cleanup reports about it."""
    session_id = row["session_id"]
    rows = dispatches.of_session(connection, session_id)
    keys = [_key(r) for r in rows]
    results = {_key(r): r for r in evidence.results_of(connection, keys)}
    pushes = evidence.publications_of(connection, keys)
    reports = join_parts(evidence.cleanup_parts_of(connection, keys))
    shown = [_dispatch_view(r, results.get(_key(r)), pushes, reports) for r in rows]
    attempts = tuple(
        AttemptView(
            attempt_id=a["attempt_id"],
            created_at=a["created_at"],
            input=_shown_input(a["input"]),
            dispatches=tuple(d for d in shown if d.attempt_id == a["attempt_id"]),
        )
        for a in sessions.attempts_of(connection, session_id)
    )
    view = SessionView.model_validate(
        {
            **row,
            "runner_id": row["pinned_runner_id"],
            "attempts": attempts,
            "result": next((d.result for d in reversed(shown) if d.result), None),
            "publication": next(
                (d.publications[-1] for d in reversed(shown) if d.publications), None
            ),
            "cleanup": _cleanup_of_session(shown),
        }
    )
    return view, reports


def cleanup_of(
    dispatch: RowMapping, result: RowMapping | None, reports: Iterable[CleanupReportView]
) -> CleanupState | None:
    """Whether anything of a dispatch may be left on its runner; None: it never started.

    It is complete when the runner says so in its result, or when the newest whole report about
    it names nothing that resisted (a runner that lost its ledger sends only that).
    """
    if dispatch["started_at"] is None:
        return None
    if result is not None and result["cleanup"] == CleanupState.COMPLETE:
        return CleanupState.COMPLETE
    about = [r for r in reports if (r.attempt_id, r.fence) == _key(dispatch) and r.complete]
    if about and all(r.outcome is not RemovalOutcome.FAILED for r in about[-1].resources):
        return CleanupState.COMPLETE
    return CleanupState.PENDING


def join_parts(rows: Sequence[RowMapping]) -> list[CleanupReportView]:
    """Whole reports out of their parts, in the order in which the last part of each came."""
    parts: dict[str, list[RowMapping]] = {}
    for row in rows:
        parts.setdefault(row["report_id"], []).append(row)
    reports = sorted(parts.values(), key=lambda group: group[-1]["ordinal"])
    return [_report_view(group) for group in reports]


def event_view(row: RowMapping) -> EventView:
    """An event's row."""
    return EventView.model_validate(dict(row))


def grant_view(row: RowMapping) -> GrantView:
    """A grant's row."""
    return GrantView.model_validate(dict(row))


def inventory_of(rows: Iterable[RowMapping]) -> dict[str, list[dict[str, Any]]]:
    """What the engine was said to hold: the newest word about each thing."""
    found: dict[str, dict[str, dict[str, Any]]] = {
        kind: {} for kind in ("containers", "networks", "volumes", "ports")
    }
    for row in rows:
        if row["type"] != EventType.INVENTORY:
            continue
        for kind, items in found.items():
            for item in row["payload"].get(kind, ()):
                name = item.get("id") or f"{item['container']}/{item['containerPort']}"
                items[f"{row['fence']}/{name}"] = {**item, "fence": row["fence"]}
    return {kind: list(items.values()) for kind, items in found.items()}


def _dispatch_view(
    row: RowMapping,
    result: RowMapping | None,
    pushes: Iterable[RowMapping],
    reports: Iterable[CleanupReportView],
) -> DispatchView:
    return DispatchView.model_validate(
        {
            **row,
            "runner_instance_id": row["instance_id"],
            "cleanup": cleanup_of(row, result, reports),
            "result": None if result is None else ResultView.model_validate(dict(result)),
            "publications": tuple(
                PublicationView.model_validate(dict(p)) for p in pushes if _key(p) == _key(row)
            ),
        }
    )


def _cleanup_of_session(shown: Iterable[DispatchView]) -> CleanupState | None:
    states = {d.cleanup for d in shown} - {None}
    if CleanupState.PENDING in states:
        return CleanupState.PENDING
    return CleanupState.COMPLETE if states else None


def _report_view(group: Sequence[RowMapping]) -> CleanupReportView:
    last = group[-1]
    ordered = sorted(group, key=lambda row: int(row["part"]))
    return CleanupReportView.model_validate(
        {
            **last,
            "trigger": last["trigger_code"],
            "complete": len(group) == last["parts"],
            "resources": [item for row in ordered for item in row["resources"]],
        }
    )


def _shown_input(given: dict[str, Any]) -> dict[str, Any]:
    """The input without the values of the agent's environment: people put secrets there."""
    agent = dict(given["agent"])
    agent["env"] = dict.fromkeys(agent.get("env", {}), "…")
    return {**given, "agent": agent}


def _key(row: RowMapping) -> Key:
    return row["attempt_id"], row["fence"]
