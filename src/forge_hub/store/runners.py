"""Runners: who has registered, and what each said about itself last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, RowMapping, select, update

from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.codes import RunnerState
from forge_core.wire.from_bridge import Heartbeat, RegisterRunner
from forge_core.wire.shapes import RunnerSettings
from forge_hub.store.statements import upsert
from forge_hub.store.tables import runners


def register(connection: Connection, message: RegisterRunner, *, now: str) -> None:
    """Take a registration over an older one; the settings that people chose stay."""
    capabilities = message.capabilities
    upsert(
        connection,
        runners,
        "runner_id",
        {
            "runner_id": message.runner_id,
            "trust_domain_id": message.trust_domain_id,
            "instance_id": message.runner_instance_id,
            "connected": True,
            "state": RunnerState.ONLINE,
            "bridge_version": message.bridge_version,
            "host_name": message.host_name,
            "platform": message.platform,
            "capabilities": capabilities.to_wire(),
            "repositories": list(message.repositories),
            "capacity": asdict(capabilities.resource_capacity),
            "registered_at": now,
        },
        {
            "used": asdict(ResourceVector()),
            "counts": {},
            "pending_reports": 0,
            "draining": False,
            "host_fallback_enabled": False,
        },
    )


def heartbeat(connection: Connection, message: Heartbeat, *, now: str) -> None:
    """Keep what the runner holds right now (B-08)."""
    counts = {
        "reserved": message.reserved_count,
        "starting": message.starting_count,
        "active": message.active_count,
        "degraded": message.degraded_reservation_count,
    }
    _set(
        connection,
        message.runner_id,
        state=message.state,
        used=asdict(message.used_resources),
        capacity=asdict(message.resource_capacity),
        counts=counts,
        disk=message.disk.to_wire(),
        pending_reports=message.pending_reports,
        last_heartbeat_at=now,
    )


def set_resources(
    connection: Connection, runner_id: str, used: ResourceVector, capacity: ResourceCapacity
) -> None:
    """Keep what a decision says about the capacity."""
    _set(connection, runner_id, used=asdict(used), capacity=asdict(capacity))


def set_connected(connection: Connection, runner_id: str | None, connected: bool) -> None:
    """Mark one runner, or with None every runner, as connected or not."""
    statement = update(runners).values(connected=connected)
    if runner_id is not None:
        statement = statement.where(runners.c.runner_id == runner_id)
    connection.execute(statement)


def set_draining(connection: Connection, runner_id: str, draining: bool) -> None:
    """Profile Settings: drain or resume (B-87)."""
    _set(connection, runner_id, draining=draining)


def set_host_fallback(connection: Connection, runner_id: str, enabled: bool) -> None:
    """Profile Settings: may this runner fall back to its host (B-53)."""
    _set(connection, runner_id, host_fallback_enabled=enabled)


def find(connection: Connection, runner_id: str) -> RowMapping | None:
    """One runner's row."""
    rows = connection.execute(select(runners).where(runners.c.runner_id == runner_id))
    return rows.mappings().first()


def get(connection: Connection, runner_id: str) -> RowMapping:
    """The row of a runner that has registered."""
    row = find(connection, runner_id)
    assert row is not None, "only a registered runner is asked for"
    return row


def all_of_them(connection: Connection) -> Sequence[RowMapping]:
    """Every runner that ever registered, by id."""
    rows = connection.execute(select(runners).order_by(runners.c.runner_id))
    return rows.mappings().all()


def settings_of(row: RowMapping) -> RunnerSettings:
    """The settings as the wire carries them."""
    return RunnerSettings(
        draining=row["draining"], host_fallback_enabled=row["host_fallback_enabled"]
    )


def _set(connection: Connection, runner_id: str, **values: Any) -> None:
    connection.execute(update(runners).where(runners.c.runner_id == runner_id).values(**values))
