"""A workload on fewer ranks: messages keep their size, stages and programs stay."""

import dataclasses

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig
from stepmark.step.rank_program import check_ends, communicators
from stepmark.step.workload import CommOp, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron.rule import Megatron
from stepmark.workloads.rules.megatron.rule import workload as megatron
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.shrink import shrunk


def made(**axes: int) -> Workload:
    job = Job(
        model=find_model("llama-3.1-8b").tiny(), parallel=ParallelConfig(**axes), mbs=1, gbs=48
    )
    return rule.workload(job, RULES["fsdp"].make())


@pytest.mark.parametrize(
    ("axes", "num_ranks", "sizes"),
    [
        ({"dp_shard": 16}, 4, {"fsdp": 4}),
        ({"dp_shard": 16, "tp": 2}, 4, {"fsdp": 2, "tp": 2}),
        ({"dp_shard": 6, "tp": 2}, 4, {"fsdp": 2, "tp": 2}),
        ({"dp_shard": 4, "dp_replicate": 4}, 4, {"fsdp": 4}),
        ({"dp_shard": 8}, 1, {}),
    ],
)
def test_outer_dimensions_shrink_and_messages_stay(
    axes: dict[str, int], num_ranks: int, sizes: dict[str, int]
) -> None:
    before = made(**axes)
    after = shrunk(before, num_ranks)
    assert after.world_size == num_ranks
    check_ends(after)
    found = {name: len(members[0]) for name, members in communicators(after).items()}
    assert {name: found.get(name, 1) for name in sizes} == sizes
    for old, new in zip(before.expand(), after.expand(), strict=True):
        if not isinstance(old, CommOp):
            assert old == new
            continue
        assert isinstance(new, CommOp)
        assert (old.collective, old.dtype, old.after) == (new.collective, new.dtype, new.after)
        size = old.message_bytes(before.groups[old.group])
        grown = new.message_bytes(after.groups[new.group])
        # A message that does not divide is rounded up.
        most = size + after.groups[new.group].size * new.dtype.itemsize
        assert size <= grown <= most


def test_as_many_ranks_change_nothing() -> None:
    workload = made(dp_shard=4)
    assert shrunk(workload, 4) is workload


@pytest.mark.parametrize(
    ("axes", "num_ranks", "text"),
    [
        ({"dp_shard": 4}, 8, "nproc 8 is invalid: it must be at most 4"),
        ({"dp_shard": 4}, 3, "a divisor of the file's 4 ranks"),
        ({"dp_shard": 2, "pp": 2}, 1, "a multiple of its 2 pipeline stages"),
    ],
)
def test_ranks_that_do_not_fit(axes: dict[str, int], num_ranks: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        shrunk(made(**axes), num_ranks)


def test_the_group_of_first_and_last_stage_stays() -> None:
    """Megatron-LM sums the gradients of tied embeddings over the two ends of the pipeline."""

    def job(dp_shard: int) -> Job:
        parallel = ParallelConfig(dp_shard=dp_shard, tp=2, pp=4)
        model = dataclasses.replace(find_model("gpt2-125m").tiny(), num_layers=4)
        return Job(model=model, parallel=parallel, mbs=1, gbs=32)

    before, small = (megatron(job(dp), Megatron()) for dp in (4, 2))
    after = shrunk(before, 16)
    check_ends(after)
    assert communicators(before)["embd"][0] == (0, 24)
    assert communicators(after)["embd"] == communicators(small)["embd"]
    assert communicators(after)["pp"] == communicators(small)["pp"]
