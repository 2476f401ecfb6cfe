"""Machines of a test: network namespaces with a home each, joined by a switch; some stand behind a router.

    scheduler 10.99.0.1 ─┐
    server    10.99.0.2 ─┼─ switch
    router    10.99.0.9 ─┘
       └─ hidden 192.168.99.2     the router gives its own address to what goes out, and lets nothing begin from outside

Needs root, and the Debian packages iproute2 and nftables.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from swarm.process.children import dying_with_parent
from tests.support.reader import ROOT
from tests.support.services import program

SCHEDULER, SERVER, ROUTER, HIDDEN = "scheduler", "server", "router", "hidden"
ADDRESSES = {SCHEDULER: "10.99.0.1", SERVER: "10.99.0.2", ROUTER: "10.99.0.9", HIDDEN: "192.168.99.2"}
_SWITCH, _INSIDE = "switch", "192.168.99.1"
_RULES = """
table ip swarm {
  chain outgoing {
    type nat hook postrouting priority 100;
    oifname "eth0" masquerade
  }
  chain through {
    type filter hook forward priority 0; policy drop;
    iifname "inside" accept
    ct state established,related accept
  }
}
"""


class Machines:
    """The four of them, as a context manager; on its way out it ends what runs there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ip = program("ip")
        self._programs: list[subprocess.Popen[str]] = []
        commands = folder / "bin"
        commands.mkdir()
        (commands / "swarm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m client "$@"\n')
        (commands / "swarm").chmod(0o755)

    def __enter__(self) -> Self:
        assert os.geteuid() == 0, "network namespaces need root"
        for name in (_SWITCH, *ADDRESSES):
            (self.folder / name).mkdir()
            self._ip_says("netns", "add", self._namespace(name))
            self._at(name, "link", "set", "lo", "up")
        self._at(_SWITCH, "link", "add", "switch", "type", "bridge")
        self._at(_SWITCH, "link", "set", "switch", "up")
        for name in (SCHEDULER, SERVER, ROUTER):
            self._cable(_SWITCH, f"to-{name}", name)
            self._at(_SWITCH, "link", "set", f"to-{name}", "master", "switch", "up")
        self._cable(ROUTER, "inside", HIDDEN)
        self._at(ROUTER, "addr", "add", f"{_INSIDE}/24", "dev", "inside")
        self._at(ROUTER, "link", "set", "inside", "up")
        self._at(HIDDEN, "route", "add", "default", "via", _INSIDE)
        inside = [self._ip, "netns", "exec", self._namespace(ROUTER)]
        subprocess.run([*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"], check=True, capture_output=True)
        subprocess.run([*inside, program("nft"), "-f", "-"], input=_RULES, check=True, capture_output=True, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        for running in reversed(self._programs):
            running.terminate()
        for running in self._programs:
            running.wait(timeout=60)
        for name in (_SWITCH, *ADDRESSES):
            subprocess.run([self._ip, "netns", "delete", self._namespace(name)], check=False, capture_output=True)

    def types(self, machine: str, command: str) -> str:
        """What a command prints there, both streams; it must succeed."""
        ran = subprocess.run(
            self._typed(machine, command),
            env=self._environ(machine),
            cwd=self.folder / machine,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ran.returncode == 0, f"{command} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}"
        return ran.stdout.strip()

    def starts(self, machine: str, command: str, log: Path) -> subprocess.Popen[str]:
        """A program that runs there, with its output in `log`."""
        with log.open("w") as said:
            started = subprocess.Popen(
                dying_with_parent(self._typed(machine, f"exec {command}")),
                env=self._environ(machine),
                cwd=self.folder / machine,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                text=True,
            )
        self._programs.append(started)
        return started

    def _typed(self, machine: str, command: str) -> list[str]:
        return [self._ip, "netns", "exec", self._namespace(machine), "bash", "-c", command]

    def _environ(self, machine: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWARM_", "XDG_"))}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return kept | {"HOME": str(self.folder / machine), "PYTHONPATH": str(ROOT), "PATH": path}

    def _namespace(self, machine: str) -> str:
        return f"swarm-{os.getpid()}-{machine}"

    def _cable(self, one: str, end: str, other: str) -> None:
        """A cable between two machines; `end` is its name at the first, and it is eth0 at the other."""
        peer = ("peer", "name", "eth0", "netns", self._namespace(other))
        self._at(one, "link", "add", end, "type", "veth", *peer)
        self._at(other, "addr", "add", f"{ADDRESSES[other]}/24", "dev", "eth0")
        self._at(other, "link", "set", "eth0", "up")

    def _at(self, machine: str, *words: str) -> None:
        self._ip_says("-n", self._namespace(machine), *words)

    def _ip_says(self, *words: str) -> None:
        ran = subprocess.run([self._ip, *words], capture_output=True, text=True)
        assert ran.returncode == 0, f"ip {' '.join(words)}: {ran.stderr}"
