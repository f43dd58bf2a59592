"""The counts of Hugging Face configurations: what transformers builds of them.

    python validation/hugging_face_truth.py [FILE ...]     # the counts of all lines anew

A FILE is one of tests/data/hugging-face/*.jsonl, or one like them: a configuration a line, with
its name and source. Each model is built on torch's meta device, which has shapes and no values,
and one sequence is run through it. The counts are of the decoder, where a model reads images:

parameters              all stored, a tied table once
active_parameters       the same, but of each tensor of experts the share that a token meets
buffers                 biases of experts that transformers stores as buffers (DeepSeek-V3's)
matmul_flops_per_token  forward products with weights: the head's and routers' too, and of
                        experts those that a token meets; no convolutions, no scans
tokens                  length of the sequence: 8192, or the longest that the model allows
score_flops             q k.T and p v of that sequence, of the pairs that the mask allows; null
                        where the tokens decide which, as in DeepSeek's sparse attention
score_flops_per_key     the same of one query and one key, over all layers
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "validation")]

from hugging_face_models import FILES, read_lines  # noqa: E402

MOST_TOKENS = 8192
# Types that transformers lacks, with the type that has their layers.
SAME_LAYERS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Types of storage and code of the Hub, which change no count.
_IGNORED = ("quantization_config", "compression_config", "auto_map", "torch_dtype", "dtype")
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
_LENGTHS = ("max_position_embeddings", "max_seq_len", "n_positions")
_EXPERT_BIASES = ("e_score_correction_bias", "expert_bias", "moe_statics")
# Models whose scan is a loop over tokens, and their tokens.
_SCANNED = ("jamba", "mamba", "falcon_mamba", "zamba", "recurrent_gemma")
_FEWER_TOKENS = 128


def build(raw: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model on the meta device, and the configuration of its decoder."""
    raw = copy.deepcopy(raw)
    text_part = raw.get("text_config") or raw
    for part in (raw, text_part):
        for key in _IGNORED:
            part.pop(key, None)
        if part.get("model_type") in SAME_LAYERS:
            part["model_type"] = SAME_LAYERS[part["model_type"]]
    whole = transformers.AutoConfig.for_model(**raw)
    text = whole.get_text_config()
    sizes = text.to_dict()  # whose attributes of single layers raise
    for key in _SIZES:
        if key in text_part and text_part[key] != sizes[key]:
            raise ValueError(f"transformers reads {key} {sizes[key]}")
    with torch.device("meta"):
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model = transformers.AutoModelForCausalLM.from_config(text)
        else:
            model = transformers.AutoModelForImageTextToText.from_config(whole)
    return model.eval(), text


def truth(raw: dict[str, Any], most_tokens: int = MOST_TOKENS) -> dict[str, Any]:
    """Return the counts of the model that transformers builds."""
    model, text = build(raw)
    parameters = sum(tensor.numel() for _, tensor in _of_decoder(model.named_parameters()))
    buffers = sum(
        tensor.numel()
        for name, tensor in _of_decoder(model.named_buffers())
        if any(bias in name for bias in _EXPERT_BIASES)
    )
    limit = _FEWER_TOKENS if text.model_type in _SCANNED else most_tokens
    longest = next(filter(None, (getattr(text, key, None) for key in _LENGTHS)), limit)
    counts = Counts(min(longest, limit))
    counts.run(model, text)
    return {
        "parameters": parameters,
        "active_parameters": parameters - counts.idle_parameters,
        "buffers": buffers,
        "matmul_flops_per_token": counts.matmul_flops // counts.tokens,
        "tokens": counts.tokens,
        "score_flops": None if counts.is_sparse else counts.score_flops,
        "score_flops_per_key": counts.score_flops_per_key,
    }


def _of_decoder(items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a language model, else those of the one inside."""
    tensors = list(items)
    inner = [
        item for item in tensors if {"language_model", "lm_head"} & set(item[0].split("."))
    ]
    is_whole = any("language_model" in name.split(".") for name, _ in inner)
    yield from inner if is_whole else tensors


class Counts:
    """Products of a forward pass of one sequence.

    Tensors have no values in it. So experts, which are chosen by value, return zeros, and masks
    are made on the CPU.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.matmul_flops = 0
        self.idle_parameters = 0
        self.score_flops = 0
        self.score_flops_per_key = 0
        self.is_sparse = False
        self._square_flops = 0
        self._pairs: list[tuple[Tensor, int]] = []  # of each mask

    def run(self, model: Any, text: Any) -> None:
        """Count what the model computes."""
        self.is_sparse = any("indexer" in name.split(".") for name, _ in model.named_modules())
        for module in model.modules():
            if type(module).__name__.endswith("Experts") and hasattr(module, "num_experts"):
                module.forward = self._routed(module, text)
        transformers.AttentionInterface.register("counted", self._attend)
        transformers.AttentionMaskInterface.register("counted", self._mask)
        model.set_attn_implementation("counted")
        ids = torch.zeros(1, self.tokens, dtype=torch.long, device="meta")
        with torch.no_grad(), _masks_of_values(), Products(self._add_product):
            model(input_ids=ids, use_cache=False)
        if not self.score_flops_per_key:  # the model calls no exchangeable attention
            self.score_flops_per_key = self._square_flops // self.tokens**2
            self.score_flops = self.score_flops_per_key * self.tokens * (self.tokens + 1) // 2

    def _add_product(self, num_flops: int, operands: Sequence[Tensor], is_weight: bool) -> None:
        if is_weight:
            self.matmul_flops += num_flops
        elif self.tokens in (operands[0].shape[-1], operands[1].shape[-1]):
            self._square_flops += num_flops  # of all queries with all keys

    def _routed(self, experts: Any, text: Any) -> Callable[..., Tensor]:
        """Return a forward pass that only counts."""

        def forward(hidden: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
            tensors = (*routing, *named.values())
            chosen = [each for each in tensors if not each.is_floating_point()]
            rows = hidden.numel() // hidden.shape[-1]
            if chosen:
                top_k = chosen[0].shape[-1]
            else:  # Llama 4 gives each expert a copy of every token
                top_k = text.num_experts_per_tok
                rows //= experts.num_experts
            for name, tensor in experts.named_parameters():
                active = tensor.numel() * top_k // experts.num_experts
                self.idle_parameters += tensor.numel() - active
                if "bias" not in name:
                    self.matmul_flops += 2 * active * rows
            return hidden.new_zeros(hidden.shape)

        return forward

    def _mask(self, **options: Any) -> Tensor:
        device = options["device"] if self.is_sparse else "cpu"
        return masking_utils.sdpa_mask(
            **options | {"allow_is_causal_skip": False, "device": device}
        )

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        batch, heads, queries, width = q.shape
        per_key = 2 * heads * (width + v.shape[-1])
        self.score_flops_per_key += per_key
        if not self.is_sparse:
            self.score_flops += per_key * self._pairs_of(attention_mask)
        return q.new_zeros(batch, queries, heads, v.shape[-1]), None

    def _pairs_of(self, mask: Tensor) -> int:
        for known, pairs in self._pairs:
            if known is mask:
                return pairs
        pairs = int(mask.sum())
        self._pairs.append((mask, pairs))
        return pairs


@contextmanager
def _masks_of_values() -> Iterator[None]:
    """Make masks on the CPU for tensors without values, of one sequence that fills its row."""
    chunked = masking_utils.chunked_overlay
    find_packed = masking_utils.find_packed_sequence_indices

    def chunked_overlay(size: int, padding: Tensor) -> Any:
        return chunked(size, padding.new_zeros(padding.shape, device="cpu"))

    masking_utils.chunked_overlay = chunked_overlay
    masking_utils.find_packed_sequence_indices = lambda positions: None
    try:
        yield
    finally:
        masking_utils.chunked_overlay = chunked
        masking_utils.find_packed_sequence_indices = find_packed


class Products(TorchFunctionMode):
    """Gives `add` each product: its FLOPs, its operands, and whether one is a weight."""

    def __init__(self, add: Callable[[int, Sequence[Tensor], bool], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__bool__" and args[0].is_meta:
            return False  # whether a sequence needs the table of longer positions
        result = func(*args, **named)
        operands = (*args, *named.values())
        name = name.strip("_")  # of the operator @, too
        if name in ("addmm", "baddbmm"):  # the first one is added
            operands = operands[1:]
        if name == "scaled_dot_product_attention":
            keys, values = operands[1:3]
            queries = operands[0].numel() // keys.shape[-1]
            num_flops = 2 * queries * keys.shape[-2] * (keys.shape[-1] + values.shape[-1])
            self._add(num_flops, (keys.mT, values), False)
        elif name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"):
            num_flops = 2 * result.numel() * operands[0].shape[-1]
            self._add(num_flops, operands, name == "linear" or any(map(_is_weight, operands)))
        return result


def _is_weight(operand: object) -> bool:
    base = getattr(operand, "_base", None)
    return isinstance(operand, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter)


def renew(path: Path) -> None:
    """Write the counts of each line anew."""
    lines = []
    for line in read_lines(path):
        config = {key: line[key] for key in ("name", "source", "config")}
        text = json.dumps(config | truth(line["config"]), separators=(",", ":"))
        lines.append(text + "\n")
        print(line["name"], flush=True)
    path.write_text("".join(lines), encoding="utf-8")


def main() -> int:
    """Make the truth of files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    for path in parser.parse_args().files:
        renew(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
