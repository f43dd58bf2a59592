"""What may be at work at once, and what waits for what."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
from tests.workloads.rules.deepspeed.recorded import MODELS
from tests.workloads.rules.deepspeed.test_laws import LLAMA, job, zero

from stepmark.model.model import ModelConfig
from stepmark.model.ops import Phase
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Operation, Workload
from stepmark.workloads.rules.deepspeed.rule import workload
from stepmark.workloads.rules.deepspeed.settings import Switch

OVERLAPS = [Switch.TRUE, Switch.FALSE]
AHEAD = {"stage3_prefetch_bucket_size": 10_000, "stage3_max_reuse_distance": 20_000}


@dataclass(frozen=True, slots=True)
class Step:
    """ops: in issue order. before: of each a bit for every one that is done when it starts."""

    ops: list[Operation]
    before: list[int]

    def waits(self, later: int, earlier: int) -> bool:
        return bool(self.before[later] >> earlier & 1)


def walk(made: Workload) -> Step:
    """Streams are in order; `after` is the newest of a name, or so many before it."""
    ops = list(made.expand())
    before: list[int] = []
    newest: dict[str, int] = {}
    named: dict[str, list[int]] = defaultdict(list)
    for place, op in enumerate(ops):
        awaited = [newest[op.stream]] if op.stream in newest else []
        for text in op.after:
            name, _, back = text.partition("~")
            awaited += named[name][-1 - int(back or 0) :][:1]
        before.append(0)
        for one in awaited:
            before[place] |= before[one] | 1 << one
        newest[op.stream] = place
        named[op.name].append(place)
    return Step(ops, before)


def is_gather(op: Operation) -> bool:
    return isinstance(op, CommOp) and op.phase is not Phase.OPTIM and op.module == "weights"


def is_reduction(op: Operation) -> bool:
    return isinstance(op, CommOp) and op.module == "gradients"


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("bucket", [1, 9_000, 500_000_000])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_communicator_does_one_message_after_the_other(
    stage: int, bucket: int, overlap: Switch
) -> None:
    asked = zero(stage, reduce_bucket_size=bucket, overlap_comm=overlap, **AHEAD)
    step = walk(workload(job(micro=3), asked))
    messages = [place for place, op in enumerate(step.ops) if isinstance(op, CommOp)]
    assert len(messages) > 1
    assert all(step.waits(later, earlier) for earlier, later in pairwise(messages))


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("ahead", [{}, AHEAD])
def test_gathers_of_a_micro_batch_come_after_the_one_before(
    ahead: dict[str, int], overlap: Switch
) -> None:
    asked = zero(3, overlap_comm=overlap, reduce_bucket_size=9_000, **ahead)
    step = walk(workload(job(micro=3), asked))
    for place, op in enumerate(step.ops):
        if is_gather(op) and op.microbatch:
            assert all(
                step.waits(place, other)
                for other in range(place)
                if step.ops[other].microbatch == op.microbatch - 1
            )


def test_alone_a_micro_batch_waits_for_none() -> None:
    made = workload(job(), zero(3, overlap_comm=Switch.TRUE))
    assert not any(op.after for op in made.expand() if is_gather(op))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_gathers_overlap_computation(overlap: Switch) -> None:
    """With overlap_comm all of a pass may; without, what is issued later."""
    step = walk(workload(job(), zero(3, overlap_comm=overlap, **AHEAD)))
    gathers = [place for place, op in enumerate(step.ops) if is_gather(op)]
    computed = [place for place, op in enumerate(step.ops) if op.stream == COMPUTE]
    held = [
        all(step.waits(place, other) for other in computed if other < place)
        for place in gathers
    ]
    assert all(held) is (overlap is Switch.FALSE)
    assert any(
        not step.waits(other, place)
        for place in gathers
        for other in computed
        if other == place + 1
    )


def gradients(llama: ModelConfig) -> list[int]:
    """Elements of its parameters, as their gradients come."""
    size, ffn = llama.hidden_size, llama.ffn_hidden_size
    heads, kv = llama.num_heads * llama.head_dim, llama.num_kv_heads * llama.head_dim
    layer = [*[ffn * size] * 3, size, size * heads, *[kv * size] * 2, heads * size, size]
    table = llama.vocab_size * size
    return [table, size, *layer * llama.num_layers, table]


def buckets(step: Step) -> list[list[int]]:
    """Places of what is reduced beside computation, where a bucket is one parameter."""
    sent = [place for place, op in enumerate(step.ops) if is_reduction(op)]
    found: list[list[int]] = []
    for size in gradients(LLAMA)[:-1]:
        found.append([])
        left = size
        while left:
            op = step.ops[sent[0]]
            assert isinstance(op, CommOp)
            left -= op.count
            found[-1].append(sent.pop(0))
    return found


def test_computation_waits_for_the_buckets_before_and_not_for_the_newest() -> None:
    """Ranks' shares begin inside tensors: some buckets are several all-reduces."""
    asked = zero(2, overlap_comm=Switch.TRUE, reduce_bucket_size=1)
    step = walk(workload(job(), asked))
    found = buckets(step)
    assert {len(bucket) for bucket in found} == {1, 2}
    for before, bucket in pairwise(found):
        following = bucket[-1] + 1  # every module of a Llama has one parameter
        assert isinstance(step.ops[following], ComputeOp) or bucket is found[-1]
        assert step.waits(following, before[-1])
        assert bucket is found[-1] or not any(step.waits(following, one) for one in bucket)
    first = found[0][-1] + 1
    assert not step.ops[first].after


def test_to_owners_the_host_waits_before_each_message() -> None:
    """allreduce_and_copy synchronizes: what is computed next is after all but the newest."""
    asked = zero(
        2,
        overlap_comm=Switch.TRUE,
        reduce_bucket_size=20_000,
        use_multi_rank_bucket_allreduce=False,
    )
    step = walk(workload(job(), asked))
    held = [op for op in step.ops if isinstance(op, ComputeOp) and op.after]
    assert len(held) > 4
    assert {op.after for op in held} == {("reduce~1",)}


def test_at_stage_3_a_reduction_waits_for_the_gradients_in_its_bucket() -> None:
    """Not for the next, which finds no room: the bucket goes before it is put in."""
    asked = zero(3, overlap_comm=Switch.TRUE, reduce_bucket_size=1)
    step = walk(workload(job(), asked))
    sent = [place for place, op in enumerate(step.ops) if is_reduction(op)]
    of_weights = [
        place
        for place, op in enumerate(step.ops)
        if isinstance(op, ComputeOp)
        and (op.phase is Phase.WGRAD or (op.phase is Phase.BWD and op.module.endswith("norm")))
    ]
    assert len(sent) == len(of_weights)
    for place, own, following in zip(sent[:-1], of_weights[:-1], of_weights[1:], strict=True):
        assert following < place
        assert step.waits(place, own)
        assert not step.waits(place, following)


def test_weight_and_bias_of_a_module_are_of_one_computation() -> None:
    asked = zero(3, overlap_comm=Switch.TRUE, reduce_bucket_size=1)
    made = workload(job(MODELS["gpt2"]), asked)
    awaited = {op.after for op in made.expand() if is_reduction(op) and op.stream != COMPUTE}
    assert awaited == {("computed",), ("computed~1",)}
