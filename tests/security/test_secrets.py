"""No process tells a secret that it was given: not in logs, ready lines, lists of processes, metrics or databases."""

from __future__ import annotations

import json
import re
import secrets
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from client.cli import run
from swarm.pki.profiles import profile_folder
from tests.support.processes import Process
from tests.support.services import free_port

pytestmark = pytest.mark.timeout(300)
QUIET = ("--http-port", "0", "--listen", "127.0.0.1:0")


def command_lines() -> Iterator[bytes]:
    """What everybody on this machine may read of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


def keys_below(folder: Path) -> set[bytes]:
    """The middle lines of all private keys that are kept there."""
    found: set[bytes] = set()
    for path in folder.rglob("*"):
        if path.is_file() and b"PRIVATE KEY" in (content := path.read_bytes()):
            found |= set(re.findall(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\n([^\n]{40,})\n", content))
    return found


def test_processes_keep_the_secrets_that_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    password = secrets.token_hex(16)
    with monkeypatch.context() as patch:
        patch.setenv("SWARM_BROKER", f"mqtt://swarm:{password}@127.0.0.1:{free_port()}")
        data = ("--data-dir", str(tmp_path / "scheduler"))
        scheduler = Process.start(tmp_path / "scheduler.log", "scheduler", "--log-level", "debug", *QUIET, *data)
    started = [scheduler]
    try:
        ready = scheduler.wait_ready()
        at = ("--scheduler", ready["address"])
        capfd.readouterr()
        assert run(["token", "create", "--role", "stage-server", "-o", "json", *at]) == 0
        line = json.loads(capfd.readouterr().out)["data"]["line"]
        with monkeypatch.context() as patch:
            patch.setenv("SWARM_JOIN", line)
            flags = ("--device", "cpu", "--log-level", "debug", "--data-dir", str(tmp_path / "server"))
            started.append(Process.start(tmp_path / "server.log", "stage_server", *QUIET, *flags))
        joined = started[1].wait_ready()
        assert run(["peers", "-o", "json", *at]) == 0
        assert run(["identity", "ls", "-o", "json", *at]) == 0
        shown = "".join(capfd.readouterr()).encode()
        assert joined["peer"].encode() in shown
        for said in (ready, joined):
            shown += json.dumps(said).encode()
            shown += urllib.request.urlopen(f"http://{said['http']}/metrics", timeout=60).read()
        public = [tmp_path / "scheduler.log", tmp_path / "server.log", *(tmp_path / "scheduler").glob("*.*")]
        shown += b"".join([*command_lines(), *(path.read_bytes() for path in public)])
        assert b"token " in shown, "the audit log is among it"
    finally:
        for process in reversed(started):
            process.stop()
    kept = keys_below(tmp_path) | keys_below(profile_folder(ready["address"]))
    assert len(kept) >= 5, "of the authority, passes, the scheduler, the stage server, the local admin"
    canaries = {password.encode(), line.rpartition("-")[2][:26].encode(), b"PRIVATE KEY"} | kept
    assert [canary for canary in canaries if canary in shown] == []
