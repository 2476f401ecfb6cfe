"""The progress of a job: the steps at work, and the version that all replicas hold.

steps   0 ....... agreed ....... committed ....... next ....... last
        all hold it │ row durable,  │ fed, averaged,  │ not begun
                    │ being applied │ decided         │
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.brain.inputs import Resumed
from scheduler.brain.state.step import Phase, StepRun


class Progress:
    """The steps of one job; `runs` has those from `agreed` to before `next`."""

    def __init__(self, first_step: int) -> None:
        self.next = first_step
        self.committed = first_step  # steps whose row is durable
        self.agreed = first_step  # steps on whose commit all replicas agree
        self.runs: dict[int, StepRun] = {}
        self._digests: Mapping[int, str] = {}  # of each stage's state at version `agreed`, if known

    def resume(self, resumed: Resumed) -> None:
        """Go on where an earlier scheduler start stopped: whether its newest commits were made is not known."""
        self.committed = self.next = resumed.committed
        self.agreed = resumed.committed - len(resumed.rows)
        for row in resumed.rows:
            self.runs[row.step] = StepRun(row.step, Phase.COMMITTING, row.skip, row=row)

    def begin(self, step: int) -> StepRun:
        assert step == self.next
        self.next = step + 1
        run = self.runs[step] = StepRun(step)
        return run

    def redoable(self) -> list[StepRun]:
        """Steps whose contributions may still be void, oldest first."""
        return [run for _, run in sorted(self.runs.items()) if run.can_be_redone]

    def undecided(self) -> list[StepRun]:
        """Steps without a row: all of their contributions may still be void, oldest first."""
        return [run for _, run in sorted(self.runs.items()) if run.can_be_redone or run.phase is Phase.DECIDED]

    def loaded(self, digests: Mapping[int, str]) -> None:
        """All replicas loaded the first version; the digest of each stage."""
        self._digests = digests

    def agree(self, run: StepRun) -> None:
        """All replicas made the commit of the oldest step."""
        assert run.step == self.agreed
        self.agreed = run.step + 1
        self._digests = {one.stage: one.digest for one in run.commits.values()}
        del self.runs[run.step]

    def agreed_digest(self, stage: int) -> str:
        """The digest of the stage's state at version `agreed`; empty if not known."""
        return self._digests.get(stage, "")

    def digest_at(self, stage: int, version: int) -> str:
        """The digest of the stage's state at a version, as its replicas say; empty if none did yet, or they differ."""
        if version == self.agreed and self._digests:
            return self.agreed_digest(stage)
        run = self.runs.get(version - 1)
        said = {one.digest for one in run.commits.values() if one.stage == stage} if run is not None else set()
        return said.pop() if len(said) == 1 else ""
