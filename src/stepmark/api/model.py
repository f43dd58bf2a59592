"""A model: what `--model` names, as an object."""

import os

from stepmark.api.keywords import spells_keywords, text
from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.workloads.models import read_models


class Model:
    """A decoder-only transformer, unsharded: a built-in one, or one of a file.

    name, num_layers, hidden_size, ffn_hidden_size, num_heads, num_kv_heads, head_dim,
    vocab_size, seq_len, num_experts (0: dense), num_params, num_active_params (those that one
    token uses). config: the rest, such as normalization, biases, latent attention.
    """

    @spells_keywords
    def __init__(self, name: str | os.PathLike[str]) -> None:
        """Read a model by its name, or from a config.json of Hugging Face or its folder.

        Raises ConfigError for an unknown name, with similar ones.
        """
        self.source = text(name)  # as other functions take it
        models = read_models(self.source)
        if len(models) != 1:
            raise ConfigError("model", self.source, f"one model, not {len(models)}")
        self.config: ModelConfig = models[0]
        config = self.config
        self.name = config.name
        self.num_layers = config.num_layers
        self.hidden_size = config.hidden_size
        self.ffn_hidden_size = config.ffn_hidden_size
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.seq_len = config.seq_len
        self.num_experts = config.moe.num_experts if config.moe else 0
        self.num_params = config.num_params
        self.num_active_params = config.num_active_params

    def __fspath__(self) -> str:
        return self.source

    def __repr__(self) -> str:
        return (
            f"Model({self.source!r}): {self.num_params / 1e9:.4g} billion parameters, "
            f"{self.num_layers} layers, hidden size {self.hidden_size}"
        )
