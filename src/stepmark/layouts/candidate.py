"""A layout of a model on a number of GPUs."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stepmark.cases.training import Recompute
from stepmark.layouts.plan_options import TWO_HOP
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.step.workload import Workload
from stepmark.step_memory import workload_memory
from stepmark.step_memory.rank_memory import RankMemory
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron.settings import CpComm, Dispatcher, Granularity

PLAIN = PipelineSchedule.ONE_F_ONE_B.value
_DEGREES = ("tp", "pp", "vpp", "cp", "ep", "dp", "mbs")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout. options: those of `workload generate` that describe it.

    is_gathered: gathers of weights, reductions of gradients and their copies take no time.
    """

    framework: str
    job: Job
    settings: Any
    options: Mapping[str, Any]
    is_gathered: bool = False

    @property
    def is_megatron(self) -> bool:
        return self.framework == "megatron"

    @property
    def parallel(self) -> ParallelConfig:
        return self.job.parallel

    @property
    def num_chunks(self) -> int:
        """Model chunks of a stage."""
        if self.is_megatron:
            return int(self.settings.virtual_pipeline_model_parallel_size)
        return int(self.settings.pp_schedule.num_chunks(self.settings.pp_stages))

    def workload(self) -> Workload:
        """Return the workload of a step. Raises ConfigError."""
        return RULES[self.framework].workload(self.job, self.settings)

    @cached_property
    def memory(self) -> RankMemory:
        """The memory of the fullest rank. Raises ConfigError."""
        return workload_memory.of_job(self.framework, self.job, self.settings)[0]

    @property
    def recompute(self) -> str:
        """Layers that are recomputed, as a word."""
        settings = self.settings
        if not self.is_megatron:
            some, every = settings.recompute_some, settings.recompute_every
            is_part = settings.recompute is Recompute.BLOCKS
            return f"{some}/{every}" if is_part else str(settings.recompute.value)
        if settings.recompute_granularity is not Granularity.FULL:
            return str(settings.recompute_granularity.value)
        is_block = settings.recompute_method == "block"
        return f"{settings.recompute_num_layers}/chunk" if is_block else "full"

    @property
    def schedule(self) -> PipelineSchedule:
        """How a pipeline orders its passes; interleaved chunks count as 1F1B."""
        own = getattr(self.settings, "pp_schedule", PipelineSchedule.ONE_F_ONE_B)
        is_plain = own is PipelineSchedule.INTERLEAVED
        return PipelineSchedule.ONE_F_ONE_B if is_plain else PipelineSchedule(own)

    @property
    def exchange(self) -> str:
        """Exchange among ranks of cp, where it is not the default of the rules."""
        kind = self.settings.cp_comm_type if self.is_megatron else CpComm.P2P
        return "" if kind is CpComm.P2P or self.parallel.cp == 1 else str(kind)

    @property
    def dispatch(self) -> str:
        """How tokens go to experts on other ranks, where it is not by one all-to-all."""
        if not self.is_megatron or self.parallel.ep == 1:
            return ""
        is_flex = self.settings.moe_token_dispatcher_type is Dispatcher.FLEX
        return TWO_HOP if is_flex else ""

    @cached_property
    def axes(self) -> Mapping[str, Any]:
        """What layouts differ in, but for the data ranks, which the others leave."""
        own = self.parallel
        return {
            "framework": self.framework,
            "tp": own.tp,
            "pp": own.pp,
            "vpp": self.num_chunks,
            "pp_schedule": self.schedule.value,
            "cp": own.cp,
            "cp_comm_type": self.exchange,
            "ep": own.ep,
            "dispatch": self.dispatch,
            "dp_replicate": own.dp_replicate,
            "mbs": self.job.mbs,
            "recompute": self.recompute,
        }

    @property
    def step(self) -> Hashable:
        """What its step is, however it was described."""
        return self.job, self.settings

    @property
    def row(self) -> dict[str, Any]:
        """What it differs in from others."""
        return {**self.axes, "dp": self.parallel.data_ranks}

    @property
    def needed_bytes(self) -> int:
        """Bytes of a device that the fullest rank needs. Raises ConfigError."""
        return self.memory.reserved_bytes + workload_memory.OUTSIDE_BYTES


def place(row: Mapping[str, Any]) -> str:
    """Return a layout as words."""
    degrees = [f"{name} {row[name]}" for name in _DEGREES if row[name] > 1 or name == "mbs"]
    again = "no recomputation"
    if row["recompute"] != "none":
        again = f"recomputed layers {row['recompute']}"
    schedule = [] if row["pp_schedule"] == PLAIN else [row["pp_schedule"]]
    degrees += [f"cp by {row['cp_comm_type']}"] if row["cp_comm_type"] else []
    replicas = row["dp_replicate"]
    replicated = [f"{replicas} replicas of the shards"] if replicas > 1 else []
    hops = [row["dispatch"]] if row["dispatch"] else []
    return ", ".join((row["framework"], *degrees, *schedule, *hops, *replicated, again))
