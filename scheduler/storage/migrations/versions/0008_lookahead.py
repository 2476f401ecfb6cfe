"""Jobs from before `training.lookahead` keep plain AdamW: its default for new jobs would change their bits."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

JOBS = sa.table("jobs", sa.column("id", sa.Text), sa.column("spec_json", sa.Text))


def upgrade() -> None:
    connection = op.get_bind()
    for job, spec_json in connection.execute(sa.select(JOBS.c.id, JOBS.c.spec_json)).all():
        spec = json.loads(spec_json)
        spec.setdefault("training", {}).setdefault("lookahead", 0.0)
        connection.execute(JOBS.update().where(JOBS.c.id == job).values(spec_json=json.dumps(spec)))


def downgrade() -> None:
    """Nothing: an older program refuses a job with the key, whatever its value."""
