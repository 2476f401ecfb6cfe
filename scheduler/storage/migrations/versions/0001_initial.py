"""Tables for the epoch, jobs and commits."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "control",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(40), nullable=False, index=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("error_code", sa.String(8), nullable=False),
        sa.Column("hint", sa.Text, nullable=False),
        sa.Column("since_unix_s", sa.Float, nullable=False),
        sa.Column("created_unix_s", sa.Float, nullable=False),
        sa.Column("spec_json", sa.Text, nullable=False),
        sa.Column("tokens_json", sa.Text, nullable=False),
        sa.Column("timeline", sa.Integer, nullable=False),
        sa.Column("weights_sha256", sa.String(64), nullable=False),
    )
    op.create_table(
        "commits",
        sa.Column("job", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("rounds_json", sa.Text, nullable=False),
        sa.Column("loss", sa.Float, nullable=True),
        sa.Column("norm", sa.Float, nullable=False),
        sa.Column("scale", sa.Float, nullable=False),
        sa.Column("learning_rate", sa.Float, nullable=False),
        sa.Column("skip", sa.Boolean, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("committed_unix_s", sa.Float, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("commits")
    op.drop_table("jobs")
    op.drop_table("control")
