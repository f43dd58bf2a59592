"""Shorter ways through torch, to the same results, where it takes time per rank or parameter.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py and
distributed/tensor/_sharding_prop.py. Where another version lacks a name it takes its own way.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard

_CHUNK = "_chunk_with_empty"
_FLAG = "_propagate_use_strided_shard_flag"


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Not thread-safe: takes the place of functions of torch."""
    with contextlib.ExitStack() as stack:
        for module, name, made in (
            (_fsdp_param, _CHUNK, _chunked),
            (_sharding_prop, _FLAG, _flagged),
        ):
            original = getattr(module, name, None)
            if original is not None:
                stack.enter_context(mock.patch.object(module, name, made(original)))
        stack.enter_context(_rare_collections())
        yield


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Almost all of the millions of objects live as long as the model does."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Chunks:
    """Parts of a tensor, each made when it is asked for: of one per rank two are used."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._num_chunks = num_chunks
        self._dim = dim

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._num_chunks:
            raise IndexError(index)
        size = self._tensor.size(self._dim)
        width = -(-size // self._num_chunks)
        length = min(width, size - index * width)
        if length <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * width, length)


def _chunked(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, num_chunks: int, dim: int) -> Any:
        if not tensor.size(dim):
            return original(tensor, num_chunks, dim)
        return _Chunks(tensor, num_chunks, dim)

    return call


def _flagged(original: Callable[..., None]) -> Callable[..., None]:
    """Of an operator of n tensors this is called n times, and looks at all n each time."""
    asked: list[Any] = [None, None]  # the operator's schema, and what of it can matter

    def call(op_strategy: Any, op_schema: Any) -> None:
        if asked[0] is not op_schema:
            strided = [
                spec
                for spec in op_schema.args_spec
                if any(isinstance(one, _StridedShard) for one in spec.placements)
            ]
            flags = {spec.use_strided_shard_as_shard_order: spec for spec in strided}
            asked[:] = [op_schema, SimpleNamespace(args_spec=tuple(flags.values()))]
        original(op_strategy, asked[1])

    return call
