"""One step of a fused torch optimizer over one flat parameter."""

import math

import torch
from torch import Tensor

from stepmark.bench.operators.call import Call, Impl, normal
from stepmark.bench.verify import compare, finite, merge, sample, tolerance
from stepmark.core.ops import Optimizer, backends
from stepmark.core.record import Check

LR = 0.1  # so large that one step shows in bf16
BETA1, BETA2, EPS, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01
NUM_CHECKED = 4096


def build(kind: str, params: list[Tensor], device: torch.device) -> torch.optim.Optimizer:
    """`capturable` keeps the step count on the device, for CUDA graphs."""
    if kind == "sgd":
        return torch.optim.SGD(params, lr=LR, fused=True)
    family = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return family(
        params,
        lr=LR,
        betas=(BETA1, BETA2),
        eps=EPS,
        weight_decay=WEIGHT_DECAY if kind == "adamw" else 0.0,
        fused=True,
        capturable=device.type == "cuda",
    )


def expected(kind: str, step: int, p: Tensor, g: Tensor, *moments: Tensor) -> list[Tensor]:
    """The update rules as in the papers (Kingma and Ba; Loshchilov and Hutter), in fp64."""
    if kind == "sgd":
        return [p - LR * g]
    m = BETA1 * moments[0] + (1 - BETA1) * g
    v = BETA2 * moments[1] + (1 - BETA2) * g * g
    decayed = p * (1 - LR * WEIGHT_DECAY) if kind == "adamw" else p
    root = v.sqrt() / math.sqrt(1 - BETA2**step) + EPS
    return [decayed - LR / (1 - BETA1**step) * m / root, m, v]


def make(op: Optimizer, device: torch.device) -> Call:
    p = normal(op.num_params, dtype=op.dtype, device=device).requires_grad_()
    p.grad = normal(op.num_params, dtype=op.dtype, device=device)
    optimizer = build(op.kind, [p], device)
    optimizer.step()  # allocates the moments

    def run() -> None:
        optimizer.step()

    def verify() -> Check:
        """The update is in place, so the state is set anew instead of poisoned."""
        state = optimizer.state[p]
        values = [p.detach()]
        values += [state[name] for name in ("exp_avg", "exp_avg_sq") if name in state]
        for value in values:
            value.copy_(normal(op.num_params, dtype=op.dtype, device=device))
        values[-1].abs_().add_(0.5)  # a second moment is positive; a parameter may be
        at = sample(op.num_params, device, NUM_CHECKED)
        before = [value[at].double() for value in values]
        optimizer.step()
        assert p.grad is not None
        step = int(state["step"]) if "step" in state else 0
        refs = expected(op.kind, step, before[0], p.grad[at].double(), *before[1:])
        allowed = tolerance(op.dtype, roundings=4)
        name = f"fp64, {len(at)} parameters"
        checks = [
            compare(v[at], ref, allowed, name) for v, ref in zip(values, refs, strict=True)
        ]
        return merge([*checks, finite(p, allowed)])

    return Call(run=run, verify=verify, backend_run=f"torch {op.kind}, fused")


TORCH = Impl(make=make, unsupported=backends.optimizer)
