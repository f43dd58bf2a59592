"""Moments of AdamW in 8 bits: bytes of torchao's own states, on one rank and on shards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ranks_pool import Pool
from torchao.optim import AdamW8bit

from stepmark.cases.training import DataParallel, OptimizerKind, Precision
from stepmark.ground.dtypes import DType
from stepmark.measuring.ranks import Ranks
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import ComputeOp, Kernel
from stepmark.step_memory.memory import estimate
from stepmark.training.optimizer import build_optimizers
from stepmark.training.transformer import Transformer
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.rules.pytorch.narrow_states import moment_bytes, update_bytes

from .curves import GLOBAL_BATCH, SHORT, SHORT_GPT2, case, losses
from .narrow_states_on_ranks import state_bytes_of_shards, states_of

ALONE = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cpu"))
NARROW: dict[str, Any] = {"optimizer": OptimizerKind.ADAMW8BIT}
# Shards with blocks that are not whole, and on both sides of 4,096 values.
ODD = replace(SHORT, ffn_hidden_size=226, vocab_size=510)


def step_eagerly(optimizer: torch.optim.Optimizer) -> None:
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


@pytest.mark.parametrize("numel", [4095, 4096, 4097, 4352, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moment_has_the_bytes_of_torchao(numel: int, dtype: torch.dtype) -> None:
    parameter = torch.zeros(numel, dtype=dtype, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW8bit([parameter])
    step_eagerly(optimizer)
    assert 2 * sum(moment_bytes(numel, dtype.itemsize)) == states_of([optimizer])


@pytest.mark.parametrize("model", [SHORT, SHORT_GPT2, ODD], ids=["llama", "gpt2", "odd"])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(Precision.FP32, torch.float32), (Precision.BF16, torch.bfloat16)],
)
def test_states_of_one_rank(
    model: ModelConfig, precision: Precision, dtype: torch.dtype
) -> None:
    of = replace(case(model, mbs=1, **NARROW), precision=precision)
    real = Transformer(model).to(dtype)
    if model.tied_embeddings:
        real.tie()
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = build_optimizers(of, list(real.named_parameters()))
    for optimizer in optimizers:
        step_eagerly(optimizer)
    assert estimate(of).optimizer_bytes == states_of(optimizers)


def test_states_of_shards() -> None:
    """fully_shard's on two gloo ranks; the first one, which has no padding, is estimated."""
    cases = [
        case(
            model,
            parallel=ParallelConfig(dp_shard=2),
            data_parallel=DataParallel.FSDP,
            **NARROW,
        )
        for model in (SHORT, ODD)
    ]
    with Pool(2) as pool:
        real = pool.run(state_bytes_of_shards, cases, timeout_s=300)[0]
    assert [estimate(of).optimizer_bytes for of in cases] == real


def test_states_in_8_bits_learn_nearly_the_same() -> None:
    of = case(SHORT, mbs=GLOBAL_BATCH, **NARROW)
    with torch.compiler.set_stance("force_eager"):
        narrow = losses(of, ALONE, 4)
    wide = losses(replace(of, optimizer=OptimizerKind.ADAMW), ALONE, 4)
    assert narrow == pytest.approx(wide, rel=2e-2)
    assert narrow[-1] != wide[-1]


def test_the_update_moves_codes_and_scales() -> None:
    """12 bytes of weights and gradients, and 2 moments of 1 + 1/64 bytes both ways."""
    assert update_bytes([4096], DType.FP32.itemsize) == 4096 * 12 + 4 * (4096 + 64)
    assert update_bytes([100], DType.FP32.itemsize) == 100 * 28  # as AdamW's seven planes
    of = case(SHORT, mbs=1, **NARROW)
    (kernel,) = (
        op.op
        for op in of_case(of).expand(0)
        if isinstance(op, ComputeOp) and isinstance(op.op, Kernel) and op.op.name == "adamw8bit"
    )
    sizes = [parameter.numel() for parameter in Transformer(SHORT).parameters()]
    assert kernel.bytes_moved == update_bytes(sizes, 4)
