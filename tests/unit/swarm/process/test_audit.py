"""The audit log: what is changed in it shows."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.errors import InvalidConfig
from swarm.process import audit as module
from swarm.process.audit import TAIL_BYTES, TEXT_CHARACTERS_MAX, Audit, logs, verify
from tests.support.members import Clock

NO_LINE = "is no line of an audit log"
WRONG = "does not follow from the line before it"


def written(path: Path, count: int = 5) -> list[str]:
    """The lines of a new log."""
    audit = Audit(path, Clock())
    for number in range(count):
        audit.write("admin me", "Submit", "ok", job=f"demo-{number}")
    audit.close()
    return path.read_text().splitlines(keepends=True)


def breaks_of(path: Path) -> list[tuple[int, str]]:
    """The breaks of a log of one file."""
    found = list(verify(path))
    assert {one.file for one in found} <= {path}
    return [(one.line, one.problem) for one in found]


def test_a_log_that_nobody_touched_is_whole_and_private(tmp_path: Path) -> None:
    lines = written(tmp_path / "audit.jsonl")
    assert list(verify(tmp_path / "audit.jsonl")) == []
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600
    first = json.loads(lines[0])
    assert len(first.pop("hash")) == 64
    assert first == {
        "time_unix_s": Clock().unix_s,
        "actor": "admin me",
        "action": "Submit",
        "result": "ok",
        "job": "demo-0",
    }


def changed(lines: list[str]) -> list[str]:
    return [lines[0], lines[1], lines[2].replace("demo-2", "demo-9"), *lines[3:]]


def changed_beside(lines: list[str]) -> list[str]:
    """Of two facts with one name, whoever reads the file sees the first, and JSON gives the second."""
    return [lines[0], lines[1], lines[2].replace('"actor"', '"actor": "admin you", "actor"'), *lines[3:]]


def with_another_hash(lines: list[str]) -> list[str]:
    line = json.loads(lines[2]) | {"hash": "0" * 64}
    return [lines[0], lines[1], json.dumps(line) + "\n", *lines[3:]]


def with_a_number_for_a_hash(lines: list[str]) -> list[str]:
    line = json.loads(lines[2]) | {"hash": 5}
    return [lines[0], lines[1], json.dumps(line) + "\n", *lines[3:]]


def removed(lines: list[str]) -> list[str]:
    return lines[:2] + lines[3:]


def removed_at_the_start(lines: list[str]) -> list[str]:
    return lines[1:]


def inserted(lines: list[str]) -> list[str]:
    return [*lines[:2], lines[0], *lines[2:]]


def swapped(lines: list[str]) -> list[str]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


def nonsense(lines: list[str]) -> list[str]:
    return [*lines[:2], "nonsense\n", *lines[2:]]


@pytest.mark.parametrize(
    ("harm", "breaks"),
    [
        (changed, [(3, WRONG)]),
        (changed_beside, [(3, WRONG)]),
        (with_another_hash, [(3, WRONG), (4, WRONG)]),
        (with_a_number_for_a_hash, [(3, WRONG), (4, WRONG)]),
        (removed, [(3, WRONG)]),
        (removed_at_the_start, [(1, WRONG)]),
        (inserted, [(3, WRONG), (4, WRONG)]),
        (swapped, [(2, WRONG), (3, WRONG), (4, WRONG)]),
        (nonsense, [(3, NO_LINE)]),
    ],
)
def test_what_was_done_to_a_log_shows(
    tmp_path: Path, harm: Callable[[list[str]], list[str]], breaks: list[tuple[int, str]]
) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(harm(written(path))))
    assert breaks_of(path) == breaks


@pytest.mark.parametrize("text", ["[]", "3", "{}", "[" * 100_000, "\ufffd"])
def test_a_line_of_another_kind_is_named_and_the_rest_is_still_looked_at(tmp_path: Path, text: str) -> None:
    path = tmp_path / "audit.jsonl"
    lines = written(path, 2)
    path.write_text(f"{text}\n{lines[0]}{lines[1]}")
    assert breaks_of(path) == [(1, NO_LINE)]


def test_a_later_start_continues_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    written(path)
    lines = written(path)
    assert len(lines) == 10
    assert list(verify(path)) == []
    path.write_text("".join(lines[:5] + lines[6:]))
    assert breaks_of(path) == [(6, WRONG)]


def test_a_log_longer_than_what_is_read_of_it_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, Clock())
    while path.stat().st_size <= TAIL_BYTES:
        audit.write("\U0001f600" * 999, "Submit", "ok", **{f"fact{number}": "é" * 999 for number in range(9)})
    audit.close()
    written(path)
    assert list(verify(path)) == []


def test_texts_of_others_are_cut_and_hide_nothing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, Clock())
    audit.write("eve\n\x1b[2J\u202e", "Get", "x" * 10_000)
    audit.close()
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["actor"] == "eve  [2J "
    assert len(line["result"]) == TEXT_CHARACTERS_MAX
    assert list(verify(path)) == []


@pytest.mark.parametrize("content", [b"nonsense\n", b"\n", b"{}\n", b"3\n", b"[]\n", b"\xff\xff\n", b'{"hash": "0'])
def test_after_a_line_that_was_cut_off_the_log_goes_on_and_tells_of_it(tmp_path: Path, content: bytes) -> None:
    """A power cut must not keep the scheduler from starting."""
    path = tmp_path / "audit.jsonl"
    path.write_bytes(content)
    audit = Audit(path, Clock())
    audit.write("ann", "Cancel", "ok")
    audit.close()
    assert path.read_bytes().startswith(content)
    lines = path.read_text(errors="replace").splitlines()
    assert json.loads(lines[-1])["actor"] == "ann"
    broken = [number for number, _ in breaks_of(path)]
    assert 1 in broken
    assert len(lines) not in broken


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        Audit(tmp_path / "missing" / "audit.jsonl", Clock())


# Several files ---------------------------------------------------------------------------------------------------


def rotated(path: Path, files: int, lines: int = 3) -> list[Path]:
    """A log of so many files with `lines` calls in each; the oldest first."""
    audit = Audit(path, Clock())
    for number in range(files):
        for line in range(lines):
            audit._bytes_max = 1 if number and not line else 1 << 30
            audit.write("admin me", "Submit", "ok", job=f"demo-{number}-{line}")
    audit.close()
    return logs(path)


def test_a_full_file_is_kept_and_the_chain_goes_on_in_the_next(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    older = rotated(path, 3)
    assert [file.name for file in older] == ["audit-000001.jsonl", "audit-000002.jsonl", "audit.jsonl"]
    assert {file.stat().st_mode & 0o777 for file in older} == {0o600}
    assert list(verify(path)) == []
    last = json.loads(older[1].read_text().splitlines()[-1])
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["follows"], first["file"], first["oldest"]) == (last["hash"], 3, 1)
    written(path)  # a later start
    assert list(verify(path)) == []
    assert len(logs(path)) == 3


def without_line(path: Path, number: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: number - 1] + lines[number:]))


def without_older(path: Path) -> None:
    """Say that the older files went because there are too many."""
    path.write_text(path.read_text().replace('"oldest": 1', '"oldest": 3'))


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda files: files[0].unlink(), [(0, 0, "is missing")]),
        (lambda files: files[1].unlink(), [(1, 0, "is missing")]),
        (lambda files: without_line(files[1], 2), [(1, 2, WRONG)]),
        (lambda files: without_line(files[1], 1), [(1, 1, WRONG)]),
        (lambda files: without_line(files[1], 4), [(2, 1, WRONG)]),
        (lambda files: without_line(files[2], 1), [(2, 1, WRONG)]),
        (lambda files: files[1].write_bytes(files[0].read_bytes()), [(1, 1, WRONG), (2, 1, WRONG)]),
        (lambda files: files[1].write_bytes(b""), [(2, 1, WRONG)]),
        (
            lambda files: files[2].write_text(files[2].read_text().replace('"oldest": 1', '"oldest": 3')),
            [(2, 1, WRONG)],
        ),
    ],
    ids=[
        "first lost",
        "second lost",
        "line",
        "first line",
        "last line",
        "newest's first",
        "copied",
        "emptied",
        "oldest",
    ],
)
def test_what_was_done_to_one_of_several_files_shows(
    tmp_path: Path, harm: Callable[[list[Path]], object], found: list[tuple[int, int, str]]
) -> None:
    files = rotated(tmp_path / "audit.jsonl", 3)
    harm(files)
    assert [(files.index(one.file), one.line, one.problem) for one in verify(files[-1])] == found


def test_the_oldest_files_go_and_those_that_stay_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_MAX", 3)
    path = tmp_path / "audit.jsonl"
    files = rotated(path, 6, lines=1)
    assert [file.name for file in files] == ["audit-000004.jsonl", "audit-000005.jsonl", "audit.jsonl"]
    assert list(verify(path)) == []
    files[0].unlink()
    assert list(verify(path)) == [(files[0], 0, "is missing")]


def test_a_start_after_an_end_between_two_files_goes_on_with_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    rotated(path, 2)
    path.rename(tmp_path / "audit-000002.jsonl")
    written(path)
    assert list(verify(path)) == []
    assert len(logs(path)) == 3


def test_a_file_that_cannot_be_put_aside_gets_longer(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, Clock(), bytes_max=1)
    audit.write("ann", "Cancel", "ok")
    (tmp_path / "audit-000001.jsonl").mkdir()
    audit.write("ann", "Cancel", "ok")
    audit.close()
    (tmp_path / "audit-000001.jsonl").rmdir()
    assert list(verify(path)) == []
    assert len(path.read_text().splitlines()) == 2


def test_a_line_for_which_the_disk_has_no_room_leaves_the_chain_whole(tmp_path: Path) -> None:
    """The half that was written, and the hash of the line that was not, broke the chain for ever."""
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, Clock())
    audit.write("ann", "Cancel", "ok")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
        for _ in range(2):
            with pytest.raises(OSError, match="no room"):
                audit.write("ann", "Pause", "ok")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    audit.write("ann", "Resume", "ok")
    audit.close()
    assert list(verify(path)) == []
    assert [json.loads(line)["action"] for line in path.read_text().splitlines()] == ["Cancel", "Resume"]
