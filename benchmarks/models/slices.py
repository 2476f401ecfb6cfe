"""How long an averaging round takes on unequal links, with equal slices and with slices by bandwidth.

    python -m benchmarks.models.slices [--chunks 16]

A fluid model: every member has an uplink and a downlink, which the transfers that are under way share fairly
(max-min). Member i sends its part of slice j to j; j sends the mean to all others. Both directions of a link work at
the same time, and adding costs nothing.

    whole     a mean leaves when all parts of its slice have arrived
    chunks    as stage servers do it: a slice is cut into equal chunks, and the mean of each leaves when its own parts
              have arrived

The shares by bandwidth are the scheduler's (scheduler/brain/commit/slices.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from scheduler.brain.commit.slices import shares_of

ROUNDINGS = 1e-9  # of a transfer: what is left of it after a computation with floats


@dataclass(frozen=True, slots=True)
class Link:
    """What a member can send and receive, in units per second; a unit is all that is averaged."""

    up: float
    down: float


FLEETS = {
    "4 equal": (Link(1.0, 1.0),) * 4,
    "3 of 4, one of 1": (*(Link(4.0, 4.0),) * 3, Link(1.0, 1.0)),
    "7 of 4, one of 1": (*(Link(4.0, 4.0),) * 7, Link(1.0, 1.0)),
    "7 of 1, one of 10": (*(Link(1.0, 1.0),) * 7, Link(10.0, 10.0)),
    "1, 2, 4, 8": tuple(Link(rate, rate) for rate in (1.0, 2.0, 4.0, 8.0)),
    "3 of 4, one of 1 up, 5 down": (*(Link(4.0, 4.0),) * 3, Link(1.0, 5.0)),
    "2: one of 1, one of 4": (Link(1.0, 1.0), Link(4.0, 4.0)),
}


def by_bandwidth(links: Sequence[Link]) -> list[float]:
    """The shares that the scheduler chooses once it knows the links."""
    return shares_of([min(link.up, link.down) for link in links])


@dataclass(slots=True)
class _Stream:
    """What one member sends another, chunk after chunk: parts of the receiver's slice, or means of the sender's own."""

    sender: int
    receiver: int
    is_mean: bool
    chunk: float
    done: int = 0
    left: float = 0.0


def round_s(links: Sequence[Link], shares: Sequence[float], chunks: int) -> float:
    """Seconds until every member has every mean."""
    members = range(len(links))
    streams = [
        _Stream(i, j, is_mean, shares[i if is_mean else j] / chunks)
        for i in members
        for j in members
        for is_mean in (False, True)
        if i != j and shares[i if is_mean else j] > 0.0
    ]
    for stream in streams:
        stream.left = stream.chunk
    now_s = 0.0
    while any(stream.done < chunks for stream in streams):
        ready = [
            min((one.done for one in streams if not one.is_mean and one.receiver == owner), default=0)
            for owner in members
        ]
        moving = [one for one in streams if one.done < chunks and not (one.is_mean and one.done >= ready[one.sender])]
        rates = _fair([(one.sender, one.receiver) for one in moving], links)
        seconds = min(one.left / rate for one, rate in zip(moving, rates, strict=True))
        now_s += seconds
        for one, rate in zip(moving, rates, strict=True):
            one.left -= rate * seconds
            if one.left <= ROUNDINGS * one.chunk:
                one.done, one.left = one.done + 1, one.chunk
    return now_s


def _fair(pairs: Sequence[tuple[int, int]], links: Sequence[Link]) -> list[float]:
    """Max-min fair rates of transfers from a member to another: the tightest link is shared out first."""
    free = {(True, at): link.up for at, link in enumerate(links)} | {
        (False, at): link.down for at, link in enumerate(links)
    }
    rates = [0.0] * len(pairs)
    left = set(range(len(pairs)))
    while left:
        users: dict[tuple[bool, int], list[int]] = {}
        for at in sorted(left):
            users.setdefault((True, pairs[at][0]), []).append(at)
            users.setdefault((False, pairs[at][1]), []).append(at)
        tightest = min(users, key=lambda end: free[end] / len(users[end]))
        rate = free[tightest] / len(users[tightest])
        for at in users[tightest]:
            rates[at] = rate
            free[True, pairs[at][0]] -= rate
            free[False, pairs[at][1]] -= rate
            left.discard(at)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=16)
    options = parser.parse_args()
    table = Table(
        "links", "shares by bandwidth", "whole: equal, s", "equal / by bandwidth", "chunks: the same", "whole / chunks"
    )
    for name, links in FLEETS.items():
        equal, chosen = [1.0 / len(links)] * len(links), by_bandwidth(links)
        whole, whole_chosen = (round_s(links, shares, 1) for shares in (equal, chosen))
        cut, cut_chosen = (round_s(links, shares, options.chunks) for shares in (equal, chosen))
        shares = ", ".join(f"{share:.2f}" for share in dict.fromkeys(chosen))
        ratios = (f"{whole / whole_chosen:.2f}", f"{cut / cut_chosen:.2f}", f"{whole / cut:.2f}")
        table.add_row(name, shares, f"{whole:.3f}", *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
