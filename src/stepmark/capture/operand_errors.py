"""Errors of real kernels and process groups, which fake ones do not raise.

Each combination of types is tried once, on real tensors of one element. Buffers of collectives
must have one type, and sizes that fit the ranks (ProcessGroup's checks in C++, torch 2.13).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stepmark.training.messages import tensors

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


# By what power of the ranks' number the input is larger than the output.
_BUFFERS = {"_allgather_base_": -1, "_reduce_scatter_base_": 1, "alltoall_base_": 0}


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


def check_buffers(name: str, args: Sequence[Any], num_ranks: int) -> None:
    """Raise an error for buffers of a collective of c10d that real ranks do not take."""
    if name not in _BUFFERS:
        return
    received, sent = (list(tensors(value)) for value in args[:2])
    types = {tensor.dtype for tensor in (*received, *sent)}
    if len(types) > 1:
        raise RuntimeError(
            f"{name}: buffers have the types {', '.join(sorted(map(str, types)))}"
        )
    num_sent, num_received = (sum(t.numel() for t in side) for side in (sent, received))
    if name == "alltoall_base_":
        for splits, tensor in zip(args[3:5], (*received, *sent), strict=True):
            rows = tensor.size(0)
            if sum(splits) != rows if splits else rows % num_ranks:
                raise RuntimeError(f"{name}: splits {list(splits)} do not divide {rows} rows")
    elif num_received * num_ranks ** _BUFFERS[name] != num_sent:
        raise RuntimeError(
            f"{name}: {num_sent} elements in, {num_received} out do not fit {num_ranks} ranks"
        )
