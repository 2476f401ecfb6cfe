"""`swarm submit`: check a job file, tokenise, send what the scheduler lacks, submit, follow."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from client.connection import Scheduler, dial
from client.flags import Detach
from client.records import Job
from client.shell import Shell
from client.transfer.submission import check, resolved_now, send
from client.transfer.upload import open_start
from client.verbs.example import example_job
from client.verbs.watching.follow import follow_to_success
from client.views import job_values
from swarm.checkpoint.reader import Checkpoint
from swarm.data.batches import TOKEN_DTYPES
from swarm.data.corpus import Corpus
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidConfig, SwarmError, UsageError
from swarm.job.footprint import StageSizes, memory_by_stages, memory_text, stage_needs
from swarm.job.model_config import common_name
from swarm.job.partition import shape_text
from swarm.job.resolve import choice_text
from swarm.job.spec import JobSpec, load_job, read_job, spec_from_json
from swarm.text import counted, first_line, printable, size
from swarm.text_file import read_small
from swarm.types import Memory, PeerState, needs_text

JOB_FILE_BYTES_MAX = 16 << 20
ASKED_S_MAX = 5.0  # --dry-run does without a scheduler
# The keys of a job that a plan decides, and its names for them.
PLANNED = {
    "pipeline.split": "split",
    "pipeline.overlap": "overlap",
    "training.microbatch_sequences": "microbatch_sequences",
    "model.recompute": "recompute",
}
_BY_THE_FLEET = ("stages", "split", "overlap")  # keys of [pipeline] of which "auto" depends on the stage servers


def submit(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Job file (TOML): the model, the data and how it is trained; swarm submit --example prints one. "
            "- reads stdin.",
        ),
    ] = None,
    detach: Detach = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job file, such as training.steps=100."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the job, instead of the file's.", show_default=False)] = "",
    priority: Annotated[
        int | None,
        typer.Option(min=-100, max=100, help="Instead of the file's limits.priority.", show_default=False),
    ] = None,
    resume_from: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|JOB:STEP",
            help="Start from a checkpoint, at its step: a folder on this machine, or one of the scheduler's jobs "
            "(JOB:500, JOB:latest). To start from weights alone, set model.id to a model folder instead.",
            show_default=False,
        ),
    ] = "",
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Cut the job as a plan says: what swarm plan JOB --pool FILE -o json printed. --set wins over it.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the values, where each came from, and the memory it takes; send no data."),
    ] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a complete job file.")] = False,
    managed: Annotated[bool, typer.Option("--managed", hidden=True, help="Started by swarm up.")] = False,
) -> int:
    """Check a job file, tokenise and upload its data, start the job and follow it; Ctrl-C detaches.

    Example: swarm submit --example > job.toml, then swarm submit job.toml --set training.steps=100
    """
    shell: Shell = context.obj
    if example:
        print(example_job(), end="")
        return 0
    if file is None:
        raise UsageError("missing argument FILE", hint="write one with: swarm submit --example > job.toml")
    overrides = [*(set_ or ()), *([f'name="{name}"'] if name else [])]
    if priority is not None:
        overrides.append(f"limits.priority={priority}")
    if resume_from:
        overrides.append(f"checkpoint.resume_from={json.dumps(resume_from, ensure_ascii=False)}")
    with _job_file(file) as path:
        if plan is not None:
            overrides = [*cut_of(plan, load_job(path, set_ or ()), shell.say), *overrides]
        if dry_run:
            show_values(shell, path, overrides)
            return 0
        return send_job(shell, path, overrides, detach=detach, managed=managed)


def cut_of(plan: Path, spec: JobSpec, say: Callable[[str], object]) -> list[str]:
    """What --set would take for the cut of a plan (scheduler/planning/plan.py) of the job `spec`; InvalidConfig.

    Not its places: stage servers that it names may be gone, and the scheduler places what is there. So `say` hears
    whom the plan does without.
    """
    hint = "print one with: swarm plan JOB --pool FILE -o json > plan.json"
    try:
        values = json.loads(read_small(plan))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"plan {plan} cannot be read: {first_line(error)}", hint=hint) from error
    if (
        not isinstance(values, dict)
        or values.get("schema") != "swarm.plan/1"
        or not {"job", *PLANNED.values()} <= values.keys()
        or not all(isinstance(values.get(key), list) for key in ("split", "reasons"))
    ):
        raise InvalidConfig(f"{plan} is no plan", hint=hint)
    if values["job"] != spec.name:
        told = f"{plan} is a plan of job {printable(str(values['job'])[:40])}, not of {spec.name}"
        raise InvalidConfig(told, hint=hint)
    layers = sum(part for part in values["split"] if isinstance(part, int))
    if not spec.model.id and layers != spec.layers:
        raise InvalidConfig(f"{plan} is of a model of {counted(layers, 'layer')}, not of {spec.layers}", hint=hint)
    say(f"{plan}: the scheduler places all stage servers; what was predicted holds without those left out")
    for reason in map(str, values["reasons"]):
        if reason.startswith(("as placed: ", "left out: ")):
            say(printable(reason))
    stages = f"pipeline.stages={len(values['split'])}"
    return [stages, *(f"{key}={json.dumps(values[name])}" for key, name in PLANNED.items())]


@contextmanager
def _job_file(file: Path) -> Iterator[Path]:
    """The named job file; for "-" a file with the content of stdin."""
    if str(file) != "-":
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="swarm-job-") as folder:
        path = Path(folder, "stdin.toml")
        path.write_bytes(sys.stdin.buffer.read(JOB_FILE_BYTES_MAX))
        try:
            yield path
        except SwarmError as error:  # names the file: a person knows no such file
            error.message = error.message.replace(str(path), "stdin")
            raise


@dataclass(frozen=True, slots=True)
class Value:
    """One resolved value of a job and where it came from: default, file, --set or auto."""

    key: str
    value: Any
    origin: str


def check_job(
    path: Path, overrides: Sequence[str], say: Callable[[str], object] = lambda line: None
) -> tuple[JobSpec, Corpus]:
    """The spec in `path` and its data, after every check that needs no scheduler: InvalidConfig, UsageError."""
    return check(load_job(path, overrides), say)


def send_job(shell: Shell, path: Path, overrides: Sequence[str], *, detach: bool, managed: bool = False) -> int:
    """Send the job in `path` to the scheduler and follow it; returns the exit code.

    `managed`: `swarm up` started this and stops it, so nothing is said about detaching.
    """
    spec, corpus = check_job(path, overrides, shell.say)
    with dial(shell) as scheduler:
        job = send(shell, scheduler, spec, corpus)
        return _after_submit(shell, scheduler, job, detach=detach, managed=managed)


def _after_submit(shell: Shell, scheduler: Scheduler, view: Job, *, detach: bool, managed: bool) -> int:
    if shell.json:
        shell.data(job_values(view))
    else:
        print(view.id, flush=True)
    where = shell.scheduler_flag
    commands = f"follow: swarm status -w {view.id}{where}   cancel: swarm cancel {view.id}{where}"
    shell.say(f"job {view.id} accepted: {view.reason or view.state}")
    resolved = spec_from_json(view.spec_json)
    shell.say(f"{shape_text(resolved)}; {memory_text(resolved)}")
    if resolved.pipeline.recut == "stall" and resolved.limits.on_stall == "wait" and len(resolved.split) > 1:
        few = f"with too few stage servers for {resolved.limits.no_progress_s:g} s it goes on with fewer stages"
        shell.say(f'{few}; pipeline.recut = "off": it waits')
    if detach:
        shell.say(commands)
        return 0
    if not managed:
        shell.say(f"Ctrl-C detaches, the job goes on.   {commands}")
    code = follow_to_success(shell, scheduler, view.id, commands=commands)
    if not (code or managed):
        shell.say(f"fetch the model: swarm pull {view.id} DIR{where}")
    return code


# --dry-run -----------------------------------------------------------------------------------------------------------


def show_values(shell: Shell, path: Path, overrides: Sequence[str]) -> None:
    """Show the values, where each came from, and what the job takes; sends no data. Raises as `send_job` does."""
    spec, corpus = check_job(path, overrides, shell.say)
    spec, start = open_start(spec, corpus, shell.say)
    values = origins(spec, corpus, path, overrides)
    formats = sorted({source.format for source in corpus.sources})
    resolved = corpus.resolve(spec)
    work, needs = _work_of(resolved, corpus), memory_by_stages(resolved)
    if shell.json:
        shell.data(
            {
                "values": [{"key": value.key, "value": value.value, "origin": value.origin} for value in values],
                "files": len(corpus.sources),
                "size_bytes": corpus.size_bytes,
                "formats": formats,
                "vocabulary_size": corpus.tokenizer.vocabulary_size,
                "parameters": work.parameters,
                "tokens": work.tokens,
                "epochs": work.epochs,
                "largest_stage": [{"stages": stages, **asdict(need)} for stages, need in needs.items()],
                "stages": [asdict(need) for need in _say_fleet(shell, spec, corpus, start)],
            }
        )
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("KEY", "VALUE", "FROM"):
        table.add_column(column, overflow="fold")
    for value in values:
        table.add_row(Text(value.key), Text(_shown(value.value)), Text(value.origin))
    shell.out.print(table)
    kinds = f"{counted(len(corpus.sources), 'file')} ({', '.join(formats)})"
    if formats == ["hf"]:
        kinds = "a Hugging Face data set"
    total = size(corpus.size_bytes) if corpus.size_bytes else "not downloaded yet"
    epochs = "" if work.epochs is None else f", about {work.epochs:.3g} times all of the data"
    shell.say(f"model: {work.parameters:,} parameters; it is trained on {work.tokens:,} tokens{epochs}")
    by_stages = (
        f"{size(need.total_bytes)} ({size(need.device_bytes)} on the device) with {counted(stages, 'stage')}"
        for stages, need in needs.items()
    )
    shell.say(f"memory: the largest stage takes about {', '.join(by_stages)}")
    shell.say(f"data: {kinds}, {total}; vocabulary of {corpus.tokenizer.vocabulary_size}; no data was sent")
    _say_fleet(shell, spec, corpus, start)


def _say_fleet(shell: Shell, spec: JobSpec, corpus: Corpus, start: Checkpoint | None) -> list[Memory]:
    """Say what the scheduler's stage servers offer, and give what each stage takes; OutOfMemory if it is too much.

    Without a scheduler nothing is given.
    """
    try:
        with dial(shell, ASKED_S_MAX) as scheduler:
            scheduler.check_protocol()
            peers = [peer for peer in scheduler.peers() if peer.state in (PeerState.IDLE, PeerState.SERVING)]
    except SwarmError as error:
        shell.say(f"offered: not known, {error.message}")
        return []
    offers = Counter(Memory(peer.memory_bytes, peer.host_bytes) for peer in peers)
    kinds = (
        ", ".join(f"{count} x {offer if offer.device_bytes else 'not said'}" for offer, count in offers.items())
        or "nothing"
    )
    shell.say(f"offered by {counted(len(peers), 'stage server')}: {kinds}")
    with dial(shell) as scheduler:
        now = corpus.resolve(resolved_now(scheduler, spec, corpus, start))
    takes = stage_needs(now, now.split)
    two = any(peer.host_bytes for peer in peers)
    said = needs_text([need if two else Memory(need.total_bytes) for need in takes])
    alike = now.pipeline.model_copy(update={"max_in_flight": spec.pipeline.max_in_flight})
    choice = choice_text(now, corpus.resolve(spec).model_copy(update={"pipeline": alike}))
    shell.say(f"there: {shape_text(now)}; {said}{f'; {choice}' if choice else ''}")
    return takes


@dataclass(frozen=True, slots=True)
class _JobSize:
    """The size of the model and of the training."""

    parameters: int
    tokens: int
    epochs: float | None  # None: only tokenising tells how many tokens the data has


def _work_of(resolved: JobSpec, corpus: Corpus) -> _JobSize:
    training, data = resolved.training, resolved.data
    tokens = training.steps * training.global_batch_sequences * data.sequence_length
    parameters = StageSizes(resolved).parameters(resolved.layers, first=True, last=True)
    width = TOKEN_DTYPES[data.bin_dtype].itemsize
    kinds = {source.format for source in corpus.sources}
    has_known_length = kinds == {"bin"} or (kinds == {"text"} and isinstance(corpus.tokenizer, ByteTokenizer))
    held = corpus.size_bytes / (width if kinds == {"bin"} else 1)
    trained = (1.0 - data.validation_ratio) * held
    return _JobSize(parameters, tokens, tokens / trained if has_known_length and trained else None)


def origins(spec: JobSpec, corpus: Corpus, path: Path, overrides: Sequence[str]) -> list[Value]:
    """Every value of the spec in the order of the job file, resolved as far as it can be without a scheduler."""
    resolved = corpus.resolve(spec)
    family = resolved.model.family
    in_file = {_final_key(key, family) for key in _leaves(read_job(path))}
    by_flag = {_final_key(override.partition("=")[0].strip(), family) for override in overrides}
    written = _leaves(spec.model_dump(mode="json"))
    final = _leaves(resolved.model_dump(mode="json"))
    chosen = [key for key in _BY_THE_FLEET if written[f"pipeline.{key}"] == "auto"]
    if spec.pipeline.split != "auto":
        chosen = [key for key in chosen if key != "stages"]
    elif spec.pipeline.stages != "auto":
        chosen = [key for key in chosen if key != "split"]
    final |= {f"pipeline.{key}": "auto" for key in chosen}
    values = []
    for key, value in final.items():
        if _named(key, by_flag):
            origin = "--set"
        elif _named(key, in_file):
            origin = "file"
        elif spec.model.id and key.startswith(("model.config.", "model.family", "model.revision")):
            origin = "model.id"
        else:
            origin = "default"
        if key.removeprefix("pipeline.") in chosen:
            origin += ", chosen when it is submitted"
        elif key == "pipeline.max_in_flight" and value == "auto":
            origin += ", chosen when the job starts"
        elif value != written.get(key, value):
            origin += ", auto"
            if key == "training.microbatch_sequences" and value > 1:
                origin += "; less if memory is short"
            elif key == "model.narrow.every":
                origin += "; less if there are more stages"
            elif key in ("model.recompute", "training.optimizer_on"):
                origin += "; otherwise if memory is short"
        values.append(Value(key, value, origin))
    return values


def _final_key(key: str, family: str) -> str:
    """A key as a user may write it, under the name that it has in a resolved spec."""
    section, dot, field_name = key.rpartition(".")
    return f"{section}{dot}{common_name(family, field_name)}" if section == "model.config" else key


def _named(key: str, names: set[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _leaves(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _shown(value: Any) -> str:
    match value:
        case str():
            return f'"{value}"'
        case bool():
            return str(value).lower()
        case list():
            return "[" + ", ".join(_shown(item) for item in value) + "]"
        case _:
            return str(value)
