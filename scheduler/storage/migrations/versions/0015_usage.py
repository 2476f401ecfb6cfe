"""What each project and each of its owners used, by day."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("peer_s", sa.Float(53), nullable=False),
        sa.Column("tokens", sa.Float(53), nullable=False),
        sa.Column("relay_bytes", sa.Float(53), nullable=False),
        sa.Column("batch", sa.Text, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("usage")
