"""AICB's model sizes.

Sizes: scripts/megatron_workload_with_aiob.sh, megatron_gpt.sh and deepspeed_llama.sh of
github.com/aliyun/aicb.
"""

from dataclasses import dataclass
from typing import Literal

from stepmark.core.errors import ConfigError

Kind = Literal["gpt", "llama"]
GPT_VOCAB_SIZE, LLAMA_VOCAB_SIZE = 50257, 32000  # of the scripts; of get_params
MAX_POSITIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A size as AICB has it. published: the built-in model that it differs from, and how.

    model: the built-in model that is taken instead, where AICB's numbers are no model's.
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


_GPT = {
    "7": Preset(
        name="gpt_7B",
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        note="AICB's 7B has 36 layers; the published Llama 2 7B has 32 (--model llama-2-7b)",
    ),
    "13": Preset(name="gpt_13B", num_layers=40, hidden_size=5120, num_heads=40),
    "22": Preset(name="gpt_22B", num_layers=48, hidden_size=6144, num_heads=64),
    "65": Preset(
        name="gpt_65B",
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        ffn_hidden_size=28672,
        note="AICB's 65B has the MLP width of Llama 2 70B, 28672; LLaMA 65B has 22016",
    ),
    "175": Preset(name="gpt_175B", num_layers=96, hidden_size=12288, num_heads=96),
    "405": Preset(
        name="llama_405B",
        num_layers=128,
        hidden_size=16384,
        num_heads=128,
        ffn_hidden_size=53248,
        note="AICB's 405B has 128 layers and 128 KV heads; the published model has 126 and 8 "
        "(--model llama-3.1-405b)",
    ),
    "moe": Preset(
        name="Mixtral_8*7B",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        ffn_hidden_size=14336,
        note="AICB's Mixtral has 32 KV heads; the published model has 8 (--model mixtral-8x7b)",
    ),
    "deepseek16": _deepseek("DeepSeek_16B", "deepseek-v2-lite", 10944, 2048),
    "deepseek236": _deepseek("DeepSeek_236B", "deepseek-v2", 12288, 5120),
    "deepseek671": _deepseek("DeepSeek_671B", "deepseek-v3", 18432, 7168),
}
_LLAMA = {
    "7": Preset(
        name="llama_7b",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        ffn_hidden_size=11008,
        kind="llama",
    ),
    "13": Preset(
        name="llama_13b",
        num_layers=40,
        hidden_size=5120,
        num_heads=40,
        ffn_hidden_size=13824,
        kind="llama",
    ),
    "30": Preset(
        name="llama_30b",
        num_layers=60,
        hidden_size=6656,
        num_heads=52,
        ffn_hidden_size=17920,
        kind="llama",
    ),
    "65": Preset(
        name="llama_65b",
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        ffn_hidden_size=22016,
        kind="llama",
    ),
}
_SPELLINGS = {"16": "deepseek16", "236": "deepseek236", "671": "deepseek671"}
_SPELLINGS |= {"deepseek": "deepseek671"}


def preset(size: str, framework: str) -> Preset:
    """AICB's model of this size: its GPTs, or with deepspeed its Llamas. Raises ConfigError."""
    key = size.strip().lower().removesuffix("b")
    key = _SPELLINGS.get(key, key)
    known = _LLAMA if framework == "deepspeed" else _GPT
    if key == "270":
        allowed = "a size with a shape: AICB names 270 without one; give --num-layers, "
        raise ConfigError("model-size", size, allowed + "--hidden-size, --num-attention-heads")
    if key not in known:
        raise ConfigError("model-size", size, f"one of {', '.join(known)} for {framework}")
    return known[key]
