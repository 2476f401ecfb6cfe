"""`swarm peers pool` writes a file that `swarm plan` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.records import Job, Link, Peer
from client.verbs.peers import pool_lines
from scheduler.planning.pool import PeerPool, read_pool
from swarm.errors import InvalidConfig
from swarm.job.partition import microbatch_tokens, stage_flops
from tests.support.specs import tiny_spec

IDLE = Peer(id="idle", state="idle", device="cuda:1", memory_bytes=24 << 30, host_bytes=64 << 30, site="oregon")


def written(folder: Path, peers: list[Peer], jobs: dict[str, Job]) -> PeerPool:
    (folder / "pool.toml").write_text("\n".join(pool_lines(peers, jobs)))
    return read_pool(folder / "pool.toml")


def test_what_is_known_is_read_back_and_the_rest_is_assumed(tmp_path: Path) -> None:
    spec = tiny_spec(2)
    at_work = Peer(id="busy", device="cpu", memory_bytes=1 << 30, job="j", stage=1, pace_s=0.5,
                   links=(Link("idle", 1e6, 0.1),))  # fmt: skip
    pool = written(tmp_path, [at_work, IDLE], {"j": Job(id="j", spec_json=spec.model_dump_json())})
    busy, idle = pool.peer("busy"), pool.peer("idle")
    assert busy.speed == pytest.approx(microbatch_tokens(spec) * stage_flops(spec, spec.split)[1] / 0.5, rel=1e-3)
    assert (idle.device, idle.memory_bytes, idle.host_bytes, idle.site) == ("cuda", 24 << 30, 64 << 30, "oregon")
    assert "speed of idle (median of its device, or of all)" in pool.assumed


def test_without_a_job_no_speed_is_known_and_the_reader_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no peer has a speed"):
        written(tmp_path, [IDLE], {})
