"""A reader of the documents: types their commands one after the other, in a home of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from swarm.process.children import dying_with_parent
from tests.support.services import free_port, ready_in, until

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    ((?:swarm|python|make|pip) .*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:swarm|make|python -m)\s[^`]*)`")
PLACEHOLDER = re.compile(r"(?<![\w./$])[A-Z][A-Z_]*[A-Z](?![\w=])|(?<=[ =])[NP](?= |$)")
PROGRAMS = ("up", "scheduler", "stage-server", "relay")
COMMAND_S_MAX = 600.0
# Jobs of the documents train until they are cancelled: what is typed meanwhile comes before them.
ASIDE = ("nice", "-n", "5")


def commands_of(text: str) -> list[str]:
    """Each command of a document once, where it first comes: lines of blocks, and what stands in backticks."""
    found = [(at.start(), line) for at in BLOCK.finditer(text) for line in _lines(at[2])]
    rest = FENCED.sub(lambda block: " " * len(block[0]), text)
    found += [(at.start(), at[1]) for pattern in (INDENTED, INLINE) for at in pattern.finditer(rest)]
    ordered = [_bare(command) for _, command in sorted(found, key=lambda one: one[0])]
    return list(dict.fromkeys(ordered))


def _lines(block: str) -> list[str]:
    return [line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def _bare(command: str) -> str:
    """Without its comment, and on one line."""
    return re.sub(r"\s+", " ", re.split(r"\s#\s|\s{3,}(?=[a-z])", command)[0]).strip()


class Reader:
    """Follows documents; use as a context manager, which ends the programs that run."""

    def __init__(self, folder: Path) -> None:
        self._document = ""
        self._left: list[str] = []
        self._programs: list[subprocess.Popen[str]] = []
        self._started = 0
        self._port = free_port()
        self.folder = folder
        self.log = folder / "reader.log"
        self.names = dict.fromkeys(("SCHEDULER", "BROKER", "RELAY", "HOST"), "127.0.0.1")  # what placeholders stand for

    def __enter__(self) -> Self:
        commands = self.folder / "bin"
        commands.mkdir()
        (commands / "swarm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m client "$@"\n')
        (commands / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        for name in ("swarm", "python"):
            (commands / name).chmod(0o755)
        (self.folder / "home").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWARM_", "XDG_"))}
        # Variables that the documents name, so that nothing of this machine is in the way.
        own = {"SWARM_SCHEDULER": f"127.0.0.1:{self._port}", "SWARM_HTTP_PORT": "0", "SWARM_THREADS": "1"}
        own["SWARM_DRAIN_TIMEOUT"] = "0"
        self._environ = kept | own | {"HOME": str(self.folder / "home"), "PYTHONPATH": str(ROOT)}
        self._environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
        return self

    def __exit__(self, *_: object) -> None:
        self.stops()

    def opens(self, document: str) -> None:
        """Begin a document."""
        self.closes()
        self._document, self._left = document, commands_of((ROOT / document).read_text())

    def closes(self) -> None:
        """Check that every command of the document was typed, or has a reason not to be."""
        assert not self._left, f"{self._document}: nobody has typed {self._left}"

    def sits_at(self, machine: str) -> None:
        """Go on in another home, as on another machine."""
        home = self.folder / machine
        home.mkdir(exist_ok=True)
        self._environ["HOME"] = str(home)

    def passes(self, command: str) -> None:
        """The next command of the document is not typed."""
        assert self._left, f"{self._document} has no further command, not {command}"
        assert self._left[0] == command, f"{self._document}: next comes {self._left[0]}, not {command}"
        del self._left[0]

    def passes_all(self, reasons: dict[str, str]) -> None:
        """Pass the next ones that match a pattern for which there is a reason not to type them."""
        while self._left and any(re.fullmatch(pattern, self._left[0]) for pattern in reasons):
            del self._left[0]

    def types(self, command: str, *more: str, where: Mapping[str, str] | None = None) -> str:
        """Type the next command of the document, with `more` flags; gives what it printed.

        `where` says what its examples stand for, such as the number of a step.
        """
        self.passes(command)
        for example, value in (where or {}).items():
            assert example in command
            command = command.replace(example, value)
        return self.also(" ".join((command, *more)))

    def also(self, command: str) -> str:
        """Type a command of which the document only speaks; gives what it printed."""
        typed = self._filled(command)
        with self.log.open("a") as log:
            log.write(f"$ {typed}\n")
            log.flush()
            ran = subprocess.run(
                ["bash", "-c", f"{typed}\nexit $?"],  # the shell stays, as that of a person does
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=COMMAND_S_MAX,
                check=False,
            )
            log.write(ran.stdout)
        assert ran.returncode == 0, f"{typed} ended with {ran.returncode}:\n{self.log.read_text()[-3000:]}"
        return ran.stdout.strip()

    def starts(self, command: str, *more: str) -> dict[str, Any]:
        """Start the next command of the document and wait until it can be used; gives its ready line."""
        self.passes(command)
        return self.runs(" ".join((command, *more)))

    def runs(self, command: str) -> dict[str, Any]:
        """Start a program that a document takes for granted; as `starts`."""
        typed = self._filled(command)
        verb = next(word for word in typed.split() if word in PROGRAMS)
        own = {"SWARM_LISTEN": f"127.0.0.1:{self._port if verb == 'scheduler' else 0}"}
        if verb == "up":
            typed, own = f"{typed} --port {self._port}", {}
        if verb == "scheduler" or "--broker" in typed:  # it is what SWARM_SCHEDULER is for
            own["SWARM_SCHEDULER"] = ""
        log = self.folder / f"program-{self._started}.log"
        self._started += 1
        with log.open("w") as said, self.log.open("a") as notes:
            notes.write(f"$ {typed} &\n")
            environ = {name: value for name, value in (self._environ | own).items() if value}
            program = subprocess.Popen(
                dying_with_parent([*ASIDE, "bash", "-c", f"exec {typed}"]),
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                text=True,
            )
        self._programs.append(program)

        def ready() -> dict[str, Any]:
            found = ready_in(log, program)
            return {"up": True} if verb == "up" and "Ctrl-C stops everything" in log.read_text() else found

        return dict(until(f"{typed} is ready", ready, timeout_s=COMMAND_S_MAX))

    def stops(self) -> None:
        """End the programs that run, the last one first, as Ctrl-C would."""
        while self._programs:
            program = self._programs.pop()
            program.send_signal(signal.SIGINT)
            try:
                program.wait(timeout=300)
            except subprocess.TimeoutExpired:
                program.send_signal(signal.SIGINT)
                program.wait(timeout=300)

    def _filled(self, command: str) -> str:
        """The command with what its placeholders stand for."""
        typed = command.replace("PEER:7951", "127.0.0.1:0").replace("cuda:0", "cpu")
        typed = re.sub(r":7950\b", f":{self._port}", re.sub(r"RELAY:7955", "127.0.0.1:0", typed))
        return PLACEHOLDER.sub(lambda word: self.names[word[0]], typed)
