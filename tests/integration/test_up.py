"""`swarm up` with stand-ins for its children: whatever happens, no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from client.records import Job
from client.shell import Shell
from client.up.demo import FOLDER, demo_job, free_name, report
from client.up.up import UpOptions, checked, up_and_wait
from swarm.errors import InvalidConfig
from swarm.job.spec import parse_job
from tests.support.processes import Forked, code_changes

REPOSITORY = Path(__file__).parents[2]

# A scheduler of one call: it lists the stage servers whose data folders hold a file "here".
SCHEDULER = """
import argparse, json, pathlib, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from swarm.wire import jobs_pb2 as pb, jobs_pb2_grpc
flags = argparse.ArgumentParser()
for name in ("--listen", "--http-port", "--broker", "--data-dir", "--checkpoint-root"):
    flags.add_argument(name)
flags = flags.parse_args()
folder = pathlib.Path(flags.data_dir)
folder.mkdir(parents=True, exist_ok=True)
(folder / "flags").write_text(json.dumps(vars(flags)))
class Jobs(jobs_pb2_grpc.JobsServicer):
    paused = {}
    def Pause(self, request, context):
        if (folder.parent.parent / "hangs").exists():
            print("told to pause", file=sys.stderr, flush=True)
            time.sleep(600)
        self.paused[request.job] = 0
        return pb.JobView(id=request.job, state="pausing")
    def Resume(self, request, context):
        (folder / "resumed").open("a").write(request.job + " ")
        return pb.JobView(id=request.job, state="queued")
    def Peers(self, request, context):
        here = list(folder.parent.glob("peer-*/here"))
        return pb.PeerList(peers=[pb.PeerView(id=path.parent.name, state="idle") for path in here])
    def Get(self, request, context):
        if request.job in self.paused:
            self.paused[request.job] += 1
            state = "pausing" if self.paused[request.job] < 3 else "paused"
            step, reason = (118, "waits for step 120") if state == "pausing" else (120, "")
            return pb.JobView(id=request.job, state=state, step=step, reason=reason)
        loss = json.loads((folder.parent.parent / "loss").read_text())
        return pb.JobView(id=request.job, state="succeeded", loss=loss, unigram_entropy=3.0, steps=1, step=1)
    def List(self, request, context):
        saved = {"saved-1": 118, "old-2": 100, "never-3": 0}
        views = [pb.JobView(id=job, state=request.state, step=118, checkpoint_step=saved[job]) for job in saved]
        held = folder.parent.parent / "open"
        if held.exists():
            views += [pb.JobView(id=f"tiny-{n}", name="tiny", state=held.read_text(), step=40, steps=90) for n in "21"]
        return pb.JobList(jobs=views)
server = grpc.server(ThreadPoolExecutor(4))
jobs_pb2_grpc.add_JobsServicer_to_server(Jobs(), server)
port = server.add_insecure_port(flags.listen)
server.start()
print("a line that is no news")
ready = {"schema": "swarm.ready/1", "role": "scheduler", "address": f"127.0.0.1:{port}", "http": "127.0.0.1:1"}
print(json.dumps(ready), flush=True)
time.sleep(600)
"""

PAUSED = 'paused = {"old-2": 2, "never-3": 2}'

STAGE_SERVER = """
import argparse, json, pathlib, signal, sys, time
flags = argparse.ArgumentParser()
for name in ("--listen", "--http-port", "--broker", "--threads", "--device", "--max-memory", "--data-dir"):
    flags.add_argument(name)
flags.add_argument("--drain-timeout")
flags.add_argument("--allow-hub")
flags.add_argument("--site")
flags.add_argument("--proxy")
flags.add_argument("--hub-token", action="store_true")
flags = flags.parse_args()
folder = pathlib.Path(flags.data_dir)
folder.mkdir(parents=True, exist_ok=True)
(folder / "flags").write_text(json.dumps(vars(flags)))
def asked_to_end(number, frame):
    (folder / "ended").touch()
    if not (folder.parent.parent / "stubborn").exists():
        sys.exit(143)
signal.signal(signal.SIGTERM, asked_to_end)
if (folder.parent.parent / "broken").exists() and folder.name == "peer-1":
    print("the device is on fire", file=sys.stderr)
    sys.exit(9)
peer = folder.name + "-id"
ready = {"schema": "swarm.ready/1", "role": "stage-server", "address": "127.0.0.1:2", "http": "", "peer": peer}
print(json.dumps(ready), flush=True)
while (folder.parent.parent / "late").exists() and folder.name == "peer-1":
    time.sleep(0.05)
(folder / "here").touch()
once, always = (folder.parent.parent / name for name in ("dies-once", "dies"))
while folder.name != "peer-1" or not (once.exists() or always.exists()):
    time.sleep(0.05)
once.unlink(missing_ok=True)
print("something gave way", file=sys.stderr)
sys.exit(9)
"""

CLIENT = """
import json, pathlib, sys, time
here = pathlib.Path.cwd()
verb = sys.argv[1]
if verb == "submit":
    print("following the job", *sys.argv[2:], file=sys.stderr, flush=True)
    if (here / "slow").exists():
        time.sleep(600)
    if (here / "job-fails").exists():
        (here / "dies").touch()
        time.sleep(1.0)
        print("error[E0100]: stage 1 lost its only replica", file=sys.stderr, flush=True)
        sys.exit(1)
    print("demo-123456")
    sys.exit(int((here / "code").read_text()) if (here / "code").exists() else 0)
if verb in ("status", "resume"):
    print("going on:", *sys.argv[1:4], file=sys.stderr, flush=True)
if verb == "pull":
    pathlib.Path(sys.argv[3]).mkdir()
    print("path", sys.argv[3])
"""

# Runs `swarm up` with the stand-ins; its flags are those of UpOptions.
DRIVER = """
import asyncio, json, sys
from pathlib import Path
from client.up import fleet, open_jobs, up
from client.shell import Shell
from client.up.between import SlowLink
from swarm.errors import SwarmError
here = Path.cwd()
def program(name):
    return (sys.executable, str(here / f"{name}.py"))
options = json.loads(sys.argv[1])
fleet.END_S_MAX = options.pop("end_s", 30.0)
if "usual_port" in options:
    up.DEFAULT_PORT = options.pop("usual_port")
else:
    options.setdefault("port", 0)  # two tests at a time would find the usual one free, and both take it
for name in ("job", "data_dir"):
    options[name] = Path(options[name]) if options.get(name) else None
if "between" in options:
    options["between"] = SlowLink.parse(options["between"])
options = up.UpOptions(**({"stages": 2, "replicas": 1, "device": "cpu", "demo": False} | options))
programs = fleet.Programs(program("scheduler"), program("stage"), program("client"), program("sample"))
fleet.START_S_MAX = up.START_S_MAX = 120.0
up.SILENT_S, open_jobs.UNSAVED_S_MAX = 0.5, 60.0
shell = Shell(insecure=True)
try:
    sys.exit(asyncio.run(up.up_and_wait(shell, up.checked(options), programs)))
except SwarmError as error:
    shell.error(error)
    sys.exit(error.exit_code)
"""

JOB = """\
name = "tiny"
[model]
config = { hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2 }
[data]
source = "*.py"
sequence_length = 8
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    programs = {
        "scheduler.py": SCHEDULER,
        "stage.py": STAGE_SERVER,
        "client.py": CLIENT,
        "driver.py": DRIVER,
        "sample.py": "print('def sampled(): pass')",
        "job.toml": JOB,
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


class Up:
    """A running `swarm up`, and everything that it started, seen from outside."""

    def __init__(self, here: Path, **options: object) -> None:
        self.here = here
        self.seen = ""
        self._family: dict[int, psutil.Process] = {}
        ours = ("SWARM_SCHEDULER", "SWARM_DB", "SWARM_JOIN")
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SWARM_") or name in ours}
        environment |= {"PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
        command = [str(here / "driver.py"), json.dumps({"data_dir": str(here / "data")} | options)]
        if code_changes():
            self.process: subprocess.Popen[str] | Forked = subprocess.Popen(
                # -P: the stand-ins' names hide packages of ours otherwise.
                [sys.executable, "-P", *command],
                cwd=here,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        else:
            self.process = Forked(command, None, environ=environment, folder=here)

    def stop(self, *numbers: signal.Signals) -> int:
        """Send a signal, and each further one once it says that it is stopping; gives the exit code."""
        first, *more = numbers or (signal.SIGINT,)
        self.process.send_signal(first)
        for number in more:
            self.until("stopping")
            self.process.send_signal(number)
        return self.end()

    def until(self, words: str) -> None:
        """Read what it says up to these words."""
        assert self.process.stdout is not None
        while words not in self.seen:
            line = self.process.stdout.readline()
            assert line, f"ended without saying {words!r}:\n{self.seen}"
            self.seen += line
        self.look()

    def look(self) -> None:
        """Remember who is there now."""
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._family[child.pid] = child
        except psutil.NoSuchProcess:
            pass

    def end(self) -> int:
        """Its exit code, once it ended; asserts that it left nobody behind."""
        out, _ = self.process.communicate(timeout=60)
        self.seen += out
        assert "Traceback" not in self.seen, self.seen
        self.assert_nobody_left()
        return self.process.returncode

    def assert_nobody_left(self) -> None:
        _, left = psutil.wait_procs(list(self._family.values()), timeout=60)
        here = [process for process in psutil.process_iter() if self._is_here(process)]
        for process in {*left, *here}:
            process.kill()
        assert not left
        assert not here

    def _is_here(self, process: psutil.Process) -> bool:
        """By its working directory: also those that nobody saw being born."""
        try:
            return process.pid != self.process.pid and Path(process.cwd()) == self.here
        except psutil.Error:
            return False


Start: TypeAlias = Callable[..., Up]


@pytest.fixture
def start(here: Path) -> Iterator[Start]:
    """Starts `swarm up` with these options."""
    ups: list[Up] = []

    def started(**options: object) -> Up:
        ups.append(Up(here, **options))
        return ups[-1]

    yield started
    for up in ups:
        if up.process.poll() is None:
            up.process.kill()
            up.process.communicate()
        if up.process.stdout is not None:
            up.process.stdout.close()


def test_it_shows_what_runs_where_and_stops_on_ctrl_c(here: Path, start: Start) -> None:
    up = start(stages=2, replicas=2)
    up.until("Ctrl-C stops everything")
    for words in ("mqtt://127.0.0.1:", "peer-0-id", "peer-3-id", "http://127.0.0.1:1/\n", "swarm submit FILE"):
        assert words in up.seen
    shown = {int(number) for number in re.findall(r"  process (\d+)", up.seen)}
    assert len(shown) == 5
    assert shown < {child.pid for child in psutil.Process(up.process.pid).children(recursive=True)}
    assert up.stop() == 130
    assert len(list(here.glob("data/peer-*/ended"))) == 4


def test_the_first_ctrl_c_saves_jobs_and_the_next_start_goes_on_with_them(here: Path, start: Start) -> None:
    """A job at step 46 began again at 0, as it saves every 500 steps: what one Ctrl-C ended was lost."""
    up = start()
    up.until("Ctrl-C stops everything")
    assert up.stop() == 130
    assert "saving 2 jobs: old-2, never-3; once more kills" in up.seen
    for job in ("old-2", "never-3"):
        assert f"job {job} is pausing at step 118: waits for step 120\njob" in up.seen
        assert f"job {job} is saved at step 120\n" in up.seen
    assert "saved-1" not in up.seen
    assert json.loads((here / "data" / "saved-jobs.json").read_text()) == ["old-2", "never-3"]

    (here / "scheduler.py").write_text((here / "scheduler.py").read_text().replace("paused = {}", PAUSED))
    again = start()
    again.until("Ctrl-C stops everything")
    assert "job never-3 goes on from step 120" in again.seen
    assert (here / "data" / "scheduler" / "resumed").read_text() == "old-2 never-3 "
    assert not (here / "data" / "saved-jobs.json").exists()
    again.process.kill()


def test_a_second_ctrl_c_does_not_wait_for_jobs_and_says_from_where_they_go_on(here: Path, start: Start) -> None:
    (here / "hangs").touch()
    up = start()
    up.until("Ctrl-C stops everything")
    up.process.send_signal(signal.SIGINT)
    up.until("saving 2 jobs")
    assert up.stop() == 130
    told = (
        "job old-2 is at step 118 and not saved; the next swarm up goes on with it from step 100, its newest checkpoint"
    )
    assert told in up.seen
    assert "job never-3 is at step 118 and not saved; the next swarm up goes on with it from step 0, as" in up.seen
    assert json.loads((here / "data" / "saved-jobs.json").read_text()) == ["old-2", "never-3"], "they may pause yet"


@pytest.mark.parametrize(
    ("listens", "end_s", "numbers", "code"),
    [
        (True, 30.0, [signal.SIGTERM], 143),
        (False, 6.0, [signal.SIGINT], 130),
        (False, 1e6, [signal.SIGINT, signal.SIGINT], 130),
    ],
)
def test_children_that_do_not_listen_are_killed_and_at_once_at_a_second_signal(
    here: Path, start: Start, listens: bool, end_s: float, numbers: list[signal.Signals], code: int
) -> None:
    if not listens:
        (here / "stubborn").touch()
    up = start(end_s=end_s)
    up.until("Ctrl-C stops everything")
    assert up.stop(*numbers) == code
    assert len(numbers) > 1 or len(list(here.glob("data/peer-*/ended"))) == 2


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.7, 1.2])
def test_a_signal_while_it_starts_leaves_nobody(here: Path, start: Start, delay_s: float) -> None:
    up = start(data_dir="")
    up.until("starting 2 stages")
    time.sleep(delay_s)  # spread over the start, not for luck: any moment must do
    up.look()
    assert up.stop(signal.SIGTERM) == 143
    folder = re.search(r"logs in (\S+)/logs", up.seen)
    assert folder is not None
    assert not Path(folder[1]).exists()


def test_children_die_with_a_killed_parent(here: Path, start: Start) -> None:
    up = start()
    up.until("Ctrl-C stops everything")
    up.process.kill()
    up.end()


def test_a_child_that_cannot_start_is_named_with_the_end_of_its_log(here: Path, start: Start) -> None:
    (here / "broken").touch()
    up = start()
    assert up.end() == 1
    assert "error[E0110]: peer-1 ended with exit code 9; the end of its log:\n  | the device is on fire" in up.seen


def test_a_stage_server_that_dies_is_started_again(here: Path, start: Start) -> None:
    """One lost stage server once took all the others, the scheduler and the broker with it."""
    up = start()
    up.until("Ctrl-C stops everything")
    (here / "data" / "peer-1" / "here").unlink()
    (here / "dies-once").touch()
    up.until("peer-1 ended with exit code 9, see ")
    while not (here / "data" / "peer-1" / "here").exists():
        assert up.process.poll() is None
        time.sleep(0.05)
    up.look()
    assert up.stop() == 130
    assert "it is started again" in up.seen
    assert len(list(here.glob("data/peer-*/ended"))) == 2


def test_a_stage_server_that_dies_again_and_again_ends_everything(here: Path, start: Start) -> None:
    up = start()
    up.until("Ctrl-C stops everything")
    (here / "dies").touch()
    assert up.end() == 1
    assert up.seen.count("it is started again") == 2
    assert "peer-1 ended 3 times within 60 s" in up.seen
    assert "  | something gave way" in up.seen


def test_a_slow_start_says_how_far_it_is(here: Path, start: Start) -> None:
    (here / "late").touch()
    up = start(stages=3)
    up.until("2 of 3 stage servers attached")
    (here / "late").unlink()
    up.until("Ctrl-C stops everything")
    assert up.stop() == 130


def test_a_jobs_own_error_comes_before_that_of_the_child_it_lost(here: Path, start: Start) -> None:
    (here / "job-fails").touch()
    up = start(job="job.toml")
    assert up.end() == 1
    assert 0 < up.seen.index("stage 1 lost its only replica") < up.seen.index("something gave way")


@pytest.mark.parametrize("code", [0, 7])
def test_with_a_job_the_exit_code_is_the_jobs(here: Path, start: Start, code: int) -> None:
    (here / "code").write_text(str(code))
    up = start(job="job.toml")
    assert up.end() == code
    assert "following the job" in up.seen


@pytest.mark.parametrize(
    ("state", "command"), [("running", "status --watch tiny-2"), ("stalled", "status"), ("paused", "resume tiny-2")]
)
def test_the_next_start_goes_on_with_the_open_job_of_that_name(
    here: Path, start: Start, state: str, command: str
) -> None:
    """After Ctrl-C the same command trained a second job beside the first, and halved the speed of both."""
    (here / "open").write_text(state)
    up = start(job="job.toml")
    assert up.end() == 0
    assert f"going on: {command}" in up.seen
    assert "job tiny-2 is open, at step 40 of 90: going on with it, as it was submitted" in up.seen
    assert "swarm cancel tiny-2" in up.seen
    assert "following the job" not in up.seen


@pytest.mark.parametrize(
    ("stopping", "stopped", "then"),
    [("pausing", "paused", "going on: resume tiny-2"), ("cancelling", "", "following the job")],
)
def test_the_next_start_waits_for_an_open_job_that_is_being_stopped(
    here: Path, start: Start, stopping: str, stopped: str, then: str
) -> None:
    """It was followed, and a job that is paused is followed for ever."""
    (here / "open").write_text(stopping)
    up = start(job="job.toml")
    up.until(f"job tiny-2 is {stopping}: waiting until it has stopped")
    if stopped:
        (here / "new").write_text(stopped)
        (here / "new").rename(here / "open")
    else:
        (here / "open").unlink()
    assert up.end() == 0
    assert then in up.seen


def test_a_scheduler_that_lists_no_jobs_is_an_error_with_a_type(here: Path, start: Start) -> None:
    (here / "open").mkdir()  # its stand-in fails
    up = start(job="job.toml")
    assert up.end() == 1
    assert "error[E" in up.seen
    assert "unexpected" not in up.seen
    assert "AioRpcError" not in up.seen


@pytest.mark.parametrize("place", ["s3://bucket/runs", "/mnt/runs", ""])
def test_its_scheduler_may_keep_checkpoints_where_the_job_of_its_user_says(
    here: Path, start: Start, place: str
) -> None:
    (here / "job.toml").write_text(f'{JOB}[checkpoint]\ndir = "{place}"\n')
    up = start(job="job.toml")
    assert up.end() == 0
    flags = json.loads((here / "data/scheduler/flags").read_text())
    assert flags["checkpoint_root"] == (place or None)
    assert "@" not in flags["broker"], "every user of the machine can read the flags"


def test_a_job_that_leaves_its_shape_open_gets_the_one_that_was_asked_for(here: Path, start: Start) -> None:
    up = start(job="job.toml", stages=3, islands=2)
    assert up.end() == 0
    assert "starting 3 stages x 1 replica x 2 islands" in up.seen
    assert "--set pipeline.stages=2" in up.seen  # the model has two layers
    assert "--set islands.count=2 --set averaging.mode=diloco" in up.seen
    assert len(list(here.glob("data/peer-*/ended"))) == 6


def test_islands_with_a_slow_link_between_them_are_sites_of_their_own(here: Path, start: Start) -> None:
    up = start(job="job.toml", islands=2, between="50Mbit,100ms")
    assert up.end() == 0
    assert "between islands: 0 B from 0 to 1, 0 B from 1 to 0" in up.seen
    flags = [json.loads((here / f"data/peer-{number}/flags").read_text()) for number in range(4)]
    assert [flag["site"] for flag in flags] == ["site-0", "site-0", "site-1", "site-1"]
    assert [flag["listen"] for flag in flags] == ["127.0.1.1:0"] * 2 + ["127.0.2.1:0"] * 2
    proxies = [flag["proxy"].rpartition(":")[0] for flag in flags]
    assert proxies == ["127.0.1.1"] * 2 + ["127.0.2.1"] * 2


def test_ctrl_c_while_a_job_runs_ends_its_follower_too(here: Path, start: Start) -> None:
    (here / "slow").touch()
    up = start(job="job.toml")
    up.until("following the job")
    assert up.stop() == 130


def test_a_wrong_job_file_is_found_before_anything_starts(here: Path, start: Start) -> None:
    (here / "job.toml").write_text(JOB + "stepz = 1\n")
    up = start(job="job.toml")
    assert up.end() == 3
    assert "stepz" in up.seen
    assert not (here / "data").exists()


def test_the_port_of_the_scheduler_can_be_chosen_and_a_taken_one_is_told(here: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = start(port=port)
        assert refused.end() == 3
        assert f"cannot listen at 127.0.0.1:{port}: the port is in use" in refused.seen
        usual = start(usual_port=port)
        usual.until("Ctrl-C stops everything")
        assert re.search(rf"port {port} is taken: the scheduler listens at 127.0.0.1:\d+;", usual.seen)
        assert usual.stop() == 130
    chosen = start(port=port)
    chosen.until(f"scheduler   127.0.0.1:{port}")
    assert chosen.stop() == 130


def test_children_do_not_inherit_what_the_users_own_processes_belong_to(
    here: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A throw-away scheduler opened the database of the user's own one, and its stage servers joined that."""
    for name in ("SWARM_SCHEDULER", "SWARM_DB", "SWARM_JOIN"):
        monkeypatch.setenv(name, "127.0.0.1:1")
    for program in ("scheduler.py", "stage.py"):
        text = (here / program).read_text()
        mine = 'import os\nassert not {"SWARM_SCHEDULER", "SWARM_DB", "SWARM_JOIN"} & os.environ.keys()\n'
        (here / program).write_text(mine + text)
    up = start()
    up.until("Ctrl-C stops everything")
    assert up.stop() == 130


def test_two_swarms_do_not_share_a_folder(here: Path, start: Start) -> None:
    first = start()
    first.until("Ctrl-C stops everything")
    second = start()
    out, _ = second.process.communicate(timeout=60)
    assert second.process.returncode == 10
    assert "--data-dir" in out
    assert first.stop() == 130


@pytest.mark.parametrize(("loss", "code"), [(2.0, 0), (3.5, 1)])
def test_the_demo_trains_pulls_and_samples_or_says_that_it_learned_nothing(
    here: Path, start: Start, loss: float, code: int
) -> None:
    (here / "loss").write_text(str(loss))
    up = start(demo=True)
    assert up.end() == code
    assert f"Loss {loss:.3f}" in up.seen
    assert ("def sampled(): pass" in up.seen) == (code == 0)
    assert (here / FOLDER).exists() == (code == 0)


# The demo's job ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 6])
def test_the_demo_job_is_valid_for_any_number_of_stages(stages: int) -> None:
    spec = parse_job(tomllib.loads(demo_job(stages)[0]))
    assert spec.pipeline.stages == stages


def test_a_loss_that_is_no_number_is_nothing_learned() -> None:
    assert report(Job(loss=float("nan"), unigram_entropy=3.0))[0] is False


def test_the_demo_model_replaces_nothing(tmp_path: Path) -> None:
    assert free_name(tmp_path) == tmp_path / FOLDER
    (tmp_path / FOLDER).mkdir()
    assert free_name(tmp_path) == tmp_path / f"{FOLDER}-2"


def test_a_job_with_narrow_places_gets_no_more_stages_than_these_allow(tmp_path: Path) -> None:
    """The job was refused for a number of stages that its file does not name."""
    narrow = "[model]\nconfig = { hidden_size = 16, num_hidden_layers = 4, num_attention_heads = 2 }"
    narrow += f'\nnarrow = {{ kind = "maxout", every = 2 }}\n[data]\nsource = "{tmp_path}/text.txt"\n'
    (tmp_path / "job.toml").write_text(f'name = "tiny"\n{narrow}')
    (tmp_path / "text.txt").write_text("some words " * 1000)
    options = checked(UpOptions(4, 1, "cpu", tmp_path / "job.toml", False, None))
    assert (options.asked, options.spec and options.spec.pipeline.stages) == (["pipeline.stages=2"], 2)


async def test_a_folder_that_cannot_be_made_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = UpOptions(1, 1, "cpu", None, False, tmp_path / "file" / "data")
    with pytest.raises(InvalidConfig, match="cannot be used") as caught:
        await up_and_wait(Shell(quiet=True, insecure=True), options)
    assert "--data-dir" in caught.value.hint
