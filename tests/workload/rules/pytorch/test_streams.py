"""On which stream FSDP's messages are, and of which micro-batch."""

from hypothesis import given
from hypothesis import settings as bounds

from stepmark.workload.job import Job
from stepmark.workload.rules.pytorch import fsdp
from stepmark.workload.rules.pytorch.fsdp import Fsdp
from stepmark.workload.rules.pytorch.fsdp_order import GATHER, REDUCE, REPLICATE

from .jobs import comms, jobs


@bounds(max_examples=25, deadline=None)
@given(jobs())
def test_what_is_sent_for_all_micro_batches_is_of_none(made: tuple[Job, Fsdp]) -> None:
    """Of a pipeline the reductions; else they are of the micro-batch they come with."""
    program = fsdp.workload(*made)
    for stage in range(len(program.stages)):
        for one in program.expand(stage):
            stem = (one.name or getattr(getattr(one, "op", None), "name", "")).partition(".")[0]
            if stem in (REDUCE, REPLICATE, "reduce_copy_in"):
                assert (one.microbatch is None) is (made[0].parallel.pp > 1)
            elif stem == "copy_out":
                assert one.microbatch is not None


@bounds(max_examples=10, deadline=None)
@given(jobs())
def test_one_process_group_is_one_stream(made: tuple[Job, Fsdp]) -> None:
    """FSDP's gathers and reductions: NCCL runs a group's kernels one after the other."""
    program = fsdp.workload(*made)
    streams = {
        (one.collective, one.group.partition("_inner")[0]): one.stream
        for stage in range(len(program.stages))
        for one in comms(program, stage)
        if one.name.partition(".")[0] in (GATHER, REDUCE, REPLICATE)
    }
    for (_, group), stream in streams.items():
        assert stream == ("fsdp_replicate" if group == "replicate" else "fsdp")
