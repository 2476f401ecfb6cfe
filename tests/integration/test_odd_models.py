"""Model folders as they lie on people's disks give the loss of Transformers, at the start and after a round trip."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from client.transfer.submission import check
from swarm.errors import InvalidConfig
from swarm.hf.pretrained import ground, look_at_model, weight_files
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, load_job, parse_job
from swarm.model.state import read_files
from swarm.reference.__main__ import main
from swarm.reference.trainer import build_stages, save_folder
from swarm.types import Microbatch
from tests.support.tokenizer import write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")

BASE = {"vocab_size": 260, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = BASE | {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 260, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
NEOX = BASE | {"intermediate_size": 40, "rotary_pct": 0.5, "max_position_embeddings": 64}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LONGER = 128  # than max_position_embeddings

Tensors: TypeAlias = dict[str, Tensor]


def as_they_are(tensors: Tensors) -> Tensors:
    return tensors


def with_own(name: str, embedding: str) -> Callable[[Tensors], Tensors]:
    """A head that is not the embedding, under the name that files of the family have for it."""

    def edit(tensors: Tensors) -> Tensors:
        drawn = torch.Generator().manual_seed(9)
        return tensors | {name: tensors[embedding] + 0.3 * torch.randn(tensors[embedding].shape, generator=drawn)}

    return edit


def of_gpt2_on_the_hub(tensors: Tensors) -> Tensors:
    mask = torch.ones(64, 64).tril()[None, None]
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return (
        short
        | {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}
        | {"h.0.attn.masked_bias": torch.tensor(-1e4)}
    )


def with_other_mask(tensors: Tensors) -> Tensors:
    return tensors | {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}


def of_types(tensors: Tensors) -> Tensors:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return {name: tensor.to(kinds[index % 4]) for index, (name, tensor) in enumerate(tensors.items())}


def with_value_head(tensors: Tensors) -> Tensors:
    extra = {"v_head.summary.weight": torch.ones(1, 24), "v_head.summary.bias": torch.ones(1)}
    return tensors | extra | {"model.layers.0.extra.scale": torch.ones(3)}


@dataclass(frozen=True)
class Odd:
    family: str
    fields: dict[str, Any]
    edit: Callable[[Tensors], Tensors] = as_they_are
    said: dict[str, Any] = field(default_factory=dict)  # in config.json, once the weights are made
    set: dict[str, Any] = field(default_factory=dict)  # in the job's model.config, and in the twin's config.json
    length: int = 16
    tied: bool = False
    lines: tuple[str, ...] = ()  # that the client says


TIED = {"tie_word_embeddings": True}
OWN = ("both are trained, with tie_word_embeddings = false",)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ODD = {
    "own head": Odd("llama", GATED | TIED, with_own(HEAD, EMBEDDING), lines=OWN),
    "own head of gpt2": Odd("gpt2", GPT2, with_own(HEAD, "transformer.wte.weight"), lines=OWN),
    "own head of gemma2": Odd("gemma2", GATED | {"head_dim": 8}, with_own(HEAD, EMBEDDING), lines=OWN),
    "own head of neox": Odd(
        "gpt_neox", NEOX | TIED, with_own("embed_out.weight", "gpt_neox.embed_in.weight"), lines=OWN
    ),
    "a copy for a head": Odd("qwen2", GATED | TIED, lambda t: t | {HEAD: t[EMBEDDING].clone()}, tied=True),
    "head alone": Odd("llama", GATED | TIED, lambda t: {HEAD: t.pop(EMBEDDING), **t}, tied=True),
    "yarn": Odd("qwen2", GATED, said={"rope_scaling": YARN}, length=LONGER),
    "yarn of the job": Odd("qwen2", GATED, set={"rope_scaling": YARN}, length=LONGER),
    "positions of the job": Odd("llama", GATED, set={"max_position_embeddings": LONGER}, length=LONGER),
    "dynamic": Odd("llama", GATED, said={"rope_scaling": {"type": "dynamic", "factor": 3.0}}, length=LONGER),
    "linear too short": Odd(
        "llama",
        GATED,
        said={"rope_scaling": {"type": "linear", "factor": 1.5}},
        length=LONGER,
        lines=("more than the 96 positions to which linear scaling reaches",),
    ),
    "no scaling": Odd("mistral", GATED, length=LONGER, lines=("more than max_position_embeddings = 64",)),
    "llama3": Odd(
        "llama",
        GATED | {"max_position_embeddings": 256},
        said={
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        length=LONGER,
    ),
    "types": Odd("llama", GATED, of_types, lines=("F64 becomes float32",)),
    "value head": Odd("llama", GATED, with_value_head, lines=("left out, as no parameter",)),
    "gpt2 of the hub": Odd("gpt2", GPT2, of_gpt2_on_the_hub, tied=True),
    "other mask": Odd("gpt2", GPT2, with_other_mask, tied=True, lines=("which is not the causal mask",)),
    "a window that llama has not": Odd("llama", GATED, said={"sliding_window": 5}),
    "padding from behind": Odd("llama", GATED, said={"pad_token_id": -1}),
}


def write(odd: Odd, folder: Path) -> None:
    """The folder, with nothing at its neutral value."""
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(odd.family, **odd.fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(odd.edit(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    say(folder, odd.said)


def say(folder: Path, fields: dict[str, Any]) -> None:
    """Put fields into config.json, as people do by hand."""
    config = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in fields:
        config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | fields))


def spec_of(model: dict[str, Any], length: int) -> JobSpec:
    """A job of this model, cut into two stages."""
    values: dict[str, Any] = {
        "name": "t",
        "model": {"dtype": "float32", "tokenizer": "byte", **model},
        "data": {"source": "x", "sequence_length": length},
        "training": {"steps": 1, "global_batch_sequences": 2, "microbatch_sequences": 2},
        "pipeline": {"stages": 2, "compression": "none"},
    }
    return resolve(ground(parse_job(values)), Basis(257))


def loss_of(folder: Path, tokens: Tensor, targets: Tensor) -> float:
    """The loss of Transformers' model, nats per token."""
    return twin_loss(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True), tokens, targets
    )


@torch.no_grad()
def twin_loss(twin: Any, tokens: Tensor, targets: Tensor) -> float:
    logits = twin.eval()(input_ids=tokens).logits
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def drawn(length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of two sequences."""
    ids = np.random.default_rng(0).integers(0, 257, size=(2, length + 1))
    return torch.from_numpy(ids[:, :-1]), torch.from_numpy(ids[:, 1:])


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_folder_has_the_loss_of_transformers_before_and_after(odd: str, tmp_path: Path) -> None:
    """The head that a tied model's file had for itself was thrown away: the loss was that of another model."""
    case = ODD[odd]
    write(case, tmp_path / "hf")
    spec = spec_of({"id": str(tmp_path / "hf"), "config": case.set}, case.length)
    assert spec.tied == case.tied
    lines = look_at_model(spec)
    assert len(lines) == len(case.lines)
    assert all(words in line for words, line in zip(case.lines, lines, strict=True))

    tokens, targets = drawn(case.length)
    stages = build_stages(spec, torch.device("cpu"))
    x, summed = None, 0.0
    for stage in stages:
        x, summed = stage.forward(Microbatch(0, 0, 0), 0, portion=0, x=x, tokens=tokens, targets=targets)
    ours = summed / targets.numel()
    if case.set:
        say(tmp_path / "hf", case.set)
    assert ours == pytest.approx(loss_of(tmp_path / "hf", tokens, targets), abs=5e-5)

    save_folder(stages, spec, tmp_path / "out")
    assert loss_of(tmp_path / "out", tokens, targets) == pytest.approx(ours, abs=5e-5)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == case.tied


LONG = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0], "original_max_position_embeddings": 32}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FROM_SCRATCH: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "linear of 1": ("mistral", {"rope_scaling": {"rope_type": "linear", "factor": 1}}),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "rope_theta": 300.0}),
    "yarn": ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "yarn from 32": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 32}},
    ),
    "yarn and a base": ("llama", {"rope_scaling": YARN | {"rope_theta": 50.0}, "rope_theta": 300.0}),
    "llama3": ("gemma2", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "longrope": ("llama", {"rope_scaling": {"type": "longrope", **LONG}}),
    "neox": ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_emb_base": 300.0}),
    "neox, whole heads": ("gpt_neox", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rotary_pct": 1.0}),
    "none": ("llama", {"rope_scaling": {}}),
}


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_a_model_from_scratch_may_stretch_its_positions(name: str, tmp_path: Path) -> None:
    """rope_scaling was an unknown key without model.id: longer sequences needed a config.json written by hand."""
    family, positions = FROM_SCRATCH[name]
    fields = (NEOX | {"hidden_size": 32} if family == "gpt_neox" else GATED) | positions
    values = {
        "name": "t",
        "model": {"family": family, "dtype": "float32", "config": fields},
        "data": {"source": "x", "sequence_length": LONGER},
        "training": {"steps": 1, "global_batch_sequences": 2, "microbatch_sequences": 2},
        "pipeline": {"stages": 2, "compression": "none"},
    }
    spec = resolve(parse_job(values), Basis(257))
    assert resolve(spec, Basis(257)) == spec
    before = json.dumps(spec.model.config)
    stages = build_stages(spec, torch.device("cpu"))
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.module.parameters():
                seeded = torch.Generator().manual_seed(parameter.numel())
                parameter += 0.2 * torch.randn(parameter.shape, generator=seeded)
    save_folder(stages, spec, tmp_path / "out")
    assert json.dumps(spec.model.config) == before, "the library writes into the tables that it is given"
    tokens, targets = drawn(LONGER)
    ours = loss_of(tmp_path / "out", tokens, targets)

    x, summed = None, 0.0
    for stage in stages:
        x, summed = stage.evaluate(stage.version, x=x, tokens=tokens, targets=targets)
    assert summed / targets.numel() == pytest.approx(ours, abs=5e-5)

    # As a person would write the config for Transformers alone.
    heads = {"head_dim": 6, "query_pre_attn_scalar": 6} if family in ("qwen3", "gemma2") else {}
    config = AutoConfig.for_model(family, **json.loads(json.dumps(fields | heads)))
    twin: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    twin.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict())
    assert twin_loss(twin, tokens, targets) == pytest.approx(ours, abs=5e-5)


@pytest.mark.parametrize(
    ("family", "positions", "words"),
    [
        ("gpt2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "unknown key model.config.rope_scaling"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "of the type 'ntk', which Transformers does not"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "of the type yarn without factor"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling = 'yarn', which should be a table"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor = inf is no finite number"),
        ("llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1, by whose logarithm yarn divides"),
        ("llama", {"rope_scaling": YARN, "rope_parameters": YARN}, "rope_scaling and rope_parameters"),
        ("llama", {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "turns whole heads"),
        ("gpt_neox", {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}, "rotary_pct": 1.0}, "set rotary_pct"),
        ("llama", {"rope_scaling": {"type": "longrope", **LONG, "long_factor": [1.0]}, "head_dim": 8}, "has 4 pairs"),
    ],
)
def test_positions_that_no_model_from_scratch_can_have_are_refused(
    family: str, positions: dict[str, Any], words: str
) -> None:
    fields = GPT2 if family == "gpt2" else NEOX | {"hidden_size": 32} if family == "gpt_neox" else GATED
    model = {"family": family, "config": fields | positions}
    data = {"source": "x", "sequence_length": 16}
    with pytest.raises(InvalidConfig, match=words):
        resolve(parse_job({"name": "t", "model": model, "data": data}), Basis(257))


# What is refused ------------------------------------------------------------------------------------------------------

JOB = """
name = "t"
[model]
id = "{folder}"
dtype = "float32"
{tokenizer}
[data]
source = "{source}"
sequence_length = 16
[training]
steps = 1
global_batch_sequences = 2
microbatch_sequences = 2
warmup_steps = 0
"""


def job_file(tmp_path: Path, text: str = "The quick brown fox. " * 20, tokenizer: str = 'tokenizer = "byte"') -> Path:
    (tmp_path / "text.txt").write_text(text)
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(folder=tmp_path / "hf", source=tmp_path / "text.txt", tokenizer=tokenizer))
    return path


Trained: TypeAlias = Callable[[Path], tuple[object, str]]


@pytest.fixture
def train_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trained:
    """The command in this process: its exit code, and what it says on stderr."""

    def call(path: Path) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["swarm train-local", str(path), "--out", f"{tmp_path}/out", "--threads", "1"])
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code, capsys.readouterr().err

    return call


def refused_by_both(path: Path, words: str, train_local: Trained) -> InvalidConfig:
    """The words with which submit refuses a job; `swarm train-local` has the same, before its first step."""
    with pytest.raises(InvalidConfig, match=words) as submit:
        check(load_job(path))
    assert submit.value.hint
    code, err = train_local(path)
    assert code == 3
    assert submit.value.message in err
    assert submit.value.hint in err
    assert "step 1/1" not in err
    return submit.value


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "wrapper": (lambda t: {f"_orig_mod.{name}": one for name, one in t.items()}, "a wrapper put '_orig_mod.'"),
    "adapter": (lambda t: t | {"model.norm.lora_A.weight": torch.zeros(1, 24)}, "merge the adapter"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_submit_train_local_and_stage_server_refuse_a_folder_with_the_same_words(
    refused: str, train_local: Trained, tmp_path: Path
) -> None:
    """Shapes, types and names were found out by stage servers alone, after all had been tokenised and sent."""
    edit, words = REFUSED[refused]
    write(Odd("llama", GATED, edit), tmp_path / "hf")
    path = job_file(tmp_path)
    submit = refused_by_both(path, words, train_local)
    spec = resolve(ground(load_job(path)), Basis(257))
    with pytest.raises(InvalidConfig) as load_stage:
        read_files(spec, 0, weight_files(spec))
    assert str(load_stage.value) == str(submit)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BROKEN: dict[str, tuple[dict[str, bytes | None], str]] = {
    "pointer for weights": ({"model.safetensors": POINTER}, r"model\.safetensors is a pointer of Git LFS"),
    "pointer for config": ({"config.json": POINTER}, r"config\.json is a pointer of Git LFS"),
    "comma": ({"config.json": b'{"model_type": "llama",}'}, r"is no JSON: Expecting property name.*line 1 column 24"),
    "nothing": ({"config.json": b""}, "is no JSON: Expecting value"),
    "not a number": ({"config.json": b'{"rms_norm_eps": NaN}'}, "is no JSON: it holds NaN or an infinite number"),
    "array": ({"config.json": b"[]"}, "is no JSON object"),
    "adapter": ({"config.json": None, "adapter_config.json": b"{}"}, "is an adapter, which changes a model"),
    "other weights": (
        {"model.safetensors": None, "consolidated.safetensors": b"x", "m.gguf": b"x"},
        r"neither model\.safetensors nor .*, but consolidated\.safetensors, m\.gguf",
    ),
    "no weights": ({"model.safetensors": None}, r"neither model\.safetensors nor model\.safetensors\.index\.json \("),
    "no header": ({"model.safetensors": bytes(8)}, "is no safetensors file"),
    "empty": ({"model.safetensors": b""}, "has 0 bytes and is no safetensors file"),
    "index elsewhere": (
        {"model.safetensors": None, "model.safetensors.index.json": b'{"weight_map": {"a": "../a.safetensors"}}'},
        r"names '\.\./a\.safetensors', which is no safetensors file beside it .put all files into one folder",
    ),
    "index of nothing": (
        {"model.safetensors": None, "model.safetensors.index.json": b'{"weight_map": {}}'},
        "has no weight_map .save it again",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_folder_that_is_no_model_is_refused_with_its_cause_and_what_to_do(
    broken: str, train_local: Trained, tmp_path: Path
) -> None:
    files, words = BROKEN[broken]
    write(Odd("llama", GATED), tmp_path / "hf")
    for name, content in files.items():
        (tmp_path / "hf" / name).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "hf" / name).write_bytes(content)
    refused_by_both(job_file(tmp_path), words, train_local)


# What belongs to the model --------------------------------------------------------------------------------------------


def test_what_lies_beside_the_weights_is_carried_and_unchanged(train_local: Trained, tmp_path: Path) -> None:
    """generation_config.json was written anew from three ids: a chat model did not stop any more."""
    write(Odd("llama", GATED), tmp_path / "hf")
    generation = b'{"eos_token_id": [256, 10],\n "temperature": 0.6}'
    beside = {
        "generation_config.json": generation,
        "LICENSE": b"as you like",
        "labels.json": b"[1]",
        "NOTICE.txt": b"x",
    }
    left = {"README.md": b"x", "run.py": b"x", "big.json": b" " * (2 << 20), "pytorch_model.bin.index.json": b"{}"}
    for name, content in (beside | left).items():
        (tmp_path / "hf" / name).write_bytes(content)
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "hf" / "linked.json").symlink_to(tmp_path / "secret")
    _, corpus = check(load_job(job_file(tmp_path)))
    assert beside.items() <= corpus.small_files.items()
    assert not corpus.small_files.keys() & {*left, "linked.json", "config.json"}
    assert train_local(job_file(tmp_path))[0] in (0, None)
    for name, content in beside.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {*beside, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


# Tokens ---------------------------------------------------------------------------------------------------------------


def write_with_padding(folder: Path) -> None:
    """A model with its tokenizer, whose token <new pad> has no row in the model."""
    write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    write(Odd("llama", GATED | {"vocab_size": size}), folder)
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": size, "content": "<new pad>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_a_token_beyond_the_model_is_refused_where_it_occurs_and_else_is_a_line(
    train_local: Trained, tmp_path: Path
) -> None:
    """A padding token that no text has refused the model, with "use the model's own tokenizer", which it was."""
    text = "The quick brown fox jumps over the lazy dog. " * 20
    write_with_padding(tmp_path / "hf")
    code, err = train_local(job_file(tmp_path, text, ""))
    assert code in (0, None), err
    assert re.search(r"the tokenizer of model\.id = .* has \d+ tokens, vocab_size is \d+: none beyond may occur", err)
    shutil.rmtree(tmp_path / "out")
    path = job_file(tmp_path, f"{text} and <new pad> too", "")
    code, err = train_local(path)
    assert code == 3
    assert re.search(r"text\.txt holds token \d+, for which the model has no row: vocab_size is", err)
    assert "step 1/1" not in err
    check(load_job(path))  # the client finds out when it tokenises, before it sends


def test_a_tokenizer_of_texts_that_the_model_cannot_know_is_refused_at_once(tmp_path: Path) -> None:
    write(Odd("llama", GATED | {"vocab_size": 100}), tmp_path / "hf")
    with pytest.raises(InvalidConfig, match=r"vocab_size = 100, texts can have 257 tokens by the tokenizer .byte."):
        check(load_job(job_file(tmp_path)))
