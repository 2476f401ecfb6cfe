"""No projects, quotas and usage any more: every person sees every job, and changes the jobs that he submitted."""

import sqlalchemy as sa
from alembic import op

from swarm.process.logs import get_logger

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    connection = op.get_bind()
    projects = list(connection.execute(sa.text("SELECT name FROM projects ORDER BY name")).scalars())
    uses = [connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one() for table in ("jobs", "members")]
    if any(uses) or len(projects) > 1:  # else the database is new
        get_logger("scheduler").warning(
            "upgraded: projects, quotas and usage are gone; whoever may look sees every job, and changes only the jobs "
            "that he submitted; teams that need walls between them run a scheduler each",
            projects=", ".join(projects),
        )
    for table in ("jobs", "members", "tokens"):
        op.drop_column(table, "project")
    op.drop_table("projects")
    op.drop_table("usage")


def downgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("name", sa.String(63), primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("jobs", "upload_bytes", "peers")),
    )
    op.create_table(
        "usage",
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("project", "owner")),
        *(sa.Column(name, sa.Float(53), nullable=False) for name in ("peer_s", "tokens", "relay_bytes")),
        sa.Column("batch", sa.Text, nullable=False),
    )
    for table in ("jobs", "members", "tokens"):
        op.add_column(table, sa.Column("project", sa.Text, nullable=False, server_default="default"))
