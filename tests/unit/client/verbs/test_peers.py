"""`swarm peers pool` writes a file that `swarm plan` reads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from client.records import Link, Peer
from client.verbs.peers import pool_lines
from scheduler.planning.pool import PeerPool, read_pool
from swarm.errors import InvalidConfig

IDLE = Peer(id="idle", state="idle", device="cuda:1", memory_bytes=24 << 30, host_bytes=64 << 30, site="oregon")


def written(folder: Path, *peers: Peer) -> PeerPool:
    (folder / "pool.toml").write_text("\n".join(pool_lines(peers)))
    return read_pool(folder / "pool.toml")


def test_what_is_known_is_read_back_and_the_rest_is_assumed(tmp_path: Path) -> None:
    busy = Peer(id="busy", device="cpu", memory_bytes=1 << 30, multiply_adds_per_s=2e9, links=(Link("idle", 1e6, 0.1),))
    measured = Peer(id="line", device="cpu", multiply_adds_per_s=1e9, up_bytes_per_s=5e6, down_bytes_per_s=25e6)
    pool = written(tmp_path, busy, IDLE, measured)
    idle, line = pool.peer("idle"), pool.peer("line")
    assert [pool.peer(name).speed for name in ("busy", "line", "idle")] == [2e9, 1e9, 1.5e9]
    assert (line.up_bits_per_s, line.down_bits_per_s) == (40e6, 200e6)
    assert (idle.device, idle.memory_bytes, idle.host_bytes, idle.site) == ("cuda", 24 << 30, 64 << 30, "oregon")
    assert "speed of idle (median of its device, or of all)" in pool.assumed
    assert "line of busy, idle (as fast as its links)" in pool.assumed


def test_a_line_that_is_too_slow_to_name_is_left_out(tmp_path: Path) -> None:
    slow = replace(IDLE, multiply_adds_per_s=1e9, up_bytes_per_s=60.0, down_bytes_per_s=1000.0)
    pool = written(tmp_path, slow)
    assert "line of idle (as fast as its links)" in pool.assumed
    assert pool.peer("idle").down_bits_per_s == 8000.0


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan])
def test_without_a_measurement_no_speed_is_known_and_the_reader_says_so(tmp_path: Path, odd: float) -> None:
    with pytest.raises(InvalidConfig, match="no peer has a speed"):
        written(tmp_path, replace(IDLE, multiply_adds_per_s=odd, up_bytes_per_s=odd, down_bytes_per_s=odd))
