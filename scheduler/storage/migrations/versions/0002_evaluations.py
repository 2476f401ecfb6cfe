"""A table for the results of evaluations."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "evaluations",
        sa.Column("job", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("loss", sa.Float, nullable=True),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("evaluated_unix_s", sa.Float, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("evaluations")
