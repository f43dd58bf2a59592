"""PARAM's MLP and embedding bags.

The MLP is a stack of linear layers with ReLU between; no softmax and no loss. The gradient of
its output is fixed random data whose sign changes with every step, so that weights stay bounded
over thousands of steps.

An embedding bag is a sum of table rows. All operand sets of a case share one table, which fills
most of a GPU; caches stay cold because every call uses other indices, from a ring drawn before.
"""

import weakref
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepmark.cases.record import Check
from stepmark.measuring.verify import (
    TORCH_DTYPE,
    compare,
    finite,
    merge,
    poisoned_result,
    sample,
    tolerance,
)
from stepmark.model.ops import EmbeddingBag, Mlp, Phase, backends
from stepmark.operators.bench.call import (
    Call,
    Impl,
    generator,
    normal,
    set_matmul_precision,
)

LR = 1e-3
ADAGRAD_EPS = 1e-6  # torch's 1e-10 is zero in fp16, and the first update 0 / 0


def stack(op: Mlp, device: torch.device) -> nn.Sequential:
    """Return linear, ReLU, linear, ..., linear with PARAM's initialization, all normal."""
    modules: list[nn.Module] = []
    for rows, columns in pairwise(op.widths):
        linear = nn.Linear(rows, columns, device="meta")
        weight = normal(columns, rows, dtype=op.dtype, device=device)
        linear.weight = nn.Parameter(weight.mul_((2 / rows) ** 0.5))
        linear.bias = nn.Parameter(normal(columns, dtype=op.dtype, device=device).mul_(0.1))
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def build_optimizer(op: Mlp, params: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    on_gpu = params[0].is_cuda
    match op.optimizer:
        case "sgd":
            # Not fused on CPU: 16-bit updates are wrong there (see optimizer.py).
            return torch.optim.SGD(params, lr=LR, fused=on_gpu, foreach=not on_gpu)
        case "adagrad":
            return torch.optim.Adagrad(params, lr=LR, eps=ADAGRAD_EPS, foreach=True)
        case "adam":
            return torch.optim.Adam(params, lr=LR, fused=True, capturable=on_gpu)
        case _:
            return None


class _Stack:
    """The stack with its data, and the call of each phase."""

    def __init__(self, op: Mlp, device: torch.device) -> None:
        set_matmul_precision(op.dtype)
        self.op = op
        self.model = stack(op, device)
        self.params = list(self.model.parameters())
        self.x_BI = normal(op.batch, op.input, dtype=op.dtype, device=device)
        dy_BO = normal(op.batch, op.output, dtype=op.dtype, device=device) / op.batch**0.5
        self.dys = (dy_BO, -dy_BO) if op.phase is Phase.STEP else (dy_BO,)
        self.num_steps = 0
        self.output_BO = self.model(self.x_BI) if op.phase is Phase.BWD else None
        self.optimizer = build_optimizer(op, self.params)

    def fwd(self) -> Tensor:
        with torch.no_grad():
            y_BO: Tensor = self.model(self.x_BI)
        return y_BO

    def bwd(self) -> tuple[Tensor, ...]:
        assert self.output_BO is not None
        return torch.autograd.grad(self.output_BO, self.params, self.dys[0], retain_graph=True)

    def step(self) -> None:
        for param in self.params:
            param.grad = None
        dy_BO = self.dys[self.num_steps % 2]
        self.num_steps += 1
        self.model(self.x_BI).backward(dy_BO)
        if self.optimizer is not None:
            self.optimizer.step()


def reference_grads(model: nn.Sequential, x_BI: Tensor, dy_BO: Tensor) -> list[Tensor]:
    """Return fp64 gradients of up to 64 rows of each weight, and of each bias.

    ReLU's mask and the inputs of each layer are those of the run in its own precision: a value
    near zero that is rounded across it changes the gradient by a step, which is no error.
    """
    inputs = [x_BI]
    with torch.no_grad():
        for module in model:
            inputs.append(module(inputs[-1]))
    grads: list[Tensor] = []
    grad = dy_BO.double()
    for position in reversed(range(len(model))):
        module = model[position]
        if isinstance(module, nn.ReLU):
            grad = grad * (inputs[position] > 0)
            continue
        rows = sample(grad.shape[1], grad.device)
        assert isinstance(module, nn.Linear)
        grads += [grad.sum(0), grad[:, rows].t() @ inputs[position].double()]
        grad = grad @ module.weight.detach().double()
    return grads[::-1]


def _check_grads(state: _Stack, outs: list[Tensor], refs: list[Tensor]) -> Check:
    op = state.op
    allowed = tolerance(op.dtype, length=max(op.batch, *op.widths), roundings=op.layers + 2)
    checks = []
    for out, ref in zip(outs, refs, strict=True):
        picked = out[sample(out.shape[0], out.device)] if out.dim() == 2 else out
        checks += [compare(picked, ref, allowed, "fp64, 64 rows per weight")]
        checks += [finite(out, allowed)]
    return merge(checks)


def _check_outputs(state: _Stack, y_BO: Tensor) -> Check:
    op = state.op
    rows = sample(op.batch, y_BO.device)
    ref = state.x_BI[rows].double()
    for module in state.model:
        if isinstance(module, nn.Linear):
            ref = nn.functional.linear(
                ref, module.weight.detach().double(), module.bias.detach().double()
            )
        else:
            ref = ref.relu()
    allowed = tolerance(op.dtype, length=max(op.widths), roundings=op.layers + 1)
    name = f"fp64, {len(rows)} rows"
    return merge([compare(y_BO[rows], ref, allowed, name), finite(y_BO, allowed)])


def _check_step(state: _Stack) -> Check:
    """Check the gradients of a step, and for SGD the updated weights."""
    before = [param.detach().clone() for param in state.params]
    refs = reference_grads(state.model, state.x_BI, state.dys[state.num_steps % 2])
    for param in state.params:
        param.grad = None
    state.step()
    outs = [param.grad for param in state.params if param.grad is not None]
    check = _check_grads(state, outs, refs)
    if state.op.optimizer != "sgd":
        return check
    weight_checks = [
        compare(param, old.double() - LR * out.double(), check.tolerance, "")
        for param, old, out in zip(state.params, before, outs, strict=True)
    ]
    return merge([check, *weight_checks])


def make_mlp(op: Mlp, device: torch.device) -> Call:
    state = _Stack(op, device)

    def verify() -> Check:
        match op.phase:
            case Phase.FWD:
                return _check_outputs(state, poisoned_result(state.fwd)[0])
            case Phase.BWD:
                refs = reference_grads(state.model, state.x_BI, state.dys[0])
                return _check_grads(state, list(poisoned_result(state.bwd)), refs)
            case _:
                return _check_step(state)

    run = {Phase.FWD: state.fwd, Phase.BWD: state.bwd, Phase.STEP: state.step}[op.phase]
    return Call(run=run, verify=verify, backend_run=f"nn.Linear, {TORCH_DTYPE[op.dtype]}")


MLP = Impl(make=make_mlp, unsupported=backends.tf32)


RING = 16


class _Table:
    """Weights [rows, dim], and the distribution of the indices."""

    def __init__(self, op: EmbeddingBag, device: torch.device) -> None:
        self.weight_RD = normal(op.rows, op.dim, dtype=op.dtype, device=device)
        self.weight_RD.requires_grad_(op.phase is Phase.BWD)
        self.num_rows = op.rows
        self.device = device
        self.cdf_R: Tensor | None = None
        if op.alpha:
            ranks = torch.arange(1, op.rows + 1, dtype=torch.float64, device=device)
            cdf = ranks.pow_(-op.alpha).cumsum_(0)
            self.cdf_R = cdf.div_(cdf[-1].clone())
            self.row_of_rank_R = torch.randperm(
                op.rows, device=device, generator=generator(device)
            )

    def draw(self, count: int) -> Tensor:
        """Return row numbers: uniform, or by Zipf's inverse CDF with popular rows anywhere."""
        source = generator(self.device)
        if self.cdf_R is None:
            return torch.randint(self.num_rows, (count,), device=self.device, generator=source)
        uniform = torch.rand(count, dtype=torch.float64, device=self.device, generator=source)
        ranks = torch.searchsorted(self.cdf_R, uniform).clamp_max_(self.num_rows - 1)
        return self.row_of_rank_R[ranks]


_tables: weakref.WeakValueDictionary[tuple[EmbeddingBag, str], _Table] = (
    weakref.WeakValueDictionary()
)


def _table(op: EmbeddingBag, device: torch.device) -> _Table:
    """Return the table of a case, which is shared by its operand sets."""
    key = (op, str(device))
    table = _tables.get(key)
    if table is None:
        table = _Table(op, device)
        _tables[key] = table
    return table


def extra_bytes(op: EmbeddingBag) -> int:
    """Return the size of the rings of indices and (bwd) graphs, and of Zipf's two vectors."""
    indices = op.batch * op.pooling * 8
    law = 2 * 8 * op.rows if op.alpha else 0
    graph = indices + op.batch * (16 + op.dim * op.dtype.itemsize)
    return law + RING * (indices + (graph if op.phase is Phase.BWD else 0))


class _Bags:
    """Table, offsets, the ring of indices, and the position in it."""

    def __init__(self, op: EmbeddingBag, device: torch.device) -> None:
        self.op = op
        self.turn = 0
        self.table = _table(op, device)
        self.ring = [self.table.draw(op.batch * op.pooling) for _ in range(RING)]
        self.offsets_B = torch.arange(op.batch, device=device) * op.pooling
        self.dy_BD = normal(op.batch, op.dim, dtype=op.dtype, device=device)
        self.outputs = [*map(self._bag, self.ring)] if op.phase is Phase.BWD else []

    def _bag(self, indices: Tensor) -> Tensor:
        weight = self.table.weight_RD
        return functional.embedding_bag(
            indices, weight, self.offsets_B, mode="sum", sparse=weight.requires_grad
        )

    def _next(self) -> int:
        self.turn = (self.turn + 1) % RING
        return self.turn

    def fwd(self) -> Tensor:
        return self._bag(self.ring[self._next()])

    def bwd(self) -> Tensor:
        output = self.outputs[self._next()]
        return torch.autograd.grad(output, self.table.weight_RD, self.dy_BD, retain_graph=True)[
            0
        ]


def _check_sums(bags: _Bags) -> Check:
    op = bags.op
    (y_BD,) = poisoned_result(bags.fwd)
    at = sample(op.batch, y_BD.device)
    rows = bags.ring[bags.turn].view(op.batch, op.pooling)[at]
    ref = bags.table.weight_RD.detach()[rows].double().sum(1)
    allowed = tolerance(op.dtype, length=op.pooling)
    name = f"fp64, {len(at)} bags"
    return merge([compare(y_BD[at], ref, allowed, name), finite(y_BD, allowed)])


def _check_rows(bags: _Bags) -> Check:
    """Check a sparse gradient, which lists rows with values, a row perhaps more than once."""
    op = bags.op
    grad = bags.bwd()
    grad_rows = grad._indices()[0]
    values = grad._values()
    indices = bags.ring[bags.turn]
    rows = indices[sample(indices.numel(), indices.device)]
    out = [values[grad_rows == row].double().sum(0) for row in rows]
    ref = [bags.dy_BD[(indices == row).nonzero()[:, 0] // op.pooling] for row in rows]
    refs = torch.stack([part.double().sum(0) for part in ref])
    allowed = tolerance(op.dtype, length=op.pooling)
    check = compare(torch.stack(out), refs, allowed, f"fp64, {len(rows)} rows")
    return merge([check, finite(values, allowed)])


def make_bags(op: EmbeddingBag, device: torch.device) -> Call:
    bags = _Bags(op, device)
    is_fwd = op.phase is Phase.FWD
    run: Callable[[], Tensor] = bags.fwd if is_fwd else bags.bwd

    def verify() -> Check:
        return _check_sums(bags) if is_fwd else _check_rows(bags)

    return Call(run=run, verify=verify, backend_run="functional.embedding_bag")


EMBEDDING_BAG = Impl(make=make_bags, extra_bytes=extra_bytes)
