"""A fleet on a broker and a database that others wrote, and both go away while it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
import torch
import trustme

from scheduler.storage.database import make_engine, migrate
from swarm.reference.trainer import train_local
from swarm.wire import jobs_pb2 as pb
from tests.support.on_postgres import SERVER
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.services import Mosquitto, Postgres, fetch, until
from tests.support.simulated import Tokens, small_spec, write_text

ROOT = Path(__file__).parents[2]
STEPS = 150


@pytest.mark.timeout(900)
def test_a_job_survives_the_loss_of_mosquitto_and_postgresql_bit_for_bit(tmp_path: Path) -> None:
    spec = small_spec(write_text(tmp_path), pipeline__stages=2, training__steps=STEPS, checkpoint__every_steps=20)
    spec = resolved(spec)
    tokens = Tokens.make(tmp_path / "tokens", spec)
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    with (
        Postgres() as database,
        Mosquitto(tmp_path / "mosquitto", trustme.CA()) as broker,
        Cluster(tmp_path, "--db", database.url(), broker=broker.url) as cluster,
    ):

        def readiness() -> str:
            return fetch(f"http://{cluster.scheduler.ready['http']}/readyz")

        def step() -> int:
            return int(cluster.jobs.Get(pb.JobRequest(job=job.id), timeout=60).step)

        cluster.add_servers(3)
        job = cluster.submit(spec, tokens.manifest)
        cluster.wait_for_step(job.id, 3)

        broker.stop()
        until("the loss of the broker is told", lambda: "broker" in readiness())
        cluster.wait_for_step(job.id, step() + 3)
        broker.start()
        late = cluster.start_server(len(cluster.servers))  # it has the broker's address alone
        cluster.servers[name := late.wait_ready()["peer"]] = late
        until("the new stage server has a stage", lambda: any(peer.id == name and peer.job for peer in cluster.peers()))

        database.stop()
        until("the loss of the database is told", lambda: "database" in readiness())
        stood = step()
        assert stood < STEPS
        database.start()
        cluster.wait_for_step(job.id, stood + 3)
        until("all is well again", lambda: readiness().split() == ["ready"])

        view = cluster.succeeds(job.id)
        assert view.weights_sha256 == expected.sha256
        assert view.microbatches_committed == STEPS * spec.training.microbatches
        with psycopg.connect(database.url()) as connection:
            steps = [step for (step,) in connection.execute("SELECT step FROM commits ORDER BY step")]
        assert steps == list(range(STEPS))
        assert "secret" not in cluster.tails()


def test_migrations_make_the_tables_of_sqlite_in_postgresql(tmp_path: Path) -> None:
    def tables(url: str) -> dict[str, dict[str, bool]]:
        engine = make_engine(url)
        migrate(engine)
        migrate(engine)  # changes nothing
        found = sa.inspect(engine)
        made = {
            table: {str(column["name"]): bool(column["nullable"]) for column in found.get_columns(table)}
            for table in found.get_table_names()
        }
        engine.dispose()
        return made

    with Postgres() as server:
        assert tables(server.url()) == tables(f"sqlite:///{tmp_path}/a.db")


def test_the_claims_about_storage_hold_on_postgresql() -> None:
    with Postgres("fsync=off") as server:
        # The plugin is there before the assertions of what it imports could be rewritten, which pytest warns of.
        flags = ("-p", "tests.support.on_postgres", "-W", "ignore::pytest.PytestAssertRewriteWarning")
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *flags, "tests/unit/scheduler/storage"],
            env=os.environ | {SERVER: server.url()},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
        with psycopg.connect(server.url()) as connection:
            used = connection.execute("SELECT count(*) FROM pg_database WHERE datname LIKE 'claim_%'").fetchone()
        assert used is not None
        assert used[0] > 20
