"""Record all messages of this rank at the dispatcher: kind, size, group and phase.

All of torch's communication goes through operators: calls of torch.distributed, FSDP2's in its
hooks, the C++ reducer of DDP (with its buckets as they are), DTensor's functional collectives,
and those that compiled code calls. Threads of autograd inherit the mode. Not recorded:
messages of a replayed CUDA graph, and libraries that call NCCL themselves (TransformerEngine's
userbuffers, DeepEP).

Sizes are counted as nccl-tests does; `core.message` has the rule.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepmark.cases.message import RECV, SEND, MessageKind, Tally, sized
from stepmark.ground.dtypes import message_dtype
from stepmark.model.collectives import Collective

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
# Operators of these that send nothing.
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
BATCH_P2P = "batch_p2p_ops"
PAIRS = ("send", "recv_", "isend", "irecv")

# Operators by the form of their buffers. One buffer for both directions:
_IN_PLACE: dict[str, str] = {
    "allreduce_": Collective.ALL_REDUCE,
    "allreduce_coalesced_": Collective.ALL_REDUCE,
    "broadcast_": Collective.BROADCAST,
    "reduce_": Collective.REDUCE,
    "barrier": Collective.BARRIER,
    "monitored_barrier_": Collective.BARRIER,
    "send": SEND,
    "recv_": RECV,
    "recv_any_source_": RECV,
    "isend": SEND,
    "irecv": RECV,
}
# First the outputs, then the inputs:
_OUT_IN: dict[str, str] = {
    "_allgather_base_": Collective.ALL_GATHER,
    "allgather_": Collective.ALL_GATHER,
    "allgather_coalesced_": Collective.ALL_GATHER,
    "allgather_into_tensor_coalesced_": Collective.ALL_GATHER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "reduce_scatter_": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": Collective.REDUCE_SCATTER,
    "alltoall_": Collective.ALL_TO_ALL,
    "alltoall_base_": Collective.ALL_TO_ALL,
    "gather_": Collective.GATHER,
    "scatter_": Collective.SCATTER,
}
# First the inputs; the outputs are the result:
_FUNCTIONAL: dict[str, str] = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_reduce_": Collective.ALL_REDUCE,
    "all_reduce_coalesced": Collective.ALL_REDUCE,
    "all_reduce_coalesced_": Collective.ALL_REDUCE,
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Collective.ALL_GATHER,
    "all_gather_into_tensor_out": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor_out": Collective.REDUCE_SCATTER,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "shard_dim_alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "broadcast_": Collective.BROADCAST,
    "_low_contention_all_gather": Collective.ALL_GATHER,
    "_low_contention_reduce_scatter": Collective.REDUCE_SCATTER,
}
# Async tensor parallelism: a product of the gathered input, or one whose result is scattered.
_GATHERS_FIRST = ("fused_all_gather_matmul", "fused_all_gather_scaled_matmul")
_SCATTERS_LAST = ("fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter")

# Types without a dispatch of their own, which torch may pass nevertheless.
_PLAIN = {torch.Tensor, torch.nn.Parameter}
Tensors = Sequence[torch.Tensor]


class MessageRecorder(TorchDispatchMode):
    """Records messages of this rank inside `with`. Set .phase as the step proceeds.

    Compiled code stays compiled, and eager code runs as usual: memory is that of any step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Compiled code with activation checkpointing runs such operators.
        self.supports_higher_order_operators = True
        self.phase = ""
        self._kinds: list[MessageKind] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, or torch.compile would run all code eagerly, with other messages."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        subclasses = {kind for kind in types if issubclass(kind, torch.Tensor)} - _PLAIN
        if FakeTensor in subclasses:  # DTensor is propagating a layout: nothing is sent
            return func(*args, **kwargs)
        if subclasses:
            # DTensor and the like turn it into operators of plain tensors, recorded here.
            return NotImplemented
        result = func(*args, **kwargs)
        if getattr(func, "namespace", "") in NAMESPACES:
            name = func.name().partition("::")[2].partition(".")[0]
            values = (*args, *kwargs.values())
            self.note(name, values, result)
        return result

    def note(self, name: str, values: Sequence[Any], result: Any) -> None:
        """Record one operator that communicates, by its name without the namespace."""
        # A single list operation is safe where several threads of autograd record.
        self._kinds.extend(kinds(name, values, result, self.phase))

    def histogram(self) -> list[tuple[MessageKind, Tally]]:
        """Return the calls of each kind, in the order of their first."""
        counts = Counter(self._kinds)
        return [(kind, Tally(calls=calls, ranks=1)) for kind, calls in counts.items()]


def kinds(name: str, values: Sequence[Any], result: Any, phase: str) -> Iterator[MessageKind]:
    """Yield the messages of an operator: one for most, several for a batch of sends."""
    if name in _SILENT:
        return
    group = next(filter(None, map(group_of, values)), None)
    if name == BATCH_P2P:
        for word, tensor in zip(values[0], values[3], strict=True):
            side = SEND if "send" in word else RECV
            yield _kind(side, [tensor], [tensor], group, phase)
        return
    first, second = (list(tensors(value)) for value in (*values[:2], None, None)[:2])
    results = list(tensors(result))
    if name in _IN_PLACE:
        yield _kind(_IN_PLACE[name], first, first, group, phase)
    elif name in _OUT_IN:
        collective = _OUT_IN[name]
        if collective == Collective.ALL_TO_ALL and _is_uneven(name, values, first, second):
            collective = Collective.ALL_TO_ALL_V
        yield _kind(collective, second, first, group, phase)
    elif name in _FUNCTIONAL:
        collective = _FUNCTIONAL[name]
        if collective == Collective.ALL_TO_ALL and _is_uneven(name, values, (), ()):
            collective = Collective.ALL_TO_ALL_V
        yield _kind(collective, first, results, group, phase)
    elif name in _GATHERS_FIRST:
        yield _kind(Collective.ALL_GATHER, first, [], group, phase)
    elif name in _SCATTERS_LAST:
        yield _kind(Collective.REDUCE_SCATTER, [], results, group, phase)
    elif group is not None:
        # A new or rare operator keeps torch's name rather than being lost.
        yield _kind(name, first, first, group, phase)


def _kind(
    collective: str, sent: Tensors, received: Tensors, group: Any, phase: str
) -> MessageKind:
    ranks = group.size() if group else None
    types = {tensor.dtype for tensor in (*sent, *received)}
    if collective == Collective.BARRIER:  # its tensor only selects the device
        sent = []
        received = []
        types = set()
    call_bytes, message_bytes = sized(collective, _bytes(sent), _bytes(received), ranks)
    return MessageKind(
        collective=str(collective),
        dtype=_dtype(types.pop()) if len(types) == 1 else "",
        group=_group_name(group) if group else "",
        num_ranks=ranks,
        phase=phase,
        call_bytes=call_bytes,
        message_bytes=message_bytes,
    )


def _is_uneven(name: str, values: Sequence[Any], first: Tensors, second: Tensors) -> bool:
    """Return whether parts of an all-to-all differ in size."""
    if name == "alltoall_":
        return any(len({part.numel() for part in parts}) > 1 for parts in (first, second))
    splits = [value for value in values if isinstance(value, list | tuple)]
    return any(len(set(sizes)) > 1 for sizes in splits)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument, which may be lists of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _dtype(dtype: torch.dtype) -> str:
    """Return our name of a type, else torch's."""
    name = str(dtype).removeprefix("torch.")
    named = message_dtype(name)
    return named[0] if named else name


def group_of(value: Any) -> Any:
    """Return the process group that an argument is or names, else None."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject):
        is_group = "ProcessGroup" in value._type().qualified_name()
        return dist.ProcessGroup.unbox(value) if is_group else None
    if isinstance(value, str):
        try:
            # The type of a name depends on torch's version.
            return _resolve_process_group(cast(Any, value))
        except (RuntimeError, ValueError, KeyError):
            return None  # the name of a reduction
    return None


def _group_name(group: Any) -> str:
    """Return the description, e.g. "mesh_tp", which is equal on all ranks, else the name."""
    description = group.group_desc
    return str(description if description not in ("", "undefined") else group.group_name)
