"""Places peers on stages when a job starts.

Every idle peer that can hold a stage is used. Pins are obeyed. The other peers go, fastest first, to the stage that has
the fewest replicas so far (then the least speed, then the lowest number), so the stages differ by at most one replica
wherever pins and memory allow it.

    sites    berlin: a b c d     lyon: e f     (not said): g
    islands  0 = berlin: a b c d               1 = lyon: e f g

A job with islands has a place for each stage of each island, and an island's home is one site: only peers of that site,
or without a site, serve it. So no step of an island waits for a slow link.

Decision: docs/decisions/105.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

from swarm.text import counted
from swarm.types import Decision, Memory, PeerId

ANY_STAGE = -1
UNKNOWN = Memory()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An idle peer; `pinned_stage` -1 = any; `speed` is relative to the others, in any unit."""

    peer: PeerId
    pinned_stage: int = ANY_STAGE
    speed: float = field(default=1.0, compare=False)  # it varies, and the peer is the same
    offer: Memory = UNKNOWN
    site: str = ""  # where it is; empty: not said
    unreached: bool = False  # the scheduler cannot dial it

    def holds(self, need: Memory) -> bool:
        """Whether this much fits; a peer that does not say what it has is assumed to hold anything."""
        return self.offer.holds(need)


def together(candidates: Sequence[Candidate], places: int) -> Iterable[Sequence[Candidate]]:
    """The groups that may serve a job of this many places, the best first: as far as is known, all members of a group
    reach each other.

    First all that the scheduler reaches. It may stand where stage servers do not, so groups of one site come next,
    reached or not. A job of one place needs no links.
    """
    yield [candidate for candidate in candidates if not candidate.unreached]
    unreached = [candidate for candidate in candidates if candidate.unreached]
    sites = {candidate.site for candidate in unreached} - {""}
    yield from ([candidate for candidate in candidates if candidate.site == site] for site in sorted(sites))
    if places == 1:
        yield from ([candidate] for candidate in unreached)


def stages_for(peers: int) -> int:
    """The default number of stages: two replicas each, at least one stage."""
    return max(1, peers // 2)


def homes_of(
    candidates: Sequence[Candidate], islands: int, min_replicas: int, needs: Sequence[Memory]
) -> tuple[str, ...]:
    """The home of each place of a job with islands, whose stages need so much each; () if none has a site.

    Each site that can serve an island alone is home to one, the largest first; then to a second one, and so on. Islands
    that are left go to smaller sites, which peers without a site may complete, and then to such peers alone (""). Only
    those count for the size of a site that some stage fits.
    """
    by_site = _by_site(candidate for candidate in candidates if any(map(candidate.holds, needs)))
    sites = sorted(by_site, key=lambda site: (-len(by_site[site]), site))
    if not sites:
        return ()
    homes: list[str] = []
    able = sites
    while able and len(homes) < islands:  # a site that cannot serve two islands cannot serve three
        several = tuple(needs) * (homes.count(able[0]) + 1)
        able = [s for s in able if len(by_site[s]) >= len(several) * min_replicas]
        able = [s for s in able if place(by_site[s], len(several), min_replicas, several).plan is not None]
        homes += able
    homes += [site for site in sites if site not in homes]
    homes = sorted(homes[:islands]) + [""] * (islands - len(homes))
    return tuple(home for home in homes for _ in needs)


def sites_for_islands(
    candidates: Sequence[Candidate],
    most: Callable[[int], int],
    needs_for: Callable[[int, Sequence[Candidate], int], Sequence[Memory]],
    min_replicas: int,
) -> tuple[int, Sequence[Candidate]] | None:
    """The number of islands of a job, one for each site that can serve it alone, and the site whose cut of the model
    that many sites can serve: the smallest of the largest sites. None if the job has one island.

    `most` gives the most islands that the job divides into, up to a number. `needs_for` gives what a replica needs of
    each stage, for a number of islands, with the cut for a site's memory and a number of peers in an island; none if
    the job cannot be cut so.
    """
    whole = whole_sites(candidates, lambda site: needs_for(1, site, len(site)), min_replicas)
    count = len(whole)
    while (count := most(count)) > 1:
        for site in reversed(whole[:count]):
            needs = needs_for(count, site, len(candidates) // count)
            if sum(serves_alone(other, needs, min_replicas) for other in whole) >= count:
                return count, site
        count -= 1
    return None


def whole_sites(
    candidates: Sequence[Candidate], needs_at: Callable[[Sequence[Candidate]], Sequence[Memory]], min_replicas: int
) -> list[list[Candidate]]:
    """The peers of each site that can serve an island alone, the largest first.

    `needs_at` gives what a replica needs of each stage, if a site alone served the job; none if it cannot.
    """
    whole = [site for site in _by_site(candidates).values() if serves_alone(site, needs_at(site), min_replicas)]
    return sorted(whole, key=lambda site: (-len(site), site[0].site))


def serves_alone(site: Sequence[Candidate], needs: Sequence[Memory], min_replicas: int) -> bool:
    """Whether these peers can serve an island whose stages need so much each; there is none without stages."""
    return bool(needs) and place(site, len(needs), min_replicas, needs).plan is not None


def at_home(one: Candidate, homes: Sequence[str], stages: int) -> Candidate:
    """The peer pinned to its stage of the first island at its site."""
    if one.pinned_stage == ANY_STAGE or not one.site or one.site not in homes:
        return one
    return replace(one, pinned_stage=homes.index(one.site) // stages * stages + one.pinned_stage)


def place(
    candidates: Sequence[Candidate],
    stages: int,
    min_replicas: int,
    needs: Sequence[Memory] = (),
    homes: Sequence[str] = (),
) -> Decision[dict[PeerId, int]]:
    """Spread the peers evenly over the stages that they can hold; the plan gives each placed peer its stage.

    `needs` is what a replica of each stage takes, `homes` its site if that matters. A peer stays idle if no stage fits
    it, or if its pinned stage does not. There is no plan if some stage would have fewer than `min_replicas`; the reason
    then names the stages, how many replicas each still needs, and how much memory they must have.
    """
    needs = needs or (Memory(),) * stages
    homes = homes or ("",) * stages
    members, free, useless = _must_have(candidates, stages, min_replicas, needs, homes)
    for candidate, fitting in free:
        members[_neediest(members, fitting)].append(candidate)

    aside = "".join(f"; {reason}" for reason in sorted({*useless}))
    if any(homes):
        aside += f"; the stage servers of an island are of one site, here {', '.join(sorted({*homes} - {''}))}"
    lacking = [(stage, min_replicas - len(pool)) for stage, pool in enumerate(members) if len(pool) < min_replicas]
    if lacking:
        short = ", ".join(f"stage {stage} needs {counted(count, 'replica')} more" for stage, count in lacking)
        idle = f"{len(candidates)} idle, {stages * min_replicas} needed"
        return Decision(None, f"{short} ({idle}){_memory(candidates, [needs[stage] for stage, _ in lacking])}{aside}")
    plan = {member.peer: stage for stage, pool in enumerate(members) for member in pool}
    sizes = ", ".join(f"stage {stage}: {len(pool)}" for stage, pool in enumerate(members))
    replicas = counted(len(plan), "replica")
    return Decision(dict(sorted(plan.items())), f"{replicas} over {counted(stages, 'stage')} ({sizes}){aside}")


def least(
    candidates: Sequence[Candidate],
    stages: int,
    min_replicas: int,
    needs: Sequence[Memory] = (),
    homes: Sequence[str] = (),
) -> frozenset[PeerId]:
    """The fewest peers with which a job would start, or come nearest to a start."""
    needs, homes = needs or (Memory(),) * stages, homes or ("",) * stages
    members, _, _ = _must_have(candidates, stages, min_replicas, needs, homes)
    return frozenset(member.peer for pool in members for member in pool[:min_replicas])


def _by_site(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Those that say where they are."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        if candidate.site:
            found.setdefault(candidate.site, []).append(candidate)
    return found


def _must_have(
    candidates: Sequence[Candidate],
    stages: int,
    min_replicas: int,
    needs: Sequence[Memory],
    homes: Sequence[str],
) -> tuple[list[list[Candidate]], list[tuple[Candidate, list[int]]], list[str]]:
    """The pinned peers and the minimum of every stage; the other peers, and what fits each; why some are of no use."""
    assert min(stages, min_replicas) >= 1
    members: list[list[Candidate]] = [[] for _ in range(stages)]
    useless = []
    free = []

    @cache
    def fitting_of(offer: Memory, site: str) -> list[int]:
        """The stages that such a peer may serve: what fits into it, of the islands at its site."""
        may = [not site or not any(homes) or home == site for home in homes]
        return [stage for stage, need in enumerate(needs) if may[stage] and offer.holds(need)]

    for candidate in sorted(candidates, key=lambda candidate: (-candidate.speed, candidate.peer)):
        fitting = fitting_of(candidate.offer, candidate.site)
        if candidate.pinned_stage >= stages:
            useless.append(f"{candidate.peer} is pinned to stage {candidate.pinned_stage}, which this job lacks")
        elif candidate.pinned_stage != ANY_STAGE and candidate.pinned_stage not in fitting:
            useless.append(f"{candidate.peer} is pinned to stage {candidate.pinned_stage}, which does not fit it")
        elif not fitting:
            is_far = any(homes) and candidate.site not in ("", *homes)
            useless.append(f"no island is at {candidate.site}" if is_far else f"no stage fits {candidate.peer}")
        elif candidate.pinned_stage != ANY_STAGE:
            members[candidate.pinned_stage].append(candidate)
        else:
            free.append((candidate, fitting))

    # First what every stage must have. Big stages choose first, and nobody takes a peer that could hold more than
    # others can: a peer that can hold a stage can hold all smaller ones, so nothing is lost by that.
    demanding = sorted(range(stages), key=lambda stage: needs[stage].total_bytes, reverse=True)
    for level, stage in product(range(min_replicas), demanding):
        able = [entry for entry in free if stage in entry[1]]
        if len(members[stage]) <= level and able:
            chosen = min(able, key=lambda entry: len(entry[1]))
            free.remove(chosen)
            members[stage].append(chosen[0])
    return members, free, useless


def _memory(candidates: Sequence[Candidate], needs: Sequence[Memory]) -> str:
    """How much memory the incomplete stages need, and how much there is; empty if memory is not the reason."""
    if all(candidate.holds(need) for candidate in candidates for need in needs):
        return ""
    need = max(needs, key=lambda need: need.total_bytes)
    largest = max(candidates, key=lambda one: (one.offer, one.peer))
    short = largest.offer.short_text(need)
    has = f"the largest idle peer is {largest.peer} with {largest.offer}{f' ({short} too little)' if short else ''}"
    return f"; a replica there takes about {need.beside(largest.offer)}, {has}"


def _neediest(members: list[list[Candidate]], fitting: Sequence[int]) -> int:
    return min(
        fitting,
        key=lambda stage: (len(members[stage]), sum(member.speed for member in members[stage])),
    )
