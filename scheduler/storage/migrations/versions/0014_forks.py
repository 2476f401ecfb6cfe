"""Islands that began as copies of others."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "forks",
        sa.Column("job", sa.String(40), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("origin", sa.Integer, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("forks")
