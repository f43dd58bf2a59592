"""Kernels of llm-foundry's steps against torch, which runs the same lines of Composer."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from stepmark.efficiency.kernel_times import AttentionKernel
from stepmark.model.ops import Optimizer
from stepmark.step.workload import ComputeOp, Kernel, Workload
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.settings import PyTorch, Trainer

from .jobs import BIASED, make

TOKENS = 2 * 64
WIDTH = BIASED.hidden_size
VOCAB = BIASED.vocab_size


class Traffic(TorchDispatchMode):
    """Bytes of the tensors that each operator of torch reads and writes, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {id(each): each for each in args if isinstance(each, torch.Tensor)}
        name = func.overloadpacket.__name__.strip("_")
        moved = sum(each.numel() * each.itemsize for each in (*inputs.values(), result))
        self.num_bytes[name] = self.num_bytes.get(name, 0) + moved
        return result


def step(trainer: Trainer, attention: AttentionKernel = AttentionKernel.FLASH1) -> Workload:
    settings = PyTorch(trainer=trainer, attention_backend=attention)
    job = make(replace(BIASED, num_layers=1, seq_len=64), mbs=2, dp_shard=2)
    return rule.workload(job, settings)


def kernels(workload: Workload) -> dict[str, int]:
    """Return the bytes of kernels by name in a step of a rank."""
    sums: dict[str, int] = {}
    for op in workload.expand(0):
        if isinstance(op, ComputeOp) and isinstance(op.op, Kernel):
            sums[op.op.name] = sums.get(op.op.name, 0) + (op.op.bytes_moved or 0)
    return sums


def added(trainer: Trainer, **values: Any) -> dict[str, int]:
    """Return the bytes that the trainer's kernels move beyond those of stepmark train."""
    before = kernels(step(Trainer.STEPMARK, **values))
    after = kernels(step(trainer, **values))
    differences = {name: size - before.get(name, 0) for name, size in after.items()}
    return {name: size for name, size in differences.items() if size}


def test_the_optimizer_moves_what_composers_loop_moves() -> None:
    """decoupled_weight_decay.py of Composer 0.16.3, without weight decay."""
    weight, grad, mean, square = (torch.rand(64) for _ in range(4))
    with Traffic() as traffic:
        mean.mul_(0.9).add_(grad, alpha=0.1)
        square.mul_(0.95).addcmul_(grad, grad, value=0.05)
        denominator = (square.sqrt() / math.sqrt(0.05)).add_(1e-8)
        weight.addcdiv_(mean, denominator, value=-1e-4)
    ops = [op for op in step(Trainer.STEPMARK).expand(0) if isinstance(op, ComputeOp)]
    (fused,) = (op.op for op in ops if isinstance(op.op, Optimizer))
    own = added(Trainer.LLM_FOUNDRY)
    for name, num_bytes in traffic.num_bytes.items():
        assert own[name] / fused.num_params == num_bytes / 64
    planes = sum(own[name] for name in traffic.num_bytes) / (4 * fused.num_params)
    assert planes == 20  # seven with one kernel


@pytest.mark.parametrize("trainer", [Trainer.LLM_FOUNDRY, Trainer.LLM_FOUNDRY_BF16])
def test_metrics_move_what_two_losses_of_torch_move(trainer: Trainer) -> None:
    logits = torch.rand(TOKENS, VOCAB, dtype=torch.bfloat16)
    is_autocast = trainer is Trainer.LLM_FOUNDRY
    with Traffic() as traffic, torch.no_grad():
        wide = logits.float() if is_autocast else logits
        functional.log_softmax(wide, -1)
    expected = {
        "cast": 2 * traffic.num_bytes.get("to_copy", 0),
        "log_softmax": 2 * traffic.num_bytes["log_softmax"],
    }
    own = added(trainer)
    assert {name: own.get(name, 0) for name in expected} == expected


def test_gradients_of_biases_read_the_gradients_of_rows() -> None:
    """Of qkv, out, up and down: 3 d, d, the MLP's width and d, in 16 bits."""
    widths = 3 * WIDTH + WIDTH + BIASED.ffn_hidden_size + WIDTH
    own = added(Trainer.LLM_FOUNDRY)
    assert own["bias_gradient"] == 2 * TOKENS * widths
    assert own["concatenate"] == 2 * 2 * TOKENS * 3 * WIDTH  # of queries, keys and values


def test_rows_are_unpadded_for_flash_attention_alone() -> None:
    """Selected: read and written; scattered: zeroed, read and written."""
    plane = 2 * TOKENS * WIDTH
    own = added(Trainer.LLM_FOUNDRY, attention=AttentionKernel.FLASH)
    assert own["select"] == (3 + 1) * 2 * plane
    assert own["scatter"] == (1 + 3) * 3 * plane
    assert not added(Trainer.LLM_FOUNDRY).keys() & {"select", "scatter"}
