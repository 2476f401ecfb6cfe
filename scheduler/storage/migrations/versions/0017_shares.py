"""How much of a step each island trains behind an outer step, where shares follow speed."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "shares",
        sa.Column("job", sa.String(40), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True),
        sa.Column("shares_json", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("shares")
