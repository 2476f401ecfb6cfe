"""When islands exchange their weights, and with which numbers: the modes diloco, streaming and gaia.

    inner steps   0 ......... H-1 | H ......... 2H-1 | ...        fragment 0
                               ▲ captured                 merged ▶ overlap_steps later
    fragment p is captured p * H / P inner steps later than fragment 0

An island trains by itself and, behind some inner steps, proposes how far it has moved from the anchor: the outer
weights, which all islands share. A merge makes new outer weights out of all proposals and gives them to every island.
Both happen behind the same inner steps at all islands, so the job file alone decides them. `swarm.model.islands` has
the mathematics.

With gaia islands propose only the numbers that are significant. What an island does not propose stays in its weights,
ahead of the outer weights, and is proposed later. Closing captures have everything.

Pure values; standard library only.

Source: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512), Gaia (Hsieh et al., NSDI 2017). Closing merges
are ours: they make the outer weights the model.

Decision: docs/decisions/045.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import sqrt


@dataclass(frozen=True, slots=True)
class OuterUpdate:
    """The two numbers of an outer version: Nesterov's momentum on the mean proposal."""

    learning_rate: float
    momentum: float


@dataclass(frozen=True, slots=True)
class MergeRule:
    """The numbers with which an island merges outer weights, named as in `swarm.model.islands.outer.merged`."""

    k: float
    s: float
    o: float = 0.0


REPLACE = MergeRule(0.0, 0.0)  # the weights become the new outer weights
SENT = MergeRule(1.0, 1.0, 1.0)  # what an island proposed becomes the mean of all; what it did not propose stays
REBASE = MergeRule(1.0, 1.0)  # an island that was late keeps all it has made, and proposes it next time


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When each fragment is captured and merged, counted in the inner steps of an island."""

    steps: int  # inner steps of each island
    every_steps: int  # H: between two captures of a fragment
    fragments: int  # P
    overlap_steps: int  # from a capture to its merge

    def captures(self, step: int) -> tuple[int, ...]:
        """The fragments that islands propose behind inner step `step` (from 0); all of them behind the last."""
        if step == self.steps - 1:
            return tuple(range(self.fragments))
        if step + 1 + self.overlap_steps >= self.steps:
            return ()  # it could not be merged before the end; the closing capture has all of it
        return tuple(p for p in range(self.fragments) if (step + 1 - self._offset(p)) % self.every_steps == 0)

    def merges(self, step: int) -> tuple[int, ...]:
        """The fragments that are merged behind inner step `step`, each in an outer step of its own."""
        if step == self.steps - 1:
            return tuple(range(self.fragments))
        captured = step - self.overlap_steps
        return self.captures(captured) if captured >= 0 else ()

    def events(self) -> list[int]:
        """The inner steps behind which something is captured or merged, in order."""
        found = {self.steps - 1}
        for offset in {self._offset(p) for p in range(self.fragments)}:
            captured = range((offset - 1) % self.every_steps, self.steps, self.every_steps)
            found.update(captured)
            found.update(step + self.overlap_steps for step in captured)
        return sorted(step for step in found if step < self.steps)

    def _offset(self, fragment: int) -> int:
        return fragment * self.every_steps // self.fragments


@dataclass(frozen=True, slots=True)
class OuterPlan:
    """When fragments are captured and merged, and with which numbers."""

    rhythm: Rhythm
    mixing: float  # the share of the weights that a merge keeps
    update: OuterUpdate
    threshold: float | None = None  # gaia: how significant a number must be at first, in shares of its outer weight

    def rule(self, step: int) -> MergeRule:
        """How an island takes over what is merged behind inner step `step`; the last merges close the course."""
        if step == self.rhythm.steps - 1:
            return REPLACE
        return MergeRule(self.mixing, 0.0) if self.threshold is None else SENT

    def significant_from(self, captured: int) -> float:
        """The share of its outer weight above which a number is proposed behind `captured` inner steps: the root of
        their number divides it, as in Gaia's section 4. It is 0 where everything is proposed."""
        is_closing = captured == self.rhythm.steps
        return 0.0 if self.threshold is None or is_closing else self.threshold / sqrt(captured)


class Part(Enum):
    """The parts of a model outside its decoder layers."""

    EMBEDDING = "embedding"  # with learned positions; a tied weight too
    HEAD = "head"  # with the norm before it


def fragment_of(place: int | Part, fragments: int) -> int:
    """The fragment of the model that a parameter belongs to; the parameters of a fragment are proposed and merged
    together.

        fragment of layer l: l mod P          P fragments; with one fragment all is in it
        embedding: fragment 0                 norm and head: fragment P - 1

    Fragments are strided layers, so that each holds some of the model's depth. They are layers and not stages, because
    the bits of a model must not depend on how it is cut.

    Source: Streaming DiLoCo (arXiv 2501.18512), section 2.1, strided fragments.

    The fragment (from 0) of a decoder layer, given by its index, or of another part of the model.
    """
    match place:
        case Part.EMBEDDING:
            return 0
        case Part.HEAD:
            return fragments - 1
        case layer:
            return layer % fragments
