"""Another processor: it adds up matrix products of bfloat16 and float64 in an order of its own.

Products in float32 stay as they are, so models compute the same gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = 3


class OtherProducts(TorchDispatchMode):
    """While it is entered, inner dimensions are permuted and divided, and sums of zeros are -0."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.products = 0
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        if name not in ("mm", "addmm") or args[-1].dtype not in (torch.bfloat16, torch.float64):
            return function(*args, **kwargs)
        self.products += 1
        found = self._product(*args[-2:])
        return found if name == "mm" else kwargs.get("beta", 1) * args[0] + kwargs.get("alpha", 1) * found

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """The parts are rounded one by one, and then their sum."""
        order = torch.randperm(left.shape[1], generator=self._generator)
        total = sum(left[:, some] @ right[some] for some in order.tensor_split(PARTS))
        assert isinstance(total, Tensor)
        return torch.where(total == 0, -0.0, total)
