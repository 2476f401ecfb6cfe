"""DT-FM's modelled seconds of assignments of 64 GPUs, beside the published ones.

    python -m benchmarks.models.dtfm [DIR] [--random] [--seeds 3] [--trials 4900] [--output json]

    file order   peers as they are listed, cut into groups; "fixed": each sends to the one that stands as it does in
                 the next group, in the order of the list; "matched": by the best matching and the shortest way
    random       means of random groups, 500 fixed and 200 matched
    search       the genetic search, each seed

Without DIR both fleets of the paper (cities.py). DIR has any number of cases, each two square tables of comma-separated
values with one size: NAME_delay_ms*.csv and NAME_bandwidth_gbps*.csv, with or without names in the first row and
column. Groups are as many as the largest divisor of the peers that is no larger than its root.

A stage has 1.3e9 / 24 * 3 parameters of 4 bytes; a hop carries 2024 sequences of 2048 tokens, width 2048, 2 bytes. Some
of the published constants are in GB and some in GiB; they are kept so.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isqrt
from pathlib import Path
from random import Random
from statistics import fmean

from benchmarks.models.cities import Tables, data_centre, eight_cities
from benchmarks.models.line_search import PeerPairs, in_order, lined_up, peer_pairs, search
from benchmarks.models.published import Figure, exactly, near, parser, tell
from swarm.errors import InvalidConfig, SwarmError

GRADIENT_BYTES = 0.65e9
HOP_BYTES = 2024 * 2048 * 2 * (1.25e5 / 2048) / 2**30 * 1e9
DATA_CENTRE, CITIES = "case0_datacenter", "case4_worldwide"
# File order fixed and matched, means of random groups fixed and matched, the search: seconds.
PUBLISHED = {
    DATA_CENTRE: (16.981, 16.981, 19.802, 19.802, 3.440),
    CITIES: (75.294, 59.437, 171.4, 93.5, 49.218),
}
BEST_OF_SEEDS = {DATA_CENTRE: 3.45, CITIES: 49.3}
WORST_OF_SEEDS = {DATA_CENTRE: 3.45, CITIES: 51.0}
SEARCH_S_MAX = 60.0
RANDOM_FIXED, RANDOM_MATCHED = (500, 0.01), (200, 0.02)  # how many, and how far off the published mean


def fixed_s(pairs: PeerPairs, groups: Sequence[Sequence[int]]) -> float:
    """Seconds if each peer sends to the one that stands as it does in the next group, in this order of groups."""
    hops_s = sum(max(pairs.hop_s[a][b] for a, b in zip(*hop, strict=True)) for hop in pairwise(groups))
    return max(sum(pairs.averaging_s[a][b] for b in group) for group in groups for a in group) + 2.0 * hops_s


def shuffled(peers: int, groups: int, rng: Random) -> list[list[int]]:
    order = rng.sample(range(peers), peers)
    return [order[first : first + peers // groups] for first in range(0, peers, peers // groups)]


def figures_of(name: str, tables: Tables, *, at_random: bool, seeds: int, trials: int) -> Iterator[Figure]:
    """The figures of one case. A case that was not published passes with any figures."""
    peers = len(tables[0])
    groups = next(count for count in range(isqrt(peers), 0, -1) if peers % count == 0)
    pairs = peer_pairs(*tables, peers // groups, GRADIENT_BYTES, HOP_BYTES)
    known = PUBLISHED.get(name, ()) if peers == 64 else ()

    def figure(about: str, place: int, found_s: float, share: float | None = None) -> Figure:
        if not known:
            return Figure(f"{name}, {about}", "", found_s, 0.0, found_s)
        said_s = known[place]
        told = f"{name}, {about}, s"
        return exactly(told, said_s, found_s) if share is None else near(told, said_s, found_s, share)

    listed = in_order(range(peers), groups)
    yield figure("file order, fixed", 0, fixed_s(pairs, listed))
    yield figure("file order, matched", 1, lined_up(pairs, listed).cost_s)
    if at_random:
        rng = Random(0)
        many, share = RANDOM_FIXED
        mean_s = fmean(fixed_s(pairs, shuffled(peers, groups, rng)) for _ in range(many))
        yield figure("random, fixed", 2, mean_s, share)
        many, share = RANDOM_MATCHED
        drawn = (in_order(rng.sample(range(peers), peers), groups) for _ in range(many))
        yield figure("random, matched", 3, fmean(lined_up(pairs, groups).cost_s for groups in drawn), share)
    began_s = time.process_time()
    costs_s = [
        search(peer_pairs(*tables, peers // groups, GRADIENT_BYTES, HOP_BYTES), groups, seed, trials).cost_s
        for seed in range(seeds)
    ]
    took_s = (time.process_time() - began_s) / max(1, seeds)
    if seeds and not known:
        yield figure("search, best of the seeds", 0, min(costs_s))
    elif seeds:
        said = f"{known[4]:.3f}"
        yield Figure(f"{name}, search, best of {seeds} seeds, s", said, min(costs_s), 0.0, BEST_OF_SEEDS[name])
        yield Figure(f"{name}, search, worst of {seeds} seeds, s", said, max(costs_s), 0.0, WORST_OF_SEEDS[name])
        yield Figure(f"{name}, processor seconds of a search", "", took_s, 0.0, SEARCH_S_MAX, 0)


def read(folder: Path) -> Iterator[tuple[str, Tables]]:
    """The cases of a folder, by name; InvalidConfig."""
    delays = sorted(folder.glob("*_delay_ms*.csv"))
    if not delays:
        raise InvalidConfig(f"{folder} has no *_delay_ms*.csv", hint="name the folder with the tables")
    for path in delays:
        name, _, rest = path.name.partition("_delay_ms")
        other = folder / f"{name}_bandwidth_gbps{rest}"
        delay_ms, gbit_per_s = _table(path), _table(other)
        if len(delay_ms) != len(gbit_per_s):
            raise InvalidConfig(f"{path.name} has {len(delay_ms)} rows and {other.name} {len(gbit_per_s)}")
        if any(not rate > 0.0 for i, row in enumerate(gbit_per_s) for j, rate in enumerate(row) if i != j):
            raise InvalidConfig(f"{other.name} has a rate that is not above 0")
        rates = [[rate * 1e9 for rate in row] for row in gbit_per_s]
        yield name, ([[cell / 1e3 for cell in row] for row in delay_ms], rates)


def _table(path: Path) -> list[list[float]]:
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
        named = bool(rows) and bool(rows[0]) and not rows[0][-1].replace(".", "").isdigit()
        table = [[float(cell) for cell in row[named:]] for row in rows[named:]]
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path.name} is no table of numbers: {error}") from error
    for number, row in enumerate(table, 1):
        if len(row) != len(table):
            raise InvalidConfig(f"{path.name} has {len(table)} rows, but {len(row)} columns in row {number}")
    return table


def main() -> int:
    options = parser(__doc__)
    options.add_argument("folder", type=Path, nargs="?", help="tables of other fleets; the two of the paper without")
    options.add_argument("--random", action="store_true", help="the means of random groups too")
    options.add_argument("--seeds", type=int, default=3, help="of the search")
    options.add_argument("--trials", type=int, default=4900, help="of the search")
    given = options.parse_args()
    built_in = ((DATA_CENTRE, data_centre()), (CITIES, eight_cities()))
    try:
        cases = list(read(given.folder)) if given.folder is not None else built_in
    except SwarmError as error:
        options.error(error.message)
    draws = {"at_random": given.random, "seeds": given.seeds, "trials": given.trials}
    return tell(given, [figure for name, tables in cases for figure in figures_of(name, tables, **draws)])


if __name__ == "__main__":
    sys.exit(main())
