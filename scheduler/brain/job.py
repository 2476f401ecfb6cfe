"""One job's decisions: an input goes in, outputs come out, and the driver carries them out in that order.

The brain asks its parts (parts.py) in turn and decides what comes next. It never waits and never reads a clock: each
input comes with its time. Two rules of order hold. A commit's row is written before any replica hears of the commit,
and a replica gets the order to drop work (AbortRound, Void) before the work that replaces it. events.py says what an
event of a replica means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from random import Random
from types import MappingProxyType
from typing import assert_never

from scheduler.brain import inputs, outputs
from scheduler.brain.events import apply_event
from scheduler.brain.explain.facts import Situation, Team
from scheduler.brain.explain.situation import Counts, counts, situation, team, waiting_for
from scheduler.brain.explain.step_times import StepClock
from scheduler.brain.inputs import Input, ReplicaRecord
from scheduler.brain.outputs import BeginCheckpoint, Finish, Independent, Output, PublishCheckpoint, Stopped
from scheduler.brain.parts import Parts
from scheduler.brain.settings import BrainSettings, SavingRules
from scheduler.brain.stall import nobody_back, stuck
from scheduler.brain.state.brain_state import Mode, ModeEvent
from scheduler.brain.state.pool import Leave, Trust
from scheduler.brain.state.restart import RestartCensus
from scheduler.brain.state.step import Phase, StepEvent, StepRun
from swarm.job.course import PLAIN, Course
from swarm.job.placement import Candidate
from swarm.text import counted
from swarm.types import Decision, Direction, JobState, PeerId
from swarm.wire.messages import Event, Hello


class JobBrain:
    """All decisions of one job. `step` is the only way to change it; everything else is a question."""

    def __init__(self, settings: BrainSettings, rng: Random, course: Course = PLAIN) -> None:
        self.settings = settings
        self.course = course
        self._parts = Parts(settings, rng, course)
        self._state = self._parts.state
        self._now_s = -math.inf  # when the newest input came
        self._clock = StepClock()

    # The door ----------------------------------------------------------------------------------------------------

    def step(self, happened: Input, now_s: float) -> list[Output]:
        """Take in what happened at `now_s` and give the decisions; none once the job has ended."""
        if self._state.mode is Mode.ENDED:
            return []
        self._now_s = now_s
        if self._take(happened, now_s):
            self._go_on(now_s)
        self._clock.look(self._state.progress.runs, now_s)
        return self._state.outbox.take()

    def _take(self, happened: Input, now_s: float) -> bool:
        """Note what happened; False if nothing can follow from it."""
        state = self._state
        match happened:
            case inputs.Happened():
                return apply_event(self._parts, happened, now_s)
            case inputs.RowDurable(step=step):
                return self._row_durable(step, now_s)
            case outputs.Exchanged(step=step):
                self._parts.commits.merge(state.progress.begin(step), happened, self._parts.loading.elements)
                self._parts.saving.merges(happened)
            case inputs.EvaluateHere(is_here=is_here):
                self._parts.evaluations.take_over(is_here=is_here)
                return not self.awaits_all  # such an island may be late; a Tick tells when it is not
            case inputs.OthersSave() | inputs.SaveAnew():
                self._parts.saving.hear(happened)
            case inputs.Tick() | inputs.RowsDurable() | inputs.EachIsland():  # the last two are for jobs with islands
                return True
            case inputs.Start(replicas=replicas):
                self._start(replicas)
            case inputs.Resumed():
                self._resume(happened, now_s)
            case inputs.PeerSuspect():
                return self._suspect(happened, now_s)
            case inputs.PeerBack(peer=peer):
                if peer in state.pool and state.pool[peer].trust is not Trust.DETACHED:
                    self._parts.reattach.trust(peer)
            case inputs.PeerGone(peer=peer, reason=reason):
                self._gone(peer, reason, now_s)
            case inputs.RelaysHere(here=here):
                state.relays_here = here
                return False
            case inputs.Unreached(peers=peers):
                state.unreached = peers
                return False
            case inputs.Join():
                self._join(happened, now_s)
            case inputs.AskToLeave(peer=peer, reason=reason, target=target):
                if (joiner := state.joiners.get(peer)) is not None:
                    self._parts.admission.refuse(joiner, reason, now_s)
                elif peer in state.pool:
                    self._parts.departures.ask(peer, Leave(reason, target), now_s)
            case inputs.Stored():
                self._parts.audited(happened.peer, happened, now_s)
                return False
            case inputs.CheckpointKept(version=version):
                if not self._parts.collector.kept(version):
                    return self._parts.saving.others_did(version)
                state.conclude(Finish() if version == self.settings.steps else None)
            case inputs.CheckpointNotKept(version=version, reason=reason, fault=fault):
                state.conclude(self._parts.collector.failed(version, reason, fault, now_s))
            case inputs.Stop(state=stopped_state, reason=reason, version=version):
                self._stop(Stopped(stopped_state, reason), version)
            case inputs.Stuck(for_s=for_s):
                self._stuck(for_s, now_s)
            case inputs.Cancel(reason=reason):
                state.conclude(Stopped(JobState.CANCELLED, reason))
            case _:
                assert_never(happened)
        return True

    # What may be asked; changes nothing ------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        return self._state.mode

    @property
    def awaits_all(self) -> bool:
        """Whether no peer is back since the scheduler was restarted, with its stage or without."""
        return self._state.census is not None and not self._state.census.is_heard

    @property
    def relays_here(self) -> bool:
        return self._state.relays_here

    @property
    def unreached(self) -> tuple[PeerId, ...]:
        """The peers that the scheduler cannot dial, of all."""
        return self._state.unreached

    @property
    def is_over(self) -> bool:
        return self._state.mode is Mode.ENDED

    @property
    def is_stopping(self) -> bool:
        return self._parts.saving.stop is not None

    @property
    def saves_only(self) -> bool:
        """Whether nothing but a checkpoint is under way."""
        return self._parts.saves_only

    def saves(self, version: int, now_s: float, *, clock: bool) -> bool:
        """Whether a level version would be saved if it were committed now, or, with `clock`, the clock begins there."""
        return self._parts.saving.wants(version, now_s, clock=clock)

    def owing(self, *, again: bool = False) -> list[PeerId]:
        """The replicas that have not handed over their part of a checkpoint; `again`: one that was late before."""
        return self._parts.collector.owing(again=again)

    @property
    def saves_again_s(self) -> float:
        """When a failed save of the final state is tried again; -infinity if none has failed."""
        return self._parts.saving.again_s

    @property
    def due_s(self) -> float:
        """When the next Tick is due if nothing happens before; infinity if never."""
        state, times_s = self._state, [*self._parts.rounds.retries_s()]
        times_s += [time_s for audit in self._parts.audits for time_s in audit.times_s()]
        if state.mode is Mode.GATHERING and state.census is not None:
            if self.awaits_all:
                return state.census.deadline_s  # which may be over: until a Tick, nothing follows from it
            times_s.append(state.census.deadline_s)
        if state.mode is Mode.RUNNING:
            times_s += [self._parts.moves.look_s, *self._parts.dispatch.times_s(), *self._parts.admission.times_s()]
        if state.mode is Mode.SAVING:
            times_s.append(self._parts.saving.again_s)
        return min((time_s for time_s in times_s if time_s > self._now_s), default=math.inf)

    def portion_of(self, timeline: int, step: int) -> int:
        """The portion that a step trains; all steps of this brain are on one timeline."""
        return self.course.at(step).portion

    def counts(self) -> Counts:
        return counts(self._state)

    def team(self) -> Team:
        return team(self._state)

    def admits(self, hello: Hello) -> bool:
        """Whether a peer that is not (or no longer) a replica may go on with the stage that it holds."""
        return self._parts.reattach.admits(hello)

    def where_to_join(
        self, idle: Candidate, fitting: Iterable[int], now_s: float, coming: Mapping[PeerId, int] = MappingProxyType({})
    ) -> Decision[int]:
        """The stage that an idle peer should join, among the stages that fit into its memory; or why none.

        `coming`: peers that were just sent to a stage, of which this brain has not heard yet.
        """
        state = self._state
        if state.mode is not Mode.RUNNING or not self.settings.recover or self.is_stopping:
            return Decision(None, "the job takes nobody in now")
        if barred := state.joiners.barred(idle.peer, now_s):
            return Decision(None, barred)
        return self._parts.moves.where_to_join(idle, fitting, now_s, coming)

    def situation(self, now_s: float) -> Situation:
        return replace(situation(self._parts, now_s), steps=self._clock.steps())

    def waiting_for(self) -> str:
        return waiting_for(self._parts, self._now_s)

    def story(self, step: int, index: int) -> list[str]:
        """Every transition of a microbatch and of its step, with causes; for open and the newest closed steps."""
        run = self._state.progress.runs.get(step)
        return self._state.ledger.story(step, index) + [f"step {step} {line}" for line in (run.history if run else [])]

    @property
    def begun(self) -> int:
        """How many steps were begun, so far."""
        return self._state.progress.next

    @property
    def agreed(self) -> int:
        """The newest version that all replicas hold."""
        return self._state.progress.agreed

    def has_made(self, step: int) -> bool:
        """Whether at each stage a replica has made a step, so that others can have what it takes of it."""
        run = self._state.progress.runs.get(step)
        stages = {event.stage for event in run.commits.values()} if run is not None else set()
        return self.agreed > step or len(stages) == len(self.settings.split)

    def agreed_digest(self, stage: int) -> str:
        """The digest of the stage's state at that version; empty if not known."""
        return self._state.progress.agreed_digest(stage)

    @property
    def outer_step(self) -> int | None:
        """The outer step that this island has come to: all before it is agreed, and no weights that it overwrites are
        evaluated. None while it trains."""
        return self._parts.outer_step

    @property
    def peers(self) -> tuple[tuple[PeerId, ...], ...]:
        """The replicas of each stage."""
        return tuple(tuple(pool) for pool in self._state.pool.by_stage)

    def present(self, stage: int) -> list[ReplicaRecord]:
        """The replicas of a stage that are heard, and its joiners."""
        joining = [joiner.replica for joiner in self._state.joiners if joiner.replica.stage == stage]
        return self._state.pool.heard(stage) + joining

    def stage_of(self, peer: PeerId) -> int | None:
        """The stage that a replica serves; None if the peer is none."""
        return self._state.pool.stage_of(peer) if peer in self._state.pool else None

    def delegates(self, stage: int, step: int) -> list[ReplicaRecord]:
        """The replicas of a stage that may take part in an outer step for this island."""
        pool = self._state.pool
        able = (pool[peer] for peer in pool.by_stage[stage] if pool.takes_part(peer, step))
        return [standing.replica for standing in able if not standing.is_suspect]

    def may_divide(self, stage: int, step: int) -> list[ReplicaRecord]:
        """The replicas of a stage that hold, or will hold, all of the state behind a step, and are not to leave."""
        pool, able = self._state.pool, self.delegates(stage, step)
        stays = [replica for replica in able if pool.leaves.wants(replica.peer) is None]
        return [replica for replica in stays if not pool[replica.peer].needs_donors]

    def leaves_from(self, peer: PeerId) -> int | None:
        """The first step of which a replica that leaves is no member; None if it does not leave, or is gone."""
        leave = self._state.pool.leaves.wants(peer) if peer in self._state.pool else None
        return leave.until if leave is not None else None

    @property
    def saving_rules(self) -> SavingRules:
        """Those of an island that begins as a copy of this one."""
        return self._parts.saving.of_copy

    def awaits(self, peer: PeerId, event: Event, *, joiners: bool = False) -> bool:
        """Whether the job cannot go on without what the peer says here; it waits for `joiners` in islands only."""
        return self._parts.awaits(peer, event) or (joiners and self._parts.admission.awaits(peer, event))

    def is_joining(self, peer: PeerId) -> bool:
        """Whether the peer still fetches state, or needs something that only other replicas of its stage have."""
        return peer in self._state.joiners or (peer in self._state.pool and self._state.pool[peer].needs_donors)

    def outstanding(self, peer: PeerId) -> int:
        """Hops that the peer was given and has not finished."""
        return self._state.ledger.outstanding(peer)

    def pace_s(self, peer: PeerId) -> float:
        """Device seconds that the peer needs per microbatch; 0 if never measured."""
        return self._parts.loads.measured_s(peer)

    def deadline_s(self, stage: int, direction: Direction) -> float:
        """How many seconds a hop of this stage may take now."""
        return self._parts.dispatch.deadline_s(stage, direction)

    def validate(self) -> None:
        """Assert what must hold between any two inputs."""
        self._parts.validate()

    # Beginning and ending ----------------------------------------------------------------------------------------

    def _start(self, replicas: Iterable[ReplicaRecord]) -> None:
        self._state.turn(ModeEvent.STARTED)
        # In order of peer id, once and for all: ties between replicas must not depend on the order of a set.
        for replica in sorted(replicas, key=attrgetter("peer")):
            self._parts.reattach.enlist(replica)
        assert not self._state.pool.empty_stages(), "each stage needs a replica"
        self._parts.loading.begin()
        self._parts.dispatch.open_window()

    def _resume(self, resumed: inputs.Resumed, now_s: float) -> None:
        self._state.turn(ModeEvent.RESUMED)
        self._state.resumed = resumed
        self._state.census = RestartCensus(resumed.known, now_s, resumed.grace_s)
        self._parts.reattach.resume(resumed)

    def _stop(self, stop: Stopped, version: int) -> None:
        untrained = max(self._state.progress.committed, version) <= self.settings.first_step
        if self.mode in (Mode.WAITING, Mode.LOADING) or (untrained and stop.state is JobState.CANCELLED):
            self._state.conclude(stop)
        else:
            self._parts.saving.stop, self._parts.saving.stop_at = stop, version

    def _stuck(self, for_s: float, now_s: float) -> None:
        if self.saves_only:
            self._state.conclude(self._parts.collector.stuck(for_s, now_s))
        else:
            settings = self.settings
            on_stall = settings.on_stall if settings.recover else "fail"
            self._state.conclude(stuck(settings.job, for_s, self.waiting_for(), on_stall, self._parts.saving.stop))

    # Peers -------------------------------------------------------------------------------------------------------

    def _suspect(self, suspect: inputs.PeerSuspect, now_s: float) -> bool:
        peer, state = suspect.peer, self._state
        joiner = state.joiners.get(peer)
        if joiner is not None and suspect.session_lost:
            joiner.report = None  # it would not hear that it was admitted; it reports again in its next session
        if peer not in state.pool or state.pool[peer].is_suspect:
            return False
        if suspect.session_lost and not self.settings.recover:
            self._gone(peer, suspect.reason, now_s)
            return True
        state.outbox.note("warning", f"{state.pool.name(peer)} is suspect: {suspect.reason}")
        if self.settings.recover:
            state.pool[peer].trust = Trust.DETACHED if suspect.session_lost else Trust.SUSPECT
            self._parts.dispatch.suspect(peer, suspect.reason, now_s)
        return True

    def _gone(self, peer: PeerId, reason: str, now_s: float) -> None:
        state = self._state
        if (joiner := state.joiners.forget(peer)) is not None:
            told = f"stage server {peer} is gone while it joined stage {joiner.replica.stage}: {reason}"
            state.outbox.note("warning", told)
        elif peer in state.pool:
            self._parts.departures.lose(peer, reason, "gone", now_s)
        elif state.census is not None and peer in state.census.known:
            state.census.heard(now_s)

    def _join(self, join: inputs.Join, now_s: float) -> None:
        state, peer = self._state, join.replica.peer
        if state.mode is not Mode.RUNNING or peer in state.pool:
            state.outbox.release(peer, "the job takes nobody in now")
        else:
            state.pool.leaves.forget(peer)
            self._parts.admission.begin(join, now_s)

    # What follows ------------------------------------------------------------------------------------------------

    def _row_durable(self, step: int, now_s: float) -> bool:
        run = self._state.progress.runs.get(step)
        if run is None or run.row is None or run.phase is not Phase.WRITING:
            return False
        run.turn(StepEvent.DURABLE)
        for peer in self._state.pool.members(step):
            self._parts.commits.send(peer, run.row)
        self._parts.dispatch.close(step)
        for audit in self._parts.audits:
            audit.close(step)
        self._state.progress.committed = step + 1
        self._parts.admission.tell()
        self._parts.evaluations.made(step + 1)
        self._parts.collector.committed(step + 1, skipped=run.row.skip, now_s=now_s)
        return True

    def _go_on(self, now_s: float) -> None:
        """Do all that has become possible."""
        state = self._state
        while state.mode is Mode.LOADING and not self._parts.loading.missing():
            self._begin(now_s)
        if state.mode is Mode.GATHERING and state.census is not None:
            self._gather(state.census, now_s)
        if state.mode is Mode.RUNNING:
            self._advance(now_s)
        elif state.mode is Mode.SAVING:  # this may take long: replicas that can be spared may leave
            self._parts.departures.begin()
            self._parts.departures.release(now_s)
        if state.mode.is_at_work:
            self._report_independent()
            self._save(now_s)

    def _begin(self, now_s: float) -> None:
        """All replicas have loaded: start training if their states fit together."""
        state = self._state
        if found := self._parts.loading.compare():
            self._parts.departures.remedy(found, now_s)
            return
        state.turn(ModeEvent.LOADED)
        state.progress.loaded(self._parts.loading.digests())
        loaded = f"{counted(len(state.pool), 'replica')} of {counted(len(self.settings.split), 'stage')} loaded"
        state.outbox.note("info", f"{loaded}: training starts")

    def _gather(self, census: RestartCensus, now_s: float) -> None:
        """After a restart, resume as soon as every replica that can be expected is back."""
        state = self._state
        empty, missing = state.pool.empty_stages(), census.missing()
        is_over = now_s >= census.deadline_s
        if not empty and not self._parts.loading.missing() and (not missing or is_over):
            if found := self._parts.loading.compare():
                self._parts.departures.remedy(found, now_s)
                if state.mode is Mode.GATHERING:
                    self._gather(census, now_s)
                return
            state.census = None
            state.turn(ModeEvent.BACK)
            state.pool.sort()
            self._parts.loading.find_places()
            self._parts.reattach.begin_again(census, now_s)
        elif empty and is_over:
            self._parts.departures.stage_lost(nobody_back(empty, census.known))

    def _advance(self, now_s: float) -> None:
        """Move everything on, in this order: joins, leaves, work given away, each step, departures, evaluation."""
        progress = self._state.progress
        for run in [run for run in progress.runs.values() if run.phase is Phase.COMMITTING]:
            if not self._parts.commits.is_owed(run):
                self._parts.departures.remedy(self._parts.commits.compare(run), now_s)
        if self._parts.audits:
            self._check(now_s)
        if self.mode is not Mode.RUNNING:
            return
        self._parts.admission.judge(now_s)
        self._parts.departures.begin()
        self._parts.dispatch.hurry(now_s)
        for run in progress.redoable():
            self._settle_pairs(run, now_s)
            self._parts.rounds.look_ahead(run)
            self._parts.dispatch.refill(run, now_s)
        self._parts.dispatch.feed(now_s, new_steps=self._parts.saving.may_begin(progress.next))
        for step in sorted(progress.runs):
            self._advance_step(progress.runs[step], now_s)
            if self.mode is not Mode.RUNNING:
                return
        self._parts.departures.release(now_s)
        self._rebalance(now_s)
        self._parts.dispatch.evaluate(now_s)
        if progress.agreed == self.settings.steps and self._parts.evaluations.is_idle:
            self._state.turn(ModeEvent.TRAINED)

    def _check(self, now_s: float) -> None:
        """Compare what replicas say that they computed, and void what is wrong before more is given away."""
        for run in self._state.progress.redoable():
            self._settle_pairs(run, now_s)
        found = next(filter(None, (audit.look(now_s) for audit in self._parts.audits)), [])
        self._parts.departures.remedy(found, now_s)

    def _advance_step(self, run: StepRun, now_s: float) -> None:
        state = self._state
        self._parts.rounds.look_ahead(run)
        if run.phase is Phase.FEEDING and state.ledger.is_full(run.step):
            run.turn(StepEvent.FULL if state.ledger.is_finite(run.step) else StepEvent.NOT_FINITE)
            self._parts.departures.remedy(self._parts.rounds.start(run, now_s), now_s)
        if self.mode is not Mode.RUNNING:
            return
        self._parts.rounds.repeat(run, now_s)
        if run.is_averaged and not self._parts.rounds.paused(run):
            run.turn(StepEvent.AVERAGED)
        if self._parts.permit(run, now_s):
            state.conclude(self._parts.commits.decide(run))
        is_oldest = run.step == state.progress.agreed
        if run.phase is Phase.COMMITTING and is_oldest and not self._parts.commits.is_owed(run):
            run.turn(StepEvent.AGREED)
            state.progress.agree(run)

    def _settle_pairs(self, run: StepRun, now_s: float) -> None:
        """Where two replicas hold the same microbatch, void the smaller contribution."""
        while (peer := self._state.ledger.superfluous(run.step)) is not None:
            self._parts.rounds.void(run, peer, "another replica holds a microbatch of its set", now_s)

    def _report_independent(self) -> None:
        """Report replicas that joined and no longer need any other."""
        for peer in self._state.pool.dependent():
            if not self._parts.commits.needs_donors(peer):
                self._state.pool.independent(peer)
                self._state.outbox.put(Independent(peer, self._state.pool[peer].replica.incarnation))

    def _rebalance(self, now_s: float) -> None:
        """Move a replica where that is worth it."""
        decision = None if self.is_stopping else self._parts.moves.consider(now_s)
        if decision is not None and decision.plan is not None:
            self._parts.departures.ask(decision.plan.peer, Leave(decision.reason, decision.plan.target), now_s)

    def _save(self, now_s: float) -> None:
        """Begin or complete a checkpoint, or stop, if it is time."""
        self._check_saving(now_s)
        if not self.mode.is_at_work:
            return
        match self._parts.saving.next(self._state.progress.agreed, now_s, idle=self._parts.is_idle):
            case BeginCheckpoint(version=version):
                self._parts.collector.begin(version, now_s)
                self._check_saving(now_s)
            case PublishCheckpoint() as publish:
                self._state.outbox.put(publish)
            case Stopped() as stopped:
                self._state.conclude(stopped)

    def _check_saving(self, now_s: float) -> None:
        """Compare what replicas say that they saved."""
        for audit in self._parts.audits:
            self._parts.departures.remedy(audit.look_at_checkpoint(now_s), now_s)
