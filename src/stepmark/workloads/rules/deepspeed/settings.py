"""DeepSpeed's settings, with its own checks.

DeepSpeed 0.19.8: deepspeed/runtime/zero/config.py, runtime/config.py, engine.py.
"""

from dataclasses import dataclass
from enum import StrEnum

from stepmark.ground.errors import ConfigError
from stepmark.workloads.job import TRAINED, refuse_first, setting

_MOST = 2**63 - 1


class Switch(StrEnum):
    """A switch. auto: DeepSpeed's choice by the stage."""

    AUTO = "auto"
    TRUE = "true"
    FALSE = "false"


class Offload(StrEnum):
    """Where optimizer states or weights are between their uses."""

    NONE = "none"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed:
    """Settings under DeepSpeed's names, with its defaults. Sizes are elements."""

    stage: int = setting(
        3, "shards: 0 nothing, 1 optimizer, 2 + gradients, 3 + weights", common=True
    )
    reduce_bucket_size: int = setting(
        500_000_000, "elements per gradient bucket (stages 1-3)", common=True
    )
    allgather_bucket_size: int = setting(
        500_000_000, "no effect: stages 1 and 2 gather all weights in one call"
    )
    overlap_comm: Switch = setting(
        Switch.AUTO, "overlap reductions with the backward pass; auto: at stage 3"
    )
    reduce_scatter: bool = setting(True, "false: all-reduce gradients, at stage 3 as well")
    contiguous_gradients: bool = setting(True, "copy gradients into one buffer")
    use_multi_rank_bucket_allreduce: bool = setting(
        True, "stages 1 and 2: all-reduce buckets; false: reduce slices to owners"
    )
    round_robin_gradients: bool = setting(False, "stages 1 and 2: deal parameters to ranks")
    compute_grad_norm: bool = setting(True, "stages 1 and 2: compute the norm of gradients")
    gradient_clipping: float = setting(1.0, "norm to clip to; 0: none (stage 0, fp32: no norm)")
    check_grad_overflow: bool = setting(True, "bf16, stages 1 and 2: check for infinities")
    grad_accum_dtype: str = setting("", "dtype of accumulated gradients [that of weights]")
    communication_data_type: str = setting("", "dtype of reduced gradients [that of weights]")
    sub_group_size: int = setting(1_000_000_000, "stage 3: elements per rank and norm")
    stage3_prefetch_bucket_size: int = setting(
        50_000_000, "elements gathered ahead of use", common=True
    )
    stage3_param_persistence_threshold: int = setting(
        100_000, "parameters of at most this many elements are not sharded"
    )
    stage3_model_persistence_threshold: int = setting(_MOST, "elements of these together")
    stage3_max_live_parameters: int = setting(1_000_000_000, "prefetch up to these elements")
    stage3_max_reuse_distance: int = setting(
        1_000_000_000, "keep weights used again within this many elements"
    )
    offload_optimizer: Offload = setting(
        Offload.NONE, "cpu: gradients are copied to the host, which runs Adam"
    )
    offload_param: Offload = setting(
        Offload.NONE, "stage 3, cpu: shards of weights are on the host until they are gathered"
    )
    zero_init: bool = setting(False, "stage 3: build the model under deepspeed.zero.Init")

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise ConfigError("stage", self.stage, "0, 1, 2 or 3")
        for name in _SIZES:
            value = getattr(self, name)
            low = name == "reduce_bucket_size"
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not low <= value <= _MOST:
                raise ConfigError(name, value, f"a whole number of {int(low)} or more")
        clip = self.gradient_clipping
        gathered = self.allgather_bucket_size
        dtypes = {
            "grad_accum_dtype": self.grad_accum_dtype,
            "communication_data_type": self.communication_data_type,
        }
        refuse_first(
            (not 0 <= clip < float("inf"), "gradient_clipping", clip, "0 or more"),
            (gathered % 2, "allgather_bucket_size", gathered, "even"),
            *(
                (dtype not in ("", *TRAINED), name, dtype, "fp32, bf16, fp16 or empty")
                for name, dtype in dtypes.items()
            ),
            (
                self.offload_optimizer is Offload.CPU and not self.stage,
                "offload_optimizer",
                self.offload_optimizer,
                "only with stage 1, 2 or 3",
            ),
            (
                self.offload_param is Offload.CPU and self.stage != 3,
                "offload_param",
                self.offload_param,
                "only with stage 3",
            ),
            (self.zero_init and self.stage != 3, "zero_init", True, "only with stage 3"),
            (
                not self.compute_grad_norm and (self.stage not in (1, 2) or clip),
                "compute_grad_norm",
                False,
                "only with stage 1 or 2 and gradient_clipping of 0",
            ),
        )

    @property
    def is_offloaded(self) -> bool:
        return self.offload_optimizer is Offload.CPU

    @property
    def has_host_weights(self) -> bool:
        """Whether shards of weights are in the host's memory."""
        return self.offload_param is Offload.CPU

    @property
    def overlaps(self) -> bool:
        if self.overlap_comm is Switch.AUTO:
            return self.stage == 3
        return self.overlap_comm is Switch.TRUE


_SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
