"""What projects used adds up in the database, once, and is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scheduler.storage.database import Database
from scheduler.storage.members import usage as module
from scheduler.storage.members.usage import DAY_S, Usage, day_of
from swarm.errors import DatabaseUnavailable, Fenced
from tests.support.members import database_url

NOW_S = 1_700_000_000.0
TODAY = day_of(NOW_S)
DAYS_AGO_S = [NOW_S - days * DAY_S for days in range(500)]


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rows]


async def test_counts_are_added_to_those_of_earlier_writes_and_starts(tmp_path: Path) -> None:
    for start in (1, 2):
        database = await Database.open(database_url(tmp_path), None)
        usage = Usage(database)
        await usage.write(NOW_S)
        for _ in range(2):
            usage.add(NOW_S, "red", "submitter/ann", peer_s=1.5, tokens=100)
            usage.add(NOW_S, "red", "submitter/ann", relay_bytes=1 << 40)
            usage.add(NOW_S, "red", "submitter/bob", tokens=7)
            usage.add(DAYS_AGO_S[1], "red", "submitter/ann", tokens=1)
            usage.add(NOW_S, "blue", "", peer_s=2.0)
            await usage.write(NOW_S)
            await usage.write(NOW_S)
        assert shown(await usage.of("red", 0)) == [
            (TODAY, "red", "submitter/ann", 3.0 * start, 200.0 * start, float(start << 41)),
            (TODAY, "red", "submitter/bob", 0.0, 14.0 * start, 0.0),
            (TODAY - 1, "red", "submitter/ann", 0.0, 2.0 * start, 0.0),
        ]
        assert shown(await usage.sums(["blue", "red", "green"], TODAY)) == [
            ("blue", 4.0 * start, 0.0, 0.0),
            ("red", 3.0 * start, 214.0 * start, float(start << 41)),
        ]
        assert shown(await usage.sums(["blue"], TODAY + 1)) == await usage.of("red", TODAY + 1) == []
        await database.close()


async def test_a_batch_that_was_written_without_an_answer_is_not_added_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await Database.open(database_url(tmp_path), None)
    usage, write = Usage(database), database.write

    async def unheard(change: Any) -> None:
        await write(change)
        raise DatabaseUnavailable("the connection broke before the answer")

    usage.add(NOW_S, "red", "", tokens=5)
    monkeypatch.setattr(database, "write", unheard)
    with pytest.raises(DatabaseUnavailable):
        await usage.write(NOW_S)
    usage.add(NOW_S, "red", "", tokens=6)  # goes with the next batch
    monkeypatch.setattr(database, "write", write)
    await usage.write(NOW_S)
    assert [row["tokens"] for row in await usage.of("red", 0)] == [5.0]
    await usage.write(NOW_S)
    assert [row["tokens"] for row in await usage.of("red", 0)] == [11.0]
    await database.close()


async def test_rows_are_kept_for_400_days_and_the_oldest_go_beyond_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await Database.open(database_url(tmp_path), None)
    usage = Usage(database)
    for ago_s in DAYS_AGO_S:
        usage.add(ago_s, "red", "", tokens=1)
    await usage.write(NOW_S)
    assert [row["day"] for row in await usage.of("red", 0)] == [TODAY - days for days in range(400)]

    monkeypatch.setattr(module, "USAGE_ROWS_MAX", 3)
    usage.add(NOW_S, "red", "b", tokens=1)
    usage.add(NOW_S, "red", "c", tokens=1)
    await usage.write(NOW_S)
    assert [(row["day"], row["owner"]) for row in await usage.of("red", 0)] == [
        (TODAY, name) for name in ("", "b", "c")
    ]
    monkeypatch.setattr(module, "USAGE_LISTED_MAX", 2)
    assert len(await usage.of("red", 0)) == 2

    for ago_s in DAYS_AGO_S[:9]:  # while the database is away
        usage.add(ago_s, "blue", "", tokens=1)
    assert sorted(usage._counts) == [(TODAY - days, "blue", "") for days in (2, 1, 0)]
    await database.close()


async def test_absurd_counts_of_a_relay_overflow_nothing(tmp_path: Path) -> None:
    database = await Database.open(database_url(tmp_path), None)
    usage = Usage(database)
    for _ in range(3):
        usage.add(NOW_S, "red", "", relay_bytes=(1 << 64) - 1)
        usage.add(NOW_S, "red", "ann", relay_bytes=(1 << 64) - 1)
        await usage.write(NOW_S)
    assert shown(await usage.sums(["red"], 0)) == [("red", 0.0, 0.0, 6.0 * 2**64)]
    await database.close()


async def test_nothing_is_written_for_a_project_that_was_forgotten_or_after_a_successor_has_started(
    tmp_path: Path,
) -> None:
    database = await Database.open(database_url(tmp_path), None)
    usage = Usage(database)
    usage.add(NOW_S, "red", "", tokens=1)
    usage.add(NOW_S, "blue", "", tokens=1)
    usage.forget("red")
    await usage.write(NOW_S)
    assert [row["project"] for row in await usage.sums(["red", "blue"], 0)] == ["blue"]
    successor = await Database.open(database_url(tmp_path), None)
    usage.add(NOW_S, "blue", "", tokens=1)
    with pytest.raises(Fenced):
        await usage.write(NOW_S)
    assert [row["tokens"] for row in await Usage(successor).of("blue", 0)] == [1.0]
    await database.close()
    await successor.close()
