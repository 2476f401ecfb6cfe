"""`swarm chaos` against real processes: refused where nobody allowed it, and told of truly where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client.cli import run
from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, small_spec, write_text


@pytest.mark.timeout(900)
def test_harm_is_done_only_where_it_is_allowed_and_its_end_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec(write_text(tmp_path), pipeline__stages=1, training__steps=100_000)
    spec = resolved(spec)
    tokens = Tokens.make(tmp_path / "tokens", spec)

    with Cluster(tmp_path, "--grace", "1", "--allow-chaos") as cluster:
        meek, obedient = cluster.add_servers(1)[0], cluster.add_servers(1, "--allow-chaos")[0]
        job = cluster.submit(spec, tokens.manifest)
        cluster.wait_for_step(job.id, 2)

        def chaos(*words: str) -> int:
            return run(["chaos", *words, "--scheduler", cluster.address, "-o", "json"])

        assert chaos("kill", obedient) == 10
        assert "--yes" in capfd.readouterr().err
        assert chaos("kill", meek, "--yes") == 10
        assert "was not started with --allow-chaos" in capfd.readouterr().err
        assert chaos("kill", "nobody", "--yes") == 7
        assert chaos("slow", obedient, "--factor", "nan", "--yes") == 3
        assert chaos("corrupt", obedient, "--against", meek, "--yes") == 3
        assert cluster.jobs.Get(pb.JobRequest(job=job.id), timeout=60).state == "running"
        capfd.readouterr()

        assert chaos("corrupt", obedient, "--for", "1", "--factor", "2", "--yes") == 0
        told = json.loads(capfd.readouterr().out)["data"]
        assert (told["job"], told["job_state"], told["ledger"]["violations"]) == (job.id, "running", 0)
        assert told["recovered_s"] is not None

        assert chaos("kill", obedient, "--yes") == 0
        told = json.loads(capfd.readouterr().out)["data"]
        assert cluster.servers[obedient].child.wait(timeout=60) == -9
        assert 0 <= told["suspect_s"] <= told["gone_s"] <= told["watched_s"]
        assert told["recovered_s"] is not None
        ledger = told["ledger"]
        assert (ledger["lost"], ledger["counted_twice"]) == (0, 0)
        assert ledger["microbatches_committed"] % spec.training.microbatches == 0
        assert 0 <= ledger["microbatches_fed"] - ledger["microbatches_committed"] <= 3 * spec.training.microbatches

    with Cluster(tmp_path / "tokens") as strict:
        assert run(["chaos", "kill", "x", "--yes", "--scheduler", strict.address]) == 10
        assert "--allow-chaos" in capfd.readouterr().err
