"""What becomes of a layer's attention scores: scale, cap, and which keys a query sees."""

from collections.abc import Iterator
from dataclasses import dataclass

from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig

# Kernels that compute more than softmax(causal scores): FlexAttention's and products.
MASKED_KERNELS = ("auto", "math")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """softmax(cap tanh(scale q @ k.T / cap)) over the keys of a window or chunk, causal.

    scale: None is 1 / sqrt(head width). window, chunk: of tokens; softcap; 0: none.
    """

    scale: float | None = None
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is causal attention and nothing else."""
        return not (self.window or self.chunk or self.softcap or self.has_sinks)


def all_scores(model: ModelConfig) -> Iterator[Scores]:
    """Yield the scores of each kind of layer with attention."""
    for layer in model.layer_counts:
        if layer.has_attention:
            yield scores_of(model, layer)


def scores_of(model: ModelConfig, layer: Layer) -> Scores:
    """Return a layer's scores; a window as long as the sequence is none."""
    length = model.seq_len
    return Scores(
        scale=model.attention_scale or None,
        window=layer.window if layer.window < length else 0,
        chunk=layer.chunk if layer.chunk < length else 0,
        softcap=model.softcap,
        has_sinks=model.of_layer(layer).has_sinks,
    )
