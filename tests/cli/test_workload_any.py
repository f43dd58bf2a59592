"""Reports of any workload that the types allow: nothing breaks, and nothing is lost."""

from collections import Counter

from hypothesis import HealthCheck, assume, given, settings
from tests.step.workload_samples import workloads

from stepmark.cases.message import RECV
from stepmark.collectives.comm_workload import commands
from stepmark.step.workload import CommOp, Workload
from stepmark.workloads import workload_show, workload_text
from stepmark.workloads import workload_tables as tables
from stepmark.workloads.workload_page import page

ANY = settings(
    max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@ANY
@given(workloads())
def test_text_and_sums(workload: Workload) -> None:
    for stage in range(len(workload.stages)):
        assert workload_text.lines(workload, stage)
        total: Counter[str] = Counter()
        for one, calls in workload.tally(stage).items():
            if isinstance(one, CommOp):
                num_bytes = one.message_bytes(workload.groups[one.group])
                total["comm_bytes"] += calls * num_bytes
            else:
                total["flops"] += calls * (one.op.flops or 0)
        found: Counter[str] = Counter()
        for layers, sums in tables.alike_layers(workload, stage):
            for (_, what), number in sums.items():
                if what in ("comm_bytes", "flops"):
                    found[what] += len(layers) * number
        assert +found == +total


@settings(ANY, max_examples=5)
@given(workloads())
def test_page(workload: Workload) -> None:
    assert "<h2>Tables</h2>" in page(workload, 0).html()


@ANY
@given(workloads())
def test_every_message_is_in_one_distinct_case(workload: Workload) -> None:
    comms = [
        one for block in workload.blocks.values() for one in block if isinstance(one, CommOp)
    ]
    assume(all((one.root or 0) < workload.groups[one.group].size for one in comms))
    found = workload_show.messages(workload)
    assert len({one.case for one in found}) == len(found)
    for stage in range(len(workload.stages)):
        sent = sum(
            calls
            for setup in (True, False)
            for one, calls in workload.tally(stage, setup=setup).items()
            if isinstance(one, CommOp)
            and one.collective != RECV
            and (one.count or one.collective == "barrier")
            and workload.groups[one.group].size > 1
        )
        assert sum(one.calls.get(stage, 0) for one in found) == sent
    for tool in ("nccl-tests", "rccl-tests"):
        for line in commands([one.case for one in found], tool):
            assert line.startswith("# left out") or "_perf -b " in line
