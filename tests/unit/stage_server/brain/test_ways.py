"""The ways of chunks by site: one tree for each chunk, that all members of a round see alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.brain.commit.slices import plan_round
from scheduler.brain.inputs import ReplicaRecord
from stage_server.brain.slices import RoundMeter
from stage_server.brain.ways import ChunkWay, ways_of
from stage_server.replica.averaging.mailbox import Mailbox
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Average, Member
from tests.support.effort import examples


def members_at(sites: Sequence[str], elements: int = 64 * 256, shares: Sequence[float] | None = None) -> list[Member]:
    """A round by site of members that are at these sites; "": nobody said."""
    replicas = [ReplicaRecord(PeerId(f"p{at:02d}"), 1, "", 0, site=site) for at, site in enumerate(sites)]
    return list(plan_round(replicas, {}, elements, shares, by_site=True))


@st.composite
def rounds(draw: st.DrawFn) -> list[Member]:
    sites = draw(st.lists(st.sampled_from(["", "lyon", "berlin", "oslo"]), min_size=1, max_size=9))
    share = st.sampled_from([0.0, 0.2, 1.0, 5.0])
    shares = draw(st.lists(share, min_size=len(sites), max_size=len(sites)).filter(any))
    return members_at(sites, draw(st.integers(1, 20_000)), shares)


def neighbours(members: Sequence[Member]) -> int:
    """The most members that any member sends anything to or takes anything from."""
    met = [{at.peer for way in ways_of(me.peer, members) for at in (*way.below, way.above) if at} for me in members]
    return max(map(len, met))


@given(rounds())
@settings(max_examples=examples(400))
def test_every_part_of_every_element_enters_one_mean_and_every_member_gets_it(members: list[Member]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stage_server.brain.slices.CHUNK_ELEMENTS_MIN", 256)
        ways = {me.peer: {way.chunk: way for way in ways_of(me.peer, members)} for me in members}
        chunks = sorted(ways[members[0].peer], key=lambda chunk: chunk.start)
        covered = [element for chunk in chunks for element in range(chunk.start, chunk.stop)]
        assert covered == list(range(members[-1].stop))
        assert all(of_one.keys() == set(chunks) for of_one in ways.values())
        for chunk in chunks:
            of_chunk = {peer: of_one[chunk] for peer, of_one in ways.items()}
            (owner,) = (peer for peer, way in of_chunk.items() if way.above is None)
            own = next(member for member in members if member.peer == owner)
            assert own.start <= chunk.start < chunk.stop <= own.stop
            entered = added(owner, of_chunk)
            assert sorted(entered) == [member.peer for member in members], "each part once"
            for peer, way in of_chunk.items():
                sites = {member.group for member in members if member.peer in (peer, way.above and way.above.peer)}
                assert way.above is None or way.above.peer == owner or len(sites - {""}) == 1, "carried within a site"


def added(peer: PeerId, ways: dict[PeerId, ChunkWay]) -> list[PeerId]:
    """Whose parts a member has in its sum."""
    return [peer, *(each for below in ways[peer].below for each in added(below.peer, ways))]


@given(rounds())
@settings(max_examples=examples(200))
def test_each_chunk_that_is_due_has_one_sender_and_nothing_else_is_sent(members: list[Member]) -> None:
    command = Average(0, 0, UnitName("stage-0"), Round(1, 1), tuple(members), 7, 1.0)
    due = {
        (me.peer, key.sender, key.averaged, key.start) for me in members for key in Mailbox(me.peer, 0, 1)._due(command)
    }
    sent = set()
    for me in members:
        for way in ways_of(me.peer, members):
            sent |= {(below.peer, me.peer, True, way.chunk.start) for below in way.below}
            sent |= {(above.peer, me.peer, False, way.chunk.start) for above in [way.above] if above}
    assert sent == due


def test_in_a_grid_of_36_a_member_has_10_neighbours() -> None:
    grid = members_at([f"site-{at % 6}" for at in range(36)], 36 * 64)
    assert neighbours(grid) == 10
    assert neighbours(members_at([""] * 36, 36 * 64)) == 35


def test_the_members_of_a_site_carry_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_server.brain.slices.CHUNK_ELEMENTS_MIN", 256)
    members = members_at(["lyon", "lyon", "lyon", "berlin"], 4 * 12 * 256)
    carried = [sum(bool(way.below and way.above) for way in ways_of(me.peer, members)) for me in members]
    assert carried == [4, 4, 4, 0]


def test_one_member_alone_has_one_chunk_and_a_stranger_none() -> None:
    (alone,) = members_at(["lyon"])
    assert [(way.chunk.start, way.chunk.stop, way.above, way.below) for way in ways_of(alone.peer, [alone])] == [
        (0, 64 * 256, None, ())
    ]
    assert ways_of(PeerId("x"), [alone]) == []


def test_only_what_crosses_to_another_site_counts_as_the_speed_of_the_link() -> None:
    a, b, c, d = (PeerId(name) for name in "abcd")
    meter = RoundMeter({a: "lyon", b: "lyon", c: "berlin", d: "berlin"}, "lyon")
    meter.begin(0.0)
    for at_s in (1.0, 2.0):
        meter.sent(b, 1 << 30, at_s)
        meter.taken(b, 1 << 30, at_s)
        meter.sent(c, 1 << 20, at_s)
        meter.taken(c, 1 << 20, at_s)
    assert (meter.up_bytes_per_s, meter.down_bytes_per_s) == (1 << 20, 1 << 20)
    meter.taken(d, 1, 9.0)  # its site had begun when its first sum came
    assert meter.all_began_s == 1.0
