"""Timelines of a job: the step at which each began, and the checkpoint that the present one started from."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("first_steps_json", sa.Text, nullable=False, server_default="[0]"))
    op.add_column("jobs", sa.Column("start_where", sa.Text, nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("start_name", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    for column in ("first_steps_json", "start_where", "start_name"):
        op.drop_column("jobs", column)
