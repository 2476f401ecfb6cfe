"""scheduler.brain.islands.guests: who joins the island of another site fetches its state at an exchange."""

from __future__ import annotations

from dataclasses import replace

from scheduler.brain import inputs
from scheduler.brain.islands.guests import REST_TIMES, _Rest
from swarm.job.placement import Candidate
from swarm.types import JobState, PeerId
from swarm.wire.messages import Follow, Loaded, LoadStage
from tests.simulation.engine.islands import JOB, STAGES, Shape, World, begun_world, exchanges

SLOW_LINK = 400  # turns of a joiner: islands make many steps in the meantime
SHAPE = Shape(replicas=1, steps=24, lease=2, fetch=SLOW_LINK)


def world(shape: Shape = SHAPE, at_berlin: str | tuple[str, ...] = "i1") -> World:
    """Lyon has the first island, and whoever is not `at_berlin`."""
    names = [
        f"i{i}-s{stage}-{n}" for i in range(shape.islands) for stage in range(STAGES) for n in range(shape.replicas)
    ]
    return begun_world(shape, {name: "berlin" if name.startswith(at_berlin) else "lyon" for name in names})


def arrive(made: World, site: str = "berlin") -> PeerId:
    peer = made.arrive(site)
    assert peer is not None, made.brain.waiting_for()
    return peer


def awaiting(shape: Shape = SHAPE) -> tuple[World, list[PeerId]]:
    """A world whose exchange waits for the two guests of a site that lost its island."""
    made = world(shape)
    made.lose(1)
    peers = [arrive(made), arrive(made)]
    made.play_until(lambda _: bool(made.brain._guests.awaited))
    return made, peers


def follows(made: World, peer: PeerId) -> bool:
    """Whether the peer was told what to fetch."""
    return any(isinstance(command, Follow) for command in made.replicas[peer].commands)


def steps(made: World) -> int:
    return len(made.database[0])


def test_the_job_waits_for_the_guests_of_an_exchange_and_for_nobody_else_who_joins() -> None:
    """So what these have loaded is progress: the exchange may last as long again."""
    made = world()
    assert not any(awaits(made, peer) for peer in made.replicas), "they have loaded"
    made.lose(1)
    first = arrive(made)
    assert not awaits(made, first), "it is no island"
    second = arrive(made)
    made.play_until(lambda _: awaits(made, first))
    assert awaits(made, second)
    made.play_until(lambda _: made.brain.present == (0, 1))
    assert not awaits(made, first)


def awaits(made: World, peer: PeerId, **other: int) -> bool:
    """Whether the exchange waits for what the peer has loaded: the newest state, or what is said in `other` words."""
    (joiner,) = [joiner for joiner in made.brain._roster.islands[0]._state.joiners if joiner.replica.peer == peer] or [
        None
    ]
    said = {"version": made.brain._roster.islands[0].agreed, "join": joiner.number if joiner is not None else 0} | other
    return made.brain.awaits(peer, Loaded(JOB, 0, 0, said["version"], "start", (), join=said["join"]))


def test_an_exchange_waits_for_no_guest_that_says_again_and_again_that_it_has_loaded_something() -> None:
    """Whatever a guest had loaded was progress, so it held up all islands for as long as it might fetch."""
    made, (peer, _) = awaiting()
    assert awaits(made, peer)
    assert not awaits(made, peer, version=made.brain._roster.islands[0].agreed - 1), "an older state"
    assert not awaits(made, peer, join=77), "an earlier attempt"


def test_guests_build_their_stage_and_fetch_nothing_before_the_exchange() -> None:
    made = world()
    made.lose(1)
    peer, _ = arrive(made), arrive(made)
    assert isinstance(made.replicas[peer].commands[0], LoadStage)
    assert made.brain._roster.outer_step is None
    before = steps(made)
    while made.brain._roster.outer_step is None:
        assert not follows(made, peer)
        made.turn()
    assert steps(made) > before
    assert follows(made, peer)
    assert made.brain.waiting_for().startswith("the exchange waits for new-1, new-2 to fetch the state")


def test_an_exchange_does_not_wait_for_guests_that_are_too_few_for_an_island() -> None:
    """One alone joins like any other, but at the second exchange: more may come from its site until then."""
    made = world(Shape(replicas=1, steps=12, lease=2, fetch=1))
    made.lose(1)
    before, peer = len(exchanges(made.history)), arrive(made)
    made.play_until(lambda _: follows(made, peer))
    assert len(exchanges(made.history)) == before + 1
    made.play_until(lambda _: not made.brain.is_joining(peer))
    assert made.brain.present == (0,)


def test_a_guest_that_dies_holds_up_nobody() -> None:
    made, (peer, other) = awaiting()
    assert made.brain._guests.awaited == [peer, other]
    made.kill(peer)
    assert made.brain._guests.awaited == []
    before = steps(made)
    made.play_until(lambda _: steps(made) > before)


def test_exchanges_wait_for_nobody_of_a_site_for_a_while_after_they_did_so_in_vain() -> None:
    made, _ = awaiting(Shape(replicas=1, steps=60, lease=2, fetch=1_000_000))
    made.tell(inputs.Stuck(30.0))
    assert made.brain._guests.awaited == []
    rests_until_s = made.now_s + REST_TIMES * 30.0
    before = len(exchanges(made.history))
    made.play_until(lambda _: len(exchanges(made.history)) > before + 3)
    assert made.now_s < rests_until_s
    made.now_s = rests_until_s
    made.play_until(lambda _: bool(made.brain._guests.awaited))


def test_a_job_that_is_to_stop_waits_for_no_guest() -> None:
    made, _ = awaiting()
    made.tell(inputs.Stop(JobState.PAUSED, "enough"))
    assert made.brain._guests.awaited == []
    made.play_until(lambda _: made.over)


def test_who_joins_the_island_of_its_own_site_or_says_no_site_fetches_at_once() -> None:
    made = world(Shape(replicas=2, steps=24, lease=2, fetch=SLOW_LINK))
    peer = arrive(made)
    assert follows(made, peer), "berlin has an island"
    unnamed = begun_world(Shape(replicas=1))
    assert follows(unnamed, arrive(unnamed, ""))


def candidate(peer: str, site: str = "") -> Candidate:
    return Candidate(PeerId(peer), site=site)


def test_a_site_that_was_left_out_rests_twice_as_long_each_time_and_is_forgiven_once_it_has_taken_part() -> None:
    made = world(Shape(replicas=1, steps=60, lease=2))
    guests, roster, berlin = made.brain._guests, made.brain._roster, candidate("new", "berlin")
    told = guests.leave_out(1, roster, 30.0, 1000.0)
    assert told == "its stage servers, or others at berlin, may come back in 300 s"
    assert guests.resting(1299.0) == {"berlin"}
    assert guests.resting(1300.0) == set()
    guests.leave_out(1, roster, 30.0, 1100.0)
    assert guests.resting(1399.0) == {"berlin"}
    assert guests.resting(1400.0) == set(), "another island of the site, left out while it rests, is the same failure"
    assert guests.bars(berlin, roster, 1390.0) == "", "it has an island at work, which it completes"
    made.lose(1)
    assert guests.bars(berlin, roster, 1390.0).endswith("it may come back in 10 s")
    assert guests.bars(candidate("else", "lyon"), roster, 1390.0) == ""
    assert guests.bars(berlin, roster, 1400.0) == ""
    made.now_s = 1400.0
    arrive(made), arrive(made)
    made.play_until(lambda _: made.brain.present == (0, 1))
    (island,) = (island for island in (0, 1) if roster.home(island) == "berlin")
    assert guests.leave_out(island, roster, 30.0, 2000.0).endswith("in 600 s"), "it has taken part in no exchange since"
    before = len(exchanges(made.history))
    made.play_until(lambda _: len(exchanges(made.history)) > before)
    assert guests.resting(2599.0) == {"berlin"}, "it has to rest first"
    made.now_s = 2600.0
    made.play_until(lambda _: len(exchanges(made.history)) > before + 1)
    assert guests.leave_out(island, roster, 30.0, 3000.0).endswith("in 300 s")


def test_another_island_of_its_site_forgives_none_that_was_left_out() -> None:
    """Of two islands at a site one was broken. What the other one exchanged meanwhile was taken for its return, so it
    never rested twice as long, and stopped all others every ten times `limits.no_progress_s`."""
    shape = Shape(islands=3, replicas=2, steps=60, lease=2)
    made = world(shape, ("i1", "i2"))
    made.kill(PeerId("i0-s0-1"))  # so lyon has none to spare
    guests, roster = made.brain._guests, made.brain._roster
    assert guests.leave_out(1, roster, 30.0, made.now_s).endswith("in 300 s")
    made.lose(1)
    made.now_s += 300.0
    made.play_until(lambda _: made.brain.present == (0, 1, 2))
    assert guests.leave_out(1, roster, 30.0, made.now_s).endswith("in 600 s")
    made.now_s += 600.0
    before = len(exchanges(made.history))
    made.play_until(lambda _: len(exchanges(made.history)) > before + 1)
    assert guests.leave_out(1, roster, 30.0, made.now_s).endswith("in 300 s"), "it has exchanged"


def test_without_sites_an_island_that_went_on_forgives_nobody_who_joins_it_afterwards() -> None:
    shape = Shape(replicas=2, steps=60, lease=2)
    made = begun_world(shape)
    made.lose(1)
    made.play_until(lambda _: made.brain.present == (0, 1))
    guests, roster = made.brain._guests, made.brain._roster
    guests.leave_out(0, roster, 30.0, made.now_s)
    rest = guests._rests[PeerId("i0-s0-0")]
    made.lose(0)
    made.play_until(lambda _: len(made.database[1]) > 0 and not made.brain._roster.is_unsettled)
    made.now_s += 300.0
    peer = arrive(made, "")
    guests._rests[peer] = rest  # as if it were one of those
    made.play_until(lambda _: not made.brain.is_joining(peer))
    before = len(exchanges(made.history))
    made.play_until(lambda _: len(exchanges(made.history)) > before)
    assert made.brain.island_of(peer) == 1
    assert peer in guests._rests
    roster.islands[1].settings = replace(roster.islands[1].settings, timeline=roster.next_timeline(1))
    guests.exchanged(roster, made.now_s)
    assert peer not in guests._rests, "one that has begun since does"


def test_nobody_rests_longer_than_a_day() -> None:
    made = world(Shape(replicas=1))
    told = [made.brain._guests.leave_out(1, made.brain._roster, 300.0, 1e6 * again) for again in range(2000)]
    assert told[0].endswith("in 3000 s")
    assert told[-1].endswith("in 86400 s")


def test_without_sites_the_stage_servers_rest_that_were_left_out() -> None:
    made = begun_world(Shape(replicas=1))
    guests, roster = made.brain._guests, made.brain._roster
    assert guests.leave_out(1, roster, 30.0, 0.0) == "its stage servers may come back in 300 s"
    assert guests.resting(1.0) == {"i1-s0-0", "i1-s1-0"}
    assert guests.bars(candidate("i1-s0-0"), roster, 1.0) != ""
    assert guests.bars(candidate("new"), roster, 1.0) == ""
    decision = made.brain.where_to_join(candidate("i1-s0-0"), range(STAGES), 1.0)
    assert decision.plan is None
    assert "as the others waited for it in vain" in decision.reason


def test_no_exchange_waits_for_who_was_on_the_way_when_its_site_was_left_out() -> None:
    made = world(Shape(replicas=1, steps=60, lease=2, fetch=4))
    made.lose(1)
    peers = [arrive(made), arrive(made)]
    made.brain._guests._rests["berlin"] = _Rest(made.now_s + 1e6, 1)
    while any(made.brain.is_joining(peer) for peer in peers):
        made.turn()
        assert made.brain._guests.awaited == []
    before = len(exchanges(made.history))
    made.play_until(lambda _: len(exchanges(made.history)) > before)
    assert made.brain.present == (0,), "they are replicas there"
