"""The stage of each peer in a job, so that a restarted scheduler knows which peers to wait for."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("peers_json", sa.Text, nullable=False, server_default="{}"))


def downgrade() -> None:
    op.drop_column("jobs", "peers_json")
