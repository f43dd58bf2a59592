"""torch.optim.Muon of the blocks' matrices: what a step learns, runs and keeps."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepmark.capture.compute import computation
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, OptimizerKind, Precision
from stepmark.ground.errors import ConfigError
from stepmark.measuring.ranks import Ranks
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Gemm, Optimizer, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import ComputeOp, Kernel
from stepmark.step_memory.memory import estimate
from stepmark.training.model_parallel import coordinates_of
from stepmark.training.optimizer import build_optimizers, clip_gradients
from stepmark.training.transformer import Transformer, init_weights, tie
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.case import job_of, of_case, settings_of

from .curves import GLOBAL_BATCH, MIXTRAL, SHORT, SHORT_GPT2, _batches, case, losses

ALONE = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cpu"))
MUON: dict[str, Any] = {"optimizer": OptimizerKind.MUON}
MODELS = pytest.mark.parametrize("model", [SHORT, SHORT_GPT2], ids=["llama", "gpt2"])
ENDS = ("embedding.tokens.weight", "embedding.positions.weight", "output.head.weight")
STEPS = 4
BF16 = 2  # bytes: of a norm, which is written and read
SCALARS = 1000  # bytes: less than any matrix has


def plain_losses(of: TrainCase) -> list[float]:
    """A loop with nothing of the trainer but its model, its data and clipping."""
    model = Transformer(of.model)
    tie(model)
    init_weights(model, of.seed)
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and name not in ENDS]
    others = [p for name, p in named.items() if p.ndim != 2 or name in ENDS]
    muon = torch.optim.Muon(
        matrices, lr=of.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=of.lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    batches = _batches(of, coordinates_of(0, of.parallel))
    for tokens, labels in itertools.islice(batches, STEPS):
        loss = model(tokens, labels)
        loss.backward()
        clip_gradients(named.values(), of.clip)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@MODELS
def test_losses_are_those_of_a_plain_loop(model: ModelConfig) -> None:
    of = case(model, mbs=GLOBAL_BATCH, **MUON)
    plain = plain_losses(of)
    assert losses(of, ALONE, STEPS) == pytest.approx(plain, rel=1e-5)
    adamw = losses(replace(of, optimizer=OptimizerKind.ADAMW), ALONE, STEPS)
    assert adamw[-1] != pytest.approx(plain[-1], rel=1e-3)


class Computations(TorchDispatchMode):
    """What each call at torch's dispatcher computes, as a capture has it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if computed := computation(func, args, kwargs, result, backward=False):
            self.ops.append(computed[0])
        return result


def with_gradients(of: TrainCase, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    model = Transformer(of.model).to(dtype)
    tie(model)
    named = list(model.named_parameters())
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    return named


PRECISIONS = pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.FP32, torch.float32),
        (Precision.BF16, torch.bfloat16),
        (Precision.MASTER, torch.float32),
    ],
)


@MODELS
@PRECISIONS
def test_the_update_is_what_torch_runs(
    model: ModelConfig, precision: Precision, dtype: torch.dtype
) -> None:
    """Products and kernels one by one, but for those of scalars and what addmm copies."""
    of = replace(case(model, mbs=1, **MUON), precision=precision, clip=0.0)
    workload = of_case(of)
    generated = [
        op.op
        for op in workload.expand(0)
        if isinstance(op, ComputeOp) and op.phase is Phase.OPTIM
    ]
    optimizers = build_optimizers(of, with_gradients(of, dtype))
    for optimizer in optimizers:
        optimizer.step()  # allocates the states
    with Computations() as real:
        for optimizer in optimizers:
            optimizer.step()

    def products(ops: list[Any]) -> list[tuple[int, int, int, str]]:
        return [(op.m, op.n, op.k, op.dtype) for op in ops if isinstance(op, Gemm)]

    def moved(ops: list[Any]) -> list[int]:
        return [op.bytes_moved for op in ops if isinstance(op, Kernel) and op.name != "copy"]

    assert products(generated) == products(real.ops)
    of_matrices = [size for size in moved(real.ops) if size > SCALARS]
    assert of_matrices == pytest.approx(moved(generated), abs=BF16)
    adam = [op.num_params for op in generated if isinstance(op, Optimizer)]
    assert adam == [op.num_params for op in real.ops if isinstance(op, Optimizer)]


@MODELS
@PRECISIONS
def test_states_are_those_of_torch(
    model: ModelConfig, precision: Precision, dtype: torch.dtype
) -> None:
    of = replace(case(model, mbs=1, **MUON), precision=precision)
    optimizers = build_optimizers(of, with_gradients(of, dtype))
    for optimizer in optimizers:
        optimizer.step()
    real = sum(
        state.nbytes
        for optimizer in optimizers
        for states in optimizer.state.values()
        for state in states.values()
        if state.ndim
    )
    assert estimate(of).optimizer_bytes == real


@pytest.mark.parametrize(
    ("model", "axes", "data_parallel", "reason"),
    [
        (SHORT, {"dp_shard": 2}, DataParallel.FSDP, "with fsdp or tp"),
        (SHORT, {"tp": 2}, DataParallel.NONE, "with fsdp or tp"),
        (MIXTRAL, {}, DataParallel.NONE, "three dimensions"),
    ],
)
def test_other_layouts_are_refused(
    model: ModelConfig, axes: dict[str, int], data_parallel: DataParallel, reason: str
) -> None:
    of = case(model, parallel=ParallelConfig(**axes), data_parallel=data_parallel, **MUON)
    with pytest.raises(ConfigError, match=reason):
        rule.workload(job_of(of), settings_of(of))
