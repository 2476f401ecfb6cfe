"""All decisions of a job with islands: a brain for each island, and the outer steps in which they exchange.

    inputs ──▶ the brain of the island that the peer serves ──▶ outputs, told as the job's
                   │ all have come to the same outer step
                   ▼
               Exchanging (exchange.py) ──▶ Exchanged, to every island ──▶ their rows, durable all or none ──▶ commits

Each island is a JobBrain on a timeline of its own (swarm/job/islands.py), and knows nothing of the others. This brain
has the door and the questions of a JobBrain, so drivers and views need not tell the two apart. An outer step is
committed once every island has proposed; a row of one island that another island lacks would leave its replicas no way
to merge, so their rows are written together. A checkpoint has a part of each island (saving.py). A job that is told to
stop trains up to the next outer step, behind which all islands hold the same. A new peer joins the island with the
fewest replicas. An island that loses a stage stalls the whole job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from random import Random
from types import MappingProxyType

from scheduler.brain import inputs, outputs
from scheduler.brain.checkpoint.schedule import Collection
from scheduler.brain.explain.facts import IslandStanding, Situation
from scheduler.brain.explain.reasons import Team
from scheduler.brain.explain.situation import Counts
from scheduler.brain.fleet.placement import Candidate
from scheduler.brain.inputs import Input
from scheduler.brain.islands.exchange import Delegation, Exchanging
from scheduler.brain.islands.rows import numbers
from scheduler.brain.islands.saving import JointCheckpoints
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import CommitRow, EnterState, Fail, Finish, Note, Output, Stopped
from scheduler.brain.settings import BrainSettings
from scheduler.brain.stall import FAILED_HINT, LOST_HINT, stopped_by_loss, stuck
from scheduler.brain.state.mode import Mode
from scheduler.brain.validity import fault_of
from swarm.errors import ReplicaDiverged
from swarm.events import Averaged, Hello, RoundFailed
from swarm.job.course import OuterCourse
from swarm.messages import Commit
from swarm.types import Decision, Direction, Hop, JobState, PeerId, Round

LOSSES = (FAILED_HINT, LOST_HINT)  # what an island hints at that has lost a stage
ALLIES_MAX = 4  # of other islands, whom a replica may ask for the mean proposals


class IslandsBrain:
    """All decisions of one job with outer steps; `settings` and `courses` have one for each island."""

    def __init__(self, settings: Sequence[BrainSettings], courses: Sequence[OuterCourse], rng: Random) -> None:
        self.settings = settings[0]
        self.courses = tuple(courses)
        self._islands = [
            JobBrain(replace(one, pause_on_nonfinite=False), Random(rng.getrandbits(64)), course)
            for one, course in zip(settings, courses, strict=True)
        ]
        self._island_of: dict[PeerId, int] = {}
        self._exchanging: Exchanging | None = None
        self._envoys: set[PeerId] = set()  # of the newest outer step
        self._round = Round(self.settings.epoch, 1)  # the next one between islands
        self._digests: dict[tuple[int, int], dict[int, str]] = {}  # by version and stage: of each island
        self._checkpoints = JointCheckpoints(len(self._islands))
        self._asked: inputs.Stop | None = None  # to stop, and islands were not told yet
        self._stopping: Stopped | None = None  # how the job is to end, since islands were told
        self._finished: set[int] = set()
        self._is_over = False
        self._now_s = -math.inf  # when the newest input came

    # The door ----------------------------------------------------------------------------------------------------

    def step(self, happened: Input, now_s: float) -> list[Output]:
        """Take in what happened at `now_s` and give the decisions of all islands, as JobBrain.step does for one."""
        if self._is_over:
            return []
        self._now_s = now_s
        decided = self._take(happened, now_s)
        if not self._is_over:
            decided += self._compare(now_s)
        if not self._is_over:
            decided += self._exchange(now_s)
        if not self._is_over and self._asked is not None:
            decided += self._stop(self._asked, now_s)
        if not self._is_over and len(self._finished) == len(self._islands):
            decided += self._end(Finish(), "finished", now_s)
        return decided

    def _take(self, happened: Input, now_s: float) -> list[Output]:
        match happened:
            case inputs.EachIsland(begins=begins):
                return self._begin(begins, now_s)
            case inputs.RowsDurable(rows=rows):
                told = [(row.timeline % len(self._islands), inputs.RowDurable(row.step)) for row in rows]
                decided = [one for island, durable in told for one in self._tell(island, durable, now_s)]
                return [*decided, *self._pause_on_nonfinite(rows)]
            case inputs.Happened(peer=peer, event=Hello() as hello) if peer not in self._island_of:
                self._island_of[peer] = hello.timeline % len(self._islands)
                return self._tell(self._island_of[peer], happened, now_s)
            case inputs.Happened(peer=peer, event=Averaged() | RoundFailed() as event) if self._is_outer(peer, event):
                return self._heard(peer, event, now_s)
            case inputs.PeerGone(peer=peer, reason=reason):
                return [*self._lost(peer, reason, now_s), *self._told(peer, happened, now_s)]
            case inputs.PeerSuspect(peer=peer, reason=reason):
                lost = self._lost(peer, reason, now_s) if happened.session_lost else []
                return [*lost, *self._told(peer, happened, now_s)]
            case inputs.Happened(peer=peer) | inputs.PeerBack(peer=peer) | inputs.AskToLeave(peer=peer):
                return self._told(peer, happened, now_s)
            case inputs.Join(replica=replica):
                self._island_of[replica.peer] = self._neediest([replica.stage])[0]
                return self._told(replica.peer, happened, now_s)
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
                assert isinstance(happened, inputs.Tick | inputs.RelaysHere), (
                    f"no input for a job with islands: {happened}"
                )
                return self._tell_all(happened, now_s)

    # What may be asked; changes nothing ------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def is_stopping(self) -> bool:
        return self._asked is not None or self._stopping is not None

    @property
    def _told_to_stop(self) -> Stopped | None:
        """How the job is to end, whether its islands know or not."""
        return self._stopping if self._asked is None else Stopped(self._asked.state, self._asked.reason)

    @property
    def saves_again_s(self) -> float:
        return max(one.saves_again_s for one in self._islands)

    @property
    def due_s(self) -> float:
        """When the next Tick is due, over all islands."""
        retries_s = self._exchanging.retries_s() if self._exchanging is not None else []
        ahead_s = [time_s for time_s in retries_s if time_s > self._now_s]
        return min([*ahead_s, *(one.due_s for one in self._islands)], default=math.inf)

    def portion_of(self, timeline: int, step: int) -> int:
        """The portion that the island on `timeline` trains at `step`."""
        return self.courses[timeline % len(self.courses)].at(step).portion

    def counts(self) -> Counts:
        """Counters over all islands; a step counts once all of them made it."""
        return Counts.of_islands([one.counts() for one in self._islands])

    def team(self) -> Team:
        of = [one.team() for one in self._islands]
        return Team(*(sum(getattr(one, each.name) for one in of) for each in fields(Team)))

    def admits(self, hello: Hello) -> bool:
        """Whether the island of the peer's timeline admits it."""
        return self._islands[hello.timeline % len(self._islands)].admits(hello)

    def where_to_join(
        self, idle: Candidate, fitting: Iterable[int], now_s: float, coming: Mapping[PeerId, int] = MappingProxyType({})
    ) -> Decision[int]:
        """A stage of the island with the fewest replicas. Which island it will be is settled when the peer comes."""
        sent: list[dict[PeerId, int]] = [{} for _ in self._islands]
        for peer, stage in coming.items():  # as if all came now
            if not any(one.is_joining(peer) or one.stage_of(peer) is not None for one in self._islands):
                sent[self._neediest([stage], sent)[0]][peer] = stage
        numbers = self._neediest(range(len(self.settings.split)), sent)
        decisions = [self._islands[number].where_to_join(idle, fitting, now_s, sent[number]) for number in numbers]
        return next((one for one in decisions if one.plan is not None), decisions[0])

    def situation(self, now_s: float) -> Situation:
        """All islands as one situation; its sentence gives the reason why each waits."""
        of = [one.situation(now_s) for one in self._islands]
        return replace(
            of[0],
            is_running=all(one.is_running for one in of),
            agreed=min(one.agreed for one in of),
            waiting_for=self.waiting_for(),
            replicas=tuple(replica for one in of for replica in one.replicas),
            joiners=tuple(joiner for one in of for joiner in one.joiners),
            links={pair: until_s for one in of for pair, until_s in one.links.items()},
            checkpoint=self._checkpoint([one.checkpoint for one in of if one.checkpoint is not None]),
            islands=tuple(
                IslandStanding(
                    number,
                    course.inner_steps(one.agreed),
                    one.agreed - course.inner_steps(one.agreed),
                    one.peers,
                    self._waiting_for(one),
                    of[number],
                    numbers(of[number].steps, course),
                )
                for number, (one, course) in enumerate(zip(self._islands, self.courses, strict=True))
            ),
        )

    def _checkpoint(self, parts: Sequence[Collection]) -> Collection | None:
        """The parts of a checkpoint as one, for people."""
        if not parts:
            return None
        first = parts[0]
        savers = {peer: stage for one in parts for peer, stage in one.savers.items()}
        is_writing = all(one.is_writing for one in parts)
        return Collection(self.courses[0].inner_steps(first.version), first.since_s, savers, is_writing=is_writing)

    def waiting_for(self) -> str:
        """The reason why the job waits, for a person."""
        if self._exchanging is not None:
            steps = self.courses[0].inner_steps(self._exchanging.step)
            return f"after step {steps}: {self._exchanging.waiting_for()}"
        told = (f"island {number} {self._waiting_for(one)}" for number, one in enumerate(self._islands))
        return "; ".join(told)

    def story(self, step: int, index: int) -> list[str]:
        """The story of a microbatch of an inner step, at every island."""
        found = []
        for number, (one, course) in enumerate(zip(self._islands, self.courses, strict=True)):
            lines = one.story(step + step // course.inner.lease, index)
            found += [f"island {number}: {line}" for line in lines]
        return found

    def island_of(self, peer: PeerId) -> int | None:
        """The island that a peer serves, or joins; None if it is not known here."""
        return self._island_of.get(peer)

    def is_joining(self, peer: PeerId) -> bool:
        island = self._island_of.get(peer)
        return island is not None and self._islands[island].is_joining(peer)

    def outstanding(self, peer: PeerId) -> int:
        island = self._island_of.get(peer)
        return 0 if island is None else self._islands[island].outstanding(peer)

    def pace_s(self, peer: PeerId) -> float:
        island = self._island_of.get(peer)
        return 0.0 if island is None else self._islands[island].pace_s(peer)

    def deadline_s(self, stage: int, direction: Direction) -> float:
        """The longest of all islands."""
        return max(one.deadline_s(stage, direction) for one in self._islands)

    def validate(self) -> None:
        """Assert what must hold between any two inputs."""
        for one in self._islands:
            one.validate()

    def _waiting_for(self, island: JobBrain) -> str:
        return "waits for the other islands" if island.outer_step is not None else island.waiting_for()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _begin(self, begins: Sequence[inputs.Start | inputs.Resumed], now_s: float) -> list[Output]:
        decided = []
        for island, begin in enumerate(begins):
            peers = begin.known if isinstance(begin, inputs.Resumed) else [one.peer for one in begin.replicas]
            self._island_of |= dict.fromkeys(peers, island)
            decided += self._tell(island, begin, now_s)
        return decided

    def _told(self, peer: PeerId, happened: Input, now_s: float) -> list[Output]:
        """Tell the island that the peer serves."""
        island = self._island_of.get(peer)
        return [] if island is None else self._tell(island, happened, now_s)

    def _tell(self, island: int, happened: Input, now_s: float) -> list[Output]:
        """Tell an island, and give what it decides as the job's decisions; rows are written by their island's name."""
        decided: list[Output] = []
        course = self.courses[island]
        for output in () if self._is_over else self._islands[island].step(happened, now_s):
            match output:
                case outputs.Send(peer=peer, command=Commit() as commit) if course.is_outer(commit.step):
                    donors = (*commit.donors, *self._allies(island, peer, commit.step))
                    decided.append(outputs.Send(peer, replace(commit, donors=donors)))
                case outputs.WriteCommit(row=row):
                    decided.append(outputs.WriteRows((row,)))
                case outputs.WriteEvaluation(row=row):
                    timeline, version = row.timeline // len(self._islands), course.inner_steps(row.version)
                    decided.append(outputs.WriteEvaluation(replace(row, timeline=timeline, version=version)))
                case outputs.BeginCheckpoint() | outputs.PublishCheckpoint() | outputs.DropCheckpoint():
                    decided += self._saves(island, output, now_s)
                case outputs.Admitted(peer=peer, stage=stage):
                    decided.append(outputs.Admitted(peer, island * len(self.settings.split) + stage))
                case EnterState(state=JobState.RUNNING):
                    self._stopping = None
                    decided.append(output)
                case Note(level=level, message=message):
                    decided.append(Note(level, f"island {island}: {message}"))
                case Finish():
                    self._finished.add(island)
                case Stopped(reason=told, hint=hint) | Fail(message=told, hint=hint) if self._asked and hint in LOSSES:
                    # It lost a stage, and was not told yet that the job is to stop.
                    lost = stopped_by_loss(f"island {island}: {told}", self.settings.on_stall, self._told_to_stop)
                    assert lost is not None, "it was told to stop"
                    return [*decided, *self._end(lost, told, now_s)]
                case Fail(message=message):
                    failed = replace(output, message=f"island {island}: {message}")
                    return [*decided, *self._end(failed, message, now_s)]
                case Stopped(reason=reason, hint=hint):
                    is_asked = self._stopping is not None and not hint  # not because of what it has lost
                    stopped = output if is_asked else replace(output, reason=f"island {island}: {reason}")
                    return [*decided, *self._end(stopped, reason, now_s)]
                case _:
                    decided.append(output)
        return decided

    def _neediest(self, stages: Iterable[int], sent: Sequence[Mapping[PeerId, int]] = ()) -> list[int]:
        """The islands, those with the fewest in these stages first: replicas, joiners, and peers `sent` to each."""
        wanted, islands = set(stages), zip(self._islands, sent or [{}] * len(self._islands), strict=True)
        held = [sum(one.present(at) + [*coming.values()].count(at) for at in wanted) for one, coming in islands]
        return sorted(range(len(held)), key=held.__getitem__)

    def _tell_all(self, happened: Input, now_s: float) -> list[Output]:
        return [one for island in range(len(self._islands)) for one in self._tell(island, happened, now_s)]

    def _end(self, end: Finish | Fail | Stopped, reason: str, now_s: float) -> list[Output]:
        """End the job and release everybody; the first end stands."""
        self._is_over = True
        released = [one for island in self._islands for one in island.step(inputs.Cancel(reason), now_s)]
        return [*(one for one in released if not isinstance(one, Stopped)), end]

    # Saving and stopping ---------------------------------------------------------------------------------------------

    def _saves(
        self,
        island: int,
        output: outputs.BeginCheckpoint | outputs.PublishCheckpoint | outputs.DropCheckpoint,
        now_s: float,
    ) -> list[Output]:
        """Turn an island's decision about its part of a checkpoint into decisions about the whole."""
        told = replace(output, version=self.courses[island].inner_steps(output.version))
        match output:
            case outputs.BeginCheckpoint(version=version):
                begun = self._checkpoints.begin(island, version)
                if isinstance(begun, inputs.CheckpointNotKept):
                    return self._tell_quietly(island, begun, now_s)
                return [told] if begun else []
            case outputs.PublishCheckpoint(version=version):
                whole = self._checkpoints.publish(island, output)
                if isinstance(whole, inputs.CheckpointNotKept):
                    return self._tell(island, whole, now_s)
                return [] if whole is None else [replace(whole, version=told.version)]
            case outputs.DropCheckpoint(version=version, reason=reason, fault=fault):
                others = [one for one in self._checkpoints.drop(output) if one != island]
                gone = inputs.CheckpointNotKept(version, reason, fault)
                return [told, *(one for other in others for one in self._tell_quietly(other, gone, now_s))]

    def _tell_quietly(self, island: int, gone: inputs.CheckpointNotKept, now_s: float) -> list[Output]:
        """Let an island give up its part of a checkpoint without telling people again."""
        told = (outputs.DropCheckpoint, Note, EnterState)
        return [one for one in self._tell(island, gone, now_s) if not isinstance(one, told)]

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
        """Let all islands train up to the first version that none of them has passed, save it, and stop."""
        modes = {one.mode for one in self._islands}
        if modes & {Mode.WAITING, Mode.GATHERING}:
            return []  # how far they are is not known yet
        self._asked, self._stopping = None, Stopped(asked.state, asked.reason)
        if Mode.LOADING in modes:
            return self._end(self._stopping, asked.reason, now_s)
        pairs = zip(self._islands, self.courses, strict=True)
        version = max(course.level_from(island.begun) for island, course in pairs)
        return self._tell_all(replace(asked, version=version), now_s)

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
        """Nothing has moved for long: end the job, unless all that is under way is a checkpoint."""
        if all(one.saves_only for one in self._islands):
            owing = [number for number, one in enumerate(self._islands) if one.owes_parts]
            return self._tell((owing or [0])[0], happened, now_s)
        end = stuck(self.settings.job, happened.for_s, self.waiting_for(), self.settings.on_stall, self._told_to_stop)
        return self._end(end, "nothing moved", now_s)

    # Outer steps -----------------------------------------------------------------------------------------------------

    def _is_outer(self, peer: PeerId, event: Averaged | RoundFailed) -> bool:
        island = self._island_of.get(peer)
        return island is not None and self.courses[island].is_outer(event.step)

    def _heard(self, peer: PeerId, event: Averaged | RoundFailed, now_s: float) -> list[Output]:
        """An envoy speaks of an outer round."""
        exchanging, island = self._exchanging, self._islands[self._island_of[peer]]
        if exchanging is None or event.step != exchanging.step or event.timeline != island.settings.timeline:
            return []
        if fault := fault_of(peer, event, island.settings, island.agreed):
            return exchanging.lost(peer, f"it {fault}", now_s)
        if isinstance(event, RoundFailed):
            return exchanging.failed(peer, event, now_s)
        decided = exchanging.averaged(peer, event, now_s)
        for output in decided:
            if isinstance(output, Fail):
                return self._end(output, output.message, now_s)
        return decided

    def _lost(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        return [] if self._exchanging is None else self._exchanging.lost(peer, reason, now_s)

    def _exchange(self, now_s: float) -> list[Output]:
        """Exchange once all islands have come to the same outer step, and commit it when that is done."""
        step, *others = {one.outer_step for one in self._islands}
        if others or step is None:
            return []
        if self._exchanging is None:
            self._exchanging = Exchanging(step, self.settings.units, self._round, self.settings.averaging_timeout_s)
        decided = self._exchanging.begin(self._delegations(step), now_s)
        exchanged = self._exchanging.result()
        if exchanged is None:
            return decided
        self._round, self._exchanging = self._exchanging.next_round, None
        self._envoys = {peer for one in exchanged.rounds for peer in one.envoys}
        if exchanged.skip:
            steps_made = self.courses[0].inner_steps(step)
            told = f"after step {steps_made} what islands propose is not finite: all go back to the outer weights"
            decided.append(Note("warning", told))
        rows: list[CommitRow] = []
        for island in range(len(self._islands)):
            for output in self._tell(island, exchanged, now_s):
                if isinstance(output, outputs.WriteRows):
                    rows += output.rows
                else:
                    decided.append(output)
        assert len(rows) == len(self._islands), "each island commits the outer step"
        return [*decided, outputs.WriteRows(tuple(rows))]

    def _allies(self, island: int, peer: PeerId, step: int) -> list[Hop]:
        """Replicas of other islands that hold, or will hold, the mean proposals for the peer's stage, envoys first.

        Only an envoy holds them until others have fetched them. If it is lost then, those of other islands have them.
        """
        stage = self._islands[island].stage_of(peer)
        others = [one for number, one in enumerate(self._islands) if number != island and stage is not None]
        able = [replica for one in others for replica in one.delegates(stage or 0, step)]
        able.sort(key=lambda replica: replica.peer not in self._envoys)
        return [Hop(one.peer, one.incarnation, 0, one.address) for one in able[:ALLIES_MAX]]

    def _delegations(self, step: int) -> list[Delegation]:
        stages = range(len(self.settings.split))
        return [
            Delegation(
                one.settings.timeline,
                sum(one.settings.tokens_of(course.inner.at(inner).portion) for inner in course.span(step)),
                {stage: tuple(one.delegates(stage, step)) for stage in stages},
            )
            for one, course in zip(self._islands, self.courses, strict=True)
        ]

    def _compare(self, now_s: float) -> list[Output]:
        """Islands must begin with the same outer weights, and hold the same after each outer step."""
        for number, one in enumerate(self._islands):
            version = one.agreed
            at_start = version == one.settings.first_step
            if not at_start and not self.courses[number].is_outer(version - 1):
                continue
            for stage in range(len(one.settings.split)):
                digest = one.agreed_digest(stage)
                if digest:  # not known of what was agreed before a restart
                    held = self._digests.setdefault((version, stage), {})
                    held[number] = digest.rpartition("-")[2]
        for (version, stage), held in list(self._digests.items()):
            if len(set(held.values())) > 1:
                told = ", ".join(f"island {number} holds {digest}" for number, digest in sorted(held.items()))
                where = f"after step {self.courses[0].inner_steps(version)}"
                fault = f"islands differ in the outer weights of stage {stage} {where}: {told}"
                return self._end(Fail(ReplicaDiverged.code, fault, "run the same release on all"), fault, now_s)
            if len(held) == len(self._islands) and version < min(one.agreed for one in self._islands):
                del self._digests[version, stage]
        return []
