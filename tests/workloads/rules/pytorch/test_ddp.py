"""DistributedDataParallel's buckets: what they hold, when they go, what comes with them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as bounds
from hypothesis import strategies as st

from stepmark.cases.training import GradSync
from stepmark.ground.dtypes import DType
from stepmark.ground.units import MIB
from stepmark.model.collectives import Collective
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Phase
from stepmark.step.module import Param
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.ddp import assign_buckets, completed_buckets

from .jobs import BIASED, DDP, DENSE, EXPERTS, comms, make

WIDE = replace(DENSE, hidden_size=512, ffn_hidden_size=1024, head_dim=64, vocab_size=4096)


def generated(model: Any = WIDE, *, microbatches: int = 1, **settings: Any) -> Workload:
    job = make(model, dp_replicate=4, microbatches=microbatches)
    made = rule.workload(job, DDP(**settings))
    made.check()
    return made


def buckets(made: Workload) -> list[CommOp]:
    return [one for one in comms(made) if one.stream == "dp" and one.dtype != DType.INT32]


@bounds(max_examples=30, deadline=None)
@given(
    model=st.sampled_from((DENSE, BIASED, EXPERTS, WIDE)),
    cap=st.integers(0, 4),
    finds=st.booleans(),
    autocast=st.booleans(),
)
def test_every_gradient_is_in_one_bucket(
    model: Any, cap: int, finds: bool, autocast: bool
) -> None:
    made = generated(model, bucket_cap_mb=cap, find_unused_parameters=finds, autocast=autocast)
    found = buckets(made)
    assert sum(one.count for one in found) == model.num_params
    assert {one.collective for one in found} == {Collective.ALL_REDUCE}
    limits = [MIB, *[25 * MIB] * len(found)] if cap == 0 else [cap * MIB] * (len(found) + 1)
    sizes = [one.call_bytes() for one in found]
    if finds:  # the first modules' bucket is the first to be made and the last to be sent
        sizes.reverse()
    assert all(size >= limit for size, limit in zip(sizes[:-1], limits, strict=False))


def test_the_first_bucket_is_small_and_the_last_one_holds_the_rest() -> None:
    """Of 1 MiB and 25 MiB as each is reached; the head's table is first and fills its own."""
    sizes = [one.call_bytes() for one in buckets(generated(find_model("gpt2-125m")))]
    table = 50304 if sizes[0] % (50304 * 768 * 4) == 0 else 50257
    assert len(sizes) > 10
    assert MIB <= sizes[0] < 25 * MIB
    assert all(25 * MIB <= size < 25 * MIB + 4 * 768 * 3072 * 4 for size in sizes[1:-1])
    assert sizes[-1] >= table * 768 * 4  # tied: its gradient is whole at the very end


def test_buckets_without_a_size_are_those_of_torch() -> None:
    """1 MiB (dist._DEFAULT_FIRST_BUCKET_BYTES), then 25 MiB (_BucketCapacityConfig)."""
    small = replace(DENSE, hidden_size=256, ffn_hidden_size=512, head_dim=32, num_layers=80)
    sizes = [one.call_bytes() for one in buckets(generated(small))]
    largest = max(256 * (256 + 2 * 32 * small.num_kv_heads), 256 * 512) * 4
    assert largest < MIB
    assert MIB <= sizes[0] < MIB + max(largest, small.vocab_size * 256 * 4)
    assert len(sizes) > 3
    assert all(25 * MIB <= size < 25 * MIB + largest for size in sizes[1:-1])


@given(sizes=st.lists(st.integers(1, 9), min_size=1), first=st.integers(1, 20))
def test_a_bucket_is_closed_by_the_tensor_that_reaches_its_limit(
    sizes: list[int], first: int
) -> None:
    held = [[sizes[at] for at in bucket] for bucket in assign_buckets(sizes, 2, (first, 30))]
    assert [size for bucket in held for size in bucket] == sizes
    limits = [first, *[30] * len(held)]
    for bucket, limit in zip(held[:-1], limits, strict=False):
        assert 2 * sum(bucket[:-1]) < limit <= 2 * sum(bucket)
    assert 2 * sum(held[-1][:-1]) < limits[len(held) - 1]


def test_weights_are_broadcast_in_buffers_of_250_mib() -> None:
    model = find_model("gpt2-125m")
    found = [
        one.call_bytes()
        for one in generated(model).expand(setup=True)
        if isinstance(one, CommOp) and one.collective == "broadcast" and one.dtype == DType.FP32
    ]
    assert sum(found) == 4 * model.num_params
    assert len(found) == 2
    assert found[0] >= 250 * MIB


def test_buckets_go_in_the_order_in_which_gradients_are_ready() -> None:
    """The last module's first; a bucket's layer is that of its last gradient."""
    layers = [one.layer for one in buckets(generated(bucket_cap_mb=1)) if one.layer is not None]
    assert layers == sorted(layers, reverse=True)
    found = buckets(generated(bucket_cap_mb=1))
    assert found[-1].module == "embedding"


@pytest.mark.parametrize("sync", ["every", "last"])
def test_held_gradients_are_reduced_with_the_last_micro_batch(sync: str) -> None:
    once = len(buckets(generated(bucket_cap_mb=1)))
    seen = Counter(
        one.microbatch
        for one in buckets(generated(bucket_cap_mb=1, microbatches=5, grad_sync=GradSync(sync)))
    )
    assert seen == Counter(dict.fromkeys(range(5) if sync == "every" else [4], once))


def test_finding_unused_parameters_costs_a_message_of_one_number_each() -> None:
    used = [
        one for one in comms(generated(find_unused_parameters=True)) if one.module == "used"
    ]
    tensors = DENSE.num_layers * 7 + 3  # two norms, qkv, out, gate, up, down; table, norm, head
    assert [(one.dtype, one.count, one.phase) for one in used] == [
        (DType.INT32, tensors, Phase.BWD)
    ]


@pytest.mark.parametrize("view", [True, False])
def test_gradients_that_are_no_views_are_copied_back(view: bool) -> None:
    copied = [
        one.op.bytes_moved
        for one in generated(gradient_as_bucket_view=view).expand()
        if isinstance(one, ComputeOp)
        and isinstance(one.op, Kernel)
        and one.op.name == "bucket_copy_out"
    ]
    assert copied == ([] if view else [2 * 4 * WIDE.num_params])


def test_a_hook_halves_what_travels() -> None:
    plain, halved = (buckets(generated(compress_bf16=on)) for on in (False, True))
    assert [one.call_bytes() for one in plain] == [2 * one.call_bytes() for one in halved]


def test_the_start_sends_all_weights_from_rank_0() -> None:
    made = generated()
    start = [one for one in made.expand(setup=True) if isinstance(one, CommOp)]
    assert [one.collective for one in start[:2]] == [
        Collective.ALL_GATHER,
        Collective.BROADCAST,
    ]
    sent = start[2:]
    assert {(one.collective, one.root) for one in sent} == {(Collective.BROADCAST, 0)}
    assert sum(one.count for one in sent) == WIDE.num_params
    assert not generated(init_sync=False).stages[0].setup


@given(st.permutations(range(9)), st.permutations(range(9)), st.integers(1, 9))
def test_buckets_go_one_after_the_other_once_all_their_gradients_are_there(
    ready: list[int], order: list[int], size: int
) -> None:
    params = [Param(name=str(at), shape=(2**at,), part="") for at in range(9)]
    buckets = [order[at : at + size] for at in range(0, 9, size)]
    found = completed_buckets(
        [(0, params[at]) for at in ready], [[(0, params[at]) for at in one] for one in buckets]
    )
    assert [elements for _, elements in found[0]] == [
        sum(2**at for at in one) for one in buckets
    ]
    places = [ready.index(int(param.name)) for param, _ in found[0]]
    needed = [max(ready.index(at) for at in one) for one in buckets]
    assert places == [max(needed[: count + 1]) for count in range(len(needed))]
