"""Which model `stepmark workload generate` is about: a name, a file, AICB's size, or widths.

Over 250 lines: all that may replace a part of a model.
"""

from dataclasses import dataclass, replace
from typing import Any

from stepmark.cli import workload_aicb
from stepmark.cli.options import Values
from stepmark.cli.workload_aicb import GPT_VOCAB_SIZE, LLAMA_VOCAB_SIZE, MAX_POSITIONS
from stepmark.core.errors import ConfigError
from stepmark.core.model import MlaConfig, ModelConfig, MoeConfig
from stepmark.workload.job import with_seq_len

_WIDTHS = ("num_layers", "hidden_size", "num_heads")
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEFAULT_SEQ_LEN = 2048  # AICB's
_MOST_LAYERS = 100_000
_NOTES = {
    "gpt-175b": "gpt-175b is AICB's, of 4096 positions; the published GPT-3 has 2048 "
    "(--seq-len 2048 --max-positions 2048)"
}
_VOCAB_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The model, and what was decided for the user."""

    model: ModelConfig
    notes: tuple[str, ...] = ()


def choose(values: Values, framework: str, tp: int) -> Chosen:
    """From the flags. Raises ConfigError."""
    notes: list[str] = []
    model = _resized(_start(values, framework, notes), values, notes)
    model = _with_experts(_with_mla(model, values), values, notes)
    if values.get("scale"):
        from stepmark.cli.plan import factor  # noqa: PLC0415

        text = values["scale"]
        model = model.tiny() if text == "tiny" else model.scaled(factor(text), tp=tp)
    if seq_len := _positive(values, "seq_len"):
        model = with_seq_len(model, seq_len)
    elif model.name in _NOTES:
        notes.append(_NOTES[model.name])
    if model.num_layers > _MOST_LAYERS:
        raise ConfigError("num-layers", model.num_layers, f"at most {_MOST_LAYERS}")
    if values.get("model_name"):
        model = replace(model, name=values["model_name"])
    return Chosen(model=_padded(model, values, framework, tp, notes), notes=tuple(notes))


def _start(values: Values, framework: str, notes: list[str]) -> ModelConfig:
    """Of the one source that is named."""
    named = [name for name in ("model", "model_size") if values.get(name)]
    if len(named) > 1:
        raise ConfigError("model", " and ".join(named), "give one of the two")
    if values.get("model"):
        from stepmark.cli.plan import models  # noqa: PLC0415

        found = models({"model": values["model"]})
        if len(found) != 1:
            raise ConfigError("model", values["model"], "one model")
        return found[0]
    if values.get("model_size"):
        return _of_preset(workload_aicb.preset(values["model_size"], framework), values, notes)
    for name in _WIDTHS:
        if values.get(name) is None:
            allowed = "a --model, a --model-size, or --num-layers, --hidden-size and "
            raise ConfigError(_flag(name), "missing", allowed + "--num-attention-heads")
    kind: workload_aicb.Kind = "gpt" if framework == "megatron" else "llama"
    like = {
        "gpt": "as GPT (layernorm, gelu unless --swiglu, tied, learned positions)",
        "llama": "as Llama (rmsnorm, swiglu, untied, rotary positions)",
    }[kind]
    notes.append(f"a model of given widths is built {like}")
    return _built("custom", values, kind, {name: values[name] for name in _WIDTHS}, notes)


def _of_preset(found: workload_aicb.Preset, values: Values, notes: list[str]) -> ModelConfig:
    if found.note:
        notes.append(found.note)
    if found.model:
        from stepmark.core.model import find_model  # noqa: PLC0415

        return find_model(found.model)
    widths = {name: getattr(found, name) for name in _WIDTHS}
    if found.ffn_hidden_size and not values.get("ffn_hidden_size"):
        widths["ffn_hidden_size"] = found.ffn_hidden_size
    return _built(found.name, values, found.kind, widths, notes)


def _built(
    name: str,
    values: Values,
    kind: workload_aicb.Kind,
    widths: dict[str, int],
    notes: list[str],
) -> ModelConfig:
    """A model of AICB's: what was not given is as there, and said."""
    widths = {key: _positive(values, key) or value for key, value in widths.items()}
    hidden, heads = widths["hidden_size"], widths["num_heads"]
    gated = values.get("swiglu")
    swiglu = kind == "llama" if gated is None else gated
    vocab = _positive(values, "vocab_size")
    if vocab is None:
        vocab = GPT_VOCAB_SIZE if kind == "gpt" else LLAMA_VOCAB_SIZE
        notes.append(f"vocab-size {vocab}, AICB's, as none was given")
    seq_len = _positive(values, "seq_len") or _DEFAULT_SEQ_LEN
    if not values.get("seq_len"):
        notes.append(f"seq-len {seq_len}, AICB's, as none was given")
    return ModelConfig(
        name=name,
        num_layers=widths["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_head_dim(hidden, heads),
        ffn_hidden_size=widths.get("ffn_hidden_size") or _ffn_width(hidden, swiglu=swiglu),
        vocab_size=vocab,
        seq_len=seq_len,
        max_positions=max(MAX_POSITIONS, seq_len) if kind == "gpt" else 0,
        activation="swiglu" if swiglu else "gelu",
        norm="layernorm" if kind == "gpt" else "rmsnorm",
        tied_embeddings=kind == "gpt",
    )


def _resized(model: ModelConfig, values: Values, notes: list[str]) -> ModelConfig:
    """Whatever was given beside the model replaces what it has."""
    sizes = (*_WIDTHS, "num_kv_heads", "ffn_hidden_size", "vocab_size")
    changes: dict[str, Any] = {
        name: _positive(values, name) for name in sizes if values.get(name) is not None
    }
    changes |= _gate(model, values, notes)
    if {"hidden_size", "num_heads"} & set(changes) and model.mla is None:
        heads = changes.get("num_heads", model.num_heads)
        changes["head_dim"] = _head_dim(changes.get("hidden_size", model.hidden_size), heads)
        changes.setdefault(
            "num_kv_heads",
            heads if model.num_kv_heads == model.num_heads else model.num_kv_heads,
        )
    if (positions := values.get("max_positions")) is not None:
        if model.max_positions or not positions:
            changes["max_positions"] = positions
            if seq_len := _positive(values, "seq_len"):
                changes["seq_len"] = seq_len  # the table may be too short for the model's
        else:
            notes.append("--max-position-embeddings: no effect, positions are rotary")
    if values.get("linear_bias") is not None:
        changes["linear_bias"] = values["linear_bias"]
    if values.get("untied") is not None:
        changes["tied_embeddings"] = not values["untied"]
    changes = {name: new for name, new in changes.items() if new != getattr(model, name)}
    if not changes:
        return model
    if model.source:
        shown = ", ".join(f"{name} {value}" for name, value in changes.items())
        notes.append(f"{model.name} with {shown}")
    return replace(
        model, **changes, published_params=None, published_active_params=None, aliases=()
    )


def _gate(model: ModelConfig, values: Values, notes: list[str]) -> dict[str, Any]:
    """--swiglu of a model without it has an MLP of 8/3 the width, as in Megatron-LM."""
    gated = values.get("swiglu")
    if gated is None or gated == (model.activation == "swiglu"):
        return {}
    changes: dict[str, Any] = {"activation": "swiglu" if gated else "gelu"}
    if values.get("ffn_hidden_size") is None and model.ffn_hidden_size:
        width = _ffn_width(values.get("hidden_size") or model.hidden_size, swiglu=gated)
        changes["ffn_hidden_size"] = width
        notes.append(f"ffn-hidden-size {width}, Megatron-LM's default for this activation")
    return changes


def _ffn_width(hidden: int, *, swiglu: bool) -> int:
    """Megatron-LM, megatron/training/arguments.py; AICB has the same."""
    return int(hidden * 4 * 2 / 3 / 64) * 64 if swiglu else 4 * hidden


def _with_experts(model: ModelConfig, values: Values, notes: list[str]) -> ModelConfig:
    names = {
        "num_experts": "num_experts",
        "top_k": "top_k",
        "moe_ffn_hidden_size": "ffn_hidden_size",
        "dense_layers": "first_dense_layers",
    }
    given = {
        field: values[name] for name, field in names.items() if values.get(name) is not None
    }
    if (shared := values.get("shared_experts")) is not None:
        width = given.get("ffn_hidden_size") or (
            model.moe.ffn_hidden_size if model.moe else model.ffn_hidden_size
        )
        given |= {"num_shared_experts": shared, "shared_ffn_hidden_size": shared * width}
    if model.moe:
        return replace(model, moe=replace(model.moe, **given)) if given else model
    if given.get("num_experts", 1) == 1:
        if values.get("moe_enable") or set(given) - {"num_experts", "top_k"}:
            raise ConfigError("num-experts", values.get("num_experts"), "2 or more experts")
        if given:
            notes.append("--moe-router-topk, --num-experts: no effect on a model of one expert")
        return model
    if "top_k" not in given:
        given["top_k"] = 2
        notes.append("moe-router-topk 2, as none was given (AICB's default is 1)")
    moe = MoeConfig(**{"ffn_hidden_size": model.ffn_hidden_size} | given)
    dense = model.ffn_hidden_size if moe.first_dense_layers else 0
    return replace(model, moe=moe, ffn_hidden_size=dense)


def _with_mla(model: ModelConfig, values: Values) -> ModelConfig:
    given = {name: values[name] for name in _MLA if values.get(name) is not None}
    if not given:
        return model
    if model.mla:
        mla = replace(model.mla, **given)
    else:
        missing = [name for name in _MLA[1:] if name not in given]
        if missing:
            raise ConfigError(
                _flag(missing[0]), "missing", "it goes with the other widths of MLA"
            )
        mla = MlaConfig(**({"q_lora_rank": None} | given))
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    return replace(model, mla=mla, head_dim=head_dim, num_kv_heads=model.num_heads)


def _padded(
    model: ModelConfig, values: Values, framework: str, tp: int, notes: list[str]
) -> ModelConfig:
    """Source: Megatron-LM, vocab_size_with_padding."""
    multiple = _positive(values, "make_vocab_size_divisible_by")
    if framework != "megatron":
        if multiple:
            notes.append("--make-vocab-size-divisible-by: no effect, only Megatron-LM pads")
        return model
    grain = (multiple or _VOCAB_MULTIPLE) * tp
    padded = -(-model.vocab_size // grain) * grain
    if padded == model.vocab_size:
        return model
    notes.append(
        f"vocabulary of {model.vocab_size} padded to {padded}, a multiple of "
        f"{multiple or _VOCAB_MULTIPLE} x tp, as Megatron-LM does"
    )
    return replace(
        model, vocab_size=padded, published_params=None, published_active_params=None
    )


def _head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError("num-heads", heads, f"a divisor of hidden-size ({hidden})")
    return hidden // heads


def _positive(values: Values, name: str) -> int | None:
    value: int | None = values.get(name)
    if value is not None and not 1 <= value <= 2**30:
        raise ConfigError(_flag(name), value, "a whole number from 1 to 1073741824")
    return value


def _flag(name: str) -> str:
    return name.replace("_", "-")
