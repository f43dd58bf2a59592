"""Megatron-LM's arguments: a shell script's line, or YAML with MODEL_ARGS or nested sections.

megatron_entries.py has what each is; here those that mean something together are joined.
"""

import re
import shlex
from collections.abc import Mapping

from stepmark.framework_files import vocabulary
from stepmark.framework_files.layer_frequency import dense_layers
from stepmark.framework_files.megatron_entries import ENTRIES
from stepmark.framework_files.table import OFF, ON, Entry, Keys, Table
from stepmark.ground.errors import ConfigError

_MLA = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
_MLA_DEFAULTS = ("0", "32", "128", "64", "128")
_PER_NODE = 8
# With spaces.
_LISTS = ("recompute-modules", "offload-modules", "hierarchical-context-parallel-sizes")
_WITHOUT_TABLE = ("mrope", "none")  # of positions, as rotary ones

# Arguments that set another one, in the order of validate_args: the later one wins.
_SETS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("fp16", "true"): ("dtype", "fp16"),
    ("bf16", "true"): ("dtype", "bf16"),
    # Of earlier versions.
    ("checkpoint-activations", "true"): ("recompute-granularity", "full"),
    ("recompute-activations", "true"): ("recompute-granularity", "selective"),
    ("use-rotary-position-embeddings", "true"): ("position-embedding-type", "rope"),
    ("position-embedding-type", "rope"): ("max-position-embeddings", "0"),
    ("position-embedding-type", "yarn"): ("max-position-embeddings", "0"),
}
# Keys that `prepare` joins into others.
VPP = "num-layers-per-virtual-pipeline-stage"
JOINED = (
    *(name for name, _ in _SETS if name != "position-embedding-type"),
    *("group-query-attention", "multi-latent-attention", "nnodes", "nproc_per_node"),
    *(VPP, "padded-vocab-size"),
)


# Arguments with a value on which nothing depends, and which a script often computes.
IDLE = frozenset(
    f"--{name}"
    for name in (
        *("save", "load", "data-path", "data-cache-path", "per-split-data-args-path"),
        *("train-data-path", "valid-data-path", "test-data-path", "data-args-path"),
        *("tokenizer-model", "vocab-file", "merge-file", "pretrained-checkpoint"),
        *("tensorboard-dir", "wandb-project", "wandb-entity", "wandb-exp-name"),
        *("wandb-save-dir", "non-persistent-global-ckpt-dir", "config-logger-dir"),
        *("num-workers", "seed", "exit-duration-in-mins"),
    )
)


# Programs of other models, or that do not train.
_OTHER_PROGRAM = re.compile(
    r"(^|_)(bert|t5|ict|biencoder|realm|retro|vision|vlm|mamba|hybrid|mimo|dino|swin|inference|"
    r"server|generat\w*|quantize|prune|export|convert\w*|validate|mmlu)(_|$)"
)


def check_program(name: str) -> None:
    """Refuse a program that does not train a GPT. Raises ConfigError."""
    if _OTHER_PROGRAM.search(name):
        allowed = "one that trains a GPT, as pretrain_gpt does: this family of models is not "
        raise ConfigError("program", name, allowed + "modelled, or nothing is trained")


def known_names() -> set[str]:
    """Return the names of all arguments that are known, with their dashes."""
    return {f"--{name}" for name in (*TABLE.entries, *JOINED)}


def keys_of_words(words: list[str], where: str) -> Keys:
    """Return the arguments of a command line. Raises ConfigError for a word that is none."""
    keys: Keys = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, is_, value = word[2:].partition("=")
            keys[name] = value.strip("'\"") if is_ else ""
        elif not name:
            raise ConfigError(where, word, "an argument of Megatron-LM, which begins with --")
        else:
            keys[name] = f"{keys[name]} {word}".strip()
    for name, value in keys.items():
        if not value and takes_value(name):
            allowed = "followed by a value: a variable behind it may be empty"
            raise ConfigError(f"{where}: {name}", "without a value", allowed)
    return {name: value or "true" for name, value in keys.items()}


def takes_value(name: str) -> bool:
    """Return whether an argument that is an option of ours has a value."""
    entry = TABLE.entries.get(name, Entry())
    return name not in JOINED and bool(entry.option) and entry.values not in (ON, OFF)


def replaced(keys: Keys) -> Keys:
    """Return the arguments with those that others set in the place of these."""
    keys = dict(keys)
    for (name, value), (other, text) in _SETS.items():
        if keys.get(name) == value:
            del keys[name]
            keys[other] = text
    return keys


def _prepare(keys: Keys) -> Keys:
    """Join arguments that mean one option, as validate_args of Megatron-LM does."""
    keys = {name: value for name, value in keys.items() if not _is_absent(name, value)}
    if "bf16" in keys and "fp16" in keys:
        raise ConfigError("fp16", keys["fp16"], "left out with --bf16")
    keys = replaced(keys)
    keys.setdefault("dtype", "fp32")
    if nproc := keys.pop("nproc_per_node", ""):
        count = keys.pop("nnodes", "1") or "1"
        if nproc.isdecimal() and count.isdecimal():
            keys["world-size"] = str(int(nproc) * int(count))
    keys.pop("nnodes", None)
    if keys.get("clip-grad") in ("0", "0.0"):
        keys["no-clip-grad"] = "true"
    for name in _LISTS:
        if name in keys:
            keys[name] = ",".join(keys[name].strip("[]").replace(",", " ").split())
    backend = keys.get("moe-flex-dispatcher-backend", "deepep")
    if backend != "deepep":
        del keys["moe-flex-dispatcher-backend"]
        if keys.get("moe-token-dispatcher-type") == "flex":
            keys["moe-token-dispatcher-type"] = "alltoall"
            keys["flex-dispatcher-of-another-backend"] = backend
    if keys.get("moe-router-load-balancing-type") == "sinkhorn":
        keys["moe-router-load-balancing-type"] = "none"
        keys["sinkhorn"] = "true"
    if keys.get("transformer-impl") == "local" or keys.get("spec") == "local":
        keys.pop("spec", None)
        keys.pop("transformer-impl", None)
        keys["attention-backend"] = "local"
    _prepare_pipeline(keys)
    if "num-layers" in keys:
        _prepare_model(keys)
    return keys


def _is_absent(name: str, value: str) -> bool:
    """Return whether a switch of a YAML file is off, which is as if it were not there."""
    is_switch = name in JOINED or TABLE.entries.get(name, Entry()).values in (ON, OFF)
    return value in ("false", "null") and (is_switch or value == "null")


def _prepare_pipeline(keys: Keys) -> None:
    layers = keys.pop(VPP, "")
    if layers:
        pp = keys.get("pipeline-model-parallel-size", "1")
        total = keys.get("num-layers", "")
        if not all(map(str.isdecimal, (layers, pp, total))) or not int(layers) * int(pp):
            raise ConfigError(VPP, layers, "only with --num-layers")
        chunks, rest = divmod(int(total), int(pp) * int(layers))
        if rest:
            allowed = f"a number that divides the {total} layers by {pp} stages"
            raise ConfigError(VPP, layers, allowed)
        keys.setdefault("num-virtual-stages-per-pipeline-rank", str(chunks))


def _prepare_model(keys: Keys) -> None:
    is_mla = bool(keys.pop("multi-latent-attention", ""))
    _prepare_attention(keys, is_mla=is_mla)
    if (is_mla or "num-experts" in keys) and "disable-bias-linear" not in keys:
        keys["disable-bias-linear"] = "true"
        keys["add-bias-linear"] = "true"
    if keys.get("quick-geglu"):
        keys["swiglu"] = "true"
    if "moe-layer-freq" in keys:
        keys["moe-layer-freq"] = dense_layers(keys["moe-layer-freq"])
    if "num-experts" in keys:
        if "moe-grouped-gemm" not in keys:
            keys["no-moe-grouped-gemm"] = "true"
        keys.setdefault("moe-router-topk", "2")
        keys.setdefault("moe-token-dispatcher-type", "allgather")
    else:
        keys.pop("moe-router-topk", None)
    vocabulary.prepare(keys)


def _prepare_attention(keys: Keys, *, is_mla: bool) -> None:
    if not keys.pop("group-query-attention", "") or is_mla:
        keys.pop("num-query-groups", None)
    if is_mla:
        # Of the compressed widths, which a step of ours has anyway.
        if not keys.pop("qk-layernorm", ""):
            keys["no-qk-layernorm-of-mla"] = "true"
        keys.pop("kv-channels", None)
    for name, default in zip(_MLA, _MLA_DEFAULTS, strict=True):
        if is_mla:
            keys.setdefault(name, default)
        else:
            keys.pop(name, None)
    positions = keys.get("position-embedding-type")
    if is_mla or positions == "learned_absolute":
        keys.pop("position-embedding-type", None)
    if is_mla or positions in _WITHOUT_TABLE:
        keys["max-position-embeddings"] = "0"


def _complete(keys: Keys) -> Keys:
    """Add the arguments without which Megatron-LM would not look at others."""
    dtype = keys.pop("dtype", "bf16")
    if dtype != "fp32":
        keys[dtype] = "true"
    if any(name in keys for name in _MLA):
        keys["multi-latent-attention"] = keys["qk-layernorm"] = "true"
        if keys.get("q-lora-rank") == "0":
            del keys["q-lora-rank"]
    elif "num-query-groups" in keys:
        keys["group-query-attention"] = "true"
    if "num-experts" in keys:
        keys.setdefault("moe-token-dispatcher-type", "alltoall")
        keys["moe-grouped-gemm"] = "true"
    if "moe-router-enable-expert-bias" in keys:
        keys["moe-router-score-function"] = "sigmoid"
    if "vocab-size" in keys:
        keys["tokenizer-type"] = "NullTokenizer"
    if keys.get("attention-backend") not in ("local", "unfused"):
        keys.setdefault("attention-dropout", "0")
    for name in _LISTS:
        if name in keys:
            keys[name] = keys[name].replace(",", " ")
    if keys.get("max-position-embeddings") == "0":
        keys["position-embedding-type"] = "rope"
        keys["max-position-embeddings"] = keys.get("seq-length", "4096")
    if (dense := keys.pop("moe-layer-freq", "0")) != "0":
        keys["moe-layer-freq"] = f"([0]*{dense}+[1]*{int(keys['num-layers']) - int(dense)})"
    return keys


def script(keys: Keys) -> str:
    """Return a shell script that trains with these arguments."""
    world_size = int(keys.pop("world-size", "1"))
    per_node = _PER_NODE if world_size % _PER_NODE == 0 else world_size
    lines = ["#!/bin/bash", "ARGS=("]
    for name, value in keys.items():
        words = "" if value == "true" else " ".join(map(shlex.quote, value.split()))
        lines.append(f"    --{name} {words}".rstrip())
    launch = f"torchrun --nproc_per_node {per_node} --nnodes {world_size // per_node}"
    lines += [")", f'{launch} pretrain_gpt.py "${{ARGS[@]}}"']
    return "\n".join(lines) + "\n"


TABLE = Table(
    framework="megatron",
    title="Megatron-LM",
    entries=ENTRIES,
    prepare=_prepare,
    complete=_complete,
    implied=("dp_shard",),
    has_flags=True,
    fixed={"pp": "1", "num_layers": ""},
    freed_by="virtual_pipeline_model_parallel_size",
    fixed_with=VPP,
)
