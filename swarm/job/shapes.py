"""Names and shapes of a model's parameters, by its config alone. No torch.

The client compares the headers of weights with them before it sends a byte. A stage builds the library's own classes,
and their parameters decide; tests/unit/swarm/job/test_shapes.py compares the two over all families and odd configs.
"""

from __future__ import annotations

from typing import TypeAlias

from swarm.job.families import FAMILIES, HEAD, Family
from swarm.job.partition import layer_widths
from swarm.job.spec import JobSpec

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def parameter_table(spec: JobSpec) -> Shapes:
    """Name and shape of every parameter of the model; a tied head is the embedding's entry.

    `spec` needs a filled model.config.
    """
    family, config = FAMILIES[spec.model.family], spec.model.config
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    narrow_out, narrow_in = place_shapes(spec)
    trunk: Shapes = {f"{family.embedding}.weight": (vocabulary, width)}
    if family.learns_positions:
        trunk[f"{family.positions}.weight"] = (config["max_position_embeddings"], width)
    layer = _layer(spec)
    for index in range(spec.layers):
        trunk |= {f"{family.layers}.{index}.{name}": shape for name, shape in layer.items()}
    for place in spec.places:
        trunk |= {f"{family.layers}.{place - 1}.narrow_out.{name}": shape for name, shape in narrow_out.items()}
        trunk |= {f"{family.layers}.{place}.narrow_in.{name}": shape for name, shape in narrow_in.items()}
    trunk |= _norm(family, family.final_norm, width)
    shapes: Shapes = {f"{family.trunk}.{name}": shape for name, shape in trunk.items()}
    return shapes if spec.tied else shapes | {HEAD: (vocabulary, width)}


def place_shapes(spec: JobSpec) -> tuple[Shapes, Shapes]:
    """The parameters of a narrow place: those of the layer before it, and those of the layer behind it."""
    narrow, width, narrow_width = spec.model.narrow, spec.model.config["hidden_size"], spec.boundary_width
    down: Shapes = {} if narrow.kind == "maxout" else {"down.weight": (narrow_width, width)}
    up: Shapes = {"up.weight": (width, narrow_width)}
    if narrow.by_token:
        up |= {"table.weight": (spec.model.config["vocab_size"], narrow.rank or width)}
        return down, up | ({"spread.weight": (width, narrow.rank)} if narrow.rank else {})
    norms: Shapes = {}
    for part in ("weight", "bias"):
        norms |= {f"wide_norm.{part}": (width,), f"norm.{part}": (narrow_width,)}
    return down | norms, up


def _layer(spec: JobSpec) -> Shapes:
    family, config, widths = FAMILIES[spec.model.family], spec.model.config, layer_widths(spec)
    shapes: Shapes = {}
    for matrix in family.matrices:
        out, into = widths.sizes[matrix.out], widths.sizes[matrix.into]
        shapes[f"{matrix.name}.weight"] = (into, out) if family.into_first else (out, into)
        _, default = family.fields.get(matrix.bias, (bool, matrix.bias == "always"))
        if config.get(matrix.bias, default):
            shapes[f"{matrix.name}.bias"] = (out,)
    for name in family.layer_norms:
        shapes |= _norm(family, name, config["hidden_size"])
    for name in family.head_norms:
        shapes |= _norm(family, name, widths.head)
    return shapes


def _norm(family: Family, name: str, width: int) -> Shapes:
    names = ("weight",) if family.norm else ("weight", "bias")
    return {f"{name}.{part}": (width,) for part in names}
