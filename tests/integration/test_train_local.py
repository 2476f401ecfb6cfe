"""`swarm train-local`: the command as a user runs it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from client.transfer.upload import open_start
from swarm.data.corpus import open_corpus
from swarm.errors import InvalidConfig
from swarm.job.spec import JobSpec, NarrowSection, load_job
from swarm.model.sample import sample
from swarm.reference import trainer
from swarm.reference.__main__ import main
from tests.support.tokenizer import write_tokenizer

JOB = """
name = "tiny"
[model]
dtype = "float32"
config = {hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4}
[data]
source = "corpus.txt"
sequence_length = 16
[training]
steps = 40
global_batch_sequences = 4
microbatch_sequences = 2
learning_rate = 1e-2
warmup_steps = 2
"""
BAD_SPEEDS = ("0", "1,-1", "nan", "1,inf", "1,x", ",", "1,1e-320", "1e308,1")


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(before)


@pytest.fixture
def train_local(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command in this process: to load torch anew for every case would take most of a minute."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["swarm train-local", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        return Done(code if isinstance(code, int) else 0, *capsys.readouterr())

    return call


def test_its_flags_are_said_in_plain_text_and_taken_from_no_variable(
    train_local: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_THREADS", "many")  # of stage servers
    shown, wrong, missing = train_local("-h"), train_local("job.toml", "--sets"), train_local()
    assert (shown.code, shown.out.split()[0], "SWARM_" in shown.out) == (0, "Usage:", False)
    assert (wrong.code, wrong.err.split()[0]) == (2, "error[E0200]:")
    assert missing.err.splitlines() == ["error[E0200]: missing argument 'FILE'.", "hint: see: swarm train-local --help"]


def test_a_job_is_trained_written_hashed_and_can_be_sampled(folder: Path, train_local: Callable[..., Done]) -> None:
    done = train_local("job.toml", "--out", "out/model", "--threads", "1")
    assert done.code == 0, done.err
    key, sha256 = done.out.split()
    assert (key, len(sha256)) == ("weights_sha256", 64)
    lines = [line for line in done.err.splitlines() if line.startswith("step ")]
    assert lines[-1].startswith("step 40/40")
    first, last = (float(line.split()[3]) for line in (lines[0], lines[-1]))
    assert last < first - 1.5
    assert [path.name for path in (folder / "out").iterdir()] == ["model"]
    text = sample(folder / "out" / "model", "the quick", tokens=20, seed=1)
    assert text.startswith("the quick")
    assert text == sample(folder / "out" / "model", "the quick", tokens=20, seed=1)


def test_a_run_that_was_stopped_is_gone_on_with_and_never_trained_over(
    folder: Path, train_local: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, typed again, began at step 0, and its checkpoints took the place of the first run's."""

    def stop(progress: object, report: trainer.StepReport) -> None:
        if report.step == 25:
            raise KeyboardInterrupt

    words = ["job.toml", "--out", "model", "--threads", "1", "--set", "checkpoint.every_steps=10"]
    with monkeypatch.context() as stopping:
        stopping.setattr(trainer._TrainerProgress, "__call__", stop)
        stopped = train_local(*words)
    kept = folder / "model-checkpoints"
    assert stopped.code == 130
    assert f"stopped; go on from step 20: --resume-from {kept}" in stopped.err
    again = train_local(*words)
    assert again.code == 10
    assert f"{kept} has checkpoints of an earlier run, up to step 20" in again.err
    assert f"go on from them: --resume-from {kept}" in again.err
    (kept / "step-00000020" / "model" / "config.json").write_text("{}")
    done = train_local(*words, "--resume-from", str(kept))
    assert done.code == 0
    assert "step-00000020 was skipped: " in done.err
    assert "goes on at step 10" in done.err


def test_a_job_on_json_lines_keeps_its_own_tokenizer(folder: Path, train_local: Callable[..., Done]) -> None:
    tokenizer = write_tokenizer(folder / "tokenizer")
    (folder / "corpus.jsonl").write_text('{"body": "the quick brown fox jumps over the lazy dog. "}\n' * 60)
    changes = ["data.source=corpus.jsonl", "data.text_field=body", "model.tokenizer=tokenizer", "training.steps=20"]
    arguments = [argument for change in changes for argument in ("--set", change)]
    done = train_local("job.toml", "--out", "model", "--threads", "1", *arguments)
    assert done.code == 0, done.err
    assert (folder / "model" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert json.loads((folder / "model" / "config.json").read_text())["vocab_size"] == 321
    text = sample(folder / "model", "the quick", tokens=5, seed=1)
    assert text.startswith("the quick")


def test_the_hash_is_that_of_the_weights_not_of_the_cut(folder: Path, train_local: Callable[..., Done]) -> None:
    few = ["--threads", "1", "--set", "training.steps=2", "--set", "pipeline.compression=none"]
    one, two = (
        train_local("job.toml", "--out", f"m{stages}", *few, "--set", f"pipeline.stages={stages}").out
        for stages in (1, 2)
    )
    assert one == two
    assert one.startswith("weights_sha256 ")
    assert (folder / "m2" / "model.safetensors.index.json").exists()


def test_a_stored_job_is_trained_with_what_was_chosen_for_its_swarm(
    folder: Path, train_local: Callable[..., Done]
) -> None:
    """ "auto" microbatches follow the memory of the stage servers, and their size decides the bits."""
    job = load_job(folder / "job.toml", ["training.microbatch_sequences=1", "training.steps=4"])
    stored = open_corpus(job).resolve(job)
    printed = {"schema": "swarm.cli/1", "data": {"id": "tiny-1", "spec": json.loads(stored.model_dump_json())}}
    (folder / "job.json").write_text(json.dumps(printed, indent=2))

    again = train_local("job.json", "--out", "again")
    by_hand = train_local("job.toml", "--set", "training.microbatch_sequences=1", "--set", "training.steps=4")
    other = train_local("job.toml", "--set", "training.steps=4", "--out", "other")

    assert (again.code, by_hand.code, other.code) == (0, 0, 0), again.err
    assert again.out.split()[-1] == by_hand.out.split()[-1] != other.out.split()[-1]


def test_islands_train_here_and_their_model_is_that_of_all(folder: Path, train_local: Callable[..., Done]) -> None:
    islands = ["--threads", "1", "--set", "training.steps=6", "--set", "averaging.mode=diloco"]
    pair = ["--set", "islands.count=2", "--set", "outer.every_steps=3", "--set", "checkpoint.every_steps=2"]
    two = train_local("job.toml", "--out", "two", *islands, *pair)
    assert two.code == 0, two.err
    assert "2 microbatches of 2 sequences shared by 2 islands; diloco, an exchange every 3 steps" in two.err
    assert (folder / "two" / "model.safetensors").exists()
    kept = folder / "two-checkpoints" / "step-00000003"
    assert sorted(path.name for path in kept.iterdir() if path.is_dir()) == ["islands", "model", "optimizer", "outer"]
    again = train_local("job.toml", "--out", "again", *islands, *pair, "--resume-from", "two-checkpoints")
    assert (again.code, again.out) == (0, two.out), again.err
    one = train_local("job.toml", "--out", "one", *islands, "--set", "outer.every_steps=3")
    assert one.out != two.out


def test_every_mistake_is_one_line_with_a_hint_and_its_exit_code(
    folder: Path, train_local: Callable[..., Done]
) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "x").touch()
    cases = [
        (["nothing.toml"], 3, "error[E0300]: job file nothing.toml does not exist"),
        (["job.toml", "--set", "data.source=none.txt"], 3, 'error[E0301]: data.source = "none.txt" matches no file'),
        (["job.toml", "--set", "model.config.hiden_size=3"], 3, "error[E0300]: unknown key model.config.hiden_size"),
        (["job.toml", "--out", "full"], 10, "error[E1000]: full exists already"),
        (["job.toml", "--device", "cuda:77"], 3, 'error[E0300]: device "cuda:77" is not on this machine'),
        (["job.toml", "--threads", "0"], 2, "error[E0200]: --threads 0"),
        *((["job.toml", "--speeds", speed], 2, f"error[E0200]: --speeds {speed}: give") for speed in BAD_SPEEDS),
        (["job.toml", "--set", "nonsense"], 2, "error[E0200]: --set needs KEY=VALUE"),
    ]
    for arguments, code, message in cases:
        done = train_local(*arguments)
        assert done.code == code, (arguments, done.err)
        assert done.err.startswith(message), (arguments, done.err)
        assert "Traceback" not in done.err
        assert done.out == ""
    assert train_local().code == 2
    assert train_local("-h").code == 0
    assert not (folder / "tiny").exists()


def test_the_module_runs_as_a_program(folder: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "swarm.reference", "nothing.toml"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(root), "PATH": ""}
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error[E0300]: job file nothing.toml does not exist\nhint: ")


def test_a_model_with_the_vocabulary_of_a_tokenizer_that_nobody_named_is_warned_of(
    folder: Path, train_local: Callable[..., Done]
) -> None:
    """swarm submit warned of a job with vocab_size = 128256 and no tokenizer; train-local trained on its bytes."""
    words = "the data is read as bytes, 257 tokens, though model.config.vocab_size = 300"
    wide = ("--set", "model.config.vocab_size=300", *SHORT)
    assert words in train_local("job.toml", "--out", "wide", *wide).err
    for name, meant in (("own", SHORT), ("named", (*wide, "--set", "model.tokenizer=byte"))):
        done = train_local("job.toml", "--out", name, *meant)
        assert (done.code, "read as bytes" in done.err) == (0, False), done.err


SHORT = ("--threads", "1", "--set", "training.steps=2", "--set", "training.warmup_steps=1")


def _folder_named(told: str) -> Path:
    return next(Path(word.rstrip(":")) for word in told.split() if ".part-" in word)


def test_a_model_whose_place_was_taken_during_training_is_kept(
    folder: Path, train_local: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = trainer.train_local

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        (folder / "model").mkdir()
        (folder / "model" / "notes.txt").write_text("of somebody else")
        return train(*arguments, **options)

    monkeypatch.setattr(trainer, "train_local", meanwhile)
    done = train_local("job.toml", "--out", "model", *SHORT)
    assert (done.code, done.out) == (10, "")
    assert sample(_folder_named(done.err), "the quick", tokens=5, seed=1).startswith("the quick")


def test_a_model_that_cannot_be_moved_to_its_place_is_kept(
    folder: Path, train_local: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output folder was a mounted volume: the last rename met EBUSY, and all that was trained was removed."""

    def refuse(part: Path, place: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(trainer, "put_in_place", refuse)
    done = train_local("job.toml", "--out", "model", *SHORT)
    assert (done.code, done.out) == (3, "")
    assert "error[E0300]: model cannot be written: Device or resource busy\n" in done.err
    assert sample(_folder_named(done.err), "the quick", tokens=5, seed=1).startswith("the quick")


def test_a_model_for_which_the_disk_has_no_room_is_written_elsewhere(
    folder: Path, train_local: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = trainer._write

    def full(path: Path, content: bytes) -> None:
        if path.is_relative_to(folder / "volume") and path.name == "config.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(trainer, "_write", full)
    (folder / "volume").mkdir()
    done = train_local("job.toml", "--out", "volume/model", *SHORT)
    assert done.code == 0, done.err
    assert f"what was written of the model stays in {folder / 'volume'}" in done.err
    assert sample(folder / "volume" / "model", "the quick", tokens=5, seed=1).startswith("the quick")


def test_threads_auto_takes_no_more_than_the_quota_of_the_container(
    train_local: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container of 1 CPU it started a thread for each core of the machine, and they waited for each other."""
    asked: list[int | None] = []

    def configure(where: torch.device, *, threads: int | None, reproducible: bool) -> None:
        asked.append(threads)
        torch.set_num_threads(1)

    monkeypatch.setattr(trainer, "cores", lambda: 1)
    monkeypatch.setattr(trainer, "configure", configure)
    torch.set_num_threads(2)
    done = train_local("job.toml", "--out", "model", "--threads", "auto", *SHORT[2:])
    assert (done.code, asked) == (0, [1])


def test_a_checkpoint_in_a_folder_gives_a_job_its_narrow_places(folder: Path, train_local: Callable[..., Done]) -> None:
    """Of those that `--set` leaves open, as few as one stage asks for: 2 of 4 layers apart."""

    def flags(narrow: str, *more: str) -> tuple[str, ...]:
        changes = ("model.config.num_hidden_layers=4", f"model.narrow={narrow}", "checkpoint.every_steps=2", *more)
        return ("job.toml", "--threads", "1", *(flag for change in changes for flag in ("--set", change)))

    kept = folder / "narrow-checkpoints" / "step-00000002"
    done = train_local(*flags('{kind = "maxout", every = 1}', "training.steps=3"), "--out", "narrow")
    assert done.code == 0, done.err
    open_, none = '{kind = "maxout"}', '{kind = "none"}'
    again = train_local(*flags(open_, "training.steps=3"), "--out", "again", "--resume-from", str(kept))
    assert (again.code, again.out) == (0, done.out), again.err
    refused = train_local(*flags(none, "training.steps=3"), "--out", "other", "--resume-from", str(kept))
    assert (refused.code, 'model.narrow.kind = "none", but the checkpoint' in refused.err) == (3, True), refused.err

    def to_send(narrow: str) -> JobSpec:
        spec = load_job(Path("job.toml"), [*flags(narrow)[4::2], f"checkpoint.resume_from={kept}"])
        return open_start(spec, open_corpus(spec), print)[0]

    assert to_send(open_).model.narrow == NarrowSection(kind="maxout", every=1)
    with pytest.raises(InvalidConfig, match=r"model\.narrow\.kind"):
        to_send(none)
