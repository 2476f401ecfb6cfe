"""`swarm explain` and `swarm peers drain` against real processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from client.cli import run
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, small_spec, write_text


@pytest.mark.timeout(900)
def test_a_stage_server_is_explained_and_drained_by_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = small_spec(write_text(tmp_path), pipeline__stages=1, training__steps=100_000)
    spec = resolved(spec)
    tokens = Tokens.make(tmp_path / "tokens", spec)

    with Cluster(tmp_path, "--grace", "8") as cluster:
        first, second = cluster.add_servers(2)
        job = cluster.submit(spec, tokens.manifest)
        cluster.wait_for_step(job.id, 3)

        def swarm(*words: str) -> tuple[int, Any, str]:
            """The exit code, data or error as JSON, and what was said to people."""
            capfd.readouterr()
            code = run([*words, "--scheduler", cluster.address, "-o", "json"])
            out, err = capfd.readouterr()
            told = json.loads(out) if out else {}
            return code, told.get("data", told.get("error")), err

        def topics(*words: str) -> dict[str, dict[str, Any]]:
            code, data, err = swarm("explain", *words)
            assert code == 0, err
            return {fact["topic"]: fact for fact in data["facts"]}

        about = topics(job.id)
        assert about["state"]["text"].startswith("running for")
        assert about["stage 0"]["numbers"]["replicas"] == 2
        assert about["stage 0"]["numbers"]["microbatches_per_s"] > 0
        while not 0 < topics(first)["work"]["numbers"].get("share", 0) < 1:
            time.sleep(0.1)  # until it has a part in the newest steps, which are of few microbatches
        assert topics(second)["pace"]["numbers"]["pace_s"] > 0
        code, data, _ = swarm("explain", job.id, "--microbatch", "1000000:0")
        assert code == 7
        assert "nothing is known" in data["message"]
        assert swarm("explain", job.id, "--microbatch", "0:1000000")[0] == 7
        assert swarm("explain", first, "--microbatch", "0:0")[0] == 3
        step = cluster.wait_for_step(job.id, 4) or int(topics(job.id)["progress"]["numbers"]["step"])
        story = swarm("explain", job.id, "--microbatch", f"{step}:0")[1]
        assert (story["kind"], story["id"]) == ("microbatch", job.id)
        assert "fed: stage 0 to" in story["facts"][0]["text"]

        assert swarm("explain", "nobody")[0] == 7
        assert swarm("peers", "drain", "nobody")[0] == 7
        assert swarm("peers", "drain")[0] == 2
        assert swarm("peers", "ls", first)[0] == 2

        code, data, said = swarm("peers", "drain", first)
        assert (code, data["id"], data["job"], data["state"]) == (0, first, None, "draining")
        assert "can be stopped" in said
        assert topics(first)["not used"]["text"].startswith("it is drained")
        assert swarm("peers", "drain", first)[0] == 0
        assert topics(first)["not used"]["text"].endswith(f"swarm peers undrain {first}")

        code, data, said = swarm("peers", "undrain", second)
        assert (code, data["message"]) == (10, f"stage server {second} is not drained")
        assert swarm("peers", "undrain")[0] == 2
        code, data, said = swarm("peers", "undrain", first)
        assert (code, data["id"]) == (0, first), said
        assert "is given stages again" in said
        while swarm("explain", first)[1]["facts"][0]["topic"] == "not used" or "work" not in topics(first):
            time.sleep(0.1)  # until it serves again what it handed over
        code, data, said = swarm("peers", "drain", first)
        assert (code, data["state"]) == (0, "draining")

        code, data, said = swarm("peers", "drain", second, "--drain-timeout", "1")
        assert code == 8
        assert "it is the last of stage 0 and stays until another one has joined; no one joins" in data["message"]
        assert swarm("peers", "drain", second, "--no-wait")[0] == 0
        assert "no one joins" in topics(job.id)["leaving"]["text"]
        third = cluster.start_server(2)
        cluster.servers[str(third.wait_ready()["peer"])] = third
        code, data, said = swarm("peers", "drain", second, "--drain-timeout", "100")
        assert code == 0, said
        assert [(view["state"], view["job"]) for view in swarm("peers")[1]].count(("draining", None)) == 2
        assert swarm("status", job.id)[1]["state"] == "running"
        cluster.servers[first].kill()
        cluster.servers[first].child.wait(timeout=60)
