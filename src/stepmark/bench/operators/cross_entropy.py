"""Mean token loss of logits [T, V], in fp32; in slices of the tokens when op.chunks > 1."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from stepmark.bench.operators.call import Call, generator, normal
from stepmark.bench.operators.elementwise import compiled, with_compile
from stepmark.bench.verify import compare, finite, merge, poisoned_result, tolerance
from stepmark.core.ops import CrossEntropy, Phase
from stepmark.core.record import Check

LOSS_SCALE = 256.0  # times tokens: keeps 1 / vocab a normal number in fp16
_CHUNK = 2**24


def mean_loss(logits_TV: Tensor, targets_T: Tensor, chunks: int) -> Tensor:
    tokens = logits_TV.shape[0]
    size = math.ceil(tokens / chunks)
    total = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
    pairs = zip(logits_TV.split(size), targets_T.split(size), strict=True)
    for logits, targets in pairs:
        wide = logits.double() if logits.dtype is torch.float64 else logits.float()
        total = total + functional.cross_entropy(wide, targets, reduction="sum")
    return total / tokens


def make(op: CrossEntropy, device: torch.device, *, is_compiled: bool = False) -> Call:
    is_bwd = op.phase is Phase.BWD
    logits_TV = normal(op.tokens, op.vocab, dtype=op.dtype, device=device)
    logits_TV.requires_grad_(is_bwd)
    targets_T = torch.randint(
        op.vocab, (op.tokens,), device=device, generator=generator(device)
    )
    function = compiled(mean_loss, op) if is_compiled else mean_loss

    def forward() -> Tensor:
        loss = function(logits_TV, targets_T, op.chunks)
        assert isinstance(loss, Tensor)
        return loss

    kept = forward() if is_bwd else None
    scale = torch.full((), LOSS_SCALE * op.tokens, device=device)

    def backward() -> tuple[Tensor, ...]:
        assert kept is not None
        return torch.autograd.grad(kept, logits_TV, scale.to(kept.dtype), retain_graph=True)

    def verify() -> Check:
        (result,) = poisoned_result(backward if is_bwd else forward)
        check = _check_grad if is_bwd else _check_loss
        return check(op, logits_TV.detach(), targets_T, result)

    name = "torch.compile" if is_compiled else "torch eager"
    run = backward if is_bwd else forward
    return Call(run=run, verify=verify, backend_run=f"{name}, {op.chunks} chunks")


def _check_loss(op: CrossEntropy, logits: Tensor, targets: Tensor, loss: Tensor) -> Check:
    step = max(1, _CHUNK // op.vocab)
    pairs = zip(logits.split(step), targets.split(step), strict=True)
    total = sum(functional.cross_entropy(x.double(), t, reduction="sum") for x, t in pairs)
    assert isinstance(total, Tensor)
    # The loss is fp32 whatever the logits are; a sum over classes, then one over tokens.
    allowed = tolerance(op.dtype, length=op.vocab) if op.dtype.itemsize >= 4 else 1e-5
    return compare(loss, total / op.tokens, allowed, "fp64, all tokens")


def _check_grad(op: CrossEntropy, logits: Tensor, targets: Tensor, grad: Tensor) -> Check:
    """softmax - onehot: the entries at the targets and the many small others apart."""
    step = max(1, _CHUNK // op.vocab)
    allowed = tolerance(op.dtype, length=op.vocab, roundings=2)
    checks = []
    for start in range(0, op.tokens, step):
        part = slice(start, start + step)
        ref = logits[part].double().softmax(-1) * LOSS_SCALE
        out, at = grad[part].double(), targets[part].unsqueeze(1)
        hit = ref.gather(1, at) - LOSS_SCALE
        checks.append(compare(out.gather(1, at), hit, allowed, "fp64, all elements"))
        rest = compare(out.scatter(1, at, 0.0), ref.scatter(1, at, 0.0), allowed, "")
        checks.append(rest)
    return merge([*checks, finite(grad, allowed)])


BACKENDS = with_compile(make)
