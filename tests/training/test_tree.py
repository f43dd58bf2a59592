"""The module tree against the real step: names, shapes, and every product and attention.

The step is captured on one rank of a fake world: no data, no other process.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from tests.training.models import assert_parameters
from torch import Tensor

from stepmark.capture.run import capture
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, Precision
from stepmark.ground.dtypes import DType
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import load_models
from stepmark.model.ops import Attention, Gemm, GroupedGemm, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.layout import Inputs, ShardLayout
from stepmark.step.tree import build
from stepmark.step.workload import ComputeOp
from stepmark.training import layers, model_parallel, parallelize
from stepmark.training.model_parallel import Meshes
from stepmark.training.model_refusals import LACKING, parts
from stepmark.training.transformer import Transformer

MODELS = load_models()
INPUTS = Inputs(mbs=1, seq_len=64)


RUN = [name for name, model in MODELS.items() if not parts(model, LACKING)]


@pytest.mark.parametrize("name", RUN)
def test_parameters_are_those_of_the_real_modules(name: str) -> None:
    assert_parameters(MODELS[name].tiny())


@pytest.mark.parametrize("name", RUN)
def test_paths_are_modules_of_the_real_step(name: str) -> None:
    model = MODELS[name].tiny()
    with torch.device("meta"):
        real = Transformer(model)
    names = {key for key, _ in real.named_modules()} | {
        key for key, _ in real.named_parameters()
    }
    for path, _, leaf in build(model, ShardLayout(), INPUTS).leaves():
        assert path in names or not leaf.is_module, path


# GPT and Llama, tied or not, with biases, norms of q and k, experts, latent attention.
CAPTURED = (
    *("gpt2-125m", "gpt-7b", "llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"),
)
Product = tuple[object, ...]


def cases(model: ModelConfig) -> Iterator[TrainCase]:
    """Every layout that `train` runs of a tiny model, over up to 16 ranks."""
    strategies: list[tuple[str, dict[str, int]]] = [("none", {}), ("ddp", {"dp_replicate": 2})]
    strategies += [("fsdp", {"dp_shard": 2})]
    strategies += [("fsdp", {"dp_shard": 4}), ("fsdp", {"dp_shard": 2, "dp_replicate": 2})]
    is_dense = not model.moe and not model.mla
    for data_parallel, data in strategies:
        is_sharded = data_parallel == "fsdp"
        pipelines = (1,) if data_parallel == "ddp" or model.tied_embeddings else (1, 2)
        degrees = itertools.product(
            (1, 2) if is_dense else (1,),
            (1, 2),
            pipelines,
            (1, 2, 4) if model.moe and is_sharded else (1,),
        )
        for tp, cp, pp, ep in degrees:
            if data.get("dp_shard", 1) * cp % ep or (tp > 1 and data_parallel == "ddp"):
                continue
            yield TrainCase(
                model=model,
                device="cpu",
                backend="gloo",
                precision=Precision.BF16,
                mbs=2,
                parallel=ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, **data),
                data_parallel=DataParallel(data_parallel),
                attention="flash",
            )


def product(op: Any, phase: Phase) -> Product:
    """Shape and type. Pairs of an attention are compared by themselves under cp."""
    if isinstance(op, Gemm):
        return "gemm", op.m, op.n, op.k, op.dtype, op.layout
    if isinstance(op, GroupedGemm):
        return "grouped", op.num_groups, op.tokens, op.n, op.k, op.dtype, phase
    # The flash kernel has one width: narrower values are padded (training/attention.py).
    heads = op.heads, op.kv_heads, op.head_dim_qk, max(op.head_dim_v, op.head_dim_qk)
    return "attention", op.batch, *heads, op.dtype, op.phase


def pairs(op: Attention) -> int:
    """Queries are the last ones of as many keys as a mask lets them see."""
    hidden = op.seq_q**2 // 2 if not op.causal else 0
    return op.pairs - op.batch * hidden


def products(ops: Iterable[tuple[Any, int]], cp: int, *, is_real: bool) -> Counter[Product]:
    """How often each runs. Of cp's two chunks of attention: how many pairs they see."""
    found: Counter[Product] = Counter()
    for one, times in ops:
        if isinstance(one, ComputeOp) and isinstance(one.op, Gemm | GroupedGemm | Attention):
            key = product(one.op, one.phase)
            if not isinstance(one.op, Attention):
                found[key] += times
            elif cp > 1:
                found[key] += times * (pairs(one.op) if is_real else one.op.pairs)
            else:
                found[*key, one.op.seq_q, one.op.seq_kv, one.op.causal] += times
    return found


def step_of(case: TrainCase, stage: int) -> Callable[[], Callable[[], object]]:
    """One pass of a stage's modules, forward and backward."""

    def build() -> Callable[[], object]:
        made = parallelize.parallelize(case, Meshes(case), torch.device("cpu"), stage)
        axes, model = case.parallel, case.model
        shape = case.mbs, model.seq_len // axes.cp
        tokens = torch.zeros(shape, dtype=torch.int64)
        hidden = (shape[0], shape[1] // axes.tp, model.hidden_size)
        x = torch.zeros(hidden, dtype=torch.bfloat16, requires_grad=True)

        def step() -> None:
            last = stage == axes.pp - 1
            out = made.call(x if stage else tokens, *((tokens,) if last else ()))
            out.backward(None if last else torch.zeros_like(out))

        return step

    return build


def on_cpu(*args: Any, **values: Any) -> Transformer:
    """Fake tensors need no meta device, from which they could not be moved."""
    with torch.device("cpu"):
        return Transformer(*args, **values)


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """As on a GPU; on a CPU experts run one by one, by numbers that a capture has not."""
    held = weight.to_local() if hasattr(weight, "to_local") else weight
    return layers.grouped(rows, held, ends)


def balanced(self: Any, rows: Tensor, ends: Tensor, compute: layers.Compute) -> Tensor:
    """As many rows come as go."""
    return compute(rows, ends[: len(ends) // self._num_ranks])


def same(case: TrainCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "multiply", grouped)
    monkeypatch.setattr(model_parallel.AllToAll, "__call__", balanced)
    monkeypatch.setattr(parallelize, "Transformer", on_cpu)
    monkeypatch.setattr(parallelize, "_materialize", lambda model, *_: model.tie())
    axes = case.parallel
    inputs = Inputs(mbs=case.mbs, seq_len=case.model.seq_len, dtype=DType.BF16)
    for stage in range(axes.pp):
        rank = stage * axes.world_size // axes.pp
        captured = capture(step_of(case, stage), axes.world_size, rank)
        root = build(case.model, ShardLayout(axes=axes, stage=stage), inputs)
        leaves = [(one, times) for _, times, leaf in root.leaves() for one in leaf.work]
        wanted = products(leaves, axes.cp, is_real=False)
        seen = ((one, 1) for one in captured.expand())
        found = products(seen, axes.cp, is_real=True)
        assert found == wanted, (case.strategy, stage)


@pytest.mark.parametrize("name", CAPTURED)
def test_products_are_those_of_the_captured_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layout; the slow test has all."""
    listed = list(cases(MODELS[name].tiny()))
    same(listed[len(name) % len(listed)], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_products_are_those_of_every_captured_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list(cases(MODELS[name].tiny()))
    assert len(listed) >= 10
    for case in listed:
        same(case, monkeypatch)
