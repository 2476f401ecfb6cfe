"""What one island decides, as the job's decision. Pure. Decision: docs/decisions/067."""

from __future__ import annotations

from dataclasses import replace

from scheduler.brain import outputs
from scheduler.brain.islands.roster import Roster
from scheduler.brain.islands.rows import evaluation_of
from scheduler.brain.outputs import Output
from swarm.types import PeerId
from swarm.wire.messages import Commit, LoadStage


def of_job(output: Output, island: int, roster: Roster, envoys: set[PeerId]) -> Output:
    """An island's decision as the job's: rows, places and notes name the island, and commits name donors elsewhere.

    `envoys`: the envoys of the newest outer step.
    """
    course = roster.courses[island]
    match output:
        case outputs.Send(peer=peer, command=LoadStage(join=0) as load) if roster.is_fork(island):
            return outputs.Send(peer, replace(load, held=load.version))
        case outputs.Send(peer=peer, command=Commit() as commit) if course.is_outer(commit.step):
            donors = (*commit.donors, *roster.allies(island, peer, commit.step, envoys))
            return outputs.Send(peer, replace(commit, donors=donors))
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
