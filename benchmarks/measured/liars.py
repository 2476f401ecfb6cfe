"""Measure how soon liars are caught: one of three replicas of a stage gives wrong results, means or files.

With --poison: what a job loses by one of four that sends false parts, averaged plainly and clipped.

python -m benchmarks.measured.liars --spot-check 0.2 --steps 20 --seeds 4
python -m benchmarks.measured.liars --second-owner 0.2 --steps 20 --seeds 8
python -m benchmarks.measured.liars --recount 1.0 --steps 20 --seeds 8
python -m benchmarks.measured.liars --second-hash --steps 4 --seeds 8
python -m benchmarks.measured.liars --poison --steps 40 --seeds 3
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import structlog
import torch

from swarm.job.spec import JobSpec, TrustSection
from swarm.reference.trainer import train_local
from swarm.types import JobState
from tests.simulation.engine.liars import (
    LIES,
    POISONS,
    Outcome,
    adding_false,
    checked_spec,
    clipped_spec,
    giving_false_means,
    play,
    poisoning,
    saving_false,
)
from tests.support.simulated import Tokens

SHARES = (1.0, 0.2, 0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if an honest replica was accused, or a job ended with other weights than it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured.liars", description=__doc__.splitlines()[0])
    parser.add_argument("--spot-check", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--second-owner", type=float, default=0.0, help="false means, instead of false results")
    parser.add_argument("--recount", type=float, default=0.0, help="false sums, instead of false results")
    parser.add_argument("--second-hash", action="store_true", help="false files, instead of false results")
    parser.add_argument("--poison", action="store_true", help="false parts, which are clipped and not caught")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if options.poison:
        return _poisoned(options.steps, options.seeds)
    if options.second_owner or options.recount or options.second_hash:
        return _others(options)
    with tempfile.TemporaryDirectory() as folder:
        spec = checked_spec(Path(folder), options.spot_check, training__steps=options.steps)
        tokens = Tokens.make(Path(folder), spec)
        expected = train_local(spec, tokens.batches(spec)).sha256
        print("| lie | share of hops | runs with lies | caught | its hops until then ", end="")
        print("| lies committed by then | honest accused | weights of one process |")
        print("|---|---|---|---|---|---|---|---|")
        return max(_row(spec, tokens, lie, share, options.seeds, expected) for lie in LIES for share in SHARES)


def _others(options: argparse.Namespace) -> int:
    """Owners that give out false means, or savers that hand over false files."""
    rates = {"second_owner": options.second_owner, "recount": options.recount}
    trust = TrustSection(**rates, second_hash=options.second_hash)
    lies = "false means" if options.second_owner else "false sums" if options.recount else "false saves"
    with tempfile.TemporaryDirectory() as folder:
        spec = checked_spec(Path(folder), trust=trust, training__steps=options.steps, checkpoint__every_steps=1)
        tokens = Tokens.make(Path(folder), spec)
        liar: dict[str, Any] = {"device": giving_false_means}
        if options.recount:
            liar = {"build": adding_false}
        if options.second_hash:
            liar = {"build": saving_false("sign", 1.0, Random(0), optimizer=True)}
        played = [play(spec, tokens, "zeros", 0.0, seed, stage=seed % 2, **liar) for seed in range(options.seeds)]
    caught = [outcome.caught.lies for outcome in played if outcome.caught is not None]
    lied = sum(bool(outcome.lies) for outcome in played)
    accused = sum(len(outcome.accused) for outcome in played)
    print(f"{len(caught)} of {lied} runs with {lies} caught, after {median(caught) if caught else 0:g} of them")
    succeeded = sum(outcome.state is JobState.SUCCEEDED for outcome in played)
    print(f"{accused} honest ones accused; {succeeded} jobs succeeded")
    return int(bool(accused))


def _poisoned(steps: int, seeds: int) -> int:
    """Losses of the last step with each way to make one gradient of the parts of four replicas."""
    print("| parts of one of four replicas | loss, mean | loss, centered_clip |")
    print("|---|---|---|")
    accused = 0
    for poison in POISONS:
        losses: dict[str, list[float]] = {}
        for aggregate in ("mean", "centered_clip"):
            with tempfile.TemporaryDirectory() as folder:
                spec = clipped_spec(Path(folder), aggregate, training__steps=steps, training__learning_rate=3e-3)
                tokens = Tokens.make(Path(folder), spec)
                built = poisoning(poison)
                played = [
                    play(spec, tokens, "zeros", 0.0, seed, peers=8, stage=1, build=built) for seed in range(seeds)
                ]
            accused += sum(len(outcome.accused) for outcome in played)
            assert all(outcome.state is JobState.SUCCEEDED for outcome in played), played
            losses[aggregate] = [outcome.loss for outcome in played]
        told = (f"{median(some):.2f} ({min(some):.2f} to {max(some):.2f})" for some in losses.values())
        print(f"| {poison} | {' | '.join(told)} |", flush=True)
    return int(bool(accused))


def _row(spec: JobSpec, tokens: Tokens, lie: str, share: float, seeds: int, expected: str) -> int:
    played = [play(spec, tokens, lie, share, seed, stage=seed % 2) for seed in range(seeds)]  # type: ignore[arg-type]
    lied = [outcome for outcome in played if outcome.lies]
    caught = [outcome.caught for outcome in lied if outcome.caught is not None]
    accused = sum(len(outcome.accused) for outcome in played)
    clean = [outcome for outcome in played if not _committed(outcome)]
    equal = sum(outcome.sha256 == expected for outcome in clean)
    hops = f"{median(outcome.hops for outcome in caught):.0f}" if caught else "-"
    committed = sum(map(_committed, played))
    print(
        f"| {lie} | {share:.0%} | {len(lied)} of {seeds} | {len(caught)} | {hops} | {committed} | {accused} "
        f"| {equal} of {len(clean)} without committed lies |",
        flush=True,
    )
    return int(
        bool(accused) or equal < len(clean) or any(outcome.state is not JobState.SUCCEEDED for outcome in played)
    )


def _committed(outcome: Outcome) -> int:
    """Lies that are in the weights: those that were there when it was caught, or all if it never was."""
    return outcome.caught.lies_committed if outcome.caught is not None else outcome.lies


if __name__ == "__main__":
    raise SystemExit(main())
