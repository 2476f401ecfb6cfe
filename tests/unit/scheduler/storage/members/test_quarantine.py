"""Who is quarantined: over restarts of the scheduler and of stage servers, until an admin says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from scheduler.storage.database import Database
from scheduler.storage.members.quarantine import Quarantine
from swarm.errors import NotAllowed
from swarm.process.logs import get_logger
from swarm.types import PeerId

A, B = PeerId("a"), PeerId("b")
LOG = get_logger("test")


async def test_strikes_outlive_the_scheduler_and_end_with_the_release(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    first = Quarantine(store := await Database.open(url, None), LOG, lambda: 50.0)
    await first.load()
    first.strike(A, "y was wrong", is_proven=True, checked=3)
    first.strike(B, "dx was wrong", is_proven=False, checked=1)
    await first.keep(A)
    await first.keep(B)
    await store.close()

    second = Quarantine(store := await Database.open(url, None), LOG, lambda: 60.0)
    await second.load()
    assert second.names() == [A]
    assert second.record(A).since_unix_s == 50.0
    assert second.record(A).strikes == first.record(A).strikes
    assert second.strike(B, "dx was wrong again", is_proven=False, checked=2).is_quarantined
    await second.release(A)
    with pytest.raises(NotAllowed, match="nothing is held against a"):
        await second.release(A)
    await store.close()

    third = Quarantine(store := await Database.open(url, None), LOG, lambda: 70.0)
    await third.load()
    assert third.names() == []
    assert not third.record(A).strikes
    await store.close()


async def test_what_the_database_does_not_take_is_known_until_the_scheduler_ends(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    store = await Database.open(url, None)
    known = Quarantine(store, LOG, lambda: 50.0, 0.0)
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("ALTER TABLE quarantine RENAME TO away"))
    known.strike(A, "y was wrong", is_proven=True, checked=3)
    await known.keep(A)
    assert known.names() == [A]
    await store.close()
