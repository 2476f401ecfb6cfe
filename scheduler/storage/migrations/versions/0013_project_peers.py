"""How many stage servers a project may have at a time."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("projects", sa.Column("peers", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("projects", "peers")
