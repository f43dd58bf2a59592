"""Messages of a job: kinds and sizes of calls, and calls matched over ranks."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.message import MessageKind
from stepmark.model.collectives import Collective, busbw_factor, torch_collective
from stepmark.timeline.trace_columns import NONE, CommArgs, RankInfo
from stepmark.traces.kineto.instances import CommCalls
from stepmark.traces.kineto.matching import Messages, match
from stepmark.traces.kineto.messages import RankMessages, kind_of, members_of, rank_messages
from stepmark.traces.kineto.reader import read_trace

from .comm_traces import TraceWriter
from .trace_truth import collectives, read

TRACES = Path(__file__).parents[1] / "data" / "traces"
RECORDS = json.loads((TRACES / "peers.json").read_text())["records"]

ByRank = Mapping[int, tuple[RankInfo, RankMessages]]


def by_rank(paths: Iterable[Path]) -> ByRank:
    traces = [read_trace(path) for path in paths]
    return {trace.info.rank or 0: (trace.info, rank_messages(trace)) for trace in traces}


def matched(jobs: Sequence[TraceWriter], folder: Path, *steps: int) -> Messages:
    ranks = by_rank(job.write(folder) for job in jobs)
    return match(ranks, lambda number: not steps or number in steps)


def args(name: str, num_in: int, num_out: int, **facts: Any) -> CommArgs:
    defaults: dict[str, Any] = {"dtype": "BFloat16", "group": "0", "group_desc": "dp"}
    return CommArgs(
        collective=name,
        in_elements=num_in,
        out_elements=num_out,
        **(defaults | {"group_size": 8} | facts),
    )


@pytest.fixture(scope="module")
def fsdp8() -> ByRank:
    return by_rank(sorted((TRACES / "fsdp8").glob("*")))


def every(_: int) -> bool:
    return True


# Real traces


def test_transfers_are_the_latencies_that_tracelens_gives_each_collective(
    fsdp8: ByRank,
) -> None:
    record = next(
        record
        for record in RECORDS
        if record["traces"] == "fsdp8"
        and record["call"].endswith("build_df_nccl_implicit_sync_cat")
    )
    theirs: Counter[tuple[str, int]] = Counter()
    for row in record["rows"]:
        name = {"_allgather_base": "all_gather"}.get(row["Collective name"], "reduce_scatter")
        size = round(2 * max(row["In msg nelems"], row["Out msg nelems"]))
        theirs[name, size] += row["comm_latency"]
    ours: Counter[tuple[str, int]] = Counter()
    for kind, tally in match(fsdp8, every).histogram.items():
        assert kind.message_bytes is not None
        ours[kind.collective, kind.message_bytes] += tally.seconds * 1e6 / 8
    assert ours.keys() == theirs.keys()
    for key, latency in theirs.items():
        assert ours[key] == pytest.approx(latency, abs=0.01)


def test_waits_are_those_of_a_plain_computation(fsdp8: ByRank) -> None:
    files = sorted((TRACES / "fsdp8").glob("*"))
    plain = collectives({rank: read(path) for rank, path in enumerate(files)})
    found = match(fsdp8, every)
    assert found.clocks_agree
    for rank, waits in found.ranks.items():
        assert waits.calls == waits.timed == len(plain)
        assert waits.early == sum(row["waits"][rank] for row in plain)
        assert waits.transfer == sum(row["latency"] for row in plain)
    assert found.ranks[7].last == 51  # TraceLens: 51 of 52


def test_counts_are_equal_over_ranks_and_do_not_depend_on_their_order(fsdp8: ByRank) -> None:
    found = match(fsdp8, every)
    for tally in found.histogram.values():
        assert tally.calls == tally.timed_calls
        assert tally.calls % 8 == 0
        assert tally.ranks == 8
    backwards = match(dict(reversed(list(fsdp8.items()))), every)
    assert backwards.histogram == found.histogram
    assert backwards.ranks == found.ranks


def test_steps_add_up_to_all(fsdp8: ByRank) -> None:
    whole = match(fsdp8, every)
    parts = [match(fsdp8, lambda number, step=step: number == step) for step in (5, 6)]
    assert [part.num_steps for part in parts] == [8, 8]
    for kind, tally in whole.histogram.items():
        assert tally.calls == sum(part.histogram[kind].calls for part in parts)
        seconds = sum(part.histogram[kind].seconds for part in parts)
        assert tally.seconds == pytest.approx(seconds)


# Kinds


@pytest.mark.parametrize(
    ("call", "collective", "call_bytes", "message_bytes"),
    [
        (args("_allgather_base", 10, 80), "all_gather", 20, 160),
        (args("all_gather", 10, 80), "all_gather", 20, 160),
        (args("_reduce_scatter_base", 80, 10), "reduce_scatter", 20, 160),
        (args("allreduce", 10, 10), "all_reduce", 20, 20),
        (args("allreduce_coalesced", 10, 10, dtype="Float"), "all_reduce", 40, 40),
        (args("all_to_all", 80, 80), "all_to_all", 20, 160),
        (args("all_to_allv", 80, 80, in_splits=(10,) * 8), "all_to_all", 20, 160),
        (args("all_to_allv", 80, 88, in_splits=(3, 5)), "all_to_all_v", 22, 176),
        (args("all_to_allv", 80, 80), "all_to_all_v", 20, 160),
        (args("all_to_all", 80, 88), "all_to_all_v", 22, 176),
        (args("_broadcast_oop", 10, 10, dtype="Float8_e4m3fn"), "broadcast", 10, 10),
        (args("gather", 10, 80), "gather", 20, 160),
        (args("barrier", 0, 0, dtype="Byte"), "barrier", 0, 0),
        (args("send", 10, 10, group_size=2), "send", 20, 20),
    ],
)
def test_sizes_are_those_of_nccl_tests(
    call: CommArgs, collective: str, call_bytes: int, message_bytes: int
) -> None:
    kind = kind_of(call, (), "")
    assert isinstance(kind, MessageKind)
    assert (kind.collective, kind.call_bytes) == (collective, call_bytes)
    assert kind.message_bytes == message_bytes


def test_a_call_of_unknown_name_or_type_is_not_counted_but_said() -> None:
    assert kind_of(args("shuffle", 1, 1), (), "") == "calls of shuffle"
    assert kind_of(args("allreduce", 1, -1), (), "") == "calls of negative size"
    one_side = kind_of(args("_allgather_base", 0, 8), (), "")
    assert one_side == "calls without one of their sizes"
    of_gloo = args("allgather", 8, 0, dtype="Float", group="", group_desc="", group_size=None)
    kind = kind_of(of_gloo, (0, 1), "")  # the list of lists that it fills has no shapes
    assert isinstance(kind, MessageKind)
    assert (kind.call_bytes, kind.message_bytes) == (32, 64)
    for group_size in (0, -8, 2**40):
        kind = kind_of(args("allreduce", 1, 1, group_size=group_size), (), "")
        assert kind == f"calls of a group of {group_size} ranks that lists 0"
    assert kind_of(args("allreduce", 1, 1), (0, 1), "") == (
        "calls of a group of 8 ranks that lists 2"
    )
    unknown = kind_of(args("allreduce", 1, 1, dtype="QInt8"), (), "")
    assert unknown == "calls of unknown type QInt8"


def test_ranks_of_a_large_group_come_from_the_header(tmp_path: Path) -> None:
    members = range(0, 128, 2)
    job = TraceWriter(rank=0, world_size=128, groups=[("3", "dp", members)])
    job.collective("allreduce", 8, 8, 0, 10, 5, group="3", desc="dp", ranks=members)
    trace = read_trace(job.write(tmp_path))
    assert trace.comm_args[0].ranks == ()
    assert members_of(trace.comm_args[0], trace.info) == tuple(members)


# Matching


def job_of(rank: int, durations: Sequence[float], **facts: Any) -> TraceWriter:
    """All-reduces that end together on all ranks, each at 100, 200, ... us of step 1."""
    job = TraceWriter(rank=rank, world_size=facts.pop("world_size", 2))
    job.step(1, 0, 10_000)
    for number, duration in enumerate(durations, 1):
        end = 100 * number
        job.collective("allreduce", 512, 512, end - 60, end - duration, duration, **facts)
    return job


def test_the_time_of_a_message_is_the_shortest_kernel_of_any_rank(tmp_path: Path) -> None:
    found = matched([job_of(0, [20, 5]), job_of(1, [8, 40])], tmp_path)
    (tally,) = found.histogram.values()
    assert (tally.calls, tally.timed_calls) == (4, 4)
    assert tally.seconds == pytest.approx(2 * (8 + 5) * 1e-6)
    (kind,) = found.histogram
    assert found.kernels[kind] == (20 + 5 + 8 + 40) * 1000
    assert [(r.last, r.early) for r in found.ranks.values()] == [(1, 12_000), (1, 35_000)]
    assert found.clocks_agree


def test_clocks_that_differ_give_no_arrivals(tmp_path: Path) -> None:
    late = TraceWriter(rank=1, world_size=2)
    late.step(1, 0, 10_000)
    for end in (100, 200, 300):  # half a millisecond off
        late.collective("allreduce", 512, 512, end + 440, end + 492, 8)
    found = matched([job_of(0, [20, 20, 20]), late], tmp_path)
    assert found.end_spread == 500_000
    assert not found.clocks_agree
    (tally,) = found.histogram.values()
    assert tally.seconds == pytest.approx(6 * 8e-6)  # needs no clocks


def test_unequal_counts_are_untimed_and_said(tmp_path: Path) -> None:
    found = matched([job_of(0, [20, 5]), job_of(1, [8])], tmp_path)
    (tally,) = found.histogram.values()
    assert (tally.calls, tally.timed_calls) == (3, 0)
    text = "in step 1 rank 1 has 1 all_reduce call of group 0 default_pg, others 2"
    assert found.unmatched == Counter({text: 3})


def test_the_number_of_a_call_matches_what_windows_cut_apart(tmp_path: Path) -> None:
    jobs = []
    for rank, numbers in enumerate([(7, 8, 9), (8, 9)]):
        job = TraceWriter(rank=rank, world_size=2)
        job.step(1, 0, 10_000)
        for number in numbers:
            job.collective("allreduce", 8, 8, 50 * number, 60 * number, 5 + rank, Seq=number)
        jobs.append(job)
    found = matched(jobs, tmp_path)
    (tally,) = found.histogram.values()
    assert (tally.calls, tally.timed_calls) == (5, 4)
    assert sum(found.unmatched.values()) == 1


def test_ranks_that_call_different_collectives_are_not_matched(tmp_path: Path) -> None:
    other = TraceWriter(rank=1, world_size=2)
    other.step(1, 0, 10_000)
    other.collective("allreduce", 1024, 1024, 40, 80, 20)
    found = matched([job_of(0, [20]), other], tmp_path)
    assert not sum(tally.timed_calls for tally in found.histogram.values())
    text = "in step 1 ranks differ in a collective or size of group 0 default_pg"
    assert found.unmatched == Counter({text: 2})


def test_groups_of_one_name_on_other_ranks_are_matched_apart(tmp_path: Path) -> None:
    jobs = []
    for rank in range(4):
        members = (0, 1) if rank < 2 else (2, 3)
        job = TraceWriter(rank=rank, world_size=4, groups=[("1", "tp", members)])
        job.step(1, 0, 10_000)
        ts = 100 + 50 * rank
        job.collective("allreduce", 8, 8, 10, ts, 5 + rank, group="1", desc="tp", ranks=members)
        jobs.append(job)
    found = matched(jobs, tmp_path)
    (tally,) = found.histogram.values()
    assert tally.seconds == pytest.approx((5 + 5 + 7 + 7) * 1e-6)


def test_a_send_is_matched_with_its_receive(tmp_path: Path) -> None:
    first, second = (TraceWriter(rank=rank, world_size=2) for rank in range(2))
    for job in (first, second):
        job.step(1, 0, 10_000)
    first.collective("send", 64, 64, 10, 50, 30, Dst_Rank=1)
    second.collective("recv", 64, 64, 10, 70, 9, Src_Rank=0)
    second.collective("send", 64, 64, 90, 95, 4)  # to whom is not in the trace
    found = matched([first, second], tmp_path)
    seconds = {kind.collective: tally.seconds for kind, tally in found.histogram.items()}
    assert seconds == {"send": pytest.approx(9e-6), "recv": pytest.approx(9e-6)}
    assert sum(found.unmatched.values()) == 1


def test_uneven_parts_that_differ_over_ranks_are_one_message(tmp_path: Path) -> None:
    jobs = []
    for rank, splits in enumerate([(10, 22), (16, 16)]):
        job = TraceWriter(rank=rank, world_size=2)
        job.step(1, 0, 10_000)
        shown = str(list(splits))
        job.collective("all_to_allv", 32, 20 + rank, 10, 50, 5 + rank, In_split_size=shown)
        jobs.append(job)
    found = matched(jobs, tmp_path)
    assert sum(tally.timed_calls for tally in found.histogram.values()) == 2


def test_a_rank_without_trace_makes_transfers_partial(tmp_path: Path) -> None:
    found = matched([job_of(0, [20], world_size=2)], tmp_path)
    assert found.partial == set(found.histogram)
    waits = found.ranks[0]
    assert (waits.timed, waits.transfer, waits.other_kernels) == (0, 0, 20_000)


def test_of_ranks_that_are_not_all_none_is_known_to_arrive_last(tmp_path: Path) -> None:
    found = matched([job_of(rank, [20 - rank], world_size=3) for rank in range(2)], tmp_path)
    assert [(waits.last, waits.early) for waits in found.ranks.values()] == [(0, 0)] * 2


def test_times_of_calls_that_run_at_once_count_once(tmp_path: Path) -> None:
    """Rank 0 waits from 100 to 140 and 120 to 150 us; 140 to 160 and 150 to 180 transfer."""
    jobs = []
    for rank, spans in enumerate([[(100, 60), (120, 60)], [(140, 20), (150, 30)]]):
        job = TraceWriter(rank=rank, world_size=2)
        job.step(1, 0, 10_000)
        for number, (start, took) in enumerate(spans):
            group, members = str(number), range(2)
            place = (50 + 10 * number, start, took)
            job.collective("allreduce", 8, 8, *place, group=group, desc="", ranks=members)
        jobs.append(job)
    waits, late = matched(jobs, tmp_path).ranks.values()
    assert (waits.timed, waits.kernels, waits.transfer) == (2, 80_000, 40_000)
    assert (waits.waited, waits.early) == (50_000, 40_000 + 30_000)  # the latter is a sum
    assert (late.last, late.waited, late.kernels) == (2, 0, 40_000)


def test_bus_bandwidth_is_bytes_by_the_factor_over_the_shortest_kernel(fsdp8: ByRank) -> None:
    """One rank of TraceLens' GiB/s is checked by its definition: 2^30 against 10^9."""
    record = next(
        record
        for record in RECORDS
        if record["traces"] == "fsdp8"
        and record["call"].endswith("build_df_nccl_implicit_sync_cat")
    )
    row = record["rows"][0]
    size = 2 * row["Out msg nelems"]
    ours = size * busbw_factor(Collective.ALL_GATHER, 8) / (row["comm_latency"] * 1e-6) / 1e9
    assert ours == pytest.approx(row["bus bw (GB/s)"] * 2**30 / 1e9, rel=1e-4)


def test_an_empty_step_at_the_end_is_none(tmp_path: Path) -> None:
    jobs = [job_of(rank, [20, 5]) for rank in range(2)]
    for job in jobs:
        job.step(2, 10_000, 5)  # as prof.step() opens one after the last
    assert matched(jobs, tmp_path).num_steps == 2


# A job of which everything is known

NAMES = ("allreduce", "_allgather_base", "_reduce_scatter_base")
CALLS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 1000),
        st.lists(st.integers(0, 5000), min_size=3, max_size=3),
    ),
    min_size=1,
    max_size=12,
)


def columns_of(rank: int, calls: Sequence[tuple[int, int, Sequence[int]]]) -> RankMessages:
    """Return a rank whose kernels start when it arrives, and end a transfer after the last."""
    begin = np.arange(len(calls)) * 10_000
    start = begin + [arrivals[rank] for _, _, arrivals in calls]
    end = begin + [max(arrivals) + transfer for _, transfer, arrivals in calls]
    none = np.full(len(calls), NONE)
    world = {"group_size": 3, "ranks": (0, 1, 2)}
    return RankMessages(
        calls=CommCalls(
            args=tuple(args(name, 3, 3, **world) for name in NAMES),
            comm=np.array([name for name, _, _ in calls], np.int64),
            step=np.zeros(len(calls), np.int64),
            phase=np.zeros(len(calls), np.int64),
            seq=none,
            issued=start,
            start=start,
            end=end,
        ),
        numbers=(4,),
        is_marked=True,
        times=None,
        copies={},
    )


INFO = RankInfo(
    file="",
    rank=0,
    world_size=3,
    backend="nccl",
    groups=(),
    devices=(),
    is_rocm=False,
    trace_id="",
    first=None,
    last=None,
    num_events=0,
    num_bytes=0,
)


@given(CALLS, st.permutations([0, 1, 2]))
def test_transfers_and_waits_of_a_known_job_are_found(
    calls: list[tuple[int, int, list[int]]], order: list[int]
) -> None:
    found = match({rank: (INFO, columns_of(rank, calls)) for rank in order}, every)
    assert not found.unmatched
    total = sum(tally.seconds for tally in found.histogram.values())
    assert total == pytest.approx(3e-9 * sum(transfer for _, transfer, _ in calls))
    for rank, waits in found.ranks.items():
        assert waits.transfer == sum(transfer for _, transfer, _ in calls)
        waited = sum(max(arrivals) - arrivals[rank] for _, _, arrivals in calls)
        assert waits.kernels - waits.transfer == waits.early == waited


@given(CALLS, st.integers(0, 2), st.data())
def test_a_lost_call_leaves_its_collective_untimed_and_is_said(
    calls: list[tuple[int, int, list[int]]], rank: int, data: st.DataObject
) -> None:
    lost = data.draw(st.integers(0, len(calls) - 1))
    ranks = {each: (INFO, columns_of(each, calls)) for each in range(3)}
    whole = ranks[rank][1]
    kept = np.arange(len(calls)) != lost
    fields = ("comm", "step", "phase", "seq", "issued", "start", "end")
    cut = replace(whole.calls, **{name: getattr(whole.calls, name)[kept] for name in fields})
    ranks[rank] = INFO, replace(whole, calls=cut)
    found = match(ranks, every)
    name = calls[lost][0]
    assert sum(found.unmatched.values()) == 3 * sum(each[0] == name for each in calls) - 1
    for kind, tally in found.histogram.items():
        is_cut = kind.collective == torch_collective(NAMES[name])
        assert tally.timed_calls == (0 if is_cut else tally.calls)
