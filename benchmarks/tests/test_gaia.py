"""benchmarks.learning.gaia: what was made is sent or waits; with threshold and slack 0 training is synchronous."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.learning.gaia import Copy, Gaia, Island, Sea, train_gaia
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from tests.support.simulated import Tokens, small_spec, write_text

STEPS = 6


def spec_of(folder: Path, mode: str, **changes: object) -> JobSpec:
    """A tiny job of two islands, or the same without any."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    islands = {"islands__count": 2, "outer__every_steps": 1} if mode != "allreduce" else {}
    job = {"training__steps": STEPS, "pipeline__stages": 1, "pipeline__overlap": 0, "averaging__mode": mode}
    spec = small_spec(text, **(job | islands | changes))
    return resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)


def test_threshold_and_slack_0_is_synchronous_training(tmp_path: Path) -> None:
    """With SGD, equal tokens and no rounding of what is sent."""
    plain = {"training__optimizer": "sgd", "training__grad_clip_norm": 0.0, "training__reproducible": False}
    together, apart = spec_of(tmp_path, "allreduce", **plain), spec_of(tmp_path, "diloco", **plain)
    tokens = Tokens.make(tmp_path / "tokens", together)
    expected = train_local(together, tokens.batches(together)).stages[0].weights.newest()
    gaia = Gaia(threshold=0.0, slack=0, compression="none")
    found = train_gaia(apart, tokens.batches(apart), gaia).weights
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert float((found[name] - one).abs().max()) <= 1e-6


def test_fewer_bytes_are_sent_with_a_higher_threshold(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "diloco", training__steps=12)
    batches = Tokens.make(tmp_path / "tokens", spec).batches(spec)
    sent = [train_gaia(spec, batches, Gaia(threshold)).sent_bytes for threshold in (0.01, 0.05, 0.2)]
    assert sent[0] > sent[1] > sent[2] > 0


@pytest.mark.parametrize("unit", ["block", "coordinate"])
@pytest.mark.parametrize("compression", ["none", "bfloat16", "fp4"])
def test_what_was_sent_and_what_is_pending_is_what_was_made(unit: str, compression: str) -> None:
    """Also of what the code loses, and while the updates of others come."""
    gaia = Gaia(unit=unit, compression=compression)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)

    def drawn(scale: float) -> dict[str, torch.Tensor]:
        return {name: scale * torch.randn(64, generator=generator) for name in ("a", "b")}

    copy = Copy(drawn(0.05), [["a"], ["b"]], gaia)
    made, sent = ({name: torch.zeros(64, dtype=torch.float64) for name in copy.weights} for _ in range(2))
    for step in range(50):
        for name, update in drawn(0.001).items():
            before = copy.weights[name].clone()
            copy.weights[name].sub_(update)
            made[name] += before.double() - copy.weights[name].double()
        for name, update in copy.send(0.1 if step % 2 else 0.05)[0].items():
            sent[name] += update.double()
        copy.receive(drawn(0.0005))
    assert any(bool(one.count_nonzero()) for one in sent.values())
    for name, one in made.items():
        pending = copy.pending(name).double()
        assert float((sent[name] + pending - one).abs().max()) <= 1e-6


def sea_of(gaia: Gaia, steps: int, behind: list[tuple[int, int]]) -> Sea:
    """Two islands of one number, which falls by 1 with each step; `behind` gets how far each is ahead of the other."""
    islands = [
        Island([], Copy({"w": torch.tensor([100.0])}, [["w"]], gaia), [0, 0], free_s=[0.0, 0.0]) for _ in range(2)
    ]

    def train(number: int) -> float:
        islands[number].copy.weights["w"].sub_(1.0)
        behind.append((number, islands[number].steps - islands[1 - number].steps))
        return 1.0

    return Sea(gaia, islands, steps, train)


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_no_island_is_further_ahead_than_the_slack(slack: int) -> None:
    ahead: list[tuple[int, int]] = []
    sea = sea_of(Gaia(slack=slack, step_s=(1.0, 4.0), delay_s=0.5, compression="none"), 10, ahead)
    sea.run()
    assert max(lead for number, lead in ahead if number == 0) == slack
    # All is sent, and has come.
    assert [float(one.copy.weights["w"]) for one in sea.islands] == [80.0, 80.0]


def test_a_slow_link_holds_up_islands_that_may_not_run_ahead() -> None:
    seconds = []
    for bytes_per_s in (4.0, 1.0):  # a message of one float32 takes 1 s, or 4
        sea = sea_of(Gaia(0.0, slack=0, compression="none", bytes_per_s=bytes_per_s), 5, [])
        sea.run()
        seconds.append(sea.now_s)
    assert seconds == [10.0, 25.0]


def test_the_threshold_falls_as_the_job_says() -> None:
    assert Gaia(0.1, decay="sqrt").threshold_at(3, 0.25) == pytest.approx(0.05)
    assert Gaia(0.1, decay="rate").threshold_at(3, 0.25) == pytest.approx(0.025)
    assert Gaia(0.1, decay="none").threshold_at(3, 0.25) == 0.1
