"""The probe tells devices apart that step otherwise, and says the same on each call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swarm.job.spec import TrainingSection
from swarm.model.optimizers import OPTIMIZERS
from swarm.model.probe import probe_digest
from tests.support.other_products import OtherProducts

CPU = torch.device("cpu")


@pytest.fixture
def flushing_to_zero() -> Iterator[None]:
    """A device that has no denormals, as some have not."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


def training(optimizer: str) -> TrainingSection:
    return TrainingSection.model_validate({"optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else 0.0})


def test_equal_devices_give_equal_digests_and_each_optimizer_its_own() -> None:
    digests = {name: probe_digest(training(name), CPU) for name in OPTIMIZERS}
    assert {name: probe_digest(training(name), CPU) for name in OPTIMIZERS} == digests
    assert len(set(digests.values())) == len(OPTIMIZERS)


def test_the_number_of_threads_does_not_show() -> None:
    threads = torch.get_num_threads()
    seen = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        seen.add(probe_digest(training("lamb"), CPU))
    torch.set_num_threads(threads)
    assert len(seen) == 1


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_device_without_denormals_is_found_out(optimizer: str, flushing_to_zero: None) -> None:
    honest = probe_digest(training(optimizer), CPU)
    torch.set_flush_denormal(True)
    assert probe_digest(training(optimizer), CPU) != honest


def test_products_of_another_processor_are_found_out() -> None:
    here = probe_digest(training("muon"), CPU)
    with OtherProducts():
        assert probe_digest(training("muon"), CPU) != here


def test_nothing_in_the_probe_leaves_the_numbers() -> None:
    """A NaN has many bit patterns: devices that step alike could differ in them."""
    for name in OPTIMIZERS:
        seen = []
        step = OPTIMIZERS[name].step

        def watched(held, section, rate, grouped, step=step, seen=seen) -> None:  # type: ignore[no-untyped-def]
            held = list(held)
            step(held, section, rate, grouped)
            seen += [tensor.clone() for kept in held for tensor in (kept.parameter, *kept.state.values())]

        rule = OPTIMIZERS[name]
        OPTIMIZERS[name] = type(rule)(rule.start, watched)
        try:
            probe_digest(training(name), CPU)
        finally:
            OPTIMIZERS[name] = rule
        assert seen
        assert not any(bool(tensor.isnan().any()) for tensor in seen)
