"""Floating-point operations of one token trained, in named conventions. Pure arithmetic.

A multiply and an add are two; only matrix products count. The backward pass of a product has
twice its FLOPs (of the data, of the weight); that of a frozen weight (LoRA) as many, and the
products of adapters do not count. Sources:
causal      products of the model once forward and backward; of attention's scores the half
            under the diagonal: T^2 / 2 pairs per head and sequence, so a token sees T / 2 keys
            (not (T + 1) / 2), as model/ops/attention.py and Megatron-Bridge do. That a fused
            kernel computes q k.T again in its backward pass is not counted. Of packed
            sequences it counts the pairs within pieces (model/packing.py).
torchtitan  6 (N - N_embedding) + 12 L H Dh T (torchtitan, models/utils.py): the whole square.
            Where query and value heads differ in width, 12 Dh is 6 (d_qk + d_v), as there.
palm-all    6 N + 12 L H Dh T with N of everything stored (appendix B of PaLM,
            arXiv:2204.02311, with the embedding tables in N); of no meaning for experts.
6n          6 N with N of everything stored that a token activates: without attention's scores.
hfu         causal, and the forward products that checkpointing runs again (Korthikanti et
            al., arXiv:2205.05198): those that torch executes (cases/recompute.py). The last
            product of a block is none of them, unless its result is needed.
"""

from dataclasses import dataclass

from stepmark.cases.recompute import rerun_products
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Recompute
from stepmark.model.layers import DENSE, Layer, Linear
from stepmark.model.model import ModelConfig
from stepmark.model.ops.attention import masked_pairs
from stepmark.model.scans import scan_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """FLOPs per trained token, over all ranks that share its work."""

    causal: float
    torchtitan: float
    palm_all: float | None  # None: the model has experts
    six_n: float
    hfu: float  # causal and recomputed

    def by_convention(self) -> dict[str, float]:
        """Return the FLOPs by the names of conventions, those that are defined."""
        of_all = {
            "causal": self.causal,
            "torchtitan": self.torchtitan,
            "palm-all": self.palm_all,
            "6n": self.six_n,
            "hfu": self.hfu,
        }
        return {name: flops for name, flops in of_all.items() if flops is not None}


def per_token(case: TrainCase) -> TokenFlops:
    """Return the FLOPs of one token of this case."""
    return of_model(case.model, recomputed(case))


def of_model(model: ModelConfig, again: float, *, is_frozen: bool = False) -> TokenFlops:
    """Return the FLOPs of one token. again: those of products that checkpointing reruns.

    is_frozen: the model's weights are; torchtitan's and PaLM's conventions count them all.
    """
    causal = 3 * forward(model) - detached(model)
    if is_frozen:
        causal -= 2 * model.num_active_matmul_params
    return TokenFlops(
        causal=causal,
        torchtitan=torchtitan(model),
        palm_all=palm_all(model),
        six_n=6.0 * model.num_active_params,
        hfu=causal + again,
    )


def forward(model: ModelConfig) -> float:
    """Return one token's forward products with the head, without the embedding lookup."""
    mixed = sum(count * scores(model, layer) for layer, count in model.all_layer_counts.items())
    return 2 * model.num_active_matmul_params + mixed


def detached(model: ModelConfig) -> float:
    """Return the FLOPs of input gradients that are not computed: of an indexer's products."""
    return 2.0 * sum(
        count * linear.num_weights
        for layer, count in model.all_layer_counts.items()
        for linear in model.linears(layer)
        if not linear.has_input_grad
    )


def scores(model: ModelConfig, layer: Layer = DENSE) -> float:
    """Return the FLOPs of one token in a layer's attention and scan, forward."""
    return attention(model, layer) + scans(model, layer)


def attention(model: ModelConfig, layer: Layer) -> float:
    """Return q k.T and p v of one token in one layer, forward, under its mask."""
    if not layer.has_attention:
        return 0.0
    own = model.of_layer(layer)
    pairs: float
    if model.packing is None:
        pairs = masked_pairs(model.seq_len, keys_of(model, layer), layer.chunk)
    else:
        pairs = model.seq_len * model.packing.pairs_per_token(layer.window)
    return 2 * pairs * own.num_heads * (own.d_qk + own.d_v) / model.seq_len


def scans(model: ModelConfig, layer: Layer) -> float:
    """Return one token's products with a state, and the scores by which keys are chosen."""
    total = float(scan_flops(model, layer))
    indexer = model.mla.indexer if model.mla and layer.has_indexer else None
    if layer.has_attention and indexer:
        pairs = masked_pairs(model.seq_len)
        total += 2 * pairs * indexer.num_heads * indexer.head_dim / model.seq_len
    return total


def keys_of(model: ModelConfig, layer: Layer) -> int:
    """Return the keys that a query attends to at most; 0: all earlier ones."""
    indexer = model.mla.indexer if model.mla else None
    return indexer.top_k if indexer else layer.window


def torchtitan(model: ModelConfig) -> float:
    """Count active parameters of experts, and a tied table once, as the head."""
    num_params = model.num_active_params - model.num_embedding_params
    return 6 * num_params + _square(model)


def palm_all(model: ModelConfig) -> float | None:
    return None if model.moe else 6 * model.num_params + _square(model)


def _square(model: ModelConfig) -> float:
    """Return the scores of all T keys, forward and backward: 12 L H Dh T with heads Dh wide.

    Layers without attention have none; windows are not regarded.
    """
    width = 0
    for layer, count in model.all_layer_counts.items():
        own = model.of_layer(layer)
        width += layer.has_attention * count * own.num_heads * (own.d_qk + own.d_v)
    return 6 * width * model.seq_len


def recomputed(case: TrainCase) -> float:
    """Return the forward products that the backward pass runs again, per token.

    With OPS attention is kept.
    """
    model = case.model
    total = 0.0
    for layer, is_checkpointed in zip(model.layers, case.is_checkpointed, strict=True):
        if is_checkpointed:
            linears = model.linears(layer)
            again = rerun_products(
                len(linears), case.recompute, saves_last=saves_last(model, linears[-1])
            )
            total += 2 * sum(linears[place].num_active for place in again)
            total += scans(model, layer)
            total += 0.0 if case.recompute is Recompute.OPS else attention(model, layer)
    return total


def saves_last(model: ModelConfig, last: Linear) -> bool:
    """Return whether the result of a block's last product is saved.

    Rows of routed experts are weighted after it, a gate multiplies with its sigmoid, a norm
    may follow.
    """
    is_used = last.is_routed or last.name == "ffn.shared_weight"
    return is_used or model.norm_placement in ("post", "both")
