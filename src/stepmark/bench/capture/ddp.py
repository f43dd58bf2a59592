"""What DDP needs beyond fake tensors and a group that answers at once; which calls are its own.

Source: torch 2.13, csrc/distributed/c10d/reducer.cpp (verify_params_across_processes) and
comm.cpp (results of hooks).
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import graph
from torch.nn.parallel import distributed

from stepmark.bench.capture.compute import tensors

_VERIFY = "_verify_param_shape_across_processes"
_REGISTER = "_register_comm_hook"
_ENGINE = vars(graph)["_engine_run_backward"].__code__
# What may lie between an operator and its caller: modes, the user's among them.
_DISPATCH = ("stepmark.bench.capture.", "torch._ops", "torch._compile", "torch._dynamo.")


def with_result(returned: Any) -> Any:
    """What an operator of c10d returned, with the tensors as its work's result.

    The fake group's work has none, which the hooks of DDP's buckets ask for.
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


class Buckets:
    """Which collectives are DDP's reducer's: those that it calls, or a hook of its buckets."""

    def __init__(self) -> None:
        self._num_hooks = 0  # that are running

    def watched(self) -> Iterator[tuple[tuple[Any, str], Callable[..., Any]]]:
        """A function of torch to follow, and what replaces it."""
        register = vars(dist)[_REGISTER]

        @functools.wraps(register)
        def registering(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
            return register(reducer, state, self._following(hook))

        yield (dist, _REGISTER), registering

    def _following(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any) -> Any:
            self._num_hooks += 1
            try:
                return hook(*args)
            finally:
                self._num_hooks -= 1

        return call

    def reduce(self) -> bool:
        """Asked while an operator is dispatched."""
        return self._num_hooks > 0 or _caller_is_engine()


def _caller_is_engine() -> bool:
    """Whether C++ below autograd's engine calls, with nobody's Python between."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name != "__torch_dispatch__" and not module.startswith(_DISPATCH):
            return frame.f_code is _ENGINE
    return False


class Rebuilding:
    """DDP makes its buckets anew before the second step, of numbers that it reads.

    Inside, tensors of int32 are real; what the buckets hold is as fake as ever.
    """

    def __init__(self) -> None:
        self._running = False

    @contextlib.contextmanager
    def __call__(self, *_: Any) -> Iterator[None]:
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def reads(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator is one of those whose numbers are read."""
        if not self._running:
            return False
        given = list(tensors(list(args)))
        dtype = given[0].dtype if given else kwargs.get("dtype")
        return dtype is torch.int32 and not any(
            isinstance(tensor, FakeTensor) for tensor in given
        )


@contextlib.contextmanager
def unread_shapes() -> Iterator[None]:
    """DDP compares shapes by reading them out of tensors: here it only sends them."""
    if not hasattr(distributed, _VERIFY):
        yield
        return
    with mock.patch.object(distributed, _VERIFY, _sent):
        yield


def _sent(group: Any, params: Sequence[Tensor], logger: Any = None) -> None:
    del logger
    number = torch.zeros(1, dtype=torch.int64)
    dist.all_gather(
        [torch.zeros_like(number) for _ in range(group.size())], number, group=group
    )
    sizes_and_strides = torch.zeros(sum(2 * param.dim() for param in params), dtype=torch.int64)
    dist.broadcast(sizes_and_strides, group=group, group_src=0)
