"""A device "far" without any hardware, on which every wait of the host is counted.

A far tensor wraps one of the CPU, computes with it and gives the same bits. As with a GPU, an operation may not mix far
and near tensors (numbers excepted), and the host waits whenever it reads a far value or copies it. A copy with
`non_blocking=True` is no wait: whoever makes one waits for the device itself (`runtime.synchronise`).

Counted as well are operations, bytes that are copied to the device, and divisions by a number of the host. A GPU has
other bits for these than a CPU: it multiplies by the rounded reciprocal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from swarm.model import runtime

NAME = "far"
_READS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique_consecutive"}


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


class Far(TorchDispatchMode):
    """While it is entered there is a far device; `waits` are the operations for which the host waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.sent_bytes = 0
        self.operations = 0
        self.divided_by_numbers = 0
        self._waiting = runtime.synchronise

    def __enter__(self) -> Far:
        runtime.synchronise = self._synchronise
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        runtime.synchronise = self._waiting

    def taken(self) -> list[str]:
        """The waits since the last call."""
        taken, self.waits = self.waits, []
        return taken

    def _synchronise(self, device: torch.device) -> None:
        self.waits.append("synchronise")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        far = [one for one in tensors if isinstance(one, FarTensor)]
        device = kwargs.get("device")
        to_far = torch.device(device).type == NAME if device is not None else bool(far)
        if device is not None and torch.device(device).type == NAME:
            kwargs["device"] = torch.device("cpu")
        near = [one for one in tensors if not isinstance(one, FarTensor) and one.dim() > 0]
        assert not far or not near or name == "copy_", f"{name} mixes far and near tensors"
        crosses = (name == "_to_copy" and bool(far) != to_far) or (name == "copy_" and 0 < len(far) < len(tensors))
        blocks = not kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        if (far and name in _READS) or (crosses and blocks):
            self.waits.append(name)
        self.operations += bool(far)
        if crosses and not isinstance(tensors[-1], FarTensor):
            self.sent_bytes += tensors[-1].nbytes
        if far and name in ("div", "div_") and not isinstance(args[1], FarTensor):
            self.divided_by_numbers += 1
        result = function(*tree_map(_raw, args), **tree_map(_raw, kwargs))
        if function._schema.is_mutable and isinstance(result, Tensor):
            return next((one for one in tensors if _raw(one) is result), result)
        return tree_map(lambda one: FarTensor(one) if to_far and isinstance(one, Tensor) else one, result)


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
