"""Ways to spread a small model over four ranks, and the losses that each gives."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import (
    DataParallel,
    GradSync,
    OptimizerKind,
    Precision,
    Recompute,
    Schedule,
)
from stepmark.measuring.ranks import Ranks
from stepmark.model.layers import MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.training import trainer
from stepmark.training.model_parallel import (
    RankCoordinates,
    SequenceShard,
    coordinates_of,
)
from stepmark.training.optimizer import clip_gradients

GLOBAL_BATCH, STEPS = 8, 6
FEW_STEPS = 3  # an update that is wrong shows in the second loss, the next in the third


def small(name: str, layers: int = 4) -> ModelConfig:
    return replace(find_model(name).tiny(), num_layers=layers, seq_len=16)


# Most of the time goes into DTensor's rules for each list of parameters, so that there are only
# as many layers as a case needs.
LLAMA, GPT2, MIXTRAL = small("llama-3.1-8b"), small("gpt2-125m"), small("mixtral-8x7b", 2)
SHORT, SHORT_GPT2 = small("llama-3.1-8b", 2), small("gpt2-125m", 2)
QWEN3, DEEPSEEK = small("qwen3-8b", 2), small("deepseek-v2-lite", 2)
FEW_EXPERTS = replace(MIXTRAL, moe=MoeConfig(num_experts=2, top_k=2, ffn_hidden_size=64))


def windowed(name: str) -> ModelConfig:
    """Windows and chunks are shorter than the sequence."""
    model = small(name, 2)
    layers = (replace(layer, window=min(layer.window, 4)) for layer in model.pattern)
    return replace(model, pattern=tuple(layers))


# Windows, norms on both sides and scaled embeddings; sinks and biases of experts; gates and
# states; and what blocks of other families have: shared norms, parallel parts, chunks, caps.
GEMMA, GPT_OSS = windowed("gemma-3-1b"), windowed("gpt-oss-20b")
QWEN_NEXT = small("qwen3-next-80b-a3b", 2)
PARALLEL = replace(
    SHORT,
    activation="relu2",
    norm_placement="shared",
    is_parallel=True,
    biases=("out", "mlp", "head"),
    rotary_dim=8,
    residual_multiplier=0.5,
    logit_multiplier=3.0,
    logit_softcap=5.0,
)
AFTER: dict[str, Any] = {"norm_placement": "post", "is_parallel": False}
GATED = replace(SHORT, gate="element", norm_placement="post", attention_scale=0.3)


def case(model: ModelConfig, **values: Any) -> TrainCase:
    return TrainCase(
        model=model, device="cpu", backend="gloo", precision=Precision.FP32, lr=3e-3, **values
    )


def spread(
    model: ModelConfig, data_parallel: str, values: Any = None, **axes: int
) -> TrainCase:
    parallel = ParallelConfig(**axes)
    mbs = GLOBAL_BATCH // parallel.data_ranks
    return case(
        model,
        parallel=parallel,
        data_parallel=DataParallel(data_parallel),
        mbs=mbs,
        **(values or {}),
    )


_WHOLE: dict[str, Any] = {"reshard": "no"}  # weights stay gathered after forward passes
_ACCUMULATED = {"schedule": Schedule.STEP, "grad_accum": 2, "grad_sync": GradSync.LAST}
MUON = {"optimizer": OptimizerKind.MUON}
CASES = {
    "ddp": spread(SHORT, "ddp", dp_replicate=4),
    "ddp, muon": spread(SHORT, "ddp", MUON, dp_replicate=4),
    "ddp, tied": spread(SHORT_GPT2, "ddp", dp_replicate=4),
    "ddp, accumulated": spread(SHORT, "ddp", _ACCUMULATED, dp_replicate=4),
    "fsdp": spread(LLAMA, "fsdp", dp_shard=4),
    "fsdp, accumulated": spread(SHORT, "fsdp", _ACCUMULATED, dp_shard=4),
    "fsdp, groups": spread(
        GPT2, "fsdp", {"blocks_per_group": 3, "reshard": "no", "prefetch": 2}, dp_shard=4
    ),
    "fsdp, checkpointed": spread(
        LLAMA,
        "fsdp",
        {"recompute": Recompute.BLOCKS, "recompute_blocks": (1, 2), "reshard": "2"},
        dp_shard=4,
    ),
    "hsdp": spread(SHORT, "fsdp", dp_replicate=2, dp_shard=2),
    "tp": spread(SHORT, "fsdp", tp=2, dp_shard=2),
    "tp, tied": spread(SHORT_GPT2, "fsdp", tp=2, dp_shard=2),
    "tp, qk norm": spread(QWEN3, "fsdp", tp=2, dp_shard=2),
    "pp": spread(LLAMA, "none", pp=4),
    "pp, muon": spread(LLAMA, "none", MUON, pp=4),
    "pp, accumulated": spread(LLAMA, "none", {"grad_accum": 2}, pp=4),
    "pp x fsdp": spread(SHORT, "fsdp", pp=2, dp_shard=2),
    "pp x tp": spread(SHORT, "none", pp=2, tp=2),
    "pp, interleaved": spread(
        LLAMA, "fsdp", {"pp_schedule": PipelineSchedule.INTERLEAVED}, pp=2, dp_shard=2
    ),
    "pp, four stages a rank": spread(
        small("llama-3.1-8b", 6),
        "none",
        {"pp_schedule": PipelineSchedule.INTERLEAVED, "pp_stages": 4},
        pp=2,
        tp=2,
    ),
    "pp, zb1p": spread(
        LLAMA, "fsdp", _WHOLE | {"pp_schedule": PipelineSchedule.ZB1P}, pp=2, dp_shard=2
    ),
    "pp, zb1p, four stages a rank": spread(
        small("llama-3.1-8b", 8),
        "fsdp",
        _WHOLE | {"pp_schedule": PipelineSchedule.ZB1P, "pp_stages": 4, "pp_microbatches": 4},
        pp=2,
        dp_shard=2,
    ),
    "pp, zbv": spread(
        replace(LLAMA, num_layers=8), "none", {"pp_schedule": PipelineSchedule.ZBV}, pp=4
    ),
    "pp, dualpipev": spread(
        LLAMA, "fsdp", _WHOLE | {"pp_schedule": PipelineSchedule.DUALPIPE_V}, pp=2, tp=2
    ),
    "pp, zbv, experts": spread(
        replace(MIXTRAL, num_layers=4),
        "fsdp",
        _WHOLE | {"pp_schedule": PipelineSchedule.ZBV},
        pp=2,
        ep=2,
        dp_shard=2,
    ),
    "ep": spread(MIXTRAL, "fsdp", ep=4, dp_shard=4),
    "ep x fsdp": spread(MIXTRAL, "fsdp", ep=2, dp_shard=4),
    "ep x hsdp": spread(MIXTRAL, "fsdp", ep=2, dp_replicate=2, dp_shard=2),
    "ddp, gpt-oss": spread(GPT_OSS, "ddp", dp_replicate=4),
    "fsdp, gemma": spread(GEMMA, "fsdp", dp_shard=4),
    "fsdp, fewer experts than shards": spread(FEW_EXPERTS, "fsdp", dp_shard=4),
    "ep x fsdp, fewer experts than shards": spread(FEW_EXPERTS, "fsdp", ep=2, dp_shard=4),
    "fsdp, states": spread(QWEN_NEXT, "fsdp", dp_shard=4),
    "ddp, later tokens": spread(replace(SHORT, num_mtp_layers=2), "ddp", dp_replicate=4),
    "fsdp, later tokens": spread(replace(SHORT, num_mtp_layers=2), "fsdp", dp_shard=4),
    "fsdp, later tokens, tied": spread(
        replace(SHORT, num_mtp_layers=1, tied_embeddings=True), "fsdp", dp_shard=4
    ),
    "tp, gemma": spread(GEMMA, "fsdp", tp=2, dp_shard=2),
    "tp, parallel parts": spread(PARALLEL, "fsdp", tp=2, dp_shard=2),
    "tp, norms after": spread(replace(PARALLEL, **AFTER), "fsdp", tp=2, dp_shard=2),
    "pp, states": spread(QWEN_NEXT, "fsdp", pp=2, dp_shard=2),
    "cp, gates": spread(GATED, "ddp", cp=4),
    "ep, gpt-oss": spread(GPT_OSS, "fsdp", ep=2, dp_shard=4),
    "ep, mla": spread(DEEPSEEK, "fsdp", ep=2, dp_shard=4),
    "cp": spread(SHORT, "ddp", cp=4),
    "cp, learned positions": spread(SHORT_GPT2, "ddp", cp=4),
    "cp, qk norm": spread(QWEN3, "ddp", cp=4),
    "cp x ddp, accumulated": spread(SHORT, "ddp", _ACCUMULATED, dp_replicate=2, cp=2),
    "cp x fsdp": spread(SHORT, "fsdp", dp_shard=2, cp=2),
    "cp x fsdp, tied": spread(SHORT_GPT2, "fsdp", {"reshard": "2"}, cp=4),
    "cp x hsdp": spread(SHORT, "fsdp", dp_replicate=2, cp=2),
    "cp x tp": spread(SHORT, "fsdp", cp=2, tp=2),
    "cp x pp": spread(LLAMA, "fsdp", {"pp_schedule": PipelineSchedule.INTERLEAVED}, cp=2, pp=2),
    "cp, experts": spread(MIXTRAL, "ddp", dp_replicate=2, cp=2),
    "cp x ep": spread(MIXTRAL, "fsdp", ep=2, dp_shard=2, cp=2),
    "cp x ep, mla": spread(DEEPSEEK, "fsdp", ep=2, cp=4),
}


def alone(spread_case: TrainCase) -> TrainCase:
    """The same global batch on one rank."""
    names = ("grad_accum", "schedule", "optimizer")
    values = {name: getattr(spread_case, name) for name in names}
    return case(spread_case.model, mbs=GLOBAL_BATCH, **values)


def learned(of: TrainCase, ranks: Ranks, steps: int = STEPS) -> tuple[list[float], float]:
    """The loss of each sample, mean over data ranks, and the first norm. Every rank calls it.

    The norm is that of all gradients before the first update: AdamW's steps do not tell of a
    gradient that is wrong by a factor.
    """
    made: Any = trainer.make(of, ranks.device)
    batches = _batches(of, coordinates_of(ranks.rank, of.parallel))
    mine: list[list[Tensor]] = []
    norm = math.nan
    for step in range(steps * of.grad_accum):
        tokens, labels = next(batches)
        is_last = (step + 1) % of.grad_accum == 0
        loss = made.micro_step(tokens, labels, is_last=is_last, mark=lambda _name: None)
        if loss is not None:
            mine.append([loss.clone()])
        if is_last and math.isnan(norm):
            update = made._update
            norm = float(clip_gradients(update._updated, math.inf, update._over_stages))
        if is_last:
            made.optimizer_step()
    told = [one for one in ranks.gather([float(one) for (one,) in mine]) if one]
    return [sum(column) / len(column) for column in zip(*told, strict=True)], norm


def losses(of: TrainCase, ranks: Ranks, steps: int = STEPS) -> list[float]:
    """Of each sample, mean over data ranks. Every rank calls it."""
    return learned(of, ranks, steps)[0]


def curves_of(ranks: Ranks, names: list[str]) -> dict[str, tuple[list[float], float]]:
    """Losses of few steps and the first gradient norm of these cases. Every rank calls it."""
    return {name: learned(CASES[name], ranks, FEW_STEPS) for name in names}


def _batches(of: TrainCase, place: RankCoordinates) -> Iterator[tuple[Tensor, Tensor]]:
    """The same micro-batches in every step, so that each update shows in the loss."""
    rows = slice(place.data_rank * of.mbs, (place.data_rank + 1) * of.mbs)
    share = SequenceShard(rank=place.cp, num_ranks=of.parallel.cp)
    for index in itertools.count():
        generator = torch.Generator().manual_seed(index % of.grad_accum)
        shape = (GLOBAL_BATCH, of.model.seq_len + 1)
        tokens = torch.randint(0, of.model.vocab_size, shape, generator=generator)[rows]
        mine, following = (share.of(x, dim=1) for x in (tokens[:, :-1], tokens[:, 1:]))
        yield mine.contiguous(), following.contiguous()
