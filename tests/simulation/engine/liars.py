"""Stage servers that compute wrong numbers on purpose, in a simulated swarm of real torch, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from scheduler.brain.fleet.quarantine import TrustRecord
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import RoundBroken
from swarm.job.spec import JobSpec, TrustSection
from swarm.model.stage import Stage
from swarm.model.state import InitialState
from swarm.types import JobState, Microbatch, PeerId, UnitName
from tests.support import scenes
from tests.support.devices import InlineDevice
from tests.support.simulated import Rig, Tokens, small_spec, write_text

Lie = Literal["zeros", "constant", "stale", "sign", "random"]
LIES: tuple[Lie, ...] = get_args(Lie)
LIAR = PeerId("peer-3")
Poison = Literal["none", "sign", "scale", "noise"]
POISONS: tuple[Poison, ...] = get_args(Poison)


def checked_spec(
    folder: Path, spot_check: float = 0.0, trust: TrustSection | None = None, **changes: object
) -> JobSpec:
    """A small job of two stages that checks its replicas."""
    spec = small_spec(write_text(folder), pipeline__stages=2, config__num_hidden_layers=2, **changes)
    return scenes.resolved(spec.model_copy(update={"trust": trust or TrustSection(spot_check=spot_check)}))


def false(lie: Lie, true: Tensor, before: Tensor) -> Tensor:
    """What the liar gives instead of a result; `before` is its result for another microbatch."""
    match lie:
        case "zeros":
            return torch.zeros_like(true)
        case "constant":
            return torch.full_like(true, 0.5)
        case "stale":
            return before
        case "sign":
            return true * -1000.0
        case "random":
            return torch.randn(true.shape, generator=torch.Generator().manual_seed(1))


@dataclass(slots=True)
class Diary:
    """What a liar did."""

    hops: int = 0
    lies: set[tuple[int, int]] = field(default_factory=set)  # (step, index)


def lying(lie: Lie, share: float, rng: Random, diary: Diary) -> type[Stage]:
    """A class of stage whose outputs are wrong in this share of its hops."""

    class Lying(Stage):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._wrong: set[Microbatch] = set()
            self._before: dict[str, Tensor] = {}

        def forward(self, microbatch: Microbatch, version: int, **options: Any) -> Any:
            y, loss = super().forward(microbatch, version, **options)
            diary.hops += 1
            if rng.random() < share:
                self._wrong.add(microbatch)
                diary.lies.add((microbatch.step, microbatch.index))
            return (None if y is None else self._told("y", microbatch, y)), loss

        def backward(self, microbatch: Microbatch, *arguments: Any, encode: Any = None, **options: Any) -> Any:
            return super().backward(
                microbatch, *arguments, encode=lambda dx: encode(self._told("dx", microbatch, dx)), **options
            )

        def _told(self, name: str, microbatch: Microbatch, true: Tensor) -> Tensor:
            before = self._before.get(name, torch.zeros_like(true))
            self._before[name] = true.detach().clone()
            return false(lie, true, before) if microbatch in self._wrong else true

    return Lying


def saving_false(lie: Lie, share: float, rng: Random, *, optimizer: bool = False) -> Callable[[Diary], type[Stage]]:
    """Classes of stage that hand over, or hash, false weights (or optimizer state) in this share of the saves."""

    def made(diary: Diary) -> type[Stage]:
        def wrong(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: false(lie, tensor, torch.zeros_like(tensor)) for name, tensor in tensors.items()}

        class SavingFalse(Stage):
            def capture(self, **options: Any) -> InitialState:
                state = super().capture(**options)
                diary.hops += 1
                if rng.random() >= share:
                    return state
                diary.lies.add((state.version, diary.hops))
                if optimizer:
                    return replace(state, optimizer={name: wrong(one) for name, one in state.optimizer.items()})
                return replace(state, weights=wrong(state.weights))

        return SavingFalse

    return made


def giving_false_means(diary: Diary) -> type[InlineDevice]:
    """A class of devices on which the means of slices come out false."""

    class FalseMeans(InlineDevice):
        def aside(self, work: Callable[[], Any]) -> Awaitable[Any]:
            if "reduce" not in work.__code__.co_names or "compared" in work.__name__:
                return super().aside(work)

            def falsely() -> Any:
                diary.lies.add((len(diary.lies), 0))
                return work() * -2.0

            return super().aside(falsely)

    return FalseMeans


def adding_false(diary: Diary) -> type[Stage]:
    """A class of stage that sends true results to its neighbours, and gives away another sum than theirs."""

    class AddingFalse(Stage):
        def part(self, step: int, unit: UnitName) -> Tensor:
            diary.lies.add((step, 0))
            return super().part(step, unit) + 4096.0

    return AddingFalse


def poisoning(poison: Poison) -> Callable[[Diary], type[Stage]]:
    """Classes of stage that send true results to their neighbours, and give false parts to their rounds."""

    def made(diary: Diary) -> type[Stage]:
        class Poisoning(Stage):
            def part(self, step: int, unit: UnitName) -> Tensor:
                true = super().part(step, unit)
                if poison == "none":
                    return true
                diary.lies.add((step, 0))
                if poison == "noise":
                    noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(step))
                    return noise * true.norm() * 10.0
                return true * {"sign": -1.0, "scale": -1000.0}[poison]

        return Poisoning

    return made


def clipped_spec(folder: Path, aggregate: str, **changes: object) -> JobSpec:
    """A small job in ordinary mode, of two stages of at least four replicas."""
    spec = small_spec(
        write_text(folder),
        pipeline__stages=2,
        config__num_hidden_layers=2,
        training__reproducible=False,
        training__global_batch_sequences=32,
        averaging__aggregate=aggregate,
        limits__min_replicas=4,
        **changes,
    )
    return scenes.resolved(spec)


def blaming(diary: Diary) -> type[Stage]:
    """A class of stage that averages with nobody: it says that no relay leads to one after the other."""
    others = cycle(PeerId(f"peer-{number}") for number in range(6))

    class Blaming(Stage):
        def part(self, step: int, unit: UnitName) -> Tensor:
            diary.lies.add((step, len(diary.lies)))
            other = next(others)
            raise RoundBroken(f"{other} took no part: no relay leads to it", accused=other, lacks_relay=True)

    return Blaming


@dataclass(frozen=True, slots=True)
class Caught:
    """What the liar had done when it was struck for the first time."""

    hops: int
    lies: int
    lies_committed: int  # that were in steps with a row by then


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job with one liar among its replicas went."""

    state: JobState
    reason: str
    sha256: str
    caught: Caught | None  # None: never
    is_quarantined: bool
    accused: tuple[PeerId, ...]  # honest ones
    lies: int
    evidence: str
    loss: float  # of the last step


def play(
    spec: JobSpec,
    tokens: Tokens,
    lie: Lie,
    share: float,
    seed: int,
    *,
    peers: int = 6,
    stage: int = -1,
    build: Callable[[Diary], type[Stage]] | None = None,
    device: Callable[[Diary], type[InlineDevice]] = lambda _: InlineDevice,
    then: Callable[[Rig], Awaitable[None]] | None = None,
) -> Outcome:
    """Train with one liar, which serves `stage` if that is one. With `build` it is such a one, not one of hops."""

    diary, accused, caught = Diary(), set[PeerId](), list[Caught]()
    liar = build(diary) if build is not None else lying(lie, share, Random(f"lies {seed}"), diary)

    async def act(rig: Rig) -> Outcome:
        for number in range(peers):
            name = PeerId(f"peer-{number}")
            rig.build = liar if name == LIAR else Stage
            pinned = stage if name == LIAR else -1
            device_type = device(diary) if name == LIAR else InlineDevice
            rig.add_peer(name, rig.tasks, Random(seed * 100 + number), stage=pinned, device_type=device_type)
        while len(rig.membership.idle_peers()) < peers:
            await asyncio.sleep(0.1)
        quarantine = rig.parts.peers.quarantine
        struck = quarantine.strike
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())

        def strike(peer: PeerId, evidence: str, **facts: Any) -> TrustRecord:
            if peer == LIAR and not caught:
                committed = sum(step < job.progress.steps_done for step, _ in diary.lies)
                caught.append(Caught(diary.hops, len(diary.lies), committed))
            accused.update({peer} - {LIAR})
            return struck(peer, evidence, **facts)

        quarantine.strike = strike  # type: ignore[method-assign]
        await rig.finished(job)
        if then is not None:
            await then(rig)
        return Outcome(
            job.record.state,
            job.record.reason,
            job.record.weights_sha256,
            next(iter(caught), None),
            LIAR in quarantine.names(),
            tuple(sorted(accused)),
            len(diary.lies),
            quarantine.record(LIAR).told,
            job.progress.loss,
        )

    return scenes.play(tokens, 0, act, seed=seed, limit_s=36000.0)
