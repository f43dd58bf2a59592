"""SwiGLU and GELU, and how any function of rows is timed forwards and backwards.

T tokens, W width. The gate and up halves of SwiGLU lie in one tensor, as one product made them.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional

from stepmark.bench.operators.call import Call, Impl
from stepmark.bench.operators.dtypes import normal
from stepmark.bench.verify import compare, merge, poisoned_result, tolerance
from stepmark.core.ops import Activation, Phase, backends
from stepmark.core.record import Check

Function = Callable[..., Tensor | tuple[Tensor, ...]]
_CHUNK = 2**24  # elements of fp64 reference at a time


@functools.cache
def compiled(function: Function, key: object) -> Function:
    """torch.compile, once per key (an operator), for all its operand sets.

    Each key gets its own code object: torch.compile keeps few versions of one, then would
    quietly run eagerly. Kept graphs are walked many times, so buffers are not donated.
    """
    functorch_config.donated_buffer = False
    code = function.__code__.replace()
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(own, dynamic=False, fullgraph=True)


def rows_call(
    op: Any,
    function: Function,
    rows: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    *,
    is_compiled: bool,
    constants: tuple[Tensor, ...] = (),
    roundings: int = 4,
) -> Call:
    """Time function(*rows, *shared, *constants), or its gradients on a kept graph.

    Everything in `rows` has rows along dim 0 that do not see each other; gradients flow to
    `rows` and `shared`. The reference is the same function in fp64, a slice of rows at a time.
    """
    timed = compiled(function, op) if is_compiled else function
    is_bwd = op.phase is Phase.BWD
    inputs = tuple(tensor.requires_grad_(is_bwd) for tensor in rows + shared)
    grads: tuple[Tensor, ...] = ()

    def forward() -> tuple[Tensor, ...]:
        result = timed(*inputs, *constants)
        return (result,) if isinstance(result, Tensor) else result

    run: Callable[[], tuple[Tensor, ...]] = forward
    if is_bwd:
        outputs = forward()
        grads = tuple(normal(*out.shape, dtype=op.dtype, device=out.device) for out in outputs)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

        run = backward

    def verify() -> Check:
        results = poisoned_result(run)
        reference = _Reference(function, rows, shared, constants, grads)
        allowed = tolerance(op.dtype, length=rows[0].shape[0], roundings=roundings)
        return reference.check(results, allowed)

    name = "torch.compile" if is_compiled else "torch eager"
    return Call(run=run, verify=verify, backend_run=name)


class _Reference:
    """The function in fp64, with its gradients where `grads` are given."""

    def __init__(
        self,
        function: Function,
        rows: tuple[Tensor, ...],
        shared: tuple[Tensor, ...],
        constants: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
    ) -> None:
        self.function, self.rows, self.grads = function, rows, grads
        self.shared = [t.detach().double().requires_grad_(t.requires_grad) for t in shared]
        self.constants = [tensor.double() for tensor in constants]

    def check(self, results: tuple[Tensor, ...], allowed: float) -> Check:
        count = len(self.rows) if self.grads else len(results)
        sums = [torch.zeros_like(tensor) for tensor in self.shared]
        checks = []
        step = max(1, _CHUNK // self.rows[0][0].numel())
        for start in range(0, self.rows[0].shape[0], step):
            part = slice(start, start + step)
            refs = self._part(part)
            for out, ref in zip(results[:count], refs, strict=False):
                checks.append(compare(out[part], ref, allowed, "fp64, all elements"))
            for total, ref in zip(sums, refs[count:], strict=False):
                total.add_(ref)
        for out, total in zip(results[count:], sums, strict=False):
            checks.append(compare(out, total, allowed, "fp64, all elements"))
        return merge(checks)

    def _part(self, part: slice) -> tuple[Tensor, ...]:
        rows = [t[part].detach().double().requires_grad_(t.requires_grad) for t in self.rows]
        result = self.function(*rows, *self.shared, *self.constants)
        outputs = (result,) if isinstance(result, Tensor) else result
        if not self.grads:
            return outputs
        grads = tuple(grad[part].double() for grad in self.grads)
        return torch.autograd.grad(outputs, [*rows, *self.shared], grads)


def swiglu(x_T2W: Tensor) -> Tensor:
    gate_TW, up_TW = x_T2W.chunk(2, dim=-1)
    return functional.silu(gate_TW) * up_TW


def gelu(x_TW: Tensor) -> Tensor:
    return functional.gelu(x_TW, approximate="tanh")


def make(op: Activation, device: torch.device, *, is_compiled: bool = False) -> Call:
    function, planes = (swiglu, 2) if op.kind == "swiglu" else (gelu, 1)
    x = normal(op.tokens, planes * op.width, dtype=op.dtype, device=device)
    return rows_call(op, function, (x,), (), is_compiled=is_compiled)


TORCH = Impl(make=make)
COMPILE = Impl(
    make=functools.partial(make, is_compiled=True), unsupported=backends.needs_compiler
)
