"""The scheduler knows the hops again that it gave to a stage server, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.storage import stamps
from scheduler.storage.stamps import Stamps
from swarm.errors import InvalidConfig
from swarm.types import Hop, JobId, Microbatch, PeerId
from swarm.wire.messages import Hello, ReportedCell, Route

JOB, A, B = JobId("x-1"), PeerId("a"), PeerId("b")
ROUTE = Route(Microbatch(0, 3, 1), 3, (Hop(A, 11, 2, "at a"), Hop(B, 12, 5, "at b")))
CELL = ReportedCell(ROUTE.microbatch, 5, True, True, 0.5)


def hello(*cells: ReportedCell, peer: PeerId = B, incarnation: int = 12, job: JobId = JOB, stage: int = 1) -> Hello:
    return Hello(peer, incarnation, 1, "0", "", "", "cpu", 1, 0, -1, job, 0, 3, cells, stage)


def test_a_cell_is_known_by_the_stamp_of_its_hop_also_after_a_restart(tmp_path: Path) -> None:
    given = replace(CELL, stamp=Stamps.open(tmp_path).stamped(JOB, ROUTE, B).stamp)
    assert Stamps.open(tmp_path).known(hello(given)) == (given,)
    assert Stamps.open(tmp_path).known(hello(replace(given, accumulated=False, loss=7.0))) != (), "its own affair"


def test_a_stamp_is_worth_nothing_for_another_hop_process_or_job() -> None:
    keys = Stamps(b"one"), Stamps(b"another")
    stamp = keys[0].stamped(JOB, ROUTE, B).stamp
    given = replace(CELL, stamp=stamp)
    assert keys[1].known(hello(given)) == ()
    assert keys[0].known(hello(CELL)) == ()
    for other in (Microbatch(1, 3, 1), Microbatch(0, 4, 1), Microbatch(0, 3, 2), Microbatch(0, 31, 1)):
        assert keys[0].known(hello(replace(given, microbatch=other))) == ()
    assert keys[0].known(hello(replace(given, attempt=6))) == ()
    assert keys[0].known(hello(given, peer=A)) == ()
    assert keys[0].known(hello(given, incarnation=13)) == ()
    assert keys[0].known(hello(given, job=JobId("x-2"))) == ()
    assert keys[0].known(hello(given, stage=0)) == ()
    assert keys[0].known(hello(replace(given, stamp=stamp[:-1]))) == ()


def test_only_who_has_a_hop_on_the_route_gets_a_stamp() -> None:
    assert Stamps(b"one").stamped(JOB, ROUTE, PeerId("c")) is ROUTE
    assert Stamps(b"one").stamped(JOB, ROUTE, A).stamp != Stamps(b"one").stamped(JOB, ROUTE, B).stamp


def test_a_hello_with_many_cells_costs_no_more_than_one_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "CELLS_MAX", 3)
    given = replace(CELL, stamp=Stamps(b"one").stamped(JOB, ROUTE, B).stamp)
    assert len(Stamps(b"one").known(hello(*[given] * 5))) == 3


def test_a_lost_key_is_made_anew_and_a_broken_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "stamp.key"
    first = Stamps.open(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    assert Stamps.open(tmp_path) != first
    file.write_bytes(b"short")
    with pytest.raises(InvalidConfig, match=r"stamp\.key is no key") as told:
        Stamps.open(tmp_path)
    assert "delete it" in told.value.hint
