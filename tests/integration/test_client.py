"""The command line against a scheduler that is a fake of the wire: what it sends, prints and exits with."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from client.cli import VERBS, run
from client.connection import Scheduler
from swarm.errors import InvalidConfig, NotAllowed, NotFound, OutOfMemory, SwarmError
from swarm.hf.model_folder import weights_sha256
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, NarrowSection, load_job, parse_job, spec_from_json
from swarm.rpc.channel import server_options, status_of
from swarm.types import PROTOCOL_VERSION
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc
from swarm.wire.messages import ParameterHash
from tests.support.effort import others
from tests.support.golden import Golden
from tests.support.model_folders import Tensors, safetensors, tensors_of
from tests.support.tokenizer import write_tokenizer

JOB = """\
name = "tiny"
[model]
config = { hidden_size = 16, intermediate_size = 32, num_hidden_layers = 2, num_attention_heads = 2 }
[data]
source = "text.txt"
sequence_length = 8
[training]
steps = 20
warmup_steps = 2
global_batch_sequences = 4
"""
SHA = "ab" * 32
RESOLVED = resolve(parse_job(tomllib.loads(JOB)), Basis(257))


def _view(**facts: Any) -> pb.JobView:
    values: dict[str, Any] = {
        "id": "tiny-1a2b3c",
        "name": "tiny",
        "state": "running",
        "since_unix_s": 1_700_000_000.25,
        "created_unix_s": 1_700_000_000.0,
        "steps": 20,
        "unigram_entropy": 3.0,
        "loss": float("nan"),
        "eta_s": float("nan"),
        "stages": [pb.StageView(stage=0, layers=2, peers=["p1", "p2"], microbatches=8)],
        "spec_json": RESOLVED.model_dump_json(),
    }
    return pb.JobView(**(values | facts))


AMBIGUOUS = NotAllowed("a names 2 open jobs: a-1, a-2", hint="give the id")
JOBS = pb.DESCRIPTOR.services_by_name["Jobs"]
PEER = pb.PeerView(id="p1", state="serving", job="tiny-1a2b3c", stage=1, device="cpu", threads=2, pace_s=0.02)
IDLE = pb.PeerView(id="p2", state="idle", stage=-1, device="cpu")
DONE = _view(state="succeeded", reason="trained", step=20, loss=2.25, tokens_per_s=100.0, eta_s=0.0, weights_sha256=SHA)


@dataclass
class FakeJobs:
    """Answers each method of the Jobs service from values; remembers what it was sent."""

    views: list[pb.JobView] = field(default_factory=lambda: [DONE])
    protocol: int = PROTOCOL_VERSION
    shards: dict[str, bytes] = field(default_factory=dict)
    asked: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  # by method, unless refused
    refused: dict[str, SwarmError] = field(default_factory=dict)  # METHOD, "METHOD JOB", or "" for all
    offers: list[pb.PeerView] = field(default_factory=lambda: [PEER, IDLE])
    patience_s: list[float] = field(default_factory=list)  # of each Submit
    files: list[pb.FileChunk] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    hold: threading.Event | None = None  # Watch says this much and then waits
    broken_streams: int = 0
    uploads_left: int = 1000  # then the line is cut

    def __getattr__(self, method: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        if method not in JOBS.methods_by_name:
            raise AttributeError(method)
        return partial(self._answer, JOBS.methods_by_name[method])

    @property
    def submitted(self) -> list[pb.SubmitRequest]:
        return self.asked["Submit"]

    def _answer(self, method: MethodDescriptor, request: Any, context: grpc.ServicerContext) -> Any:
        time.sleep(self.pause_s)
        for key in ("", method.name, f"{method.name} {getattr(request, 'job', '')}"):
            if error := self.refused.get(key):
                context.set_trailing_metadata((("swarm-code", error.code), ("swarm-hint-bin", error.hint.encode())))
                context.abort(status_of(error), error.message)
        self.asked[method.name].append(request)
        answers = self._answers(method.name, request, context)
        return answers if method.server_streaming else next(answers)

    def _answers(self, method: str, request: Any, context: grpc.ServicerContext) -> Iterator[Message]:
        match method:
            case "Version":
                yield pb.VersionReply(product="9.9.9", protocol=self.protocol, epoch=4)
            case "MissingShards":
                yield pb.ShardList(shards=[shard for shard in request.shards if shard.sha256 not in self.shards])
            case "PutShard":
                yield from self._put_shard(request, context)
            case "Remove":
                yield pb.RemovedView(id=request.job, freed_bytes=5)
            case "Check":
                yield pb.CheckReply(spec_json=request.spec_json)
            case "Submit":
                self.patience_s.append(context.time_remaining())
                yield _view(state="queued", reason="waits for peers")
            case "List":
                yield pb.JobList(jobs=self.views, troubles=self.troubles)
            case "Get":
                yield _view(id=request.job) if f"Cancel {request.job}" in self.refused else self.views[-1]
            case "Watch":
                yield from self.views[:1] if self.broken_streams else self.views
                if self.broken_streams:
                    self.broken_streams -= 1
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
                if self.hold is not None:
                    self.hold.wait(30)
            case "Cancel":
                yield _view(state="cancelling", reason=request.reason)
            case "Peers":
                yield pb.PeerList(peers=self.offers)
            case "Explain":
                fact = pb.Fact(topic="stage 0", text="it limits the job")
                yield pb.Explanation(kind="job", id=request.about, facts=[fact])
            case "History":
                losses = ((1, 4.0, math.nan), (2, 3.0, 2.5), (3, 2.0, math.nan))
                for step, loss, evaluation_loss in losses:
                    made = pb.StepView(step=step, loss=loss, tokens=32, evaluation_loss=evaluation_loss)
                    yield pb.StepList(steps=[made])
            case "Checkpoints":
                yield pb.CheckpointList(checkpoints=[pb.CheckpointView(step=10), pb.CheckpointView(step=20)])
            case "Logs" if request.peer in ("", "p1"):
                yield pb.LogEntry(time_unix_s=1_700_000_000, level="info", stage=-1, message="job accepted")
                line = pb.LogEntry(level="warning", peer="p1", stage=1, message="slow\x1b[2J\n")
                line.time_unix_s = 1_700_000_001
                yield line
            case "Pull":
                yield from self.files

    def _put_shard(self, request: Iterator[pb.ShardChunk], context: grpc.ServicerContext) -> Iterator[Message]:
        if not self.uploads_left:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
        self.uploads_left -= 1
        shard = next(request).shard
        content = b""
        yield pb.PutShardReply(held_bytes=0)
        for chunk in request:
            content += chunk.payload
            yield pb.PutShardReply(held_bytes=len(content))
        assert hashlib.sha256(content).hexdigest() == shard.sha256
        assert len(content) == shard.size_bytes
        self.shards[shard.sha256] = content
        yield pb.PutShardReply(sha256=shard.sha256)


@pytest.fixture
def fake() -> FakeJobs:
    return FakeJobs()


@pytest.fixture
def address(fake: FakeJobs) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8), options=server_options())
    jobs_pb2_grpc.add_JobsServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> Iterator[None]:
    """In an empty folder with a job file, talking to the fake, without the settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWARM_SCHEDULER", address)
    monkeypatch.setenv("SWARM_INSECURE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text("some words to learn from, " * 40)
    yield
    structlog.reset_defaults()


@pytest.fixture
def swarm(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `swarm …`: (exit code, stdout, stderr); no error may show a traceback."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err or "-vv" in arguments
        return code, out, err

    return call


def _data(text: str) -> Any:
    answer = json.loads(text)
    assert answer["schema"] == "swarm.cli/1"
    return answer["data"]


def _said(swarm: Any, *lines: str) -> Iterator[str]:
    """Each command with its exit code and all that it printed, but for what differs from run to run."""
    for line in lines:
        code, out, err = swarm(*shlex.split(line))
        told = re.sub(r"\d+d\d+h|\b\d\d:\d\d:\d\d", "TIME", f"$ swarm {line}\n{out}{err}[exit {code}]")
        yield re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", re.sub("stages take up to .*", "stages take ...", told))


# submit --------------------------------------------------------------------------------------------------------------


def test_submit_sends_what_the_job_needs_and_follows_it(swarm: Any, fake: FakeJobs) -> None:
    fake.views = [_view(state="loading", reason="2 peers build"), _view(step=10, loss=2.5, tokens_per_s=99.0), DONE]
    code, out, err = swarm("submit", "job.toml")
    assert code == 0
    assert out == "tiny-1a2b3c\n"
    assert "loading: 2 peers build" in err
    assert "step 10/20  loss 2.5000  99 tokens/s" in err
    assert f"weights sha256 {SHA}" in err
    request = fake.submitted[0]
    assert spec_from_json(request.spec_json) == load_job(Path("job.toml"))
    assert [shard.sha256 for shard in request.shards] == list(fake.shards)
    assert (request.token_dtype, request.vocabulary_size) == ("uint16", 257)
    assert request.unigram_entropy > 0
    assert "tokenizer.json" in request.tokenizer_files


UNFIT = OutOfMemory("no cut fits", hint="lower training.microbatch_sequences")
ISLANDS = (
    "averaging.mode=streaming", "islands.count=2", "trust.spot_check=0.5", "training.reproducible=true",
    "pipeline.compression=none", "data.source=no-such-file",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fault", "code", "words"),
    [
        ((), lambda fake: fake.refused.update(Check=UNFIT), 9, "error[E0900]: no cut fits"),
        ((), lambda fake: setattr(fake, "protocol", PROTOCOL_VERSION + 1), 6, "error[E0600]"),
        (("checkpoint.resume_from=other:500",), lambda fake: fake.refused.update(Check=AMBIGUOUS), 10, "a-1"),
        *(
            ((f"checkpoint.dir={path}",), None, 3, "is relative, and the scheduler has no folder of yours")
            for path in ("runs", "./runs", "file://runs")
        ),
        (("training.stepz=3",), None, 3, "unknown key training.stepz"),
        (("data.source=none/*.txt",), None, 3, "none/*.txt"),
        (("limits.max_replicas=1", "limits.min_replicas=2"), None, 3, "limits.min_replicas = 2\nhint: raise it"),
        (ISLANDS, None, 3, "hint: remove it; or run: swarm train-local FILE"),
        (("model.init=pretrained",), None, 3, 'model.init = "pretrained" needs a model'),
        (("nonsense",), None, 2, "--set needs KEY=VALUE"),
    ],
)
def test_what_is_wrong_with_a_job_is_said_before_a_byte_of_data_is_sent(
    swarm: Any, fake: FakeJobs, changes: tuple[str, ...], fault: Any, code: int, words: str
) -> None:
    """The client tokenised and uploaded all data, a night's work with 100 GB, before it heard that the model fits
    nowhere."""
    if fault is not None:
        fault(fake)
    found, _, err = swarm("submit", "job.toml", *(flag for change in changes for flag in ("--set", change)))
    assert (found, words in err, "hint:" in err) == (code, True, True), err
    assert "tokens in" not in err
    assert (fake.shards, fake.submitted) == ({}, [])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda: Path("base/config.json").unlink(), "config.json does not exist"),
        (lambda: _second(**{"model.norm.weight": ("F32", [9])}), "has shape [9], this model needs [16]"),
        (
            lambda: Path("job.toml").write_text(FROM_FOLDER.replace("attention_dropout = 0.1", "hidden_size = 32")),
            "model.config.hidden_size cannot be set beside model.id",
        ),
    ],
)
def test_a_bad_model_is_refused_before_anything_is_sent(swarm: Any, fake: FakeJobs, spoil: Any, words: str) -> None:
    _model(Path("base"))
    Path("job.toml").write_text(FROM_FOLDER)
    spoil()
    code, out, err = swarm("submit", "-d", "job.toml")
    assert (code, out, words in err, "hint:" in err) == (3, "", True, True), err
    assert (fake.shards, fake.submitted) == ({}, [])


def test_a_client_that_starts_from_a_checkpoint_waits_until_the_scheduler_has_read_it(
    swarm: Any, fake: FakeJobs
) -> None:
    assert swarm("submit", "-d", "job.toml")[0] == 0
    assert swarm("submit", "-d", "job.toml", "--resume-from", "other-1a2b3c:latest")[0] == 0
    named = spec_from_json(fake.asked["Check"][-1].spec_json).checkpoint.resume_from
    assert named == "other-1a2b3c:latest"
    plain_s, reading_s = fake.patience_s
    assert plain_s < 60 < 600 < reading_s


def test_a_broken_upload_goes_on_with_the_files_that_are_missing(swarm: Any, fake: FakeJobs, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{number} " for number in range(400_000)))
    command = ("submit", "-d", "job.toml", "--set", 'data.upload_shard_bytes="1MiB"')
    fake.uploads_left = 2
    assert swarm(*command)[0] == 4
    assert (len(fake.shards), fake.submitted) == (2, [])
    fake.uploads_left = 4
    code, _, err = swarm(*command)
    assert (code, fake.uploads_left) == (0, 0)
    assert "2 of 6 files were there" in err
    assert [shard.sha256 for shard in fake.submitted[0].shards] == list(fake.shards)


def test_a_tokenizer_that_fits_no_message_is_uploaded_like_a_shard(
    swarm: Any, fake: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    choose = ("--set", f"model.tokenizer={folder}")
    assert swarm("submit", "-d", "job.toml", *choose)[0] == 0
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert dict(fake.submitted[0].tokenizer_files) == files
    assert (fake.submitted[0].vocabulary_size, fake.submitted[0].end_of_text) == (321, 0)
    monkeypatch.setattr("client.transfer.submission.TOKENIZER_MESSAGE_BYTES_MAX", 1000)
    assert swarm("submit", "-d", "job.toml", *choose)[0] == 0
    request = fake.submitted[1]
    assert not request.tokenizer_files
    assert {file.path: fake.shards[file.sha256] for file in request.files} == {
        f"model/{name}": content for name, content in files.items()
    }


@pytest.mark.timeout(600)
def test_submit_says_if_auto_tokenizer_would_cut_the_text_otherwise(
    swarm: Any, fake: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Qwen 2 was trained on 360,745 tokens, of which AutoTokenizer made 362,494 with the pulled folder."""
    monkeypatch.setattr("client.transfer.auto_tokenizer.LOOK_S_MAX", 250.0)
    write_tokenizer(tmp_path / "bpe")
    for family, differs in (("qwen2", True), ("llama", False)):
        changes = ("--set", "model.tokenizer=./bpe", "--set", f"model.family={family}")
        code, _, err = swarm("submit", "-d", "job.toml", *changes)
        assert code == 0, err
        assert ("AutoTokenizer makes a Qwen2Tokenizer that cuts text otherwise" in err) is differs, err
    assert len(fake.submitted) == 2


def test_long_work_is_told_in_lines_where_there_is_no_terminal(
    swarm: Any, fake: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.shell.PROGRESS_LINE_S", 0.0)
    err = swarm("submit", "-d", "job.toml")[2]
    assert "tokenising: " in err
    assert "uploading: " in err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("logs tiny -n 99999999999", "-n"),
        ("ls --limit 99999999999", "--limit"),
        ("peers --stage 99999999999", "--stage"),
        ("--scheduler lab:7950 stage-server", "--scheduler stands before stage-server"),
        ("submit job.toml --resume-from /😀", "there is no checkpoint in /😀"),
    ],
)
def test_what_cannot_be_meant_is_said_and_is_no_bug_of_swarm(swarm: Any, line: str, told: str) -> None:
    code, _, err = swarm(*line.split())
    assert code in (2, 7)
    assert told in err
    assert "bug" not in err


def test_flags_of_submit_change_the_job(swarm: Any, fake: FakeJobs) -> None:
    swarm("submit", "-d", "job.toml", "--set", "training.steps=7", "--name", "other", "--priority", "-5")
    spec = spec_from_json(fake.submitted[0].spec_json)
    assert (spec.training.steps, spec.name, spec.limits.priority) == (7, "other", -5)
    cut = {"split": [1, 1], "overlap": 1, "microbatch_sequences": 2, "recompute": True}
    plan = {"schema": "swarm.plan/1", "job": "tiny", "reasons": ["left out: p3: it is slow"], **cut}
    Path("plan.json").write_text(json.dumps(plan))
    _, _, said = swarm("submit", "-d", "job.toml", "--plan", "plan.json", "--set", "model.recompute=false")
    spec = spec_from_json(fake.submitted[1].spec_json)
    assert (spec.split, spec.model.recompute) == ((1, 1), False)
    assert "left out: p3: it is slow" in said


def test_the_exit_code_is_the_jobs_result_and_detached_none_is_awaited(
    swarm: Any, fake: FakeJobs, golden: Golden
) -> None:
    lost = {"reason": "stage server p1 (stage 1) is gone", "error_code": "E0150", "hint": "start another"}
    unfit = {"reason": "cpu has no memory left", "error_code": "E0900", "hint": "use more stages"}
    told = []
    for ended in ({"state": "failed"} | lost, {"state": "cancelled"} | lost, {"state": "failed"} | unfit):
        fake.views = [_view(**ended)]
        told += _said(swarm, "status -w tiny", "status tiny -o json")
    told += _said(swarm, "submit -d job.toml")
    fake.views, fake.broken_streams = [_view(step=1, loss=2.9), DONE], 2
    golden(*told, *_said(swarm, "submit job.toml", "submit job.toml -o json", "submit -q job.toml"))


def test_a_job_file_may_come_from_stdin(swarm: Any, fake: FakeJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (("-d",), ("--dry-run", "-o", "json")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(JOB.encode())))
        code, out, err = swarm("submit", "-", *flags)
        assert code == 0, err
    assert spec_from_json(fake.submitted[0].spec_json) == load_job(Path("job.toml"))
    origins = {value["key"]: value["origin"] for value in _data(out)["values"]}
    assert origins["training.steps"] == "file"


@pytest.mark.parametrize(
    ("text", "words"), [("", "stdin: name is required"), ("no", "job file stdin is not TOML"), ("x = 1", "stdin: ")]
)
def test_what_is_wrong_with_a_job_from_stdin_is_said_of_stdin(
    swarm: Any, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    """The error named a temporary file, which was gone by then."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, _, err = swarm("submit", "-", "--dry-run")
    assert code == InvalidConfig.exit_code
    assert err.startswith(f"error[E0300]: {words}"), err


def test_ctrl_c_detaches_and_sigterm_ends(fake: FakeJobs, address: str) -> None:
    fake.views = [_view(step=3, loss=2.5)]
    fake.hold = threading.Event()
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        command = [sys.executable, "-m", "client", "submit", "job.toml"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        seen = ""
        while "step 3/20" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, seen + err
        assert "Traceback" not in err
        assert ("detached: job tiny-1a2b3c goes on" in err) == (number is signal.SIGINT)
    fake.hold.set()


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_one_line_redraws_and_the_cursor_comes_back(
    fake: FakeJobs, address: str, number: signal.Signals | None
) -> None:
    fake.views = [_view(step=3, loss=2.5, tokens_per_s=77.0, eta_s=125.0)]
    if number is None:
        fake.views.append(DONE)
    else:
        fake.hold = threading.Event()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "client", "submit", "job.toml"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        seen += piece
        if number is not None and b"step 3/20" in seen and b"77 tokens/s  ETA 2m05s" in seen:
            process.send_signal(number)
            number_sent, number = number, None
    os.close(ours)
    code = process.wait(timeout=60)
    if fake.hold is None:
        assert code == 0
        assert b"step 20/20  loss 2.2500" in seen
    else:
        fake.hold.set()
        assert code == 128 + number_sent
    assert b"Traceback" not in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")


# --dry-run and --example ---------------------------------------------------------------------------------------------


def test_dry_run_names_the_origin_of_every_value(swarm: Any, fake: FakeJobs) -> None:
    code, out, _ = swarm("submit", "--dry-run", "job.toml", "--set", "training.seed=5", "-o", "json")
    assert code == 0
    values = {value["key"]: (value["value"], value["origin"]) for value in _data(out)["values"]}
    assert values["training.seed"] == (5, "--set")
    assert values["training.steps"] == (20, "file")
    assert values["training.eps"] == (1e-8, "default")
    assert values["model.config.hidden_size"] == (16, "file")
    assert values["training.microbatch_sequences"] == (1, "default, auto")
    for key in ("stages", "split", "overlap"):  # what the scheduler makes of them depends on its stage servers
        assert values[f"pipeline.{key}"] == ("auto", "default, chosen when it is submitted")
    assert values["pipeline.max_in_flight"] == ("auto", "default, chosen when the job starts")
    assert _data(out)["files"] == 1
    stored = load_job(Path("job.toml")).model_dump(mode="json")
    stored["model"]["init"] = "random"  # what is stored has no "auto"
    Path("again.json").write_text(json.dumps({"data": {"spec": stored}}))
    for file in ("job.toml", "again.json"):
        code, table, err = swarm("submit", "--dry-run", file)
        assert code == 0, err
        assert re.search(r"training.steps +20 +file", table)
    assert not fake.submitted


def test_dry_run_says_what_each_stage_takes_beside_what_is_offered(swarm: Any, fake: FakeJobs) -> None:
    """Whoever wanted to know whether a model fits learned it after the upload."""
    fake.offers = [pb.PeerView(id=f"p{n}", state="idle", memory_bytes=24 << 30, host_bytes=32 << 30) for n in range(12)]
    layers = ("--set", "model.config.num_hidden_layers=3", "--set", "pipeline.stages=3")
    code, _, said = swarm("submit", "--dry-run", "job.toml", *layers)
    assert code == 0, said
    assert re.search(
        r"memory: the largest stage takes about \S+ KiB \(\S+ KiB on the device\) with 1 stage, .* with 2", said
    )
    assert "offered by 12 stage servers: 12 x 24.0 GiB on the device and 32.0 GiB of host memory" in said
    assert re.search(
        r"there: 3 stages of 1 \+ 1 \+ 1 layers; .*; stage 0 \S+ KiB on the device and \S+ KiB of host", said
    )
    fake.offers = [pb.PeerView(id="p1", state="idle", memory_bytes=24 << 30)]
    said = swarm("submit", "--dry-run", "job.toml", *layers)[2]
    assert "offered by 1 stage server: 1 x 24.0 GiB\n" in said
    assert "of host memory" not in said
    fake.refused["Check"] = UNFIT
    code, _, said = swarm("submit", "--dry-run", "job.toml")
    assert (code, "memory: the largest stage takes about" in said, "no cut fits" in said) == (9, True, True)
    said = swarm("submit", "--dry-run", "job.toml", "--scheduler", "127.0.0.1:1")[2]
    assert "offered: not known, no scheduler answers at 127.0.0.1:1" in said
    assert not fake.submitted


def test_dry_run_says_what_the_data_are(swarm: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.bin").write_bytes(b"12345678")
    found = _data(swarm("submit", "--dry-run", "job.toml", "--set", "data.source=a.jsonl", "-o", "json")[1])
    assert (found["files"], found["size_bytes"], found["formats"]) == (1, 14, ["jsonl"])
    assert found["epochs"] is None  # only a tokeniser knows how many tokens these lines hold
    assert found["parameters"] > 257 * 16
    code, out, said = swarm("submit", "--dry-run", "job.toml", "-o", "json")
    told = _data(out)
    assert told["epochs"] == pytest.approx(told["tokens"] / told["size_bytes"])
    said = swarm("submit", "--dry-run", "job.toml")[2]
    assert f"model: {told['parameters']:,} parameters; it is trained on {told['tokens']:,} tokens, about" in said
    said = swarm("submit", "--dry-run", "job.toml", "--set", "data.source=hf:a/b")[2]
    assert "data: a Hugging Face data set, not downloaded yet; vocabulary of 257; no data was sent" in said
    arguments = ("--set", "data.source=b.bin", "--set", "model.config.vocab_size=999")
    assert "1 file (bin), 8 B; vocabulary of 999" in swarm("submit", "--dry-run", "job.toml", *arguments)[2]
    code, _, err = swarm("submit", "--dry-run", "job.toml", *arguments[:2])
    assert code == 3
    assert "hint: set vocab_size in model.config, or model.tokenizer" in err


def test_dry_run_knows_a_familys_own_names(swarm: Any, tmp_path: Path) -> None:
    """GPT-2's own n_embd in a file was shown as a default, because a resolved spec calls it hidden_size."""
    job = JOB.replace("hidden_size = 16, intermediate_size = 32", "n_embd = 16").replace("num_hidden_layers", "n_layer")
    (tmp_path / "gpt2.toml").write_text(job.replace("[model]", '[model]\nfamily = "gpt2"'))
    code, out, err = swarm("submit", "--dry-run", "gpt2.toml", "--set", "model.config.n_layer=3", "-o", "json")
    assert code == 0, err
    values = {value["key"]: (value["value"], value["origin"]) for value in _data(out)["values"]}
    assert values["model.config.hidden_size"] == (16, "file")
    assert values["model.config.num_hidden_layers"] == (3, "--set")
    assert values["model.config.layer_norm_epsilon"] == (1e-5, "default")


def test_the_example_is_complete_and_works_as_it_is(swarm: Any, fake: FakeJobs, tmp_path: Path) -> None:
    code, out, _ = swarm("submit", "--example")
    assert code == 0
    (tmp_path / "example.toml").write_text(out)
    written = swarm("submit", "--dry-run", "example.toml", "-o", "json")
    origins = {value["key"]: value["origin"] for value in _data(written[1])["values"]}
    names = [
        f"{section}.{key}"
        for section, model in _sections(JobSpec)
        for key, field in model.model_fields.items()
        if key != "config" and not hasattr(field.annotation, "model_fields")
    ]
    assert [name for name in names if not origins[name].startswith("file")] == []
    few = ("--set", "training.steps=5")  # what one tries first: warm-up must not be longer
    assert swarm("submit", "-d", "example.toml", "--set", 'data.source="text.txt"', *few)[0] == 0


def _sections(model: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The sections of a job file, those within others too."""
    fields = model.model_fields.items()
    own = [(f"{prefix}{name}", field.annotation) for name, field in fields if hasattr(field.annotation, "model_fields")]
    return own + [inner for name, section in own for inner in _sections(section, f"{name}.")]


# Looking -------------------------------------------------------------------------------------------------------------


def test_jobs_and_stage_servers_are_shown_to_people_and_programs(swarm: Any, fake: FakeJobs, golden: Golden) -> None:
    fake.views = [DONE, _view(step=5, loss=2.5, tokens_per_s=50.0, eta_s=61.0, reason="training", spec_json='{"a": 1}')]
    jobs = _said(swarm, "ls -a --limit 7", "ls -o json", "status tiny", "status tiny -o json")
    golden(*jobs, *_said(swarm, "peers ls --stage 1", "peers -o json", "peers --links"))
    assert (fake.asked["List"][0].all, fake.asked["List"][0].limit, fake.asked["Peers"][0].stage) == (True, 7, 1)


def test_stage_servers_are_printed_as_a_pool(swarm: Any, fake: FakeJobs) -> None:
    measured = {"multiply_adds_per_s": 2e12, "up_bytes_per_s": 1e6, "down_bytes_per_s": 2e6}
    fake.offers = [pb.PeerView(id="p1", state="serving", job="tiny-1a2b3c", device="cpu", **measured), IDLE]
    fake.offers += [pb.PeerView(id=state, state=state, device="cpu") for state in ("gone", "draining", "quarantined")]
    code, said, _ = swarm("peers", "pool")
    pool = tomllib.loads(said)
    assert code == 0
    assert [peer["name"] for peer in pool["peer"]] == ["p1", "p2"]
    assert [pool["peer"][0][key] for key in ("speed", "up", "down")] == [2e12, "8.000Mbit", "16.000Mbit"]
    assert "speed" not in pool["peer"][1]


@pytest.mark.parametrize("arguments", [("ls",), ("status", "tiny"), ("status", "-w", "tiny")])
def test_troubles_of_the_scheduler_are_said(swarm: Any, fake: FakeJobs, arguments: tuple[str, ...]) -> None:
    """While the database was away, only /readyz and the metrics said so."""
    fake.troubles = ["the database does not answer"]
    for form in ("table", "json"):
        code, _, err = swarm(*arguments, "-o", form)
        assert (code, err.count("scheduler: the database does not answer")) == (0, 1)


def test_waiting_says_nothing_until_a_job_goes_on_no_more(swarm: Any, fake: FakeJobs, golden: Golden) -> None:
    fake.views = [_view(), _view(step=5), DONE]
    told = list(_said(swarm, "wait tiny tiny-1"))
    fake.views = [_view(), _view(state="paused", reason="it ran for 2 h", step=5), _view()]
    told += _said(swarm, "wait tiny", "wait tiny -o json")
    fake.views = [_view(state="failed", reason="no")]
    golden(*told, *_said(swarm, "wait -q tiny"))


def test_logs_pass_the_filter_on_and_neutralise_control_characters(swarm: Any, fake: FakeJobs, golden: Golden) -> None:
    now_unix_s = time.time()
    golden(
        *_said(swarm, "logs tiny -n 5 --peer p1 --stage 1 --level warning --since 2m", "logs tiny -o json"),
        *_said(swarm, "logs tiny --peer zz", "logs tiny --peer zz -f", "logs tiny --peer p2"),
    )
    request = fake.asked["Logs"][0]
    assert (request.job, request.tail, request.peer, request.stage, request.level) == ("tiny", 5, "p1", 1, "warning")
    assert request.since_unix_s == pytest.approx(now_unix_s - 120, abs=20)


def test_a_job_that_cannot_be_cancelled_keeps_no_other_from_it(swarm: Any, fake: FakeJobs, golden: Golden) -> None:
    ended = NotAllowed("job old-1 has ended", hint="nothing is left to cancel")
    fake.refused |= {"Cancel old-1": ended, "Get a": AMBIGUOUS}
    golden(*_said(swarm, "cancel old-1 a tiny", "cancel old-1 tiny -o json", "stop -y tiny tiny"))
    assert [request.job for request in fake.asked["Cancel"]] == ["tiny-1a2b3c"] * 4


def test_version_tells_both_sides(swarm: Any, fake: FakeJobs) -> None:
    code, out, _ = swarm("version")
    assert code == 0
    assert "scheduler 9.9.9" in out
    assert _data(swarm("version", "-o", "json")[1])["scheduler"]["epoch"] == 4
    code, out, err = swarm("version", "--scheduler", "127.0.0.1:1")
    assert code == 0
    assert "swarm " in out
    assert "no scheduler answers" in err
    assert re.fullmatch(r"swarm \S+\n", swarm("-V")[1])


# pull ----------------------------------------------------------------------------------------------------------------


def _safetensors(**tensors: bytes) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, content in tensors.items():
        header[name] = {"dtype": "F32", "shape": [len(content) // 4], "data_offsets": [start, start + len(content)]}
        start += len(content)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def _parameters(**tensors: bytes) -> str:
    return weights_sha256(
        ParameterHash(name, "float32", (len(content) // 4,), hashlib.sha256(content).hexdigest())
        for name, content in tensors.items()
    )


def _chunks(path: str, content: bytes, **faults: Any) -> list[pb.FileChunk]:
    facts = {"path": path, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} | faults
    middle = len(content) // 2
    return [
        pb.FileChunk(header=pb.FileHeader(**facts)),
        pb.FileChunk(payload=content[:middle]),
        pb.FileChunk(payload=content[middle:]),
    ]


WEIGHTS = {"b.weight": b"12345678", "a.weight": b"abcd" * 3}


@pytest.fixture
def trained(fake: FakeJobs) -> FakeJobs:
    fake.files = [*_chunks("config.json", b"{}"), *_chunks("model.safetensors", _safetensors(**WEIGHTS))]
    fake.views = [_view(state="succeeded", weights_sha256=_parameters(**WEIGHTS))]
    return fake


def test_pull_writes_the_folder_and_names_its_weights(swarm: Any, trained: FakeJobs, tmp_path: Path) -> None:
    code, out, _ = swarm("pull", "tiny", "deep/model")
    assert code == 0
    assert out == f"path {tmp_path / 'deep/model'}\nweights_sha256 {_parameters(**WEIGHTS)}\n"
    assert (tmp_path / "deep/model/config.json").read_bytes() == b"{}"
    assert (tmp_path / "deep/model/model.safetensors").read_bytes() == _safetensors(**WEIGHTS)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]


def test_pull_says_how_a_model_with_narrow_places_is_loaded(swarm: Any, trained: FakeJobs) -> None:
    _, _, plain = swarm("pull", "tiny", "plain")
    assert "trust_remote_code" not in plain
    narrow = RESOLVED.having("model", narrow=NarrowSection(kind="maxout", every=1))
    trained.views[0].spec_json = narrow.model_dump_json()
    code, _, told = swarm("pull", "tiny", "narrow")
    assert (code, "load it in Transformers with trust_remote_code=True; other" in told) == (0, True), told


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_pull_tells_the_size_of_the_folder_that_it_made(
    swarm: Any, trained: FakeJobs, tmp_path: Path, dtype: str
) -> None:
    """It told what had travelled: 3.4 MiB in 7 files of a bfloat16 folder of 1.7 MiB in 8."""
    code, out, err = swarm("pull", "tiny", "model", "--dtype", dtype, "-o", "json")
    assert code == 0, err
    told = json.loads(out)["data"]
    lie = {path.name: path.stat().st_size for path in (tmp_path / "model").iterdir()}
    assert set(lie) == {"config.json", "model.safetensors", "README.md"}
    assert (told["files"], told["size_bytes"]) == (3, sum(lie.values()))


def test_pull_replaces_a_folder_only_by_force(swarm: Any, trained: FakeJobs, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert swarm("pull", "tiny", "model")[0] == 0  # an empty folder is no loss
    (tmp_path / "model/mine").write_text("precious")
    code, _, err = swarm("pull", "tiny", "model")
    assert code == 10
    assert "--force" in err
    assert (tmp_path / "model/mine").read_text() == "precious"
    assert swarm("pull", "tiny", "model", "--force")[0] == 0
    assert not (tmp_path / "model/mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "model", "text.txt"]
    assert swarm("pull", "tiny", "text.txt", "--force")[0] == 10


@pytest.mark.parametrize(
    ("chunks", "word"),
    [
        (_chunks("a", b"xy", sha256="0" * 64), "did not arrive"),
        (_chunks("a", b"xy", size_bytes=3), "did not arrive"),
        (_chunks("a", b"xy", size_bytes=1), "longer than announced"),
        (_chunks("../a", b"xy"), "named"),
        (_chunks("/etc/a", b"xy"), "named"),
        (_chunks("a/../../b", b"xy"), "named"),
        (_chunks("a\\b", b"xy"), "named"),
        (_chunks("", b"xy"), "named"),
        (_chunks("a", b"xy") * 2, "twice"),
        ([pb.FileChunk(payload=b"x")], "no file"),
        ([], "no files"),
        (_chunks("model.safetensors", b"\xff" * 16), "not a safetensors file"),
        (_chunks("model.safetensors", _safetensors(**WEIGHTS)[:-1]), "not a safetensors file"),
        (_chunks("model.safetensors", _safetensors(a=b"1234")), "arrived with sha256"),
    ],
)
def test_a_pull_that_went_wrong_leaves_nothing(
    swarm: Any, trained: FakeJobs, tmp_path: Path, chunks: list[pb.FileChunk], word: str
) -> None:
    trained.files = chunks
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine").write_text("precious")
    code, _, err = swarm("pull", "tiny", "model", "--force")
    assert code == 1
    assert word in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "model", "text.txt"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]


# Errors and flags ----------------------------------------------------------------------------------------------------


def test_errors_of_the_scheduler_keep_their_code_text_and_hint(swarm: Any, fake: FakeJobs, golden: Golden) -> None:
    told = []
    for error in (NotFound("there is no job tiny", hint="swarm ls"), NotAllowed("it has ended", hint="nothing to do")):
        fake.refused[""] = error
        told += _said(swarm, "status tiny", "status tiny -o json")
    fake.refused.clear()
    fake.pause_s = 1.0
    golden(*told, *_said(swarm, "ls --timeout 0.2 -o json"))


def test_no_scheduler_is_exit_4_and_says_what_to_do(swarm: Any) -> None:
    for verb in (("ls",), ("submit", "job.toml"), ("status", "x"), ("peers",), ("pull", "x", "y"), ("logs", "x")):
        code, _, err = swarm(*verb, "-q", "--scheduler", "127.0.0.1:1")
        assert code == 4, verb
        assert "error[E0400]: no scheduler answers at 127.0.0.1:1\nhint: start one with: swarm up" in err
    assert "Traceback" in swarm("ls", "-vv", "--scheduler", "127.0.0.1:1")[2], "with -vv only"


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "--bogus"),
        ("ls", "--limit", "0"),
        ("ls", "--state", "asleep"),
        ("ls", "-o", "yaml"),
        ("ls", "--timeout", "0"),
        ("ls", "--scheduler", "nowhere"),
        ("ls", "--scheduler", "http://127.0.0.1:7950"),
        ("bogus",),
        ("stauts", "x"),
        ("sto",),
        ("status",),
        ("submit",),
        ("submit", "job.toml", "--priority", "101"),
        ("logs", "x", "--level", "loud"),
        ("logs", "x", "--since", "yesterday"),
        ("up", "--stages", "0"),
        ("up", "--demo", "--job", "x"),
        ("peers", "eat"),
        ("peers", "--state", "foo"),
        ("up", "--scheduler", "127.0.0.1:7951"),
        ("up", "--port", "65536"),
    ],
)
def test_wrong_flags_are_exit_2_with_one_line_and_a_hint(swarm: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = swarm(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error\[E0200\]: [^\n]+\nhint: [^\n]+\n", err)
    assert ("Did you mean 'status'?" in err) == (arguments[0] == "stauts")
    assert "'stop'" not in err, "an alias is no suggestion"


def test_global_flags_work_before_and_after_the_verb(swarm: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_SCHEDULER", "127.0.0.1:1")
    assert swarm("--scheduler", address, "ls")[0] == 0
    assert swarm("ls", "--scheduler", address)[0] == 0
    assert swarm("--scheduler", "127.0.0.1:2", "ls", "--scheduler", address)[0] == 0
    assert swarm("ls")[0] == 4
    assert _data(swarm("-o", "json", "ls", "--scheduler", address)[1])
    assert swarm("logs", "-fv", "tiny", "--scheduler", address)[0] == 0


def test_a_fault_of_ours_is_one_line_too(swarm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("what is this")

    monkeypatch.setattr(Scheduler, "jobs", broken)
    code, _, err = swarm("ls")
    assert code == 1
    assert "error[E0000]: unexpected error: RuntimeError: what is this, at client.verbs." in err
    assert "this is a bug of swarm" in err
    assert "-vv" in err


def test_a_model_with_the_vocabulary_of_a_tokenizer_that_nobody_named_is_warned_of(swarm: Any, fake: FakeJobs) -> None:
    """A job with vocab_size = 128256 and no tokenizer trained on bytes without a word."""
    words = "the data is read as bytes, 257 tokens, though model.config.vocab_size = 128256"
    wide = ("--set", "model.config.vocab_size=128256")
    assert words in swarm("submit", "--dry-run", "job.toml", *wide)[2]
    assert words in swarm("submit", "-d", "job.toml", *wide)[2]
    for meant in ((), ("--set", "model.config.vocab_size=257"), (*wide, "--set", "model.tokenizer=byte")):
        assert "read as bytes" not in swarm("submit", "--dry-run", "job.toml", *meant)[2]


def test_removing_wants_a_yes_where_nobody_can_be_asked(swarm: Any, fake: FakeJobs) -> None:
    """`swarm rm JOB` in a script removed at once."""
    code, _, err = swarm("rm", "tiny-1a2b3c")
    assert code == NotAllowed.exit_code
    assert "this would remove tiny-1a2b3c with all weights, checkpoints and logs" in err
    assert "--yes" in err
    assert not fake.asked["Remove"]
    assert swarm("rm", "tiny-1a2b3c", "-y")[0] == 0
    assert [request.job for request in fake.asked["Remove"]] == ["tiny-1a2b3c"]


def test_help_lists_the_verbs_in_groups_before_the_flags(swarm: Any) -> None:
    for arguments in ((), ("-h",), ("submit", "-h"), ("ls", "--help"), ("up", "--help")):
        code, out, _ = swarm(*arguments)
        assert (code, "Usage: swarm" in out) == (0, True)
        assert ("--scheduler" in out) == (arguments[:1] != ("up",)), "which refuses it"
    out = swarm("--help")[1]
    places = [out.index(word) for word in ("New here? swarm up --demo", "Start:", "Watch:", "Programs:", "Options:")]
    assert places == sorted(places)
    assert all(f"\n  {verb} " in out for verb in VERBS)


def test_the_list_of_verbs_loads_none_of_them() -> None:
    script = (
        "import sys, client.cli; client.cli.run(['--help']); print('grpc' in sys.modules, 'pydantic' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert "  checkpoints   List the checkpoints of a job." in answer.stdout
    assert answer.stdout.endswith("False False\n")


def test_the_client_runs_without_torch_and_without_the_servers() -> None:
    script = (
        "import sys, client.cli, client.completion, importlib; print('structlog' in sys.modules); "
        "[importlib.import_module(verb.module) for verb in client.cli.VERBS.values() if not verb.program]; "
        "print([m for m in ('torch', 'transformers', 'scheduler', 'stage_server', 'sqlalchemy') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n[]\n"


def test_programs_get_their_flags_untouched() -> None:
    command = [sys.executable, "-m", "client", "scheduler", "--listen", "0.0.0.0:1"]
    answer = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "others cannot dial 0.0.0.0:1" in answer.stderr


# Starting from a local model ------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "transformers_version": "5.0.0",
}


def _halves() -> tuple[Tensors, Tensors]:
    names = list(tensors_of(CONFIG).items())
    return dict(names[:7]), dict(names[7:])


def _model(folder: Path) -> dict[str, bytes]:
    """A model folder in two files; gives them by path."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    halves = {f"model-{number}.safetensors": half for number, half in enumerate(_halves(), 1)}
    files = {name: safetensors(half) for name, half in halves.items()}
    index = {"weight_map": {tensor: name for name, half in halves.items() for tensor in half}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "consolidated.safetensors").write_bytes(b"not in the index")
    return files


def _second(**tensors: tuple[str, list[int]]) -> None:
    """Write the second file of the model with these tensors in it."""
    Path("base/model-2.safetensors").write_bytes(safetensors(_halves()[1] | tensors))


FROM_FOLDER = JOB.replace(
    re.search(r"config = .*\n", JOB).group(),  # type: ignore[union-attr]
    'id = "./base"\ntokenizer = "byte"\nconfig = { attention_dropout = 0.1 }\n',
)


def test_submit_sends_the_weights_of_a_local_model_once(swarm: Any, fake: FakeJobs) -> None:
    files = _model(Path("base"))
    Path("job.toml").write_text(FROM_FOLDER)
    code, _, err = swarm("submit", "-d", "job.toml")
    assert code == 0, err
    assert "of weights" in err
    request = fake.submitted[0]
    assert {file.path: file.sha256 for file in request.files} == {
        f"model/{name}": hashlib.sha256(content).hexdigest() for name, content in files.items()
    }
    for file in request.files:
        assert fake.shards[file.sha256] == files[file.path.removeprefix("model/")]
        assert file.size_bytes == len(fake.shards[file.sha256])
    spec = spec_from_json(request.spec_json)
    assert (spec.model.family, spec.model.init, spec.layers) == ("llama", "pretrained", 2)
    assert spec.model.config["rope_parameters"] == CONFIG["rope_parameters"]
    assert spec.model.config["attention_dropout"] == 0.1
    assert "transformers_version" not in spec.model.config

    changed = safetensors(_halves()[1], b"\1")
    Path("base/model-2.safetensors").write_bytes(changed)
    before = dict(fake.shards)
    assert swarm("submit", "-d", "job.toml")[0] == 0
    assert fake.shards.keys() - before.keys() == {hashlib.sha256(changed).hexdigest()}

    assert swarm("submit", "-d", "job.toml", "--set", "model.init=random")[0] == 0
    assert not fake.submitted[-1].files


def test_dry_run_tells_what_the_model_decides(swarm: Any, fake: FakeJobs) -> None:
    _model(Path("base"))
    Path("job.toml").write_text(FROM_FOLDER)
    code, out, _ = swarm("submit", "--dry-run", "job.toml", "-o", "json")
    assert code == 0
    values = {value["key"]: (value["value"], value["origin"]) for value in _data(out)["values"]}
    assert values["model.id"] == ("./base", "file")
    assert values["model.family"] == ("llama", "model.id")
    assert values["model.config.hidden_size"] == (16, "model.id")
    assert values["model.config.attention_dropout"] == (0.1, "file")
    assert not fake.submitted


# top, history, profiles, completion ----------------------------------------------------------------------------------


def test_top_in_a_terminal_redraws_until_ctrl_c(fake: FakeJobs, address: str) -> None:
    fake.views = [_view(step=3, loss=2.0)]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "client", "top", "--interval", "0.2"])
    seen = b""
    while seen.count(b"tiny-1a2b3c") < 4:
        seen += os.read(terminal, 65536)
    os.kill(child, signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal has been closed
        while rest := os.read(terminal, 65536):
            seen += rest
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert b"\x1b[?1049l" in seen, "the screen of before is back"


def test_a_profile_names_a_scheduler_and_flags_win(
    swarm: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'[profile.lab]\nscheduler = "{address}"\noutput = "json"\ninsecure = true\n')
    monkeypatch.delenv("SWARM_SCHEDULER")
    monkeypatch.delenv("SWARM_INSECURE")
    monkeypatch.setenv("SWARM_CONFIG", str(file))
    assert _data(swarm("status", "tiny", "-p", "lab")[1])["id"] == "tiny-1a2b3c"
    assert _data(swarm("-p", "lab", "status", "tiny")[1])["id"] == "tiny-1a2b3c"
    assert swarm("-p", "lab", "-o", "table", "status", "tiny")[1].startswith("job ")
    assert swarm("status", "tiny", "-p", "lab", "--scheduler", "127.0.0.1:1", "--timeout", "2")[0] == 4
    file.write_text(file.read_text().replace("lab", "default"))
    assert _data(swarm("status", "tiny")[1])["id"] == "tiny-1a2b3c", "the default profile needs no flag"
    assert swarm("status", "tiny", "-p", "lab")[0] == 3
    monkeypatch.setenv("SWARM_PROFILE", "default")
    monkeypatch.setenv("SWARM_OUTPUT", "table")
    assert swarm("status", "tiny")[1].startswith("job ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[profile.lab]\nschedulr = 'x:1'", 'did you mean "scheduler"?'),
        ("[profile.lab]\ntimeout = true", "a number of seconds"),
        ("[profile.lab]\noutput = 'yaml'", '"table" or "json"'),
        ("[profile]\nlab = 3", "no table of tables"),
        ("[profiles.lab]", 'did you mean "profile"?'),
        ("[profile.lab", "cannot be read"),
        ("[profile.home]", "there are: home"),
    ],
)
def test_a_wrong_profile_is_one_sentence(swarm: Any, tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    code, _, err = swarm("ls", "-p", "lab", "--config", str(file))
    assert code == 3
    assert told in err


def test_top_shows_jobs_replicas_loss_and_why(swarm: Any, fake: FakeJobs, golden: Golden) -> None:
    fake.views = [_view(step=3, loss=2.0, reason="trains", stages=[pb.StageView(stage=0, layers=2, peers=["p1"])])]
    told = list(_said(swarm, "top", "top -o json"))
    fake.views = []
    told += _said(swarm, "top")
    fake.views = [_view(state="stalled", stages=[pb.StageView(stage=0, layers=1), pb.StageView(stage=1, layers=1)])]
    golden(*told, *_said(swarm, "top tiny"))


def test_history_is_a_table_csv_or_json(swarm: Any, fake: FakeJobs, golden: Golden) -> None:
    golden(*_said(swarm, "history tiny", "history tiny --csv", "history tiny -o json", "history tiny --csv -o json"))
    swarm("history", "tiny", "--every", "7")
    assert fake.asked["History"][-1].every == 7


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("swarm status ti", ["tiny-1a2b3c"]),
        ("swarm explain p", ["p1", "p2"]),
        ("swarm pull tiny model --step ", ["latest", "20", "10"]),
        *others(
            ("swarm peers drain ", ["p1", "p2"]), ("swarm resume tiny --from 2", ["20"]), ("swarm hist", ["history"])
        ),
        ("swarm --scheduler 127.0.0.1:1 status ", []),
    ],
)
def test_the_shell_completes_jobs_stage_servers_and_steps(words: str, offered: list[str]) -> None:
    environ = os.environ | {"_SWARM_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environ["COMP_CWORD"] = str(words.count(" "))
    command = [sys.executable, "-m", "client"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    assert (done.stdout.split(), done.stderr) == (offered, "")
