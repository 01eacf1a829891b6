"""What the owners of projects have decided about their attempts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "projects",
        sa.Column("project_id", sa.String(length=128), nullable=False),
        sa.Column("policy", sa.String(length=64), nullable=False),
        sa.Column("trust_domain_id", sa.String(length=128), nullable=False),
        sa.Column("approved_commit", sa.String(length=64), nullable=True),
        sa.Column("host_fallback", sa.JSON(), nullable=True),
        sa.Column("updated_at", sa.String(length=40), nullable=False),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_projects")),
    )


def downgrade() -> None:
    """Take it away."""
    op.drop_table("projects")
