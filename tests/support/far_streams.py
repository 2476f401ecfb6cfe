"""A GPU "far" without any hardware: every wait of the host is counted, and every race between streams is found.

A far tensor wraps one of the CPU, computes with it and gives the same bits. As with a GPU, an operation may not mix far
and near tensors (numbers excepted), and the host waits whenever it reads a far value, copies it, or waits for an event
that it has not reached. A copy from pageable memory waits too, if it is large.

    stream 0    ── a ── b ──────────────── c ──▶        each has a vector clock: what of the others is behind it
    stream 1         ╲── wait_event ── copy ──▶ event
    host        ─────────────────────────────── synchronize ──▶ reads the copy

An operation ticks the clock of its thread's stream. A storage knows who wrote it last and who has read it since. A race
is: to read or write what another stream still writes, or to write what it still reads; to read on the host the target
of a copy that was not waited for; to free memory that another stream may use and that is not recorded there.

Counted as well are launches (operations that are no views), bytes that are copied to the device, and divisions by a
number of the host. A GPU has other bits for these than a CPU: it multiplies by the rounded reciprocal.

Limits: all threads share the clock of one host, nothing really happens later, and autocast casts nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from swarm.model import runtime

NAME = "far"
_READS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique_consecutive"}
SMALL_BYTES = 64 << 10  # a driver takes as much along when it copies from pageable memory
Clock = dict[int, int]  # ticks of each stream that are behind


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


class FarTensor(Tensor):
    """A tensor of the far device."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> FarTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # undocumented, and stable since 1.11
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} on a far tensor outside of Far")

    def record_stream(self, stream: Any) -> None:
        if "record_stream" not in stream.far.deaf:
            stream.far.block(self).recorded.add(stream.number)


@dataclass(slots=True)
class Event:
    """A place in a stream's queue."""

    far: Far
    clock: Clock

    def synchronize(self) -> None:
        if "synchronize" in self.far.deaf:
            return
        if any(self.far.host.get(stream, 0) < tick for stream, tick in self.clock.items()):
            self.far.waits.append("event")
            _join(self.far.host, self.clock)


@dataclass(slots=True)
class Stream:
    """A queue of the device."""

    far: Far
    number: int
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> Event:
        return Event(self.far, dict(self.clock))

    def wait_event(self, event: Event) -> None:
        if "wait_event" not in self.far.deaf:
            _join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        if "wait_stream" not in self.far.deaf:
            _join(self.clock, other.clock)

    def synchronize(self) -> None:
        self.record_event().synchronize()


@dataclass(slots=True)
class _Block:
    """Memory of the device, or of the host while it is the target of a copy."""

    home: int
    written: tuple[int, int]
    reads: Clock = field(default_factory=dict)
    uses: Clock = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    tensors: int = 0


class _Gpu:
    """What `torch.cuda` is for CUDA."""

    def __init__(self, far: Far) -> None:
        self._far = far
        self.devices: list[tuple[str, torch.device]] = []  # the threads that use one

    def Stream(self, _device: torch.device) -> Stream:  # torch's name
        return self._far.new_stream()

    def current_stream(self, _device: torch.device) -> Stream:
        return self._far.stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._far.local.stream = self._far.stream, stream
        try:
            yield
        finally:
            self._far.local.stream = before

    def set_device(self, device: torch.device) -> None:
        self.devices.append((threading.current_thread().name, device))

    def empty_cache(self) -> None:
        pass


class Far(TorchDispatchMode):
    """While it is entered there is a far device; `waits` are the operations for which the host waited.

    `deaf` names calls that do nothing, as if they had been forgotten.
    """

    def __init__(self, deaf: str = "") -> None:
        super().__init__()
        self.deaf = {deaf}
        self.waits: list[str] = []
        self.races: list[str] = []
        self.sent_bytes = 0
        self.operations = 0
        self.launches = 0
        self.divided_by_numbers = 0
        self.host: Clock = {}
        self.local = threading.local()
        self.gpu = _Gpu(self)
        self._streams: list[Stream] = []
        self._first = self.new_stream()
        self._blocks: dict[int, _Block] = {}
        self._pinned: dict[int, Tensor] = {}  # held, so that no other memory gets their places
        self._before: dict[str, Any] = {}

    def __enter__(self) -> Far:
        self._before = dict(runtime.GPUS)
        runtime.GPUS[NAME] = self.gpu
        runtime._stream.cache_clear()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        runtime.GPUS.clear()
        runtime.GPUS.update(self._before)
        runtime._stream.cache_clear()

    @property
    def stream(self) -> Stream:
        """This thread's stream."""
        return getattr(self.local, "stream", self._first)

    def new_stream(self) -> Stream:
        self._streams.append(Stream(self, len(self._streams)))
        return self._streams[-1]

    def taken(self) -> list[str]:
        """The waits since the last call."""
        taken, self.waits = self.waits, []
        return taken

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        is_pinned = bool(kwargs.pop("pin_memory", False))
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        far = [tensor for tensor in tensors if isinstance(tensor, FarTensor)]
        device = kwargs.get("device")
        to_far = torch.device(device).type == NAME if device is not None else bool(far)
        if device is not None and torch.device(device).type == NAME:
            kwargs["device"] = torch.device("cpu")
        near = [tensor for tensor in tensors if not isinstance(tensor, FarTensor) and tensor.dim() > 0]
        assert not far or not near or name == "copy_", f"{name} mixes far and near tensors"
        crosses = (name == "_to_copy" and bool(far) != to_far) or (name == "copy_" and 0 < len(far) < len(tensors))
        blocks = not kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        source = tensors[-1] if crosses else None
        if source is not None and not isinstance(source, FarTensor):
            self.sent_bytes += source.nbytes
            blocks = blocks or (source.nbytes > SMALL_BYTES and _place(source) not in self._pinned)
        self.operations += bool(far)
        if far and name in ("div", "div_") and not isinstance(args[1], FarTensor):
            self.divided_by_numbers += 1
        written, queued, stream = _written(function, args, kwargs), bool(far) or to_far, self.stream
        if queued:
            _join(stream.clock, self.host)
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensor in tensors:
            self._use(tensor, name, is_written=any(tensor is other for other in written), queued=queued)
        result = function(*tree_map(_raw, args), **tree_map(_raw, kwargs))
        self.launches += queued and not function.is_view
        if function._schema.is_mutable and isinstance(result, Tensor):
            made = next((tensor for tensor in tensors if _raw(tensor) is result), result)
        else:
            made = tree_map(lambda one: self._wrapped(one) if to_far and isinstance(one, Tensor) else one, result)
        if crosses and not blocks:
            self._under_way(made)
        if is_pinned:
            self._pinned[_place(made)] = made
        if (far and name in _READS) or (crosses and blocks):
            self.waits.append(name)
            _join(self.host, self.stream.clock)
        return made

    # Clocks ----------------------------------------------------------------------------------------------------------

    def block(self, tensor: Tensor) -> _Block:
        """The memory in which a tensor lies."""
        stream = self.stream
        since = stream.clock.get(stream.number, 0) if isinstance(tensor, FarTensor) else 0
        made = _Block(stream.number, (stream.number, since))
        return self._blocks.setdefault(_place(tensor), made)

    def _use(self, tensor: Tensor, name: str, *, is_written: bool, queued: bool) -> None:
        """Look for races of an operation that reads or writes a tensor, on the stream or on the host."""
        if not isinstance(tensor, FarTensor) and _place(tensor) not in self._pinned:
            return
        if not queued:
            block = self.block(tensor)
            if not _is_behind(self.host, block.written):
                self.races.append(f"the host uses ({name}) what stream {block.written[0]} still copies")
            if is_written and not all(_is_behind(self.host, read) for read in block.reads.items()):
                self.races.append(f"the host writes ({name}) what others still read: {block.reads}")
            return
        stream = self.stream
        block, tick = self.block(tensor), stream.clock[stream.number]
        if not _is_behind(stream.clock, block.written):
            self.races.append(f"{name} on stream {stream.number} uses what stream {block.written[0]} still writes")
        if is_written and not all(_is_behind(stream.clock, read) for read in block.reads.items()):
            self.races.append(f"{name} on stream {stream.number} writes what others still read: {block.reads}")
        block.reads[stream.number] = block.uses[stream.number] = tick
        if is_written:
            block.written, block.reads = (stream.number, tick), {}

    def _wrapped(self, raw: Tensor) -> FarTensor:
        made = FarTensor(raw)
        place = _place(made)
        block = self.block(made)
        block.tensors += 1
        weakref.finalize(made, self._dropped, place, block)
        return made

    def _under_way(self, made: Tensor) -> None:
        """A copy to the host whose target may not be read yet; torch pins it."""
        if not isinstance(made, FarTensor):
            stream = self.stream
            self._pinned[_place(made)] = made
            self.block(made).written = (stream.number, stream.clock[stream.number])

    def _dropped(self, place: int, block: _Block) -> None:
        block.tensors -= 1
        if block.tensors or self._blocks.get(place) is not block:
            return
        del self._blocks[place]
        known = dict(self._streams[block.home].clock)
        _join(known, self.host)
        for used in block.uses.items():
            if used[0] not in {block.home, *block.recorded} and not _is_behind(known, used):
                self.races.append(f"memory of stream {block.home} is free while stream {used[0]} may use it")


def _is_behind(clock: Clock, tick: tuple[int, int]) -> bool:
    return clock.get(tick[0], 0) >= tick[1]


def _place(tensor: Tensor) -> int:
    return int(_raw(tensor).untyped_storage()._cdata)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)} | kwargs
    names = [
        argument.name
        for argument in function._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_flatten([given.get(name) for name in names])[0] if isinstance(leaf, Tensor)]


def _raw(one: Any) -> Any:
    return one.raw if isinstance(one, FarTensor) else one


class _Module(_DummyBackendModule):  # type: ignore[misc]  # untyped
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def far_device() -> torch.device:
    """Register the device; once per process."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, _Module())
    return torch.device(NAME, 0)
