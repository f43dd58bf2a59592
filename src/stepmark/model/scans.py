"""FLOPs of layers that carry a state from token to token, in chunks of tokens.

Each is a sum of matrix products within a chunk and with the state, per token and forward; the
backward pass has twice as many. Squares within a chunk count whole.

mamba      SSD of Mamba-2 (arXiv:2405.21060, section 6, listing 1): C B.T per group, its product
           with x, the chunk's state, and C times the state.
delta      chunked gated delta rule (arXiv:2406.06484, section 3.3; 2412.06464, section 3.3;
           flash-linear-attention): k k.T, W and U of the UT transform, q k.T, its product with
           the new values; W and q times the state, and the state's update. Chunks of 64.
lightning  Lightning Attention-2 (arXiv:2401.04658, algorithm 1): q k.T and its product with v
           within a block of 256; q times k.T v, and its update.
conv       none: a short convolution is no matrix product.
"""

from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig

DELTA_CHUNK = 64
LIGHTNING_BLOCK = 256


def scan_flops(model: ModelConfig, layer: Layer) -> int:
    """Return the forward FLOPs of one token in a layer's scan; 0: it has none."""
    match layer.scan:
        case "mamba" if model.mamba:
            mamba = model.mamba
            chunk = min(mamba.chunk, model.seq_len)
            state = mamba.num_groups * mamba.state_dim
            return 2 * chunk * (state + mamba.inner) + 4 * mamba.state_dim * mamba.inner
        case "delta" if model.delta:
            delta = model.delta
            chunk = min(DELTA_CHUNK, model.seq_len)
            widths = 3 * delta.key_dim + 2 * delta.value_dim
            state = delta.key_dim * delta.value_dim
            return delta.num_value_heads * (2 * chunk * widths + 6 * state)
        case "lightning":
            own = model.of_layer(layer)
            chunk = min(LIGHTNING_BLOCK, model.seq_len)
            return 4 * own.num_heads * own.head_dim * (chunk + own.head_dim)
    return 0


def scan_width(model: ModelConfig, layer: Layer) -> int:
    """Return the elements of one token that a scan reads and writes, states left out."""
    match layer.scan:
        case "mamba" if model.mamba:
            return model.mamba.conv_channels + model.mamba.inner + model.mamba.num_heads
        case "delta" if model.delta:
            delta = model.delta
            return 2 * delta.keys + 2 * delta.values + 2 * delta.num_value_heads
        case "lightning":
            own = model.of_layer(layer)
            return 4 * own.num_heads * own.head_dim
    return 0
