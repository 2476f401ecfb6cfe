"""Projects, their quotas, and which project jobs, members and tokens are of: everything so far is of one."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("jobs", sa.Integer, nullable=False),
        sa.Column("upload_bytes", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(projects, [{"name": "default", "jobs": 0, "upload_bytes": 0}])
    for table in ("jobs", "members", "tokens"):
        op.add_column(table, sa.Column("project", sa.Text, nullable=False, server_default="default"))
    op.add_column("jobs", sa.Column("owner", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("jobs", "owner")
    for table in ("jobs", "members", "tokens"):
        op.drop_column(table, "project")
    op.drop_table("projects")
