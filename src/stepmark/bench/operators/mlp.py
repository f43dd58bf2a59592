"""PARAM's stack of linear layers with ReLU between; no softmax and no loss.

The gradient of the output is fixed random data whose sign changes with every step, so that
weights do not run away over thousands of steps.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from stepmark.bench.operators.call import TORCH_DTYPE, Call, Impl, normal, set_matmul_precision
from stepmark.bench.verify import compare, finite, merge, poisoned_result, sample, tolerance
from stepmark.core.ops import Mlp, Phase, backends
from stepmark.core.record import Check

LR = 1e-3
ADAGRAD_EPS = 1e-6  # torch's 1e-10 is zero in fp16, and the first update 0 / 0


def stack(op: Mlp, device: torch.device) -> nn.Sequential:
    """linear, ReLU, linear, ..., linear; PARAM's initialization, weights and biases normal."""
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
    """The stack with its data: what each phase runs."""

    def __init__(self, op: Mlp, device: torch.device) -> None:
        set_matmul_precision(op.dtype)
        self.op = op
        self.model = stack(op, device)
        self.params = list(self.model.parameters())
        self.x_BI = normal(op.batch, op.input, dtype=op.dtype, device=device)
        dy_BO = normal(op.batch, op.output, dtype=op.dtype, device=device) / op.batch**0.5
        self.dys = (dy_BO, -dy_BO) if op.phase is Phase.STEP else (dy_BO,)
        self.num_steps = 0
        self.kept_BO = self.model(self.x_BI) if op.phase is Phase.BWD else None
        self.optimizer = build_optimizer(op, self.params)

    def fwd(self) -> Tensor:
        with torch.no_grad():
            y_BO: Tensor = self.model(self.x_BI)
        return y_BO

    def bwd(self) -> tuple[Tensor, ...]:
        assert self.kept_BO is not None
        return torch.autograd.grad(self.kept_BO, self.params, self.dys[0], retain_graph=True)

    def step(self) -> None:
        for param in self.params:
            param.grad = None
        dy_BO = self.dys[self.num_steps % 2]
        self.num_steps += 1
        self.model(self.x_BI).backward(dy_BO)
        if self.optimizer is not None:
            self.optimizer.step()


def reference_grads(model: nn.Sequential, x_BI: Tensor, dy_BO: Tensor) -> list[Tensor]:
    """fp64 gradients of up to 64 rows of each weight, and of each bias.

    ReLU's mask and the inputs of each layer are those of the run in its own precision: a value
    near zero that rounds to the other side changes the gradient by a step, which is no error.
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


def _check_fwd(state: _Stack, y_BO: Tensor) -> Check:
    op = state.op
    rows = sample(op.batch, y_BO.device)
    ref = state.x_BI[rows].double()
    for module in state.model:
        if isinstance(module, nn.Linear):
            weight, bias = module.weight.detach(), module.bias.detach()
            ref = nn.functional.linear(ref, weight.double(), bias.double())
        else:
            ref = ref.relu()
    allowed = tolerance(op.dtype, length=max(op.widths), roundings=op.layers + 1)
    name = f"fp64, {len(rows)} rows"
    return merge([compare(y_BO[rows], ref, allowed, name), finite(y_BO, allowed)])


def _check_step(state: _Stack) -> Check:
    """The gradients a step leaves, and for SGD the weights it makes of them."""
    before = [param.detach().clone() for param in state.params]
    refs = reference_grads(state.model, state.x_BI, state.dys[state.num_steps % 2])
    for param in state.params:
        param.grad = None
    state.step()
    outs = [param.grad for param in state.params if param.grad is not None]
    check = _check_grads(state, outs, refs)
    if state.op.optimizer != "sgd":
        return check
    moved = [
        compare(param, old.double() - LR * out.double(), check.tolerance, "")
        for param, old, out in zip(state.params, before, outs, strict=True)
    ]
    return merge([check, *moved])


def make(op: Mlp, device: torch.device) -> Call:
    state = _Stack(op, device)

    def verify() -> Check:
        match op.phase:
            case Phase.FWD:
                return _check_fwd(state, poisoned_result(state.fwd)[0])
            case Phase.BWD:
                refs = reference_grads(state.model, state.x_BI, state.dys[0])
                return _check_grads(state, list(poisoned_result(state.bwd)), refs)
            case _:
                return _check_step(state)

    run = {Phase.FWD: state.fwd, Phase.BWD: state.bwd, Phase.STEP: state.step}[op.phase]
    return Call(run=run, verify=verify, backend_run=f"nn.Linear, {TORCH_DTYPE[op.dtype]}")


TORCH = Impl(make=make, unsupported=backends.tf32)
