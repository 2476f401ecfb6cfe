"""Varuna's schedule and its modelled times, beside the published ones.

    python -m benchmarks.models.varuna [--output json]

The schedule is made in units: everything takes one, links take none, and a stage does the first of what its queues
have, in the order finish (W, of a backward), backward (B), recompute (R), forward (F).

    F at stage s ──▶ F at s + 1; at the last stage its own B, which needs no recomputing
    B at stage s ──▶ its own W, and R at s - 1
    R at stage s ──▶ its own B

Then stages follow these orders in seconds, without W: F and R take 0.1 s and B 0.2 s, and a tensor travels for as long
as the link says and for a half-normal time (standard deviation 10 ms) more. R needs no gradient, so it overlaps its
travel. But if the gradient would not be there at the end of R, and a forward can be done, that comes first. GPipe does
all forwards, then R and B of one microbatch after the other. Times are means of 5 seeds.

Source: Varuna, arXiv 2111.04007, section 4, and its simulator (github.com/microsoft/varuna).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random
from statistics import fmean

from benchmarks.models.published import Figure, exactly, main_of, near

KINDS = "WBRF"  # in the order in which a stage does them
# Units, and the order of each stage without W, by stages and microbatches.
ORDERS = {
    (3, 4): (21, ("FFFF" + 4 * "RB", "FFF" + 3 * "RB" + "FRB", 4 * "FB")),
    (4, 5): (27, ("FFFFF" + 5 * "RB", "FFFFF" + 5 * "RB", "FFF" + 3 * "RB" + "FF" + 2 * "RB", 5 * "FB")),
    (4, 8): (
        39,
        (
            8 * "F" + 8 * "RB",
            6 * "F" + 3 * "RB" + "FF" + 5 * "RB",
            "FFF" + 3 * "RB" + "FFF" + 3 * "RB" + "FF" + 2 * "RB",
            8 * "FB",
        ),
    ),
}
FORWARD_S, BACKWARD_S, TRAVEL_SD_S = 0.1, 0.2, 0.01
DELAYS_S = (0.001, 0.05, 0.1, 0.2)
# Seconds of Varuna and of GPipe at each of DELAYS_S, by stages and microbatches.
SECONDS = {
    (4, 16): ((7.31, 7.57, 7.90, 8.18), (7.44, 7.73, 8.01, 8.61)),
    (8, 32): ((15.58, 16.29, 16.95, 18.04), (15.20, 15.91, 16.57, 17.98)),
}
SEEDS, OFF = range(5), 0.05


def schedule(stages: int, microbatches: int) -> tuple[int, list[str]]:
    """The units that a step takes, and what each stage does in turn, without W."""
    queues = [dict.fromkeys(KINDS, 0) for _ in range(stages)]
    queues[0]["F"] = microbatches
    orders, units, last = [""] * stages, 0, stages - 1
    while any(any(queue.values()) for queue in queues):
        units += 1
        taken = [next((kind for kind in KINDS if queue[kind]), "") for queue in queues]
        for stage, kind in enumerate(taken):
            if kind:
                queues[stage][kind] -= 1
                orders[stage] += kind
            if kind == "F":
                queues[min(stage + 1, last)]["B" if stage == last else "F"] += 1
            elif kind == "R":
                queues[stage]["B"] += 1
            elif kind == "B":
                queues[stage]["W"] += 1
                if stage:
                    queues[stage - 1]["R"] += 1
    return units, [order.replace("W", "") for order in orders]


def gpipe(stages: int, microbatches: int) -> list[str]:
    """What each stage does in turn."""
    return [microbatches * "F" + microbatches * "RB"] * stages


class Pipeline:
    """Stages that follow their orders in seconds; the n-th F, R and B of a stage are of microbatch n."""

    def __init__(self, orders: Sequence[str], delay_s: float, seed: int) -> None:
        self.left, self.delay_s, self.rng = [list(order) for order in orders], delay_s, Random(seed)
        self.free_s = [0.0] * len(orders)
        self.activations_s: list[list[float]] = [[0.0] * len(orders[0]), *([] for _ in orders[1:])]  # when they arrive
        self.gradients_s: list[list[float]] = [[] for _ in orders]
        self.done = [dict.fromkeys(KINDS, 0) for _ in orders]

    def run(self) -> float:
        """Seconds until all stages are done: always the computation that may begin first is next."""
        while any(self.left):
            _, stage, kind = min(found for stage in range(len(self.left)) if (found := self._next(stage)))
            self._compute(stage, kind)
        return max(self.free_s)

    def _next(self, stage: int) -> tuple[float, int, str] | None:
        """When the stage can begin what, as far as it is known by now."""
        if not self.left[stage]:
            return None
        kind, free_s = self.left[stage][0], self.free_s[stage]
        forward_s = self._arrives_s(self.activations_s, stage, "F") if "F" in self.left[stage] else None
        gradient_s = self._arrives_s(self.gradients_s, stage, "B")
        if kind == "R":
            is_late = gradient_s is None or gradient_s - FORWARD_S > free_s
            if forward_s is None or not is_late or (gradient_s is not None and forward_s > gradient_s - FORWARD_S):
                return free_s, stage, "R"
            return max(free_s, forward_s), stage, "F"
        ready_s = forward_s if kind == "F" else gradient_s
        return None if ready_s is None else (max(free_s, ready_s), stage, kind)

    def _arrives_s(self, arrivals_s: Sequence[Sequence[float]], stage: int, kind: str) -> float | None:
        """When the stage has the tensor for its next computation of a kind; None if that was not sent yet."""
        at = self.done[stage][kind]
        return arrivals_s[stage][at] if at < len(arrivals_s[stage]) else None

    def _compute(self, stage: int, kind: str) -> None:
        began = self._next(stage)
        assert began is not None
        self.free_s[stage] = began[0] + (BACKWARD_S if kind == "B" else FORWARD_S)
        self.left[stage].remove(kind)
        self.done[stage][kind] += 1
        there_s = self.free_s[stage] + self.delay_s + abs(self.rng.gauss(0.0, TRAVEL_SD_S))
        if kind == "F" and stage + 1 < len(self.left):
            self.activations_s[stage + 1].append(there_s)
        elif kind == "F":
            self.gradients_s[stage].append(self.free_s[stage])
        elif kind == "B" and stage:
            self.gradients_s[stage - 1].append(there_s)


def figures() -> list[Figure]:
    found = []
    for (stages, microbatches), (published, orders) in ORDERS.items():
        units, made = schedule(stages, microbatches)
        shape = f"{stages} stages, {microbatches} microbatches"
        found.append(exactly(f"{shape}, units", published, units, 0))
        found.append(exactly(f"{shape}, stages in the published order", stages, sum(map(str.__eq__, made, orders)), 0))
    for (stages, microbatches), rows in SECONDS.items():
        for name, orders, row in zip(
            ("Varuna", "GPipe"), (schedule(stages, microbatches)[1], gpipe(stages, microbatches)), rows, strict=True
        ):
            for delay_s, published_s in zip(DELAYS_S, row, strict=True):
                mean_s = fmean(Pipeline(orders, delay_s, seed).run() for seed in SEEDS)
                about = f"{name}, {stages} stages, {microbatches} microbatches, {1e3 * delay_s:.0f} ms, s"
                found.append(near(about, published_s, mean_s, OFF, 2))
    return found


if __name__ == "__main__":
    sys.exit(main_of(__doc__, figures))
