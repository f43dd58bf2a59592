"""One rank of a job that does not exist: fake tensors, fake process group, meshes all the same.

A mesh is made of ranks' numbers, which fake tensors do not have, so DeviceMesh works outside
of the fake mode.
"""

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepmark.bench.capture.ddp import unread_shapes
from stepmark.core.errors import ConfigError

# Methods of DeviceMesh that calculate with ranks' numbers.
_OF_NUMBERS = (
    "__init__",
    "_get_mesh_tensor_from_full_mesh",
    "_compute_coordinates_from_mesh",
    "_init_process_groups",
    "_init_one_process_group",
    "from_group",
    "_concatenate",
    "_flatten",
    "_create_flatten_mesh",
    "_unflatten",
    "_create_unflatten_mesh",
    "__repr__",
)


@contextlib.contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[list[int]]:
    """This process as one rank. Yields the sizes of the meshes that are made inside.

    Raises ConfigError where a real group is already there.
    """
    if dist.is_initialized():
        raise ConfigError("capture", "a process group", "a process that has none yet")
    seen = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    told = mock.patch.dict(os.environ, {name: str(value) for name, value in seen.items()})
    mesh_sizes: list[int] = []
    with told, contextlib.ExitStack() as stack:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        # DTensor keeps layouts with their meshes, which equal those of another rank.
        stack.callback(_clear_sharding_prop_cache)
        stack.callback(dist.destroy_process_group)
        for name in _OF_NUMBERS:
            if name in vars(DeviceMesh):
                around = _real(vars(DeviceMesh)[name], mesh_sizes)
                stack.enter_context(mock.patch.object(DeviceMesh, name, around))
        stack.enter_context(shortcuts())
        stack.enter_context(unread_shapes())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield mesh_sizes


def _real(method: Any, mesh_sizes: list[int]) -> Any:
    """A method, static or not, that runs outside of the fake mode."""
    if isinstance(method, staticmethod):
        return staticmethod(_outside(method.__func__))
    if method is DeviceMesh.__init__:
        return _initializing(method, mesh_sizes)
    return _outside(method)


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _initializing(function: Callable[..., None], mesh_sizes: list[int]) -> Callable[..., None]:
    @functools.wraps(function)
    def call(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            # init_device_mesh passes all ranks in their order, made under the fake mode.
            if isinstance(kwargs.get("_rank_map"), FakeTensor):
                count = kwargs["_layout"].numel()
                kwargs["_rank_map"] = torch.arange(count, dtype=torch.int)
            function(mesh, *args, **kwargs)
            mesh_sizes.append(mesh.size())

    return call


_CHUNK = "_chunk_with_empty"
_FLAG = "_propagate_use_strided_shard_flag"


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Not thread-safe: takes the place of functions of torch."""
    with contextlib.ExitStack() as stack:
        for module, name, replacing in (
            (_fsdp_param, _CHUNK, _chunked),
            (_sharding_prop, _FLAG, _flagged),
        ):
            original = getattr(module, name, None)
            if original is not None:
                stack.enter_context(mock.patch.object(module, name, replacing(original)))
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
                if any(isinstance(placement, _StridedShard) for placement in spec.placements)
            ]
            flags = {spec.use_strided_shard_as_shard_order: spec for spec in strided}
            asked[:] = [op_schema, SimpleNamespace(args_spec=tuple(flags.values()))]
        original(op_strategy, asked[1])

    return call
