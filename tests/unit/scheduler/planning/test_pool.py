"""A file of a pool becomes facts; what it leaves out is assumed and said; what is wrong in it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.planning.pool import PeerPool, read_pool
from swarm.errors import InvalidConfig

GIB = 1 << 30
TWO = """
schema = "swarm.pool/1"
[[peer]]
name = "a"
count = 2
device = "cuda"
memory = "24GiB"
site = "oregon"
speed = 2e12
up = "200Mbit"
down = "1Gbit"
price_per_hour = 0.35
[[peer]]
name = "b"
device = "cuda"
site = "ohio"
"""


def pool_of(folder: Path, text: str = TWO, **files: str) -> PeerPool:
    """The pool in the text; `files` are the matrices that it names, by their stems."""
    for stem, content in files.items():
        (folder / f"{stem}.csv").write_text(content)
    (folder / "pool.toml").write_text(text)
    return read_pool(folder / "pool.toml")


def links(*keys: str) -> str:
    return TWO + "[links]\n" + "".join(f'{key} = "{stem}.csv"\n' for key, stem in zip(keys, "dw", strict=False))


def test_what_the_file_leaves_out_is_assumed_and_said(tmp_path: Path) -> None:
    pool = pool_of(tmp_path)

    assert [peer.name for peer in pool.peers] == ["a-0", "a-1", "b"]
    a, b = pool.peer("a-0"), pool.peer("b")
    assert (a.memory_bytes, a.up_bits_per_s, a.down_bits_per_s, a.price_per_hour) == (24 * GIB, 2e8, 1e9, 0.35)
    assert (b.memory_bytes, b.speed, b.price_per_hour) == (0, 2e12, None)
    assert (pool.delay_s("a-0", "a-1"), pool.bits_per_s("a-0", "a-1")) == (0.001, 1e9)
    assert (pool.delay_s("a-0", "b"), pool.bits_per_s("b", "a-0")) == (0.05, 1e8)
    assert pool.assumed == (
        "1 link between sites (50 ms, 100 Mbit/s)",
        "1 link within sites (1 ms, 1.0 Gbit/s)",
        "memory of b (enough for any stage)",
        "speed of b (median of its device, or of all)",
        "line of b (as fast as its links)",
    )


def test_matrices_are_of_sites_or_of_peers_and_each_way_is_its_own(tmp_path: Path) -> None:
    by_site = pool_of(
        tmp_path, links("delay_ms", "bandwidth_gbps"), d=",oregon,ohio\noregon,0.5,20\nohio,30,\n",
        w=",oregon,ohio\noregon,0,0.3\nohio,2,0\n",
    )  # fmt: skip
    assert [by_site.delay_s(*pair) for pair in (("a-0", "a-1"), ("a-0", "b"), ("b", "a-1"))] == [0.0005, 0.02, 0.03]
    assert [by_site.bits_per_s(*pair) for pair in (("a-0", "b"), ("b", "a-1"))] == [3e8, 2e9]
    assert by_site.peer("b").up_bits_per_s == 2e9
    assert not any("between" in note for note in by_site.assumed)

    numbered = links("delay_ms").replace("oregon", "1").replace("ohio", "2")  # the names were taken for delays
    assert pool_of(tmp_path, numbered, d=",1,2\n1,0.5,20\n2,30,0.5\n").delay_s("a-0", "b") == 0.02
    for first in ("0,1,2", "0,,2", ",,2"):
        by_peer = pool_of(tmp_path, links("delay_ms"), d=f"{first}\n3,0,4\n5,6,0\n")
        assert [by_peer.delay_s(*pair) for pair in (("a-0", "b"), ("b", "a-1"))] == [0.002, 0.006]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "schema is missing"),
        ('schema = "swarm.pool/2"', "schema is 'swarm.pool/2'"),
        ("schema = ", "is not TOML"),
        ('schema = "swarm.pool/1"', "peer is missing"),
        (TWO.replace("[[peer]]", "[peer]", 1).split("[[peer]]")[0], "peer is one table (it should be [[peer]]"),
        (TWO.replace('"b"', '"a-1"'), "line 14: peer a-1 is there twice (give it another name than the first, line 4)"),
        (TWO.replace("count = 2", "count = 0"), "line 5: count is 0"),
        (TWO.replace("count = 2", "count = true"), "line 5: count is True"),
        (TWO.replace("count = 2", "count = 4096"), "has 4097 peers"),
        (TWO.replace("site = ", "sitte = ", 1), 'line 8: unknown key "sitte" (did you mean "site"?)'),
        (TWO.replace('"200Mbit"', '"200"'), "line 10: up is '200' (it should be a rate in kbit, Mbit or Gbit"),
        (TWO.replace('"24GiB"', '"24"'), "line 7: memory is '24' (it should be a size above 0 with its unit"),
        (TWO.replace("24GiB", "0GiB"), "line 7: memory is '0GiB' (it should be a size above 0 with its unit"),
        ('schema = "swarm.pool/1"\npeer = []', "peer is missing (it should be [[peer]]"),
        ('schema = "swarm.pool/1"\npeer = [1]', "peer is 1 (it should be [[peer]]"),
        (TWO.replace("site = ", "my-site = ", 1), 'unknown key "my-site"'),
        (TWO.replace('"24GiB"', "24"), "line 7: memory is 24"),
        (TWO.replace("2e12", "nan"), "line 9: speed is nan"),
        (TWO.replace("2e12", "-1"), "line 9: speed is -1"),
        (TWO.replace("2e12", "0"), "line 9: speed is 0"),
        (TWO.replace("2e12", "6"), "line 9: speed is 6 (it should be a number from 1e6 on"),
        (TWO.replace("0.35", "-0.1"), "line 12: price_per_hour is -0.1"),
        (TWO.replace('"b"', '""'), "line 14: name is ''"),
        (TWO.replace('"b"', '"b c"'), "line 14: name is 'b c'"),
        (TWO.replace("speed = 2e12", ""), "pool.toml: no peer has a speed"),
        (TWO + 'else = "x"', 'line 17: unknown key "else"'),
        (TWO + "[links]\ndelay_ms = 5", "delay_ms is 5 (it should be the name of a file"),
        (TWO + '[links]\nbandwidth = "w.csv"', 'did you mean "bandwidth_gbps"?'),
        (TWO + '[links]\nmeasured = "yesterday"', "measured is 'yesterday' (it should be a day"),
        (TWO + '[links]\ndelay_ms = "none.csv"', "No such file"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_line_and_what_to_write(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        pool_of(tmp_path, text)
    assert told in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ("0,1,2\n3,0,4\n", "d.csv has 2 rows and 3 columns"),
        ("0,1\n3,0\n", "d.csv has 2 rows and 2 columns"),
        ("0,1,2\n3,0,4\n5,6\n", "d.csv has 3 rows and 2 columns"),
        ("", "d.csv has 0 rows and 0 columns"),
        ("0,1,2\n3,0,nan\n5,6,0\n", 'row 2, column 3 (a-1 to b): "nan" is not a number of ms'),
        ("0,1,2\n3,0,inf\n5,6,0\n", 'row 2, column 3 (a-1 to b): "inf" is not a number of ms'),
        ("0,1,2\n3,0,4\n5,-6,0\n", 'row 3, column 2 (b to a-1): "-6"'),
        ("0,1,2\n0,0,4\n5,6,0\n", 'row 2, column 1 (a-1 to a-0): "0"'),
        ("0,1,far\n3,0,4\n5,6,0\n", 'column 3 (a-0 to b): "far"'),
        ("0,1,60001\n3,0,4\n5,6,0\n", '"60001", of at most 60000 ms (is it in ms?)'),
        (",oregon,paris\noregon,0,1\nparis,1,0\n", 'names site "paris" (name each once: ohio, oregon)'),
        (",ohio,ohio\nohio,0,1\nohio,1,0\n", 'names site "ohio"'),
        (",ohio,oregon\noregon,0,1\nohio,1,0\n", "names other sites in its first column than in its first row"),
        (",ohio,oregon\nohio,0,1\noregon,1\n", "d.csv has 2 rows and 1 column"),
        ("0,near,2\n3,0,4\n5,6,0\n", 'row 1, column 2 (a-0 to a-1): "near" is not a number of ms'),
        ("0,nan,2\n3,0,4\n5,6,0\n", 'row 1, column 2 (a-0 to a-1): "nan" is not a number of ms'),
        pytest.param("0," + "1" * 200_000, "d.csv, line 1: field larger than field limit (131072)", id="long"),
    ],
)
def test_a_wrong_matrix_is_refused_with_the_cell(tmp_path: Path, cells: str, told: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        pool_of(tmp_path, links("delay_ms"), d=cells)
    assert told in str(refused.value)
    assert refused.value.hint


def test_a_matrix_of_sites_for_peers_without_one_is_refused_with_the_hint_to_name_them(tmp_path: Path) -> None:
    bare = links("delay_ms").replace('site = "oregon"\n', "").replace('site = "ohio"\n', "")
    told = r'd\.csv names site "x" \(no peer in the pool has a site: give each peer its site\)'
    with pytest.raises(InvalidConfig, match=told):
        pool_of(tmp_path, bare, d=",x\nx,0\n")


def test_two_matrices_are_of_the_same_ends_and_of_sane_bandwidths(tmp_path: Path) -> None:
    for second, told in (("0,1,2\n3,0,4\n5,6,0\n", "differ in size"),
                         (",ohio,oregon\nohio,0,20000\noregon,1,0\n", "is it in Gbit/s?")):  # fmt: skip
        with pytest.raises(InvalidConfig) as refused:
            pool_of(tmp_path, links("delay_ms", "bandwidth_gbps"), d=",ohio,oregon\nohio,0,1\noregon,1,0\n", w=second)
        assert told in str(refused.value)
