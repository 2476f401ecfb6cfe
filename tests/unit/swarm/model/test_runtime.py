"""swarm.model.runtime: tensors that are sent ahead to a GPU, for which a script of torch's calls stands in."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from swarm.model import runtime
from swarm.model.runtime import copy_into, received, send_ahead, send_back, to_device, to_host

GPU = torch.device("cuda", 0)


class Event:
    """What a stream reaches."""

    def __init__(self, behind: str, calls: list[str]) -> None:
        self.behind = behind
        self.calls = calls

    def synchronize(self) -> None:
        self.calls.append(f"host waits for {self.behind}")


class Stream:
    """A stream that notes what it is asked to wait for."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def record_event(self) -> Event:
        self.calls.append(f"event behind {self.name}")
        return Event(self.name, self.calls)

    def wait_event(self, event: Event) -> None:
        self.calls.append(f"{self.name} wait for {event.behind}")

    def wait_stream(self, stream: Stream) -> None:
        self.calls.append(f"{self.name} wait for {stream.name}")


class Scripted:
    """A tensor of the script: where it lies, and what is done with it."""

    def __init__(self, device: torch.device, calls: list[str], full: RuntimeError | None = None) -> None:
        self.device = device
        self.calls = calls
        self.full = full

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Scripted:
        device = torch.device(device)
        if device == self.device:
            return self
        if self.full is not None:
            raise self.full
        self.calls.append("copy" if non_blocking else "blocking copy")
        return Scripted(device, self.calls)

    def copy_(self, source: Scripted, *, non_blocking: bool = False) -> None:
        self.calls.append("copy" if non_blocking else "blocking copy")

    def record_stream(self, stream: Stream) -> None:
        self.calls.append(f"memory kept for {stream.name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    names = {"ahead": "copies", "back": "copies back"}
    monkeypatch.setattr(runtime, "_stream", lambda device, purpose: Stream(names[purpose], made))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(made.append(f"on {stream.name}")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computations", made))
    return made


SENT = ["on copies", "copy", "event behind copies"]
SENT_BACK = [
    "copies back wait for computations",
    "on copies back",
    "copy",
    "event behind copies back",
    "memory kept for copies back",
]
RECEIVED = ["computations wait for copies", "memory kept for computations"]


def test_a_tensor_is_copied_beside_the_computations_which_wait_for_it_only_when_it_is_used(calls: list[str]) -> None:
    tensor: Any = Scripted(torch.device("cpu"), calls)
    sent = send_ahead(tensor, GPU)
    assert calls == SENT
    assert received(sent).device == GPU
    assert calls == SENT + RECEIVED


def test_what_is_made_of_a_tensor_is_made_behind_its_copy_and_is_there_when_the_computations_use_it(
    calls: list[str],
) -> None:
    tensor: Any = Scripted(torch.device("cpu"), calls)
    made = Scripted(GPU, calls)

    def make(there: Any) -> Any:
        assert there.device == GPU
        calls.append("made")
        return made

    assert received(send_ahead(tensor, GPU, make)) is made
    assert calls == ["on copies", "copy", "made", "event behind copies", *RECEIVED]


def test_a_tensor_that_was_sent_ahead_is_not_copied_again(calls: list[str]) -> None:
    tensor: Any = Scripted(torch.device("cpu"), calls)
    there = received(send_ahead(tensor, GPU))
    calls.clear()
    assert to_device(there, GPU) is there
    assert calls == []
    to_device(tensor, GPU)
    assert calls == SENT + RECEIVED


def test_a_tensor_is_copied_back_beside_what_is_computed_after_it_and_the_host_waits_at_the_end(
    calls: list[str],
) -> None:
    """Copies to the host went behind everything that was queued, also what was queued after they could have begun."""
    dx: Any = Scripted(GPU, calls)
    sent = send_back(dx)
    assert calls == SENT_BACK
    calls.append("checks of the gradients")
    finite: Any = Scripted(GPU, calls)
    there: list[Any] = list(to_host(sent, finite))
    assert [tensor.device.type for tensor in there] == ["cpu", "cpu"]
    host_waits = ["host waits for copies back"] * 2  # the second one has come then
    assert calls == [*SENT_BACK, "checks of the gradients", *SENT_BACK, *host_waits]


def test_what_lies_on_the_host_is_neither_copied_nor_waited_for(calls: list[str]) -> None:
    tensor: Any = Scripted(torch.device("cpu"), calls)
    assert to_host(send_back(tensor), tensor) == (tensor, tensor)
    assert calls == []


@pytest.mark.parametrize("full", [torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: out of memory")])
def test_a_full_gpu_is_told_of_when_the_tensor_is_needed_not_when_it_arrives(
    calls: list[str], full: RuntimeError
) -> None:
    made_of: Any = lambda there: [there]  # noqa: E731
    tensor: Any = Scripted(torch.device("cpu"), calls, full)
    assert received(send_ahead(tensor, GPU)) is tensor
    assert received(send_ahead(tensor, GPU, made_of)) == [tensor]
    with pytest.raises(type(full)):
        to_device(tensor, GPU)


def test_a_fault_of_a_gpu_shows_at_once_and_is_not_taken_for_a_full_gpu(calls: list[str]) -> None:
    tensor: Any = Scripted(torch.device("cpu"), calls, RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        send_ahead(tensor, GPU)


@pytest.mark.parametrize("name", ["cpu", "mps"])
def test_nothing_is_sent_ahead_to_other_devices(name: str) -> None:
    tensor = torch.ones(3)
    assert received(send_ahead(tensor, torch.device(name))) is tensor


@pytest.mark.parametrize(("device", "copy"), [(GPU, "copy"), (torch.device("mps"), "blocking copy")])
def test_only_a_gpu_copies_in_the_background_from_memory_that_is_given_back(
    calls: list[str], device: torch.device, copy: str
) -> None:
    target: Any = Scripted(device, calls)
    source: Any = Scripted(torch.device("cpu"), calls)
    copy_into(target, source)
    assert calls == [copy]
