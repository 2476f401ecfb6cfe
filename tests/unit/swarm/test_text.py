"""Numbers, sizes, times and names as people read them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from swarm.text import (
    UNIX_S_MAX,
    as_date,
    bandwidth,
    counted,
    duration,
    first_line,
    is_address,
    listed,
    printable,
    seconds,
    size,
    spoken_duration,
    utc,
    without_passwords,
)


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (size, {0: "0 B", 1023: "1023 B", 1536 << 10: "1.5 MiB", 3 << 30: "3.0 GiB", 5 << 40: "5.0 TiB"}),
        (duration, {4.2: "4.2s", 42: "42s", 185: "3m05s", 7800: "2h10m", 273_600: "3d04h"}),
        (duration, dict.fromkeys((math.nan, math.inf, -1), "-")),
        (spoken_duration, {4.2: "4.2 s", 42: "42.0 s", 185: "3 min 05 s", 7800: "2 h 10 min", 273_600: "76 h 00 min"}),
        (bandwidth, {100.0: "0.8 kbit/s", 64e3: "512 kbit/s", 1.55e6: "12.4 Mbit/s"}),
        (bandwidth, {125e6: "1.0 Gbit/s", 1e12: "8000 Gbit/s"}),
        (lambda number: counted(number, "replica"), {0: "0 replicas", 1: "1 replica", 2: "2 replicas"}),
        (listed, {("b", "a"): "a, b", (): "nobody"}),
    ],
)
def test_numbers_have_the_largest_unit_that_they_fill_and_names_their_order(
    write: Callable[[Any], str], texts: dict[Any, str]
) -> None:
    assert {value: write(value) for value in texts} == texts


def test_a_time_span_is_read_as_a_person_writes_it() -> None:
    assert [seconds(text) for text in ("90s", "10m", "2h", "1.5d")] == [90.0, 600.0, 7200.0, 129_600.0]
    assert [seconds(text) for text in ("", "5", "5 m", "-5m", "5w", "m", "1.m", "５m")] == [None] * 8


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mqtt://me:SECRET@host:1883", "mqtt://…@host:1883"),
        ("mqtt://me:SEC@RET@host:1883", "mqtt://…@host:1883"),
        ("at s3://key:SE/CRET@b", "at s3://key:SE/CRET@b"),  # a password with a slash is no URL's
        ('{"dir":"ftp://SECRET@h/x","to":"postgresql+psycopg://a:SECRET@h/db"}', None),
        ("nobody@example.org reads https://example.org/@x", "nobody@example.org reads https://example.org/@x"),
        ("postgresql://h/db?user=a&password=SECRET&sslmode=require", None),
        ("postgresql+psycopg://a:SECRET@h/db?sslkey=SECRET;sslPassword=SECRET#x", None),
        ('{"dir":"s3://b/c?X-Amz-Security-Token=SECRET\\"","to":"https://h/?x_api_key=SECRET"}', None),
        ("https://h/?a=1&sig=SEC%2FRET)", "https://h/?a=1&sig=…"),
        ("https://h/cb#access_token=SECRET&state=x", None),
        ("https://h/?page=2&tokens=3&keyword=x design=1", "https://h/?page=2&tokens=3&keyword=x design=1"),
    ],
)
def test_the_secrets_of_a_url_are_left_out(text: str, shown: str | None) -> None:
    """The user and password before the host, and what a query says under the name of a secret."""
    assert without_passwords(text) == (shown or text.replace("a:SECRET", "…").replace("SECRET", "…"))


def test_text_that_looks_like_many_secrets_is_read_in_time() -> None:
    began_s = time.process_time()
    for text in ("?" + "a" * 40, "&token" * 2, "?key=", "?password="):
        without_passwords(text * 20_000)
    assert time.process_time() - began_s < 2.0


def test_a_librarys_error_is_one_line_without_passwords() -> None:
    assert first_line(OSError("no answer from https://me:SECRET@hub/x\nmore")) == "no answer from https://…@hub/x"
    assert first_line(TimeoutError()) == "TimeoutError"


ADDRESSES = {
    True: (
        *("127.0.0.1:7950", "gpu-3.example.org:1", "[::1]:65535", "[fe80::1%eth0]:80", "a:1", "unix.example.org:80"),
        "stage_server-1:7951",
    ),
    False: (
        *("unix:/run/x:1", "unix:80", "XDS:80", "dns://1.1.1.1/h:80", "dns:h:80", "ipv4:1.2.3.4:80", "http://h:80"),
        *("h", "h:", ":80", "h:0", "h:65536", "h:\u0661", "h h:80", "h/x:80", "", "::1:80", "u@h:80", "h\n:80"),
        *("-h:80", "h" * 255 + ":80"),
    ),
}


@pytest.mark.parametrize("is_one", ADDRESSES)
def test_an_address_is_a_host_and_a_port_and_no_other_target_of_grpc(is_one: bool) -> None:
    assert [text for text in ADDRESSES[is_one] if is_address(text) is not is_one] == []


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x07", "\b", "\r", "\n", "\x9b", "\u202e", "\u200b", "\u2028"])
def test_text_of_others_does_not_move_the_cursor(bad: str) -> None:
    shown = printable(f"a{bad}ä[/x]b")
    assert shown.isprintable()
    assert shown.endswith("ä[/x]b")
    assert printable("plain, grün, 漢字") == "plain, grün, 漢字"


@pytest.mark.parametrize("told", [1e308, math.inf, -1.0, math.nan, UNIX_S_MAX + 1])
def test_a_time_that_no_calendar_has_is_none(told: float) -> None:
    """`swarm status`, `logs` and `history` ended with an internal error over the times of a scheduler that lied."""
    assert as_date(told) == 0
    assert utc(as_date(told)) == "1970-01-01 00:00:00 UTC"
    assert as_date(UNIX_S_MAX) == UNIX_S_MAX
