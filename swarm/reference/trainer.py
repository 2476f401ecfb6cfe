"""The one-process trainer, against which every claim about a swarm is checked.

It trains a job here and now (`swarm train-local`): the same stages, the wire codec at the same cuts, the same data,
sums, clipping, schedule and optimizer, one microbatch after the other. It has no network, no replicas and no recovery,
so it is short enough to be trusted; with `training.reproducible` the swarm must end with the same bits. Several islands
take turns here, an inner step each.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from swarm.checkpoint.reader import Checkpoint, list_checkpoints
from swarm.checkpoint.storage import open_storage
from swarm.data.batches import Batches, TokenData
from swarm.data.corpus import Corpus, tokenise
from swarm.data.shards import TokenManifest, remarks
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidConfig, JobFailed, NotAllowed, OutOfMemory
from swarm.hf import model_folder
from swarm.hf.placing import begin, put_in_place
from swarm.job.course import PLAIN, Course, InnerStep
from swarm.job.islands import check_speeds, course_of, courses, island_spec, leases_of
from swarm.job.outer_log import Entry
from swarm.job.partition import unit_names
from swarm.job.resolve import lighter
from swarm.job.schedule import (
    NOT_FINITE_HINT,
    clip,
    evaluation_due,
    learning_rate,
    not_finite_fault,
    overflow_fault,
    perplexity,
)
from swarm.job.spec import JobSpec
from swarm.model.codec import overflows, round_trip
from swarm.model.compiled import compile_layers
from swarm.model.exact_sums import mean_of_parts
from swarm.model.runtime import choose_device, configure, to_host
from swarm.model.stage import Stage
from swarm.model.state import parameter_hashes, read_initial, weights_file
from swarm.process.cores import cores
from swarm.process.temporary import temporary_folder
from swarm.reference.checkpoints import Islands, LocalCheckpoints, islands_from
from swarm.reference.islands import ReferenceOuterSteps, begin_anew, lease_by, tokens_before, took_part
from swarm.text import counted
from swarm.types import Direction, JobId, Microbatch, UnitName

TOKENISE_LINE_S = 5.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One committed step. `loss` is nats per token, `norm` the global gradient norm before clipping (skipped: NaN).

    For several islands: the loss of all tokens, the greatest norm (NaN if one skipped), the smallest scale.
    """

    step: int
    loss: float
    norm: float
    scale: float
    learning_rate: float
    skipped: bool
    tokens: int
    cause: str = ""  # of gradients that are not finite, if it is known
    is_whole: bool = True  # behind it no island owes steps to the others, since it was late


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The validation loss of weights `version`, in nats per token."""

    version: int
    loss: float


OnStep: TypeAlias = Callable[[StepReport], None]
OnCommit: TypeAlias = Callable[[Islands, StepReport], None]
OnEvaluation: TypeAlias = Callable[[EvaluationReport], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """The end of a run: loss per step, the stages with the final weights, their sha256."""

    losses: tuple[float, ...]
    stages: tuple[Stage, ...]
    sha256: str
    evaluations: tuple[EvaluationReport, ...] = ()


def train_local(
    spec: JobSpec,
    batches: Batches,
    *,
    device: torch.device | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_commit: OnCommit | None = None,
    start: Checkpoint | None = None,
    log: Sequence[Entry] = (),
    speeds: Sequence[float] = (),
) -> Trained:
    """Train all steps of a resolved spec in this thread, or those after the checkpoint `start`.

    With outer steps, `islands.count` islands take turns, and the losses are over all. With the `log` of a swarm
    (InvalidConfig if it does not fit) islands are left out, are late, begin as copies of others, and train what they
    trained there. Behind the first period leases that follow speed do so by `speeds`: inner steps per second, of each
    island.

    `on_commit` may look at the stages of all islands after each step. JobFailed if a step is not finite and
    `limits.on_nonfinite` is "fail", or too many of an island were in a row; with "pause" after `on_commit`, with diloco
    where islands hold the outer weights.
    """
    device = device or torch.device("cpu")
    share = island_spec(spec)
    check_speeds(spec, len(speeds), repeats=bool(log))
    if start is None:
        islands = [build_stages(share, device) for _ in range(spec.island_count)]
    else:
        islands = islands_from(start, spec, device)
    first_step, stages = 0 if start is None else start.step, islands[0]
    exchanges = took_part(spec, log, first_step, leases := leases_of(spec))
    if spec.model.compile and (fault := compile_layers([stage for island in islands for stage in island], spec)):
        _say(f"layers are not compiled: {fault}")
    if leases is not None:
        batches = batches.leased(leases)
        if speeds:
            lease_by(speeds, leases, spec.training.steps)
    outer, course = None, course_of(spec, 0)
    if spec.has_outer_steps:
        outer = ReferenceOuterSteps(spec, islands, tokens_before(spec, batches.tokens_of, first_step))
    losses, evaluations, skipped_in_a_row, evaluates, pauses = [], [], [0] * len(islands), False, ""
    for step in range(first_step, spec.training.steps):
        reports = {
            number: train_step(islands[number], share, batches, courses(spec)[number].at(step), course)
            for number in exchanges.islands(step)
        }
        stages = islands[min(reports)]
        for number, one in reports.items():
            skipped_in_a_row[number] = _skipped_in_a_row(spec, step, one, skipped_in_a_row[number])
        tokens = {number: one.tokens for number, one in reports.items()}
        if outer is not None and (dropped := outer.after(step, tokens, exchanges)):
            _say(f"after step {step + 1} what islands proposed is not finite, and is dropped: fragments {dropped}")
        for number, origin in exchanges.begins(step).items():
            begin_anew(islands[number], islands[origin])
            if outer is not None:
                outer.begin(number)
            skipped_in_a_row[number] = 0
        owing = set[int]() if outer is None else outer.owing
        report = replace(_together(step, list(reports.values())), is_whole=not owing)
        losses.append(report.loss)
        if on_step is not None:
            on_step(report)
        if on_commit is not None:
            on_commit([islands[number] for number in reports], report)
        is_level = outer is None or outer.is_level
        if report.skipped and spec.limits.on_nonfinite == "pause" and not pauses:
            pauses = f'the gradient of step {step} is not finite, and limits.on_nonfinite = "pause"'
        if pauses and is_level and report.is_whole:
            hint = "go on from the last checkpoint with: swarm train-local FILE --resume-from FOLDER"
            raise JobFailed(pauses, hint=hint)
        due = evaluation_due(step + 1, spec.training.eval_every_steps, spec.training.steps)
        evaluates = (evaluates or due) and batches.evaluation_microbatches > 0
        # The outer weights, once islands hold them; if they never do, the weights of the first island as they are.
        streams = outer is not None and outer.streams
        if evaluates and (is_level or streams):
            evaluates, holder = False, min(reports if streams else reports.keys() - owing)
            evaluations.append(evaluate(islands[holder], share, batches, step + 1))
            if on_evaluation is not None:
                on_evaluation(evaluations[-1])
    return Trained(tuple(losses), tuple(stages), sha256_of(stages), tuple(evaluations))


def _skipped_in_a_row(spec: JobSpec, step: int, report: StepReport, before: int) -> int:
    """How many steps of an island in a row were not finite; JobFailed if these are too many."""
    if not report.skipped:
        return 0
    fault = not_finite_fault(step, before + 1, steps=spec.training.steps, most=spec.limits.nonfinite_steps_max)
    if fault:
        raise JobFailed(fault, hint=report.cause or NOT_FINITE_HINT)
    return before + 1


def build_stages(spec: JobSpec, device: torch.device) -> list[Stage]:
    """All stages of a resolved spec with their initial weights: drawn from the seed, or read from folder or hub."""
    stages, step_on = range(len(spec.split)), spec.training.step_on
    return [Stage(spec, stage, device, read_initial(spec, stage), step_on=step_on) for stage in stages]


def _together(step: int, reports: Sequence[StepReport]) -> StepReport:
    """The islands' reports of one inner step, combined to the report of the job's step `step`."""
    if len(reports) == 1:
        return replace(reports[0], step=step)
    tokens = sum(report.tokens for report in reports)
    return StepReport(
        step,
        sum(report.loss * report.tokens for report in reports) / tokens,
        math.nan if any(report.skipped for report in reports) else max(report.norm for report in reports),
        min(report.scale for report in reports),
        reports[0].learning_rate,
        any(report.skipped for report in reports),
        tokens,
        next(filter(None, (report.cause for report in reports)), ""),
    )


def train_step(
    stages: Sequence[Stage], spec: JobSpec, batches: Batches, inner: InnerStep, course: Course = PLAIN
) -> StepReport:
    """Compute, average and apply the next step on all stages; `inner` gives its portion and rate step."""
    training = spec.training
    step = stages[0].version
    loss, finite, cause = 0.0, True, ""
    for index in range(batches.microbatches_of(inner.portion)):
        version = course.version_of(step, index, overlap=spec.overlap, sync_steps=spec.sync_steps)
        microbatch = Microbatch(0, step, index)
        microbatch_loss, microbatch_finite, overflow = _run(stages, spec, batches, inner.portion, microbatch, version)
        loss, cause = loss + microbatch_loss, cause or overflow
        finite = finite and microbatch_finite
    tokens = batches.tokens_of(inner.portion)

    means = _means(stages, spec, step, tokens) if finite else {}
    norms = [
        parameter.squared_norm
        for unit, members in unit_names(len(stages), spec.tied).items()
        if finite
        for parameter in stages[members[0]].places.squared_norms(unit, means[unit])
    ]
    norm, scale = clip(norms, training.grad_clip_norm) if finite else (math.nan, 1.0)
    skip = not math.isfinite(norm)  # finite float32 contributions may still add up to infinity
    if skip and spec.limits.on_nonfinite == "fail":
        raise JobFailed(
            f"the gradient of step {inner.rate_step} is not finite",
            hint=cause or 'lower training.learning_rate, or set limits.on_nonfinite = "skip"',
        )
    rate = learning_rate(training, inner.rate_step)
    for stage in stages:
        stage.apply(step, means, learning_rate=rate, scale=scale, skip=skip)
    return StepReport(step, loss / tokens, norm, scale, rate, skip, tokens, cause)


def evaluate(stages: Sequence[Stage], spec: JobSpec, batches: Batches, version: int) -> EvaluationReport:
    """The validation loss of the stages' newest weights, reported as version `version` of the job."""
    loss = 0.0
    for index in range(batches.evaluation_microbatches):
        tokens, targets = (torch.from_numpy(array) for array in batches.evaluation(index))
        x: Tensor | None = None
        for stage in stages:
            y, microbatch_loss = stage.evaluate(stage.version, x=x, tokens=tokens, targets=targets)
            x = None if y is None else round_trip(y, spec.unmeasured_compression)
        loss += microbatch_loss
    return EvaluationReport(version, loss / batches.evaluation_tokens)


def sha256_of(stages: Sequence[Stage]) -> str:
    """The hash that names the weights of these stages, the same for any number of stages."""
    return model_folder.weights_sha256(
        parameter for stage in stages for parameter in parameter_hashes(stage.capture(optimizer=False))
    )


def save_folder(
    stages: Sequence[Stage],
    spec: JobSpec,
    out_dir: Path,
    tokenizer_files: Mapping[str, bytes] | None = None,
    *,
    spare: Sequence[Path] = (),
) -> None:
    """Write a folder that `from_pretrained` loads, whole or not at all; without `tokenizer_files` bytes are tokens.

    What was trained is not lost: if it cannot be written at `out_dir`, the `spare` places are tried. NotAllowed if
    `out_dir` is there and not an empty folder, InvalidConfig if it cannot be written; both name the folder that holds
    the model.
    """
    part = _write_model(stages, spec, [out_dir, *spare], tokenizer_files)
    hint = f"the model is in {part}: move it with mv"
    try:
        put_in_place(part, out_dir)
    except NotAllowed as error:
        raise NotAllowed(error.message, hint=hint) from None
    except OSError as error:
        raise InvalidConfig(model_folder.cannot_write(out_dir, error).message, hint=hint) from error


def _write_model(
    stages: Sequence[Stage], spec: JobSpec, places: Sequence[Path], tokenizer_files: Mapping[str, bytes] | None
) -> Path:
    """The whole model in a folder at, or beside, the first of the places that takes it.

    InvalidConfig if none does. What was written until an error stays, and is named.
    """
    failures: list[OSError] = []
    for place in places:
        try:
            part = begin(place)
        except OSError as error:
            failures.append(error)
            continue
        try:
            _write_files(stages, spec, part, tokenizer_files)
            return part
        except BaseException as error:
            _say(f"what was written of the model stays in {part}")
            if not isinstance(error, OSError):
                raise
            failures.append(error)
    raise model_folder.cannot_write(places[0], failures[0]) from failures[0]


def _write_files(
    stages: Sequence[Stage], spec: JobSpec, folder: Path, tokenizer_files: Mapping[str, bytes] | None
) -> None:
    files = model_folder.model_folder_files(spec)
    files |= ByteTokenizer().tokenizer_files() if tokenizer_files is None else tokenizer_files
    hashes = {}
    for stage in stages:
        state = stage.capture(optimizer=False)
        name = model_folder.shard_name(stage.stage, len(stages))
        hashes[name] = parameter_hashes(state)
        _write(folder / name, weights_file(state)[:])
    if len(stages) > 1:
        files[model_folder.INDEX_NAME] = model_folder.safetensors_index(hashes)
    for name, content in files.items():
        _write(folder / name, content)


def _run(
    stages: Sequence[Stage], spec: JobSpec, batches: Batches, portion: int, microbatch: Microbatch, version: int
) -> tuple[float, bool, str]:
    """One microbatch through all stages and back: the sum of its token losses, whether all gradients were finite, and
    which output the codec could not carry."""
    codec = spec.unmeasured_compression
    tokens, targets = (torch.from_numpy(array) for array in batches.microbatch(portion, microbatch.index))
    x: Tensor | None = None
    loss, cause = 0.0, ""
    for stage in stages:
        y, loss = stage.forward(microbatch, version, portion=portion, x=x, tokens=tokens, targets=targets)
        x, overflow = (None, None) if y is None else (round_trip(y, codec), overflows(y, codec))
        cause = cause or (overflow_fault(stage.stage, Direction.FORWARD) if overflow else "")
    g: Tensor | None = None
    finite = True
    for stage in reversed(stages):
        dx, stage_finite = stage.backward(microbatch, g)
        g, overflow = (None, None) if dx is None else (round_trip(dx, codec), overflows(dx, codec))
        cause = cause or (overflow_fault(stage.stage, Direction.BACKWARD) if overflow else "")
        finite = finite and stage_finite
    return loss, finite, cause


def _means(stages: Sequence[Stage], spec: JobSpec, step: int, tokens: int) -> dict[UnitName, Tensor]:
    """The averaged gradient of every unit; one process is the only replica of all stages."""
    bits = spec.training.fixed_point_bits if spec.training.reproducible else None
    return {
        unit: mean_of_parts(to_host(*(stages[member].part(step, unit) for member in members)), tokens, bits)
        for unit, members in unit_names(len(stages), spec.tied).items()
    }


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# The command ---------------------------------------------------------------------------------------------------------


def train_and_save(
    spec: JobSpec,
    corpus: Corpus,
    out_dir: Path,
    *,
    device: str,
    threads: int | None,
    start: Checkpoint | None = None,
    log: Sequence[Entry] = (),
    speeds: Sequence[float] = (),
) -> str:
    """Tokenise, train (from `start`, if given), write the model folder, report on stderr; returns the weights' sha256.

    Checkpoints go to checkpoint.dir, or beside `out_dir`. OutOfMemory if the model or a microbatch does not fit the
    device, InvalidConfig if the folder cannot be written. NotAllowed if an earlier run left checkpoints there and this
    one begins anew: they would be removed as older than its own.
    """
    storage = open_storage(_checkpoint_dir(spec, out_dir))
    if start is None and (left := list_checkpoints(storage, JobId(spec.name))[0]):
        raise NotAllowed(
            f"{storage.where} has checkpoints of an earlier run, up to step {left[-1].step}",
            hint=f"go on from them: --resume-from {storage.where}; to begin anew, move them away",
        )
    where = choose_device(device)
    threads = threads or min(torch.get_num_threads(), cores())  # torch knows OMP_NUM_THREADS, and no quota
    configure(where, threads=threads, reproducible=spec.training.reproducible)
    with temporary_folder("swarm-tokens-") as folder:
        manifest = tokenise(spec, folder, _TokeniseProgress(), corpus)
        data = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
        batches = Batches.of_job(spec, data, manifest.end_of_text)
        _say(_opening(spec, manifest, batches))
        for remark in remarks(spec, manifest):
            _say(remark)
        progress = _TrainerProgress(spec.training.steps, start.step if start is not None else 0)
        if not spec.checkpoint.dir and out_dir.is_mount():
            _say(
                f"checkpoints go to {storage.where}, not to the volume at {out_dir}: checkpoint.dir names another place"
            )
        kept = LocalCheckpoints(storage, spec, corpus.small_files, _say, start=start)

        def keep(islands: Islands, report: StepReport) -> None:
            at_once = report.skipped and spec.limits.on_nonfinite == "pause"
            kept.after(islands, report.step + 1, report.loss, report.tokens, at_once=at_once, whole=report.is_whole)

        try:
            trained = train_local(
                spec,
                batches,
                device=where,
                on_step=progress,
                on_evaluation=_say_evaluation,
                on_commit=keep,
                start=start,
                log=log,
                speeds=speeds,
            )
        except KeyboardInterrupt:
            made = list_checkpoints(storage, JobId(spec.name))[0]
            _say(f"stopped; go on from step {made[-1].step}: --resume-from {storage.where}" if made else "stopped")
            raise
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            settings = [setting for setting, _ in lighter(spec) if not setting.startswith("pipeline.")]
            hint = " and ".join(["lower data.sequence_length", *(f"set {setting}" for setting in settings)])
            raise OutOfMemory("the model or a microbatch does not fit the device", hint=hint) from error
    name = out_dir.absolute().name
    spare = [
        folder / name for folder in (Path.cwd(), Path(tempfile.gettempdir())) if folder / name != out_dir.absolute()
    ]
    save_folder(trained.stages, spec, out_dir, corpus.small_files, spare=spare)
    _say(f"model written to {out_dir}")
    return trained.sha256


def _checkpoint_dir(spec: JobSpec, out_dir: Path) -> str:
    if spec.checkpoint.dir:
        return f"{spec.checkpoint.dir.rstrip('/')}/{spec.name}"
    return str(out_dir.absolute().with_name(f"{out_dir.absolute().name}-checkpoints"))


def _opening(spec: JobSpec, manifest: TokenManifest, batches: Batches) -> str:
    passes = spec.training.steps * spec.training.global_batch_sequences / batches.samples
    split = "+".join(str(layers) for layers in spec.split)
    share = island_spec(spec).training
    how = "shared by" if spec.islands.shares == "speed" else "in each of"
    of = f" {how} {spec.island_count} islands" if spec.island_count > 1 else ""
    outer = f"; {spec.averaging.mode}, an exchange every {spec.outer.every_steps} steps" if spec.has_outer_steps else ""
    return (
        f"{counted(manifest.tokens, 'token')}, {passes:.2f} passes; split {split} layers; "
        f"{counted(share.microbatches, 'microbatch')} of {share.microbatch_sequences} sequences{of}{outer}; "
        f"guessing by frequency alone gives a loss of {manifest.unigram_entropy:.3f} nats"
    )


class _TokeniseProgress:
    """A line every few seconds; none if tokenising takes less."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= TOKENISE_LINE_S:
            self._said_s = now_s
            _say(f"tokenised {done_bytes / 2**20:.0f} of {total_bytes / 2**20:.0f} MiB")


class _TrainerProgress:
    """A line per second at most, and one for the last step."""

    def __init__(self, steps: int, first_step: int) -> None:
        self._steps = steps
        self._first_step = first_step
        self._start_s = self._said_s = time.monotonic()
        self._tokens = 0

    def __call__(self, report: StepReport) -> None:
        now_s = time.monotonic()
        self._tokens += report.tokens
        done = report.step + 1
        if now_s - self._said_s < 1.0 and done not in (self._first_step + 1, self._steps):
            return
        self._said_s = now_s
        elapsed_s = max(now_s - self._start_s, 1e-9)
        skipped = "  skipped: not finite" if report.skipped else ""
        _say(
            f"step {done}/{self._steps}  loss {report.loss:.4f}  norm {report.norm:.3f}  "
            f"lr {report.learning_rate:.2e}  {self._tokens / elapsed_s:.0f} tokens/s  "
            f"ETA {elapsed_s / (done - self._first_step) * (self._steps - done):.0f} s{skipped}"
        )


def _say_evaluation(report: EvaluationReport) -> None:
    _say(f"evaluation after step {report.version}: loss {report.loss:.4f}, perplexity {perplexity(report.loss):.4g}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
