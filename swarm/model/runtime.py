"""The differences between devices: which ones exist, how torch computes on them, how much memory they have.

Everything else in the product treats cpu, cuda:N and mps alike. Several processes may share one GPU: nothing here asks
for a device as a whole, and a process can be held to its share of the memory.

MPS has no float64. Sums and norms in float64 are made on the CPU there (`sum_device`), which shares its memory.

Decision: docs/decisions/035.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import psutil
import torch
from torch import Tensor

from swarm.errors import InvalidConfig
from swarm.process.malloc import trim_malloc

GPUS: dict[str, Any] = {"cuda": torch.cuda}  # torch's module for each kind of GPU; tests add one that is not there
CONTEXT_BYTES = 512 << 20  # of a GPU that each process takes beside its tensors

# How torch says so where it has no class for it: the CPU's allocator, CUDA and MPS, cuBLAS.
_OUT_OF_MEMORY = ("allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_gpu(device: torch.device) -> bool:
    """Whether the device has streams, memory of its own, and pinned memory of the host beside it."""
    return device.type in GPUS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that a device, or the host, has no memory left."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY))


def choose_device(name: str) -> torch.device:
    """The device called "auto", "cpu", "cuda", "cuda:N" or "mps"; InvalidConfig if absent.

    "auto" is a CUDA GPU if there is one, and never MPS: this version has not been tested on it.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not present.get(device.type, False):
        raise InvalidConfig(
            f'device "{name}" is not on this machine', hint='use "auto", "cpu", or "cuda:N" of a GPU that torch sees'
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device(device.type)


def describe_device(device: torch.device) -> str:
    """The device with its model, such as "cuda:0 NVIDIA H100 80GB HBM3"; "cpu" is only that."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


def use(device: torch.device) -> None:
    """Make this thread use a GPU: on another one, what it pins and queues would make a context on the first."""
    if is_gpu(device):
        _gpu(device).set_device(device)


def configure(device: torch.device, *, threads: int | None, reproducible: bool) -> None:
    """Set torch up; call it on the thread that will compute, before anything is computed.

    torch keeps the number of threads per calling thread, and the order in which a matrix product is added up depends
    on it: replicas that must agree bit for bit need the same number. With `reproducible`, a GPU uses only kernels
    that give the same bits again (the caller's environment must hold CUBLAS_WORKSPACE_CONFIG=:4096:8).
    """
    if threads is not None:
        torch.set_num_threads(threads)
    use(device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(reproducible)
        # We read no memory that we did not write; filling it would cost a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by name


def sum_device(device: torch.device) -> torch.device:
    """Where sums in float64 are made: on the device, or on the CPU if it has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def step_device(device: torch.device, step_on: str) -> torch.device:
    """Where the optimizer runs and keeps its state; `step_on` is LoadStage's: "device" or "cpu"."""
    return torch.device("cpu") if step_on == "cpu" else device


# Between the host and the device -------------------------------------------------------------------------------------
#
# A device works through a queue while the host goes on. A read of a value waits for all that was queued
# before, and then the device waits for the host: so values are read together, as few times as possible.


@dataclass(frozen=True, slots=True)
class SentAhead:
    """A tensor that may still be on its way to a GPU; `copied` is reached when it is there (None: it is not sent)."""

    tensor: Tensor
    copied: torch.cuda.Event | None = None


def send_ahead(
    tensor: Tensor, device: torch.device, made: Callable[[Tensor], Tensor] = lambda there: there
) -> SentAhead:
    """Begin to copy a tensor to a GPU, from any thread, without waiting; gives what is `made` of it there. Do not write
    to `tensor` afterwards.

    A GPU copies and makes on a stream of its own, beside what it computes; in the background only if the memory is
    pinned. If the GPU is full, or the device is not a GPU, both stay where the tensor is.
    """
    if not is_gpu(device):
        return SentAhead(made(tensor))
    try:
        copies = _stream(device, "ahead")
        with _gpu(device).stream(copies):
            return SentAhead(made(tensor.to(device, non_blocking=True)), copies.record_event())
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return SentAhead(made(tensor))  # there may be room when it is needed


def received(sent: SentAhead) -> Tensor:
    """The tensor, ready for this thread's next computations: the device waits for the copy, the host does not."""
    if sent.copied is not None:
        computations = _gpu(sent.tensor.device).current_stream(sent.tensor.device)
        computations.wait_event(sent.copied)
        sent.tensor.record_stream(computations)
    return sent.tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host does not wait for the copy. Do not write to `tensor` afterwards."""
    if is_gpu(device) and tensor.device != device:
        tensor = received(send_ahead(tensor, device))
    return tensor.to(device, non_blocking=device.type not in ("cpu", "mps"))


@dataclass(frozen=True, slots=True)
class SentBack:
    """A tensor that may still be on its way to the CPU; a GPU has it there once `copied` is reached."""

    tensor: Tensor
    device: torch.device
    copied: torch.cuda.Event | None = None

    @property
    def is_here(self) -> bool:
        """Whether the tensor can be read without a wait."""
        return self.device.type == "cpu"


def send_back(tensor: Tensor) -> SentBack:
    """Begin to copy a tensor to the CPU, without waiting. One that lies there already is not copied. Do not write to
    `tensor` before `to_host`.

    A GPU copies on a stream of its own as soon as the tensor is computed, beside what is computed after it.
    """
    device = tensor.device
    if not is_gpu(device):
        return SentBack(tensor.to("cpu", non_blocking=True), device)
    copies = _stream(device, "back")
    copies.wait_stream(_gpu(device).current_stream(device))
    with _gpu(device).stream(copies):
        there = tensor.to("cpu", non_blocking=True)  # torch takes pinned memory for a copy that does not block
        copied = copies.record_event()
    tensor.record_stream(copies)  # its memory is given to nobody before it is copied
    return SentBack(there, device, copied)


def to_host(*tensors: Tensor | SentBack) -> tuple[Tensor, ...]:
    """The tensors on the CPU; the host waits once for all."""
    sent = [tensor if isinstance(tensor, SentBack) else send_back(tensor) for tensor in tensors]
    for copy in reversed(sent):  # as a rule the last one is copied last, and the others need no wait
        if copy.copied is not None:
            copy.copied.synchronize()
    for device in {copy.device for copy in sent if copy.copied is None and copy.device.type != "cpu"}:
        synchronise(device)
    return tuple(copy.tensor for copy in sent)


def await_copy(sent: SentBack) -> None:
    """Let this thread's next computations wait until the tensor is copied: they may write to it. The host goes on."""
    if sent.copied is not None:
        _gpu(sent.device).current_stream(sent.device).wait_event(sent.copied)


def copy_into(target: Tensor, tensor: Tensor) -> None:
    """Write a tensor of the host into one of a device. Only for a GPU does torch keep its memory until it is copied."""
    target.copy_(tensor, non_blocking=is_gpu(target.device))


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, for a GPU in memory from which it is copied in the background."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor) if is_gpu(device) else tensor


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is queued within runs behind what this thread has queued, and beside what comes after it.

    The host must wait for its results before anything that it reads is written to or freed.
    """
    if not is_gpu(device):
        yield
        return
    stream = _stream(device, "beside")
    stream.wait_stream(_gpu(device).current_stream(device))
    with _gpu(device).stream(stream):
        yield


def read(numbers: Sequence[Tensor]) -> list[float]:
    """The values of 0-dim and 1-D tensors, in order; the host waits once for each device that holds some."""
    held: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        held.setdefault(number.device, []).append(number.reshape(-1))
    values = {device: iter(to_host(torch.cat(some))[0].tolist()) for device, some in held.items()}
    return [next(values[number.device]) for number in numbers for _ in range(number.numel())]


@lru_cache
def _stream(device: torch.device, _purpose: str) -> Any:
    """A stream of its own: a GPU copies in both directions at once, beside what it computes."""
    return _gpu(device).Stream(device)


def _gpu(device: torch.device) -> Any:
    return GPUS[device.type]


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what this thread has queued."""
    if is_gpu(device):
        _gpu(device).current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


# Memory --------------------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Memory that is free now, with all other users of the device counted."""
    available = int(psutil.virtual_memory().available)
    if is_gpu(device):
        return int(_gpu(device).mem_get_info(device)[0])
    if device.type == "mps":  # the GPU's share of the machine's memory
        return max(0, min(available, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()))
    return available


def total_bytes(device: torch.device) -> int:
    """Memory of the device, free or not."""
    total = int(psutil.virtual_memory().total)
    if is_gpu(device):
        return int(_gpu(device).mem_get_info(device)[1])
    return min(total, torch.mps.recommended_max_memory()) if device.type == "mps" else total


def used_bytes(device: torch.device) -> int:
    """Memory that this process holds on the device; on the CPU the process as a whole."""
    if is_gpu(device):
        return int(_gpu(device).memory_reserved(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(psutil.Process().memory_info().rss)


def limit_memory(device: torch.device, size_bytes: int) -> None:
    """Limit this process to `size_bytes` of a GPU, so that its neighbours keep theirs; does nothing on the CPU."""
    if is_gpu(device):
        total = int(_gpu(device).mem_get_info(device)[1])
        _gpu(device).set_per_process_memory_fraction(min(1.0, size_bytes / total), device)


def release_memory(device: torch.device) -> None:
    """Give memory that nothing uses any more back to the device and to the system, for the other processes there."""
    # Whatever is still in a reference cycle, such as a traceback that holds a frame, may hold tensors.
    gc.collect()
    if is_gpu(device):
        _gpu(device).empty_cache()
        if torch.accelerator.is_available():
            getattr(torch.accelerator, "empty_host_cache", bool)()  # pinned memory; older versions of torch keep it
    elif device.type == "mps":
        torch.mps.empty_cache()
    trim_malloc()


def is_slow_at_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is slower than float32 on the device (measured: 3 to 25 times); known of x86 CPUs only."""
    if device.type != "cpu":
        return False
    able = torch.cpu.get_capabilities()
    return able.get("architecture") == "x86_64" and not (able.get("avx512_bf16") or able.get("amx_bf16"))
