"""How long a job was in each state, and for how long it held stage servers."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("times_json", sa.Text, nullable=False, server_default="{}"))
    for name in ("peer_s", "counted_unix_s"):
        op.add_column("jobs", sa.Column(name, sa.Float(53), nullable=False, server_default="0"))


def downgrade() -> None:
    for name in ("counted_unix_s", "peer_s", "times_json"):
        op.drop_column("jobs", name)
