"""The first seconds of our programs, in which they import: quiet when interrupted, quick to refuse."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.process import startup

REPOSITORY = Path(__file__).parents[4]
PROGRAMS = [
    (("client", "ls"), "rich"),
    (("scheduler",), "sqlalchemy"),
    (("stage_server", "--scheduler", "127.0.0.1:1"), "torch"),
    (("swarm.reference", "job.toml"), "torch"),
]
JOB = """
name = "tiny"
[model]
config = {hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4}
[data]
source = "*.toml"
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def _start(here: Path, library: str, body: str, *arguments: str) -> subprocess.Popen[str]:
    """`python -m ARGUMENTS` in which `library` is a module with this body."""
    (here / f"{library}.py").write_text(body)
    environment = {name: value for name, value in os.environ.items() if name != "SWARM_INSECURE"}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=here,
        env=environment | {"PYTHONPATH": f"{here}{os.pathsep}{REPOSITORY}", "SWARM_DATA_DIR": str(here)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(("arguments", "library"), PROGRAMS)
def test_ctrl_c_while_python_imports_is_no_traceback(here: Path, arguments: tuple[str, ...], library: str) -> None:
    body = "import time\nprint('importing', flush=True)\ntime.sleep(250)\n"
    with _start(here, library, body, *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("stage_server", "--nonsense"), 2, "error[E0200]: no such option: --nonsense"),
        (("stage_server",), 3, "error[E0300]: say where the scheduler is"),
        (("stage_server", "--scheduler", "h:1", "--threads", "99999"), 3, "error[E0300]: --threads 99999 is too many"),
        (("stage_server", "--scheduler", "h:1", "--threads", "many"), 2, "error[E0200]: --threads is auto or"),
        (("scheduler", "--join-listen", "nowhere"), 3, "error[E0300]: --join-listen nowhere is not HOST:PORT"),
        (("scheduler", "--join-listen", "127.0.0.1:99999"), 3, "error[E0300]: --join-listen 127.0.0.1:99999 is not"),
        (("swarm.reference", "nothing.toml"), 3, "error[E0300]: job file nothing.toml does not exist"),
        (("swarm.reference", "job.toml", "--threads", "0"), 2, "error[E0200]: --threads 0"),
        (("swarm.reference", "job.toml", "--set", "training.stepps=1"), 3, "error[E0300]: job.toml: unknown key"),
        (("swarm.reference", "job.toml", "--out", "."), 10, "error[E1000]: . exists already"),
        (("swarm.reference", "job.toml", "--out", "job.toml/x"), 3, "error[E0300]: job.toml/x cannot be written: "),
    ],
)
def test_what_is_wrong_is_said_before_torch_is_loaded(
    here: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    with _start(here, "torch", "raise SystemExit('torch was loaded')\n", *arguments) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (code, "")
    assert err.startswith(message)


@pytest.mark.parametrize("kinds", ["B s", "S b", "BS ", " bs"])
def test_a_flag_wins_over_the_variable_of_the_other_way_to_a_scheduler(
    here: Path, monkeypatch: pytest.MonkeyPatch, kinds: str
) -> None:
    """B and S: the variables that are set, of a broker and of a scheduler; b and s: the flags."""
    flags: list[str] = []
    for name, value in (("broker", "mqtt://h:2"), ("scheduler", "h:1")):
        monkeypatch.delenv(f"SWARM_{name.upper()}", raising=False)
        if name[0].upper() in kinds:
            monkeypatch.setenv(f"SWARM_{name.upper()}", value)
        flags += [f"--{name}", value] * (name[0] in kinds)
    message = "others cannot dial 0.0.0.0:1" if len(kinds.split()) == 2 else "give either --broker or --scheduler"
    # An address that nobody can dial is refused after that choice, and before anything starts.
    with _start(here, "torch", "", "stage_server", "--listen", "0.0.0.0:1", *flags) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode in (2, 3)
    assert err.partition(": ")[2].startswith(message)


def test_a_busy_port_is_one_error_without_grpcs_own_line(here: Path) -> None:
    flags = ("--broker", "none", "--http-port", "none", "--data-dir", str(here / "data"))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with _start(here, "unused", "", "scheduler", "--listen", address, *flags) as process:
            _, err = process.communicate(timeout=120)
    assert process.returncode == 3
    assert err.startswith(f"error[E0300]: cannot listen at {address}: ")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(("redirection", "code"), [(">&-", 0), ("> /dev/full", 3), ("-o json > /dev/full", 3)])
def test_an_output_that_is_closed_or_full_is_no_traceback(here: Path, redirection: str, code: int) -> None:
    """`swarm ls >&-` spoke of NoneType, a full disk ended in two tracebacks."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = f"{sys.executable} -m client submit --dry-run job.toml {redirection}"
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=here, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True
    )
    assert done.returncode == code, done.stderr
    assert not [word for word in (b"Traceback", b"unexpected", b"Exception") if word in done.stderr]
    assert code == 0 or b"error[E0300]: the disk is full" in done.stderr


def test_a_terminal_that_knows_ascii_alone_shows_curves_and_cut_cells() -> None:
    """The curve of swarm history was "????" there."""
    code = (
        "from swarm.process.startup import take_any_text; take_any_text()\n"
        "from rich.console import Console\n"
        "from rich.table import Table\n"
        "from client.board import sparkline\n"
        "print(sparkline(range(8)))\n"
        "table = Table('NAME', box=None); table.columns[0].no_wrap = True; table.add_row('a-long-name')\n"
        "Console(width=8).print(table)\n"
        "print('Zo\\u00eb \\udcff')"
    )
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ascii_alone, capture_output=True, cwd=REPOSITORY, check=True
    )
    curve, _, cell, name = told.stdout.decode("ascii").splitlines()
    assert (curve, cell.strip(), name) == (".:-=+*#@", "a-lon~", "Zo? ?")


@pytest.mark.parametrize(("soft", "hard", "expected"), [(200, 400, 400), (300, 300, 300)])
def test_a_program_may_open_what_the_system_lets_it(soft: int, hard: int, expected: int) -> None:
    """A scheduler that was started in a shell had 1024 files, which one stranger dialled up."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from swarm.process.startup import files_max, open_more_files\n"
        "open_more_files(); print(files_max())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert int(told.stdout) == expected


@pytest.mark.parametrize(("lets", "expected"), [(1 << 20, startup.FILES_WANTED), (20_000, 10_240), (1000, 256)])
def test_a_system_that_refuses_many_files_is_asked_for_fewer(
    lets: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS shows no hard limit and refuses more than its own: a scheduler stayed at 256."""
    limits = [256, resource.RLIM_INFINITY]

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > lets:
            raise ValueError("not allowed")
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    startup.open_more_files()
    assert startup.files_max() == expected
