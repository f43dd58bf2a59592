"""Jobs of published training steps: the model, layout and settings that their rows state.

A row has the columns of validation/data/published-steps.csv. What it does not state has the
default of the framework, or what this module says with its source.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from stepmark.cases.training import CompileScope, Recompute
from stepmark.efficiency.kernel_times import AttentionKernel
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.layers import MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.model.product_precision import Recipe, by_recipe
from stepmark.step.layout import model_as
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron.narrow import Fp4Format, Fp8Format, Fp8Recipe
from stepmark.workloads.rules.megatron.pipeline_layout import written
from stepmark.workloads.rules.megatron.settings import AttentionBackend, Granularity
from stepmark.workloads.rules.pytorch.settings import Trainer

DATA = Path(__file__).parent / "data"

Row = Mapping[str, str]

_DEVICES = {
    "A100-SXM-40GB": "a100-40gb-sxm",
    "A100-SXM-80GB": "a100-80gb-sxm",
    "A100-SXM": "a100-80gb-sxm",  # the row does not state its memory
    "H100": "h100-sxm",
    "H100-SXM-80GB": "h100-sxm",
    "H100-SXM-96GB-500W": "h100-sxm",
    "H800-SXM-80GB": "h800-sxm",
    "H200-SXM-141GB": "h200-sxm",
    "B200": "b200",
    "GB200": "gb200",
    "B300": "b300",
    "GB300": "gb300",
}
# Experts of a model that the package lacks: xai-org/grok-1, model.py.
_GROK = "Grok-1-314B"
_GROK_EXPERTS = MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=32768)
# Models of the package that rows name otherwise, with all or a few of their layers. The widths
# that a row states are those of the package; its `ffn` is that of dense layers or of experts.
BUILT_IN = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "GPT-OSS-120B": "gpt-oss-120b",
    "Kimi-K2": "kimi-k2",
    "DeepSeek-V3-671B": "deepseek-v3",
    "DeepSeek-V3-4L": "deepseek-v3",
    "DeepSeek-V2-4L": "deepseek-v2",
    "Llama-4-Maverick-400B": "llama-4-maverick",
    "Nemotron-H-56B": "nemotron-h-56b",
}
_RECIPES = {
    "BF16": None,
    "mixed": None,
    "FP16": None,
    "FP8": Recipe.DELAYED,
    "FP8-CS": Recipe.TENSORWISE,
    "FP8 tensorwise": Recipe.TENSORWISE,
    "FP8 rowwise": Recipe.ROWWISE,
    "FP8-MX": Recipe.MXFP8,
    "MXFP8": Recipe.MXFP8,
    "NVFP4": Recipe.NVFP4,
}
_LLAMA_LIKE = re.compile(r"(Llama|LLaMA|INTELLECT|Qwen|Grok|1B|8B|3B|80B)")
# Trained before Megatron-LM had sequence parallelism (arXiv:2205.05198).
_NO_SEQUENCE_PARALLEL = ("BLOOM", "GPT-NeoX", "BloombergGPT", "MT-NLG")
_OLD_SOURCES = ("Narayanan2021", "vTrain", "MT-NLG")
# Attention as Megatron-LM had it until it took flash-attn's in January 2023: products of all
# pairs with a fused softmax between them, and its defaults of dropout (v2.6, 2021-08,
# megatron/model/transformer.py and arguments.py; arXiv:2205.05198, figure 3 and equation 1 have
# both). vTrain's rows are Megatron-DeepSpeed's, which has the same without --use-flash-attn.
_STORED_SCORES = ("Narayanan2021", "vTrain", "MT-NLG", "Korthikanti2022")
# A hook added each weight gradient to its sum: v2.6, megatron/model/distributed.py. Its fusion
# with the product came with sequence parallelism (v3.0).
_ADDED_GRADIENTS = ("Narayanan2021", "MT-NLG")


class UnstatedError(ConfigError):
    """A row that does not state what its job needs."""


@dataclass(frozen=True, slots=True)
class PublishedJob:
    """A job by a framework's rules on a device; equal ones have equal steps."""

    framework: str
    job: Job
    settings: Any
    device: str


def read_rows(name: str | Path) -> list[dict[str, str]]:
    """Return the rows of a file of validation/data, or of another one of its columns."""
    text = (DATA / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def recipe_of(row: Row) -> Recipe | None:
    """Return the recipe of a row's narrow products; None: they are in 16 bits.

    Raises UnstatedError for a precision without a rule. FP8 is TransformerEngine's delayed
    scaling, as in NVIDIA's recipes until 2025 and in llm-foundry; torchtitan's is torchao's
    tensorwise one, and DeepSeek's scales blocks (arXiv:2412.19437, section 3.3).
    """
    name = row.get("precision") or "BF16"
    if name not in _RECIPES:
        raise UnstatedError("precision", name, f"one of {', '.join(_RECIPES)}")
    if name == "FP8" and row["gpu_type"].startswith("H800"):
        return Recipe.BLOCKWISE
    if name == "FP8" and _is_titan(row):
        return Recipe.TENSORWISE
    return _RECIPES[name]


def in_bf16(row: Row) -> dict[str, str]:
    """Return the row with products in bf16."""
    return {**row, "precision": "BF16"}


def job_of(row: Row) -> PublishedJob:
    """Return the job of a row. Raises ConfigError."""
    for name in ("gpus", "tp", "pp", "dp", "cp", "ep", "gbs"):
        if not row.get(name):
            raise UnstatedError(name, None, "stated by the source")
    framework = _framework(row)
    recipe = recipe_of(row)
    parallel = _parallel(row)
    # Megatron-LM pads the vocabulary, which then divides by tp.
    model = model_of(row)
    job = Job(
        model=model_as("megatron", model, parallel.tp) if framework == "megatron" else model,
        parallel=parallel,
        mbs=_mbs(row, parallel, framework),
        gbs=int(row["gbs"]),
        dtype=DType.FP16 if row["precision"] == "FP16" else DType.BF16,
        products=by_recipe(recipe) if recipe and framework == "fsdp" else None,
    )
    settings = {"megatron": _megatron, "fsdp": _fsdp, "deepspeed": _deepspeed}[framework](row)
    if recipe and framework == "megatron":
        settings |= _narrow(recipe)
    return PublishedJob(
        framework=framework,
        job=job,
        settings=_settings(framework, settings),
        device=_device(row),
    )


def playbook_row(row: Row) -> dict[str, str]:
    """Return a row of playbook-layouts.csv with the columns of the other files."""
    same = {"cp": "1", "ep": "1", "vpp": "", "precision": "BF16", "recompute": "none"}
    return {**row, **same, "source": "nanotron", "gbs": row["gbs"], "techniques": ""}


def _device(row: Row) -> str:
    name = row["gpu_type"]
    if name not in _DEVICES:
        raise UnstatedError("gpu_type", name, "a GPU of hardware.toml")
    return _DEVICES[name]


def _framework(row: Row) -> str:
    """Return the rules of a row: those of PyTorch for llm-foundry and torchtitan."""
    if row.get("source", "") == "llm-foundry" or _is_titan(row):
        return "fsdp"
    if "DeepSpeed ZeRO-3" in row.get("notes", ""):
        return "deepspeed"
    return "megatron"


def _is_titan(row: Row) -> bool:
    is_compiled = "compile" in row.get("techniques", "")
    is_capped = row["gpu_type"].endswith("500W")
    return "torchtitan" in row.get("source", "").lower() or is_capped or is_compiled


def _parallel(row: Row) -> ParallelConfig:
    sizes = {name: int(row[name]) for name in ("tp", "pp", "cp", "ep")}
    parallel = ParallelConfig(**sizes, dp_shard=int(row["dp"]))
    if parallel.world_size != int(row["gpus"]):
        raise UnstatedError("gpus", row["gpus"], f"tp x pp x dp x cp ({parallel.world_size})")
    return parallel


def _mbs(row: Row, parallel: ParallelConfig, framework: str) -> int:
    """Return the sequences of a micro-batch; 1 where the source does not state them."""
    if framework == "fsdp" and parallel.pp > 1:
        return 1  # torchtitan's local batch is that of a pass, in micro-batches of one
    return int(row["mbs"] or 1)


@cache
def _built_in(name: str) -> ModelConfig:
    return find_model(name)


def model_of(row: Row) -> ModelConfig:
    """Return the model of a row: a built-in one by its name, others by their shapes."""
    name = row["model"]
    layers, seq_len = int(row["layers"]), int(row["seq"])
    if name in BUILT_IN:
        return replace(_built_in(BUILT_IN[name]), num_layers=layers, seq_len=seq_len)
    hidden, heads = int(row["hidden"]), int(row["heads"])
    shapes: dict[str, Any] = {
        "name": name,
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": int(row["ffn"]),
        "num_heads": heads,
        "num_kv_heads": int(row["kv_heads"]),
        "head_dim": hidden // heads,
        "vocab_size": int(row["vocab"]),
        "seq_len": seq_len,
    }
    if name == _GROK:
        shapes |= {"ffn_hidden_size": 0, "moe": _GROK_EXPERTS}
    return ModelConfig(**shapes, **_kind(row))


def _kind(row: Row) -> dict[str, Any]:
    """Return what shapes do not tell: Llama's, Nemotron-4's, MPT's, or GPT's blocks."""
    name = row["model"]
    if _LLAMA_LIKE.match(name):
        # The playbook's 1B ties its head where embedding and head are on one stage.
        return {"tied_embeddings": name == "1B" and row["pp"] == "1"}
    gelu = {"activation": "gelu", "norm": "layernorm"}
    if name.startswith("Nemotron"):
        return gelu
    positions = {"max_positions": int(row["seq"]), "tied_embeddings": True}
    return {**gelu, **positions, "linear_bias": True}


def _megatron(row: Row) -> dict[str, Any]:
    """Return Megatron-LM's settings.

    nanotron (huggingface/nanotron 2411b022): gradients are reduced in fp32 by hooks of the last
    backward pass (optim/gradient_accumulator.py); with ZeRO 1 the weights are gathered at the
    end of the step (optim/zero.py). It all-reduces gradients even then. Its attention is
    flash-attn's, activation and product of an MLP are two kernels, and gradients are added to
    fp32 ones (models/llama.py: CoreAttention, GLUActivation, cast_to_fp32).
    """
    source = row.get("source", "")
    is_old_model = not source and row["model"].startswith(_NO_SEQUENCE_PARALLEL)
    is_old = is_old_model or source.startswith(_OLD_SOURCES)
    is_baseline = "no sequence parallel" in row.get("notes", "")
    settings: dict[str, Any] = {
        "sequence_parallel": int(row["tp"]) > 1 and not is_old and not is_baseline,
        "virtual_pipeline_model_parallel_size": int(row["vpp"] or 1),
    }
    settings["attention_backend"] = _attention(row)
    if source.startswith(_STORED_SCORES):
        settings |= {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    if source.startswith(_ADDED_GRADIENTS):
        settings["gradient_accumulation_fusion"] = False
    if row["precision"] == "FP16":  # the default of v2.6 and of core_v0.16.1
        settings["accumulate_allreduce_grads_in_fp32"] = False
    if source == "nanotron":
        settings |= {"bias_swiglu_fusion": False, "gradient_accumulation_fusion": False}
        settings["overlap_grad_reduce"] = True
        settings["use_distributed_optimizer"] = row["zero"] == "1"
        if int(row["pp"]) > 1:
            settings["pipeline_model_parallel_layout"] = written(_nanotron_split(row))
    elif not source and not row["gpu_type"].startswith("A100"):
        # NVIDIA's recipes (NeMo, Megatron-Bridge): distributed optimizer with both overlaps;
        # GPTConfig of NeMo 0175f4c, collections/llm/gpt/model/base.py, fuses the loss.
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        settings |= dict.fromkeys((*names, "cross_entropy_loss_fusion"), True)
    if "LoRA" in row.get("techniques", ""):
        # MLPerf's Llama 2 70B (mlcommons/training, llama2_70b_lora).
        settings |= {"lora_rank": 16, "lora_targets": "linear_qkv,linear_proj"}
    if int(row["ep"]) > 1:
        settings["expert_tensor_parallel_size"] = 1  # as in all of NVIDIA's recipes of experts
    if row["recompute"] in ("full", "selective"):
        settings["recompute_granularity"] = Granularity(row["recompute"])
    return settings


def _attention(row: Row) -> AttentionBackend:
    """Return the backend of attention; nanotron's (models/llama.py: CoreAttention) is flash."""
    source = row.get("source", "")
    if source.startswith(_STORED_SCORES):
        return AttentionBackend.LOCAL
    return AttentionBackend.FLASH if source == "nanotron" else AttentionBackend.AUTO


def _narrow(recipe: Recipe) -> dict[str, Any]:
    """Return Megatron-LM's settings of narrow products, in NVIDIA's recipes hybrid."""
    if recipe is Recipe.NVFP4:
        return {"fp4_format": Fp4Format.E2M1}
    if recipe is Recipe.MXFP8:
        return {"fp8_format": Fp8Format.E4M3, "fp8_recipe": Fp8Recipe.MXFP8}
    return {"fp8_format": Fp8Format.HYBRID, "fp8_recipe": Fp8Recipe(recipe.value)}


def _nanotron_split(row: Row) -> list[int]:
    """Return the layers of each stage by their computation, in which the head counts.

    A block goes to the next stage once those before exceed the share of the stages so far
    (huggingface/nanotron 2411b022, models/base.py: build_model; models/llama.py:
    get_block_compute_costs). nanotron may leave stages behind the head empty; here the head is
    on the last one.
    """
    hidden = int(row["hidden"])
    layer = 4 * hidden * hidden + 3 * int(row["ffn"]) * hidden
    costs = [0, *[layer] * int(row["layers"]), 0, int(row["vocab"]) * hidden]
    sizes = [0] * int(row["pp"])
    stage = done = 0
    for block, cost in enumerate(costs):
        sizes[stage] += 1 <= block <= int(row["layers"])
        done += cost
        if done > sum(costs) * (stage + 1) / len(sizes):
            stage += 1
    return sizes


def _fsdp(row: Row) -> dict[str, Any]:
    """Return the settings of PyTorch's rules. Composer reduces after every micro-batch.

    llm-foundry trains without dropout; its loss is flash-attn's fused one, its norms are in
    bf16 (8c8dd48, scripts/train/README.md: fused_crossentropy; low_precision_layernorm). Its
    parameters are counted with biases. torchtitan compiles blocks where it says so.
    """
    is_foundry = row.get("source", "") == "llm-foundry"
    is_compiled = "compile" in row.get("techniques", "")
    unfused = CompileScope.LAYERS if is_compiled else CompileScope.NONE
    settings: dict[str, Any] = {
        "attention_backend": _foundry_attention(row) if is_foundry else AttentionKernel.AUTO,
        "compile": CompileScope.LOSS if is_foundry else unfused,
        "recompute": {"full": Recompute.FULL, "selective": Recompute.OPS}.get(
            row["recompute"], Recompute.NONE
        ),
    }
    if int(row["vpp"] or 1) > 1:
        settings |= {"pp_schedule": PipelineSchedule.INTERLEAVED, "pp_stages": int(row["vpp"])}
    if "async TP" in row.get("techniques", ""):
        settings["async_tp"] = True
    if is_foundry:
        settings |= _foundry(row)
    return settings


def _foundry(row: Row) -> dict[str, Any]:
    """Return what llm-foundry's tables differ in: the sharding, and Composer's version.

    mixed_precision DEFAULT reduces gradients in fp32 from Composer 0.16.4 on (d745fcb1,
    2023-10-10), before in bf16: the older tables are by llm-foundry v0.3.0, which requires
    0.16.3. SHARD_GRAD_OP keeps the weights after the forward pass.
    """
    is_autocast = "autocast mode amp" in row["notes"]
    trainer = Trainer.LLM_FOUNDRY if is_autocast else Trainer.LLM_FOUNDRY_BF16
    settings: dict[str, Any] = {"trainer": trainer}
    if not _is_foundry_2024(row):
        settings["reduce_dtype"] = DType.BF16
    if "SHARD_GRAD_OP" in row["notes"]:
        settings["reshard_after_forward"] = "no"
    return settings


def _is_foundry_2024(row: Row) -> bool:
    """Return whether a row is of the table of 128 GPUs and more (5e85bd6, 2024-01)."""
    return row["gpu_type"].startswith("H100") and int(row["gpus"]) >= 128


def _foundry_attention(row: Row) -> AttentionKernel:
    """Return the kernel of llm-foundry's attention in its benchmark tables.

    scripts/train/benchmarking/submit_benchmarks.py: triton, FlashAttention's first version, by
    default (300cc5c, 2023-05; b2a43a1, 2023-10). The table of 128 GPUs and more came with
    flash-attn 2.4.2, for all but two models (5e85bd6, 2024-01, sweep.py: attn_impl).
    """
    is_triton = row["model"] in ("MPT-13b", "MPT-30b") or not _is_foundry_2024(row)
    return AttentionKernel.FLASH1 if is_triton else AttentionKernel.FLASH


def _deepspeed(_row: Row) -> dict[str, Any]:
    return {"stage": 3}


def _settings(framework: str, values: Mapping[str, Any]) -> Any:
    """Return the settings of a framework. Raises ConfigError for one that its rules lack."""
    lacking = values.keys() - RULES[framework].fields().keys()
    for name in lacking:
        raise UnstatedError(name, values[name], f"a setting of the rules of {framework}")
    return RULES[framework].make(**values)
