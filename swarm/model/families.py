"""Model families: the Hugging Face classes that a stage is made of.

A stage uses the library's own layer classes, cut by hand: no tracing, no code from a hub. The classes are looked up by
the names in swarm.job.families, where a family is one row.

Legend: B sequences, T tokens, D width, V vocabulary.

Decision: docs/decisions/018.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from swarm.errors import InvalidConfig, InvalidModel
from swarm.job.families import DEFAULT, DROPOUTS, FAMILIES, HEAD, Family
from swarm.job.model_config import check_sizes, hugging_face_config
from swarm.job.spec import LOWERED, JobSpec
from swarm.model.later import PutOff, let_put_off
from swarm.model.narrow import NarrowIn, NarrowOut, handed_over

NARROW_UP, NARROW_TABLE = ".narrow_in.up.weight", ".narrow_in.table.weight"
NARROW_GAIN = 4.0  # of a matrix that widens again; with 1 one place cost 2 to 5 % more (docs/convergence.md)
EMBEDDING = FAMILIES[DEFAULT].embedding_name


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of one family."""

    config: type[Any]
    layer: type[Any]
    norm: type[Any]
    rotary: type[Any] | None  # None: positions are learned
    scaled_embedding: type[Any] | None


def _classes(name: str, family: Family) -> Classes:
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")

    def of(kind: str) -> Any:
        return getattr(modeling, family.library + kind)

    return Classes(
        config=getattr(configuration, f"{family.library}Config"),
        layer=of(family.layer),
        norm=of(family.norm) if family.norm else nn.LayerNorm,
        rotary=of(family.rotary) if family.rotary else None,
        scaled_embedding=of(family.scaled_embedding) if family.scaled_embedding else None,
    )


CLASSES = {name: _classes(name, family) for name, family in FAMILIES.items()}


EMBEDDING_SITE = -1  # where a layer's index stands in a draw's seed


@dataclass(frozen=True, slots=True)
class Draw:
    """The seed of one forward's dropout: equal draws give equal masks, in any cut and after any rollback."""

    seed: int
    portion: int
    microbatch: int

    def begin(self, site: int, device: torch.device) -> None:
        """Set the device's generator for the dropouts of a layer (or EMBEDDING_SITE), which draw in order."""
        text = f"dropout:{self.seed}:{self.portion}:{self.microbatch}:{site}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        match device.type:
            case "cuda":
                torch.cuda.default_generators[device.index or 0].manual_seed(seed)
            case "mps":
                torch.mps.manual_seed(seed)
            case _:
                torch.default_generator.manual_seed(seed)


class _Unfilled(TorchFunctionMode):
    """Leaves new parameters unfilled: filling them, even on the meta device, would load torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


class StageModule(nn.Module):
    """One stage's part of the model, under the parameter names of the whole model.

    The first stage has the embedding (and learned positions), the last one norm and head; a single stage has all.
    Rotary positions and masks are computed here, so nothing but the hidden state crosses a stage boundary.
    """

    lm_head: nn.Linear

    def __init__(self, spec: JobSpec, first_layer: int, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        family, classes = FAMILIES[spec.model.family], CLASSES[spec.model.family]
        config = _config(classes, family, spec)
        self._family, self._classes, self._config = family, classes, config
        self._first, self._last = first, last
        self._kinds = [_attention_kind(family, config, index) for index in range(first_layer, first_layer + layers)]
        self._first_layer = first_layer
        self._drops = any(getattr(config, key, 0.0) for key in DROPOUTS)
        # No memory and no random numbers are spent here: `build` fills every parameter.
        with torch.device("meta"), _Unfilled():
            trunk = nn.Module()
            if first:
                trunk.add_module(family.embedding, _embedding(family, classes, config))
                if family.learns_positions:
                    positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
                    trunk.add_module(family.positions, positions)
            indices = range(first_layer, first_layer + layers)
            trunk.add_module(
                family.layers, nn.ModuleDict({str(index): classes.layer(config, index) for index in indices})
            )
            for place in spec.places:
                if place - 1 in indices:
                    narrow_out = NarrowOut(spec.model.narrow.kind, config.hidden_size, spec.boundary_width)
                    trunk.get_submodule(f"{family.layers}.{place - 1}").add_module("narrow_out", narrow_out)
                if place in indices:
                    vocabulary = config.vocab_size if spec.model.narrow.by_token else 0
                    narrow_in = NarrowIn(config.hidden_size, spec.boundary_width, vocabulary, spec.model.narrow.rank)
                    trunk.get_submodule(f"{family.layers}.{place}").add_module("narrow_in", narrow_in)
            if last:
                norm = classes.norm(config.hidden_size, eps=getattr(config, family.norm_eps))
                trunk.add_module(family.final_norm, norm)
            self.add_module(family.trunk, trunk)
            if last:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.put_off = PutOff()
        self.later: frozenset[str] = frozenset()  # weights whose gradients can be put off
        if not first and not spec.model.compile:  # the first stage has no dx; a compiled layer would leave its graph
            self.later = let_put_off(self, self.get_submodule(f"{family.trunk}.{family.layers}"), self.put_off)
        self.rotary: Any = None  # has no parameters
        ends = ("narrow_in", "narrow_out")
        self._ends = [[getattr(layer, end, None) for end in ends] for layer in self.layers()]
        self._lowered = spec.model.dtype == LOWERED
        self.calls: Sequence[Callable[..., Tensor]] = self.layers()  # what is called in place of each layer
        self.eval()

    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.get_submodule(f"{self._family.trunk}.{self._family.layers}").children())

    def materialise(self) -> None:
        """Give every parameter memory on the CPU, not yet filled."""
        # `Module.to_empty` does the same by way of symbolic shapes, which take long to load.
        self._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device="cpu"))  # type: ignore[no-untyped-call]
        scaled = self._classes.scaled_embedding
        for module in self.modules():
            if scaled is not None and isinstance(module, scaled):
                module.embed_scale.fill_(module.scalar_embed_scale)
        if self._classes.rotary is not None:
            self.rotary = self._classes.rotary(self._config).eval()

    def forward(self, tokens_or_hidden: Tensor, draw: Draw | None = None, tokens: Tensor | None = None) -> Tensor:
        """Tokens [B, T] (first stage) or boundary tensor [B, T, D] in; boundary tensor or logits [B, T, V] (last) out.

        Later stages take `tokens` too where places are by token. With `draw` dropout is on, without it (evaluation) it
        is off.
        """
        dropping = draw is not None and self._drops
        if self.training != dropping:
            self.train(dropping)
        trunk = self.get_submodule(self._family.trunk)
        position_ids = torch.arange(tokens_or_hidden.shape[1], device=tokens_or_hidden.device).unsqueeze(0)
        hidden_BTD = tokens_or_hidden
        if self._first:
            tokens = tokens_or_hidden
            hidden_BTD = trunk.get_submodule(self._family.embedding)(hidden_BTD)
            if self.rotary is None:
                hidden_BTD = hidden_BTD + trunk.get_submodule(self._family.positions)(position_ids)
            if draw is not None and dropping and self._family.embedding_dropout:
                draw.begin(EMBEDDING_SITE, hidden_BTD.device)
                share = getattr(self._config, self._family.embedding_dropout)
                hidden_BTD = nn.functional.dropout(hidden_BTD, share)
        arguments: dict[str, Any] = {"position_ids": position_ids}
        if self.rotary is not None:
            arguments["position_embeddings"] = self.rotary(hidden_BTD, position_ids)
        masks = {kind: self._mask(kind, hidden_BTD) for kind in set(self._kinds)}
        for index, (kind, layer) in enumerate(zip(self._kinds, self.calls, strict=True), self._first_layer):
            if draw is not None and dropping:
                draw.begin(index, hidden_BTD.device)
            narrow_in, narrow_out = self._ends[index - self._first_layer]
            if narrow_in is not None:
                if index > self._first_layer:
                    z = handed_over(hidden_BTD)
                    hidden_BTD = z.to(torch.bfloat16) if self._lowered else z
                hidden_BTD = narrow_in(hidden_BTD, tokens)
            hidden_BTD = layer(hidden_BTD, attention_mask=masks[kind], **arguments)
            if narrow_out is not None:
                hidden_BTD = narrow_out(hidden_BTD)
        if not self._last:
            return hidden_BTD
        logits_BTV: Tensor = self.lm_head(trunk.get_submodule(self._family.final_norm)(hidden_BTD))
        cap = getattr(self._config, "final_logit_softcapping", None)
        return logits_BTV if cap is None else torch.tanh(logits_BTV / cap) * cap

    def _mask(self, kind: str, hidden_BTD: Tensor) -> Tensor | None:
        """The library's mask for a kind of attention; None where the attention is causal by flag."""
        create = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
        mask = create(config=self._config, inputs_embeds=hidden_BTD, attention_mask=None, past_key_values=None)
        assert mask is None or isinstance(mask, Tensor)
        return mask


def build(spec: JobSpec, stage: int, device: torch.device, weights: Mapping[str, Tensor] | None = None) -> StageModule:
    """Stage number `stage` of a resolved spec on `device`, with `weights` (None: drawn from training.seed).

    `weights` are by Hugging Face name, on the CPU; a tied head takes the embedding's. InvalidModel if one is missing or
    has another shape.
    """
    module = _outline(spec, stage)
    with _described(spec):
        module.materialise()
    if weights is None:
        initialise(module, spec)
    else:
        _fill(module, spec, weights)
    return module.to(device)


def parameter_shapes(spec: JobSpec, stage: int | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a stage (None: of the model), without memory; tied weights count once."""
    module = _outline(spec, stage)
    names = ((stored_name(spec, name), parameter) for name, parameter in module.named_parameters())
    return {name: tuple(parameter.shape) for name, parameter in names}


def stored_name(spec: JobSpec, name: str) -> str:
    """The name under which a parameter is kept in files: a tied weight is stored once, as the embedding."""
    return FAMILIES[spec.model.family].embedding_name if spec.tied and name == HEAD else name


def _outline(spec: JobSpec, stage: int | None) -> StageModule:
    """A stage (None: the whole model) without memory."""
    split = spec.pipeline.split
    assert split != "auto", "resolve the spec first"
    with _described(spec):
        if stage is None:
            return StageModule(spec, 0, sum(split), first=True, last=True)
        return StageModule(spec, sum(split[:stage]), split[stage], first=stage == 0, last=stage == len(split) - 1)


@torch.no_grad()
def _fill(module: StageModule, spec: JobSpec, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        weight = weights.get(stored_name(spec, name))
        if weight is None:
            raise InvalidModel(f"the weights lack {stored_name(spec, name)}")
        if weight.shape != parameter.shape:
            raise InvalidModel(f"{name} has shape {list(weight.shape)}, this model needs {list(parameter.shape)}")
        parameter.copy_(weight)


@torch.no_grad()
def initialise(module: StageModule, spec: JobSpec) -> None:
    """Fill the parameters as Transformers does: matrices normal with initializer_range, norms neutral, biases zero.

    Matrices of narrow places have deviation 1 / sqrt(width of what goes in), those behind a norm NARROW_GAIN times as
    much, and norms start at 1. What is behind a place by token starts as the transpose of what is before it.

    Each parameter has its own generator, seeded by (training.seed, its name): the weights are the same in every cut. A
    tied head is a parameter of its own that starts as the embedding.
    """
    family = FAMILIES[spec.model.family]
    padding = spec.model.config.get("pad_token_id")
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() < 2:
            parameter.fill_(1.0 if ".narrow_" in name else family.norm_start)
        else:
            is_narrow = ".narrow_" in name and not name.endswith(NARROW_TABLE)
            std = parameter.shape[1] ** -0.5 if is_narrow else float(spec.model.config["initializer_range"])
            if family.residual and name.endswith(family.residual):
                std /= math.sqrt(2 * spec.layers)
            source = stored_name(spec, name)
            std *= NARROW_GAIN if name.endswith(NARROW_UP) else 1.0
            if spec.model.narrow.by_token and name.endswith(NARROW_UP):
                drawn = torch.empty(parameter.shape[::-1])
                drawn.normal_(0.0, drawn.shape[1] ** -0.5, generator=_generator(spec.training.seed, _narrow_down(name)))
                parameter.copy_(drawn.t())
                continue
            parameter.normal_(0.0, std, generator=_generator(spec.training.seed, source))
            if source == family.embedding_name and family.padded and padding is not None:
                parameter[padding] = 0.0


def _narrow_down(name: str) -> str:
    """The name of the matrix before a place whose matrix behind it has this name."""
    layer = name.removesuffix(NARROW_UP).rpartition(".")[2]
    return f"{name.removesuffix(layer + NARROW_UP)}{int(layer) - 1}.narrow_out.down.weight"


def _embedding(family: Family, classes: Classes, config: Any) -> nn.Embedding:
    padding: Any = config.pad_token_id if family.padded else None
    if classes.scaled_embedding is not None:
        scale = config.hidden_size**0.5
        scaled = classes.scaled_embedding(config.vocab_size, config.hidden_size, padding, embed_scale=scale)
        assert isinstance(scaled, nn.Embedding)
        return scaled
    return nn.Embedding(config.vocab_size, config.hidden_size, padding)


def _attention_kind(family: Family, config: Any, index: int) -> str:
    """The kind of a layer's attention: all before it, or a window. Some families have one for all layers.

    A config.json may name a window or kinds of layers that the family's classes do not look at.
    """
    if "sliding_window" not in family.fields:
        return "full_attention"
    if hasattr(type(config), "layer_types"):
        return str(config.layer_types[index])
    return "full_attention" if config.sliding_window is None else "sliding_attention"


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@contextmanager
def _described(spec: JobSpec) -> Iterator[None]:
    """Turn the library's complaints about an impossible config into InvalidConfig."""
    try:
        yield
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        cause = (str(error).strip().splitlines() or [""])[-1].strip()
        raise InvalidConfig(
            f"model.config does not describe a {spec.model.family} model: {cause or type(error).__name__}"
        ) from error


def _config(classes: Classes, family: Family, spec: JobSpec) -> Any:
    """The library's config; InvalidConfig unless it agrees with the job on the fields by which the job was cut."""
    check_sizes(spec.model.config)
    config = classes.config(**deepcopy(hugging_face_config(spec)))
    config._attn_implementation = family.attention
    ours = {key: spec.model.config[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")}
    ours |= {"num_hidden_layers": spec.layers, "tie_word_embeddings": spec.tied}
    for key, value in ours.items():
        if (theirs := getattr(config, key)) != value:
            raise InvalidConfig(f"model.config.{key} is {value} for the job, but {theirs} for the library")
    return config
