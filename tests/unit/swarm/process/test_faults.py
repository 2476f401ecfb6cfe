"""swarm.process.faults: the machine's errors have words, and a bug is told as one."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client.cli import VERBS, run
from swarm.errors import InvalidConfig, OutOfMemory, SwarmError, UsageError
from swarm.process.faults import HINTS, is_bug, missing_package, told
from swarm.text import listed
from tests.support.effort import others

ROOT = Path(__file__).parents[4]
UNLOADED = "a library of this installation cannot be loaded: "


def _broken(error: BaseException) -> Iterator[str]:
    yield "a"
    raise error


def _raised(error: BaseException) -> BaseException:
    """The exception, on its way through a module of ours."""
    try:
        listed(_broken(error))
    except BaseException as caught:
        return caught
    raise AssertionError("it raises nothing")


@pytest.mark.parametrize("number", list(HINTS), ids=lambda number: errno.errorcode[number])
def test_an_error_of_the_machine_names_the_file_and_what_to_do(number: int) -> None:
    found = told(_raised(OSError(number, os.strerror(number), "/data/x\x1b[2J")))
    assert (type(found), found.hint) == (InvalidConfig, HINTS[number])
    assert found.message.startswith("/data/x [2J: ")
    assert "unexpected" not in found.message


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (socket.gaierror(-2, "Name or service not known"), InvalidConfig, ".* is not known here.*"),
        (MemoryError(), OutOfMemory, ".*"),
        (RuntimeError("can't start new thread"), SwarmError, ".*no more threads.*"),
        (UnicodeEncodeError("utf-8", "job-\udcff", 4, 5, "surrogates not allowed"), SwarmError, '"job- " is no UTF-8'),
        (OSError(errno.ENOSPC, "No space left on device"), InvalidConfig, "the disk is full"),
        (UsageError("wrong flag"), UsageError, "wrong flag"),
        *(
            (error, InvalidConfig, re.escape(f"{UNLOADED}{error}"))
            for error in (
                ImportError("libtorch_cpu.so: failed to map segment from shared object"),
                ImportError("/lib/libm.so.6: version `GLIBC_2.38' not found (required by /x/core.so)"),
                ImportError("/x/_C.abi3.so: undefined symbol: PyType_GetName"),
                OSError("libcudart.so.12: cannot open shared object file: No such file or directory"),
            )
        ),
    ],
)
def test_other_causes_outside_the_program_have_words_too(error: Exception, kind: type, message: str) -> None:
    """With little memory, torch was not loaded, and the person was asked to report that as a bug."""
    found = told(_raised(error))
    assert isinstance(found, kind)
    assert re.fullmatch(message, found.message)
    assert not is_bug(found)
    assert not found.message.startswith(UNLOADED) or "memory" in found.hint


def test_what_is_missing_is_said_where_the_error_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only /tmp, and a folder that was removed under a shell, were both told as "check the path"."""

    def nothing_works(*_: object) -> str:
        places = ["/tmp", "/var/tmp"]
        raise FileNotFoundError(errno.ENOENT, f"No usable temporary directory found in {places}")

    monkeypatch.setattr(tempfile, "_get_default_tempdir", nothing_works)
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(FileNotFoundError) as full:
        tempfile.gettempdir()
    assert "no folder for temporary files" in told(full.value).message
    assert "TMPDIR" in told(full.value).hint
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as gone:
        Path.cwd()
    assert told(gone.value).message == "the folder that you are in is gone"
    monkeypatch.chdir(tmp_path)
    assert told(FileNotFoundError(errno.ENOENT, "No such file or directory")).hint == HINTS[errno.ENOENT]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("what is this"),
        KeyError("x"),
        AssertionError(),
        OSError(errno.EBADF, "Bad file descriptor"),
        OSError("no number"),
        ImportError("cannot import name 'x' from 'swarm.text' (/x/text.py)"),
        ValueError("embedded null byte"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
)
def test_what_was_not_foreseen_is_told_as_a_bug_with_its_type_text_and_place(error: Exception) -> None:
    found = told(_raised(error))
    assert (is_bug(found), found.code) == (True, "E0000")
    assert type(error).__name__ in found.message
    assert str(error) in found.message
    assert re.search(r", at swarm\.text:\d+$", found.message)
    assert "this is a bug" in found.hint


def test_of_several_errors_a_bug_is_told_first() -> None:
    group = BaseExceptionGroup("tasks", [OSError(errno.EMFILE, "Too many open files"), UsageError("a"), KeyError("b")])
    assert "KeyError" in told(group).message
    assert told(BaseExceptionGroup("tasks", [UsageError("a"), OSError(errno.EMFILE, "x")])).message == "a"


def test_a_package_that_no_extra_brings_is_a_fault_of_ours() -> None:
    for name in ("swarm.nothing", None):
        assert missing_package(ModuleNotFoundError("no", name=name)) is None
    found = missing_package(ModuleNotFoundError("no", name="pyarrow.parquet"))
    assert found is not None
    assert "swarm-stages[data]" in found.hint


# What people name on the command line ---------------------------------------------------------------------------------

# Verbs that take the name of a job as `status` does: for each the empty name and one more, in `make test-all` all.
LIKE_STATUS = ("logs", "wait", "explain", "history", "cancel", "pause", "resume")
CALLS: dict[str, list[str]] = {
    "submit": ["submit", "@"],
    "submit --dry-run": ["submit", "--dry-run", "@"],
    "submit --set": ["submit", "--dry-run", "job.toml", "--set", "@"],
    "--config": ["ls", "--config", "@"],
    "--profile": ["ls", "--profile", "@"],
    "--scheduler": ["ls", "--scheduler", "@:7950"],
    "audit": ["audit", "@"],
    "login": ["login", "--join-file", "@"],
    "up --job": ["up", "--job", "@"],
    "up --data-dir": ["up", "--data-dir", "@", "--job", "none.toml"],
    "doctor": ["doctor", "--bundle", "@"],
    "pull": ["pull", "job", "@"],
    "trace": ["trace", "job", "--out", "@"],
    **{verb: [verb, "@"] for verb in ("status", *LIKE_STATUS)},
    "verb": ["@"],
}
NAMED: dict[str, str] = {
    "a folder": "folder",
    "below a file": "file/below",
    "no text": "binary",
    "an undecodable name": "name-\udcff",
    "a long name": "n" * 300,
    "a link to itself": "loop",
    "the null device": "/dev/null",
    "nothing": "none/such",
    "an empty name": "",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80" * 50)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "job.toml").write_text('name = "tiny"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))
    return tmp_path


TRIED = [
    pytest.param(words, name, id=f"{call}-{said}")
    for call, words in CALLS.items()
    for said, name in NAMED.items()
    if call not in LIKE_STATUS or not name or said == list(NAMED)[LIKE_STATUS.index(call)] or others(said)
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("words", "name"), TRIED)
def test_nothing_that_a_person_can_name_is_told_as_a_bug(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """swarm doctor --bundle /dev/null met an unexpected struct.error."""
    if words[0] == "doctor":
        monkeypatch.setattr("client.doctor.probes.machine", lambda: iter(()))
    run([word.replace("@", name) for word in words])
    err = capsys.readouterr().err
    assert "E0000" not in err
    assert "Traceback" not in err


FAULTS = (errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ENOMEM)
AT_WORK: dict[str, list[str]] = {
    "submit": ["submit", "job.toml"],
    "up": ["up", "--data-dir", "data", "--job", "job.toml"],
    "pull": ["pull", "job", "model"],
    "ls": ["ls"],
    "audit": ["audit", "binary"],
    "doctor": ["doctor", "--bundle", "bundle.zip"],
    "login": ["login", "--join-file", "file"],
}


OPENING = ("builtins.open", "io.open", "os.open", "os.mkdir")
# Each error beside each command, with one of the calls: so each call meets each error and each command too, some twice.
# In `make test-all` any three together.
STRUCK = [
    pytest.param(call, words, number, id=f"{call}-{verb}-{errno.errorcode[number]}")
    for at, (verb, words) in enumerate(AT_WORK.items())
    for nth, number in enumerate(FAULTS)
    for place, call in enumerate(OPENING)
    if place == (at + nth) % 4 or others(call)
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("call", "words", "number"), STRUCK)
def test_an_error_of_the_machine_at_any_call_is_told_in_its_words(
    call: str,
    words: list[str],
    number: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number), "some/where")

    monkeypatch.setattr("client.doctor.probes.machine", lambda: iter(()))
    with monkeypatch.context() as broken:
        broken.setattr(call, fail)
        code = run(words)
    err = capsys.readouterr().err
    assert "E0000" not in err, err
    assert "Traceback" not in err, err
    assert code != 0 or words[0] in ("ls", "login", "doctor", "audit")


PROGRAMS: dict[str, list[str]] = {
    "scheduler": ["scheduler", "--insecure", "--broker", "none", "--http-port", "none"],
    "stage server": ["stage_server", "--insecure", "--scheduler", "127.0.0.1:1", "--http-port", "none"],
}
MISTAKES: dict[str, Callable[[str], list[str]]] = {
    "a file as data folder": lambda port: ["--data-dir", "file"],
    "a port in use": lambda port: ["--data-dir", "new", "--listen", f"127.0.0.1:{port}"],
    "a host that nobody knows": lambda port: ["--data-dir", "new", "--listen", "no.such.invalid:0"],
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_program_that_cannot_start_says_why_in_two_lines(
    program: list[str], mistake: Callable[[str], list[str]], here: Path
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        flags = mistake(str(busy.getsockname()[1]))
        done = subprocess.run(
            [sys.executable, "-P", "-m", *program, *flags],
            env=os.environ | {"PYTHONPATH": str(ROOT), "SWARM_DATA_DIR": str(here / "other")},
            cwd=here,
            capture_output=True,
            text=True,
            timeout=120,
        )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert done.returncode in (2, 3), done.stderr
    assert lines[0].startswith(("error[E0200]: ", "error[E0300]: ")), done.stderr
    assert "Traceback" not in done.stderr


def test_every_verb_is_a_known_program_or_in_the_table_of_calls() -> None:
    """So that a new verb gets its rows here."""
    tried = {words[0] for words in (*CALLS.values(), *AT_WORK.values())}
    without_files = {
        *("ls", "islands", "top", "rm", "gc", "checkpoints", "peers", "token", "identity", "ca"),
        *("track", "version"),
    }
    assert {name for name, verb in VERBS.items() if not verb.program} == (tried | without_files) - {"@"}
