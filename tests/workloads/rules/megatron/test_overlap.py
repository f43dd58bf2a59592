"""What runs beside the computation: from when, on which stream, and until when."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.message import SEND
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Phase
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Operation, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import Granularity

from .jobs import DENSE, EXPERTS, SINKS, comms, jobs, make

SP = Megatron(sequence_parallel=True, ddp_bucket_size=10_000, overlap_grad_reduce=True)
OVERLAPPED = replace(SP, use_distributed_optimizer=True, overlap_param_gather=True)


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[Job, Megatron]:
    """Also with transfers that block, several optimizer instances, and recompute."""
    job, settings = draw(jobs())
    if settings.use_distributed_optimizer and draw(st.booleans()):
        job = over(job, job.num_microbatches, dp_replicate=2)
    return job, replace(
        settings,
        overlap_p2p_comm=job.parallel.pp == 2 or draw(st.booleans()),
        recompute_granularity=draw(st.sampled_from((None, *Granularity))),
    )


def over(job: Job, microbatches: int, **mesh: int) -> Job:
    """The job with other sizes of some axes."""
    parallel = replace(job.parallel, **mesh)
    return replace(job, parallel=parallel, gbs=job.mbs * microbatches * parallel.data_ranks)


def anchors(
    program: Workload, stage: int
) -> Iterator[tuple[Operation, list[Operation], Operation | None]]:
    """Beside the computation: an operation, those it is after, the newest computation."""
    issued: dict[str, list[Operation]] = {}
    newest: Operation | None = None
    for op in program.expand(stage):
        if op.stream == COMPUTE:
            newest = op
        else:
            words = [word.partition("~") for word in op.after]
            yield op, [issued[name][-1 - int(back or 0)] for name, _, back in words], newest
        if op.name:
            issued.setdefault(op.name, []).append(op)


@given(overlapping())
def test_what_runs_beside_is_after_all_computation_before_it(
    made: tuple[Job, Megatron],
) -> None:
    """An asynchronous call waits for the current stream; at the step's start it is empty."""
    program = workload(*made)
    program.check()
    for stage in range(len(program.stages)):
        for op, awaited, newest in anchors(program, stage):
            if newest is None:
                assert not op.after
            else:
                assert any(one is newest for one in awaited), op


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_a_micro_batch_is_sent_after_its_pass(pp: int, model: ModelConfig) -> None:
    job = make(model, microbatches=2 * pp, pp=pp)
    program = workload(job, Megatron(virtual_pipeline_model_parallel_size=2))
    sends = 0
    for stage in range(pp):
        for op, awaited, _ in anchors(program, stage):
            if isinstance(op, CommOp) and op.collective == SEND:
                (passed,) = awaited
                assert passed.microbatch == op.microbatch
                assert (passed.phase is Phase.FWD) is (op.phase is Phase.FWD)
                sends += 1
    assert sends == 2 * (2 * pp - 1) * job.num_microbatches


def test_a_buffer_of_any_size_is_not_gathered() -> None:
    """An odd number of parameters on a stage, whose transfers wait for what is in flight."""
    job = make(SINKS, microbatches=4, dp_shard=2, tp=8, pp=4)
    settings = Megatron(
        virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=False, sequence_parallel=True
    )
    assert not list(comms(workload(job, settings), 0, "parameters"))


def test_first_parameters_are_gathered_when_the_chunks_input_has_come() -> None:
    program = workload(make(dp_shard=2, pp=2), OVERLAPPED)
    first, second = (
        next(found for found in anchors(program, stage) if found[0].module == "parameters")
        for stage in (0, 1)
    )
    assert first[1] == []
    (received,) = second[1]
    assert isinstance(received, CommOp)
    assert (received.collective, received.stream) == ("recv", COMPUTE)


def test_gradients_that_the_schedule_reduces_are_after_the_last_backward() -> None:
    program = workload(make(dp_shard=2, pp=2), SP)
    (op, awaited, _) = next(
        found for found in anchors(program, 1) if found[0].module == "gradients"
    )
    last = [one for one in program.expand(1) if one.phase in (Phase.DGRAD, Phase.BWD)]
    assert op.stream == "dp"
    assert awaited[0].module == "pipeline"
    assert awaited[0] in last


@pytest.mark.parametrize(
    ("sequence_parallel", "pending"), [(True, "scatter"), (False, "reduce")]
)
def test_a_bucket_waits_for_the_collective_of_the_layer_that_completes_it(
    sequence_parallel: bool, pending: str
) -> None:
    """The layer's backward waits for it before it returns, and the gradient's hook is next."""
    settings = replace(SP, sequence_parallel=sequence_parallel)
    program = workload(make(tp=2, dp_shard=2), settings)
    columns = ("attention.qkv", "mlp.gate_up", "head")
    found = [
        op.after
        for op in comms(program, 0, "gradients")
        if op.after[0].removesuffix(".wgrad") in columns
    ]
    assert found
    for after in found:
        module = after[0].removesuffix(".wgrad")
        assert after == (f"{module}.wgrad", f"{module}.{pending}")


@given(overlapping())
def test_a_blocking_transfer_leaves_nothing_in_flight(made: tuple[Job, Megatron]) -> None:
    """Of parameters and gradients; torch.cuda.synchronize follows each batch of transfers."""
    job, settings = made
    job = over(job, 4 * job.num_microbatches, pp=4)
    program = workload(
        job, replace(settings, overlap_p2p_comm=False, virtual_pipeline_model_parallel_size=2)
    )
    for stage in range(len(program.stages)):
        assert in_flight_behind_transfers(program, stage) == set()


def in_flight_behind_transfers(program: Workload, stage: int) -> set[str]:
    """Names that some computation does not wait for although a transfer came before it."""
    flying, behind, found = set[str](), set[str](), set[str]()
    for op in program.expand(stage):
        if op.module in ("gradients", "parameters") and op.stream != COMPUTE:
            flying.add(op.name)
        elif op.module == "pipeline" and isinstance(op, CommOp):
            behind = set(flying)
        elif op.stream == COMPUTE:
            flying -= set(op.after)
            behind -= set(op.after)
            if not (isinstance(op, ComputeOp) and op.is_wait):
                found |= behind
                behind = set()
    return found


@pytest.mark.parametrize("aligned", [True, False])
def test_a_blocking_transfer_waits_for_gathers_and_reductions(aligned: bool) -> None:
    settings = replace(
        OVERLAPPED,
        virtual_pipeline_model_parallel_size=2,
        align_param_gather=aligned,
        align_grad_reduce=aligned,
    )
    job = make(microbatches=8, pp=4, dp_shard=2)
    assert in_flight_behind_transfers(workload(job, settings), 0)
    blocking = workload(job, replace(settings, overlap_p2p_comm=False))
    waits = [
        op.after
        for op in blocking.expand(1)
        if op.module == "pipeline" and op.name and op.after
    ]
    gathered = [("dp.parameters0", "dp.parameters1")] if aligned else []
    # Of the first chunk's gradients the aligned reduction follows the last transfer.
    assert waits == [*gathered, *[("dp",)] * (1 if aligned else 2)]


def test_optimizer_instances_have_one_stream_for_dense_and_experts() -> None:
    job = make(EXPERTS, dp_shard=2, ep=2, dp_replicate=2, cp=2)
    program = workload(job, OVERLAPPED)
    streams: dict[str, set[str]] = {}
    for op, awaited, _ in anchors(program, 0):
        if isinstance(op, CommOp) and op.module == "gradients":
            streams.setdefault(op.group, set()).add(op.stream)
            if op.group == "instances":
                assert awaited[-1].stream in ("dp", "expt_dp")
    assert streams["instances"] == {"instances"}
    assert streams["intra_dp_cp"] == {"dp"}
    assert streams["intra_expt_dp"] == {"expt_dp"}
    (*_, last) = (op.after for op in program.expand() if op.stream == COMPUTE and op.after)
    assert last == ("dp", "expt_dp", "instances")
