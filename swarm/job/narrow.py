"""Whether narrow places fit a model, and a cut fits the places (swarm/model/narrow.py has what stands there).

layers       0   1 | 2   3 | 4   5        every = 2: places behind layers 2 and 4, where stages may end
stages     [ 0   1 | 2   3 ] [ 4   5 ]    split = [4, 2]: a place without a cut is computed all the same
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from swarm.text import either

FACTOR_MAX = 64


def check_factor(factor: int, width: object) -> None:
    """ValueError unless the model's width, where it is known, can be divided so."""
    if not isinstance(width, int) or (width % factor == 0 and factor < width):
        return
    fitting = [str(factor) for factor in range(2, min(width, FACTOR_MAX + 1)) if width % factor == 0]
    raise ValueError(
        f"model.narrow.factor = {factor} does not divide model.config.hidden_size = {width}: "
        + (f"choose {either(fitting)}" if fitting else "change the width")
    )


def check_every(every: int | str, layers: int) -> None:
    """ValueError unless there is a place, and all lie equally far from each other and from both ends."""
    if layers == 1:
        raise ValueError("model.narrow has no place in a model of 1 decoder layer: leave model.narrow out")
    if isinstance(every, int) and (layers % every or every == layers):
        does = "leaves no place between" if every == layers else "does not divide"
        fitting = [*(str(period) for period in range(1, layers) if layers % period == 0), '"auto"']
        raise ValueError(
            f"model.narrow.every = {every} {does} the model's {layers} decoder layers: choose {either(fitting)}"
        )


def check_split(split: Sequence[int], every: int) -> None:
    """ValueError unless all cuts lie on places."""
    layers = sum(split)
    for cut in accumulate(split[:-1]):
        if cut % every or not 0 < cut < layers:
            where = f"behind layer {cut}" if 0 < cut < layers else "off the embedding or the head"
            raise ValueError(
                f"pipeline.split = {list(split)} would cut {where}, where the model is not narrow: "
                f"cut behind {either([str(place) for place in range(every, layers, every)])}"
            )
