"""benchmarks.learning.gaia: what was made is sent or waits; with threshold and slack 0 training is synchronous; the
band moves the threshold, and the barrier holds islands back, but none for ever."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.learning.gaia.band import MOST, Band, Meter
from benchmarks.learning.gaia.sea import PASSING, Island, Sea, Sites
from benchmarks.learning.gaia.significance import Copy, Gaia
from benchmarks.learning.gaia.training import meter_of, streamed_s, train_gaia
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from tests.support.simulated import Tokens, small_spec, write_text

STEPS = 6


def spec_of(folder: Path, mode: str, count: int = 2, **changes: object) -> JobSpec:
    """A tiny job of so many islands, or the same without any."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    islands = {"islands__count": count, "outer__every_steps": 1} if mode != "allreduce" else {}
    job = {"training__steps": STEPS, "pipeline__stages": 1, "pipeline__overlap": 0, "averaging__mode": mode}
    spec = small_spec(text, **(job | islands | changes))
    return resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)


@pytest.mark.parametrize("count", [2, 3])
def test_threshold_and_slack_0_is_synchronous_training(tmp_path: Path, count: int) -> None:
    """With SGD, equal tokens and no rounding of what is sent."""
    plain = {"training__optimizer": "sgd", "training__grad_clip_norm": 0.0, "training__reproducible": False}
    together, apart = spec_of(tmp_path, "allreduce", **plain), spec_of(tmp_path, "diloco", count, **plain)
    tokens = Tokens.make(tmp_path / "tokens", together)
    expected = train_local(together, tokens.batches(together)).stages[0].weights.newest()
    gaia = Gaia(threshold=0.0, slack=0, compression="none")
    slow = Sites((1.0,) * count, (15e4,) * (count - 1) + (1e4,), delay_s=0.1)  # when things arrive does not matter
    found = train_gaia(apart, tokens.batches(apart), gaia, slow).weights
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


def sea_of(gaia: Gaia, sites: Sites, steps: int, began: list[tuple[int, float, list[int]]] | None = None) -> Sea:
    """Islands of one number, which falls by 1 with each step; `began` gets who begins one, when, and what all have
    made."""
    count = len(sites.step_s)
    islands = [
        Island.of(
            [],
            Copy({"w": torch.tensor([100.0])}, [["w"]], gaia),
            meter_of(gaia, sites, number),
            count,
        )
        for number in range(count)
    ]

    def train(number: int) -> float:
        islands[number].copy.weights["w"].sub_(1.0)
        if began is not None:
            began.append((number, sea.now_s, [one.steps for one in islands]))
        return 1.0

    sea = Sea(gaia, sites, islands, steps, train)
    return sea


def assert_all_has_come(sea: Sea) -> None:
    """All islands have the steps of all."""
    left = 100.0 - sea.steps * len(sea.islands)
    assert [float(one.copy.weights["w"]) for one in sea.islands] == [left] * len(sea.islands)


@pytest.mark.parametrize("clock", ["behind", "alone"])
@pytest.mark.parametrize("slack", [0, 1, 3])
def test_no_island_is_further_ahead_than_the_slack(slack: int, clock: str) -> None:
    began: list[tuple[int, float, list[int]]] = []
    gaia = Gaia(slack=slack, compression="none", clock=clock)  # type: ignore[arg-type]
    sea = sea_of(gaia, Sites((1.0, 4.0), delay_s=0.5), 10, began)
    sea.run()
    assert max(steps[0] - steps[1] for number, _, steps in began if number == 0) == slack
    assert sea.islands[0].stood["clock"] > 0
    # It needs 1 s for each step. The last one it begins when it has heard that the other one made all but the slack.
    assert sea.islands[0].stood_s["clock"] == 4.0 * (9 - slack) + 0.5 - 9.0
    assert_all_has_come(sea)


def test_a_slow_link_holds_up_islands_that_may_not_run_ahead() -> None:
    seconds = []
    for bytes_per_s in (4.0, 1.0):  # a message of one float32 takes 1 s, or 4
        sea = sea_of(Gaia(0.0, slack=0, compression="none"), Sites(bytes_per_s=(bytes_per_s, math.inf)), 5)
        sea.run()
        seconds.append(sea.now_s)
    assert seconds == [10.0, 25.0]


def test_a_clock_that_travels_alone_does_not_wait_for_a_slow_link() -> None:
    sites = Sites(bytes_per_s=(1.0, 1.0), delay_s=0.5)  # a message takes 4 s, a step 1
    sea = sea_of(Gaia(0.0, compression="none", clock="alone"), sites, 5)
    sea.run()
    assert [one.stood for one in sea.islands] == [{"clock": 0, "barrier": 0}] * 2
    assert sea.now_s == 1.0 + 5 * 4.0 + 0.5
    assert_all_has_come(sea)


def test_the_barrier_lets_one_step_pass_an_announcement_and_holds_back_the_next_one() -> None:
    """Both send 4 bytes behind each step of 1 s, which take 2.5 s on the link, and are heard of 0.2 s later."""
    sites = Sites(bytes_per_s=(1.6, 1.6), delay_s=0.2)
    began: list[tuple[int, float, list[int]]] = []
    sea = sea_of(Gaia(0.0, slack=100, compression="none", clock="alone", barrier_s=1.0), sites, 5, began)
    sea.run()
    assert PASSING == 1
    # The updates of the first three steps are announced at 1.2, 2.2 and 3.2 s, and come at 3.7, 6.2 and 8.7. During the
    # second step it hears of the first update: the third step passes, the fourth waits for it. While it waits it hears
    # of the third update: the fourth step passes that, the fifth waits for it.
    assert [when_s for number, when_s, _ in began if number == 0] == pytest.approx([0.0, 1.0, 2.0, 3.7, 8.7])
    assert [one.stood["barrier"] for one in sea.islands] == [2, 2]
    assert [one.stood_s["barrier"] for one in sea.islands] == pytest.approx([4.7, 4.7])
    assert_all_has_come(sea)


def test_nobody_stands_at_the_barrier_where_links_are_fast_enough() -> None:
    sites = Sites(bytes_per_s=(4.0, 4.0))  # 1 s for an update: no longer than the barrier allows
    sea = sea_of(Gaia(0.0, compression="none", clock="alone", barrier_s=1.0), sites, 6)
    sea.run()
    assert [one.stood_s["barrier"] for one in sea.islands] == [0.0, 0.0]
    assert sea.now_s == 7.0


@settings(max_examples=60, deadline=None)
@given(
    sites=st.integers(2, 4).flatmap(
        lambda count: st.builds(
            Sites,
            st.tuples(*[st.sampled_from((0.5, 1.0, 3.0))] * count),
            st.tuples(*[st.sampled_from((0.7, 4.0, 60.0))] * count),
            st.sampled_from((0.0, 0.3, 5.0)),
        )
    ),
    slack=st.integers(0, 3),
    clock=st.sampled_from(("behind", "alone")),
    barrier_s=st.sampled_from((0.0, 1.0, 5.0)),
    holds=st.booleans(),
)
def test_no_island_stands_for_ever(sites: Sites, slack: int, clock: str, barrier_s: float, holds: bool) -> None:
    """Whatever links carry: each makes all its steps, and has those of all others in the end."""
    band = Band(window_s=3.0, holds=holds)
    gaia = Gaia(0.02, slack=slack, compression="none", clock=clock, barrier_s=barrier_s, band=band)  # type: ignore[arg-type]
    sea = sea_of(gaia, sites, 8)
    sea.run()
    assert_all_has_come(sea)


def test_the_threshold_falls_as_the_job_says() -> None:
    assert Gaia(0.1, decay="sqrt").threshold_at(3, 0.25) == pytest.approx(0.05)
    assert Gaia(0.1, decay="rate").threshold_at(3, 0.25) == pytest.approx(0.025)
    assert Gaia(0.1, decay="none").threshold_at(3, 0.25) == 0.1


def test_the_band_raises_the_threshold_above_it_and_lowers_it_below_within_its_clamps() -> None:
    meter = Meter(Band(window_s=10.0), 100.0, 0.02)
    for now_s in range(1, 11):
        meter.record(now_s, 100)
        meter.judge(now_s)
    assert (meter.use(10), meter.adjust) == (1.0, 0.0), "within the band it stays"
    meter.record(11, 300)
    meter.judge(11)
    assert (meter.use(11), meter.adjust) == (1.2, 0.005)
    for now_s in range(12, 80):
        meter.record(now_s, 300)
        meter.judge(now_s)
    assert meter.adjust == MOST == 0.2
    for now_s in range(80, 200):
        meter.judge(now_s)
    assert (meter.use(200), meter.adjust) == (0.0, -0.02), "T0 at most is taken off"


def test_before_a_window_has_passed_the_use_is_of_what_has() -> None:
    meter = Meter(Band(window_s=10.0), 100.0, 0.02)
    assert meter.use(0) == 0.0
    meter.record(2, 200)
    assert meter.use(2) == 1.0
    assert meter.use(4) == 0.5
    assert meter.use(12) == 0.0


def test_what_the_band_has_no_room_for_stays_pending_and_the_most_significant_goes_first() -> None:
    gaia = Gaia(compression="none")
    copy = Copy({name: torch.full((16,), 1.0) for name in "abc"}, [["a"], ["b"], ["c"]], gaia)
    for name, moved in (("a", 0.2), ("b", 0.3), ("c", 0.1)):
        copy.weights[name].sub_(moved)
    update, taken = copy.send(0.0, room_bytes=150.0)  # 64 each
    assert (set(update), taken) == ({"a", "b"}, 128)
    assert float(copy.pending("c").abs().sum()) > 0.0
    assert set(copy.send(0.0)[0]) == {"c"}


def test_islands_that_wait_for_a_slow_link_take_longer_over_fragments_in_turn(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "streaming", outer__every_steps=3, outer__fragments=1, outer__overlap_steps=1)
    weights = {"model.embed_tokens.weight": torch.zeros(10_000)}
    taken = 5000 + 40 * 4  # fp4: half a byte each, and a scale for each 256
    fast = Sites(bytes_per_s=(math.inf, math.inf))
    assert streamed_s(spec, weights, fast) == 6.0
    slow = Sites(bytes_per_s=(taken / 3, math.inf), delay_s=0.5)
    # Captured behind the steps that end at 3 s and at the end; merged a step later, 2.5 s after it could be.
    assert streamed_s(spec, weights, slow) == pytest.approx(6.0 + 2.5 + 3.5)
