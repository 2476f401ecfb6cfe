"""Replicas that come back: with a new session after theirs broke, or all of them after a restart of the scheduler.

After a broken session the cells are not asked for: everything uncommitted is done again. After a restart each replica
is asked, and the ledger is rebuilt from their reports (state/restart.py), as far as these bear the scheduler's stamp: a
replica is believed that it did what it was given, as it is at any time, and not that it was given it.

Not chosen: to compute all that is uncommitted again, because that costs every restart up to two steps of the whole job;
a row for each hop, because it would wait for the disk before each microbatch. Decisions: docs/decisions/006, 021.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.brain.commit.commits import Commits
from scheduler.brain.commit.rounds import Rounds
from scheduler.brain.inputs import ReplicaRecord, Resumed
from scheduler.brain.routing.dispatch import Dispatch
from scheduler.brain.routing.evaluation import Evaluations
from scheduler.brain.state.brain_state import BrainState, Mode
from scheduler.brain.state.pool import Trust
from scheduler.brain.state.restart import RestartCensus
from scheduler.brain.state.step import Phase
from swarm.text import counted, listed
from swarm.types import PeerId
from swarm.wire.messages import Admit, Hello


@dataclass(frozen=True, slots=True)
class Reattach:
    """Reattaches replicas of one job with the state that they hold."""

    _state: BrainState
    _evaluations: Evaluations
    _dispatch: Dispatch
    _rounds: Rounds
    _commits: Commits

    def resume(self, resumed: Resumed) -> None:
        """Take over what an earlier scheduler start left: its newest commits, and versions that were not evaluated."""
        self._state.progress.resume(resumed)
        oldest = max(self._state.settings.first_step + 1, resumed.committed - self._state.settings.staleness)
        for version in range(oldest, resumed.committed + 1):
            if version not in resumed.evaluated:
                self._evaluations.made(version)

    def admits(self, hello: Hello) -> bool:
        """Whether a peer that is not (or no longer) a replica may go on with the stage that it holds.

        Only a peer that the job's record named in that stage when this scheduler started: a Hello alone proves nothing.
        No replica has a version that was committed while it was away. After the job went on without it, it must have
        taken part in all that was committed since, and come before the next commit is decided. A peer that was gone
        never may: others did its work.
        """
        settings, pool, mode = self._state.settings, self._state.pool, self._state.mode
        if hello.peer in self._state.joiners:
            return True
        is_ours = (hello.job, hello.timeline) == (settings.job, settings.timeline)
        fits = is_ours and 0 <= hello.stage < len(pool.by_stage)
        was_lost = pool.was_lost(hello.peer)
        if not fits or hello.join or was_lost or mode in (Mode.LOADING, Mode.ENDED):
            return False
        if mode is Mode.WAITING:
            return True  # about to resume; asked again then
        resumed = self._state.resumed
        if resumed is None or resumed.known.get(hello.peer) != hello.stage:
            return False
        if not self._holds_version(hello.version) or hello.version > resumed.committed:
            return False
        return mode is Mode.GATHERING or self._lacks_nothing(hello.version)

    def enlist(self, replica: ReplicaRecord) -> None:
        self._state.pool.add(replica)
        self._dispatch.add(replica.peer)

    def trust(self, peer: PeerId) -> None:
        """A suspect was heard again: it may be given work."""
        if self._state.pool[peer].is_suspect:
            self._state.pool[peer].trust = Trust.TRUSTED
            self._dispatch.go_on(peer)

    def heard(self, hello: Hello) -> None:
        """Forget the requests of the peer's earlier session; its next ones have newer attempts."""
        self._evaluations.withdraw(hello.peer)
        self._evaluations.raise_attempt(hello.attempt)
        self._state.ledger.raise_attempts(hello.attempt)

    def holds_stage(self, hello: Hello) -> bool:
        """Whether the replica holds its stage of this timeline."""
        settings, stage = self._state.settings, self._state.pool.stage_of(hello.peer)
        return (hello.job, hello.timeline, hello.stage) == (settings.job, settings.timeline, stage)

    def may_gather(self, hello: Hello) -> bool:
        """Whether a replica that is back since the scheduler was restarted still holds what it can go on from."""
        return self.holds_stage(hello) and not hello.join and self._holds_version(hello.version)

    def reattach(self, hello: Hello, now_s: float) -> bool:
        """Let a replica with a new session go on where it stands; False if it cannot."""
        settings, peer, version = self._state.settings, hello.peer, hello.version
        report = self._state.pool[peer].loaded
        if hello.join and report is not None and report.join == hello.join:
            # It never heard that it was admitted, and keeps what it had reported.
            version = report.version
            self._state.outbox.send(peer, Admit(settings.job, settings.timeline, hello.join, version))
        elif hello.join:
            version = -1
        if not self.holds_stage(hello) or not self._holds_version(version):
            return False
        self._commits.send_since(peer, version)
        for run in self._state.progress.redoable():
            # What became of each of its cells is not asked: all that is not committed is done again.
            self._rounds.void(run, peer, "its session broke", now_s, "timeout")
        return True

    def begin_again(self, census: RestartCensus, now_s: float) -> None:
        """All expected replicas are back: rebuild the ledger from their reports."""
        progress = self._state.progress
        self._dispatch.open_window()
        for peer, hello in sorted(census.hellos.items()):
            self._commits.send_since(peer, hello.version)
        newest = progress.committed + self._state.settings.staleness if census.doubted else census.last_step()
        for step in range(progress.committed, min(self._state.settings.steps, newest + 1)):
            if self._state.course.is_outer(step):
                break  # no replica has begun a step behind an exchange
            run = progress.begin(step)
            self._state.ledger.adopt(step, census.cells(step), now_s)
            for peer in sorted(census.doubted):  # it may have added what is not counted
                self._rounds.void(run, peer, "it reports work that it was not given", now_s)
            self._dispatch.refill(run, now_s, keep=True)
        if census.doubted:
            told = f"{listed(sorted(census.doubted))} reported work that this scheduler did not give: it does not count"
            self._state.outbox.note("warning", told)
        missing = f"; without {listed(census.missing())}" if census.missing() else ""
        back = len(self._state.pool)
        who = f"{counted(back, 'replica')} {'is' if back == 1 else 'are'} back"
        told = f"{who}: goes on at step {progress.committed}{missing}"
        self._state.outbox.note("info", told)

    def _holds_version(self, version: int) -> bool:
        """Whether the commits that come after a version are still known, so that a replica can make them."""
        return self._state.progress.agreed <= version <= self._state.progress.committed

    def _lacks_nothing(self, version: int) -> bool:
        """Whether a peer with that version took part in all commits since; False if one is just being decided."""
        runs = self._state.progress.runs
        if any(run.phase in (Phase.DECIDED, Phase.WRITING) for run in runs.values()):
            return False
        rows = [run.row for step, run in runs.items() if step >= version and run.row is not None]
        return all(made.epoch < self._state.settings.epoch for row in rows for made in row.rounds.values())
