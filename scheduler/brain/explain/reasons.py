"""The present reason of a job at work. The stored reason is of an earlier decision and grows old."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.text import counted

LOADED = "all replicas are loaded"
RESUMED = "goes on after a restart of the scheduler"
AWAITS_DATABASE = "waits for the database, which takes no writes; nothing is lost meanwhile"


@dataclass(frozen=True, slots=True)
class Team:
    """The replicas of a job, present and coming."""

    replicas: int
    suspects: int = 0
    leaving: int = 0
    joining: int = 0

    @property
    def text(self) -> str:
        facts = (
            f"{self.suspects} of them {'is' if self.suspects == 1 else 'are'} not heard" if self.suspects else "",
            f"{self.leaving} of them {'leaves' if self.leaving == 1 else 'leave'}" if self.leaving else "",
            f"{self.joining} more {'joins' if self.joining == 1 else 'join'}" if self.joining else "",
        )
        return ", ".join((f"trains with {counted(self.replicas, 'stage server')}", *filter(None, facts)))


def reason_at_work(stored: str, team: Team, *, awaits_database: bool, unsaved: str) -> str:
    """Why a running job is as it is; `unsaved` is the fault of its newest checkpoint.

    A reason that its brain gave when it went on stands: it could not pause, or not save the last weights.
    """
    if awaits_database:
        return AWAITS_DATABASE
    if stored not in (LOADED, RESUMED):
        return stored
    return "; ".join(filter(None, (team.text, unsaved)))


def machines_lost(lost: int, back: int, *, are_enough: bool) -> str:
    """What became of the stage servers that a running job lost lately, for a person; "" if it lost none.

    `back`: as many of them serve it again; `are_enough`: it has as many replicas as when it began.
    """
    if not lost:
        return ""
    text = "one machine was lost" if lost == 1 else f"{lost} machines were lost"
    if back >= lost:
        text += f" and {'is' if lost == 1 else 'are'} back"
    elif are_enough:
        text += " and replaced"
    return f"{text}; no step lost"
