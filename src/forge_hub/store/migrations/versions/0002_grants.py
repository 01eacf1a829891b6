"""Grants, and what became of a dispatch's publication."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and the columns; what was published before was told by its runner."""
    op.create_table(
        "grants",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("attempt_id", sa.String(length=128), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("names", sa.JSON(), nullable=False),
        sa.Column("branch", sa.Text(), nullable=True),
        sa.Column("result_commit", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.String(length=40), nullable=False),
        sa.Column("redeemed_at", sa.String(length=40), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id", "fence"],
            ["dispatches.attempt_id", "dispatches.fence"],
            name=op.f("fk_grants_dispatches"),
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_grants")),
    )
    op.create_index(
        op.f("ix_grants_attempt_id_fence"), "grants", ["attempt_id", "fence"], unique=False
    )
    op.add_column("dispatches", sa.Column("publication", sa.String(length=64), nullable=True))
    op.add_column(
        "publications",
        sa.Column("source", sa.String(length=64), nullable=False, server_default="runner"),
    )


def downgrade() -> None:
    """Take them away."""
    op.drop_column("publications", "source")
    op.drop_column("dispatches", "publication")
    op.drop_index(op.f("ix_grants_attempt_id_fence"), "grants")
    op.drop_table("grants")
