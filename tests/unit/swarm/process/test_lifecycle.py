"""How processes begin: folders of their own, addresses that others cannot reach."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import scheduler.app
import stage_server.app
from stage_server.options import MemoryShare, StageServerOptions
from swarm.errors import InvalidConfig, NotAllowed, UsageError
from swarm.process.lifecycle import (
    Farewell,
    check_announce,
    flags_given,
    lock_first,
    lock_folder,
    secrets_in_files,
)

HOLD = """
import sys, time
from pathlib import Path
from swarm.process.lifecycle import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_has_one_process_until_that_is_killed(tmp_path: Path) -> None:
    """Two stage servers with one identity pushed each other out for ever."""
    folder = tmp_path / "new" / "folder"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(NotAllowed, match=rf"another process \(pid {holder.pid}\) is using .*/new/folder "):
                lock_folder(folder)
        finally:
            holder.send_signal(signal.SIGKILL)
    with lock_folder(folder):
        assert (folder / "lock").read_text() == f"{os.getpid()}\n"
    lock_folder(folder).close()


def test_the_first_free_folder_is_taken(tmp_path: Path) -> None:
    folders = tuple(tmp_path / str(number) for number in range(3))
    with lock_folder(folders[0]):
        first, lock = lock_first(folders)
        second, other = lock_first(folders)
        assert (first, second) == folders[1:]
        with pytest.raises(NotAllowed, match=r"is using .*/2"):
            lock_first(folders)
        lock.close()
        other.close()
    first, lock = lock_first(folders)
    lock.close()
    assert first == folders[0]


def test_a_folder_that_cannot_be_made_or_locked_is_named(tmp_path: Path) -> None:
    """On a full disk the lock was written once more as it was closed: "the disk is full", and not which."""
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match=r"file/below cannot be used: Not a directory"):
        lock_folder(tmp_path / "file" / "below")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(InvalidConfig, match=f"^{tmp_path} cannot be locked: File too large"):
            lock_folder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _scheduler(folder: Path, http_host: str = "127.0.0.1") -> scheduler.app.SchedulerOptions:
    return scheduler.app.SchedulerOptions("127.0.0.1:0", "", http_host, 0, "sqlite", "none", folder, insecure=False)


def _stage_server(folder: Path, http_host: str = "127.0.0.1") -> StageServerOptions:
    return StageServerOptions(
        broker="",
        scheduler="127.0.0.1:1",
        swarm="default",
        listen="127.0.0.1:0",
        announce="",
        device="cpu",
        stage=-1,
        threads=1,
        max_memory=MemoryShare.parse("1GiB"),
        http_host=http_host,
        http_port=0,
        data_dirs=(folder,),
        connect_retry_s_max=1.0,
        orphan_timeout_s=1.0,
        drain_timeout_s=0.0,
        insecure=False,
        join=None,
        log_level="info",
        log_format="json",
        allow_hub=(),
        hub_token=False,
    )


async def test_a_second_scheduler_or_stage_server_on_one_folder_is_refused(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        async with asyncio.timeout(120):
            with pytest.raises(NotAllowed, match="is using"):
                await scheduler.app.serve(_scheduler(tmp_path))
            with pytest.raises(NotAllowed, match="is using"):
                await stage_server.app.serve(_stage_server(tmp_path), Farewell())


@pytest.mark.parametrize("listen", ["0.0.0.0:7950", "[::]:7950", ":7950"])
def test_an_address_that_nobody_can_dial_is_not_announced(listen: str) -> None:
    """Behind --listen 0.0.0.0, two machines each dialled themselves."""
    with pytest.raises(UsageError, match="others cannot dial") as caught:
        check_announce(listen, "")
    assert "add --announce HOST:PORT; this machine has" in caught.value.hint
    check_announce(listen, "10.0.0.5:7950")
    check_announce("10.0.0.5:7950", "")
    for wrong in ("0.0.0.0:7950", "10.0.0.5", "10.0.0.5:0", ":7950"):
        with pytest.raises(UsageError, match="--announce is HOST:PORT"):
            check_announce(listen, wrong)


def test_offered_memory_is_a_size_or_a_share_of_what_is_free() -> None:
    for text, offered in (("90%", 900), ("12.5%", 125), ("100%", 1000), ("2KiB", 2048), ("7", 7)):
        assert MemoryShare.parse(text).of(1000, 2048) == offered
    for text in ("", "0", "0%", "101%", "nan%", "much", "-1", "-5%", "%", "1GB"):
        with pytest.raises(UsageError, match="--max-memory is a size or a share"):
            MemoryShare.parse(text)


async def test_more_memory_than_the_device_has_is_refused(tmp_path: Path) -> None:
    """With --max-memory 10TiB on a machine of 23 GB, models were placed that could not fit."""
    with pytest.raises(InvalidConfig, match=r"--max-memory 2\.0 KiB is more than the 2\.0 KiB of the device") as caught:
        MemoryShare.parse("2049").of(1000, 2048)
    assert "1000 B are free now" in caught.value.hint
    options = replace(_stage_server(tmp_path), max_memory=MemoryShare.parse("9000TiB"), insecure=True)
    async with asyncio.timeout(60):
        with pytest.raises(InvalidConfig, match=r"--max-memory 9000\.0 TiB is more than"):
            await stage_server.app.serve(options, Farewell())


def test_a_program_whose_extra_is_not_installed_says_which(tmp_path: Path) -> None:
    """Without torch `swarm stage-server` ended with a traceback."""
    (tmp_path / "torch.py").write_text('raise ModuleNotFoundError("No module named torch", name="torch")')
    program = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[0] = 'stage_server'; "
    program += "runpy.run_module('stage_server', run_name='__main__')"
    command = [sys.executable, "-c", program, "--scheduler", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == InvalidConfig.exit_code, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert 'pip install "swarm-stages[model]"' in done.stderr


def test_a_password_may_be_in_a_file(tmp_path: Path) -> None:
    assert flags_given(["--db", "x", "--broker=mqtt://a", "-v", "data"]) == {"db", "broker"}
    file = tmp_path / "db"
    file.write_text("postgresql://me:secret@host/swarm\n")
    named = {"SWARM_DB_FILE": str(file), "SWARM_LISTEN_FILE": str(file)}
    assert secrets_in_files(named, {"db", "broker", "listen"}) == {"db": "postgresql://me:secret@host/swarm"}
    assert secrets_in_files(named, {"broker"}) == {}, "a program without the flag does not mind"
    assert secrets_in_files({}, {"db"}) == {}
    with pytest.raises(InvalidConfig, match="both set"):
        secrets_in_files(named | {"SWARM_DB": "sqlite://"}, {"db"})
    file.unlink()
    with pytest.raises(InvalidConfig, match=r"SWARM_DB_FILE = .*No such file"):
        secrets_in_files(named, {"db"})
    for content, words in ((b"", "not one line"), (b"a\nb", "not one line"), (b"\xff", "no text")):
        file.write_bytes(content)
        with pytest.raises(InvalidConfig, match=f"SWARM_DB_FILE = .*{words}"):
            secrets_in_files(named, {"db"})


def test_a_scheduler_reads_its_database_from_a_file_unless_a_flag_names_one(tmp_path: Path) -> None:
    (tmp_path / "db").write_text("nonsense://x")
    command = [sys.executable, "-m", "scheduler", "--data-dir", str(tmp_path / "data"), "--http-port", "none"]
    for flags, told in (((), "nonsense"), (("--db", "other://y"), "other")):
        both = {"SWARM_DB": "third://z"} if flags else {}
        environment = os.environ | {"SWARM_DB_FILE": str(tmp_path / "db")} | both
        ended = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 3
        assert "error[" in ended.stderr
        assert told in ended.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [("raise KeyboardInterrupt", 130), ("raise typer.Exit(130)", 130), ("raise typer.Abort", 130), ("pass", 0)],
)
def test_a_command_that_was_interrupted_does_not_end_as_one_that_is_done(body: str, code: int) -> None:
    """`swarm plan ... > plan.json && swarm submit ...` went on with half a plan."""
    program = f"""import typer
from swarm.process.lifecycle import run_cli
app = typer.Typer()
@app.command()
def go():
    {body}
run_cli(app, "go")"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (code, "")


@pytest.mark.parametrize(
    ("announce", "forwarded"),
    [
        ("", False),
        ("127.0.0.1:7951", False),
        ("127.0.0.1:7952", True),
        ("203.0.113.7:7951", True),
        ("host.example.org:7951", True),
    ],
)
def test_a_port_of_another_machine_or_process_is_forwarded(tmp_path: Path, announce: str, forwarded: bool) -> None:
    assert replace(_stage_server(tmp_path), announce=announce).is_forwarded(7951) == forwarded
