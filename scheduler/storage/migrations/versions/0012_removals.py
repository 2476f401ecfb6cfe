"""Jobs that were removed and whose files may still be there."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "removals",
        sa.Column("job", sa.String(40), primary_key=True),
        sa.Column("checkpoint_dir", sa.Text, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("removals")
