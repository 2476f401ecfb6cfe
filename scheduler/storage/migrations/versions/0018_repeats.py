"""What jobs had to do again."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("repeats_json", sa.Text, nullable=False, server_default="{}"))


def downgrade() -> None:
    op.drop_column("jobs", "repeats_json")
