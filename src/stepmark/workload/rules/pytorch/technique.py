"""How a step of a PyTorch trainer runs, whatever is sharded or reduced in it."""

from collections.abc import Callable
from dataclasses import dataclass

from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.training import Recompute
from stepmark.core.workload import Block
from stepmark.workload.architecture import AnyJob
from stepmark.workload.rules.pytorch.chunk import Chunk
from stepmark.workload.rules.pytorch.fsdp_order import Sharding
from stepmark.workload.rules.pytorch.schedules import Order, Schedule
from stepmark.workload.rules.pytorch.units import TpPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """How stages work together. num_microbatches: of one pass; 0: all of a step.

    num_chunks: stages of a rank, where they are interleaved.
    """

    schedule: Schedule = Schedule.ONE_F_ONE_B
    num_microbatches: int = 0
    num_chunks: int = 2

    def order(self, job: AnyJob) -> Order:
        """Raises ConfigError."""
        count = self.num_microbatches or job.num_microbatches
        if job.num_microbatches % count:
            raise ConfigError(
                "pp_microbatches",
                count,
                f"a divisor of {job.num_microbatches} micro-batches of a step",
            )
        is_interleaved = self.schedule is Schedule.INTERLEAVED
        return Order(
            schedule=self.schedule,
            num_ranks=job.parallel.pp,
            num_microbatches=count,
            num_chunks=self.num_chunks if is_interleaved else 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """How a step runs, whatever the rule. weights: dtype of what the optimizer updates.

    buckets: makes DDP's backward pass of a chunk; setup: what it sends before the first step.
    """

    weights: DType = DType.FP32
    model_weights: DType = DType.FP32
    sharding: Sharding | None = None
    plan: TpPlan = TpPlan.TORCHTITAN
    table_again: bool = True  # gathered for the backward pass, too
    together: bool = True
    blocks_per_group: int = 1
    recompute: Recompute = Recompute.NONE
    recompute_blocks: tuple[int, int] = (1, 1)
    holds: bool = False  # gradients are reduced with the last micro-batch only
    clips: bool = True
    pipelined: Pipelined | None = None
    buckets: Callable[[Chunk], Callable[[], Block]] | None = None
    setup: Callable[[Chunk], Block] | None = None
