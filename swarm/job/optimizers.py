"""What each optimizer is to a job: its name, what it keeps, what it bears. swarm/model/optimizers.py has the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

OptimizerName: TypeAlias = Literal["adamw", "sgd", "lamb", "muon"]


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """An optimizer as memory and pipeline see it."""

    state_bytes: int  # for each parameter, beside the weights
    bears_delay: bool  # its numerator has a part of the fresh gradient (docs/convergence.md): "auto" lets some be late


FACTS: Mapping[OptimizerName, OptimizerFacts] = {
    "adamw": OptimizerFacts(state_bytes=8, bears_delay=True),  # without lookahead it bears none
    "sgd": OptimizerFacts(state_bytes=0, bears_delay=False),  # 4 with momentum
    "lamb": OptimizerFacts(state_bytes=8, bears_delay=False),
    "muon": OptimizerFacts(state_bytes=8, bears_delay=True),
}
