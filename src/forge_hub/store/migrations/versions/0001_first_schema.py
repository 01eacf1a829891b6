"""First schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table, parents first."""
    _create_runners()
    _create_sessions()
    _create_attempts()
    _create_legacy_dispatches()
    _create_reap_requests()
    _create_dispatches()
    _create_legacy_results()
    _create_cleanup_reports()
    _create_events()
    _create_publications()
    _create_results()


def downgrade() -> None:
    """Drop every table, children first."""
    for table in (
        "results",
        "publications",
        "events",
        "cleanup_reports",
        "legacy_results",
        "dispatches",
        "reap_requests",
        "legacy_dispatches",
        "attempts",
        "sessions",
        "runners",
    ):
        op.drop_table(table)


def _create_runners() -> None:
    op.create_table(
        "runners",
        sa.Column("runner_id", sa.String(length=128), nullable=False),
        sa.Column("trust_domain_id", sa.String(length=128), nullable=False),
        sa.Column("instance_id", sa.String(length=128), nullable=False),
        sa.Column("connected", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("bridge_version", sa.Text(), nullable=False),
        sa.Column("host_name", sa.Text(), nullable=False),
        sa.Column("platform", sa.Text(), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("repositories", sa.JSON(), nullable=False),
        sa.Column("capacity", sa.JSON(), nullable=False),
        sa.Column("used", sa.JSON(), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("disk", sa.JSON(), nullable=True),
        sa.Column("pending_reports", sa.BigInteger(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("host_fallback_enabled", sa.Boolean(), nullable=False),
        sa.Column("registered_at", sa.String(length=40), nullable=False),
        sa.Column("last_heartbeat_at", sa.String(length=40), nullable=True),
        sa.PrimaryKeyConstraint("runner_id", name=op.f("pk_runners")),
    )


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("project_id", sa.String(length=128), nullable=False),
        sa.Column("trust_domain_id", sa.String(length=128), nullable=False),
        sa.Column("pinned_runner_id", sa.String(length=128), nullable=True),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("retries_left", sa.Integer(), nullable=False),
        sa.Column("failure_code", sa.String(length=64), nullable=True),
        sa.Column("refusals", sa.JSON(), nullable=False),
        sa.Column("cancel_reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.String(length=40), nullable=False),
        sa.Column("ended_at", sa.String(length=40), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
    )
    op.create_index(
        op.f("ix_sessions_state_created_at"), "sessions", ["state", "created_at"], unique=False
    )


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("input", sa.JSON(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name=op.f("fk_attempts_sessions")
        ),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_attempts")),
    )
    op.create_index(op.f("ix_attempts_session_id"), "attempts", ["session_id"], unique=False)


def _create_legacy_dispatches() -> None:
    op.create_table(
        "legacy_dispatches",
        sa.Column("dispatch_id", sa.String(length=128), nullable=False),
        sa.Column("runner_id", sa.String(length=128), nullable=False),
        sa.Column("repository", sa.Text(), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.Column("timeout_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ["runner_id"], ["runners.runner_id"], name=op.f("fk_legacy_dispatches_runners")
        ),
        sa.PrimaryKeyConstraint("dispatch_id", name=op.f("pk_legacy_dispatches")),
    )


def _create_reap_requests() -> None:
    op.create_table(
        "reap_requests",
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("runner_id", sa.String(length=128), nullable=False),
        sa.Column("instance_id", sa.String(length=128), nullable=False),
        sa.Column("scope", sa.String(length=64), nullable=False),
        sa.Column("attempt_id", sa.String(length=128), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        sa.Column("requested_at", sa.String(length=40), nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=True),
        sa.Column("answered_at", sa.String(length=40), nullable=True),
        sa.ForeignKeyConstraint(
            ["runner_id"], ["runners.runner_id"], name=op.f("fk_reap_requests_runners")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_reap_requests")),
    )
    op.create_index(
        op.f("ix_reap_requests_runner_id"), "reap_requests", ["runner_id"], unique=False
    )


def _create_dispatches() -> None:
    op.create_table(
        "dispatches",
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("offer_id", sa.String(length=128), nullable=False),
        sa.Column("runner_id", sa.String(length=128), nullable=False),
        sa.Column("instance_id", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("end_reason", sa.String(length=64), nullable=True),
        sa.Column("runtime", sa.String(length=64), nullable=True),
        sa.Column("decline_code", sa.String(length=64), nullable=True),
        sa.Column("decline_detail", sa.Text(), nullable=True),
        sa.Column("lease_sequence", sa.BigInteger(), nullable=False),
        sa.Column("last_renewal_at", sa.String(length=40), nullable=True),
        sa.Column("offered_at", sa.String(length=40), nullable=False),
        sa.Column("started_at", sa.String(length=40), nullable=True),
        sa.Column("ended_at", sa.String(length=40), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.attempt_id"], name=op.f("fk_dispatches_attempts")
        ),
        sa.ForeignKeyConstraint(
            ["runner_id"], ["runners.runner_id"], name=op.f("fk_dispatches_runners")
        ),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name=op.f("fk_dispatches_sessions")
        ),
        sa.PrimaryKeyConstraint("attempt_id", "fence", name=op.f("pk_dispatches")),
        sa.UniqueConstraint("offer_id", name=op.f("uq_dispatches_offer_id")),
    )
    op.create_index(
        op.f("ix_dispatches_runner_id_instance_id"),
        "dispatches",
        ["runner_id", "instance_id"],
        unique=False,
    )
    op.create_index(op.f("ix_dispatches_session_id"), "dispatches", ["session_id"], unique=False)
    op.create_index(op.f("ix_dispatches_state"), "dispatches", ["state"], unique=False)


def _create_legacy_results() -> None:
    op.create_table(
        "legacy_results",
        sa.Column("dispatch_id", sa.String(length=128), nullable=False),
        sa.Column("succeeded", sa.Boolean(), nullable=False),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("output", sa.Text(), nullable=False),
        sa.Column("truncated", sa.Boolean(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("received_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ["dispatch_id"],
            ["legacy_dispatches.dispatch_id"],
            name=op.f("fk_legacy_results_legacy_dispatches"),
        ),
        sa.PrimaryKeyConstraint("dispatch_id", name=op.f("pk_legacy_results")),
    )


def _create_cleanup_reports() -> None:
    op.create_table(
        "cleanup_reports",
        sa.Column(
            "ordinal",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("report_id", sa.String(length=128), nullable=False),
        sa.Column("part", sa.BigInteger(), nullable=False),
        sa.Column("parts", sa.BigInteger(), nullable=False),
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("resource_instance_id", sa.String(length=128), nullable=False),
        sa.Column("runner_id", sa.String(length=128), nullable=False),
        sa.Column("reporting_instance_id", sa.String(length=128), nullable=False),
        sa.Column("trigger_code", sa.String(length=64), nullable=False),
        sa.Column("resources", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.String(length=40), nullable=False),
        sa.Column("received_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id", "fence"],
            ["dispatches.attempt_id", "dispatches.fence"],
            name=op.f("fk_cleanup_reports_dispatches"),
        ),
        sa.PrimaryKeyConstraint("ordinal", name=op.f("pk_cleanup_reports")),
        sa.UniqueConstraint("report_id", "part", name=op.f("uq_cleanup_reports_report_id_part")),
    )
    op.create_index(
        op.f("ix_cleanup_reports_attempt_id_fence"),
        "cleanup_reports",
        ["attempt_id", "fence"],
        unique=False,
    )


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column(
            "ordinal",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("event_id", sa.String(length=128), nullable=False),
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("at", sa.String(length=40), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("received_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id", "fence"],
            ["dispatches.attempt_id", "dispatches.fence"],
            name=op.f("fk_events_dispatches"),
        ),
        sa.PrimaryKeyConstraint("ordinal", name=op.f("pk_events")),
        sa.UniqueConstraint(
            "attempt_id", "fence", "sequence", name=op.f("uq_events_attempt_id_fence_sequence")
        ),
        sa.UniqueConstraint("event_id", name=op.f("uq_events_event_id")),
    )
    op.create_index(op.f("ix_events_session_id"), "events", ["session_id"], unique=False)


def _create_publications() -> None:
    op.create_table(
        "publications",
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.String(length=64), nullable=False),
        sa.Column("branch", sa.Text(), nullable=False),
        sa.Column("result_commit", sa.String(length=64), nullable=False),
        sa.Column("received_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id", "fence"],
            ["dispatches.attempt_id", "dispatches.fence"],
            name=op.f("fk_publications_dispatches"),
        ),
        sa.PrimaryKeyConstraint("attempt_id", "fence", "outcome", name=op.f("pk_publications")),
    )


def _create_results() -> None:
    op.create_table(
        "results",
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.String(length=64), nullable=False),
        sa.Column("failure_code", sa.String(length=64), nullable=True),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("signal", sa.BigInteger(), nullable=True),
        sa.Column("result_commit", sa.String(length=64), nullable=True),
        sa.Column("cleanup", sa.String(length=64), nullable=False),
        sa.Column("summary", sa.Text(), nullable=True),
        sa.Column("timings", sa.JSON(), nullable=False),
        sa.Column("received_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id", "fence"],
            ["dispatches.attempt_id", "dispatches.fence"],
            name=op.f("fk_results_dispatches"),
        ),
        sa.PrimaryKeyConstraint("attempt_id", "fence", name=op.f("pk_results")),
    )
