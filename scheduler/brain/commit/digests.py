"""Votes on digests: replicas must report the same, and there are remedies if they differ.

    all say the same ──▶ go on
    a strict majority ──▶ the others are expelled, and all that is not committed is computed again without them
    none ──┬─ Loaded, Committed: the job stops, since a majority is missing
           └─ Averaged: the round is repeated, then the step is computed again; the job stops if they differ even then

A vote is held only once all have reported: the third of three decides between the first two. Replicas of two stages
that share a unit vote together on its size and its average. A stage never loses its last replica by a vote: the job
stops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from scheduler.brain.outputs import Fail
from swarm.errors import ReplicaDiverged
from swarm.text import listed
from swarm.types import PeerId
from swarm.wire.messages import Averaged

SAME_HINT = "run the same release, device class and thread count on all of them"
SAID_CHARACTERS_MAX = 100  # of what one replica says


@dataclass(frozen=True, slots=True)
class Expel:
    """The job goes on without a replica."""

    peer: PeerId
    cause: str


@dataclass(frozen=True, slots=True)
class StartOver:
    """Compute all steps without a row again, by the same replicas."""

    cause: str


Remedy: TypeAlias = Expel | StartOver | Fail
Voter = TypeVar("Voter", PeerId, int)  # a replica, or the number of an island


def outvoted(said: Mapping[Voter, Hashable]) -> tuple[Voter, ...]:
    """Those that say something else than a strict majority; all of them, if there is no such majority."""
    if not said:
        return ()
    (common, count), *_ = Counter(said.values()).most_common(1)
    has_majority = 2 * count > len(said)
    return tuple(sorted(peer for peer, one in said.items() if one != common or not has_majority))


def vote(
    said: Mapping[PeerId, Hashable],
    what: str,
    by_stage: Iterable[Sequence[PeerId]],
    *,
    recover: bool,
    fault: str = "",
    hint: str = SAME_HINT,
) -> list[Remedy]:
    """Remedies for replicas that differ in `what`; `by_stage` has all replicas of each stage.

    `fault` explains the difference to a person, if the reports alone do not.
    """
    odd = outvoted(said)
    if not odd:
        return []
    held = ", ".join(f"{peer} holds {_shown(said[peer])}" for peer in sorted(said))
    text = fault or f"replicas differ in {what}: {listed(odd)} ({held})"
    can_go = recover and len(odd) < len(said) and not any(peers and set(peers) <= set(odd) for peers in by_stage)
    return [Expel(peer, text) for peer in odd] if can_go else [Fail(ReplicaDiverged.code, text, hint)]


def average_of(report: Averaged) -> Hashable:
    """What all members of a round must report alike: the bytes of the average, and each parameter's norm."""
    norms = {norm.name: norm.squared_norm for norm in report.norms}
    return report.digest, tuple((name, "nan" if math.isnan(norms[name]) else norms[name]) for name in sorted(norms))


def _shown(one: Hashable) -> str:
    text = f"{one}"
    return text if len(text) <= SAID_CHARACTERS_MAX else f"{text[:SAID_CHARACTERS_MAX]}..."
