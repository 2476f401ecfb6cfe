"""What jobs hear that no stage server has said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scheduler.brain.inputs import Input, RelaysHere
from scheduler.jobs.listener import PeerListener


def test_jobs_at_work_hear_that_no_relay_is_here() -> None:
    heard: list[Input] = []
    at_work = SimpleNamespace(run=SimpleNamespace(driver=SimpleNamespace(tell=heard.append)))
    registry: Any = SimpleNamespace(all=lambda: [SimpleNamespace(run=None), at_work], relays_here=True)
    ports: Any = SimpleNamespace(metrics=None, wall_s=None, stores=SimpleNamespace(logs=None))
    none: Any = None
    listener = PeerListener(ports, registry, none, none, none, none, none)
    listener.on_relays(False)
    assert not registry.relays_here, "for those that begin later"
    listener.on_relays(True)
    assert heard == [RelaysHere(False), RelaysHere(True)]
