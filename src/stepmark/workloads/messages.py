"""Messages that training a model sends: their roles and their sizes in bytes.

Sizes are those that nccl-tests calls size: the whole buffer, not one rank's part.
"""

import math

from stepmark.model.collectives import ALL_TO_ALLS, GATHERS, Collective
from stepmark.model.model import ModelConfig

ROLES = ("activation", "layer", "moe_layer", "dispatch")


def messages(
    model: ModelConfig,
    collective: Collective,
    *,
    mbs: int,
    seq_len: int,
    itemsize: int,
    num_ranks: int,
) -> dict[str, int]:
    """Return bytes by role.

    activation: hidden states of a micro-batch, [mbs, seq_len, hidden], which tensor and
    sequence parallelism reduce, gather and scatter, and pipeline stages send on. layer,
    moe_layer: all parameters of a layer, norms included, which FSDP gathers and scatters per
    unit. dispatch: [mbs x seq_len x top_k, hidden or latent] tokens to experts, padded to a
    multiple of the ranks; a dense model exchanges its activations (sequence parallelism by
    heads).
    """
    tokens = mbs * seq_len
    activation = tokens * model.hidden_size * itemsize
    if collective in ALL_TO_ALLS:
        if model.moe is None:
            return {"activation": activation}
        rows = math.ceil(tokens * model.moe.top_k / num_ranks) * num_ranks
        width = model.moe.latent_size or model.hidden_size
        return {"dispatch": rows * width * itemsize}
    sizes = {"activation": activation}
    if collective in GATHERS:
        for layer in model.layer_counts:
            role = "moe_layer" if layer.has_experts else "layer"
            sizes.setdefault(role, model.layer_params(layer) * itemsize)
    return sizes
