"""Memory of a workload of any framework, from the workload alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.api.workload import workload as generate
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel
from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.step.native import decode, encode
from stepmark.step.workload import Workload
from stepmark.step_memory import workload_memory
from stepmark.step_memory.memory import estimate, stage_estimates
from stepmark.step_memory.pytorch_memory import stage_memories
from stepmark.step_memory.workload_memory import known_job, memory_of, verdict, what_fits
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.pytorch.case import job_of, settings_of
from stepmark.workloads.shrink import shrunk

LLAMA = find_model("llama-3.1-8b")
H100 = 80 * 2**30
LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron": {"tp": 2, "pp": 2, "dp_shard": 4},
    "deepspeed": {"dp_shard": 8},
    "fsdp": {"dp_shard": 8},
    "ddp": {"dp_replicate": 8},
    "tp": {"tp": 8},
    "pp": {"pp": 8},
}


def workload(rules: str, mbs: int = 1, **settings: Any) -> Workload:
    parallel = ParallelConfig(**LAYOUTS[rules])
    job = Job(model=LLAMA, parallel=parallel, mbs=mbs, gbs=8 * mbs * parallel.data_ranks)
    return RULES[rules].workload(job, RULES[rules].make(**settings))


@pytest.mark.parametrize("rules", LAYOUTS)
def test_a_file_has_the_memory_of_its_job(rules: str) -> None:
    of_job = workload(rules)
    memories = memory_of(of_job)
    assert memories
    assert memory_of(decode(encode(of_job))) == memories
    sizes = [memory.allocated_bytes for memory in memories]
    assert sizes == sorted(sizes, reverse=True)
    for memory in memories:
        assert sum(memory.kinds.values()) == memory.allocated_bytes <= memory.reserved_bytes
        assert min(memory.kinds.values()) >= 0
    # Weights in 16 bits at least, over all ranks that divide them.
    held = sum(memory.weights_bytes for memory in memories)
    ranks = 8 if rules not in ("ddp", "megatron", "pp") else 1 if rules == "ddp" else 2
    assert rules == "pp" or held >= 2 * LLAMA.num_params / ranks * 0.99


def test_the_case_of_train_has_the_same() -> None:
    from stepmark.step_memory.pytorch_memory import case_of

    known = known_job(workload("fsdp"))
    assert known is not None
    _, *own = known
    case = case_of(*own)
    assert (case.grad_accum, case.precision.value, case.strategy) == (8, "amp", "fsdp")
    assert memory_of(workload("fsdp"))[0] == estimate(case)


@pytest.mark.parametrize("stages", [2, 4])
def test_interleaved_stages_of_a_job_are_those_of_train(stages: int) -> None:
    model = replace(LLAMA, num_layers=8, seq_len=1024)
    case = TrainCase(
        model=model,
        mbs=8,
        parallel=ParallelConfig(pp=2),
        data_parallel=DataParallel.NONE,
        pp_schedule=PipelineSchedule.INTERLEAVED,
        pp_stages=stages,
        pp_microbatches=8,
    )
    memories = stage_memories(job_of(case), settings_of(case))
    assert memories == stage_estimates(case)


def test_what_no_rule_made_has_none() -> None:
    of_job = workload("megatron")
    assert memory_of(shrunk(of_job, 8)) == ()
    file = json.loads(encode(of_job))
    file["rules"] = "capture"
    assert memory_of(decode(json.dumps(file).encode())) == ()
    file["rules"] = "megatron"
    file["settings"]["recompute_granularity"] = "some"
    with pytest.raises(ConfigError, match="settings"):
        memory_of(decode(json.dumps(file).encode()))


@pytest.mark.parametrize(
    ("rules", "settings"),
    [
        ("pytorch", {"lora_rank": 8}),
        ("deepspeed", {"offload_optimizer": "cpu"}),
        ("deepspeed", {"offload_param": "cpu"}),
    ],
)
def test_what_is_frozen_or_on_the_host_is_not_taken_for_all_of_a_step(
    rules: str, settings: dict[str, object]
) -> None:
    """Without the setting the same job has a memory."""
    made = generate("llama-3.1-8b", framework=rules, world_size=8, **settings).program
    assert memory_of(made) == ()
    assert known_job(made) is None
    assert memory_of(generate("llama-3.1-8b", framework=rules, world_size=8).program)


@pytest.mark.parametrize("axes", [{"tp": 4}, {"pp": 4}])
def test_a_file_without_its_axes_has_no_memory(axes: dict[str, int]) -> None:
    """Earlier versions wrote none; a job of other ranks would be another."""
    made = generate("llama-3.1-8b", framework="pytorch", **axes).program
    settings = {name: value for name, value in made.settings.items() if name not in axes}
    assert memory_of(made)
    assert memory_of(replace(made, settings=settings)) == ()


def test_the_smallest_change_that_fits() -> None:
    large = workload("megatron", mbs=4)
    assert verdict(large, H100) == "does not fit"
    words = what_fits(large, H100)
    assert words.startswith("--")
    settings = {"use_distributed_optimizer": True, "sequence_parallel": True}
    assert verdict(workload("megatron", **settings), H100) == "fits"
    assert verdict(workload("megatron", mbs=4), 10**13) == "fits"
    assert what_fits(large, 2**20) == ""
    zero = workload("deepspeed", mbs=1, stage=0)
    assert verdict(zero, H100) == "does not fit"
    assert what_fits(zero, 120 * 2**30) == "--stage 2"


def test_close_is_the_last_part_of_the_device() -> None:
    of_job = workload("megatron")
    needed = memory_of(of_job)[0].reserved_bytes + workload_memory.OUTSIDE_BYTES
    assert verdict(of_job, needed - 1) == "does not fit"
    assert verdict(of_job, needed + 1) == "close"
    assert verdict(of_job, int(needed / 0.91)) == "fits"


def test_a_prediction_of_a_file_says_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(encode(workload("megatron", use_distributed_optimizer=True)))
    assert status(["predict", str(path), "--device", "h100-sxm"]) == 0
    assert "on stage 0, fits into 80 GiB" in capsys.readouterr().out
