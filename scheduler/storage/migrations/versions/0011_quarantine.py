"""Stage servers that computed wrong numbers."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "quarantine",
        sa.Column("peer", sa.Text, primary_key=True),
        sa.Column("since_unix_s", sa.Float, nullable=False),
        sa.Column("strikes_json", sa.Text, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("quarantine")
