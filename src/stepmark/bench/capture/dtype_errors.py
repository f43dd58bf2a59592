"""Errors of real kernels on types of numbers, which operators on fake tensors do not raise.

Each combination of types is tried once, on real tensors of one element.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stepmark.bench.training.messages import tensors

# Operators that take operands of one element whatever their other arguments are.
_TRIED = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "lerp"),
        *("embedding", "gather", "index_select", "index_put", "index_put_", "masked_scatter"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"),
        *("index_copy", "index_copy_", "convolution", "nll_loss_forward", "mse_loss"),
        *("native_layer_norm", "binary_cross_entropy", "addcmul", "addcdiv"),
    }
)
_ABOUT_TYPES = re.compile(r"\b(dtypes?|scalar types?|types?|datatypes?)\b")


class DtypeErrors:
    """Remembers which combinations were tried."""

    def __init__(self) -> None:
        self._tried: set[Any] = set()

    def check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise the error of the real kernel if it does not take these types together."""
        name = func._schema.name.partition("::")[2]
        if name not in _TRIED:
            return
        key = func, tuple((one.dtype, one.dim()) for one in tensors([*args, *kwargs.values()]))
        if key in self._tried:
            return
        self._tried.add(key)
        try:
            with _disable_current_modes(), torch.no_grad():
                small = list(map(_small, args))
                if name == "native_layer_norm":
                    small[1] = [1] * len(small[1])
                func(*small, **{key: _small(kwargs[key]) for key in kwargs})
        except (RuntimeError, IndexError) as error:
            text = str(error)
            if _ABOUT_TYPES.search(text) and "not implemented for" not in text:
                raise RuntimeError(text) from None


def _small(value: Any) -> Any:
    """Return a real tensor of one element for each tensor."""
    if isinstance(value, Tensor):
        return torch.zeros([min(size, 1) for size in value.shape], dtype=value.dtype)
    if isinstance(value, list | tuple):
        return [_small(item) for item in value]
    return value
