"""The job file: what to train, on what, how, as validated values.

A job file is TOML. `load_job` reads it, applies `--set KEY=VALUE` on top, checks everything that can be checked without
data or peers, and raises `InvalidConfig` with one line per fault: the key, what is wrong, the nearest known key. Values
that stay "auto" are resolved once, at submit, and stored with the job.

Only keys that do something are accepted: a key for a planned feature is an unknown key until the feature exists.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from swarm.errors import InvalidConfig, UsageError
from swarm.job.families import FAMILIES
from swarm.job.misfit import misfit
from swarm.job.narrow import FACTOR_MAX, check_every, check_factor, check_split
from swarm.job.optimizers import OptimizerName
from swarm.limits import ISLANDS_MAX, LAYERS_MAX, STAGES_MAX
from swarm.text import counted, parse_size
from swarm.text_file import read_small
from swarm.types import OnStall, Routing

Auto: TypeAlias = Literal["auto"]
if TYPE_CHECKING:
    FamilyName: TypeAlias = str
else:
    FamilyName = Literal["auto", *FAMILIES]

# The `model.dtype` whose stages compute on bfloat16 copies of the weights.
LOWERED: Final = "bfloat16_parameters"

WholeNumber: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=10**6)]  # 1.0 could mean one, or all
Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
# TOML and JSON have lists only.
_FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class Section(BaseModel):
    """Known keys of the right type only, and no change once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NarrowSection(Section):
    """Places between decoder layers where the model itself is narrow, so that less crosses a cut there.

    A place is computed in every cut, also where none lies there: it is part of the model. Stages end at places only.
    """

    kind: Literal["none", "maxout", "bottleneck", "anchor"] = "none"
    factor: Annotated[int, Field(ge=2, le=FACTOR_MAX)] = 4  # a divisor of the model's width: so much less crosses a cut
    every: Auto | Annotated[int, Field(ge=1, le=LAYERS_MAX)] = "auto"  # a place behind every so many decoder layers
    rank: WholeNumber = 0  # anchor: of its table by token; 0: as wide as the model

    @property
    def by_token(self) -> bool:
        """Whether what is behind a place needs the token ids."""
        return self.kind == "anchor"

    @model_validator(mode="after")
    def _does_something(self) -> NarrowSection:
        for key, value in self if self.kind == "none" else ():
            if value != type(self).model_fields[key].default:
                told = f'{key} = {value} does nothing with kind = "none"'
                raise ValueError(f"{told}: set model.narrow.kind, or remove it")
        if self.rank and not self.by_token:
            raise ValueError(f'rank = {self.rank} does nothing with kind = "{self.kind}": remove it')
        return self


class ModelSection(Section):
    """The model: from a local folder or the hub (`id`), or from scratch, given by its Hugging Face config.

    `swarm.hf.pretrained.ground` fills `family`, `config` and `revision` from the model that `id` names.
    """

    id: str = ""  # local folder or hub id; empty = from scratch
    revision: Annotated[str, Field(min_length=1)] = "main"  # of a hub id
    family: FamilyName = "auto"
    # Fields of the family's Hugging Face config; with an id all that its config.json says, grounded.
    config: dict[str, Any] = Field(default_factory=dict)
    init: Literal["pretrained", "random"] = "pretrained"  # without an id always random
    # bfloat16: autocast; bfloat16_parameters: whole layers, on copies of the weights. Master weights stay float32.
    dtype: Literal["float32", "bfloat16", "bfloat16_parameters"] = "bfloat16"
    recompute: Auto | bool = "auto"  # compute forward again for backward, in the place of keeping it
    compile: bool = False  # torch.compile of the decoder layers
    tokenizer: str = ""  # "byte", a local folder or a hub id; empty = that of id, without an id "byte"
    narrow: NarrowSection = NarrowSection()


class DataSection(Section):
    """The text, and how it becomes sequences."""

    source: Annotated[str, Field(min_length=1)]
    format: Literal["auto", "text", "jsonl", "parquet", "bin", "hf"] = "auto"
    text_field: Annotated[str, Field(min_length=1)] = "text"  # jsonl, parquet, hf; doc.text is a field of a field
    on_null: Literal["fail", "skip"] = "fail"  # jsonl, parquet, hf: a row whose text is null or not there
    subset: str = ""  # hf: its configuration
    split: Annotated[str, Field(min_length=1)] = "train"  # hf
    bin_dtype: Literal["uint16", "uint32"] = "uint16"
    sequence_length: Annotated[int, Field(ge=8, le=1 << 20)] = 1024
    packing: bool = True  # a sample may hold several documents; False: each document begins a sample
    shuffle: bool = True
    validation_ratio: Annotated[float, Field(ge=0, le=0.5)] = 0.0  # the last part of the samples is not trained on
    upload_shard_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 30)] = 64 << 20

    @field_validator("upload_shard_bytes", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value


class TrainingSection(Section):
    """The optimizer's side: how much, how fast, how exactly."""

    steps: Annotated[int, Field(ge=1, le=10**9)] = 1000
    global_batch_sequences: Annotated[int, Field(ge=1, le=10**6)] = 256
    microbatch_sequences: Auto | Annotated[int, Field(ge=1, le=4096)] = "auto"
    optimizer: OptimizerName = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-4
    betas: Annotated[tuple[Beta, Beta], _FROM_LIST] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    lookahead: Annotated[float, Field(ge=0, lt=1)] = 0.3  # adamw: share of the fresh gradient in the numerator
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # sgd only
    optimizer_on: Auto | Literal["device", "host"] = "auto"  # host: its state is in the memory beside the device's
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 100  # by default at most `steps`
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    grad_clip_norm: Annotated[float, Field(ge=0)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    eval_every_steps: Annotated[int, Field(ge=0, le=10**9)] = 0  # 0 = never; else after the last step too
    reproducible: bool = False
    fixed_point_bits: Annotated[int, Field(ge=16, le=40)] = 30

    @model_validator(mode="after")
    def _fits(self) -> TrainingSection:
        if "warmup_steps" not in self.model_fields_set:
            object.__setattr__(self, "warmup_steps", min(self.warmup_steps, self.steps))  # frozen for all others
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} is more than steps = {self.steps}: "
                "lower training.warmup_steps or raise training.steps"
            )
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f'momentum = {self.momentum} does nothing for optimizer = "{self.optimizer}": '
                'remove training.momentum, or set training.optimizer = "sgd"'
            )
        size = self.microbatch_sequences
        if size != "auto" and self.global_batch_sequences % size:
            raise ValueError(
                f"microbatch_sequences = {size} does not divide global_batch_sequences = "
                f'{self.global_batch_sequences}: choose a divisor, or "auto"'
            )
        return self

    @property
    def step_on(self) -> str:
        """Where the optimizer runs, as LoadStage says it."""
        return "cpu" if self.optimizer_on == "host" else "device"

    @property
    def microbatches(self) -> int:
        """Microbatches per step; only once `microbatch_sequences` is resolved."""
        assert self.microbatch_sequences != "auto", "resolve the spec first"
        return self.global_batch_sequences // self.microbatch_sequences


class PipelineSection(Section):
    """How layers become stages and microbatches find their way."""

    stages: Auto | Annotated[int, Field(ge=1, le=STAGES_MAX)] = "auto"
    split: Annotated[
        Auto | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=STAGES_MAX)], _FROM_LIST
    ] = "auto"
    routing: Routing = "least_completion"
    max_in_flight: Auto | Annotated[int, Field(ge=1, le=4096)] = "auto"
    # "auto": each link by its measured speed, so not the same in every run.
    compression: Auto | Literal["none", "bfloat16", "float16", "int8"] = "bfloat16"
    # Microbatches of a step that use weights one step old, so that steps overlap, or their share; 0: synchronous.
    overlap: Auto | Literal["all"] | WholeNumber | Annotated[float, Field(gt=0, lt=1)] = "auto"
    sync_steps: Auto | Annotated[int, Field(ge=0, le=10**9)] = "auto"  # the first steps do without overlap
    rebalance: bool = True  # move stage servers to the stage that limits the job
    # "stall": a job that waits is cut anew for the stage servers that are there. "auto" in a stored job: it is not.
    recut: Auto | Literal["stall", "off"] = "auto"

    @property
    def staleness(self) -> int:
        """How many versions before the newest a stage keeps: 1 with overlap, else 0."""
        return 0 if self.overlap == 0 else 1


class CheckpointSection(Section):
    """Checkpoints: when they are written, and where they are kept."""

    dir: str = ""  # a folder or URL that the scheduler can write; empty = the scheduler's data folder
    every_steps: Annotated[int, Field(ge=0, le=10**9)] = 500  # 0 = not by steps
    every_s: Annotated[float, Field(ge=0, le=10**6)] = 1800.0  # 0 = not by time; the first after 3 minutes
    keep_last: Annotated[int, Field(ge=2, le=1000)] = 3
    keep_every_steps: Annotated[int, Field(ge=0, le=10**9)] = 0  # multiples of it are kept for ever; 0 = none
    optimizer: bool = True  # needed to go on exactly
    resume_from: str = ""  # a checkpoint's folder, or "JOB:STEP"


class LimitsSection(Section):
    """When to start, when to give up."""

    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    max_replicas: Annotated[int, Field(ge=0, le=1000)] = 0  # times the stages: what the job takes at most; 0 = all
    no_progress_s: Annotated[float, Field(ge=10, le=86400)] = 300.0
    max_runtime_s: Annotated[float, Field(ge=0)] = 0.0
    on_stall: OnStall = "wait"  # a stage lost its last replica, or no_progress_s passed without a step
    on_nonfinite: Literal["skip", "pause", "fail"] = "skip"
    nonfinite_steps_max: Annotated[int, Field(ge=1, le=10**9)] = 10  # with "skip": this number in a row fails the job


class TrustSection(Section):
    """How replicas are checked. By default everybody is believed, and nothing is sent or computed for it."""

    # The share of hops that another replica computes again: 0 = off, about 0.02 on machines of others.
    spot_check: Annotated[float, Field(ge=0, le=1)] = 0.0
    # The share of steps of which one replica's sum is computed once more by another: 0 = off.
    recount: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Whether other replicas of a stage say by hash what one of them hands over for a checkpoint.
    second_hash: bool = False
    # The share of rounds of averaging of which one slice is reduced once more, by another member: 0 = off.
    second_owner: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def hashes_hops(self) -> bool:
        """Whether replicas say by hash what they took and made at each hop."""
        return self.spot_check > 0.0 or self.recount > 0.0

    def check(self, *, reproducible: bool, compresses_slices: bool) -> None:
        """ValueError if the job cannot be checked."""
        if self.hashes_hops and not reproducible:
            name, share = ("spot_check", self.spot_check) if self.spot_check else ("recount", self.recount)
            raise ValueError(
                f"trust.{name} = {share:g} compares results bit for bit, which differ from replica to "
                f"replica without training.reproducible = true: set that, or leave trust.{name} out"
            )
        if self.second_owner and compresses_slices:
            raise ValueError(
                f"trust.second_owner = {self.second_owner:g} compares means with the sums that they are made of, which "
                'compression changes: set averaging.compression = "none", or leave trust.second_owner out'
            )


EXCHANGES_MAX = 200_000  # of a job: they are counted one by one


class IslandsSection(Section):
    """How many complete pipelines train the job, each by itself between two exchanges ([outer])."""

    count: Auto | Annotated[int, Field(ge=1, le=ISLANDS_MAX)] = "auto"  # one for each site; else 1, or 2 with gaia
    min: Annotated[int, Field(ge=1, le=ISLANDS_MAX)] = 1  # with fewer at work the job stalls
    shares: Literal["auto", "equal", "speed"] = "auto"  # of the batch (swarm/job/leases.py)


class AveragingSection(Section):
    """How replicas of a stage agree on one gradient, and islands on one model."""

    # allreduce: one island, every step; the others: an outer step now and then (swarm/job/outer.py).
    mode: Literal["allreduce", "diloco", "streaming", "gaia"] = "allreduce"

    # How the sums of replicas become one gradient; centered_clip: those that stray are cut (swarm/model/robust.py).
    aggregate: Literal["mean", "centered_clip"] = "mean"
    # Of gradients between replicas; what is left out is added to the next step's.
    compression: Literal["none", "bfloat16", "int8"] = "none"
    timeout_s: Annotated[float, Field(ge=1, le=3600)] = 60.0


class OuterSection(Section):
    """The exchange between islands; "auto" depends on averaging.mode (swarm/job/resolve.py)."""

    every_steps: Auto | Annotated[int, Field(ge=1, le=10**6)] = "auto"  # inner steps between two exchanges
    learning_rate: Auto | Annotated[float, Field(gt=0, le=10)] = "auto"
    momentum: Auto | Annotated[float, Field(ge=0, lt=1)] = "auto"
    fragments: Auto | Annotated[int, Field(ge=1, le=LAYERS_MAX)] = "auto"
    overlap_steps: Auto | Annotated[int, Field(ge=0, le=1000)] = "auto"  # inner steps while a fragment is exchanged
    mixing: Auto | Annotated[float, Field(ge=0, lt=1)] = "auto"  # the share of its weights that an island keeps
    compression: Auto | Literal["none", "bfloat16", "int8", "fp4"] = "auto"  # of what islands propose
    # gaia only: the share of an outer weight by which an island must differ from it to propose it, in the first step
    threshold: Auto | Annotated[float, Field(ge=0, le=1)] = "auto"
    patience: Auto | Literal["none"] | Annotated[float, Field(ge=0, le=1)] = "auto"  # with islands, share of a period


def check_islands(spec: JobSpec) -> None:
    """ValueError if the three sections do not fit each other, or the batch."""
    mode, outer, count = spec.averaging.mode, spec.outer, spec.island_count
    if spec.islands.count != "auto" and spec.islands.min > count:
        raise ValueError(f"islands.min = {spec.islands.min} is more than islands.count = {count}: lower it")
    if not spec.has_outer_steps:
        if count > 1:
            raise ValueError(f'islands.count = {count} needs averaging.mode = "diloco", "streaming" or "gaia": set it')
        if spec.islands.shares == "speed":
            raise ValueError('islands.shares = "speed" needs averaging.mode = "diloco", "streaming" or "gaia": set it')
        if outer != OuterSection():
            raise ValueError(f'[outer] does nothing with averaging.mode = "{mode}": remove it, or set mode = "diloco"')
        return
    _check_gaia(spec)
    batch, size = spec.training.global_batch_sequences, spec.training.microbatch_sequences
    if batch % count or (size != "auto" and batch // count % size):
        to = f"{'' if batch % count else f' into shares of whole microbatches of {size}'}: change one of them"
        raise ValueError(f"islands.count = {count} does not divide training.global_batch_sequences = {batch}{to}")
    every, fragments, overlap = outer.every_steps, outer.fragments, outer.overlap_steps
    if "auto" not in (every, fragments, overlap) and overlap * fragments >= every:  # type: ignore[operator]  # numbers
        raise ValueError(
            f"outer.overlap_steps = {overlap} is too long for {counted(int(fragments), 'fragment')} in {every} steps: "
            f"lower it{', lower outer.fragments' if fragments != 1 else ''} or raise outer.every_steps"
        )
    if "auto" not in (every, fragments) and (exchanges := spec.training.steps // every * fragments) > EXCHANGES_MAX:  # type: ignore[operator]
        raise ValueError(f"a job makes {EXCHANGES_MAX} exchanges at most, not {exchanges}: raise outer.every_steps")


def _check_gaia(spec: JobSpec) -> None:
    """ValueError if a job filters what islands propose, and cannot, or the other way round."""
    mode, outer = spec.averaging.mode, spec.outer
    if mode != "gaia":
        if outer.threshold not in ("auto", 0.0):
            raise ValueError(
                f'outer.threshold = {outer.threshold:g} does nothing with averaging.mode = "{mode}": '
                'remove it, or set averaging.mode = "gaia"'
            )
        return
    if spec.islands.count == 1:
        raise ValueError(f'averaging.mode = "{mode}" is for several islands: set islands.count, for example to 2')
    if outer.compression == "fp4":
        raise ValueError(
            f'outer.compression = "fp4" packs two numbers into a byte, and averaging.mode = "{mode}" leaves out single '
            'numbers: set outer.compression = "int8", or averaging.mode = "streaming"'
        )
    if outer.mixing not in ("auto", 0.0):
        raise ValueError(
            f'outer.mixing = {outer.mixing:g} does nothing with averaging.mode = "{mode}": '
            'remove it, or set averaging.mode = "streaming"'
        )


def check_narrow(spec: JobSpec) -> None:
    """ValueError if narrow places do not fit the model, or the cut does not fit them."""
    narrow, layers, pipeline = spec.model.narrow, spec.layers, spec.pipeline
    if narrow.kind == "none":
        return
    check_factor(narrow.factor, spec.model.config.get("hidden_size", spec.model.config.get("n_embd")))
    check_every(narrow.every, layers)
    if pipeline.split != "auto":
        check_split(pipeline.split, 1 if narrow.every == "auto" else narrow.every)
    elif pipeline.stages != "auto" and pipeline.stages > spec.stages_max:
        raise ValueError(
            f"pipeline.stages = {pipeline.stages} is more than the {spec.stages_max} groups of layers between narrow "
            "places: lower it; a new job may have more places"
        )


class JobSpec(Section):
    """A whole job file, checked."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")]
    model: ModelSection = ModelSection()
    data: DataSection
    training: TrainingSection = TrainingSection()
    pipeline: PipelineSection = PipelineSection()
    islands: IslandsSection = IslandsSection()
    averaging: AveragingSection = AveragingSection()
    outer: OuterSection = OuterSection()
    checkpoint: CheckpointSection = CheckpointSection()
    limits: LimitsSection = LimitsSection()
    trust: TrustSection = TrustSection()

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.training.reproducible and self.pipeline.compression == "auto":
            raise ValueError(
                'pipeline.compression = "auto" follows the measured speed of links, which differs from run to run: '
                'with training.reproducible = true set it to "none", "bfloat16", "float16" or "int8"'
            )
        if self.training.reproducible and self.averaging.compression != "none":
            raise ValueError(
                f'averaging.compression = "{self.averaging.compression}" gives other bits for each number of replicas: '
                'with training.reproducible = true set it to "none"'
            )
        self._check_aggregate()
        if self.training.reproducible and self.model.compile:
            raise ValueError(
                "model.compile = true fuses operations, which rounds otherwise on each kind of machine: "
                "with training.reproducible = true set it to false"
            )
        least, most = self.limits.min_replicas, self.limits.max_replicas
        if 0 < most < least:
            raise ValueError(f"limits.max_replicas = {most} is less than limits.min_replicas = {least}: raise it")
        compresses = self.averaging.compression != "none"
        self.trust.check(reproducible=self.training.reproducible, compresses_slices=compresses)
        check_islands(self)
        if self.pipeline.recut == "stall" and self.has_outer_steps:
            raise ValueError(
                f'pipeline.recut = "stall" is for jobs without islands, and averaging.mode = "{self.averaging.mode}" '
                "joins islands: leave pipeline.recut out"
            )
        if self.model.id and not {"num_hidden_layers", "n_layer"} & self.model.config.keys():
            return self  # not grounded yet: the layers are known when it is
        layers = self.layers
        pipeline = self.pipeline
        if self.training.eval_every_steps and not self.data.validation_ratio:
            raise ValueError(
                f"training.eval_every_steps = {self.training.eval_every_steps} has nothing to evaluate: "
                "set data.validation_ratio, for example to 0.05"
            )
        if pipeline.stages != "auto" and pipeline.stages > layers and pipeline.split == "auto":
            raise ValueError(
                f"pipeline.stages = {pipeline.stages} is more than the model's {layers} decoder layers: "
                f"use at most {counted(layers, 'stage')}"
            )
        if self.outer.fragments != "auto" and self.outer.fragments > layers:
            raise ValueError(
                f"outer.fragments = {self.outer.fragments} is more than the model's {layers} decoder layers: lower it"
            )
        if pipeline.split != "auto":
            if sum(pipeline.split) != layers:
                raise ValueError(
                    f"pipeline.split = {list(pipeline.split)} adds up to {counted(sum(pipeline.split), 'layer')}, "
                    f"the model has {layers}: correct the split"
                )
            if pipeline.stages not in ("auto", len(pipeline.split)):
                raise ValueError(
                    f"pipeline.split names {counted(len(pipeline.split), 'stage')}, pipeline.stages = "
                    f"{pipeline.stages}: drop one of the two"
                )
            if 0 in pipeline.split[1:-1]:
                raise ValueError(
                    f"pipeline.split = {list(pipeline.split)} has a stage of nothing: only the first, the embedding "
                    "alone, and the last, the head alone, may have 0 layers"
                )
            if self.tied and pipeline.split[0] == 0:
                raise ValueError(
                    f"pipeline.split = {list(pipeline.split)} has no weights for the first stage alone, as the head "
                    "is tied to the embedding: give it a layer"
                )
        check_narrow(self)
        return self

    def _check_aggregate(self) -> None:
        if self.averaging.aggregate == "mean":
            return
        if self.training.reproducible:
            raise ValueError(
                'averaging.aggregate = "centered_clip" may give another gradient than the mean, which follows from who '
                'computed what: with training.reproducible = true set it to "mean"'
            )
        if self.limits.min_replicas < CLIPPED_MIN:
            raise ValueError(
                f'averaging.aggregate = "centered_clip" compares at least {CLIPPED_MIN} replicas of a stage: set '
                f'limits.min_replicas = {CLIPPED_MIN} or more, or averaging.aggregate = "mean"'
            )

    @property
    def island_count(self) -> int:
        """How many islands train the job; one as long as that is open."""
        return 1 if self.islands.count == "auto" else self.islands.count

    @property
    def has_outer_steps(self) -> bool:
        """Whether the job's islands, or its only one, make outer steps."""
        return self.averaging.mode != "allreduce"

    @property
    def unmeasured_compression(self) -> str:
        """The codec where no link is measured: in one process, and for evaluations. With "auto" one that is exact."""
        if self.pipeline.compression != "auto":
            return self.pipeline.compression
        return "bfloat16" if self.model.dtype == LOWERED else "none"

    @property
    def layers(self) -> int:
        config = self.model.config
        value = config.get("num_hidden_layers", config.get("n_layer"))  # n_layer: the name in GPT-2's configs
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                "model.config.num_hidden_layers must be a whole number of at least 1: set it in [model.config]"
            )
        if value > LAYERS_MAX:
            raise ValueError(f"model.config.num_hidden_layers = {value} is too many: at most {LAYERS_MAX}")
        return value

    @property
    def layer_group(self) -> int:
        """How many decoder layers no cut parts: 1, or those between two narrow places; only once it is resolved."""
        narrow = self.model.narrow
        if narrow.kind == "none":
            return 1
        assert narrow.every != "auto", "resolve the spec first"
        return narrow.every

    @property
    def places(self) -> range:
        """The layers that begin behind a narrow place, counted from 0; only once the spec is resolved."""
        group = self.layer_group
        return range(0) if self.model.narrow.kind == "none" else range(group, self.layers, group)

    @property
    def stages_max(self) -> int:
        """The most stages with decoder layers into which the model can be cut."""
        narrow = self.model.narrow
        return self.layers if narrow.kind == "none" or narrow.every == "auto" else self.layers // narrow.every

    @property
    def boundary_width(self) -> int:
        """Numbers of a token that cross a cut; `model.config` must be filled."""
        narrow, width = self.model.narrow, int(self.model.config["hidden_size"])
        return width if narrow.kind == "none" else width // narrow.factor

    def having(self, section: str, **values: object) -> JobSpec:
        """The spec with other values in a section, which are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @property
    def split(self) -> tuple[int, ...]:
        """The decoder layers of each stage; only once the spec is resolved."""
        assert self.pipeline.split != "auto", "resolve the spec first"
        return self.pipeline.split

    @property
    def overlap(self) -> int:
        """Microbatches of a step that use weights one step old; only once the spec is resolved."""
        overlap = self.pipeline.overlap
        if overlap == "all":
            return self.training.microbatches
        assert isinstance(overlap, int), "resolve the spec first"
        return overlap

    @property
    def late_microbatches(self) -> int:
        """Those of all islands together; only once the spec is resolved."""
        return min(self.training.microbatches, self.island_count * self.overlap)

    @property
    def sync_steps(self) -> int:
        """The number of first steps without overlap; only once the spec is resolved."""
        assert self.pipeline.sync_steps != "auto", "resolve the spec first"
        return self.pipeline.sync_steps

    @property
    def tied(self) -> bool:
        """Whether embedding and head share their weights, once the spec is resolved: families differ in the default."""
        return bool(self.model.config.get("tie_word_embeddings", False))


_CHECKED = "leave it out; trust.spot_check computes a share of all hops again"
# The keys that earlier versions had: the default that their specs contain (or "auto"), and what to do instead.
GONE: Mapping[str, tuple[object, str]] = {
    "outer.buffer": (1, 'leave it out; it was of averaging.mode = "async_dn" alone'),
    "pipeline.staleness": ("", 'set pipeline.overlap = 0, or "all" and pipeline.sync_steps = 0'),
    "pipeline.deadline_k": (6.0, "leave it out; it is always 6"),
    "pipeline.deadline_min_s": (1.0, "leave it out; it is always 1 s"),
    "pipeline.deadline_max_s": (120.0, "leave it out; it is always 120 s"),
    "pipeline.rebalance_interval_s": (30.0, "leave it out; it is always 30 s"),
    "pipeline.rebalance_min_gain": (0.15, "leave it out; it is always 0.15"),
    "pipeline.rebalance_cooldown_s": (120.0, "leave it out; it is always 120 s"),
    "training.muon_products": ("fast", "leave it out, and let each stage have stage servers of one kind of processor"),
    "trust.newcomer_hops": (0, _CHECKED),
    "trust.norm_band": (False, _CHECKED),
    "trust.inviter_quota": (False, "leave it out; give tokens only to people who may have most replicas of a stage"),
}
# The values that earlier versions had, and what to do instead.
GONE_VALUES: Mapping[tuple[str, object], str] = {
    ("averaging.mode", "async_dn"): 'set it to "diloco", and islands.shares = "speed" so that no island waits long',
    ("training.optimizer", "nadamw"): 'set it to "adamw", for example',
}
CLIPPED_MIN = 4  # replicas of a stage: of fewer, one false part is no small minority


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job spec in `path`, with `overrides` ("training.steps=20") on top.

    Raises InvalidConfig (file missing, not TOML, too long, unknown key, wrong type, contradiction) or UsageError (an
    override that is no KEY=VALUE).
    """
    return new_job(apply_overrides(read_job(path), overrides), where=str(path))


def read_job(path: Path) -> dict[str, Any]:
    """The content of a job file, unchecked; InvalidConfig if it is missing or not TOML.

    It may also be what `swarm status JOB -o json` prints: the stored job, with what was chosen where "auto" stood.
    """
    try:
        text = read_small(path)
    except FileNotFoundError:
        raise InvalidConfig(
            f"job file {path} does not exist", hint="write one with: swarm submit --example > job.toml"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"job file {path} cannot be read: {error}", hint="it must be a UTF-8 text file") from error
    if text.lstrip().startswith("{"):
        return _stored(_object(text), path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(
            f"job file {path} is not TOML: {error}", hint="compare with: swarm submit --example"
        ) from error


def _stored(printed: Mapping[str, Any], path: Path) -> dict[str, Any]:
    data = printed.get("data")
    spec = data.get("spec") if isinstance(data, dict) else None
    if not isinstance(spec, dict):
        raise InvalidConfig(f"job file {path} is JSON without a job", hint="print one with: swarm status JOB -o json")
    return _without_gone(spec)


def new_job(values: dict[str, Any], where: str) -> JobSpec:
    """Check plain values that somebody wrote, and first how many and how long they are; InvalidConfig."""
    check_lengths(values, where)
    return parse_job(values, where)


def parse_job(values: dict[str, Any], where: str = "job spec") -> JobSpec:
    """Check plain values; InvalidConfig names the first fault, its key and the nearest known key."""
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        keys = list(dict.fromkeys(_key(fault) for fault in faults))
        keys = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]  # of a list: its element
        same_key = [fault for fault in faults if _key(fault) == keys[0]]  # one fault per member of a union
        message, hint = _explain(same_key)
        more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
        raise InvalidConfig(f"{where}: {message}{more}", hint=hint) from None


def spec_from_json(text: str) -> JobSpec:
    """The inverse of `spec.model_dump_json()`, of earlier versions too; InvalidConfig if a peer sent anything else."""
    return parse_job(_object(text))


def spec_from_caller(text: str, stored: JobSpec | None = None) -> JobSpec:
    """As `spec_from_json`, of what anybody may send; long texts only if they are `stored` with the job already."""
    values = _object(text)
    check_lengths(values, "job spec", None if stored is None else stored.model_dump())
    return parse_job(values)


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"job spec is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidConfig("job spec is not a JSON object")
    return _without_gone(values)


def _without_gone(values: dict[str, Any]) -> dict[str, Any]:
    for key, (default, _) in GONE.items():
        name, _, part = key.partition(".")
        section = values.get(name)
        if isinstance(section, dict) and section.get(part) in (default, "auto"):
            del section[part]
    return values


def _key(fault: ErrorDetails) -> str:
    branches = ("literal[", "constrained-", "tuple[", "function-")
    kinds = ("int", "bool")
    return ".".join(str(part) for part in fault["loc"] if not str(part).startswith(branches) and part not in kinds)


def _explain(faults: list[ErrorDetails]) -> tuple[str, str]:
    """Message and hint for the faults of one key; several are the alternatives of a union."""
    fault, key = faults[0], _key(faults[0])
    given = fault["input"]
    if isinstance(given, str) and (key, given) in GONE_VALUES:
        return f"there is no {key} = {given!r} any more", GONE_VALUES[key, given]
    match fault["type"]:
        case "extra_forbidden":
            if key in GONE:
                return f"there is no key {key} any more", GONE[key][1]
            *section, name = (str(part) for part in fault["loc"])
            known = _known_keys(section)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            return f"unknown key {key}", hint
        case "missing":
            return f"{key} is required", "see: swarm submit --example"
        case "value_error":
            text = str(fault["ctx"]["error"]) if "ctx" in fault else fault["msg"]
            message, _, hint = text.partition(": ")
            return (f"{key}: {message}" if key else message), hint
        case _:
            message, hint = misfit(key, faults)
            return message, hint or SEE


def _known_keys(section: list[str]) -> list[str]:
    model: type[BaseModel] = JobSpec
    for part in section:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


SEE = "see: swarm submit --example"


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply each KEY=VALUE to `values`, in place. UsageError for anything that is not KEY=VALUE."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UsageError(f'--set needs KEY=VALUE, got "{override}"', hint="for example: --set training.steps=100")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            value = text  # a bare word is a string
        put_value(values, key.strip(), value)
    return values


def put_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted key, in place; InvalidConfig if a part of the key is not a table."""
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InvalidConfig(f'cannot set {key}: "{section}" is a value, not a section', hint=SEE)
    values[name] = value


VALUES_MAX = 1024  # of a job file; a cut into 512 stages is its longest list
CONFIG_VALUES_MAX = 16_384  # of model.config, whose longest lists name layers; as values they take 2.5 MiB
TEXT_CHARACTERS_MAX = 4096  # of a value, or of the name of one
_CONFIG = "model.config"


def check_lengths(values: Mapping[str, Any], where: str, stored: Mapping[str, Any] | None = None) -> None:
    """How much a job file may say, counted before anything is made of it.

    pydantic looks at each element of a list, and describes each fault in it, while no other thread of Python runs:
    130,000 texts in the place of a number held up a whole process for 80 ms. So what somebody writes or sends is
    counted first. What is stored is not counted again: it was when it came, or came when nothing was.

    Not chosen: bounds in the models themselves (`max_length`), because pydantic looks at the elements first.

    InvalidConfig names the first key with a text that is too long, or with which there are too many values.

    `stored`: the values that a job has already, whose long texts it may keep.
    """
    kept = {text for _, text in _walk(stored or {}) if _is_long(text)}
    counts = {VALUES_MAX: 0, CONFIG_VALUES_MAX: 0}
    for key, value in _walk(values):
        if isinstance(value, Mapping | list | tuple):
            most = CONFIG_VALUES_MAX if key.startswith(_CONFIG) else VALUES_MAX
            counts[most] += len(value)
            if counts[most] > most:
                of = _CONFIG if key.startswith(_CONFIG) else "a job file"
                raise InvalidConfig(
                    f"{where}: {key or 'it'} has {len(value)} entries, {of} at most {most} values together"
                )
        elif _is_long(value) and value not in kept:
            raise InvalidConfig(
                f"{where}: a text of {key or 'it'} has {len(value)} characters, at most {TEXT_CHARACTERS_MAX}",
                hint="name many files by a pattern: DIR/**/*.txt" if key == "data.source" else "shorten it",
            )


def _walk(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each value with its key: a table or a list, then the names in it, and what it holds."""
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, Mapping):
            for name, one in value.items():
                yield key, name
                waiting.append((f"{key}.{name}" if key else name, one))
        elif isinstance(value, list | tuple):
            waiting += ((key, item) for item in value)


def _is_long(value: object) -> bool:
    return isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX
