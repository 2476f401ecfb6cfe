"""benchmarks.models: the published figures come out, and the models do what can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from benchmarks.models import dedloc, dtfm, moshpit, square_cube, varuna
from benchmarks.models.cities import data_centre, eight_cities
from benchmarks.models.flow import STAGES, WAYS, ByFlow, Fleet, Server
from benchmarks.models.published import Figure, exactly, near
from swarm.errors import InvalidConfig
from swarm.types import PeerId


def missed(figures: Sequence[Figure]) -> list[str]:
    return [figure.row() for figure in figures if not figure.comes_out]


def test_a_figure_comes_out_within_its_bounds_only() -> None:
    assert exactly("a", 1.75, 1.7549, 2).comes_out
    assert not exactly("a", 1.75, 1.7551, 2).comes_out
    assert [near("a", 8.0, found, 0.25).comes_out for found in (5.9, 6.0, 10.0, 10.1)] == [False, True, True, False]
    assert near("a", 2e-9, 1.6e-9, 0.25).row() == "| a | 2.0e-09 | 1.6e-09 | yes |"


def test_the_figures_of_varuna_dedloc_and_the_square_cube_law_come_out() -> None:
    assert missed(varuna.figures()) == []
    assert missed(dedloc.figures(progress=True)) == []
    assert missed(square_cube.figures()) == []


def test_the_figures_of_dtfm_come_out_where_nothing_is_drawn() -> None:
    fixed = {"at_random": False, "seeds": 0, "trials": 0}
    for name, tables in ((dtfm.DATA_CENTRE, data_centre()), (dtfm.CITIES, eight_cities())):
        assert missed(list(dtfm.figures_of(name, tables, **fixed))) == []


def test_without_misses_rows_and_columns_leave_nothing_but_rounding_and_random_groups_do() -> None:
    (*_, first), last = moshpit.GRID[0.0], moshpit.figures(8)
    assert [figure.comes_out for figure in last if figure.about == "misses 0.0%, round 2"] == [True]
    assert first == 3.0e-2
    assert [figure.found > 1e-7 for figure in last if figure.about == "random groups, round 4"] == [True]


def write(folder: Path, delay: str, rates: str) -> Path:
    (folder / "small_delay_ms.csv").write_text(delay)
    (folder / "small_bandwidth_gbps.csv").write_text(rates)
    return folder


def test_any_folder_of_square_tables_is_read_with_names_or_without(tmp_path: Path) -> None:
    plain = list(dtfm.read(write(tmp_path, "0,1\n3,0\n", "0,2\n4,0\n")))
    assert plain == [("small", ([[0.0, 0.001], [0.003, 0.0]], [[0.0, 2e9], [4e9, 0.0]]))]
    assert plain == list(dtfm.read(write(tmp_path, "to,a,b\na,0,1\nb,3,0\n", "to,a,b\na,0,2\nb,4,0\n")))


@pytest.mark.parametrize(
    ("delay", "rates", "told"),
    [
        ("0,1\n1,0\n", "0,1,1\n1,0,1\n1,1,0\n", "has 2 rows and small_bandwidth_gbps.csv 3"),
        ("0,1\n1\n", "0,1\n1,0\n", "has 2 rows, but 1 columns in row 2"),
        ("0,1\n1,0\n", "0,1\n0,0\n", "a rate that is not above 0"),
        ("0,1\n1,0\n", "0,1\nnan,0\n", "a rate that is not above 0"),
        ("0,1\nx,0\n", "0,1\n1,0\n", "is no table of numbers"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, delay: str, rates: str, told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        list(dtfm.read(write(tmp_path, delay, rates)))


def test_a_flow_gives_each_replica_no_more_than_it_can_carry_and_what_a_stage_can_at_most() -> None:
    pools = [[Server(PeerId(f"{s}.{c}"), s, c, 1.0 + c) for c in range(2 + (s == 3))] for s in range(STAGES)]
    flow = ByFlow()
    flow.know(pools)
    for pool in pools:
        into = [sum(rate for (_, to), rate in flow.flows.items() if to is replica) for replica in pool]
        assert sum(into) == pytest.approx(3.0 / 2.0), "the narrowest stages have speeds 1 and 2, of 2 s a microbatch"
        assert all(rate <= one.speed / 2.0 + 1e-6 for rate, one in zip(into, pool, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_deaths_cost_speed_but_no_microbatch_and_a_seed_repeats_itself(way: str) -> None:
    routing, trainers = WAYS[way]
    calm, deadly, again = (Fleet(routing, trainers, 64, deaths, 1) for deaths in (0.0, 20.0, 20.0))
    speeds = [fleet.run(60.0) for fleet in (calm, deadly, again)]
    assert speeds[0] > speeds[1] == speeds[2] > 0.0
    given = [replica.given for pool in calm.pools for replica in pool]
    assert min(given) >= 0.0
    assert all(sum(replica.given for replica in pool) <= 64 for pool in calm.pools), "each is at one replica of a stage"


def test_the_tables_of_the_cities_are_symmetric_and_near_is_fast() -> None:
    delay_s, rates = eight_cities(1)
    assert all(delay_s[a][b] == delay_s[b][a] and rates[a][b] == rates[b][a] for a, b in product(range(8), repeat=2))
    assert all(delay_s[a][a] < min(delay_s[a][b] for b in range(8) if b != a) for a in range(8))
