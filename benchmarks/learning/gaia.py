"""Islands that send what is significant, when it is (Gaia), beside fragments in turn (streaming), at equal tokens.

    python -m benchmarks.learning.gaia [--seeds 3] [--steps 120] [--rates 0.004] [--table docs/islands.md]
        [--save RUNS.json]

Gaia: behind every step an island looks at how far each block of the model (a layer, the embedding, the head) has moved
since it was last sent, as a share of its norm. What is above the threshold is sent to all other islands, which add it
to their weights; the rest waits and grows. No island may be more than `slack` steps ahead of what it has heard of the
slowest. Messages of an island arrive in the order in which they were sent, on a virtual clock. With --save each result
is kept when it is found, and a run that was interrupted goes on.

    pending = anchor - weights          the anchor has what was sent, by anybody
    send      P = C(pending): the anchor loses P, the weights stay, so what the code loses stays pending (exchange)
    receive   P: anchor and weights lose P (rebase)

Source: Gaia (NSDI 2017). Ours are blocks in the place of single numbers, which `unit = "coordinate"` brings back, and
codes whose loss waits. Left out: the band, which sets the threshold by what the link carries, and the barrier, which
stops readers of what was announced; both only change when something is sent.

The optimizer's learning rate is divided by the number of islands, since the updates of all add up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Literal, TypeAlias

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.learning import outer
from benchmarks.learning.convergence import LENGTH, SEQUENCES, with_data
from benchmarks.learning.kept import Kept
from benchmarks.learning.runs import SOURCE, parsed, parser_of
from benchmarks.tables import markdown, publish, spread
from swarm.data.batches import Batches
from swarm.job.course import InnerStep
from swarm.job.fragments import fragment_of
from swarm.job.islands import courses, outer_plan
from swarm.job.outer import MergeRule, OuterUpdate
from swarm.job.schedule import learning_rate
from swarm.job.spec import JobSpec
from swarm.model.codec import CODECS, round_trip
from swarm.model.families import stored_name
from swarm.model.islands.outer import OuterState, advance, merged
from swarm.model.stage import Stage
from swarm.model.state import place_of
from swarm.reference.trainer import build_stages, evaluate, train_local, train_step
from swarm.text import counted, size

ADD = OuterUpdate(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # the anchor loses what was sent
EXCHANGE, REBASE = MergeRule(1.0, 1.0, 1.0), MergeRule(1.0, 1.0, 0.0)
INDEX_BYTES = 4
MARKS = ("<!-- gaia -->", "<!-- gaia end -->")

Update: TypeAlias = Mapping[str, Tensor]  # by parameter, what the anchor loses


@dataclass(frozen=True, slots=True)
class Gaia:
    """When an island sends what, and what a message takes."""

    threshold: float = 0.01
    decay: Literal["sqrt", "rate", "none"] = "sqrt"  # 1 / sqrt(t + 1), as the learning rate, or not at all
    unit: Literal["block", "coordinate"] = "block"
    compression: str = "fp4"
    slack: int = 1
    step_s: tuple[float, ...] = (1.0, 1.0)  # of each island
    delay_s: float = 0.0  # of a message
    bytes_per_s: float = math.inf  # from an island to each other

    def threshold_at(self, step: int, rate: float) -> float:
        """The threshold behind inner step `step` (from 0), whose learning rate is this share of the highest."""
        match self.decay:
            case "sqrt":
                return self.threshold / math.sqrt(step + 1)
            case "rate":
                return self.threshold * rate
            case "none":
                return self.threshold


class Copy:
    """The weights of one island, and its anchor: what all islands have sent, as far as it has heard of it."""

    def __init__(self, weights: Mapping[str, Tensor], blocks: Sequence[Sequence[str]], gaia: Gaia) -> None:
        self.weights = weights  # changed in place, here and by the optimizer
        self.anchor = {name: one.clone() for name, one in weights.items()}
        self._blocks, self._gaia = blocks, gaia

    def pending(self, name: str) -> Tensor:
        """What of a parameter was not sent yet."""
        return self.anchor[name] - self.weights[name]

    def send(self, threshold: float) -> tuple[Update, int]:
        """What is significant, as all get it, and the bytes that it takes."""
        whole = self._gaia.unit == "block"
        sent = self._blocks_above(threshold) if whole else self._numbers_above(threshold)
        for name, (update, _) in sent.items():
            self._merge(name, update, EXCHANGE)
        return {name: update for name, (update, _) in sent.items()}, sum(taken for _, taken in sent.values())

    def receive(self, update: Update) -> None:
        for name, one in update.items():
            self._merge(name, one, REBASE)

    def _blocks_above(self, threshold: float) -> dict[str, tuple[Tensor, int]]:
        code, found = CODECS[self._gaia.compression], {}
        for names in self._blocks:
            moved, norm = (
                math.sqrt(math.fsum(float(one.double().square().sum()) for one in tensors))
                for tensors in ([self.pending(name) for name in names], [self.weights[name] for name in names])
            )
            if moved > threshold * norm:
                for name in names:
                    update = round_trip(self.pending(name), self._gaia.compression)
                    found[name] = update, code.payload_bytes(update.numel())
        return found

    def _numbers_above(self, threshold: float) -> dict[str, tuple[Tensor, int]]:
        """With their places: an index for each, or a bit for every number of the parameter, whichever is less."""
        found = {}
        for name, one in self.weights.items():
            pending = self.pending(name)
            beside = one.abs()
            beside = torch.where(beside == 0, one.square().mean().sqrt(), beside)  # else each of them is significant
            above = pending.abs() > threshold * beside
            count = int(above.sum())
            if count:
                update = torch.zeros_like(pending)
                update[above] = round_trip(pending[above], self._gaia.compression)
                taken = CODECS[self._gaia.compression].payload_bytes(count)
                found[name] = update, taken + min(INDEX_BYTES * count, math.ceil(one.numel() / 8))
        return found

    @torch.no_grad()
    def _merge(self, name: str, update: Tensor, rule: MergeRule) -> None:
        before = self.anchor[name]
        after = advance(OuterState(before, torch.zeros(())), update, ADD).anchor
        self.weights[name].copy_(merged(self.weights[name], before, after, rule, update))
        self.anchor[name] = after


@dataclass(slots=True)
class Island:
    stages: list[Stage]
    copy: Copy
    heard: list[int]  # inner steps that each island has made, as far as this one knows
    steps: int = 0
    sent_bytes: int = 0  # to each of the others
    busy: bool = False
    came: list[Update] = field(default_factory=list)  # between its steps it takes them over
    free_s: list[float] = field(default_factory=list)  # when the link to each other one has sent all before


class Sea:
    """Islands that train on a virtual clock until each has made all its steps, and all is sent."""

    def __init__(self, gaia: Gaia, islands: Sequence[Island], steps: int, train: Callable[[int], float]) -> None:
        """`train` makes the next inner step of an island, and gives the share of the highest learning rate there."""
        self.gaia, self.islands, self.steps, self._train = gaia, islands, steps, train
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def run(self) -> None:
        for number in range(len(self.islands)):
            self._begin(number)
        while self._events:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
        assert all(one.steps == self.steps for one in self.islands), "an island waits for ever"

    def _at(self, when_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, self._count, happens))
        self._count += 1

    def _begin(self, number: int) -> None:
        one = self.islands[number]
        if one.busy:
            return
        while one.came:
            one.copy.receive(one.came.pop(0))
        if one.steps == self.steps or one.steps > min(one.heard) + self.gaia.slack:
            return
        one.busy = True
        rate = self._train(number)
        self._at(self.now_s + self.gaia.step_s[number], partial(self._done, number, rate))

    def _done(self, number: int, rate: float) -> None:
        one = self.islands[number]
        one.busy = False
        threshold = self.gaia.threshold_at(one.steps, rate)
        one.steps += 1
        one.heard[number] = one.steps
        update, taken = one.copy.send(0.0 if one.steps == self.steps else threshold)  # behind the last step all is sent
        one.sent_bytes += taken
        for other in range(len(self.islands)):
            if other != number:
                sent_s = one.free_s[other] = max(self.now_s, one.free_s[other]) + taken / self.gaia.bytes_per_s
                self._at(sent_s + self.gaia.delay_s, partial(self._arrive, other, number, update, one.steps))
        self._begin(number)

    def _arrive(self, number: int, sender: int, update: Update, clock: int) -> None:
        one = self.islands[number]
        one.heard[sender] = clock
        one.came.append(update)
        self._begin(number)


@dataclass(frozen=True, slots=True)
class Trained:
    weights: Mapping[str, Tensor]
    loss: float  # on held-out text; NaN if there is none
    sent_bytes: float  # by an island to each other one, mean
    seconds: float  # virtual


def train_gaia(spec: JobSpec, batches: Batches, gaia: Gaia) -> Trained:
    """Train a resolved spec whose islands, of a stage each, join in this way; what it says in [outer] means nothing."""
    alone = spec.averaging.model_copy(update={"mode": "allreduce"})
    training = spec.training.model_copy(
        update={
            "global_batch_sequences": spec.training.global_batch_sequences // spec.island_count,
            "learning_rate": spec.training.learning_rate / spec.island_count,
        }
    )
    count = spec.island_count
    share = spec.model_copy(
        update={
            "training": training,
            "averaging": alone,
            "islands": spec.islands.model_copy(update={"count": 1}),
        }
    )
    islands = []
    for _ in range(count):
        stages = build_stages(share, torch.device("cpu"))
        assert len(stages) == 1, "an island has one stage here"
        weights = stages[0].weights.newest()
        islands.append(Island(stages, Copy(weights, blocks_of(spec, weights), gaia), [0] * count, free_s=[0.0] * count))
    paths = courses(spec)

    def train(number: int) -> float:
        one = islands[number]
        inner: InnerStep = paths[number].at(one.steps)
        train_step(one.stages, share, batches, inner)
        return learning_rate(training, inner.rate_step) / training.learning_rate

    sea = Sea(gaia, islands, spec.training.steps, train)
    sea.run()
    first = islands[0]
    with torch.no_grad():  # as behind closing merges: the anchor is the model
        for name, one in first.copy.weights.items():
            one.copy_(first.copy.anchor[name])
    held_out = batches.evaluation_microbatches > 0
    loss = evaluate(first.stages, share, batches, spec.training.steps).loss if held_out else math.nan
    sent_bytes = mean(one.sent_bytes for one in islands)
    return Trained(first.copy.weights, loss, sent_bytes, sea.now_s)


def blocks_of(spec: JobSpec, weights: Mapping[str, Tensor]) -> list[list[str]]:
    """The parameters by block: a layer each, the embedding, the head."""
    blocks: dict[object, list[str]] = {}
    for name in weights:
        blocks.setdefault(place_of(spec, stored_name(spec, name)), []).append(name)
    return list(blocks.values())


def streamed_bytes(spec: JobSpec, weights: Mapping[str, Tensor]) -> int:
    """What an island of a job with outer steps sends to each other one, all in all."""
    rhythm, code = outer_plan(spec).rhythm, CODECS[spec.outer.compression]
    of_fragment = [0] * rhythm.fragments
    for name, one in weights.items():
        place = place_of(spec, stored_name(spec, name))
        of_fragment[fragment_of(place, rhythm.fragments)] += code.payload_bytes(one.numel())
    return sum(of_fragment[fragment] for step in range(rhythm.steps) for fragment in rhythm.captures(step))


# The command ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table: a way of `benchmarks.learning.outer`, or gaia."""

    name: str
    how: outer.Way | Gaia

    def measure(self, seed: int, rate: float, steps: int, source: str) -> dict[str, float]:
        """Train once: the loss of the final weights on held-out text, and the bytes that an island sends another."""
        if isinstance(self.how, outer.Way):
            spec = outer.job(self.how, seed, rate, steps, source)
            trained = with_data(spec, train_local)
            weights = trained.stages[0].weights.newest()
            if spec.has_outer_steps:
                return {"loss": trained.evaluations[-1].loss, "bytes": streamed_bytes(spec, weights)}
            gradient = 4 * sum(one.numel() for one in weights.values())  # float32
            return {"loss": trained.evaluations[-1].loss, "bytes": steps * gradient}
        spec = outer.job(outer.Way("diloco", ISLANDS, (("every_steps", 1),)), seed, rate, steps, source)
        found = with_data(spec, partial(train_gaia, gaia=self.how))
        return {"loss": found.loss, "bytes": found.sent_bytes}


ISLANDS = 2
WAYS = (
    Way("allreduce", outer.ALLREDUCE),
    *(
        Way(f"streaming, H {every}, fp4", outer.Way("streaming", ISLANDS, (("every_steps", every),)))
        for every in (2, 5, 10, 50)
    ),
    Way("gaia, T 0, slack 0, float32", Gaia(threshold=0.0, slack=0, compression="none")),
    *(Way(f"gaia, T {threshold:g}, fp4", Gaia(threshold)) for threshold in (0.01, 0.05, 0.2)),
    Way("gaia, T 0.05 not falling, fp4", Gaia(0.05, decay="none")),
)
BY_NUMBER = tuple(
    Way(f"gaia by number, T {threshold:g}, bfloat16", Gaia(threshold, unit="coordinate", compression="bfloat16"))
    for threshold in (0.01, 0.05, 0.2)
)


def rows(found: Mapping[tuple[Way, float], Sequence[Mapping[str, float]]], steps: int) -> Iterator[list[str]]:
    """A row for each way, at the rate where it ends lowest."""

    def loss(one: Sequence[Mapping[str, float]]) -> float:
        return mean(run["loss"] for run in one)

    base: float | None = None
    for way in dict.fromkeys(way for way, _ in found):
        at_rates = [(rate, one) for (other, rate), one in found.items() if other == way]
        rate, runs = min(at_rates, key=lambda item: loss(item[1]))
        base = loss(runs) if base is None else base
        sent = size(round(mean(run["bytes"] for run in runs) / steps))
        yield [
            way.name,
            f"{loss(runs):.3f}{spread([run['loss'] for run in runs])}",
            f"{100 * (loss(runs) / base - 1):+.1f} %",
            f"{rate:g}",
            sent,
        ]


COLUMNS = ("way", "loss", "against allreduce", "rate", "sent per step")


def main() -> None:
    parser = parser_of(__doc__, seeds=3, steps=120)
    parser.add_argument("--rates", type=float, nargs="+", default=(4e-3,))
    parser.add_argument("--by-number", action="store_true", help="the same by single numbers, in the place of blocks")
    arguments = parsed(parser)
    console, kept = Console(), Kept(arguments.save)
    found: dict[tuple[Way, float], list[dict[str, float]]] = {}
    for seed in range(arguments.seeds):
        for way in (WAYS[0], *BY_NUMBER) if arguments.by_number else WAYS:
            for rate in arguments.rates:
                name = f"{way.name}, rate {rate:g}, seed {seed}, {arguments.steps} steps"
                run = kept.once(name, partial(way.measure, seed, rate, arguments.steps, SOURCE))
                found.setdefault((way, rate), []).append(run)
                console.print(f"{name}  {run['loss']:.4f}  {size(round(run['bytes']))}", highlight=False)
    text = (
        f"{markdown(COLUMNS, rows(found, arguments.steps))}\n\n{ISLANDS} islands, {arguments.steps} steps of "
        f"{SEQUENCES * LENGTH} bytes, {counted(arguments.seeds, 'seed')}, "
        f"learning rates {', '.join(f'{rate:g}' for rate in arguments.rates)}."
    )
    publish(text, arguments.table, MARKS)


if __name__ == "__main__":
    main()
