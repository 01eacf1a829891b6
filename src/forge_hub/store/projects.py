"""What the owners of projects have decided."""

from __future__ import annotations

from sqlalchemy import Connection, RowMapping, select

from forge_core.wire.from_hub import HostFallback
from forge_hub.sandbox_policy import SandboxPolicy
from forge_hub.store.statements import upsert
from forge_hub.store.tables import projects


def save(connection: Connection, project_id: str, policy: SandboxPolicy, *, now: str) -> None:
    """Put this decision in the place of the one before it."""
    fallback = policy.host_fallback
    values = {
        "project_id": project_id,
        "policy": policy.policy,
        "trust_domain_id": policy.trust_domain_id,
        "approved_commit": policy.approved_commit,
        "host_fallback": None if fallback is None else fallback.to_wire(),
        "updated_at": now,
    }
    upsert(connection, projects, "project_id", values, {})


def find(connection: Connection, project_id: str) -> RowMapping | None:
    """The row of a project that somebody has decided about."""
    rows = connection.execute(select(projects).where(projects.c.project_id == project_id))
    return rows.mappings().first()


def policy_of(connection: Connection, project_id: str) -> SandboxPolicy | None:
    """The decision; None: there is none."""
    row = find(connection, project_id)
    return None if row is None else SandboxPolicy.model_validate(dict(row))


def fallback_of(connection: Connection, project_id: str) -> HostFallback | None:
    """Its permission to fall back to a host, whether or not it counts now."""
    policy = policy_of(connection, project_id)
    return None if policy is None else policy.host_fallback
