"""The members of the swarm, and the tokens for joining."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "members",
        sa.Column("role", sa.String(20), primary_key=True),
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("keys_json", sa.Text, nullable=False),
        sa.Column("invited_by", sa.Text, nullable=False),
        sa.Column("revoked_unix_s", sa.Float, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(8), primary_key=True),
        sa.Column("secret_hash", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("names", sa.Text, nullable=False),
        sa.Column("uses_left", sa.Integer, nullable=False),
        sa.Column("expires_unix_s", sa.Float, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.Column("created_unix_s", sa.Float, nullable=False),
        sa.Column("joined_json", sa.Text, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("tokens")
    op.drop_table("members")
