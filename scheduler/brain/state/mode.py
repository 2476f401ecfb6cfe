"""Where a job stands, as far as its brain is concerned.

WAITING ──started──▶ LOADING ──all loaded, digests equal──▶ RUNNING ──all steps agreed──▶ SAVING ──saved──▶ ENDED
   └─────resumed───▶ GATHERING ──all that can be expected are back──▲                                         ▲
                                   from anywhere: failed, stopped, stalled or cancelled ──────────────────────┘
"""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """Where the job stands."""

    WAITING = "waiting"
    GATHERING = "gathering"
    LOADING = "loading"
    RUNNING = "running"
    SAVING = "saving"
    ENDED = "ended"

    @property
    def is_at_work(self) -> bool:
        """Steps are being trained, or the last ones saved."""
        return self in (Mode.RUNNING, Mode.SAVING)


class ModeEvent(StrEnum):
    """The events that change the mode."""

    STARTED = "started"
    RESUMED = "resumed"
    LOADED = "all loaded"
    BACK = "all back"
    TRAINED = "all steps agreed"
    OVER = "over"


TRANSITIONS: dict[tuple[Mode, ModeEvent], Mode] = {
    (Mode.WAITING, ModeEvent.STARTED): Mode.LOADING,
    (Mode.WAITING, ModeEvent.RESUMED): Mode.GATHERING,
    (Mode.LOADING, ModeEvent.LOADED): Mode.RUNNING,
    (Mode.GATHERING, ModeEvent.BACK): Mode.RUNNING,
    (Mode.RUNNING, ModeEvent.TRAINED): Mode.SAVING,
    **{(mode, ModeEvent.OVER): Mode.ENDED for mode in Mode if mode is not Mode.ENDED},
}
