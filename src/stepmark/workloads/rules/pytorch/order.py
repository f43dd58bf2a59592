"""One pass of micro-batches through a pipeline of torch.distributed.pipelining."""

from dataclasses import dataclass
from functools import cache
from itertools import groupby

from stepmark.ground.errors import ConfigError
from stepmark.model.parallel import PipelineSchedule, StageSplit
from stepmark.workloads.job import Job, refuse_first
from stepmark.workloads.pipeline import COMPUTE_DONE, Act, Action


def split_note(sizes: list[int], split: StageSplit) -> tuple[str, ...]:
    """Return a note if stages have different numbers of layers."""
    if len(set(sizes)) < 2:
        return ()
    alike = [(size, len(list(same))) for size, same in groupby(sizes)]
    words = ", ".join(f"{size} x {times}" if times > 1 else str(size) for size, times in alike)
    why = "embedding and head count as a layer each, as in torchtitan (--pp-split even)"
    rule = why if split is StageSplit.TORCHTITAN else "the first ones have the remainder"
    return (f"layers of the {len(sizes)} pipeline stages: {words}: {rule}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One pass of micro-batches through all stages. Raises ConfigError."""

    schedule: PipelineSchedule
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1  # stages of a rank

    def __post_init__(self) -> None:
        # `spans` keeps results by equality, and a plain "gpipe" is equal.
        object.__setattr__(self, "schedule", PipelineSchedule(self.schedule))
        count = self.num_microbatches
        ranks = self.num_ranks
        refuse_first(
            (
                self.schedule is PipelineSchedule.ONE_F_ONE_B and count < ranks,
                "pp_microbatches",
                count,
                f"at least pp ({ranks}) with 1f1b",
            ),
            (
                self.schedule.has_stages and count % self.rounds,
                "pp_microbatches",
                count,
                f"a multiple of its rounds ({count} // pp {ranks} = {self.rounds})",
            ),
            (
                self.schedule is PipelineSchedule.DUALPIPE_V and count < self.num_stages,
                "pp_microbatches",
                count,
                f"at least the stages ({self.num_stages}) with dualpipev",
            ),
        )

    @property
    def rounds(self) -> int:
        return max(1, self.num_microbatches // self.num_ranks)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        return self.schedule.stage(rank, chunk, self.num_ranks)

    def neighbour(self, rank: int, chunk: int, *, forward: bool) -> tuple[int, int] | None:
        """Return rank and chunk of the stage that a pass's result goes to; None: of none."""
        stage = self.stage(rank, chunk) + (1 if forward else -1)
        if not 0 <= stage < self.num_stages:
            return None
        return self.schedule.place(stage, self.num_ranks)


def order_of(job: Job, schedule: PipelineSchedule, count: int, num_chunks: int) -> Order:
    """Return a pass of `count` micro-batches; 0: all of a step. Raises ConfigError."""
    pp = job.parallel.pp
    at_once = job.mbs * job.parallel.data_ranks
    if not count and schedule is PipelineSchedule.ONE_F_ONE_B and job.num_microbatches < pp:
        allowed = (
            f"{pp * at_once} or more: 1f1b needs pp ({pp}) micro-batches of {at_once}; "
            "--pp-schedule interleaved or gpipe takes fewer"
        )
        raise ConfigError("gbs", job.gbs, allowed)
    count = count or job.num_microbatches
    if job.num_microbatches % count:
        allowed = f"a divisor of {job.num_microbatches} micro-batches of a step"
        raise ConfigError("pp_microbatches", count, allowed)
    return Order(
        schedule=schedule,
        num_ranks=job.parallel.pp,
        num_microbatches=count,
        num_chunks=schedule.num_chunks(num_chunks),
    )


@cache
def act_of(act: Act, microbatch: int = 0, chunk: int = 0, *, fused: bool = False) -> Action:
    return Action(act=act, microbatch=microbatch, chunk=chunk, fused=fused)


@cache
def later(act: Act, microbatch: int, chunk: int = 0) -> Action:
    """Return an asynchronous action, which starts after the newest computation."""
    return Action(act=act, microbatch=microbatch, chunk=chunk, after=(COMPUTE_DONE,))
