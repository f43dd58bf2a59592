"""A schedule without a pipeline does nothing."""

import pytest

from stepmark.model.parallel import PipelineSchedule
from stepmark.workloads import workload_flags
from stepmark.workloads.workload import generate


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_one_stage_has_no_schedule(schedule: PipelineSchedule) -> None:
    cls = workload_flags.options_class("pytorch", has_ignored=False)
    job = {"model": "llama-3.1-8b", "dp_shard": 2, "gbs": 4}
    plain, own = (
        generate(cls(framework="pytorch", **job, **more))
        for more in ({}, {"pp_schedule": schedule})
    )
    assert own.blocks == plain.blocks
    assert own.stages == plain.stages
