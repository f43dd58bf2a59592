"""Cases whose real messages are compared with the generated workload, by number of ranks."""

from dataclasses import replace
from typing import Any

from tests.training.curves import (
    DEEPSEEK,
    FEW_EXPERTS,
    LLAMA,
    MIXTRAL,
    MUON,
    SHORT,
    SHORT_GPT2,
    spread,
)

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Fp8, GradSync, Precision, Recompute
from stepmark.ground.dtypes import DType
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import PipelineSchedule, StageSplit, TpPlan

# Rows that no number of ranks divides; gradients of more than one MiB.
ODD = replace(LLAMA, num_layers=3, ffn_hidden_size=226, vocab_size=510)
WIDE = replace(LLAMA, num_layers=2, hidden_size=256, ffn_hidden_size=512, vocab_size=1024)
DEEP = replace(LLAMA, num_layers=8)  # two chunks of four stages
AHEAD = replace(LLAMA, num_layers=5)
HEADS = replace(LLAMA, num_layers=2, num_kv_heads=4)
MOE = replace(MIXTRAL, num_layers=2)
TIED = replace(SHORT_GPT2, num_layers=1)

AMP: dict[str, Any] = {"precision": Precision.AMP}
TWICE: dict[str, Any] = {"grad_accum": 2}
LAST: dict[str, Any] = {**TWICE, "grad_sync": GradSync.LAST}
MASTER: dict[str, Any] = {"precision": Precision.MASTER}
FULL: dict[str, Any] = {"recompute": Recompute.FULL}
WHOLE_WEIGHTS: dict[str, Any] = {"reshard": "no"}
GPIPE: dict[str, Any] = {"pp_schedule": PipelineSchedule.GPIPE}
ZB1P: dict[str, Any] = {"pp_schedule": PipelineSchedule.ZB1P}
ZBV: dict[str, Any] = {"pp_schedule": PipelineSchedule.ZBV}
DUALPIPE_V: dict[str, Any] = {"pp_schedule": PipelineSchedule.DUALPIPE_V}
INTERLEAVED: dict[str, Any] = {"pp_schedule": PipelineSchedule.INTERLEAVED}
WHOLE: dict[str, Any] = {"tp_plan": TpPlan.WHOLE}
FP8: dict[str, Any] = {**AMP, "fp8": Fp8.TENSORWISE}
GATHERED: dict[str, Any] = {**FP8, "fp8_all_gather": True}
BUCKETS: dict[str, Any] = {"bucket_mb": 1, "small_first_bucket": False, "bucket_view": True}


def made(
    model: ModelConfig, data_parallel: str, *changes: dict[str, Any], **axes: int
) -> TrainCase:
    values = {name: value for one in changes for name, value in one.items()}
    return replace(spread(model, data_parallel, **axes), **values)


def parts(count: int) -> dict[str, Any]:
    return {"pp_microbatches": count}


# What these pass to torch's DistributedDataParallel beside what the trainer does.
DDP: dict[str, dict[str, Any]] = {
    "ddp as torch has it": {"init_sync": True},
    "ddp finding unused": {"init_sync": True, "find_unused_parameters": True},
}

# Frozen, with adapters of this rank.
WITH_LORA = {
    "ddp of adapters": 4,
    "fsdp of adapters": 4,
    "fsdp of adapters, once": 4,
    "hsdp of adapters": 8,
    "1f1b x fsdp of adapters": 4,
}

# The embedding and the output in the model's own group.
WITH_ROOT = ("fsdp with a root", "1f1b x fsdp with a root")

CASES: dict[int, dict[str, TrainCase]] = {
    2: {
        "ddp": made(SHORT, "ddp", dp_replicate=2),
        "ddp as torch has it": made(WIDE, "ddp", dp_replicate=2),
        "ddp finding unused": made(WIDE, "ddp", BUCKETS, dp_replicate=2),
        "ddp with muon": made(WIDE, "ddp", MUON, dp_replicate=2),
        "1f1b with muon": made(SHORT, "none", MUON, MASTER, parts(4), pp=2),
        "fsdp": made(SHORT, "fsdp", AMP, dp_shard=2),
        "fsdp without reshard": made(SHORT, "fsdp", {"reshard": "no"}, dp_shard=2),
        "tp": made(HEADS, "none", tp=2),
        "fsdp with the table once": made(
            SHORT, "fsdp", {"embedding_in_backward": False}, dp_shard=2
        ),
        "fsdp with a root": made(SHORT, "fsdp", AMP, TWICE, dp_shard=2),
        "fsdp of fp8": made(SHORT, "fsdp", FP8, dp_shard=2),
        "fsdp gathered in fp8": made(SHORT, "fsdp", GATHERED, TWICE, dp_shard=2),
        "fsdp gathered in fp8 with the head": made(
            SHORT, "fsdp", GATHERED, {"fp8_head": True}, dp_shard=2
        ),
        "fsdp with loss chunks": made(SHORT, "fsdp", AMP, {"loss_chunks": 4}, dp_shard=2),
        "ddp with loss chunks": made(WIDE, "ddp", {"loss_chunks": 2}, dp_replicate=2),
        "ddp of adapters": made(WIDE, "ddp", AMP, dp_replicate=2),
        "fsdp of adapters": made(LLAMA, "fsdp", AMP, TWICE, dp_shard=2),
        "fsdp of adapters, once": made(
            SHORT, "fsdp", FULL, {"embedding_in_backward": False}, dp_shard=2
        ),
        "tp of autocast": made(HEADS, "none", AMP, tp=2),
        "tp of fp8": made(HEADS, "none", FP8, tp=2),
        "tp of whole logits": made(HEADS, "none", TWICE, WHOLE, tp=2),
        "1f1b": made(SHORT, "none", parts(4), pp=2),
        "interleaved": made(LLAMA, "none", INTERLEAVED, parts(8), pp=2),
        "interleaved, four a rank": made(
            DEEP, "none", INTERLEAVED, {"pp_stages": 4}, parts(8), pp=2
        ),
        "gpipe": made(SHORT, "none", GPIPE, parts(4), pp=2),
        "zb1p": made(LLAMA, "none", ZB1P, parts(8), pp=2),
        "zb1p of a stage a rank": made(SHORT, "none", ZB1P, {"pp_stages": 1}, parts(8), pp=2),
        "zbv": made(LLAMA, "none", ZBV, parts(8), pp=2),
        "zbv of autocast": made(LLAMA, "none", AMP, ZBV, TWICE, parts(4), pp=2),
        "dualpipev": made(LLAMA, "none", DUALPIPE_V, parts(8), pp=2),
        "ep": made(MOE, "fsdp", ep=2, dp_shard=2),
    },
    4: {
        "ddp in buckets": made(WIDE, "ddp", AMP, TWICE, BUCKETS, dp_replicate=4),
        "ddp held": made(WIDE, "ddp", MASTER, LAST, BUCKETS, dp_replicate=4),
        "ddp tied x cp": made(SHORT_GPT2, "ddp", dp_replicate=2, cp=2),
        "fsdp padded": made(ODD, "fsdp", AMP, TWICE, dp_shard=4),
        "fsdp held": made(SHORT, "fsdp", AMP, LAST, {"reduce_dtype": DType.BF16}, dp_shard=4),
        "fsdp in groups": made(
            LLAMA, "fsdp", {"reshard": "no", "blocks_per_group": 3, "prefetch": 2}, dp_shard=4
        ),
        "fsdp reshard over 2": made(ODD, "fsdp", FULL, {"reshard": "2"}, dp_shard=4),
        "fsdp prefetch 3": made(AHEAD, "fsdp", {"prefetch": 3}, dp_shard=4),
        "hsdp": made(SHORT, "fsdp", AMP, LAST, dp_replicate=2, dp_shard=2),
        "fsdp x tp": made(HEADS, "fsdp", AMP, dp_shard=2, tp=2),
        "fsdp of fp8 x tp": made(HEADS, "fsdp", FP8, dp_shard=2, tp=2),
        "fsdp gathered in fp8 x tp": made(HEADS, "fsdp", GATHERED, dp_shard=2, tp=2),
        "hsdp of adapters": made(ODD, "fsdp", AMP, dp_replicate=2, dp_shard=2),
        "1f1b x fsdp of adapters": made(LLAMA, "fsdp", AMP, parts(4), pp=2, dp_shard=2),
        "fsdp x tp, tied": made(TIED, "fsdp", FULL, dp_shard=2, tp=2),
        "fsdp x tp of whole logits": made(HEADS, "fsdp", AMP, WHOLE, dp_shard=2, tp=2),
        "tp with masters": made(HEADS, "none", MASTER, TWICE, tp=4),
        "1f1b": made(LLAMA, "none", parts(8), pp=4),
        "1f1b of even stages": made(
            LLAMA, "none", parts(8), {"pp_split": StageSplit.EVEN}, pp=4
        ),
        "1f1b x fsdp": made(LLAMA, "fsdp", AMP, TWICE, parts(4), pp=2, dp_shard=2),
        "1f1b x fsdp with a root": made(SHORT, "fsdp", parts(4), pp=2, dp_shard=2),
        "1f1b x tp with masters": made(HEADS, "none", MASTER, TWICE, parts(4), pp=2, tp=2),
        "interleaved": made(DEEP, "none", INTERLEAVED, parts(8), pp=4),
        "interleaved x fsdp": made(LLAMA, "fsdp", INTERLEAVED, parts(4), pp=2, dp_shard=2),
        "gpipe x fsdp": made(
            LLAMA, "fsdp", GPIPE, {"reshard": "no"}, parts(4), pp=2, dp_shard=2
        ),
        "zb1p": made(DEEP, "none", ZB1P, parts(8), pp=4),
        "zb1p x fsdp": made(
            LLAMA, "fsdp", AMP, WHOLE_WEIGHTS, ZB1P, parts(4), pp=2, dp_shard=2
        ),
        "zb1p x tp with masters": made(
            HEADS, "none", MASTER, ZB1P, {"pp_stages": 1}, parts(4), pp=2, tp=2
        ),
        "zbv": made(DEEP, "none", ZBV, parts(8), pp=4),
        "zbv x fsdp": made(
            LLAMA, "fsdp", AMP, WHOLE_WEIGHTS, ZBV, TWICE, parts(4), pp=2, dp_shard=2
        ),
        "zbv x ep": made(
            replace(MIXTRAL, num_layers=4),
            "fsdp",
            AMP,
            WHOLE_WEIGHTS,
            ZBV,
            parts(4),
            pp=2,
            ep=2,
            dp_shard=2,
        ),
        "zbv x tp": made(replace(LLAMA, num_kv_heads=4), "none", ZBV, parts(4), pp=2, tp=2),
        "zbv x cp": made(LLAMA, "fsdp", AMP, WHOLE_WEIGHTS, ZBV, parts(4), pp=2, cp=2),
        "dualpipev": made(DEEP, "none", DUALPIPE_V, parts(8), pp=4),
        "dualpipev x fsdp": made(
            LLAMA, "fsdp", AMP, WHOLE_WEIGHTS, DUALPIPE_V, parts(4), pp=2, dp_shard=2
        ),
        "ep x fsdp": made(MOE, "fsdp", AMP, ep=2, dp_shard=4),
        "fsdp of few experts": made(FEW_EXPERTS, "fsdp", AMP, LAST, dp_shard=4),
        "ep x fsdp of few experts": made(FEW_EXPERTS, "fsdp", AMP, ep=2, dp_shard=4),
        "ep x fsdp, latent attention": made(DEEPSEEK, "fsdp", FULL, ep=2, dp_shard=4),
        "cp x fsdp": made(SHORT, "fsdp", dp_shard=2, cp=2),
    },
}
