"""The cut into stages changes nothing: training at 1, 2 and 3 stages gives the same bits as the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.data.batches import Batches
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidConfig, JobFailed, NotAllowed
from swarm.job.course import PLAIN
from swarm.job.families import HEAD
from swarm.job.spec import JobSpec, parse_job
from swarm.model.families import EMBEDDING
from swarm.reference import trainer
from swarm.reference.trainer import Trained, build_stages, save_folder, sha256_of, train_local, train_step
from swarm.types import Microbatch
from tests.support.effort import others
from tests.support.scenes import resolved
from tests.support.specs import batches_of, quick_spec
from tests.support.unsplit_model import assert_equals_unsplit

CPU = torch.device("cpu")
T = 16


def spec_of(
    stages: int,
    *,
    tied: bool = False,
    dtype: str = "float32",
    compression: str = "none",
    overlap: int = 1,
    **training: Any,
) -> JobSpec:
    # Odd sizes on purpose: no tensor ends where a vector register does. One key/value head for three query heads.
    config = {
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": tied,
    }
    spec = quick_spec(
        model__dtype=dtype,
        model__config=config,
        pipeline__stages=stages,
        pipeline__compression=compression,
        pipeline__overlap=overlap,
        **{f"training__{key}": value for key, value in ({"steps": 3, "global_batch_sequences": 6} | training).items()},
    )
    return resolved(spec)


def train(spec: JobSpec) -> Trained:
    return train_local(spec, batches_of(spec))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16_parameters"])
@pytest.mark.parametrize(("tied", "reproducible"), [(False, True), (True, True), (False, False)])
def test_losses_and_weights_are_the_same_bits_at_any_number_of_stages(
    dtype: str, tied: bool, reproducible: bool
) -> None:
    runs = [train(spec_of(stages, tied=tied, dtype=dtype, reproducible=reproducible)) for stages in (1, 2, 3)]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].sha256 == runs[1].sha256 == runs[2].sha256
    assert runs[0].sha256 != sha256_of(build_stages(spec_of(1, tied=tied), CPU))


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("lamb", {}),
        ("muon", {}),
    ],
)
def test_no_optimizer_sees_the_cut(optimizer: str, values: dict[str, Any]) -> None:
    runs = [train(spec_of(stages, tied=True, optimizer=optimizer, **values)) for stages in (1, 2, 3)]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].sha256 == runs[1].sha256 == runs[2].sha256
    assert runs[0].sha256 != train(spec_of(1, tied=True)).sha256


def cut_into(spec: JobSpec, *split: int) -> JobSpec:
    pipeline = {"pipeline": spec.pipeline.model_dump() | {"split": split, "stages": len(split)}}
    return parse_job(spec.model_dump() | pipeline)


@pytest.mark.parametrize("dtype", ["bfloat16_parameters", *others("float32")])
@pytest.mark.parametrize(
    ("tied", "split"),
    [(False, (0, 3, 0)), (True, (2, 1, 0)), *others((False, (0, 3)), (False, (3, 0)), (False, (0, 1, 1, 1, 0)))],
)
def test_an_embedding_or_a_head_that_is_a_stage_alone_changes_no_bit(
    dtype: str, tied: bool, split: tuple[int, ...], tmp_path: Path
) -> None:
    whole = spec_of(1, tied=tied, dtype=dtype)
    for recompute in (False, True):
        bare = cut_into(whole, *split)
        bare = bare.having("model", recompute=recompute)
        assert train(bare).sha256 == train(whole).sha256
    spec = cut_into(spec_of(1, tied=tied, reproducible=False), *split)
    stages = build_stages(spec, CPU)
    save_folder(stages, spec, tmp_path / "model")
    twin: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert_equals_unsplit(stages, batches_of(spec), twin, EMBEDDING if tied else None)


@pytest.mark.parametrize(
    ("tied", "split", "reason"),
    [
        (False, (1, 0, 2), r"has a stage of nothing \(only the first, the embedding"),
        (True, (0, 3), r"the head is tied to the embedding \(give it a layer"),
    ],
)
def test_a_stage_without_weights_is_refused(tied: bool, split: tuple[int, ...], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        cut_into(spec_of(1, tied=tied), *split)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_tied_copies_stay_equal(optimizer: str) -> None:
    stages = train(spec_of(3, tied=True, optimizer=optimizer)).stages
    first, last = (dict(stages[index].module.named_parameters()) for index in (0, 2))
    assert torch.equal(first[EMBEDDING], last[HEAD])


@pytest.mark.parametrize("lossy", ["bfloat16", "float16", "int8"])
def test_lossy_codec_acts_at_the_cuts_and_only_there(lossy: str) -> None:
    exact, rounded = (train(spec_of(1, compression=codec)) for codec in ("none", lossy))
    assert exact.sha256 == rounded.sha256
    cut = train(spec_of(2, compression=lossy))
    assert cut.sha256 != exact.sha256
    assert cut.losses == pytest.approx(exact.losses, rel=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_loss_and_gradients_are_those_of_the_unsplit_model(tied: bool, tmp_path: Path) -> None:
    spec = spec_of(3, tied=tied, reproducible=False)
    stages = build_stages(spec, CPU)
    save_folder(stages, spec, tmp_path / "model")
    twin: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert_equals_unsplit(stages, batches_of(spec), twin, EMBEDDING if tied else None)


def test_the_order_of_microbatches_does_not_change_a_bit() -> None:
    spec = spec_of(2, tied=True, overlap=0)  # with overlap the first ones use older weights
    batches = batches_of(spec)

    class Reversed(Batches):
        def microbatch(self, step: int, microbatch: int) -> Any:
            return batches.microbatch(step, spec.training.microbatches - 1 - microbatch)

    backwards = batches_of(spec)
    backwards.__class__ = Reversed
    assert train_local(spec, backwards).sha256 == train_local(spec, batches).sha256


@pytest.mark.parametrize("stages", [1, 2])
def test_model_folder_gives_the_loss_of_the_trained_stages(stages: int, tmp_path: Path) -> None:
    spec = spec_of(stages, tied=True)
    trained = train(spec)
    save_folder(trained.stages, spec, tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    tokens, targets = (torch.from_numpy(array) for array in batches_of(spec).microbatch(7, 0))
    microbatch, x, loss = Microbatch(0, 3, 0), None, 0.0
    for stage in trained.stages:
        x, loss = stage.forward(microbatch, 3, portion=0, x=x, tokens=tokens, targets=targets)
    with torch.no_grad():
        logits = model(input_ids=tokens.long()).logits.float().flatten(0, 1)
        again = nn.functional.cross_entropy(logits, targets.long().flatten(), reduction="sum")
    assert float(again) == loss

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert tokenizer.eos_token_id == 256
    for text in ("def f():\n    return 'naïve 🙂'\n", " a  b <|endoftext|>", "\x7f\x80ÿ\r\n"):
        ids = tokenizer(text).input_ids
        assert ids == ByteTokenizer().encode(text).tolist()
        assert tokenizer.decode(ids) == text


def test_a_model_folder_is_never_mixed_with_what_is_there(tmp_path: Path) -> None:
    spec = spec_of(1)
    stages = build_stages(spec, CPU)
    (tmp_path / "empty").mkdir()
    save_folder(stages, spec, tmp_path / "empty")
    with pytest.raises(NotAllowed):
        save_folder(stages, spec, tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_step_that_is_not_finite_is_skipped_or_ends_the_job(compression: str) -> None:
    spec = spec_of(2, fixed_point_bits=40, compression=compression)
    stages = build_stages(spec, CPU)
    with torch.no_grad():
        if compression == "none":
            stages[1].module.lm_head.weight[3, 3] = torch.inf
        else:  # what crosses the cut is not finite
            dict(stages[0].module.named_parameters())["model.layers.0.mlp.down_proj.weight"][3, 3] = torch.inf
    before = sha256_of(stages)
    report = train_step(stages, spec, batches_of(spec), PLAIN.at(0))
    assert report.skipped
    assert sha256_of(stages) == before
    assert [stage.version for stage in stages] == [1, 1]

    failing = spec.having("limits", on_nonfinite="fail")
    with pytest.raises(JobFailed, match="step 1 is not finite"):
        train_step(stages, failing, batches_of(spec), PLAIN.at(1))


def test_the_reference_fails_like_the_swarm_if_all_its_steps_were_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(1, fixed_point_bits=40)
    stages = build_stages(spec, CPU)
    with torch.no_grad():
        stages[0].module.lm_head.weight[3, 3] = torch.inf
    monkeypatch.setattr(trainer, "build_stages", lambda spec, device: stages)
    with pytest.raises(JobFailed, match=f"all {spec.training.steps} steps were not finite"):
        train_local(spec, batches_of(spec))
