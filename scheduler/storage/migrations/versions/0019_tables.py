"""All tables. A database that nineteen earlier migrations made is at this revision, too, and has the same ones."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "control",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "data_folder",  # the one that belongs to this database
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("place", sa.Text, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(40), nullable=False, index=True),
        sa.Column("state", sa.String(16), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("reason", "hint", "owner")),
        sa.Column("error_code", sa.String(8), nullable=False),
        *(_float(name) for name in ("since_unix_s", "created_unix_s", "peer_s", "counted_unix_s")),
        *(_json(name) for name in ("spec", "tokens", "files", "first_steps", "peers", "times", "repeats")),
        sa.Column("timeline", sa.Integer, nullable=False),
        sa.Column("weights_sha256", sa.String(64), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("start_where", "start_name")),  # a checkpoint
    )
    op.create_table(
        "commits",
        sa.Column("job", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("epoch", "tokens")),
        _json("rounds"),
        sa.Column("loss", sa.Float, nullable=True),
        *(_float(name) for name in ("norm", "scale", "learning_rate", "committed_unix_s")),
        sa.Column("skip", sa.Boolean, nullable=False),
    )
    op.create_table(
        "evaluations",
        sa.Column("job", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("epoch", "tokens")),
        sa.Column("loss", sa.Float, nullable=True),
        _float("evaluated_unix_s"),
    )
    op.create_table(
        "forks",  # islands that began as copies of others
        sa.Column("job", sa.String(40), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("origin", sa.Integer, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("version", "epoch")),
    )
    op.create_table(
        "shares",  # of a step, that each island trains behind an outer step
        sa.Column("job", sa.String(40), primary_key=True),
        sa.Column("timeline", sa.Integer, primary_key=True),
        sa.Column("version", sa.BigInteger, primary_key=True),
        _json("shares"),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "removals",  # jobs that were removed and whose files may still be there
        sa.Column("job", sa.String(40), primary_key=True),
        sa.Column("checkpoint_dir", sa.Text, nullable=False),
    )
    op.create_table(
        "drains",  # stage servers that were asked to hand their work over
        sa.Column("peer", sa.Text, primary_key=True),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
    op.create_table(
        "quarantine",  # stage servers that computed wrong numbers
        sa.Column("peer", sa.Text, primary_key=True),
        _float("since_unix_s"),
        _json("strikes"),
    )
    op.create_table(
        "members",
        sa.Column("role", sa.String(20), primary_key=True),
        sa.Column("name", sa.String(63), primary_key=True),
        _json("keys"),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("invited_by", "reason")),
        _float("revoked_unix_s"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(8), primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("secret_hash", "role", "names", "created_by")),
        sa.Column("uses_left", sa.Integer, nullable=False),
        *(_float(name) for name in ("expires_unix_s", "created_unix_s")),
        _json("joined"),
    )


def _float(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Float(53), nullable=False)


def _json(name: str) -> sa.Column[str]:
    return sa.Column(f"{name}_json", sa.Text, nullable=False)
