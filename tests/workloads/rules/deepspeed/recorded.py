"""What a real DeepSpeed sent (tests/data/deepspeed), and the same jobs asked of the rules."""

import json
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from stepmark.ground.dtypes import DType
from stepmark.model.layers import MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import CommOp, Workload
from stepmark.workloads.architecture import AnyJob, Batch, OwnJob
from stepmark.workloads.job import Job
from stepmark.workloads.published import gpt_j
from stepmark.workloads.rules.deepspeed.rule import workload
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed, Switch

DATA = Path(__file__).parents[3] / "data" / "deepspeed"
SEQ_LEN = 16
_MESSAGES = json.loads((DATA / "messages.json").read_text())
CASES: dict[str, dict[str, Any]] = json.loads((DATA / "cases.json").read_text())

_model = partial(
    ModelConfig,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=224,
    vocab_size=515,
    seq_len=SEQ_LEN,
)
_experts = partial(MoeConfig, num_experts=4, top_k=2)
_LATENT = MlaConfig(
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)
# As MODELS of validation/deepspeed_messages.py has them.
MODELS = {
    "llama": _model(name="llama"),
    "qwen2-tied": _model(name="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": _model(name="qwen3", qk_norm=True),
    "gpt2": _model(
        name="gpt2",
        num_kv_heads=4,
        vocab_size=512,
        activation="gelu",
        norm="layernorm",
        tied_embeddings=True,
        linear_bias=True,
        max_positions=32,
    ),
    "mixtral": _model(name="mixtral", ffn_hidden_size=0, moe=_experts(ffn_hidden_size=224)),
    "qwen3-moe": _model(
        name="qwen3-moe", ffn_hidden_size=0, qk_norm=True, moe=_experts(ffn_hidden_size=32)
    ),
    "deepseek-v3": _model(
        name="deepseek-v3",
        num_kv_heads=4,
        head_dim=32,
        mla=_LATENT,
        moe=_experts(
            ffn_hidden_size=32,
            num_shared_experts=1,
            shared_ffn_hidden_size=32,
            first_dense_layers=1,
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One case: what was sent at the start, and in a steady step."""

    setup: list[str]
    step: list[str]


def recorded(name: str) -> Recorded:
    found = _MESSAGES["steps"][name]
    return Recorded(setup=_MESSAGES["setups"][found["setup"]], step=found["step"])


def made(name: str) -> Workload:
    """The workload of a case."""
    case = CASES[name]
    return workload(job_of(case), settings_of(case))


def job_of(case: dict[str, Any]) -> AnyJob:
    spread: dict[str, Any] = {
        "parallel": ParallelConfig(dp_shard=case["ranks"]),
        "gbs": case["accumulation"] * case["ranks"],
        "dtype": DType(case["dtype"]),
    }
    if case["model"] != "gptj":
        return Job(model=MODELS[case["model"]], **spread)
    batch = Batch(mbs=1, seq_len=SEQ_LEN, dtype=spread["dtype"])
    tiny = gpt_j(
        batch, name="gptj", hidden=64, heads=4, rotated=8, ffn=224, vocab=515, layers=3
    )
    return OwnJob(architecture=tiny, seq_len=SEQ_LEN, **spread)


def settings_of(case: dict[str, Any]) -> DeepSpeed:
    found: dict[str, Any] = dict(case["zero"])
    if "overlap_comm" in found:
        found["overlap_comm"] = Switch(str(found["overlap_comm"]).lower())
    more = case.get("more", {})
    if "data_types" in more:
        found |= more["data_types"]
    if "bf16" in more:
        found["check_grad_overflow"] = more["bf16"]["check_grad_overflow"]
    for name in ("communication_data_type", "gradient_clipping"):
        if name in more:
            found[name] = more[name]
    return DeepSpeed(**found, zero_init=case.get("zero_init", False))


def said(workload: Workload, *, setup: bool = False) -> list[str]:
    """A workload's messages as the recipe writes them."""
    group = workload.groups["dp"]
    last = workload.num_microbatches - 1
    lines = []
    for op in workload.expand(setup=setup):
        if not isinstance(op, CommOp):
            continue
        at = last if op.microbatch is None else op.microbatch
        phase = "optim" if op.phase is Phase.OPTIM else f"{op.phase}.{at}"
        size = f"{op.dtype} {op.call_bytes()} {op.message_bytes(group)}"
        size = " 0 0" if op.collective == "barrier" else size  # of no type
        root = "" if op.root is None else f" root={op.root}"
        lines.append(f"{'' if setup else phase + ' '}{op.collective} {size}{root}")
    return counted(lines)


def counted(lines: list[str]) -> list[str]:
    """Equal neighbours as one, "x3"."""
    found = [(line, len(list(same))) for line, same in groupby(lines)]
    return [line if times == 1 else f"{line} x{times}" for line, times in found]
