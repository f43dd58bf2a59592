"""AICB's model sizes.

Sizes: scripts/megatron_workload_with_aiob.sh, megatron_gpt.sh and deepspeed_llama.sh of
github.com/aliyun/aicb.
"""

from dataclasses import dataclass
from typing import Literal

from stepmark.ground.errors import ConfigError, not_one_of

Kind = Literal["gpt", "llama"]
GPT_VOCAB_SIZE, LLAMA_VOCAB_SIZE = 50257, 32000  # from the scripts; from get_params
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
