"""All decisions of a job with islands: a brain for each island, and the outer steps in which they exchange.

    inputs ──▶ the brain of the island that the peer serves ──▶ outputs, told as the job's
                   │ all have come to the same outer step
                   ▼
               Exchanging (exchange.py) ──▶ Exchanged: durable, then told to each that has come ──▶ its row ──▶ commits

Each island is a JobBrain on a timeline of its own (swarm/job/islands.py) and knows nothing of the others. This brain
has the interface of a JobBrain, so drivers and views treat both alike. An exchange is made once all islands at work
have proposed, or patience with some is over: they are late, keep their steps, and are in the next one. Each island
merges when it comes to the outer step, as others hold what it needs until all have merged. Where the job is saved,
stopped or divided behind an exchange, it has all islands, and all make the step at once. An island that loses a stage
is lost, and the others go on; it begins anew as a copy of another (forks.py).

Decisions: docs/decisions/064, 067, 090, 126.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from random import Random
from types import MappingProxyType

from scheduler.brain import inputs, outputs
from scheduler.brain.checkpoint.schedule import OpenCheckpoint
from scheduler.brain.explain.facts import IslandStanding, Situation, Team
from scheduler.brain.explain.situation import Counts
from scheduler.brain.fleet.membership import NO_FELLOWS, Fellows
from scheduler.brain.inputs import Input
from scheduler.brain.islands.checkpoints import Gone, JointCheckpoints, Saving
from scheduler.brain.islands.exchange import OuterSteps, islands_to_evict
from scheduler.brain.islands.forks import Division, Divisions, may_divide
from scheduler.brain.islands.guests import Guests
from scheduler.brain.islands.pacing import Pacing
from scheduler.brain.islands.roster import OuterDigests, Roster, states
from scheduler.brain.islands.rows import evaluation_of, numbers
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import CommitRow, DropCheckpoint, EnterState, Fail, Finish, Note, Output, Stopped
from scheduler.brain.settings import BrainSettings
from scheduler.brain.stall import LOST_HINT, is_loss, stopped_by_loss, stuck
from scheduler.brain.state.brain_state import Mode
from swarm.errors import PeerUnavailable, ReplicaDiverged
from swarm.job.course import OuterCourse
from swarm.job.placement import Candidate
from swarm.types import Decision, Direction, IslandState, JobState, PeerId
from swarm.wire.messages import Averaged, Commit, Event, Hello, LoadStage, Release, RoundFailed, SaveStage


class IslandsBrain:
    """All decisions of one job with outer steps; `settings` and `courses` have one for each island."""

    def __init__(
        self,
        settings: Sequence[BrainSettings],
        courses: Sequence[OuterCourse],
        rng: Random,
        least: int = 1,
        patience: float = math.inf,
        silence_s: float = 0.0,
    ) -> None:
        """`least`: with fewer islands at work the job stalls. `patience`: how long an exchange waits for some, in
        shares of a period. Such an island may be silent for `silence_s`. Leases that follow speed come with `courses`.
        """
        self.settings = settings[0]
        self.courses = tuple(courses)
        islands = [
            JobBrain(replace(own, pause_on_nonfinite=False), Random(rng.getrandbits(64)), course)
            for own, course in zip(settings, courses, strict=True)
        ]
        self._rng = rng
        self._roster = Roster(islands, self.courses, least)
        self._divisions = Divisions()
        self._guests = Guests()
        self._evaluator = 0  # the island that evaluates
        self._outer = OuterSteps(self.settings, self._roster, patience)
        self._silence_s = silence_s if 0.0 < patience < math.inf else 0.0
        self._begun_s = math.inf
        self._pacing = Pacing(self._roster, self.courses[0].inner.leases)
        self._outer_weights = OuterDigests(self.courses)
        self._checkpoints = JointCheckpoints()
        self._asked: inputs.Stop | None = None  # to stop, and islands were not told yet
        self._stopping: Stopped | None = None  # how the job is to end, since islands were told
        self._finished: set[int] = set()
        self.is_over = False
        self._now_s = -math.inf  # when the newest input came

    # The door ----------------------------------------------------------------------------------------------------

    def step(self, happened: Input, now_s: float) -> list[Output]:
        """Take in what happened at `now_s` and give the decisions of all islands, as JobBrain.step does for one."""
        if self.is_over:
            return []
        self._now_s = now_s
        decided = self._take(happened, now_s)
        self._pacing.note(now_s)
        self._outer.waits.note(now_s)
        if not self.is_over and self._divisions:
            decided += self._settle(now_s)
        if not self.is_over:
            decided += self._compare(now_s)
        if not self.is_over and (gone := self._outer.gone()):
            decided += self._end_by_loss(gone, now_s)
        if not self.is_over:
            decided += self._exchange(now_s)
        if not self.is_over and self._asked is not None:
            decided += self._stop(self._asked, now_s)
        if not self.is_over:
            decided += self._pacing.look(self._divisions, now_s)
        if not self.is_over and self._finished.issuperset(self.present):
            decided += self._end(Finish(), "finished", now_s)
        return decided

    def _take(self, happened: Input, now_s: float) -> list[Output]:
        match happened:
            case inputs.EachIsland():
                return self._begin(happened, now_s)
            case inputs.RowsDurable(shares=[cut]):
                self._pacing.durable(cut)
                return self._tell_all(inputs.Tick(), now_s)
            case inputs.RowsDurable(rows=rows):
                durable = [(row.timeline % len(self._roster.islands), inputs.RowDurable(row.step)) for row in rows]
                durable.sort(key=lambda one: self._checkpoints.waits(one[0]))  # first those whose checkpoint is open
                decided = [output for island, row in durable for output in self._tell(island, row, now_s)]
                return [*decided, *self._pause_on_nonfinite(rows)]
            case inputs.Happened(peer=peer, event=Hello() as hello) if peer not in self._roster.island_of:
                island = hello.timeline % len(self._roster.islands)
                if island in self._roster.lost:
                    return self._release(peer, "its island was lost, and what it holds does not count")
                self._roster.island_of[peer] = island
                return self._tell(island, happened, now_s)
            case inputs.Happened(peer, Averaged() | RoundFailed() as told) if self._outer.concerns(peer, told):
                return self._heard(peer, told, now_s)
            case inputs.PeerGone(peer=peer, reason=reason):
                self._divisions.lost(peer)
                return [*self._outer.lost(peer, reason, now_s), *self._told(peer, happened, now_s)]
            case inputs.PeerSuspect(peer, reason) | inputs.AskToLeave(peer, reason) if self._divisions.lost(peer):
                return self._release(peer, reason)
            case inputs.PeerSuspect(peer, reason, session_lost=True):
                return [*self._outer.lost(peer, reason, now_s), *self._told(peer, happened, now_s)]
            case inputs.Happened(peer=peer, event=Hello()):
                return [*self._outer.lost(peer, "it dialled again", now_s), *self._told(peer, happened, now_s)]
            case inputs.Happened(peer) | inputs.PeerSuspect(peer) | inputs.PeerBack(peer) | inputs.AskToLeave(peer):
                return self._told(peer, happened, now_s)
            case inputs.Join(replica=replica):
                self._roster.admit(replica)
                return self._told(replica.peer, self._guests.arrives(replica, self._roster), now_s)
            case inputs.CheckpointKept(version=version) | inputs.CheckpointNotKept(version=version):
                return self._written(happened, version, now_s)
            case inputs.Stop():
                self._asked = happened
                return []
            case inputs.Cancel(reason=reason):
                return self._end(Stopped(JobState.CANCELLED, reason), reason, now_s)
            case inputs.Stuck():
                return self._stuck(happened, now_s)
            case _:
                assert isinstance(happened, inputs.Tick | inputs.RelaysHere | inputs.Unreached), (
                    f"not for islands: {happened}"
                )
                return self._tell_all(happened, now_s)

    # What may be asked; changes nothing ------------------------------------------------------------------------------

    @property
    def present(self) -> tuple[int, ...]:
        return self._roster.present

    @property
    def timelines(self) -> tuple[int, ...]:
        return self._roster.timelines

    @property
    def is_stopping(self) -> bool:
        return self._asked is not None or self._stopping is not None

    @property
    def _told_to_stop(self) -> Stopped | None:
        """How the job is to end; its islands may not know yet."""
        return self._stopping if self._asked is None else Stopped(self._asked.state, self._asked.reason)

    @property
    def saves_again_s(self) -> float:
        return max(brain.saves_again_s for brain in self._roster.at_work().values())

    @property
    def due_s(self) -> float:
        """When the next Tick is due, over all islands."""
        ahead_s = [time_s for time_s in self._outer.retries_s() if time_s > self._now_s]
        for island, brain in self._roster.at_work().items():
            ahead_s.append(self._begun_s + self._silence_s if self._sleeps(island, self._now_s) else brain.due_s)
        return min(ahead_s, default=math.inf)

    def part_of(self, timeline: int) -> int:
        """The number of the island's part in the checkpoint under way; -1 if it has no part."""
        return self._checkpoints.number_of(self.timelines.index(timeline)) if timeline in self.timelines else -1

    def portion_of(self, timeline: int, step: int) -> int:
        """The portion that the island on `timeline` trains at `step`."""
        return self.courses[timeline % len(self.courses)].at(step).portion

    def counts(self) -> Counts:
        """Counters over all islands at work; a step counts once all of them made it."""
        return Counts.of_islands([brain.counts() for brain in self._roster.at_work().values()])

    def team(self) -> Team:
        return team_of(self._roster.at_work())

    def admits(self, hello: Hello) -> bool:
        """Whether the island of the peer's timeline admits it."""
        return self._roster.admits(hello)

    def where_to_join(
        self,
        idle: Candidate,
        fitting: Iterable[int],
        now_s: float,
        coming: Mapping[PeerId, int] = MappingProxyType({}),
        sites: Mapping[PeerId, str] = MappingProxyType({}),
    ) -> Decision[int]:
        """A stage of the island with the fewest replicas. The peer gets its island when it comes."""
        if barred := self._guests.bars(idle, self._roster, now_s):
            return Decision(None, barred)
        return self._roster.where_to_join(idle, fitting, now_s, coming, sites)

    def situation(self, now_s: float) -> Situation:
        """All islands as one situation, with the reason why each waits."""
        return situation_of(self._roster, self._outer, self._pacing, self.waiting_for(), now_s)

    def waiting_for(self) -> str:
        """The reason why the job waits, for a person."""
        of = self._roster
        return self._guests.waiting_for() or self._outer.waiting_for() or waits_for(of.at_work(), of.lost)

    def story(self, step: int, index: int) -> list[str]:
        """The story of a microbatch of an inner step, at every island."""
        return story_of(self._roster.islands, self.courses, step, index)

    def island_of(self, peer: PeerId) -> int | None:
        """The island that a peer serves, or joins; None if it is not known here."""
        return self._roster.island_of.get(peer)

    def awaits_back(self, peer: PeerId) -> bool:
        """Whether no peer of this island is back since the scheduler was restarted, as far as this is known."""
        island = self._roster.island_of.get(peer)
        return island is None or self._roster.islands[island].awaits_all

    def fellows_of(self, peer: PeerId) -> Fellows:
        """The replicas of a peer's island, if that may be late while all of them are silent."""
        island = self._roster.island_of.get(peer)
        peers = [] if island is None else [each for pool in self._roster.islands[island].peers for each in pool]
        if island is None or peer not in peers or not self._may_be_late(island):
            return NO_FELLOWS
        return Fellows(peers, self._silence_s)

    def awaits(self, peer: PeerId, event: Event) -> bool:
        serves = self._roster.serves(peer)
        return serves is not None and serves.awaits(peer, event, joiners=peer in self._guests.awaited)

    def is_joining(self, peer: PeerId) -> bool:
        serves = self._roster.serves(peer)
        return serves is not None and serves.is_joining(peer)

    def outstanding(self, peer: PeerId) -> int:
        serves = self._roster.serves(peer)
        return 0 if serves is None else serves.outstanding(peer)

    def pace_s(self, peer: PeerId) -> float:
        serves = self._roster.serves(peer)
        return 0.0 if serves is None else serves.pace_s(peer)

    def deadline_s(self, stage: int, direction: Direction) -> float:
        """The longest of all islands."""
        return max(brain.deadline_s(stage, direction) for brain in self._roster.islands)

    def validate(self) -> None:
        """Assert what must hold between any two inputs."""
        for brain in self._roster.islands:
            brain.validate()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _may_be_late(self, island: int) -> bool:
        """Whether an island that is silent may be late. Not if there are no others, it has yet to load, owes a part of
        a checkpoint, or all are to be there. If all are only for the clock of checkpoints, they wait for it."""
        of, brain = self._roster.at_work(), self._roster.islands[island]
        is_amid = brain.mode in (Mode.GATHERING, Mode.RUNNING) and brain.agreed < brain.settings.steps
        if not self._silence_s or self._divisions or not is_amid or brain.owing() or len(of) == 1:
            return False
        steps = {other.outer_step for number, other in of.items() if number != island}
        step = steps.pop() if len(steps) == 1 else None
        return step is None or not self._is_whole(step, self._now_s, clock=False)

    def _sleeps(self, island: int, now_s: float) -> bool:
        """Whether an island that may be late has no peer back since the scheduler was restarted."""
        is_silent = self._roster.islands[island].awaits_all and now_s < self._begun_s + self._silence_s
        return is_silent and self._asked is None and self._may_be_late(island)

    def _begin(self, each: inputs.EachIsland, now_s: float) -> list[Output]:
        self._begun_s = now_s
        self._roster.lost = {island: each.absent for island, one in enumerate(each.begins) if one is None}
        committed = {n: one.committed for n, one in enumerate(each.begins) if isinstance(one, inputs.Resumed)}
        self._outer.resume(each.exchanges, committed, now_s)
        made = None if self.courses[0].streams else self._outer.made
        late = {*self._roster.late} if made is not None else set[int]()
        # An island that was late in the newest exchange never holds the outer weights behind it.
        able = [island for island in self.present if made is None or self.timelines[island] not in made.late]
        self._evaluator = min(able or self.present)
        decided = list[Output]()
        for island in self.present:
            is_here = island in (self._evaluator, *late)  # a late one still holds the outer weights before
            decided += self._tell(island, inputs.EvaluateHere(is_here=is_here), now_s)
        for island, begin in enumerate(each.begins):
            if begin is None:
                continue
            peers = begin.known if isinstance(begin, inputs.Resumed) else [replica.peer for replica in begin.replicas]
            self._roster.island_of |= dict.fromkeys(peers, island)
            decided += self._tell(island, begin, now_s)
        for island in late - {self._evaluator}:
            decided += self._tell(island, inputs.EvaluateHere(is_here=False), now_s)
        return decided

    def _told(self, peer: PeerId, happened: Input, now_s: float) -> list[Output]:
        """Pass an input to the island that the peer serves."""
        island = self._roster.island_of.get(peer)
        return [] if island is None else self._tell(island, happened, now_s)

    def _tell(self, island: int, happened: Input, now_s: float) -> list[Output]:
        """Pass an input to an island, and translate its decisions into decisions of the job."""
        if self.is_over or island in self._roster.lost:
            return []
        brain = self._roster.islands[island]
        was_loading = brain.mode is Mode.LOADING
        until = {peer: brain.leaves_from(peer) for division in self._divisions for peer in division.awaited}
        made = brain.step(happened, now_s)
        left = [output.peer for output in made if isinstance(output, outputs.Left)]
        over = {peer for peer in left if self._divisions.left(peer, until.get(peer))}
        decided = self._outer.released(made, now_s)
        for output in made:
            match output:
                case outputs.Send(peer=peer, command=Release()) | outputs.Released(peer=peer) if peer in over:
                    continue
                case outputs.Left(peer=peer) if peer in over:
                    self._roster.island_of.pop(peer, None)
                case outputs.Send(peer=peer, command=SaveStage() as save):
                    if (number := self._checkpoints.number_of(island)) >= 0:
                        decided.append(outputs.Send(peer, replace(save, island=number)))
                case outputs.BeginCheckpoint() | outputs.PublishCheckpoint() | DropCheckpoint():
                    decided += self._saves(island, output, now_s)
                case EnterState(state=JobState.RUNNING):
                    self._stopping = None
                    decided.append(output)
                case Finish():
                    self._finished.add(island)
                case Stopped() | Fail():
                    return [*decided, *self._ended(island, output, now_s, was_loading=was_loading)]
                case _:
                    decided.append(of_job(output, island, self._roster, self._outer))
        return decided

    def _ended(self, island: int, end: Stopped | Fail, now_s: float, *, was_loading: bool) -> list[Output]:
        """An island ends before its last step: the others go on without it, or the job ends."""
        told = end.message if isinstance(end, Fail) else end.reason
        has_lost = is_loss(end) or (was_loading and self._roster.is_fork(island))  # it could not go over
        if has_lost and self._roster.can_spare(island, was_loading=was_loading):
            return self._lose(island, told, now_s)
        if has_lost and self._asked:  # it was not told yet that the job is to stop
            lost = stopped_by_loss(f"island {island}: {told}", self.settings.on_stall, self._told_to_stop)
            assert lost is not None, "it was told to stop"
            return self._end(lost, told, now_s)
        if isinstance(end, Fail):
            return self._end(replace(end, message=f"island {island}: {told}"), told, now_s)
        is_asked = self._stopping is not None and not end.hint  # not because of what it has lost
        return self._end(end if is_asked else replace(end, reason=f"island {island}: {told}"), told, now_s)

    def _tell_all(self, happened: Input, now_s: float) -> list[Output]:
        islands = [n for n in self.present if happened != inputs.Tick() or not self._sleeps(n, now_s)]
        return [output for island in islands for output in self._tell(island, happened, now_s)]

    def _release(self, peer: PeerId, reason: str) -> list[Output]:
        return [outputs.Send(peer, Release(self.settings.job, reason)), outputs.Released(peer, reason)]

    def _end(self, end: Finish | Fail | Stopped, reason: str, now_s: float) -> list[Output]:
        """End the job and release all peers; the first end stands."""
        self.is_over = True
        released = [output for island in self._roster.islands for output in island.step(inputs.Cancel(reason), now_s)]
        arrived = [peer for division in self._divisions for peer in division.arrived]
        released += [output for peer in arrived for output in self._release(peer, reason)]
        return [*(output for output in released if not isinstance(output, Stopped)), end]

    # Saving and stopping ---------------------------------------------------------------------------------------------

    def _saves(self, island: int, output: Saving, now_s: float) -> list[Output]:
        """Turn an island's decision about its part of a checkpoint into decisions about the whole checkpoint."""
        told = replace(output, version=self.courses[island].inner_steps(output.version))
        match output:
            case outputs.BeginCheckpoint(version=version):
                older: list[Output] = []
                if (open_ := self._checkpoints.version) is not None and open_ != version:
                    older = self._drop(DropCheckpoint(open_, "internal", "an island saves a newer version"), now_s)
                begun = self._checkpoints.begin(island, version, self.present)
                if not isinstance(begun, bool):
                    return [*older, *self._tell_quietly(island, begun, now_s)]
                return [*older, told] if begun else older
            case outputs.PublishCheckpoint(version=version):
                whole = self._checkpoints.publish(island, output)
                if isinstance(whole, inputs.CheckpointNotKept):
                    return self._tell(island, whole, now_s)
                return [] if whole is None else [replace(whole, version=told.version)]
            case DropCheckpoint():
                return self._drop(output, now_s, already=island)

    def _drop(self, drop: DropCheckpoint, now_s: float, *, anew: bool = False, already: int = -1) -> list[Output]:
        """Give a checkpoint up at all islands but `already`, and let the islands save that waited for it."""
        gone, islands = self._checkpoints.drop(drop, anew=anew)
        told = [output for n in islands if n != already for output in self._tell_quietly(n, gone, now_s)]
        return [replace(drop, version=self.courses[0].inner_steps(drop.version)), *told]

    def _tell_quietly(self, island: int, gone: Gone, now_s: float) -> list[Output]:
        """Let an island give up its part of a checkpoint without a second note for people."""
        told = (DropCheckpoint, Note, EnterState)
        return [output for output in self._tell(island, gone, now_s) if not isinstance(output, told)]

    def _written(
        self, happened: inputs.CheckpointKept | inputs.CheckpointNotKept, steps: int, now_s: float
    ) -> list[Output]:
        """Note that the checkpoint after `steps` steps of the job was kept or failed."""
        version = self._checkpoints.version
        if version is None or self.courses[0].inner_steps(version) != steps:
            return []
        if isinstance(happened, inputs.CheckpointNotKept):
            return self._tell(self._checkpoints.first, replace(happened, version=version), now_s)  # and then the others
        self._checkpoints.close()
        return self._tell_all(inputs.CheckpointKept(version), now_s)

    def _stop(self, asked: inputs.Stop, now_s: float) -> list[Output]:
        """Let all islands train up to the first version that no island has passed, save it, and stop."""
        if self._roster.is_unsettled or self._divisions:
            return []  # how far they are is not known yet
        self._asked, self._stopping = None, Stopped(asked.state, asked.reason)
        if any(brain.mode is Mode.LOADING for brain in self._roster.at_work().values()):
            return self._end(self._stopping, asked.reason, now_s)
        settled = max((step + 1 for step in self._outer.owes().values()), default=0)
        return self._tell_all(replace(asked, version=self._roster.level(settled)), now_s)

    def _pause_on_nonfinite(self, rows: Sequence[CommitRow]) -> list[Output]:
        """Pause behind the next outer step if an island skipped an inner one, where the job file says so."""
        skipped = [row for row in rows if row.skip and not self.courses[0].is_outer(row.step)]
        if not skipped or not self.settings.pause_on_nonfinite or self.is_stopping:
            return []
        step = self.courses[0].inner_steps(skipped[0].step)
        reason = f'the gradient of step {step} was not finite (limits.on_nonfinite = "pause")'
        self._asked = inputs.Stop(JobState.PAUSED, reason)
        return [EnterState(JobState.PAUSING, reason)]

    def _stuck(self, happened: inputs.Stuck, now_s: float) -> list[Output]:
        """Nothing has moved for long: stop waiting for guests, evict islands, save anew, or end the job."""
        if told := self._guests.waited_in_vain(happened.for_s, now_s):
            return [Note("warning", told)]
        of, stages = self._roster.at_work().values(), range(len(self.settings.split))
        if not any(brain.present(stage) for brain in of for stage in stages):
            return self._end_by_loss(f"no stage server is heard; no step was committed for {happened.for_s:g} s", now_s)
        if found := islands_to_evict(self._roster, self._outer, happened.for_s, now_s):
            return self._give_up(found, happened.for_s, now_s)
        if all(brain.saves_only for brain in of):
            owing = [number for number, brain in self._roster.at_work().items() if brain.owing()]
            return self._tell((owing or [self._checkpoints.first])[0], happened, now_s)
        end = stuck(self.settings.job, happened.for_s, self.waiting_for(), self.settings.on_stall, self._told_to_stop)
        return self._end(end, "nothing moved", now_s)

    # Outer steps -----------------------------------------------------------------------------------------------------

    def _heard(self, peer: PeerId, event: Averaged | RoundFailed, now_s: float) -> list[Output]:
        decided = self._outer.heard(peer, event, now_s)
        failed = next((output for output in decided if isinstance(output, Fail)), None)
        return decided if failed is None else self._end(failed, failed.message, now_s)

    def _exchange(self, now_s: float) -> list[Output]:
        """Exchange once all islands at work hold what they propose, and let those merge that have come so far."""
        if self._divisions:
            return []  # islands that are about to begin take part
        decided, exchanged = self._receive(now_s), None
        if not self._guests.awaited:
            rounds, exchanged = self._outer.advance(now_s, lambda step: self._is_whole(step, now_s))
            decided += rounds
        here = set(self.present) - self._roster.late.keys()
        if here and self._evaluator not in here and not self.courses[0].streams:  # it does not get the outer weights
            decided += self._tell(self._evaluator, inputs.EvaluateHere(is_here=False), now_s)
            self._evaluator = min(here)
            decided += self._tell(self._evaluator, inputs.EvaluateHere(), now_s)
        told = self._merge(now_s)
        if exchanged is None:
            return decided + told
        self._guests.exchanged(self._roster, now_s)
        rows = [row for output in told if isinstance(output, outputs.WriteRows) for row in output.rows]
        decided += [output for output in told if not isinstance(output, outputs.WriteRows)]
        decided += self._divide(exchanged, now_s)
        forks = tuple(division.fork for division in self._divisions)
        return [*decided, outputs.WriteRows(tuple(rows), forks, exchange=exchanged, exchange_s=self._outer.took_s)]

    def _merge(self, now_s: float) -> list[Output]:
        """Let islands make the outer step of the newest exchange that have come to it."""
        made, at_work = self._outer.made, self._roster.at_work().items()
        come = [n for n, brain in at_work if made is not None and brain.outer_step == made.step]
        told = [output for n in come if made is not None for output in self._tell(n, made, now_s)]
        return [*self._outer.have_merged(now_s), *told]

    def _is_whole(self, step: int, now_s: float, *, clock: bool = True) -> bool:
        """Whether all islands make an outer step at once, as something is saved, ends or begins behind it; with `clock`
        also if the clock of checkpoints does."""
        course, roster = self.courses[0], self._roster
        if self.is_stopping or course.outer_at(step).behind == course.inner.steps:
            return True
        if not roster.may_begin_behind(step):
            return False
        is_due = any(brain.saves(step + 1, now_s, clock=clock) for brain in roster.at_work().values())
        return is_due or self._guests.are_there or may_divide(roster, step + 1, self._guests.resting(now_s))

    def _receive(self, now_s: float) -> list[Output]:
        """Let guests fetch the state before an exchange after which islands may begin."""
        step = self._roster.outer_step
        in_front = step is not None and not self.is_stopping and self._roster.may_begin_behind(step)
        joins = self._guests.look(self._roster, now_s, in_front=in_front)
        return [output for join in joins for output in self._told(join.replica.peer, join, now_s)]

    def _compare(self, now_s: float) -> list[Output]:
        """Evict islands whose outer weights differ from the majority's; without a majority the job fails."""
        if not (odd := self._outer_weights.compare(self._roster.at_work(), forget=not self._divisions)):
            return []
        if len(self.present) - len(odd) >= max(1, self._roster.least):
            return self._give_up(odd, self.settings.averaging_timeout_s, now_s)
        fault = next(iter(odd.values()))
        return self._end(Fail(ReplicaDiverged.code, fault, "run the same release on all"), fault, now_s)

    # Islands that are lost, and begin anew ---------------------------------------------------------------------------

    def _give_up(self, islands: Mapping[int, str], for_s: float, now_s: float) -> list[Output]:
        """Evict islands that are at work but hang or lie; their sites rest before they may come back."""
        decided: list[Output] = []
        for island, why in islands.items():
            told = f"{why}; {self._guests.leave_out(island, self._roster, for_s, now_s)}"
            released = self._roster.islands[island].step(inputs.Cancel(told), now_s)
            decided += [output for output in released if not isinstance(output, Stopped)]
            decided += self._lose(island, told, now_s)
        return decided

    def _lose(self, island: int, told: str, now_s: float) -> list[Output]:
        """Go on without an island: what it trained since the last exchange does not count."""
        is_owed = any(island in self._outer.owed(fragment) for fragment in range(self.courses[0].fragments))
        since = "it last took part in an exchange" if is_owed else "the last exchange"
        self._roster.lose(island, told)
        trained = f"the others go on; what it has trained since {since} is left out"
        note = Note("warning", f"island {island} is lost: {told}; {trained}")
        decided = [note, outputs.IslandLost(island), *self._outer.without(island)]
        if (version := self._checkpoints.lose(island)) is not None:
            drop = DropCheckpoint(version, "peer", f"island {island} was lost before it was kept")
            decided += self._drop(drop, now_s, anew=True)
        if island == self._evaluator:
            self._evaluator = min(self.present)
            decided += self._tell(self._evaluator, inputs.EvaluateHere(), now_s)
        return decided

    def _end_by_loss(self, told: str, now_s: float) -> list[Output]:
        end = stopped_by_loss(told, self.settings.on_stall, self._told_to_stop)
        return self._end(end or Fail(PeerUnavailable.code, told, LOST_HINT), told, now_s)

    def _divide(self, exchanged: outputs.Exchanged, now_s: float) -> list[Output]:
        """Let lost islands begin anew after an exchange, if others can spare replicas for every stage."""
        if self.is_stopping or not exchanged.whole or not self._roster.may_begin_behind(exchanged.step):
            return []
        leaves = self._divisions.begin(self._roster, exchanged.step + 1, self._guests.resting(now_s))
        return [output for island, leave in leaves for output in self._tell(island, leave, now_s)]

    def _settle(self, now_s: float) -> list[Output]:
        """Begin the islands whose replicas have all gone over; give up the islands that lack a stage."""
        decided: list[Output] = []
        for division in self._divisions.settled(self._roster):
            if division.is_whole(len(self.settings.split)):
                decided += self._fork(division, now_s)
            else:
                reason = f"island {division.island} does not begin: a stage has no replica"
                decided += [output for peer in division.arrived for output in self._release(peer, reason)]
        return decided

    def _fork(self, division: Division, now_s: float) -> list[Output]:
        """Begin an island with the replicas that went over."""
        island = division.island
        like = self._roster.islands[self.present[0]]
        news: list[Input] = [inputs.RelaysHere(like.relays_here), inputs.Unreached(like.unreached)]
        places = division.begin(self._roster, self._rng)
        told: list[Input] = [*news, inputs.Start(tuple(division.arrived.values()))]
        if (version := self._checkpoints.version) is not None:
            self._checkpoints.wait(island)
            told.append(inputs.OthersSave(version))
        return [*places, *(output for each in told for output in self._tell(island, each, now_s))]


def of_job(output: Output, island: int, roster: Roster, outer: OuterSteps) -> Output:
    """An island's decision as the job's: rows, places and notes name the island, and commits of outer steps name donors
    elsewhere, and say whether the island was late."""
    course = roster.courses[island]
    match output:
        case outputs.Send(peer=peer, command=LoadStage(join=0) as load) if roster.is_fork(island):
            return outputs.Send(peer, replace(load, held=load.version))
        case outputs.Send(peer=peer, command=Commit() as commit) if course.is_outer(commit.step):
            donors = (*commit.donors, *roster.allies(island, peer, commit.step, outer.envoys))
            return outputs.Send(peer, replace(commit, donors=donors, rebases=outer.rebases(island, commit.step)))
        case outputs.WriteCommit(row=row):
            return outputs.WriteRows((row,))
        case outputs.WriteEvaluation(row=row):
            return outputs.WriteEvaluation(evaluation_of(row, course))
        case outputs.Admitted(peer=peer, stage=stage):
            return outputs.Admitted(peer, roster.place(island, stage))
        case outputs.Note(level=level, message=message):
            return outputs.Note(level, f"island {island}: {message}")
        case _:
            return output


REJOINS = "begins anew behind an exchange, once its site has a stage server for each stage, or another island has two"


def situation_of(roster: Roster, outer: OuterSteps, pacing: Pacing, waiting_for: str, now_s: float) -> Situation:
    """The islands at work as one situation, with what was done for those that fell behind, and why others are lost."""
    islands, courses, state = roster.at_work(), roster.courses, states(roster)
    of = {number: brain.situation(now_s) for number, brain in islands.items()}
    waits = {number: island_waits_for(brain) for number, brain in islands.items()}
    waits |= {number: "waits for the exchange" for number in islands if state[number] is IslandState.EXCHANGING}
    standings = [
        IslandStanding(
            number,
            courses[number].inner_steps(brain.agreed),
            brain.agreed - courses[number].inner_steps(brain.agreed),
            brain.peers,
            "; ".join(filter(None, (waits[number], pacing.relief.get(number, ""), outer.late_text(number, now_s)))),
            of[number],
            numbers(of[number].steps, courses[number]),
            _share(courses[number], brain.agreed),
            state[number],
            outer.waits.of(number, now_s),
            pacing.relieved[number],
            outer.late[number],
        )
        for number, brain in islands.items()
    ]
    standings += [
        IslandStanding(
            *(number, 0, 0, (), f"lost: {why}; {REJOINS}"),
            state=IslandState.LOST,
            waited_s=outer.waits.of(number, now_s),
            relieved=pacing.relieved[number],
            late=outer.late[number],
        )
        for number, why in roster.lost.items()
    ]
    return replace(
        next(iter(of.values())),
        is_running=all(situation.is_running for situation in of.values()),
        agreed=min(situation.agreed for situation in of.values()),
        waiting_for=waiting_for,
        replicas=tuple(replica for situation in of.values() for replica in situation.replicas),
        joiners=tuple(joiner for situation in of.values() for joiner in situation.joiners),
        links={pair: until_s for situation in of.values() for pair, until_s in situation.links.items()},
        checkpoint=_checkpoint([open_ for each in of.values() if (open_ := each.checkpoint) is not None], courses[0]),
        islands=tuple(sorted(standings, key=lambda one: one.number)),
        outer_rounds=dict(outer.outcomes),
    )


def team_of(islands: Mapping[int, JobBrain]) -> Team:
    """All replicas of the islands at work."""
    teams = [brain.team() for brain in islands.values()]
    return Team(*(sum(getattr(team, field.name) for team in teams) for field in fields(Team)))


def waits_for(islands: Mapping[int, JobBrain], lost: Mapping[int, str]) -> str:
    """The reason why each island waits."""
    told = [f"island {number} {island_waits_for(brain)}" for number, brain in islands.items()]
    return "; ".join([*told, *(f"island {number} is lost" for number in sorted(lost))])


def island_waits_for(island: JobBrain) -> str:
    return "waits for the other islands" if island.outer_step is not None else island.waiting_for()


def story_of(islands: Sequence[JobBrain], courses: Sequence[OuterCourse], step: int, index: int) -> list[str]:
    """The story of a microbatch of an inner step, at every island."""
    found = []
    for number, (brain, course) in enumerate(zip(islands, courses, strict=True)):
        lines = brain.story(course.version_after(step), index)
        found += [f"island {number}: {line}" for line in lines]
    return found


def _share(course: OuterCourse, version: int) -> tuple[int, int] | None:
    """The microbatches that an island trains in the step after a version, where leases follow speed, and all of it."""
    leases = course.inner.leases
    if leases is None:
        return None
    return leases.count(course.inner.island, course.inner_steps(version)), leases.microbatches


def _checkpoint(parts: Sequence[OpenCheckpoint], course: OuterCourse) -> OpenCheckpoint | None:
    """The parts of a checkpoint as one, for people."""
    if not parts:
        return None
    savers = {peer: stage for part in parts for peer, stage in part.savers.items()}
    is_writing = all(part.is_writing for part in parts)
    return OpenCheckpoint(course.inner_steps(parts[0].version), parts[0].since_s, savers, is_writing=is_writing)
