"""swarm.job.partition: every "auto" becomes a number, every impossible model an error."""

from __future__ import annotations

import time
from typing import Any

import pytest

from swarm.errors import InvalidConfig
from swarm.job.model_config import ENTRIES_MAX, check_sizes, hugging_face_config
from swarm.job.partition import balanced_split, flops_per_token, recut_text, shape_text, unit_names
from swarm.job.resolve import Basis, auto_microbatch, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.limits import STAGE_LAYERS_MAX
from tests.support.memories import memories


def job(config: dict[str, Any] | None = None, **sections: dict[str, Any]) -> JobSpec:
    base = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
    return parse_job(
        {
            "name": "t",
            "model": {"config": base | (config or {})},
            "data": {"source": "x", "sequence_length": 32},
            **sections,
        }
    )


def resolved(spec: JobSpec, stages: int = 1) -> JobSpec:
    return resolve(spec, Basis(257, stages=stages))


def test_resolving_fills_what_the_tokenizer_and_the_family_decide() -> None:
    config = resolved(job()).model.config
    assert config["vocab_size"] == 257
    assert config["eos_token_id"] == 256
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["max_position_embeddings"] == 2048


def test_special_tokens_of_the_model_are_the_tokenizers_unless_the_job_names_them() -> None:
    def config_of(end_of_text: int, **config: Any) -> dict[str, Any]:
        spec = resolve(job(config), Basis(50, end_of_text))
        return hugging_face_config(spec)

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [config_of(7)[name] for name in names] == [7, 7, None]
    assert [config_of(7, bos_token_id=3)[name] for name in names] == [3, 7, None]
    assert [config_of(-1)[name] for name in names] == [None, None, None]


def test_resolving_twice_changes_nothing() -> None:
    once = resolved(job(), stages=3)
    assert resolved(once, stages=2) == once
    assert once.pipeline.stages == 3


def test_given_stages_and_split_are_kept() -> None:
    assert resolved(job(pipeline={"split": [1, 7]}), stages=5).pipeline.split == (1, 7)
    assert len(resolved(job(pipeline={"stages": 4}), stages=5).pipeline.split) == 4


def test_auto_stages_are_no_more_than_the_layers() -> None:
    assert resolved(job(), stages=100).pipeline.stages == 8


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    light = resolved(job({"vocab_size": 257}))
    assert balanced_split(light, 2) == (4, 4)
    layer, _ = flops_per_token(light)
    heavy = resolved(job({"vocab_size": 2 * layer // 64}))
    assert balanced_split(heavy, 2) == (5, 3)


@pytest.mark.parametrize("stages", range(1, 9))
def test_every_stage_has_a_layer_and_no_split_is_better(stages: int) -> None:
    spec = resolved(job({"vocab_size": 4096}))
    split = balanced_split(spec, stages)
    assert sum(split) == 8
    assert min(split) >= 1
    layer, head = flops_per_token(spec)
    cost = [layers * layer for layers in split]
    cost[-1] += head
    # The floor of the costliest stage: all work spread evenly, in whole layers.
    for giver in range(stages):
        for taker in range(stages):
            if giver != taker and split[giver] > 1:
                moved = list(cost)
                moved[giver] -= layer
                moved[taker] += layer
                assert max(moved) >= max(cost)


def test_microbatch_size_divides_the_batch_and_ignores_the_stages() -> None:
    assert auto_microbatch(256, 1024) == 8
    assert auto_microbatch(32, 128) == 2
    assert auto_microbatch(7, 128) == 1
    sizes = {resolved(job(), stages=stages).training.microbatch_sequences for stages in (1, 2, 4)}
    assert sizes == {16}


def test_units_are_the_stages_and_the_tied_weights() -> None:
    assert unit_names(3, tied=False) == {"stage-0": (0,), "stage-1": (1,), "stage-2": (2,)}
    assert unit_names(3, tied=True)["tied"] == (0, 2)  # type: ignore[index]
    assert unit_names(1, tied=True)["tied"] == (0,)  # type: ignore[index]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 256}, "vocab_size = 256 is less than the 257"),
        ({"hiden_size": 64}, "unknown key model.config.hiden_size"),
        ({"hidden_size": "64"}, "should be of type int"),
        ({"hidden_size": True}, "should be of type int"),
        ({"hidden_size": 0}, "at least 1"),
        ({"hidden_size": 66}, "not a multiple"),
        ({"head_dim": 5}, "odd"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"attention_dropout": 1.0}, "dropout"),
        ({"hidden_act": "sine"}, "hidden_act"),
        ({"eos_token_id": 300}, "no token"),
    ],
)
def test_an_impossible_model_is_refused_with_its_field(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        resolved(job(config))


def test_only_learned_positions_limit_the_length_of_sequences() -> None:
    """Rotary positions go on beyond max_position_embeddings, and were refused there."""
    assert resolved(job({"max_position_embeddings": 16})).model.config["max_position_embeddings"] == 16
    learned = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
    with pytest.raises(InvalidConfig, match=r"less than data\.sequence_length"):
        resolved(job(model={"family": "gpt2", "config": learned}))


def test_a_misspelt_field_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(InvalidConfig) as caught:
        resolved(job({"hiden_size": 64}))
    assert caught.value.hint == "did you mean hidden_size?"


@pytest.mark.parametrize(
    ("stages", "peers", "sections", "overlap"),
    [
        (2, 0, {}, 2),
        (4, 0, {}, 4),
        (2, 7, {}, 6),  # three replicas of each stage, each a pipeline that idles between two steps
        (2, 100, {}, 8),  # never more than half of the step
        (2, 0, {"limits": {"min_replicas": 2}}, 4),
        (2, 0, {"training": {"lookahead": 0.0}}, 0),
        (2, 0, {"training": {"optimizer": "muon"}}, 2),
        (2, 0, {"training": {"optimizer": "lamb"}}, 0),
        (2, 0, {"pipeline": {"overlap": 5}}, 5),
        (2, 0, {"pipeline": {"overlap": 0.25}}, 4),
        (2, 0, {"pipeline": {"overlap": 0.01}}, 0),
        (2, 0, {"pipeline": {"overlap": 0.03125}}, 1),  # half of a microbatch
        (2, 0, {"pipeline": {"overlap": "all"}}, 16),
    ],
)
def test_overlap_keeps_every_pipeline_busy_between_two_steps(
    stages: int, peers: int, sections: dict[str, Any], overlap: int
) -> None:
    training = {"global_batch_sequences": 64, "microbatch_sequences": 4, "warmup_steps": 7}
    spec = job(**sections | {"training": training | sections.get("training", {})})
    unknown = memories(*[0] * peers)
    found = resolve(spec, Basis(257, stages=stages, idle=unknown, present=unknown))
    assert found.overlap == overlap
    assert found.sync_steps == 7
    assert resolve(found, Basis(257, idle=memories(*[0] * 50))) == found


def test_more_layers_than_a_stage_server_builds_in_time_are_refused() -> None:
    """10,000 in one stage kept their stage server from speaking for seconds, so it was taken for gone."""
    most = STAGE_LAYERS_MAX
    with pytest.raises(InvalidConfig, match=f"a stage of {most + 1} layers has more than {most}") as caught:
        resolved(job({"num_hidden_layers": most + 1}))
    assert "pipeline.stages" in caught.value.hint
    assert resolved(job({"num_hidden_layers": most})).pipeline.split == (most,)
    assert len(resolved(job({"num_hidden_layers": most + 1}), stages=2).pipeline.split) == 2


def test_more_overlap_than_a_step_has_microbatches_is_refused() -> None:
    training = {"global_batch_sequences": 8, "microbatch_sequences": 4}
    with pytest.raises(InvalidConfig, match=r"pipeline\.overlap = 3 is more than the 2 microbatches"):
        resolved(job(training=training, pipeline={"overlap": 3}))


def test_what_was_chosen_is_said_in_one_line() -> None:
    training = {"global_batch_sequences": 64, "microbatch_sequences": 4, "warmup_steps": 5}
    said = shape_text(resolved(job(training=training), stages=2))
    assert said.startswith("2 stages of 4 + 4 layers; 2 of 16 microbatches overlap the step before"), said
    assert said.endswith("; the first 5 steps do not overlap"), said
    islands = {"islands": {"count": 2}, "averaging": {"mode": "diloco"}, "pipeline": {"overlap": "all"}}
    assert "; 16 of 16 microbatches overlap" in shape_text(resolved(job(training=training, **islands), stages=2))
    for shares in ("equal", "speed"):
        half = islands | {"pipeline": {"overlap": 0.5}, "islands": {"count": 2, "shares": shares}}
        spec = resolved(job(training=training, **half), stages=2)
        assert spec.overlap == 4, "half of the step of an island, and not of all islands"
        assert "; 8 of 16 microbatches overlap" in shape_text(spec)
    assert shape_text(resolved(job(pipeline={"overlap": 0}))) == "1 stage of 8 layers; steps do not overlap"


def test_a_job_that_is_cut_otherwise_says_which_microbatches_overlap_and_why() -> None:
    training = {"global_batch_sequences": 64, "microbatch_sequences": 4}
    before = resolved(job(training=training), stages=2)
    kept, anew, none = (job(training=training, pipeline={"overlap": late, "stages": 4}) for late in (2, "auto", 0))
    assert recut_text(before, job(training=training, pipeline={"overlap": 2}), before) == ""
    said = recut_text(before, kept, resolved(kept))
    assert said.startswith("; 4 stages of 2 + 2 + 2 + 2 layers; 2 of 16 microbatches overlap"), said
    assert said.endswith(", as with the cut before; --set pipeline.overlap=auto chooses anew"), said
    assert "; 4 of 16 microbatches overlap" in recut_text(before, anew, resolved(anew))
    assert "chooses anew" not in recut_text(before, anew, resolved(anew))
    assert recut_text(before, none, resolved(none)).endswith("layers; steps do not overlap")


@pytest.mark.parametrize(
    "config",
    [
        {"num_labels": 10**9},
        {"num_hidden_layers": 10_001},
        {"whatever": 1 << 31},
        {"whatever": -(1 << 40)},
        {"rope_scaling": {"factor": 10**30}},
        {"id2label": {str(number): "x" for number in range(ENTRIES_MAX + 1)}},
        {"layer_types": ["full_attention"] * (ENTRIES_MAX + 1)},
    ],
    ids=lambda config: next(iter(config)),
)
def test_absurd_sizes_are_refused_at_once(config: dict[str, Any]) -> None:
    """num_labels = 10^9 made a table of a billion names in each replica: killed, again and again."""
    started_s = time.thread_time()
    with pytest.raises(InvalidConfig, match=r"model\.config\.\w+ (=|has) "):
        check_sizes(config)
    assert time.thread_time() - started_s < 1.0


def test_what_models_really_say_passes() -> None:
    check_sizes(
        {
            "max_position_embeddings": 10_485_760,
            "num_hidden_layers": 126,
            "num_labels": 2,
            "pad_token_id": -1,
            "rope_theta": 500_000_000,
            "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192},
            "tie_word_embeddings": False,
            "architectures": ["LlamaForCausalLM"],
        }
    )
