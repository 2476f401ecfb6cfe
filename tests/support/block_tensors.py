"""Tensors that are hard on codecs in blocks, drawn by hypothesis."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

BLOCK = 256  # of int8 and fp4

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Blocks of very different size, some zero, with a few values of any finite float32."""
    shape = draw(shapes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal(math.prod(shape))
    blocks = math.ceil(values.size / BLOCK)
    exponents = draw(st.lists(st.integers(-40, 38), min_size=blocks, max_size=blocks))
    values *= np.repeat(10.0 ** np.array(exponents), BLOCK)[: values.size]
    values *= rng.random(values.size) < draw(st.sampled_from([0.0, 0.1, 1.0]))
    for place, value in draw(
        st.lists(st.tuples(st.integers(0, values.size - 1), st.floats(width=32, allow_nan=False, allow_infinity=False)))
    ):
        values[place] = value
    top = float(np.finfo(np.float32).max)
    return torch.from_numpy(np.clip(values, -top, top).astype(np.float32)).view(shape)


def blocks_of(tensor: Tensor) -> Tensor:
    """The blocks of a tensor as rows of float64; the last one is filled up with zeros."""
    flat = tensor.double().view(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
