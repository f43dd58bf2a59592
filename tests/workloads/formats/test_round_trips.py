"""PARAM and Chakra files that are read and written again: the same bytes, groups and names."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import MlaConfig, MoeConfig
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.step.workload import Workload
from stepmark.workloads.formats import FORMATS
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES

from .export_cases import BOOL, DENSE, EXPERTS

LATENT = replace(
    DENSE,
    name="latent",
    num_kv_heads=4,
    head_dim=24,
    mla=MlaConfig(
        q_lora_rank=32,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    moe=MoeConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=64,
        num_shared_experts=1,
        shared_ffn_hidden_size=32,
        first_dense_layers=1,
        router_bias=True,
    ),
)
SCHEDULES = tuple(PipelineSchedule)
ALL_AXES = ("tp", "pp", "cp", "dp_shard", "dp_replicate", "ep")
# By framework: the axes, and values of settings.
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, tuple[Any, ...]]]] = {
    "megatron": (
        ALL_AXES,
        {
            "sequence_parallel": BOOL,
            "use_distributed_optimizer": BOOL,
            "overlap_grad_reduce": BOOL,
            "overlap_param_gather": BOOL,
            "overlap_p2p_comm": BOOL,
            "virtual_pipeline_model_parallel_size": (1, 2),
            "expert_tensor_parallel_size": (None, 1),
        },
    ),
    "deepspeed": (
        ("dp_shard", "tp", "ep"),
        {"stage": (0, 1, 2, 3), "overlap_comm": (None, True)},
    ),
    "fsdp": (ALL_AXES, {"pp_schedule": SCHEDULES, "reshard_after_forward": ("yes", "no")}),
    "ddp": (("dp_replicate", "cp"), {"init_sync": BOOL}),
    "tp": (("tp",), {"masters": BOOL}),
    "pp": (("tp", "pp"), {"pp_schedule": SCHEDULES}),
}


def drawn(seed: int) -> Iterator[tuple[str, Workload]]:
    """Yield layouts of 2 to 16 ranks that the rules accept, each with words that repeat it."""
    rng = random.Random(seed)
    while True:
        framework = rng.choice(list(LAYOUTS))
        yield next(filter(None, (tried(rng, framework) for _ in itertools.count())))


def tried(rng: random.Random, framework: str) -> tuple[str, Workload] | None:
    """Return a layout of a framework; None: its rules refuse it."""
    names, choices = LAYOUTS[framework]
    model = rng.choice((DENSE, EXPERTS, LATENT))
    axes = {name: rng.choice((1, 1, 2, 2, 4)) for name in names}
    values = {name: rng.choice(choices[name]) for name in choices}
    parallel = ParallelConfig(**axes)
    gbs = rng.choice((2, 4)) * parallel.data_ranks
    if not 2 <= parallel.world_size <= 16:
        return None
    rule = RULES[framework]
    try:
        job = Job(model=model, parallel=parallel, gbs=gbs)
        workload = rule.workload(job, rule.make(**values))
    except ConfigError:
        return None
    return f"{framework} {model.name} {axes} {values} gbs {gbs}", workload


def written(name: str, workload: Workload, folder: Path) -> dict[str, bytes]:
    """Write the files of all ranks. Return them by name."""
    folder.mkdir()
    for file, chunks in FORMATS[name].load().files(workload):
        data = b"".join(one if isinstance(one, bytes) else one.encode() for one in chunks)
        (folder / file).write_bytes(data)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_kept(name: str, workload: Workload, folder: Path) -> bool:
    """Return whether files are the same after reading, and their groups those of the job."""
    folder.mkdir()
    first = written(name, workload, folder / "first")
    again = FORMATS[name].load().read(folder / "first")
    second = written(name, again, folder / "second")
    groups = {key: group for key, group in workload.groups.items() if group.size > 1}
    others = {key: group for key, group in again.groups.items() if group.size > 1}
    same_ranks = all(
        key in others and others[key].members(0) == group.members(0)
        for key, group in groups.items()
    )
    return first == second and list(groups) == list(others) and same_ranks


def num_kept(name: str, folder: Path, seed: int, count: int) -> tuple[int, list[str]]:
    """Return the layouts whose files are the same, and the words of the others."""
    layouts = drawn(seed)
    different = []
    for number in range(count):
        words, workload = next(layouts)
        if not is_kept(name, workload, folder / str(number)):
            different.append(words)
    return count - len(different), different


@pytest.mark.parametrize("name", ["param", "chakra"])
def test_files_read_and_written_again_are_the_same(name: str, tmp_path: Path) -> None:
    assert num_kept(name, tmp_path, seed=7, count=6) == (6, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["param", "chakra"])
@pytest.mark.parametrize("seed", [11, 12])
def test_files_of_many_layouts_are_the_same(name: str, seed: int, tmp_path: Path) -> None:
    assert num_kept(name, tmp_path, seed, count=60) == (60, [])
