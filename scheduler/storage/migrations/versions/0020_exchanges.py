"""The exchanges of islands: before their rows came one by one, the rows of all islands said what they exchanged."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.create_table(
        "exchanges",
        sa.Column("job", sa.String(40), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("exchange_json", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
