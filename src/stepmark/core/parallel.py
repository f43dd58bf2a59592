"""How a model is spread over ranks. World size is the product of the axes that multiply."""

import math
from dataclasses import dataclass, fields

from stepmark.core.errors import ConfigError
from stepmark.core.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degree per axis. ep lies inside dp_shard: an expert's other shards are dp_shard / ep.

    Source of that rule: torchtitan, distributed/parallel_dims.py (expert parallelism borrows
    the data-parallel shard axis).
    """

    tp: int = 1
    ep: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not 1 <= value <= 2**20:
                name = field.name.replace("_", "-")
                raise ConfigError(name, value, "a whole number from 1 to 1048576")

    @property
    def world_size(self) -> int:
        """Ranks in all; ep borrows some of dp_shard's."""
        return math.prod((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    @property
    def data_ranks(self) -> int:
        """How many different micro-batches are worked on at a time."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Over how many gradients are averaged: data ranks, and those of one sequence."""
        return self.data_ranks * self.cp

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError where this model cannot be divided so."""
        divides = [("heads", model.num_heads), ("vocab_size", model.vocab_size)]
        if model.mla is None:
            divides.append(("kv_heads", model.num_kv_heads))
        if model.ffn_hidden_size:
            divides.append(("ffn_hidden_size", model.ffn_hidden_size))
        if model.moe and model.moe.shared_ffn_hidden_size:
            divides.append(("shared ffn_hidden_size", model.moe.shared_ffn_hidden_size))
        for what, size in divides:
            if size % self.tp:
                raise ConfigError("tp", self.tp, f"a divisor of {model.name}'s {what} ({size})")
        if self.ep > 1 and model.moe is None:
            raise ConfigError("ep", self.ep, f"1, since {model.name} has no experts")
        if model.moe and model.moe.num_experts % self.ep:
            raise ConfigError("ep", self.ep, f"a divisor of {model.moe.num_experts} experts")
        if (
            self.dp_shard > 1
            and self.ep > 1
            and max(self.dp_shard, self.ep) % min(self.dp_shard, self.ep)
        ):
            raise ConfigError(
                "dp-shard", self.dp_shard, f"a multiple or divisor of ep ({self.ep})"
            )
