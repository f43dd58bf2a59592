"""One rank of a fake job: fake tensors, a fake process group, and real meshes.

A mesh consists of ranks' numbers, which fake tensors do not have, so DeviceMesh works outside
of the fake mode. DDP needs more than fake tensors and a fake group. Source: torch 2.13,
csrc/distributed/c10d/reducer.cpp (verify_params_across_processes) and comm.cpp (results of
hooks).
"""

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import graph
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepmark.ground.errors import ConfigError
from stepmark.training.messages import tensors

# Methods of DeviceMesh that calculate with ranks' numbers.
_MESH_METHODS = (
    *("__init__", "__repr__", "from_group", "_concatenate", "_flatten", "_unflatten"),
    *("_create_flatten_mesh", "_create_unflatten_mesh", "_get_mesh_tensor_from_full_mesh"),
    *("_compute_coordinates_from_mesh", "_init_process_groups", "_init_one_process_group"),
)
_MAKE_MESH = DeviceMesh.__init__


@contextlib.contextmanager
def fake_world(
    world_size: int, rank: int, value: Callable[[Tensor], Tensor]
) -> Iterator[list[int]]:
    """Make this process one rank. Yield the sizes of the meshes that are made inside.

    value: returns the real value of a fake tensor.

    Raises ConfigError where there is a real group already.
    """
    if dist.is_initialized():
        raise ConfigError("capture", "a process group", "a process that has none yet")
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environment = mock.patch.dict(
        os.environ, {name: str(value) for name, value in variables.items()}
    )
    mesh_sizes: list[int] = []
    with environment, contextlib.ExitStack() as stack:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        # DTensor caches layouts with their meshes, which equal those of another rank.
        stack.callback(_clear_sharding_prop_cache)
        stack.callback(dist.destroy_process_group)
        for name in _MESH_METHODS:
            if name in vars(DeviceMesh):
                around = _real(vars(DeviceMesh)[name], mesh_sizes, value)
                stack.enter_context(mock.patch.object(DeviceMesh, name, around))
        stack.enter_context(shortcuts())
        if hasattr(distributed, _VERIFY):
            stack.enter_context(mock.patch.object(distributed, _VERIFY, _send_shapes))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield mesh_sizes


def _real(method: Any, mesh_sizes: list[int], value: Callable[[Tensor], Tensor]) -> Any:
    """Return a method, static or not, that runs outside of the fake mode on real tensors."""
    is_static = isinstance(method, staticmethod)
    function = method.__func__ if is_static else method

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        real = [value(arg) if isinstance(arg, FakeTensor) else arg for arg in args]
        for key, argument in kwargs.items():
            kwargs[key] = value(argument) if isinstance(argument, FakeTensor) else argument
        with unset_fake_temporarily():
            result = function(*real, **kwargs)
        if function is _MAKE_MESH:
            mesh_sizes.append(args[0].size())
        return result

    return staticmethod(call) if is_static else call


_CHUNK = "_chunk_with_empty"
_FLAG = "_propagate_use_strided_shard_flag"


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Patch slow functions of torch; not thread-safe."""
    with contextlib.ExitStack() as stack:
        for module, name, replacing in (
            (_fsdp_param, _CHUNK, _chunked),
            (_sharding_prop, _FLAG, _flagged),
        ):
            original = getattr(module, name, None)
            if original is not None:
                stack.enter_context(mock.patch.object(module, name, replacing(original)))
        # Collect garbage rarely: almost all of the millions of objects live with the model.
        stack.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(200_000, 20, 50)
        yield


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Parts of a tensor, one per rank, each made on access: only two are used."""

    tensor: Tensor
    num_chunks: int
    dim: int

    def __len__(self) -> int:
        return self.num_chunks

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.num_chunks:
            raise IndexError(index)
        size = self.tensor.size(self.dim)
        width = -(-size // self.num_chunks)
        length = min(width, size - index * width)
        if length <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, index * width, length)


def _chunked(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, num_chunks: int, dim: int) -> Any:
        make = _Chunks if tensor.size(dim) else original
        return make(tensor, num_chunks, dim)

    return call


def _flagged(original: Callable[..., None]) -> Callable[..., None]:
    """Cache a function that is called n times for an operator of n tensors and reads all n."""
    newest: list[Any] = [None, None]  # the operator's schema, and its relevant part

    def call(op_strategy: Any, op_schema: Any) -> None:
        if newest[0] is not op_schema:
            strided = [
                spec
                for spec in op_schema.args_spec
                if any(isinstance(placement, _StridedShard) for placement in spec.placements)
            ]
            flags = {spec.use_strided_shard_as_shard_order: spec for spec in strided}
            newest[:] = [op_schema, SimpleNamespace(args_spec=tuple(flags.values()))]
        original(op_strategy, newest[1])

    return call


_VERIFY = "_verify_param_shape_across_processes"
_REGISTER = "_register_comm_hook"
_ENGINE = vars(graph)["_engine_run_backward"].__code__
# Modules between an operator and its caller: dispatch modes, the user's among them.
_DISPATCH = ("stepmark.capture.", "torch._ops", "torch._compile", "torch._dynamo.")


def with_result(returned: Any) -> Any:
    """Return the value of an operator of c10d, with the tensors as its work's result.

    The fake group's work has none, which the hooks of DDP's buckets need.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        return returned
    tensors, work = returned
    if not isinstance(work, torch.ScriptObject):
        return returned
    future: Any = torch.futures.Future()
    future.set_result(tensors if isinstance(tensors, list) else [tensors])
    make: Any = vars(c10d)["_create_work_from_future"]  # torch's stubs lack it
    return tensors, make(future).boxed()


def around(original: Callable[..., Any], context: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which runs inside the context of its arguments."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context(*args):
            return original(*args, **kwargs)

    return call


class Buckets:
    """Detects collectives of DDP's reducer: those that it calls, or a hook of its buckets."""

    def __init__(self) -> None:
        self._in_hook = False

    def patches(self) -> Iterator[tuple[tuple[Any, str], Callable[..., Any]]]:
        """Yield a function of torch to patch, and its replacement."""
        register = vars(dist)[_REGISTER]

        @functools.wraps(register)
        def registering(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
            inside = around(hook, lambda *_: mock.patch.object(self, "_in_hook", True))
            return register(reducer, state, inside)

        yield (dist, _REGISTER), registering

    def reduce(self) -> bool:
        """Return whether DDP's reducer calls the operator that is being dispatched."""
        return self._in_hook or _caller_is_engine()


def _caller_is_engine() -> bool:
    """Return whether C++ below autograd's engine calls, with no other Python between."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name != "__torch_dispatch__" and not module.startswith(_DISPATCH):
            return frame.f_code is _ENGINE
    return False


class Rebuilding:
    """DDP rebuilds its buckets before the second step, from numbers that it reads.

    Inside, tensors of int32 are real; those in the buckets stay fake.
    """

    def __init__(self) -> None:
        self._running = False

    def __call__(self, *_: Any) -> AbstractContextManager[Any]:
        return mock.patch.object(self, "_running", True)

    def reads(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator is one of those whose numbers are read."""
        if not self._running:
            return False
        operands = list(tensors(list(args)))
        dtype = operands[0].dtype if operands else kwargs.get("dtype")
        return dtype is torch.int32 and not any(
            isinstance(tensor, FakeTensor) for tensor in operands
        )


def _send_shapes(group: Any, params: Sequence[Tensor], logger: Any = None) -> None:
    """Let DDP only send shapes, which it otherwise compares by reading tensors."""
    del logger
    number = torch.zeros(1, dtype=torch.int64)
    dist.all_gather(
        [torch.zeros_like(number) for _ in range(group.size())], number, group=group
    )
    sizes_and_strides = torch.zeros(sum(2 * param.dim() for param in params), dtype=torch.int64)
    dist.broadcast(sizes_and_strides, group=group, group_src=0)
