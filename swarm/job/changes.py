"""The keys that may change when a job resumes: how it is trained, never what is trained.

The step says which data was seen (`Course`), and microbatch (t, m) is a function of seed, batch and sequence length:
all of them mean something else to weights that have seen them. Pure functions of values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from swarm.errors import CheckpointDamaged, InvalidConfig
from swarm.job.islands import course_of
from swarm.job.model_config import common_name
from swarm.job.spec import GONE_VALUES, JobSpec, NarrowSection, check_lengths, parse_job

JOB_AND_STEP = re.compile(r"^([^/\\:]+):(\d{1,12}|latest)$")  # names a checkpoint of a scheduler's job
# Sections and keys that a job keeps for its whole life, and why; all others may change when it goes on.
_MODEL = ("id", "revision", "family", "config", "init", "tokenizer", "narrow")
_KEPT = {
    "name": "it is part of the job's id",
    **{f"model.{key}": "the weights are of this model" for key in _MODEL},
    "data": "the step is the position in this data",
    "training.global_batch_sequences": "the step is the position in the data, counted in batches of this size",
    "training.seed": "the order of the data follows from it",
    "training.optimizer": "the checkpoint holds the state of this optimizer",
    "averaging.mode": "its steps follow from it",
    "outer.every_steps": "its steps follow from it",
    "islands.count": "the timelines of its islands follow from it",
    "checkpoint.resume_from": "the job has begun already",
}


def check_changes(old: JobSpec, new: JobSpec) -> None:
    """InvalidConfig names the first value that a job may not change when it goes on; both specs are resolved."""
    _check_kept(old.model_dump(mode="json"), new.model_dump(mode="json"))


def changed_spec(before: dict[str, Any], after: dict[str, Any], where: str) -> JobSpec:
    """The spec of a job's values as a person changed them; InvalidConfig. A change of the model is named here: values
    that go with another family would be unknown in the stored config.
    """
    check_lengths(after, where, before)
    was, new = parse_job(before), parse_job(after, where)
    _check_kept(_common(was), _common(new), [key for key in _KEPT if key.startswith("model.")])
    return new


def _common(spec: JobSpec) -> dict[str, Any]:
    """The values of a spec; the model's config under its common names."""
    values, model = spec.model_dump(mode="json"), spec.model
    values["model"]["config"] = {common_name(model.family, key): value for key, value in model.config.items()}
    return values


def _check_kept(before: Mapping[str, Any], after: Mapping[str, Any], keys: Iterable[str] = _KEPT) -> None:
    """InvalidConfig names the first kept value that differs."""
    for key in keys:
        if (was := _value(before, key)) != (wanted := _value(after, key)):
            where, was, wanted = _narrow(key, was, wanted)
            raise InvalidConfig(
                f"{where} cannot change from {was!r} to {wanted!r} when a job goes on: {_KEPT[key]}",
                hint="leave it as it is, or start a new job: swarm submit FILE --resume-from JOB:STEP",
            )


def check_steps(spec: JobSpec, step: int) -> None:
    """InvalidConfig if the job would have nothing left to train after `step`, or its islands are not level there."""
    if spec.training.steps <= step:
        raise InvalidConfig(
            f"training.steps = {spec.training.steps} is reached already: the checkpoint is that of step {step}",
            hint=f"raise it, for example with: --set training.steps={2 * step}",
        )
    every = spec.outer.every_steps
    if spec.has_outer_steps and every != "auto" and not _is_level(spec, every, step):
        if _is_plain(spec):
            hint = f"set outer.every_steps to a divisor of {step}, or take a checkpoint at a multiple of {every}"
        else:
            hint = "leave [outer] as it was, or take another checkpoint: swarm checkpoints JOB"
        raise InvalidConfig(
            f"the checkpoint is that of step {step}, and islands that exchange every {every} steps do not begin there",
            hint=hint,
        )


def _is_level(spec: JobSpec, every_steps: int, step: int) -> bool:
    """Whether islands can begin after `step` steps; yes if the spec is not resolved and so does not say."""
    if _is_plain(spec):
        return step % every_steps == 0
    if "auto" in (spec.outer.fragments, spec.outer.overlap_steps, spec.outer.mixing, spec.outer.learning_rate):
        return True
    course = course_of(spec, 0)
    version = course.version_after(step)
    return version == course.level_from(version)


def _is_plain(spec: JobSpec) -> bool:
    """Whether islands exchange the whole model at once, and wait for that, as "auto" says where a job goes on."""
    outer = spec.outer
    return spec.averaging.mode == "diloco" and outer.fragments in ("auto", 1) and outer.overlap_steps in ("auto", 0)


def check_state(state: Mapping[str, Any], spec: JobSpec) -> None:
    """InvalidConfig if a job cannot go on from a checkpoint with this trainer_state.json; `spec` is resolved.

    CheckpointDamaged if the checkpoint has narrow places that no model has.
    """
    check_places(places_of(state), spec, "the checkpoint")
    training = spec.training
    data, optimizer = _section(state, "data"), _section(state, "optimizer")
    expected: dict[str, tuple[Any, Any]] = {
        "data.sequence_length": (data.get("sequence_length"), spec.data.sequence_length),
        "training.global_batch_sequences": (data.get("global_batch_sequences"), training.global_batch_sequences),
        "data.shuffle": (data.get("shuffle"), spec.data.shuffle),
        "data.validation_ratio": (data.get("validation_ratio"), spec.data.validation_ratio),
        "training.seed": (_section(state, "seeds").get("training"), training.seed),
    }
    if optimizer.get("state"):
        expected["training.optimizer"] = (optimizer.get("name"), training.optimizer)
    for key, (held, wanted) in expected.items():
        if held is not None and held != wanted:
            may = "" if isinstance(held, str) and (key, held) in GONE_VALUES else f"set {key} = {held!r}; "
            raise InvalidConfig(
                f"{key} = {wanted!r}, but the checkpoint was trained with {held!r}: its step would mean something else",
                hint=f"{may}to train on from its weights alone, set model.id to its model/ folder",
            )


def places_of(state: Mapping[str, Any]) -> NarrowSection:
    """The narrow places of a checkpoint's model, by its trainer_state.json; CheckpointDamaged if no model has such."""
    try:
        return NarrowSection.model_validate(state.get("narrow", {}))
    except ValidationError:
        told = "trainer_state.json names narrow places that no model has"
        raise CheckpointDamaged(told, hint="take another checkpoint") from None


def check_places(held: NarrowSection, spec: JobSpec, of: str) -> None:
    """InvalidConfig if a job has other narrow places than the weights that it starts from; `spec` is resolved."""
    for key, wanted in spec.model.narrow:
        if wanted != (there := getattr(held, key)):
            told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in held)
            raise InvalidConfig(
                f"model.narrow.{key} = {json.dumps(wanted)}, but {of} has weights of a model with {json.dumps(there)}",
                hint="leave model.narrow out" if held.kind == "none" else f"set in [model.narrow] {told}",
            )


def with_places_of(held: NarrowSection, spec: JobSpec) -> JobSpec:
    """The spec with the narrow places of the weights that it starts from, if it leaves open how many it has."""
    narrow = spec.model.narrow
    if narrow.every != "auto" or narrow.kind != held.kind or held.every == "auto" or spec.layers % held.every:
        return spec  # as it is: `check_places` compares
    return spec.having("model", narrow=narrow.model_copy(update={"every": held.every}))


def check_leases(state: Mapping[str, Any], spec: JobSpec) -> None:
    """InvalidConfig if a job's islands would go on amid other leases of data than in its trainer_state.json.

    Some portions would be trained twice then, and others never. `spec` is resolved.
    """
    step, steps, islands = state.get("step"), _section(state, "schedule").get("steps"), _section(state, "islands")
    if not isinstance(step, int) or not isinstance(steps, int):
        return
    count = spec.island_count if spec.has_outer_steps else 1
    was = _lease(step, steps, islands.get("count"), islands.get("every_steps"))
    now = _lease(step, spec.training.steps, count, spec.outer.every_steps)
    if was != now and (lease := was or now) is not None:
        divided, first, end = lease
        raise InvalidConfig(
            f"the checkpoint is that of step {step}, amid the data of steps {first} to {end}, which {divided} islands "
            f"{'divided' if was else 'would divide'} among them: some of it would be trained twice",
            hint="leave training.steps as it was, or start a new job there: swarm submit FILE --resume-from JOB:STEP",
        )


def _lease(step: int, steps: int, islands: object, every_steps: object) -> tuple[int, int, int] | None:
    """The islands that divide a lease of data, and its first and last inner step, of which `step` is one.

    None if all data before the step is trained, and none behind it.
    """
    if not isinstance(islands, int) or not isinstance(every_steps, int) or islands < 2 or every_steps < 1:
        return None
    first = step - step % every_steps
    return None if first == step or step >= steps else (islands, first, min(first + every_steps, steps))


def _section(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = state.get(name)
    return value if isinstance(value, Mapping) else {}


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _narrow(key: str, was: Any, wanted: Any) -> tuple[str, Any, Any]:
    """The first value that differs inside of a section."""
    if isinstance(was, dict) and isinstance(wanted, dict):
        for name in sorted(was.keys() | wanted.keys()):
            if was.get(name) != wanted.get(name):
                return _narrow(f"{key}.{name}", was.get(name), wanted.get(name))
    return key, was, wanted


def changed_values(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A resolved job's values, ready for `--set`: values that follow from an overridden one are "auto" again."""
    keys = {override.partition("=")[0].strip() for override in overrides}
    pipeline = values.get("pipeline")
    if not isinstance(pipeline, dict):
        raise InvalidConfig("the job's values have no section [pipeline]")
    if "pipeline.stages" in keys and "pipeline.split" not in keys:
        pipeline["split"] = "auto"
    if "pipeline.split" in keys and "pipeline.stages" not in keys:
        pipeline["stages"] = "auto"
    if {"pipeline.stages", "pipeline.split"} & keys and "pipeline.recut" not in keys:
        pipeline["recut"] = "auto"
    return values
