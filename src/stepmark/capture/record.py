"""Record the computation and communication of a rank below DTensor, with local shapes.

FSDP2 and DDP issue communication on streams of their own, which the CPU does not have. Here
the caller decides the stream: FSDP2's parameter groups (unshard, wait_for_unshard,
post_backward, finalize_backward of torch.distributed.fsdp's FSDPParamGroup, whose CUDA events
are modelled) or DDP's reducer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import Reducer
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from stepmark.capture.compute import computation
from stepmark.capture.fake import Buckets, Rebuilding, around, with_result
from stepmark.capture.messages import Groups, Pairs, comm_ops
from stepmark.capture.modules import OUTSIDE, ModulePosition, ModuleTracker, in_backward
from stepmark.capture.overlap import Overlap
from stepmark.capture.routing import Router
from stepmark.capture.unknown import ReadPolicy
from stepmark.capture.values import Values, forget
from stepmark.model.ops import Phase
from stepmark.step.workload import ComputeOp, Operation
from stepmark.training.messages import NAMESPACES, tensors

_PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}
# An optimizer makes its state with these, in the first step only.
_STATE = frozenset({"aten.zeros_like", "aten.zeros"})
_DEVICE = torch.ops.prim.device.default


class CaptureRecorder(TorchDispatchMode):
    """Records operations inside `with recording()`; begin_step() empties `operations`.

    check: raises after a time limit.
    """

    def __init__(
        self, rank: int, policy: ReadPolicy, router: Router, check: Callable[[], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check
        self.supports_higher_order_operators = True
        self.rank = rank
        self.modules = ModuleTracker()
        self.groups = Groups(rank)
        self._silent = False
        self._in_optimizer = False
        self._rebuilding = Rebuilding()
        self._buckets = Buckets()
        # Ranks run the same code, so that DDP finds the same parameters unused.
        self.values = Values(policy, router, self._ddp_reduces)
        self._pairs = Pairs(rank)
        self.begin_step()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled, and the check takes as long as the rest."""
        return False

    def begin_step(self) -> None:
        self.operations: list[Operation] = []
        self.modules.begin_step()
        self._after_backward = False
        self._num_updated = 0  # operations up to the last update of parameters
        self._overlap = Overlap()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        hooks = (
            register_optimizer_step_pre_hook(lambda *_: self._optimizer(running=True)),
            register_optimizer_step_post_hook(lambda *_: self._optimizer(running=False)),
        )
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.modules.following())
                for name, replacing in self._patches():
                    stack.enter_context(mock.patch.object(*name, replacing))
                stack.enter_context(self)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # more frequent than all others together
        self._check()
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            for tensor in tensors([*args, *kwargs.values()]):
                forget(tensor)  # it may write to its operands
            return func(*args, **kwargs)
        if any(kind not in _PLAIN and issubclass(kind, Tensor) for kind in types):
            return NotImplemented  # DTensor then calls operators of plain tensors
        if self._rebuilding.reads(args, kwargs):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        elif self._silent:
            result = func(*args, **kwargs)
        else:
            result = self.values.run(func, args, kwargs)
        if func.namespace == "c10d":
            result = with_result(result)
        if not self._silent:
            self._note(func, args, kwargs, result)
        return result

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if func.namespace in NAMESPACES:
            name = func._schema.name.partition("::")[2]
            values = (*args, *kwargs.values())
            phase, place, again = self._where()
            ddp = phase is Phase.BWD and self._ddp_reduces()
            for message in comm_ops(name, values, result, self.groups, phase, place):
                sent = replace(message, recompute=again)
                if sent.peer is not None:
                    outside = not self.modules.inside_module and not in_backward()
                    group = self.groups.groups[sent.group]
                    tensor = next(tensors(values))
                    sent = self._pairs.describe(sent, tensor, group, outside=outside)
                own = func.namespace == "c10d"
                self.operations.append(
                    self._overlap.sending(sent, self.operations, own=own, ddp=ddp)
                )
            return
        work = computation(func, args, kwargs, result, backward=in_backward())
        if work is None:
            return
        op, op_phase = work
        phase, place, again = self._where()
        if phase is Phase.OPTIM and getattr(op, "name", "") in _STATE:
            return
        operation = ComputeOp(
            op=op,
            phase=op_phase if phase is Phase.BWD and op_phase else phase,
            module=place.module,
            layer=place.layer,
            microbatch=place.microbatch,
            recompute=again,
        )
        in_node = torch._C._current_autograd_node() is not None
        self.operations.append(self._overlap.computing(operation, in_node=in_node))

    def _where(self) -> tuple[Phase, ModulePosition, bool]:
        """Return the phase, the module, and whether it is recomputed forward work."""
        place = self.modules.here()
        if self._overlap.reduces:
            return Phase.BWD, place, False
        if in_backward():
            self._after_backward = True
            # Functions of autograd disable gradients inside their forward pass.
            again = torch.is_grad_enabled() or self.modules.recomputes
            return Phase.FWD if again else Phase.BWD, place, again
        if self.modules.inside_module:
            if self._after_backward:
                self._begin_forward()
            self._after_backward = False
        if self._in_optimizer or self._after_backward:
            return Phase.OPTIM, ModulePosition("optimizer"), False
        return Phase.FWD, place, False

    def _begin_forward(self) -> None:
        """Move operations since the last backward pass or update to this forward pass."""
        at = len(self.operations)
        while at > self._num_updated and self.operations[at - 1].phase is Phase.OPTIM:
            at -= 1
            self.operations[at] = replace(self.operations[at], phase=Phase.FWD, module=OUTSIDE)

    def _optimizer(self, *, running: bool) -> None:
        self._in_optimizer = running
        self._num_updated = len(self.operations)

    def _ddp_reduces(self) -> bool:
        """Return whether DDP's reducer calls the operator that is being dispatched."""
        return self.modules.has_ddp and self._buckets.reduce()

    def _patches(self) -> Iterator[tuple[tuple[Any, str], Callable[..., Any]]]:
        """Yield methods of torch to patch, each with its replacement."""
        gathering = functools.partial(self._overlap_gather, Overlap.gathering)
        copying_out = functools.partial(self._overlap_gather, Overlap.copying_out)
        for owner, name, context in (
            (FSDPState, "_root_pre_forward", self._overlap_begin),
            (FSDPParamGroup, "unshard", gathering),
            (FSDPParamGroup, "wait_for_unshard", copying_out),
            (FSDPParamGroup, "post_backward", self._overlap_post_backward),
            (FSDPParamGroup, "finalize_backward", self._overlap_finalize),
            (Reducer, "_rebuild_buckets", self._rebuilding),
            (_PipelineSchedule, "_warmup_p2p", self.values.voting),
            # DTensor propagates layouts by running operators on global shapes.
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", self._silence),
        ):
            if hasattr(owner, name):
                yield (owner, name), around(getattr(owner, name), context)
        yield from self._pairs.patches()
        yield from self._buckets.patches()
        yield from self.values.reads.patches()

    def _silence(self, *_: Any) -> AbstractContextManager[Any]:
        return mock.patch.object(self, "_silent", True)

    @contextlib.contextmanager
    def _overlap_begin(self, state: Any, *_: Any) -> Iterator[None]:
        """Begin a forward pass of the root, unless set_post_optim_event sets its event."""
        shared = state._state_ctx
        if shared.iter_forward_root is None and shared.post_optim_event is None:
            self._overlap.beginning(self.operations)
        yield

    @contextlib.contextmanager
    def _overlap_gather(
        self, within: Callable[..., Any], group: Any, *_: Any
    ) -> Iterator[None]:
        """Run a call of a parameter group inside a method of Overlap, new in every step."""
        forward = group._training_state.name == "FORWARD"
        with (
            self.modules.owned_by(group.modules[0]),
            within(self._overlap, id(group), forward=forward),
        ):
            yield

    @contextlib.contextmanager
    def _overlap_post_backward(self, group: Any, *_: Any) -> Iterator[None]:
        apart = getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None
        with self.modules.owned_by(group.modules[0]), self._overlap.reducing(apart=apart):
            yield

    @contextlib.contextmanager
    def _overlap_finalize(self, *_: Any) -> Iterator[None]:
        self._overlap.wait_for_reductions()
        yield
