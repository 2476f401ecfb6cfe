"""How torch shall compute in this process: on which device, with how many threads, repeatably or not."""

from __future__ import annotations

import torch

from swarm.errors import InvalidConfig


def choose_device(name: str) -> torch.device:
    """The device called "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N" or "mps"; InvalidConfig if absent."""
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
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def configure(device: torch.device, *, threads: int | None, reproducible: bool) -> None:
    """Set torch up; call it on the thread that will compute, before anything is computed.

    torch keeps the number of threads per calling thread, and the order in which a matrix product is added up depends
    on it: replicas that shall agree bit for bit need one number. With `reproducible`, a GPU uses only kernels that give
    the same bits again (the caller's environment must hold CUBLAS_WORKSPACE_CONFIG=:4096:8).
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.use_deterministic_algorithms(reproducible)
