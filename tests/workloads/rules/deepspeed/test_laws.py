"""What holds of ZeRO whatever the sizes: sums, conservation, and a program that stays small."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.workloads.rules.deepspeed.recorded import MODELS

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.deepspeed.modules import Param
from stepmark.workloads.rules.deepspeed.rule import all_reduce_buckets, workload
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed, Switch
from stepmark.workloads.rules.pytorch import rule

LLAMA = replace(MODELS["llama"], vocab_size=512)  # every tensor divides by 4 ranks
PARAMS = LLAMA.num_params


def job(
    model: ModelConfig = LLAMA, ranks: int = 4, micro: int = 1, dtype: DType = DType.BF16
) -> Job:
    parallel = ParallelConfig(dp_shard=ranks)
    return Job(model=model, parallel=parallel, gbs=ranks * micro, dtype=dtype)


def zero(stage: int, **settings: int | bool | Switch) -> DeepSpeed:
    """Nothing is kept whole, used again or fetched along."""
    none = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    return DeepSpeed(stage=stage, **(none | settings))  # type: ignore[arg-type]


def moved(made: Workload, *phases: Phase) -> dict[str, int]:
    """Elements by collective, of whole buffers of weights and gradients."""
    found: dict[str, int] = {}
    for op, times in made.tally().items():
        if isinstance(op, CommOp) and (op.phase in phases or not phases):
            size = op.message_bytes(made.groups["dp"]) // op.dtype.itemsize
            found[op.collective] = found.get(op.collective, 0) + times * size
    return found


def bus_bytes(made: Workload, group: str) -> float:
    return sum(
        times * op.bus_bytes(made.groups[group])
        for op, times in made.tally().items()
        if isinstance(op, CommOp) and op.count > 1
    )


def computed(made: Workload) -> int:
    return sum(
        times * (op.op.flops or 0)
        for op, times in made.tally().items()
        if isinstance(op, ComputeOp) and op.phase is not Phase.OPTIM
    )


def test_stage_3_is_one_and_a_half_times_ddp() -> None:
    """Two gathers and a scatter against an all-reduce, which is a scatter and a gather."""
    sharded = workload(job(), zero(3))
    parallel = ParallelConfig(dp_replicate=4)
    plain = rule.workload(
        replace(job(), parallel=parallel), RULES["ddp"].make(param_dtype=DType.BF16, clip=False)
    )
    assert bus_bytes(sharded, "dp") == 1.5 * bus_bytes(plain, "ddp")


@pytest.mark.parametrize("micro", [1, 3])
def test_stage_3_gathers_twice_and_scatters_once_per_micro_batch(micro: int) -> None:
    made = workload(job(micro=micro), zero(3))
    assert moved(made, Phase.FWD) == {Collective.ALL_GATHER: micro * PARAMS}
    assert moved(made, Phase.BWD) == {
        Collective.ALL_GATHER: micro * PARAMS,
        Collective.REDUCE_SCATTER: micro * PARAMS,
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("bucket", [1, 5_000, 500_000_000])
def test_gradients_are_reduced_whole(stage: int, bucket: int) -> None:
    """Stages 0 and 1 once a step, stage 2 with every micro-batch."""
    made = workload(job(micro=3), zero(stage, reduce_bucket_size=bucket))
    times = 3 if stage == 2 else 1
    assert moved(made, Phase.BWD) == {Collective.ALL_REDUCE: times * PARAMS}


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_are_gathered_once_a_step(stage: int) -> None:
    made = workload(job(micro=3), zero(stage))
    assert moved(made, Phase.OPTIM)[Collective.ALL_GATHER] == PARAMS


@pytest.mark.parametrize("stage", [1, 2])
def test_reduced_to_their_owners_gradients_are_cut_but_none_is_lost(stage: int) -> None:
    owners = zero(stage, reduce_bucket_size=3_000, use_multi_rank_bucket_allreduce=False)
    made = workload(job(), owners)
    assert moved(made, Phase.BWD) == {Collective.REDUCE: PARAMS}
    to: dict[int | None, int] = {}
    for op in made.expand():
        if isinstance(op, CommOp) and op.collective == Collective.REDUCE:
            to[op.root] = to.get(op.root, 0) + op.count
    assert to == dict.fromkeys(range(4), PARAMS // 4)


@given(threshold=st.integers(0, 60_000))
def test_what_persists_is_gathered_after_the_update_and_never_else(threshold: int) -> None:
    made = workload(job(), zero(3, stage3_param_persistence_threshold=threshold))
    kept = moved(made, Phase.OPTIM).get(Collective.ALL_GATHER, 0)
    assert moved(made, Phase.FWD).get(Collective.ALL_GATHER, 0) == PARAMS - kept
    norms = (2 * LLAMA.num_layers + 1) * 64
    assert kept == (0 if threshold < 64 else norms) or threshold >= 2_048


@given(
    ranks=st.integers(2, 7),
    bucket=st.integers(1, 100_000),
    prefetch=st.integers(0, 100_000),
    reuse=st.integers(0, 200_000),
    live=st.integers(0, 200_000),
    threshold=st.integers(0, 20_000),
    micro=st.integers(1, 4),
    name=st.sampled_from(sorted(MODELS)),
)
def test_every_weight_is_there_when_it_is_used(
    ranks: int,
    bucket: int,
    prefetch: int,
    reuse: int,
    live: int,
    threshold: int,
    micro: int,
    name: str,
) -> None:
    """At least one gather of each weight a step, at most two a micro-batch and one more."""
    model = MODELS[name]
    asked = DeepSpeed(
        reduce_bucket_size=bucket,
        stage3_prefetch_bucket_size=prefetch,
        stage3_max_reuse_distance=reuse,
        stage3_max_live_parameters=live,
        stage3_param_persistence_threshold=threshold,
    )
    made = workload(job(model, ranks, micro), asked)
    gathered = moved(made)[Collective.ALL_GATHER]
    params = model.num_params
    padding = ranks * 100  # fewer tensors than that
    assert params <= gathered
    assert gathered <= (2 * micro + 1) * (params + padding) + params * model.tied_embeddings
    scattered = moved(made)[Collective.REDUCE_SCATTER]
    assert micro * params <= scattered <= micro * (params + padding)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_computation_is_that_of_one_rank(stage: int) -> None:
    alone = workload(job(ranks=1), zero(stage))
    assert computed(workload(job(micro=5), zero(stage))) == 5 * computed(alone)
    assert not any(isinstance(op, CommOp) for op in alone.expand())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_program_is_as_small_for_many_layers_micro_batches_and_ranks(stage: int) -> None:
    def items(layers: int, micro: int, ranks: int, bucket: int) -> int:
        model = replace(LLAMA, num_layers=layers)
        asked = zero(stage, stage3_max_reuse_distance=30_000, reduce_bucket_size=bucket)
        made = workload(job(model, ranks, micro), asked)
        return sum(len(block) for block in made.blocks.values())

    few = items(8, 4, 4, 1)
    assert items(64, 4, 4, 1) <= few + 4
    assert items(8, 512, 4, 1) == few
    # Buckets of less than a tensor are cut where ranks' shares begin.
    assert items(8, 4, 256, 60_000) == items(8, 4, 4, 60_000)


def test_a_large_model_is_written_in_little_time_and_space() -> None:
    model = find_model("llama-3.1-405b")
    made = workload(job(model, 1024, 16), DeepSpeed())
    assert made.num_operations() > 100_000
    assert sum(len(block) for block in made.blocks.values()) < 4_000


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("stage", 4),
        ("stage", -1),
        ("reduce_bucket_size", 0),
        ("stage3_prefetch_bucket_size", -1),
        ("allgather_bucket_size", 3),
        ("gradient_clipping", -1.0),
        ("grad_accum_dtype", "int8"),
        ("communication_data_type", "fp64"),
        ("compute_grad_norm", False),
    ],
)
def test_settings_that_deepspeed_refuses(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        DeepSpeed(**{setting: value})  # type: ignore[arg-type]


def test_zero_init_is_of_stage_3() -> None:
    with pytest.raises(ConfigError, match="zero_init"):
        DeepSpeed(stage=2, zero_init=True)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_other_axes_are_refused(axis: str) -> None:
    parallel = ParallelConfig(**{axis: 2, "dp_shard": 2})
    with pytest.raises(ConfigError, match=axis):
        workload(Job(model=LLAMA, parallel=parallel), zero(3))


def test_padding_of_stages_1_and_2_is_to_an_even_share() -> None:
    model = MODELS["llama"]
    made = workload(job(model, 7), zero(2))
    assert moved(made, Phase.OPTIM)[Collective.ALL_GATHER] == ceil(model.num_params / 14) * 14


@given(sizes=st.lists(st.integers(1, 9)), at_least=st.integers(1, 20))
def test_stage_0_sends_a_bucket_that_holds_more_than_its_size(
    sizes: list[int], at_least: int
) -> None:
    params = [Param(index=index, numel=numel) for index, numel in enumerate(sizes)]
    sent = [message.elements for message in all_reduce_buckets(params, at_least)]
    assert sum(sent) == sum(sizes)
    assert all(elements > at_least for elements in sent[:-1])
    left = list(sizes)
    for elements in sent[:-1]:
        held = 0
        while held < elements:
            assert held <= at_least
            held += left.pop(0)


def test_a_bucket_that_is_just_full_waits() -> None:
    params = [Param(index=index, numel=numel) for index, numel in enumerate((4, 6, 5))]
    assert [message.elements for message in all_reduce_buckets(params, 10)] == [15]
