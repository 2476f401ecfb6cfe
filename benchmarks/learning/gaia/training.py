"""Islands of a job file that join as `Gaia` says, in one process; and what those send that exchange in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from benchmarks.learning.gaia.band import Band, Meter
from benchmarks.learning.gaia.sea import Island, Sea, Sites
from benchmarks.learning.gaia.significance import Copy, Gaia
from swarm.data.batches import Batches
from swarm.job.course import InnerStep
from swarm.job.islands import courses, outer_plan
from swarm.job.outer import fragment_of
from swarm.job.schedule import learning_rate
from swarm.job.spec import JobSpec
from swarm.model.codec import CODECS
from swarm.model.families import stored_name
from swarm.model.state import place_of
from swarm.reference.trainer import build_stages, evaluate, train_step


@dataclass(frozen=True, slots=True)
class Trained:
    weights: Mapping[str, Tensor]
    loss: float  # on held-out text; NaN if there is none
    sent_bytes: float  # by an island to each other one, mean
    seconds: float  # virtual, until all has come
    islands: list[Island]


def train_gaia(spec: JobSpec, batches: Batches, gaia: Gaia, sites: Sites | None = None) -> Trained:
    """Train a resolved spec whose islands, of a stage each, join in this way; what it says in [outer] means nothing.

    The learning rate is divided by the number of islands, since the updates of all add up. Without `sites` all are
    equally fast, and links carry any amount at once.
    """
    count = spec.island_count
    sites = sites or Sites((1.0,) * count, (math.inf,) * count)
    training = spec.training.model_copy(
        update={
            "global_batch_sequences": spec.training.global_batch_sequences // count,
            "learning_rate": spec.training.learning_rate / count,
        }
    )
    share = spec.model_copy(
        update={
            "training": training,
            "averaging": spec.averaging.model_copy(update={"mode": "allreduce"}),
            "islands": spec.islands.model_copy(update={"count": 1}),
        }
    )
    islands = []
    for number in range(count):
        stages = build_stages(share, torch.device("cpu"))
        assert len(stages) == 1, "an island has one stage here"
        weights = stages[0].weights.newest()
        meter = meter_of(gaia, sites, number)
        islands.append(Island.of(stages, Copy(weights, blocks_of(spec, weights), gaia), meter, count))
    paths = courses(spec)

    def train(number: int) -> float:
        one = islands[number]
        inner: InnerStep = paths[number].at(one.steps)
        train_step(one.stages, share, batches, inner)
        return learning_rate(training, inner.rate_step) / training.learning_rate

    sea = Sea(gaia, sites, islands, spec.training.steps, train)
    sea.run()
    first = islands[0]
    with torch.no_grad():  # as behind closing merges: the anchor is the model
        for name, one in first.copy.weights.items():
            one.copy_(first.copy.anchor[name])
    held_out = batches.evaluation_microbatches > 0
    loss = evaluate(first.stages, share, batches, spec.training.steps).loss if held_out else math.nan
    sent_bytes = mean(one.sent_bytes for one in islands)
    return Trained(first.copy.weights, loss, sent_bytes, sea.now_s, islands)


def meter_of(gaia: Gaia, sites: Sites, number: int) -> Meter:
    """That of one island. Without a band it only counts."""
    band = gaia.band or Band()
    return Meter(band, band.share * sites.carried(number), gaia.threshold)


def blocks_of(spec: JobSpec, weights: Mapping[str, Tensor]) -> list[list[str]]:
    """The parameters by block: a layer each, the embedding, the head."""
    blocks: dict[object, list[str]] = {}
    for name in weights:
        blocks.setdefault(place_of(spec, stored_name(spec, name)), []).append(name)
    return list(blocks.values())


def fragment_bytes(spec: JobSpec, weights: Mapping[str, Tensor]) -> list[int]:
    """What each fragment of a job with outer steps takes on the way to one other island."""
    fragments, code = outer_plan(spec).rhythm.fragments, CODECS[spec.outer.compression]
    taken = [0] * fragments
    for name, one in weights.items():
        place = place_of(spec, stored_name(spec, name))
        taken[fragment_of(place, fragments)] += code.payload_bytes(one.numel())
    return taken


def streamed_bytes(spec: JobSpec, weights: Mapping[str, Tensor]) -> int:
    """What an island of a job with outer steps sends to each other one, all in all."""
    rhythm, taken = outer_plan(spec).rhythm, fragment_bytes(spec, weights)
    return sum(taken[fragment] for step in range(rhythm.steps) for fragment in rhythm.captures(step))


def streamed_s(spec: JobSpec, weights: Mapping[str, Tensor], sites: Sites) -> float:
    """How long a job with outer steps takes, if all islands wait for every exchange until the slowest link has carried
    it."""
    rhythm, taken = outer_plan(spec).rhythm, fragment_bytes(spec, weights)
    bytes_per_s = min(sites.bytes_per_s)
    now_s, free_s, done_s = 0.0, 0.0, [0.0] * rhythm.fragments
    for step in range(rhythm.steps):
        now_s += max(sites.step_s)
        for fragment in rhythm.captures(step):
            free_s = max(now_s, free_s) + taken[fragment] / bytes_per_s
            done_s[fragment] = free_s + sites.delay_s
        now_s = max([now_s, *(done_s[fragment] for fragment in rhythm.merges(step))])
    return now_s
