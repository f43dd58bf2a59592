"""Parallel layout of a model: the degree of each axis."""

import itertools
import math
from dataclasses import dataclass, fields
from enum import StrEnum

from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degree of each axis. ep uses ranks of dp_shard: an expert has dp_shard / ep shards.

    Source: torchtitan, distributed/parallel_dims.py.
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
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not 1 <= value <= 2**20:
                name = field.name.replace("_", "-")
                raise ConfigError(name, value, "a whole number from 1 to 1048576")

    @property
    def world_size(self) -> int:
        """Return the number of ranks; ep uses ranks of dp_shard."""
        return math.prod((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    @property
    def data_ranks(self) -> int:
        """Return the number of different micro-batches that are processed at the same time."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Return the number of ranks over which gradients are averaged: data and cp ranks."""
        return self.data_ranks * self.cp

    def check(
        self,
        model: ModelConfig,
        *,
        shares_kv_heads: bool = False,
        has_windows: bool = False,
    ) -> None:
        """Raise ConfigError if the model cannot be divided this way.

        shares_kv_heads: several ranks of tp may use the same KV head. has_windows: ranks of cp
        may have layers with sliding windows.
        """
        moe = model.moe
        for own in (model, *map(model.of_layer, model.pattern)):
            self._check_heads(own, shares_kv_heads=shares_kv_heads)
        for name, size in (
            ("vocab_size", model.vocab_size),
            ("ffn_hidden_size", model.ffn_hidden_size),
            ("shared ffn_hidden_size", moe.shared_ffn_hidden_size if moe else 0),
            ("key heads of DeltaNet", model.delta.num_key_heads if model.delta else 0),
            ("groups of Mamba", model.mamba.num_groups if model.mamba else 0),
        ):
            if size % self.tp:
                raise ConfigError("tp", self.tp, f"a divisor of {model.name}'s {name} ({size})")
        for layer in model.pattern:
            is_masked = layer.chunk or (layer.window and not has_windows)
            words = "sliding windows or chunks" if is_masked else ""
            words = "layers that carry a state" if layer.scan else words
            if words and self.cp > 1:
                raise ConfigError("cp", self.cp, f"1, because {model.name} has {words}")
        if self.cp > 1 and model.mla and model.mla.indexer:
            words = "sparse attention, whose indexer needs whole sequences"
            raise ConfigError("cp", self.cp, f"1, because {model.name} has {words}")
        if self.tp > 1 and model.qk_norm and model.qk_norm_kind == "all":
            words = "norms over all query heads"
            raise ConfigError("tp", self.tp, f"1, because {model.name} has {words}")
        has_kv = all(layer.has_kv for layer in model.pattern)
        words = "" if has_kv else "layers that share keys and values"
        words = "embeddings per layer" if model.per_layer_width else words
        for name in ("tp", "pp"):
            if words and getattr(self, name) > 1:
                raise ConfigError(
                    name, getattr(self, name), f"1, because {model.name} has {words}"
                )
        if self.ep > 1 and moe is None:
            raise ConfigError("ep", self.ep, f"1, because {model.name} has no experts")
        if moe and moe.num_experts % self.ep:
            raise ConfigError("ep", self.ep, f"a divisor of {moe.num_experts} experts")
        if max(self.dp_shard, self.ep) % min(self.dp_shard, self.ep):
            raise ConfigError(
                "dp-shard", self.dp_shard, f"a multiple or divisor of ep ({self.ep})"
            )

    def _check_heads(self, model: ModelConfig, *, shares_kv_heads: bool) -> None:
        """model: with the widths of a layer."""
        if model.num_heads % self.tp:
            rule = f"a divisor of {model.name}'s heads ({model.num_heads})"
            raise ConfigError("tp", self.tp, rule)
        kv_heads = 0 if model.mla else model.num_kv_heads
        if kv_heads % self.tp and (self.tp % kv_heads or not shares_kv_heads):
            what = "divisor or multiple" if shares_kv_heads else "divisor"
            rule = f"a {what} of {model.name}'s kv_heads ({kv_heads})"
            raise ConfigError("tp", self.tp, rule)


class PipelineSchedule(StrEnum):
    """Schedules of torch.distributed.pipelining by our names (torch 2.13, schedules.py)."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    GPIPE = "gpipe"
    ZB1P = "zb1p"  # arXiv:2401.10241; with one stage per rank ZB-H1
    ZBV = "zbv"  # arXiv:2401.10241, two stages per rank
    DUALPIPE_V = (
        "dualpipev"  # DeepSeek's in a V: arXiv:2412.19437, github.com/deepseek-ai/DualPipe
    )

    @property
    def torch_name(self) -> str:
        """Return the name that torch and torchtitan have for it (get_schedule_class)."""
        return _TORCH_NAMES[self]

    @property
    def is_v(self) -> bool:
        """Return whether a rank's second stage is as far from the end as its first from the
        beginning, so that the first rank has both ends of the model."""
        return self in (PipelineSchedule.ZBV, PipelineSchedule.DUALPIPE_V)

    @property
    def splits_backward(self) -> bool:
        """Return whether gradients of weights are computed apart, to fill the bubbles."""
        return self is PipelineSchedule.ZB1P or self.is_v

    @property
    def has_stages(self) -> bool:
        """Return whether the number of stages per rank is a choice."""
        return self in (PipelineSchedule.INTERLEAVED, PipelineSchedule.ZB1P)

    @property
    def has_one_stage(self) -> bool:
        """Return whether a rank has one stage, always."""
        return not (self.has_stages or self.is_v)

    def num_chunks(self, stages_per_rank: int) -> int:
        """Return the stages of a rank. stages_per_rank: where that is a choice."""
        return stages_per_rank if self.has_stages else 2 if self.is_v else 1

    def bubble(self, num_chunks: int) -> float:
        """Return the bubble of a step as a share of that of 1F1B with one stage per rank.

        num_chunks: stages of a rank.

        Gradients of weights fill two of three equal parts of it (arXiv:2401.10241, section
        2.3). Torch runs a pair of DualPipeV one after the other, which stages do not divide.
        """
        whole = 1 / 3 if self.splits_backward else 1.0
        return whole if self is PipelineSchedule.DUALPIPE_V else whole / num_chunks

    def stage(self, rank: int, chunk: int, num_ranks: int) -> int:
        """Return the stage of a rank's chunk.

        Source: torch 2.13, distributed/pipelining/_utils.py (generate_stage_to_rank_mapping).
        """
        first = chunk * num_ranks
        return first + (num_ranks - 1 - rank if self.goes_back(chunk) else rank)

    def goes_back(self, chunk: int) -> bool:
        """Return whether stages of this chunk go from the last rank to the first."""
        return self.is_v and chunk % 2 == 1

    def place(self, stage: int, num_ranks: int) -> tuple[int, int]:
        """Return rank and chunk of a stage."""
        chunk, rank = divmod(stage, num_ranks)
        return self.stage(rank, chunk, num_ranks) - chunk * num_ranks, chunk

    def stages(self, rank: int, num_ranks: int, num_chunks: int) -> list[int]:
        """Return the stages of a rank, the first one first."""
        return [self.stage(rank, chunk, num_ranks) for chunk in range(num_chunks)]


_TORCH_NAMES = {
    PipelineSchedule.ONE_F_ONE_B: "1F1B",
    PipelineSchedule.INTERLEAVED: "Interleaved1F1B",
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.ZB1P: "InterleavedZeroBubble",
    PipelineSchedule.ZBV: "ZBVZeroBubble",
    PipelineSchedule.DUALPIPE_V: "DualPipeV",
}


class StageSplit(StrEnum):
    """Division of the layers among pipeline stages, with the remainder on the first ones."""

    TORCHTITAN = "torchtitan"  # the embedding and the head count as a layer each
    EVEN = "even"


def stage_layers(num_layers: int, num_stages: int, split: StageSplit) -> list[range]:
    """Return the layers of each stage. Raises ConfigError where a stage would have nothing.

    Source: torchtitan b5bcd76, distributed/pipeline_parallel.py
    (_generate_llm_fqn_per_model_part), with its default weights of 1.
    """
    ends = 1 if split is StageSplit.TORCHTITAN and num_stages > 1 else 0
    most = num_layers + 2 * ends
    if num_stages > most:
        what = f"{num_layers} layers{', embedding and head' if ends else ''}"
        raise ConfigError("pipeline stages", num_stages, f"at most {most} ({what})")
    small, rest = divmod(most, num_stages)
    sizes = [small + (index < rest) for index in range(num_stages)]
    sizes[0] -= ends
    sizes[-1] -= ends
    bounds = itertools.accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


class TpPlan(StrEnum):
    """Plans of tensor parallelism, which differ at the ends of a model.

    Source of TORCHTITAN: torchtitan, models/common/decoder_sharding.py.
    """

    # The embedding's rows scattered over the sequence; logits stay divided for the loss.
    TORCHTITAN = "torchtitan"
    WHOLE = "whole"  # rows reduced for all tokens, logits gathered
