"""The line to join with: whole or refused, and its secret is not repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import UsageError
from swarm.pki.authority import Authority
from swarm.pki.tokens import JoinLine, new_line, parse_line, read_line, secret_hash

PIN = Authority.new(0.0).pin
LINE = new_line("10.0.0.5:7949", PIN)


def test_a_line_is_read_as_it_was_written_and_leads_to_an_address_only() -> None:
    for address in ("10.0.0.5:7949", "host.example:1", "[::1]:65535"):
        line = new_line(address, PIN)
        assert parse_line(str(line)) == parse_line(f"  {line}\n") == line
        assert (line.address, line.pin) == (address, PIN)
    for address in ("unix:80", "10.0.0.5", "10.0.0.5:0", "http://a:1", "a b:1", ""):
        with pytest.raises(UsageError, match="no line to join with"):
            parse_line(str(JoinLine(address, LINE.pin, LINE.id, LINE.secret)))


def test_no_two_lines_share_a_secret() -> None:
    lines = [new_line("a:1", PIN) for _ in range(100)]
    assert len({line.secret for line in lines}) == len({line.id for line in lines}) == 100
    assert {len(line.secret) for line in lines} == {26}  # 5 bits each


def test_a_line_that_was_cut_or_has_one_wrong_letter_is_refused() -> None:
    """Two letters at the end watch over the others: one change in a thousand gets by."""
    text = str(LINE)
    for part in [text[:end] for end in range(len(text))] + [text[start:] for start in range(1, len(text))]:
        with pytest.raises(UsageError) as caught:
            parse_line(part)
        assert LINE.secret not in str(caught.value)
    missed = 0
    for place in range(text.index("#") + 1, len(text)):
        wrong = text[:place] + ("a" if text[place] != "a" else "b") + text[place + 1 :]
        try:
            parse_line(wrong)
            missed += 1
        except UsageError as error:
            assert LINE.secret not in str(error)  # noqa: PT017
    assert missed <= 1


def test_a_secret_is_not_shown_with_the_rest() -> None:
    assert LINE.secret not in repr(LINE)
    assert LINE.id in repr(LINE)
    assert LINE.secret not in secret_hash(LINE.secret)
    assert secret_hash(LINE.secret) != secret_hash(LINE.secret[:-1])


def test_a_line_comes_from_the_command_line_or_from_a_file_that_is_not_passed_over(tmp_path: Path) -> None:
    """A stage server that was given an empty file went on as if nothing had been asked of it."""
    file = tmp_path / "line"
    file.write_text(f"{LINE}\n")
    assert read_line("", file) == read_line(str(LINE)) == LINE
    assert read_line("") is None
    with pytest.raises(UsageError, match=r"missing cannot be read: No such file"):
        read_line("", tmp_path / "missing")
    for content in (b"", b"\n", b"\xff\xfe\0"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="no line to join with"):
            read_line("", file)
