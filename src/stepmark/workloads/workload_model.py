"""The model of `stepmark workload generate`: a name, a file, AICB's size, or widths.

AICB's sizes: scripts/megatron_workload_with_aiob.sh, megatron_gpt.sh and deepspeed_llama.sh of
github.com/aliyun/aicb.
"""

import itertools
import traceback
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import dashed
from stepmark.model.layers import MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.packing import Packing
from stepmark.step.layout import VOCAB_MULTIPLE, model_as
from stepmark.workloads.architecture import Architecture, Batch
from stepmark.workloads.formats.huggingface import traced
from stepmark.workloads.formats.huggingface.trace import transformers_version
from stepmark.workloads.job import with_seq_len
from stepmark.workloads.models import read_models, scaled, unknown_config
from stepmark.workloads.published import PUBLISHED, SEQ_LENS
from stepmark.workloads.rules import RULES
from stepmark.workloads.workload_options import Experts, GenerateOptions, Model

Kind = Literal["gpt", "llama"]
# from the scripts; from get_params
GPT_VOCAB_SIZE = 50257
LLAMA_VOCAB_SIZE = 32000
MAX_POSITIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model size of AICB. note: how it differs from the published model.

    model: the built-in model that is used instead, where AICB's numbers fit no model.
    """

    name: str
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    ffn_hidden_size: int | None = None  # None: 4 x hidden, or with swiglu 8/3 x
    kind: Kind = "gpt"
    model: str = ""
    note: str = ""


def _deepseek(name: str, model: str, wrong: int, right: int) -> Preset:
    note = (
        f"AICB's preset has hidden size {wrong}, the dense MLP's width; the model's is {right}"
    )
    return Preset(name=name, model=model, note=note + ", which is taken")


def _presets(
    kind: Kind, rows: dict[str, tuple[str, int, int, int, int | None]]
) -> "dict[str, Preset]":
    """Return presets by size from rows of name, layers, hidden size, heads, MLP width."""
    return {
        size: Preset(
            name=name,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            ffn_hidden_size=ffn,
            kind=kind,
            note=_NOTES.get(name, ""),
        )
        for size, (name, layers, hidden, heads, ffn) in rows.items()
    }


_NOTES = {
    "gpt_7B": "AICB's 7B has 36 layers; the published Llama 2 7B has 32 (--model llama-2-7b)",
    "gpt_65B": "AICB's 65B has the MLP width of Llama 2 70B, 28672; LLaMA 65B has 22016",
    "llama_405B": "AICB's 405B has 128 layers and 128 KV heads; the published model has 126 "
    "and 8 (--model llama-3.1-405b)",
    "Mixtral_8*7B": "AICB's Mixtral has 32 KV heads; the published model has 8 "
    "(--model mixtral-8x7b)",
}
_GPT = _presets(
    "gpt",
    {
        "7": ("gpt_7B", 36, 4096, 32, None),
        "13": ("gpt_13B", 40, 5120, 40, None),
        "22": ("gpt_22B", 48, 6144, 64, None),
        "65": ("gpt_65B", 80, 8192, 64, 28672),
        "175": ("gpt_175B", 96, 12288, 96, None),
        "405": ("llama_405B", 128, 16384, 128, 53248),
        "moe": ("Mixtral_8*7B", 32, 4096, 32, 14336),
    },
) | {
    "deepseek16": _deepseek("DeepSeek_16B", "deepseek-v2-lite", 10944, 2048),
    "deepseek236": _deepseek("DeepSeek_236B", "deepseek-v2", 12288, 5120),
    "deepseek671": _deepseek("DeepSeek_671B", "deepseek-v3", 18432, 7168),
}
_LLAMA = _presets(
    "llama",
    {
        "7": ("llama_7b", 32, 4096, 32, 11008),
        "13": ("llama_13b", 40, 5120, 40, 13824),
        "30": ("llama_30b", 60, 6656, 52, 17920),
        "65": ("llama_65b", 80, 8192, 64, 22016),
    },
)
_SPELLINGS = {"16": "deepseek16", "236": "deepseek236", "671": "deepseek671"}
_SPELLINGS["deepseek"] = "deepseek671"


def preset(size: str, framework: str) -> Preset:
    """Return AICB's GPT of this size, or with deepspeed its Llama. Raises ConfigError."""
    key = size.strip().lower().removesuffix("b")
    key = _SPELLINGS.get(key, key)
    presets = _LLAMA if framework == "deepspeed" else _GPT
    if key == "270":
        allowed = "a size with a shape: AICB names 270 without one; give --num-layers, "
        raise ConfigError("model-size", size, allowed + "--hidden-size, --num-attention-heads")
    if key not in presets:
        raise not_one_of("model-size", size, presets, f" for {framework}")
    return presets[key]


_WIDTHS = ("num_layers", "hidden_size", "num_heads")
# With all of these a model of given widths has no default that is worth a note.
_SHAPES = ("norm", "swiglu", "untied", "max_positions")
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEFAULT_SEQ_LEN = 2048  # AICB's
_MOST_LAYERS = 100_000
_GPT_175B = (
    "gpt-175b is AICB's, of 4096 positions; the published GPT-3 has 2048 "
    "(--seq-len 2048 --max-positions 2048)"
)
_OWN = ("model", "model_name", "seq_len")  # options of a model that is no decoder


def choose(
    options: GenerateOptions, framework: str, tp: int
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return the model of the flags, and notes on defaults. Raises ConfigError."""
    notes: list[str] = []
    start = _start(options, framework, notes)
    changes: list[str] = []
    model = _resized(start, options, changes)
    notes += (*model.unmodelled, *changes)
    model = _with_experts(_with_mla(model, options), options, notes)
    if options.scale:
        layers = _positive(options, "num_layers")  # a tiny model has two
        model = scaled(model, options.scale, tp)
        model = replace(model, num_layers=layers or model.num_layers)
    if seq_len := _positive(options, "seq_len"):
        model = with_seq_len(model, seq_len)
    elif model.name == "gpt-175b":
        notes.append(_GPT_175B)
    if options.packing:
        model = _packed(model, options.packing, notes)
    if model.num_layers > _MOST_LAYERS:
        raise ConfigError("num-layers", model.num_layers, f"at most {_MOST_LAYERS}")
    if options.model_name:
        model = replace(model, name=options.model_name)
    model = _padded(model, options, framework, tp, notes)
    return model, tuple(notes)


def _packed(model: ModelConfig, packing: Packing, notes: list[str]) -> ModelConfig:
    """Return the model with packed sequences, and note first what is assumed of them.

    Pieces as long as sequences are none. Raises ConfigError.
    """
    if packing.mean == model.seq_len == packing.longest:
        return model
    notes.insert(0, packing.note)
    return replace(model, packing=packing)


def _start(options: GenerateOptions, framework: str, notes: list[str]) -> ModelConfig:
    """Return the model of the one source that is given. Raises ConfigError."""
    if options.model and options.model_size:
        raise ConfigError("model", options.model, "only without --model-size (-m)")
    if options.model:
        models = read_models(options.model)
        if len(models) != 1:
            raise ConfigError("model", options.model, "one model")
        return models[0]
    if options.model_size:
        return _from_preset(preset(options.model_size, framework), options, notes)
    for name in _WIDTHS:
        if getattr(options, name, None) is None:
            allowed = "a --model, a --model-size, or --num-layers, --hidden-size and "
            raise ConfigError(dashed(name), "missing", allowed + "--num-attention-heads")
    kind: Kind = "gpt" if framework == "megatron" else "llama"
    if any(getattr(options, name) is None for name in _SHAPES):
        like = {
            "gpt": "as GPT (layernorm, gelu unless --swiglu, tied, learned positions)",
            "llama": "as Llama (rmsnorm, swiglu, untied, rotary positions)",
        }[kind]
        notes.append(f"a model of given widths is built {like}")
    widths = {name: getattr(options, name) for name in _WIDTHS}
    return _built("custom", options, kind, widths, notes)


def _from_preset(size: Preset, options: GenerateOptions, notes: list[str]) -> ModelConfig:
    if size.note:
        notes.append(size.note)
    if size.model:
        return find_model(size.model)
    widths = {name: getattr(size, name) for name in _WIDTHS}
    if size.ffn_hidden_size and not options.ffn_hidden_size:
        widths["ffn_hidden_size"] = size.ffn_hidden_size
    return _built(size.name, options, size.kind, widths, notes)


def _built(
    name: str,
    options: GenerateOptions,
    kind: Kind,
    widths: dict[str, int],
    notes: list[str],
) -> ModelConfig:
    """Return a model with AICB's defaults, which are noted."""
    widths = {key: _positive(options, key) or value for key, value in widths.items()}
    hidden = widths["hidden_size"]
    heads = widths["num_heads"]
    swiglu = kind == "llama" if options.swiglu is None else options.swiglu
    vocab = _positive(options, "vocab_size")
    if vocab is None:
        vocab = GPT_VOCAB_SIZE if kind == "gpt" else LLAMA_VOCAB_SIZE
        notes.append(f"vocab-size {vocab}, AICB's, as none was given")
    seq_len = _positive(options, "seq_len") or _DEFAULT_SEQ_LEN
    if not options.seq_len:
        notes.append(f"seq-len {seq_len}, AICB's, as none was given")
    return ModelConfig(
        name=name,
        num_layers=widths["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_positive(options, "head_dim") or _head_dim(hidden, heads),
        ffn_hidden_size=widths.get("ffn_hidden_size") or _ffn_width(hidden, swiglu=swiglu),
        vocab_size=vocab,
        seq_len=seq_len,
        max_positions=max(MAX_POSITIONS, seq_len) if kind == "gpt" else 0,
        activation="swiglu" if swiglu else "gelu",
        norm="layernorm" if kind == "gpt" else "rmsnorm",
        tied_embeddings=kind == "gpt",
    )


def _resized(model: ModelConfig, options: GenerateOptions, notes: list[str]) -> ModelConfig:
    """Replace the fields of the model for which options are given."""
    sizes = (*_WIDTHS, "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size")
    changes: dict[str, Any] = {
        name: value for name in sizes if (value := _positive(options, name)) is not None
    }
    changes |= _gate(model, options, notes)
    if {"hidden_size", "num_heads"} & set(changes) and model.mla is None:
        heads = changes.get("num_heads", model.num_heads)
        if "head_dim" not in changes:
            hidden = changes.get("hidden_size", model.hidden_size)
            changes["head_dim"] = _head_dim(hidden, heads)
        changes.setdefault(
            "num_kv_heads",
            heads if model.num_kv_heads == model.num_heads else model.num_kv_heads,
        )
    if (positions := options.max_positions) is not None:
        if model.max_positions or not positions:
            changes["max_positions"] = positions
            if seq_len := _positive(options, "seq_len"):
                changes["seq_len"] = seq_len  # the table may be too short for the model's
        else:
            notes.append("--max-position-embeddings: no effect, positions are rotary")
    for name in ("linear_bias", "qkv_bias", "qk_norm", "norm", "num_mtp_layers"):
        if (value := getattr(options, name)) is not None:
            changes[name] = value
    if options.untied is not None:
        changes["tied_embeddings"] = not options.untied
    changes = {name: new for name, new in changes.items() if new != getattr(model, name)}
    if not changes:
        return model
    if model.source:
        words = ", ".join(f"{name} {value}" for name, value in changes.items())
        notes.append(f"{model.name} with {words}")
    if "num_mtp_layers" in changes:
        left = (note for note in model.unmodelled if "multi-token" not in note)
        changes["unmodelled"] = tuple(left)
    return replace(
        model, **changes, published_params=None, published_active_params=None, aliases=()
    )


def _gate(model: ModelConfig, options: GenerateOptions, notes: list[str]) -> dict[str, Any]:
    """Return the changes of --swiglu, with which the MLP has Megatron-LM's default width."""
    gated = options.swiglu
    if gated is None or gated == model.is_gated:
        return {}
    changes: dict[str, Any] = {"activation": "swiglu" if gated else "gelu"}
    if options.ffn_hidden_size is None and model.ffn_hidden_size:
        width = _ffn_width(options.hidden_size or model.hidden_size, swiglu=gated)
        changes["ffn_hidden_size"] = width
        notes.append(f"ffn-hidden-size {width}, Megatron-LM's default for this activation")
    return changes


def _ffn_width(hidden: int, *, swiglu: bool) -> int:
    """Megatron-LM, megatron/training/arguments.py; AICB has the same."""
    return int(hidden * 4 * 2 / 3 / 64) * 64 if swiglu else 4 * hidden


def _with_experts(
    model: ModelConfig, options: GenerateOptions, notes: list[str]
) -> ModelConfig:
    names = {
        "num_experts": "num_experts",
        "top_k": "top_k",
        "moe_ffn_hidden_size": "ffn_hidden_size",
        "dense_layers": "first_dense_layers",
        "router_bias": "router_bias",
        "expert_groups": "num_groups",
        "top_groups": "top_groups",
    }
    fields = {
        field: value
        for name, field in names.items()
        if (value := getattr(options, name)) is not None
    }
    if options.expert_groups is not None:
        fields.setdefault("top_groups", options.expert_groups)  # no limit
    if (shared := options.shared_experts) is not None:
        width = fields.get("ffn_hidden_size") or (model.moe or model).ffn_hidden_size
        fields |= {"num_shared_experts": shared, "shared_ffn_hidden_size": shared * width}
    if (shared_width := options.shared_ffn_hidden_size) is not None:
        if options.shared_experts is None:
            own = fields.get("ffn_hidden_size") or (model.moe or model).ffn_hidden_size
            fields["num_shared_experts"] = max(1, shared_width // own) if shared_width else 0
        fields["shared_ffn_hidden_size"] = shared_width
    if model.moe:
        return replace(model, moe=replace(model.moe, **fields)) if fields else model
    if fields.get("num_experts", 1) == 1:
        if options.moe_enable or set(fields) - {"num_experts", "top_k"}:
            raise ConfigError("num-experts", options.num_experts, "2 or more experts")
        if fields:
            notes.append("--moe-router-topk, --num-experts: no effect on a model of one expert")
        return model
    if "top_k" not in fields:
        fields["top_k"] = 2
        notes.append("moe-router-topk 2, as none was given (AICB's default is 1)")
    moe = MoeConfig(**{"ffn_hidden_size": model.ffn_hidden_size} | fields)
    dense = model.ffn_hidden_size if moe.first_dense_layers else 0
    return replace(model, moe=moe, ffn_hidden_size=dense)


def _with_mla(model: ModelConfig, options: GenerateOptions) -> ModelConfig:
    widths = {name: value for name in _MLA if (value := getattr(options, name)) is not None}
    if not widths:
        return model
    if widths.get("q_lora_rank") == 0:  # none, as in AICB
        widths["q_lora_rank"] = None
    if model.mla:
        mla = replace(model.mla, **widths)
    else:
        for name in _MLA[1:]:
            if name not in widths:
                rule = "it goes with the other widths of MLA"
                raise ConfigError(dashed(name), "missing", rule)
        mla = MlaConfig(**({"q_lora_rank": None} | widths))
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return replace(model, mla=mla, head_dim=head_dim, num_kv_heads=model.num_heads)


def _padded(
    model: ModelConfig, options: GenerateOptions, framework: str, tp: int, notes: list[str]
) -> ModelConfig:
    """Pad the vocabulary as Megatron-LM's vocab_size_with_padding does."""
    multiple = _positive(options, "make_vocab_size_divisible_by")
    if framework != "megatron":
        if multiple:
            notes.append("--make-vocab-size-divisible-by: no effect, only Megatron-LM pads")
        return model
    multiple = multiple or VOCAB_MULTIPLE
    padded = model_as(framework, model, tp, multiple)
    if padded is not model:
        notes.append(
            f"vocabulary of {model.vocab_size} padded to {padded.vocab_size}, a multiple of "
            f"{multiple} x tp, as Megatron-LM does"
        )
    return padded


def _head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError("num-heads", heads, f"a divisor of hidden-size ({hidden})")
    return hidden // heads


def _positive(options: GenerateOptions, name: str) -> int | None:
    value: int | None = getattr(options, name, None)
    if value is not None and not 1 <= value <= 2**30:
        raise ConfigError(dashed(name), value, "a whole number from 1 to 1073741824")
    return value


def is_own(text: str | None) -> bool:
    """Return whether --model names an architecture other than a decoder.

    A config of an unknown family is one where transformers, which builds it, is installed.
    """
    if not text:
        return False
    is_function = _file_of(text).endswith(".py")
    is_traced = unknown_config(text) is not None and bool(transformers_version())
    return text in PUBLISHED or is_function or is_traced


def choose_own(
    options: GenerateOptions, framework: str, batch: Batch
) -> tuple[Architecture, tuple[str, ...]]:
    """Return the architecture for a batch, and notes on defaults. Raises ConfigError."""
    text = str(options.model)
    frameworks = [name for name, rule in RULES.items() if rule.has_own]
    if framework not in frameworks:
        others = f"of other models --framework {', '.join(frameworks)}"
        raise ConfigError("model", text, f"a decoder for {framework}; {others}")
    rule = f"it has no effect with --model {text}"
    refuse(options, (Model, Experts), allowed=_OWN, rule=rule)
    architecture, traced_notes = _architecture(text, batch)
    notes = [f"model of {architecture.source}"] if architecture.source else []
    notes += traced_notes
    if not options.seq_len and text not in SEQ_LENS:
        notes.append(f"seq-len {batch.seq_len}, as none was given")
    return architecture, tuple(notes)


def _architecture(text: str, batch: Batch) -> tuple[Architecture, tuple[str, ...]]:
    """Return a published architecture, a traced one or a function's, and notes on it."""
    if text in PUBLISHED:
        return PUBLISHED[text](batch), ()
    if path := unknown_config(text):
        return traced.read_architecture(path, batch)
    return _from_file(text, batch), ()


def refuse(
    options: GenerateOptions, groups: Iterable[type], *, allowed: Container[str], rule: str
) -> None:
    """Refuse options of these groups that are given but not allowed. Raises ConfigError."""
    for field in itertools.chain(*map(fields, groups)):
        value = getattr(options, field.name, None)
        if value is not None and field.name not in allowed:
            raise ConfigError(dashed(field.name), value, rule)


def own_seq_len(options: GenerateOptions) -> int:
    """Return --seq-len, or the published model's, or a default."""
    seq_len = _positive(options, "seq_len")
    return seq_len or SEQ_LENS.get(str(options.model), _DEFAULT_SEQ_LEN)


def _file_of(text: str) -> str:
    file, colon, _ = text.rpartition(":")
    return file if colon else text


def _from_file(text: str, batch: Batch) -> Architecture:
    """Return the architecture that the user's function makes for a batch."""
    from stepmark.workloads.user_function import load, reported  # noqa: PLC0415

    path = Path(_file_of(text)).resolve()
    with (
        _with_place(path),
        load(text, arguments=1) as (function, file),
        reported(Path(text).name, file),
    ):
        architecture: object = function(batch)
    if not isinstance(architecture, Architecture):
        allowed = "a function of a Batch that returns an Architecture"
        raise ConfigError(Path(text).name, type(architecture).__name__, allowed)
    return architecture


@contextmanager
def _with_place(path: Path) -> Iterator[None]:
    """Name the line of the user's file in which the API raised a ConfigError."""
    try:
        yield
    except ConfigError as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == str(path)]
        if not own or error.__cause__:
            raise
        place = f"{path.name}:{own[-1].lineno}: {error.field}"
        raise ConfigError(place, error.value, error.allowed) from error
