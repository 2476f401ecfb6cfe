"""The files that a job starts from."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("files_json", sa.Text, nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("jobs", "files_json")
