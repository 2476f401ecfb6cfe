"""A new user's first quarter of an hour: three machines, one of them behind a router, with the documents' commands."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import ADDRESSES, HIDDEN, SCHEDULER, SERVER, Machines
from tests.support.reader import ROOT, commands_of
from tests.support.services import ready_in, until

TYPED_AND_WAITED_S_MAX = 900.0
WORDS = {command for page in ("README.md", "docs/networks.md") for command in commands_of((ROOT / page).read_text())}
PLACEHOLDERS = {
    "SCHEDULER:7950": f"{ADDRESSES[SCHEDULER]}:7950",
    "PEER:7951": f"{ADDRESSES[SERVER]}:7951",
    "cuda:0": "cpu",
}
SMALL = "--set training.steps=1000 --set training.global_batch_sequences=4 --set data.sequence_length=32"


def typed(command: str, line: str = "", **names: str) -> str:
    """A command of the README or of docs/networks.md, with what its placeholders stand for."""
    assert command in WORDS, f"no document says {command}"
    for word, value in (PLACEHOLDERS | names | ({"LINE": f"'{line}'"} if line else {})).items():
        command = re.sub(rf"\b{word}\b", value, command)
    return command


@pytest.mark.timeout(1800)
def test_three_machines_join_by_token_train_and_one_behind_a_router_is_revoked(tmp_path: Path) -> None:
    with Machines(tmp_path) as machines:
        logs = {name: tmp_path / f"{name}.log" for name in ("scheduler", "relay", "direct", "spare", "hidden")}
        programs: dict[str, subprocess.Popen[str]] = {}

        def starts(name: str, machine: str, command: str) -> dict[str, Any]:
            program = programs[name] = machines.starts(machine, command, logs[name])
            return dict(until(f"{name} is ready", lambda: ready_in(logs[name], program), timeout_s=300.0))

        def token(role: str) -> str:
            return machines.types(SCHEDULER, typed(f"swarm token create --role {role} --scheduler SCHEDULER:7950"))

        began_s = time.monotonic()
        starts("scheduler", SCHEDULER, typed("swarm scheduler --listen SCHEDULER:7950"))
        relay = starts("relay", SCHEDULER, typed("swarm relay --join LINE", token("relay")))
        assert relay["address"] == f"{ADDRESSES[SCHEDULER]}:7955", "it listens on the way to the scheduler"
        direct = "swarm stage-server --join LINE --listen PEER:7951 --device cuda:0"
        starts("direct", SERVER, typed(direct, token("stage-server")))
        joins = typed("swarm stage-server --join LINE", token("stage-server"))
        spare = starts("spare", SERVER, f"{joins} --device cpu")
        assert spare["address"] == f"{ADDRESSES[SERVER]}:7952", "it too, at the next free port"
        via_relay = typed("swarm stage-server --join LINE --via-relay", token("stage-server"))
        hidden = starts("hidden", HIDDEN, f"{via_relay} --device cpu")["peer"]

        # A person at the machine behind the router: what he submits trains on all three.
        here = f"--scheduler {ADDRESSES[SCHEDULER]}:7950"
        machines.types(HIDDEN, typed("swarm login --join LINE", token("submitter")))
        machines.types(HIDDEN, typed("swarm submit --example > job.toml"))
        submit = typed("swarm submit job.toml --scheduler SCHEDULER:7950")
        job = machines.types(HIDDEN, f"{submit} {SMALL} --set pipeline.stages=1 --detach")

        def status() -> dict[str, Any]:
            return dict(json.loads(machines.types(HIDDEN, f"swarm status {job} {here} -o json"))["data"])

        def serving() -> list[str]:
            return [peer for stage in status()["stages"] for peer in stage["peers"]]

        until("all three train", lambda: len(serving()) == 3 and status()["step"], timeout_s=300.0)
        assert hidden in serving()
        revoke = typed("swarm identity revoke NAME", NAME=hidden)
        revoked_s = time.monotonic()
        machines.types(SCHEDULER, f"{revoke} --yes {here}")
        assert programs["hidden"].wait(timeout=60) == 5
        assert hidden not in serving()
        gone_s = time.monotonic() - revoked_s
        assert "error[E0504]" in logs["hidden"].read_text()
        step = status()["step"]
        until("the others train on", lambda: status()["step"] > step, timeout_s=300.0)
        machines.types(HIDDEN, f"swarm cancel {job} {here}")
        machines.types(HIDDEN, f"{typed('swarm pull example ./model')} {here}")
        took_s = time.monotonic() - began_s
        assert (tmp_path / HIDDEN / "model" / "config.json").exists()
        print(f"from the first command to the weights {took_s:.0f} s; {gone_s:.1f} s from the revocation to its end")
        assert took_s < TYPED_AND_WAITED_S_MAX
