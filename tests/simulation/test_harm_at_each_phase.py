"""Harm at each phase of an exchange and of a lease: each portion counts once, and no island is lost.

    open ── composed ── rounds ── row written ── first merge ── late merge        lease decided ── lease written

`make test` plays every other cell, each in one shape of two islands. `make test-all` plays all cells in all shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from scheduler.brain import inputs
from scheduler.brain.fleet.membership import NO_FELLOWS
from scheduler.brain.islands.exchange import _UnitRound
from swarm.types import PeerId
from swarm.wire.messages import Hello
from tests.simulation.engine.islands import UNITS, Ended, Harmed, Merged, Rows, Shape, World, exchanges, faults
from tests.support.effort import ALL

AWAY_S = 20.0  # less than limits.no_progress_s
STILL_S = 60.0


class Phased(World):
    """A world whose scheduler may die right before or right after a row is durable: `dies` says so."""

    dies: Callable[[Rows], bool] | None = None

    def _strikes(self, of_a_thousand: int) -> bool:
        newest = self.history[-1] if self.history else None
        if self.dies is not None and isinstance(newest, Rows) and self.dies(newest):
            self.dies = None
            return True
        return super()._strikes(of_a_thousand)


def merges(world: World) -> set[int]:
    """The islands of which a replica has made the outer step of the newest exchange."""
    step = world.made[-1].step if world.made else -1
    found = (merge.timeline for merge in world.history if isinstance(merge, Merged) and merge.step == step)
    return {timeline % world.shape.islands for timeline in found}


def is_open(world: World) -> bool:
    """An island is ready, and the others are not."""
    outer = world.brain._outer
    return outer._exchanging is None and 0 < len(outer._ready_s) < world.shape.islands


def is_composed(world: World) -> bool:
    """Rounds were begun, and no envoy has reported."""
    exchanging = world.brain._outer._exchanging
    return exchanging is not None and not any(made.reports for made in newest_rounds(world))


def in_rounds(world: World) -> bool:
    """A unit is complete, and another one is not."""
    return len({made.is_complete for made in newest_rounds(world)}) == 2


def newest_rounds(world: World) -> list[_UnitRound]:
    exchanging = world.brain._outer._exchanging
    return [] if exchanging is None else [of.newest[-1] for of in exchanging._rounds.values() if of.newest]


def is_written(world: World) -> bool:
    """The exchange is durable, and no replica has merged it."""
    return bool(world.made) and not merges(world)


def is_first_merge(world: World) -> bool:
    """An island merges, and another one does not yet."""
    return 0 < len(merges(world)) < world.shape.islands


def is_late_merge(world: World) -> bool:
    """Only late islands have still to merge."""
    late = {timeline % world.shape.islands for timeline in world.made[-1].late} if world.made else set()
    return merges(world) | late == {*range(world.shape.islands)} and not late <= merges(world)


def all_have_merged(world: World) -> bool:
    newest = world.made[-1].step if len(world.made) >= world.shape.fragments else math.inf
    return all(brain.agreed > newest for brain in world.brain._roster.islands)


def is_leased(world: World) -> bool:
    """Leases were cut anew amid a period, and it is not over."""
    return any(cut.leases and any(step % world.shape.lease for step in cut.from_step.values()) for cut in world.cuts)


@dataclass(frozen=True, slots=True)
class Phase:
    """When harm is done; `dies` instead: right behind which rows, before anything follows from them."""

    comes: Callable[[World], bool]
    dies: Callable[[Rows], bool] | None = None
    needs: Callable[[Shape], bool] = lambda shape: True


PHASES = {
    "open": Phase(is_open),
    "composed": Phase(is_composed),
    "rounds": Phase(in_rounds),
    "row written": Phase(is_written, lambda rows: rows.exchange is not None),
    "first merge": Phase(is_first_merge),
    "late merge": Phase(is_late_merge, needs=lambda shape: shape.patience < math.inf),
    "lease written": Phase(is_leased, lambda rows: rows.cut is not None, needs=lambda shape: shape.by_speed),
}
MODES = {
    "diloco": Shape(steps=12, lease=4),
    "overlap": Shape(steps=12, lease=4, overlap=1),  # and gaia
    "streaming": Shape(steps=16, lease=6, fragments=2, overlap=2),
    "by speed": Shape(steps=24, lease=8, by_speed=True),
    "by speed, streaming": Shape(steps=16, lease=8, fragments=2, overlap=2, by_speed=True),
}
SHAPES = {
    f"{mode}, {islands} islands, {'late' if patience < 1 else 'waits'}": replace(
        shape, islands=islands, still_s=STILL_S, patience=patience
    )
    for islands in (2, 3, 4)
    for mode, shape in MODES.items()
    for patience in (0.1, math.inf)
}


def slow(world: Phased, victim: int) -> None:
    world.shape = replace(world.shape, slow=90)


def frozen(world: Phased, victim: int) -> None:
    world.harm(Harmed(of(world, victim), world.now_s + AWAY_S))


def frozen_for_good(world: Phased, victim: int) -> None:
    world.harm(Harmed(of(world, victim), math.inf))


def cut_off(world: Phased, victim: int) -> None:
    world.harm(Harmed(of(world, victim), world.now_s + AWAY_S, out=True, into=True))


def killed_whole(world: Phased, victim: int) -> None:
    world.lose(victim)


def envoy_killed(world: Phased, victim: int) -> None:
    """An envoy of the island, or who goes next for it."""
    under_way = {each.peer for made in newest_rounds(world) for each in made.envoys} or world.brain._outer.envoys
    here = sorted(of(world, victim))
    world.kill(next((peer for peer in here if peer in under_way), here[0]))


def scheduler_killed(world: Phased, victim: int) -> None:
    world.restart()


def cut_off_and_scheduler_killed(world: Phased, victim: int) -> None:
    cut_off(world, victim)
    world.restart()


HARMS: dict[str, Callable[[Phased, int], None]] = {
    "slow": slow,
    "frozen": frozen,
    "frozen for good": frozen_for_good,
    "cut off": cut_off,
    "killed whole": killed_whole,
    "envoy killed": envoy_killed,
    "scheduler killed": scheduler_killed,
    "cut off, scheduler killed": cut_off_and_scheduler_killed,
}
FATAL = {"frozen for good", "killed whole"}


def of(world: World, island: int) -> frozenset[PeerId]:
    return frozenset(peer for peer, one in world.replicas.items() if one.island == island)


def cells() -> Iterator[tuple[str, str, str]]:
    """Harm, phase, shape."""
    for turn, (harm, phase) in enumerate(product(HARMS, PHASES)):
        able = [name for name, shape in SHAPES.items() if PHASES[phase].needs(shape)]
        few = [name for name in able if SHAPES[name].islands == 2]
        chosen = [few[turn // 2 % len(few)]] if turn % 2 == 0 else []
        yield from ((harm, phase, name) for name in (able if ALL else chosen))


@pytest.mark.parametrize(("harm", "phase", "name"), list(cells()))
def test_harm_in_any_phase_costs_time_only(harm: str, phase: str, name: str) -> None:
    shape, when = SHAPES[name], PHASES[phase]
    world = Phased(shape, 0)
    world.play_until(lambda one: all(one.database[island] for island in range(shape.islands)))
    if phase == "late merge":
        world.play_until(all_have_merged)  # now it is known how long a period is
        frozen(world, shape.islands - 1)
    world.shape = replace(shape, slow=90 if phase in ("open", "first merge", "lease written") else 0)  # the last island
    if "scheduler" in harm and when.dies is not None:
        world.dies = when.dies
        world.play_until(lambda one: one.epoch > 1)
    else:
        world.play_until(when.comes)
    world.shape = shape
    HARMS[harm](world, shape.islands - 1)
    if harm == "slow":
        world.play_until(lambda one: one.over or bool(len(one.made) > 2))
        world.shape = shape
    world.finish()
    assert faults(world.history, replace(shape, losses=int(harm in FATAL))) == []
    if harm not in FATAL:
        named = [len(made.islands + made.late) for made in exchanges(world.history).values()]
        assert named == [shape.islands] * len(named), "none was lost"


def test_the_next_exchange_waits_for_an_island_that_hangs_while_it_merges() -> None:
    """If the next exchange were made without it, no island at work would hold what it still has to merge."""
    test_harm_in_any_phase_costs_time_only("frozen", "first merge", "diloco, 2 islands, late")


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_behind_a_restart_no_island_evaluates_that_was_late_in_the_newest_exchange(victim: int, is_back: bool) -> None:
    """It holds other weights than the outer ones, also once it has merged; whoever evaluates first is heard."""
    world = Phased(SHAPES["diloco, 2 islands, late"], 0)
    world.play_until(all_have_merged)
    world.harm(Harmed(of(world, victim), world.now_s + AWAY_S))
    world.play_until(is_late_merge)
    world.play_until(lambda one: not is_back or all_have_merged(one))
    world.restart()
    evaluates = [brain._parts.evaluations._is_on for brain in world.brain._roster.islands]
    assert evaluates == [victim == 1, victim == 0]


@pytest.mark.parametrize("late", [0, 1])
def test_behind_a_restart_no_doubted_report_fails_a_job_that_stands_at_an_exchange(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind the exchange was taken for a step with microbatches."""
    world = Phased(replace(SHAPES["diloco, 2 islands, late"], late=late), 0)
    world.play_until(is_open)
    tell = world.tell

    def doubts(happened: inputs.Input) -> None:
        if isinstance(happened, inputs.Happened):
            happened = replace(happened, doubted=isinstance(happened.event, Hello))
        tell(happened)

    monkeypatch.setattr(world, "tell", doubts)
    world.restart()
    monkeypatch.undo()
    world.finish()
    assert faults(world.history, world.shape) == []


def test_an_island_without_stage_servers_is_lost_behind_a_restart_once_the_grace_is_over() -> None:
    """The others waited for it as long as for a silent island."""
    world = Phased(replace(SHAPES["diloco, 2 islands, late"], steps=40, silence_s=STILL_S), 0)
    world.play_until(all_have_merged)
    for peer in of(world, 1):
        del world.replicas[peer]
    world.restart()
    at_s = world.now_s
    world.play_until(lambda one: len(one.brain.present) == 1)
    assert world.now_s - at_s < 15.0


def restarted_without(victim: int, every_s: float = 0.0, *, by_speed: bool = False) -> Phased:
    """Island `victim` is not heard after a restart of the scheduler, for longer than the grace of 10 s."""
    shape = replace(SHAPES["diloco, 2 islands, late"], steps=40, silence_s=STILL_S, every_s=every_s)
    world = Phased(replace(shape, by_speed=by_speed), 0)
    world.play_until(all_have_merged)
    world.play_until(lambda one: all(brain.agreed % 5 in (2, 3) for brain in one.brain._roster.islands))
    for peer in of(world, victim):
        world.replicas[peer].is_free = True  # it says no Hello
    world.restart()
    world.now_s += 12.0
    world.tell(inputs.Tick())
    assert world.brain.present == (0, 1)
    return world


@pytest.mark.parametrize("victim", [0, 1])
def test_an_island_that_is_not_heard_after_a_restart_is_late(victim: int) -> None:
    """Island 0 was to evaluate, and was lost as soon as it was told that another island does instead."""
    world = restarted_without(victim)
    made, at_s = len(world.made), world.now_s
    world.play_until(lambda one: len(one.made) > made or len(one.brain.present) == 1)
    assert (world.brain.present, [*world.brain._roster.late]) == ((0, 1), [victim])
    assert world.brain._roster.islands[victim].due_s < world.now_s, "at once, when it may not be late any more"
    world.play_until(lambda one: len(one.brain.present) == 1)
    assert STILL_S - 15.0 < world.now_s - at_s < STILL_S


def test_others_begin_a_period_of_leases_while_an_island_is_not_heard_after_a_restart() -> None:
    """They stood at its first step until the island was lost."""
    world = restarted_without(1, by_speed=True)
    made = len(world.made)
    world.play_until(lambda one: len(one.made) > made)
    world.play_until(lambda one: one.brain._roster.islands[0].outer_step is not None or len(one.brain.present) == 1)
    assert (world.brain.present, [*world.brain._roster.late]) == ((0, 1), [1])


def test_an_island_is_not_lost_because_the_clock_of_checkpoints_begins_behind_the_exchange() -> None:
    """The first exchange after a restart has all islands for that, and a silent one was lost after the grace."""
    world = restarted_without(1, every_s=1800.0)
    world.play_until(lambda one: one.brain._roster.islands[0].outer_step is not None)
    for _ in range(20):
        world.pass_time()
    assert world.brain.present == (0, 1)


def test_an_island_whose_process_was_started_again_with_the_scheduler_is_not_waited_for() -> None:
    """After a power cut everybody waited `limits.no_progress_s` for stages that no machine held any more."""
    world = restarted_without(1)
    peer = min(of(world, 1))
    assert world.brain.awaits_back(peer)
    world.tell(inputs.PeerGone(peer, "it came back without its stage"))
    assert not world.brain.awaits_back(peer)
    assert world.brain.due_s <= world.now_s + 10.0
    world.now_s += 10.0
    world.tell(inputs.Tick())
    assert world.brain.present == (0,)


def test_an_island_may_be_silent_for_longer_than_the_grace_only_beside_another() -> None:
    world = Phased(replace(SHAPES["diloco, 2 islands, late"], steps=40, silence_s=STILL_S), 0)
    world.play_until(all_have_merged)
    peer = min(of(world, 0))
    assert set(world.brain.fellows_of(peer).peers) == of(world, 0)
    world.lose(1)
    world.play_until(lambda one: one.brain.present == (0,))
    assert world.brain.fellows_of(peer) == NO_FELLOWS


@pytest.mark.parametrize(
    ("least", "exchanges_before", "every_s"),
    [(1, 0, 0.0), (1, 0, 1800.0), (2, 2, 0.0), (1, 3, 0.0)],
    ids=["first", "clock", "all", "late"],
)
def test_an_exchange_that_cannot_be_made_without_a_silent_island_waits_for_it(
    least: int, exchanges_before: int, every_s: float
) -> None:
    """The first of a start, any that needs all islands, and the one behind that for which the island was late.

    Where checkpoints go by the clock, the first has all islands for its sake; a silent one was lost after the grace.
    """
    shape = replace(SHAPES["diloco, 2 islands, late"], steps=40, silence_s=STILL_S, least=least, every_s=every_s)
    world = Phased(shape, 0)
    world.play_until(lambda one: all(one.database[island] for island in range(2)))
    world.play_until(lambda one: len(one.made) >= min(2, exchanges_before) and (not one.made or all_have_merged(one)))
    world.harm(Harmed(of(world, 1), math.inf))
    world.play_until(
        lambda one: len(one.made) == exchanges_before and one.brain._roster.islands[0].outer_step is not None
    )
    at_s = world.now_s
    assert world.brain.fellows_of(min(of(world, 1))).silence_s == STILL_S
    world.play_until(lambda one: one.over or one.brain.present == (0,))
    assert len(world.made) == exchanges_before
    assert STILL_S - 5.0 < world.now_s - at_s < STILL_S + 5.0
    assert world.over == (least == 2), "the job stalls"


@pytest.mark.parametrize(("guests", "late"), [(0, [1]), (1, [])])
def test_an_exchange_has_no_patience_while_a_guest_waits_to_fetch_the_state(guests: int, late: list[int]) -> None:
    """It may fetch in front of an exchange to which all islands have come, and each may be late in its turn."""
    shape = replace(SHAPES["diloco, 2 islands, late"], steps=40)
    world = Phased(shape, 0, {f"i{i}-s{stage}-{n}": "lyon" for i in range(2) for stage in range(2) for n in range(2)})
    world.play_until(lambda one: all(one.database[island] for island in range(2)))
    world.play_until(lambda one: len(one.made) > 1 and all_have_merged(one))
    for _ in range(guests):
        assert world.arrive("berlin")
    made = len(world.made)
    world.harm(Harmed(of(world, 1), world.now_s + AWAY_S))
    world.play_until(lambda one: len(one.made) > made)
    assert [timeline % 2 for timeline in world.made[-1].late] == late


def test_the_closing_exchanges_do_not_wait_for_each_other_where_all_islands_are_in_them() -> None:
    world = Phased(SHAPES["streaming, 2 islands, waits"], 0)
    world.play_until(lambda one: bool(one.made) and one.made[-1].whole)
    assert world.brain._outer._exchanging is not None
    assert not all_have_merged(world)


def test_rounds_that_never_come_to_their_end_in_time_end_the_job_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is given up for other envoys before it is over."""
    monkeypatch.setattr(Phased, "_exchange", lambda world, one, command: None)
    world = Phased(SHAPES["diloco, 2 islands, waits"], 0)
    world.finish()
    (end,) = [record for record in world.history if isinstance(record, Ended)]
    assert end.state == "stalled"
    assert end.reason.startswith("no step was committed for 60 s: after step 4: waits for the exchange between islands")
    assert sum("no word came from" in line for line in world.told) > len(UNITS)
