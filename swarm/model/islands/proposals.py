"""What a stage's island proposes, kept from the capture of a fragment to its merge.

    capture ──▶ held, coded ──inner steps go on──▶ merged: forgotten        overlap_steps > 0
    capture and merge behind the same inner step ──▶ made when it is asked for, as nothing can change it

Every replica of the stage holds the same bytes, so that any of them may be the envoy; a joiner fetches them with the
rest of a parameter's state. Decision: docs/decisions/107.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
import xxhash
from torch import Tensor

from swarm.job.course import OuterCourse
from swarm.job.islands import outer_courses, outer_plan
from swarm.job.outer import fragment_of
from swarm.job.spec import JobSpec
from swarm.model import codec
from swarm.model.families import stored_name
from swarm.model.islands.outer import Merge, OuterWeights
from swarm.model.state import place_of
from swarm.model.weights import Weights


class Proposals:
    """The proposals of a stage with these parameters, in a resolved job with outer steps."""

    def __init__(self, spec: JobSpec, weights: Weights, outer: OuterWeights) -> None:
        self.course: OuterCourse = outer_courses(spec)[0]  # outer steps are the same in all islands
        self.code = spec.outer.compression
        self._plan = outer_plan(spec)
        self.are_filtered = self._plan.threshold is not None  # many of their numbers may be 0
        self._weights, self._outer = weights, outer
        parameters = weights.newest()
        self._shapes = {name: tuple(one.shape) for name, one in parameters.items()}
        places = {name: place_of(spec, stored_name(spec, name)) for name in parameters}
        self._fragments = {name: fragment_of(at, self.course.fragments) for name, at in places.items()}
        self._held: dict[str, Tensor] = {}

    def merged_at(self, step: int) -> frozenset[str]:
        """The parameters that an outer step merges."""
        fragment = self.course.outer_at(step).fragment
        return frozenset(name for name, of in self._fragments.items() if of == fragment)

    def held_bytes(self, name: str, version: int | None) -> int:
        """The bytes that `tensors` has at a version; without one the most that it may have."""
        is_held = self.course.overlap_steps > 0 if version is None else self._is_held(name, version)
        return self.size_bytes(name) if is_held else 0

    def size_bytes(self, name: str) -> int:
        return codec.CODECS[self.code].payload_bytes(prod(self._shapes[name]))

    def coded(self, name: str) -> Tensor:
        """A parameter's proposal, uint8, 1-D on the CPU: how far it is behind the anchor, or was when captured."""
        if name in self._held:
            return self._held[name]
        return self._coded(name, self._weights.newest()[name], self._weights.version)

    def decoded(self, name: str, coded: Tensor) -> Tensor:
        """A proposal P for a parameter, as all islands get it; CorruptFrame if it has another size."""
        return codec.decode(codec.readable(coded), codec.dtype_of(self.code), self._shapes[name], self.code)

    def capture(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """These parameters are of `version` now: hold what is captured there and merged later."""
        captured = self.course.captured(version)
        for name, one in weights if captured else ():
            if self._fragments[name] in captured:
                self._held[name] = self._coded(name, one, version)

    def merge(self, name: str, weights: Tensor, version: int, merge: Merge) -> Tensor:
        """Make the next outer version of a parameter; gives the weights of an island that had `weights` at `version`,
        behind what it proposed."""
        held, own = self._held.pop(name, None), None
        if merge.rule.o:
            own = self.decoded(name, self._coded(name, weights, version) if held is None else held)
        return self._outer.merge(name, weights, merge, own)

    def tensors(self, name: str, version: int) -> list[Tensor]:
        """What is held of a parameter at `version`, not copies: made if it is not held yet, to be written to."""
        if not self._is_held(name, version):
            self._held.pop(name, None)
            return []
        if name not in self._held:
            self._held[name] = torch.zeros(self.size_bytes(name), dtype=torch.uint8)
        return [self._held[name]]

    def digest(self) -> str:
        """The digest of all held proposals; empty if there are none."""
        if not self._held:
            return ""
        state = xxhash.xxh3_128()
        for name, one in sorted(self._held.items()):
            state.update(name.encode())
            state.update(codec.readable(one))
        return state.hexdigest()

    def _coded(self, name: str, weights: Tensor, version: int) -> Tensor:
        share = self._plan.significant_from(self.course.inner_steps(version))
        return codec.encode_there(self._outer.behind(name, weights, share), self.code)

    def _is_held(self, name: str, version: int) -> bool:
        return self._fragments[name] in self.course.held(version)
