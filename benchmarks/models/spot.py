"""A day of 100 spot machines as it is played, with and without a new cut at a stall: the table in docs/planning.md.

    python -m benchmarks.models.spot [--hours 24] [--churn 0.2]

A machine is lost 0.2 times an hour, and another is there two minutes later, on average. Twice a day the price rises for
90 minutes, 6 and 16 hours after the start: all but 9 machines are lost, and come back one every two seconds after it.
The job has 24 layers of width 4096, which the scheduler cuts into 12 stages.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from scheduler.planning.pool import PeerPool, PoolPeer
from scheduler.planning.simulate.__main__ import simulation
from scheduler.planning.trace import Churn, TraceEvent
from swarm.job.spec import parse_job

MACHINES, LEFT, BACK_S = 100, 9, 2.0
DEARER_S = ((6 * 3600.0, 7.5 * 3600.0), (16 * 3600.0, 17.5 * 3600.0))
SHOWN = ("tokens_per_s", "of_possible", "steps", "deaths", "stalls", "recuts", "steps_done_again")
JOB = {
    "name": "day",
    "model": {"config": {"hidden_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 32000}},
    "data": {"source": "x", "sequence_length": 2048},
    "training": {"global_batch_sequences": 1536, "microbatch_sequences": 8},
    "pipeline": {"stages": 12},
}


def events(pool: PeerPool, per_hour: float, until_s: float, seed: int) -> Sequence[TraceEvent]:
    """Deaths and arrivals, by chance and by price."""
    away: dict[str, list[list[float]]] = {peer.name: [] for peer in pool.peers}
    for event in Churn(pool, per_hour, seed):
        if event.at_s > until_s:
            break
        if event.kind == "die":
            away[event.peer.name].append([event.at_s, until_s + 1.0])
        else:
            away[event.peer.name][-1][1] = event.at_s
    for number, peer in enumerate(pool.peers[LEFT:]):
        away[peer.name] += ([begin_s, end_s + BACK_S * number] for begin_s, end_s in DEARER_S)
    found = [event for peer in pool.peers for event in _of(peer, sorted(away[peer.name]))]
    return sorted(found, key=lambda event: (event.at_s, event.peer.name))


def _of(peer: PoolPeer, away: Sequence[Sequence[float]]) -> Iterator[TraceEvent]:
    """The events of a machine that is away at these times, which may overlap."""
    until_s = -1.0
    for begin_s, end_s in away:
        if begin_s > until_s:
            if until_s >= 0.0:
                yield TraceEvent(until_s, "join", peer)
            yield TraceEvent(begin_s, "die", peer)
        until_s = max(until_s, end_s)
    if until_s >= 0.0:
        yield TraceEvent(until_s, "join", peer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--churn", type=float, default=0.2, help="how often a machine is lost in an hour")
    options = parser.parse_args()
    pool = PeerPool(tuple(PoolPeer(f"spot-{n:02}", "cuda", 0, "", 3e11, 1e9, 1e9) for n in range(MACHINES)))
    trace = events(pool, options.churn, 3600.0 * options.hours, 0)
    table = Table("pipeline.recut", *SHOWN)
    for recut in ("stall", "off"):
        spec = parse_job(JOB | {"pipeline": {"stages": 12, "recut": recut}})
        made = simulation(pool, spec, trace, 0).run(options.hours, lambda _: None)
        table.add_row(recut, *(f"{made[key]:.6g}" for key in SHOWN))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
