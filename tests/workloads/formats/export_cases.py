"""Small jobs of every framework over all axes that its rules accept."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.step.workload import ComputeOp, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES

DENSE = ModelConfig(
    name="dense",
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=512,
    seq_len=64,
)
EXPERTS = replace(
    DENSE, name="experts", moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=64)
)
TWO = (1, 2)
BOOL = (False, True)
Axes = dict[str, tuple[Any, ...]]
_LAYOUT: Axes = {"tp": TWO, "pp": TWO, "cp": TWO, "dp_shard": (1, 2, 4), "dp_replicate": TWO}
# By framework: the axes with the degrees to try, and values of settings.
AXES: dict[str, tuple[Axes, Axes]] = {
    "megatron": (
        {**_LAYOUT, "ep": (1, 2, 4)},
        {
            "sequence_parallel": BOOL,
            "use_distributed_optimizer": BOOL,
            "expert_tensor_parallel_size": (None, 1),
            "virtual_pipeline_model_parallel_size": TWO,
        },
    ),
    "deepspeed": (
        {"dp_shard": (1, 2, 4), "tp": TWO, "ep": TWO},
        {"stage": (0, 1, 2, 3), "overlap_comm": (None, True), "zero_init": BOOL},
    ),
    "fsdp": (
        {**_LAYOUT, "ep": TWO},
        {
            "pp_schedule": (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED),
            "reshard_after_forward": ("yes", "no"),
        },
    ),
    "ddp": ({"dp_replicate": (1, 2, 4), "cp": TWO}, {"init_sync": BOOL}),
    "tp": ({"tp": (1, 2)}, {"masters": BOOL}),
    "dlrm": ({"dp_shard": (1, 2, 4)}, {"mini_batch_size": (8, 16)}),
    "pp": (
        {"tp": TWO, "pp": (1, 2, 4)},
        {"pp_schedule": (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE)},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCase:
    """A framework's job. `workload` makes it, with times of computation."""

    framework: str
    model: ModelConfig
    axes: tuple[tuple[str, int], ...]
    settings: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in (*self.axes, *self.settings)]
        return " ".join([self.framework, self.model.name, *words])

    def workload(self) -> Workload:
        """Return the workload. Raise ConfigError if the rules refuse the job."""
        parallel = ParallelConfig(**dict(self.axes))
        rule = RULES[self.framework]
        settings = rule.make(**dict(self.settings))
        if not rule.has_job:
            return timed(rule.workload(settings, parallel.world_size))
        job = Job(model=self.model, parallel=parallel, gbs=4 * parallel.data_ranks)
        return timed(rule.workload(job, settings))


def timed(workload: Workload) -> Workload:
    """Return the workload with a time of each computation, as SimAI's text needs them."""
    blocks = {
        name: tuple(
            replace(item, time_s=1e-6) if isinstance(item, ComputeOp) else item
            for item in block
        )
        for name, block in workload.blocks.items()
    }
    return replace(workload, blocks=blocks)


def _products(axes: Axes) -> Iterator[tuple[tuple[str, Any], ...]]:
    for values in itertools.product(*axes.values()):
        yield tuple(zip(axes, values, strict=True))


def cases() -> Iterator[ExportCase]:
    """Yield all jobs, also those that the rules refuse."""
    for framework, (axes, settings) in AXES.items():
        for model in (DENSE, EXPERTS):
            for layout in _products(axes):
                if model is DENSE and dict(layout).get("ep", 1) > 1:
                    continue
                for values in _products(settings):
                    yield ExportCase(
                        framework=framework, model=model, axes=layout, settings=values
                    )


def accepted(chosen: Iterator[ExportCase]) -> Iterator[tuple[ExportCase, Workload]]:
    """Yield jobs of at most 16 ranks that the rules accept, with their workloads."""
    for case in chosen:
        try:
            workload = case.workload()
        except ConfigError:
            continue
        if workload.world_size <= 16:
            yield case, workload
