"""The schema, once for SQLite and PostgreSQL.

Times are RFC 3339 UTC text with milliseconds, as on the wire: the same in both databases,
readable in any shell, sorted by comparison.  They are for people; deadlines are never computed
from them.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


class Words(TypeDecorator[str]):
    """Text that others wrote: without the NUL that PostgreSQL does not store."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Show a NUL as the replacement character."""
        return None if value is None else value.replace("\0", "\ufffd")


_Id = String(128)
_Code = String(64)
_Time = String(40)
_Ordinal = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts by itself only in a column of exactly this type."""


def _fence_key(*more: str) -> PrimaryKeyConstraint:
    return PrimaryKeyConstraint("attempt_id", "fence", *more)


def _of_dispatch() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["attempt_id", "fence"], ["dispatches.attempt_id", "dispatches.fence"]
    )


runners = Table(
    "runners",
    metadata,
    Column("runner_id", _Id, primary_key=True),
    Column("trust_domain_id", _Id, nullable=False),
    Column("instance_id", _Id, nullable=False),
    Column("connected", Boolean, nullable=False),
    Column("state", _Code, nullable=False),
    Column("bridge_version", Words, nullable=False),
    Column("host_name", Words, nullable=False),
    Column("platform", Words, nullable=False),
    Column("capabilities", JSON, nullable=False),
    Column("repositories", JSON, nullable=False),
    Column("capacity", JSON, nullable=False),
    Column("used", JSON, nullable=False),
    Column("counts", JSON, nullable=False),
    Column("disk", JSON),
    Column("pending_reports", BigInteger, nullable=False),
    Column("draining", Boolean, nullable=False),
    Column("host_fallback_enabled", Boolean, nullable=False),
    Column("registered_at", _Time, nullable=False),
    Column("last_heartbeat_at", _Time),
)

projects = Table(
    "projects",
    metadata,
    Column("project_id", _Id, primary_key=True),
    Column("policy", _Code, nullable=False),
    Column("trust_domain_id", _Id, nullable=False),
    Column("approved_commit", String(64)),
    Column("host_fallback", JSON(none_as_null=True)),
    Column("updated_at", _Time, nullable=False),
)
"""What their owners have decided; a project that nobody has decided about has no row."""

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", _Id, primary_key=True),
    Column("project_id", _Id, nullable=False),
    Column("trust_domain_id", _Id, nullable=False),
    Column("pinned_runner_id", _Id),
    Column("state", _Code, nullable=False),
    Column("retries_left", Integer, nullable=False),
    Column("failure_code", _Code),
    Column("refusals", JSON, nullable=False),
    Column("cancel_reason", Words),
    Column("created_at", _Time, nullable=False),
    Column("ended_at", _Time),
    Index(None, "state", "created_at"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("attempt_id", _Id, primary_key=True),
    Column("session_id", _Id, ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("input", JSON, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("created_at", _Time, nullable=False),
)
"""``input`` never changes; ``fence`` is the highest given out, and lower ones have no say."""

dispatches = Table(
    "dispatches",
    metadata,
    Column("attempt_id", _Id, ForeignKey("attempts.attempt_id"), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("session_id", _Id, ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("offer_id", _Id, nullable=False, unique=True),
    Column("runner_id", _Id, ForeignKey("runners.runner_id"), nullable=False),
    Column("instance_id", _Id, nullable=False),
    Column("state", _Code, nullable=False, index=True),
    Column("end_reason", _Code),
    Column("runtime", _Code),
    Column("decline_code", _Code),
    Column("decline_detail", Words),
    Column("lease_sequence", BigInteger, nullable=False),
    Column("last_renewal_at", _Time),
    Column("offered_at", _Time, nullable=False),
    Column("started_at", _Time),
    Column("ended_at", _Time),
    Column("publication", _Code),
    _fence_key(),
    Index(None, "runner_id", "instance_id"),
)

grants = Table(
    "grants",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("kind", _Code, nullable=False),
    Column("attempt_id", _Id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("names", JSON, nullable=False),
    Column("branch", Words),
    Column("result_commit", String(64)),
    Column("created_at", _Time, nullable=False),
    Column("redeemed_at", _Time),
    Index(None, "attempt_id", "fence"),
    _of_dispatch(),
)
"""What start packets carried, by the digest of the handle; never what a handle stands for."""

events = Table(
    "events",
    metadata,
    Column("ordinal", _Ordinal, primary_key=True, autoincrement=True),
    Column("event_id", _Id, nullable=False, unique=True),
    Column("attempt_id", _Id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("session_id", _Id, nullable=False, index=True),
    Column("type", _Code, nullable=False),
    Column("at", _Time, nullable=False),
    Column("payload", JSON, nullable=False),
    Column("received_at", _Time, nullable=False),
    UniqueConstraint("attempt_id", "fence", "sequence"),
    _of_dispatch(),
)

results = Table(
    "results",
    metadata,
    Column("attempt_id", _Id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("outcome", _Code, nullable=False),
    Column("failure_code", _Code),
    Column("exit_code", BigInteger),
    Column("signal", BigInteger),
    Column("result_commit", String(64)),
    Column("cleanup", _Code, nullable=False),
    Column("summary", Words),
    Column("timings", JSON, nullable=False),
    Column("received_at", _Time, nullable=False),
    _fence_key(),
    _of_dispatch(),
)

cleanup_reports = Table(
    "cleanup_reports",
    metadata,
    Column("ordinal", _Ordinal, primary_key=True, autoincrement=True),
    Column("report_id", _Id, nullable=False),
    Column("part", BigInteger, nullable=False),
    Column("parts", BigInteger, nullable=False),
    Column("attempt_id", _Id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("resource_instance_id", _Id, nullable=False),
    Column("runner_id", _Id, nullable=False),
    Column("reporting_instance_id", _Id, nullable=False),
    Column("trigger_code", _Code, nullable=False),
    Column("resources", JSON, nullable=False),
    Column("created_at", _Time, nullable=False),
    Column("received_at", _Time, nullable=False),
    UniqueConstraint("report_id", "part"),
    Index(None, "attempt_id", "fence"),
    _of_dispatch(),
)

publications = Table(
    "publications",
    metadata,
    Column("attempt_id", _Id, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("outcome", _Code, nullable=False),
    Column("branch", Words, nullable=False),
    Column("result_commit", String(64), nullable=False),
    Column("source", _Code, nullable=False, server_default="runner"),
    Column("received_at", _Time, nullable=False),
    _fence_key("outcome"),
    _of_dispatch(),
)

reap_requests = Table(
    "reap_requests",
    metadata,
    Column("request_id", _Id, primary_key=True),
    Column("runner_id", _Id, ForeignKey("runners.runner_id"), nullable=False, index=True),
    Column("instance_id", _Id, nullable=False),
    Column("scope", _Code, nullable=False),
    Column("attempt_id", _Id),
    Column("fence", BigInteger),
    Column("requested_at", _Time, nullable=False),
    Column("outcome", JSON),
    Column("answered_at", _Time),
)

legacy_dispatches = Table(
    "legacy_dispatches",
    metadata,
    Column("dispatch_id", _Id, primary_key=True),
    Column("runner_id", _Id, ForeignKey("runners.runner_id"), nullable=False),
    Column("repository", Words, nullable=False),
    Column("command", JSON, nullable=False),
    Column("timeout_ms", BigInteger, nullable=False),
    Column("created_at", _Time, nullable=False),
)

legacy_results = Table(
    "legacy_results",
    metadata,
    Column("dispatch_id", _Id, ForeignKey("legacy_dispatches.dispatch_id"), primary_key=True),
    Column("succeeded", Boolean, nullable=False),
    Column("exit_code", BigInteger),
    Column("output", Words, nullable=False),
    Column("truncated", Boolean, nullable=False),
    Column("error", Words),
    Column("received_at", _Time, nullable=False),
)
