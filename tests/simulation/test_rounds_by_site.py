"""The claim: whatever befalls a carrier or a site in the middle of a round, the weights are those of one process.

Then the rule in virtual time: it keeps the form of rounds that is faster on the links that there are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.brain.commit.by_site import SiteRounds
from scheduler.brain.commit.slices import ROUNDS_MIN, plan_round
from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.state.step import UnitAveraging
from stage_server.brain import slices
from swarm.errors import SwarmError
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Average, Averaged, Command, Event, Member, RoundFailed, Slice, TensorHeader
from tests.support.brain import Swarm
from tests.support.fluid_rounds import Fleet
from tests.support.scenes import Run, Task, add_peer, train
from tests.support.sim.fabric import Observer
from tests.support.sim.fluid import Line

UNIT = UnitName("stage-0")
SITE_OF = {PeerId(f"{site}-{number}"): site for site in ("lyon", "berlin") for number in range(2)}


class Rounds(Observer):
    """The rounds of a run, and who does what in them by site; `at` is called once, at the moment that it waits for."""

    def __init__(self, run: Run, moment: str, act: Callable[[PeerId, PeerId], object]) -> None:
        self.run, self.moment, self.act = run, moment, act
        self.members: dict[tuple[int, UnitName, Round], tuple[Member, ...]] = {}
        self.failed: set[tuple[int, UnitName, Round]] = set()
        self.has_acted = False

    def command_arrived(self, owner: str, epoch: int, command: Command) -> None:
        if isinstance(command, Average):
            self.members[command.step, command.unit, command.round] = command.members

    def event_arrived(self, owner: str, event: Event) -> None:
        if isinstance(event, RoundFailed):
            self.failed.add((event.step, event.unit, event.round))

    def sending(self, owner: str, address: str, header: TensorHeader) -> None:
        self._passes("in", owner, address, header)

    def delivered(self, owner: str, address: str, header: TensorHeader, error: SwarmError | None) -> None:
        if error is None:
            self._passes("after", owner, address, header)

    def _passes(self, when: str, owner: str, address: str, header: TensorHeader) -> None:
        if self.has_acted or not isinstance(header, Slice) or self.run.job.progress.steps_done < 1:
            return
        members = self.members.get((header.step, header.unit, header.round), ())
        sender, receiver = (PeerId(name.removeprefix("address-of-")) for name in (owner, address))
        group_of = {member.peer: member.group for member in members}
        is_far = bool(members) and group_of.get(sender) != group_of.get(receiver)
        what = "mean" if header.averaged else "sum" if is_far else "part"
        if any(group_of.values()) and f"{when} {what}" == self.moment:
            self.has_acted = True
            self.act(sender, receiver)

    def by_site(self) -> list[tuple[int, UnitName, Round]]:
        return [key for key, members in self.members.items() if any(member.group for member in members)]

    def repeated(self) -> list[bool]:
        """Of each round by site that failed, whether its step was then averaged flat, or by other members."""
        found = []
        for step, unit, number in self.failed & set(self.by_site()):
            later = [key for key in self.members if key[:2] == (step, unit) and key[2] > number]
            then = self.members[min(later, key=lambda key: key[2])]
            before = {member.peer for member in self.members[step, unit, number]}
            found.append(not any(member.group for member in then) or {member.peer for member in then} != before)
        return found


def played(folder: Path, moment: str, act: Callable[[Run, PeerId, PeerId], object], **changes: object) -> Rounds:
    """Train with two members at each of two sites, to the right weights; `act` gets who sends what to whom then."""
    seen: list[Rounds] = []
    values = {"pipeline__stages": 1, "training__steps": 6, "limits__min_replicas": 4, "averaging__timeout_s": 5.0}
    task = Task.make(folder, **{**values, **changes})

    async def watch(run: Run) -> None:
        seen.append(Rounds(run, moment, lambda *pair: act(run, *pair)))
        run.rig.network.observer = seen[0]
        for peer, site in SITE_OF.items():
            add_peer(run, peer, site=site)
        await run.until_step(5)

    run = train(task, 0, 1, watch)
    assert seen[0].has_acted
    assert all(seen[0].repeated())
    assert seen[0].by_site()
    assert "averages by site: berlin 2, lyon 2" in said(run)
    return seen[0]


def said(run: Run) -> str:
    return "\n".join(line.message for line in run.rig.jobs.stores.logs.of(run.job.record.id).kept()[0])


@pytest.mark.parametrize("moment", ["after part", "in sum", "after sum", "in mean"])
def test_a_carrier_dies_before_in_and_after_its_sum(tmp_path: Path, moment: str) -> None:
    """What comes first before its sum is the part of another of its site."""
    played(tmp_path, moment, lambda run, sender, receiver: run.rig.kill(receiver if "part" in moment else sender))


def test_a_member_is_silent_in_a_round(tmp_path: Path) -> None:
    """None of its packets arrive any more, for less time than makes it gone."""

    def silence(run: Run, sender: PeerId, receiver: PeerId) -> None:
        cut(run, [sender], [peer for peer in SITE_OF if peer != sender], 8.0)

    assert played(tmp_path, "in part", silence).failed


def test_a_site_is_cut_off_in_the_all_gather(tmp_path: Path) -> None:
    def divide(run: Run, sender: PeerId, receiver: PeerId) -> None:
        lyon, berlin = ([peer for peer in SITE_OF if SITE_OF[peer] == site] for site in ("lyon", "berlin"))
        cut(run, lyon, berlin, 8.0)
        cut(run, berlin, lyon, 8.0)

    assert played(tmp_path, "in mean", divide).failed


def test_a_joiner_of_another_site_takes_part_in_later_rounds(tmp_path: Path) -> None:
    def join(run: Run, sender: PeerId, receiver: PeerId) -> None:
        add_peer(run, "oslo-0", site="oslo")

    seen = played(tmp_path, "after mean", join, training__steps=12)
    groups = [Counter(member.group for member in seen.members[key]) for key in seen.by_site()]
    assert {"lyon": 2, "berlin": 2, "oslo": 1} in groups


def cut(run: Run, ones: list[PeerId], others: list[PeerId], for_s: float) -> None:
    """Nothing gets from these to the others for a while."""
    links = [(f"address-of-{sender}", f"address-of-{other}") for sender in ones for other in others]
    for link in links:
        run.rig.network.weather.stop(*link)
        asyncio.get_running_loop().call_later(for_s, run.rig.network.weather.let, *link)


# The rule, on links of so many bytes per second ----------------------------------------------------------------------


def forms(near: float, far: float, rounds: int = 14) -> tuple[list[bool], list[float]]:
    """Which rounds go by site, and what all take: four members at each of two sites, which share what leaves one."""
    site_of = {f"{site}{number}": site for site in ("lyon", "berlin") for number in range(4)}
    replicas = [ReplicaRecord(PeerId(name), 1, name, 0, site=site) for name, site in sorted(site_of.items())]
    rule = SiteRounds(Swarm({replica.peer: 0 for replica in replicas}).brain._state)
    lines = dict.fromkeys(site_of, Line(near, near)) | dict.fromkeys(set(site_of.values()), Line(far, far))
    by_site, seconds = [], []
    for step in range(rounds):
        number = Round(1, step + 1)
        shares, form = rule.plan(UNIT, number, replicas, again=False)
        members = plan_round(replicas, {}, 64 * 256, shares, by_site=form)
        round_s, means = Fleet(Average(0, 0, UNIT, number, members, 7, 1e6), "none", None, lines, site_of).run()
        averaging = UnitAveraging(number, members)
        for name, mean in means.items():
            averaging.reports[PeerId(name)] = Averaged(0, step, UNIT, number, "", (), round_s, *mean.rates)
        rule.averaged(UNIT, averaging)
        by_site.append(form)
        seconds.append(round_s)
    return by_site, seconds


@pytest.mark.parametrize(("gbit_per_s", "stays"), [(1.0, True), (10.0, True), (40.0, False)])
def test_rounds_stay_by_site_where_the_link_is_slow_and_return_to_flat_ones_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch, gbit_per_s: float, stays: bool
) -> None:
    monkeypatch.setattr(slices, "CHUNK_ELEMENTS_MIN", 256)
    by_site, seconds = forms(0.8e9, gbit_per_s * 1e9 / 8)
    assert by_site == [True] * ROUNDS_MIN + [False] * ROUNDS_MIN + [stays] * (len(by_site) - 2 * ROUNDS_MIN)
    gain = seconds[ROUNDS_MIN] / seconds[0]
    print(f"{gbit_per_s:g} Gbit/s: by site {gain:.2f} times as fast")
    assert (gain > 1.0) is stays
