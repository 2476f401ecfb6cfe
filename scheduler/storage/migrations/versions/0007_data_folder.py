"""The data folder that belongs to this database, so that a scheduler does not start on another one."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "data_folder",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("place", sa.Text, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("data_folder")
