"""When rounds go by site, how their slices are shared, and why not (scheduler/brain/commit/by_site.py)."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from scheduler.brain.inputs import PeerGone, ReplicaRecord, Start
from scheduler.brain.outputs import Note
from swarm.types import PeerId, RoundFault
from swarm.wire.messages import Average, Commit, LoadStage, RoundFailed, Route
from tests.support.brain import Swarm
from tests.support.situations import Calls, Situation, beside


class Job:
    """A job of one stage whose members are at sites; rounds by site and flat ones take as long as a test says."""

    def __init__(self, sites: str, **changes: Any) -> None:
        """`sites`: of a, b, c ...; -: it names none."""
        site_of = {
            PeerId(name): "" if site == "-" else site for name, site in zip("abcdefgh", sites.split(), strict=False)
        }
        replicas = [ReplicaRecord(name, 1, f"at {name}", 0, site=site) for name, site in site_of.items()]
        begin: Any = Start(tuple(replicas))
        self.swarm = Swarm(dict.fromkeys(site_of, 0), begin, steps=5000, microbatches=2, **changes)
        self.swarm.answer(LoadStage)
        self.site_s, self.flat_s = 0.5, 1.0
        self.rates: dict[str, float] = dict.fromkeys(site_of, 1e6)
        self.digests: dict[str, str] = {}  # that members report, where these differ

    def begin(self) -> str:
        """Begin a round; gives its groups, each with what its members own of 960 elements."""
        for peer, route in self.swarm.pop(Route):
            said: Any = self.swarm.reply(peer, route)
            if said is not None and self.swarm.brain.settings.recount:
                said = replace(said, digests=("x", "y", "g", "dx"))
            if said is not None:
                self.swarm.hear(peer, said)
        self.asked = self.swarm.pop(Average)
        return self.form

    @property
    def form(self) -> str:
        members = self.asked[0][1].members
        owned = {member.peer: f"{member.peer}:{member.stop - member.start}" for member in members}
        groups: dict[str, list[str]] = {}
        for member in members:
            groups.setdefault(member.group or "flat", []).append(owned[member.peer])
        return " | ".join(f"{group} {' '.join(each)}" for group, each in groups.items())

    def ends(self) -> None:
        took_s = self.flat_s if self.form.startswith("flat") and "|" not in self.form else self.site_s
        for peer, command in self.asked:
            rates = {"up_bytes_per_s": self.rates[peer], "down_bytes_per_s": self.rates[peer]}
            digest = {"digest": self.digests[peer]} if peer in self.digests else {}
            self.swarm.obey(peer, command, duration_s=took_s, **rates, **digest)

    def commits(self) -> None:
        self.swarm.write()
        self.swarm.answer(Commit)

    def steps(self, count: int) -> str:
        """Make steps; gives how many rounds in a row had which form."""
        made = []
        for _ in range(count):
            made.append(self.begin())
            self.ends()
            self.commits()
        return ", ".join(f"{len(list(alike))} x {form}" for form, alike in groupby(made))

    def fails(self, by: str, accused: str) -> str:
        """A member accuses another; gives the round that is begun instead."""
        peer, command = next(pair for pair in self.asked if pair[0] == by)
        self.swarm.now_s += 1.0
        named = (0, command.step, command.unit, command.round, "no part came", PeerId(accused))
        self.swarm.hear(peer, RoundFailed(*named, RoundFault.MEMBER))
        return self.begin()

    def lose(self, peer: str) -> None:
        self.swarm.tell(PeerGone(PeerId(peer), "it died"))

    @property
    def told(self) -> list[str]:
        """The job's log, and what `explain` says."""
        notes = [note.message for note in self.swarm.outputs if isinstance(note, Note) and "averages" in note.message]
        return [*notes, *(f"explain: {text}" for text in self.swarm.brain.situation(1.0).averages.values())]


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_rounds_go_by_site_as_the_text_says(situation: Situation) -> None:
    situation.check(Calls(None, Job=Job).play)
