"""Figures of HolisticTraceAnalysis (HTA) and TraceLens follow from their definitions.

The slow computation of trace_truth.py is given each tool's own definition and has to arrive at
its figures; so a difference between a tool and us is one of definition. The table of them is in
tests/data/traces/README.md.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepmark.timeline.trace_breakdown import StepTimes
from stepmark.traces.kineto import breakdown as kineto
from stepmark.traces.kineto.links import steps
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.trace_kernels_verb import kernels as app_kernels
from stepmark.traces.trace_messages_verb import messages as app_messages
from stepmark.traces.trace_options import KernelsOptions, MessagesOptions

from .big_trace import SOURCE, Block, pieces
from .cut_trace import category, split
from .trace_truth import (
    COMMUNICATION,
    COMPUTE,
    MEMORY,
    GpuEvent,
    breakdown,
    clipped,
    collectives,
    complete_events,
    events_by_step,
    gpu_events,
    host_steps,
    message,
    nanoseconds,
    read,
    sweep,
    tiled_windows,
)

TRACES = Path(__file__).parents[1] / "data" / "traces"
RECORDS = json.loads((TRACES / "peers.json").read_text())["records"]
FOLDERS = sorted(path.name for path in TRACES.iterdir() if path.is_dir())
# Absolute Unix times: as doubles they are multiples of a quarter of a microsecond.
COARSE = {"absolute-ns"}


@cache
def files(folder: str) -> list[Path]:
    return sorted((TRACES / folder).glob("*.json*"))


@cache
def traces(folder: str) -> list[Any]:
    return [read(file) for file in files(folder)]


def figures(folder: str, call: str, **wanted: Any) -> dict[str, Any]:
    """Return a tool's figures by rank."""
    for record in RECORDS:
        options = record.get("environment", {}) | record.get("options", {})
        if (
            record["traces"] == folder
            and record["call"].endswith(call)
            and wanted.items() <= options.items()
        ):
            ranks: dict[str, Any] = record["ranks"]
            return ranks
    raise LookupError(f"{folder} {call}")


def span_parts(rows: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """Return HTA's temporal breakdown of (kind, start, end) in ns.

    Rounding makes events end before they start; HTA's sums count those as negative, so its
    merging is repeated here and not the sweep.
    """

    def merged(chosen: Iterable[tuple[str, int, int]]) -> list[list[int]]:
        groups: list[list[int]] = []
        latest = None
        for _, start, end in sorted(chosen, key=lambda row: row[1]):
            if latest is None or start > latest:
                groups.append([start, end])
            else:
                groups[-1][1] = max(groups[-1][1], end)
            latest = end if latest is None else max(latest, end)
        return groups

    def length(groups: list[list[int]]) -> int:
        return sum(end - start for start, end in groups)

    rows = list(rows)
    everything = merged(rows)
    window = everything[-1][1] - everything[0][0]
    compute = length(merged(row for row in rows if row[0] == COMPUTE))
    idle = window - length(everything)
    return {
        "kernel_time(us)": window,
        "compute_time(us)": compute,
        "idle_time(us)": idle,
        "non_compute_time(us)": window - compute - idle,
    }


def hta_kind(name: str) -> str:
    if re.match("nccl|hip|hccl|.*ncclKernel", name):
        return COMMUNICATION
    if re.match("(hip)?Memcpy|(hip)?Memset|dma", name):
        return MEMORY
    other = ".*Memcpy|.*Memset|.*dma|.*Sync|Stream Wait Event|cuda.*LaunchKernel|runFunction"
    return "other" if re.match(f"{other}|job_exe|packet|pe_exe", name) else COMPUTE


def named_rows(folder: str, trace: Any, rounding: bool) -> list[tuple[str, int, int]]:
    """Return what HTA takes for GPU events as (name, start, end)."""
    rows = []
    for event in complete_events(trace):
        if "dur" not in event or event.get("cat") in {None, "Trace"}:
            continue
        args = event.get("args", {})
        start = nanoseconds(event["ts"])
        end = start + nanoseconds(event["dur"])
        if rounding:
            start, end = -(-start // 1000) * 1000, end // 1000 * 1000
        try:
            stream = int(args.get("stream", -1))
        except ValueError:
            stream = -1
        rows.append((event["name"], start, end, stream, args.get("correlation", -1)))
    steps = {
        event["name"]
        for each in traces(folder)
        for event in complete_events(each)
        if event["name"].startswith("ProfilerStep#")
    }
    if len(steps) > 1:
        gpu = [row for row in rows if row[3] >= 0 and row[4] >= 0]
        host = [row for row in rows if not (row[3] >= 0 and row[4] >= 0)]
        last = max(row[1] for row in host if row[0] in steps)
        called = {row[4] for row in host if row[1] < last}
        rows = [row for row in gpu if row[4] in called]
    return [row[:3] for row in rows if row[3] != -1]


def hta_rows(folder: str, trace: Any, rounding: bool) -> list[tuple[str, int, int]]:
    return [(hta_kind(name), *times) for name, *times in named_rows(folder, trace, rounding)]


def near(folder: str, value: float, expected_ns: int, unit_ns: int, events: int) -> bool:
    """Return whether a sum of a tool's doubles is our integer.

    The double of a time since a base of months ago is off by up to a quarter of a nanosecond,
    so each interval by half of one.
    """
    allowed = 250 * events if folder in COARSE else events // 2 + 1
    return abs(Fraction(value) * unit_ns - expected_ns) <= allowed


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("folder", FOLDERS)
def test_temporal_breakdown_of_hta_follows_from_its_definition(
    folder: str, rounding: bool
) -> None:
    found = figures(
        folder, "get_temporal_breakdown", HTA_DISABLE_NS_ROUNDING="0" if rounding else "1"
    )
    if folder == "cpu-only":
        assert found == {"error": "IndexError: single positional indexer is out-of-bounds"}
        return
    for rank, trace in enumerate(traces(folder)):
        rows = hta_rows(folder, trace, rounding)
        for figure, expected in span_parts(rows).items():
            value = found[str(rank)][figure]
            assert near(folder, value, expected, 1000, len(rows)), (
                rank,
                figure,
                value,
                expected,
            )


@pytest.mark.parametrize("folder", FOLDERS)
def test_overlap_of_hta_is_ours_over_its_events(folder: str) -> None:
    found = figures(folder, "get_comm_comp_overlap", HTA_DISABLE_NS_ROUNDING="1")
    for rank, trace in enumerate(traces(folder)):
        times = sweep([(kind, (a, b)) for kind, a, b in hta_rows(folder, trace, False)])
        both = sum(time for kinds, time in times.items() if {COMMUNICATION, COMPUTE} <= kinds)
        communication = sum(time for kinds, time in times.items() if COMMUNICATION in kinds)
        share = round(100 * both / communication, 2) if communication else None
        assert found[str(rank)]["comp_comm_overlap_pctg"] == share, rank


@pytest.mark.parametrize("folder", FOLDERS)
def test_kernel_sums_of_hta_are_ours_over_its_window(folder: str) -> None:
    found = figures(folder, "get_gpu_kernel_breakdown", HTA_DISABLE_NS_ROUNDING="1")
    for rank, trace in enumerate(traces(folder)):
        sums: Counter[str] = Counter()
        for name, start, end in named_rows(folder, trace, False):
            sums[name] += end - start
        for name, value in found.get(str(rank), {}).items():
            assert near(folder, value, sums[name], 1000, len(sums)), (rank, name)


def tracelens_kind(event: GpuEvent) -> str:
    if event.category == "gpu_memcpy":
        return MEMORY
    communication = re.search("nccl|rccl|cross_device_reduce", event.name, re.IGNORECASE)
    return COMMUNICATION if communication else COMPUTE


def linked_by_flow(trace: Any) -> list[GpuEvent]:
    """Return the GPU events that a flow connects with a call, or that a graph launch made."""
    flows = [event for event in trace["traceEvents"] if event.get("cat") == "ac2g"]
    starts = {event["id"] for event in flows if event["ph"] == "s"}
    ends = {event["id"]: (event["pid"], event["tid"]) for event in flows if event["ph"] == "f"}
    calls = {}
    for event in complete_events(trace):
        if event.get("cat") in {"cuda_runtime", "cuda_driver"}:
            calls[event["args"]["correlation"]] = event["name"]
    linked = []
    for event in complete_events(trace):
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") not in {"kernel", "gpu_memcpy", "gpu_memset"}:
            continue
        graph = calls.get(correlation) in {"cudaGraphLaunch", "hipGraphLaunch"}
        place = event["pid"], event["tid"]
        if graph or (
            correlation in calls and correlation in starts and ends.get(correlation) == place
        ):
            linked.append(event)
    return gpu_events({"traceEvents": linked})


@pytest.mark.parametrize("unlinked", [True, False])
@pytest.mark.parametrize("folder", FOLDERS)
def test_timeline_of_tracelens_follows_from_its_definition(folder: str, unlinked: bool) -> None:
    found = figures(folder, "get_df_gpu_timeline", include_unlinked_kernels=unlinked)
    for rank, trace in enumerate(traces(folder)):
        events = gpu_events(trace) if unlinked else linked_by_flow(trace)
        if not events or folder == "categories-2021":
            assert "No GPU events found" in found[str(rank)]["error"]
            continue
        parts = breakdown(events, kind=tracelens_kind)
        expected = {
            "computation_time": parts[COMPUTE],
            "exposed_comm_time": parts["exposed_communication"],
            "exposed_memcpy_time": parts["exposed_memory"],
            "idle_time": parts["idle"],
            "total_time": parts["window"],
            "total_comm_time": parts[COMMUNICATION],
            "total_memcpy_time": parts[MEMORY],
        }
        for figure, value in expected.items():
            given = found[str(rank)][figure]
            assert near(folder, given, value, 10**6, len(events)), (rank, figure, given, value)


def rows_of(folder: str, call: str) -> list[dict[str, Any]]:
    """Return the rows of a tool's table."""
    found = (r for r in RECORDS if r["traces"] == folder and r["call"].endswith(call))
    rows: list[dict[str, Any]] = next(found)["rows"]
    return rows


def test_latency_and_skew_of_tracelens_are_ours() -> None:
    """Each collective of 8 ranks: the shortest of the ranks' kernels, and how they arrived."""
    theirs = rows_of("fsdp8", "build_df_nccl_implicit_sync_cat")
    ours = collectives(dict(enumerate(traces("fsdp8"))))
    assert len(theirs) == len(ours) == 52
    for mine in ours:
        row = next(
            r for r in theirs if r["collective_id"] == f"{mine['group']}_{mine['number']}"
        )
        assert mine["message"] is not None
        assert mine["message"][0] == row["Collective name"]
        assert near("fsdp8", row["comm_latency"], mine["latency"], 1000, 1)
        assert near("fsdp8", row["skew in start time"], max(mine["waits"].values()), 1000, 2)
        assert near("fsdp8", row["skew in end time"], mine["end_skew"], 1000, 2)


def test_straggler_of_tracelens_is_ours() -> None:
    """Rank 7 is the last in 51 of 52 collectives: it launches late and waits for nobody."""
    theirs = {row["rank"]: row for row in rows_of("fsdp8", "build_df_straggler_summary")}
    ours = collectives(dict(enumerate(traces("fsdp8"))))
    for rank, row in theirs.items():
        total = sum(mine["waits"][rank] for mine in ours)
        assert abs(row["total_wait_time_us"] * 1000 - total) <= 60
        assert row["times_arrived_last"] == sum(mine["waits"][rank] == 0 for mine in ours)
    assert theirs[7]["times_arrived_last"] == 51


@pytest.mark.parametrize("folder", ["fsdp8", "a100-nccl", "mi300-rccl", "b200-vllm"])
def test_messages_of_tracelens_are_ours(folder: str) -> None:
    """One row for a rank, collective, dtype, group, size: how often and how long."""
    ours = {}
    for rank, trace in enumerate(traces(folder)):
        for event in gpu_events(trace):
            if "Collective name" in event.args:
                own = ours.setdefault((rank, *message(event.args)), [0, 0])
                own[0] += 1
                own[1] += event.end - event.start
    theirs = rows_of(folder, "build_df_summary_long")
    assert len(theirs) == len(ours)
    for row in theirs:
        sizes = (str(int(row[f"{side} msg nelems"])) for side in ("In", "Out"))
        group = row["Process Group Name"], str(int(row["Group size"]))
        count, total = ours[row["rank"], row["Collective name"], row["dtype"], *group, *sizes]
        assert row["operation_count"] == count
        assert near(folder, row["dur_sum"], total, 1000, count)


def test_large_trace_is_so_many_copies(tmp_path: Path) -> None:
    """What big_trace.py writes is known without reading it: copies times the figures."""
    block = Block(SOURCE)
    path = tmp_path / "rank3.json"
    path.write_text("".join(pieces(block, rank=3, copies=4, steps=2)))
    small, large = traces("a100-nccl")[0], read(path)
    once, four = breakdown(gpu_events(small)), breakdown(gpu_events(large))
    for part in (COMPUTE, "exposed_communication", "exposed_memory", COMMUNICATION):
        assert four[part] == 4 * once[part]
    assert four["window"] == 3 * block.period + once["window"]
    assert large["distributedInfo"]["rank"] == 3
    each = len(gpu_events(small))
    counts = {name: len(events) for name, events in events_by_step(large).items()}
    assert list(counts.values()) == [2 * each, 2 * each, 0, 0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_reader_has_the_gpu_events_of_the_file(folder: str) -> None:
    """Times are those of the file's decimals; absolute ones are off by 125 ns, and flagged."""
    for file, trace in zip(files(folder), traces(folder), strict=True):
        columns = read_trace(file)
        base = int(trace.get("baseTimeNanoseconds", 0))
        gpu = columns.gpu
        names = [columns.names[name] for name in gpu.name]
        found = sorted(zip(names, gpu.start.tolist(), gpu.end.tolist(), strict=True))
        expected = sorted(
            (event.name, base + event.start, base + event.end) for event in gpu_events(trace)
        )
        if folder in COARSE:
            assert [event[0] for event in found] == [event[0] for event in expected]
            assert "rounded" in {damage.kind for damage in columns.info.damage}
            continue
        assert found == expected
        assert "rounded" not in {damage.kind for damage in columns.info.damage}


@pytest.mark.parametrize("folder", FOLDERS)
def test_steps_have_the_events_that_they_launched(folder: str) -> None:
    for file, trace in zip(files(folder), traces(folder), strict=True):
        found = steps(read_trace(file))
        expected = events_by_step(trace)
        outside = len(expected.pop("outside")) + len(expected.pop("unlinked"))
        if not expected:
            assert not found.is_marked
            continue
        assert [f"ProfilerStep#{number}" for number in found.numbers] == list(expected)
        for index, events in enumerate(expected.values()):
            assert (found.of_gpu == index).sum() == len(events)
        assert (found.of_gpu == -1).sum() == outside


def times_of(step: StepTimes) -> dict[str, int]:
    return {
        "window": step.window_ns,
        COMPUTE: step.compute_ns,
        COMMUNICATION: step.comm_ns,
        "exposed_communication": step.exposed_comm_ns,
        MEMORY: step.memory_ns,
        "exposed_memory": step.exposed_memory_ns,
        "idle": step.idle_ns,
        "overlap": step.overlap_ns,
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_breakdown_of_public_traces(folder: str) -> None:
    """Every part of every step is that of the slow computation, to the nanosecond."""
    for file, trace in zip(files(folder), traces(folder), strict=True):
        events = gpu_events(trace)
        found = kineto.breakdown(read_trace(file), lambda _: True).steps
        if not events:
            assert all(step.device is None for step in found)
            continue
        windows: dict[int | None, tuple[int, int]] = {
            int(name.removeprefix("ProfilerStep#")): window
            for name, window in (tiled_windows(trace) if host_steps(trace) else {}).items()
            if window[0] < window[1]
        } or {None: (events[0].start, max(event.end for event in events))}
        assert [step.step for step in found] == list(windows)
        for step in found:
            window = windows[step.step]
            expected = breakdown(events, window)
            times = times_of(step)
            if folder in COARSE:  # edges of windows are off by up to 125 ns
                for part, value in expected.items():
                    assert abs(times[part] - value) <= 250, part
                continue
            base = int(trace.get("baseTimeNanoseconds", 0))
            assert (step.start_ns - base, step.end_ns - base) == window
            assert times == expected


def test_breakdown_equals_hta_where_definitions_agree() -> None:
    """Step 4 of two: HTA drops the last. Its window lacks the time before the first event."""
    found = figures("a100-nccl", "get_temporal_breakdown", HTA_DISABLE_NS_ROUNDING="1")["0"]
    step = kineto.breakdown(read_trace(files("a100-nccl")[0]), lambda _: True).steps[0]
    exposed = step.exposed_comm_ns + step.exposed_memory_ns
    assert near("a100-nccl", found["compute_time(us)"], step.compute_ns, 1000, 1258)
    assert near("a100-nccl", found["non_compute_time(us)"], exposed, 1000, 1258)
    lead = step.idle_ns - round(found["idle_time(us)"] * 1000)
    assert abs(step.window_ns - lead - found["kernel_time(us)"] * 1000) < 10
    assert lead > 1_000_000


@pytest.mark.parametrize("folder", ["hip-graph", "info-after-events"])
def test_breakdown_equals_tracelens_where_definitions_agree(folder: str) -> None:
    """Neither steps nor memsets: all figures are the same."""
    found = figures(folder, "get_df_gpu_timeline", include_unlinked_kernels=True)["0"]
    (step,) = kineto.breakdown(read_trace(files(folder)[0]), lambda _: True).steps
    parts = {
        "computation_time": step.compute_ns,
        "exposed_comm_time": step.exposed_comm_ns,
        "exposed_memcpy_time": step.exposed_memory_ns,
        "idle_time": step.idle_ns,
        "total_time": step.window_ns,
    }
    for figure, value in parts.items():
        assert near(folder, found[figure], value, 10**6, step.num_events), figure


def test_collectives_through_shared_memory_are_communication() -> None:
    """Both tools count torch's multimem_all_reduce_kernel as compute: 2.12 ms of 10.77."""
    (step,) = kineto.breakdown(read_trace(files("b200-vllm")[0]), lambda _: True).steps
    found = figures("b200-vllm", "get_df_gpu_timeline", include_unlinked_kernels=True)["0"]
    moved = round(found["computation_time"] * 10**6) - step.compute_ns
    assert moved == pytest.approx(2_119_548, abs=100)
    assert step.comm_ns - round(found["total_comm_time"] * 10**6) == pytest.approx(
        moved, abs=100
    )


def test_messages_equal_tracelens_where_definitions_agree(tmp_path: Path) -> None:
    """Bandwidth differs: GB/s of all bytes in all time; theirs are GiB/s, a mean of ratios."""
    path = tmp_path / "messages.json"
    options = MessagesOptions(files=(str(TRACES / "fsdp8"),), json=str(path), jobs=1)
    app_messages(options)
    found = json.loads(path.read_text())
    theirs = rows_of("fsdp8", "build_df_nccl_implicit_sync_cat")
    latency: Counter[tuple[str, int]] = Counter()
    for row in theirs:
        size = 2 * int(max(row["In msg nelems"], row["Out msg nelems"]))
        latency[row["Collective name"].strip("_").removesuffix("_base"), size] += (
            row["comm_latency"] / 1e6
        )
    ours: Counter[tuple[str, int]] = Counter()
    for row in found["histogram"]:
        assert row["bytes"] == row["calls"] * row["from_bytes"]
        name = row["collective"].replace("all_gather", "allgather")
        ours[name, row["from_bytes"]] += row["latency_s"] * row["calls_per_rank"]
    assert ours.keys() == latency.keys()
    for key, total in latency.items():
        assert ours[key] == pytest.approx(total, rel=1e-9), key
    stragglers = {row["rank"]: row for row in rows_of("fsdp8", "build_df_straggler_summary")}
    for row in found["ranks"]:
        their = stragglers[row["rank"]]
        assert row["arrived_last"] == their["times_arrived_last"]
        assert row["transfer_s"] * row["steps"] == pytest.approx(sum(latency.values()))
        waited = row["early_s"] * row["steps"] * 1e6
        assert waited == pytest.approx(their["total_wait_time_us"], abs=0.06)


@pytest.mark.parametrize("folder", ["fsdp8", "a100-nccl", "mi300-rccl", "dlrm8"])
def test_kernels_by_name_are_those_of_the_steps(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    options = KernelsOptions(files=(str(TRACES / folder),), by="name", json=str(path), jobs=1)
    app_kernels(options)
    found = {row["name"]: row["total_ns"] for row in json.loads(path.read_text())["rows"]}
    expected: Counter[str] = Counter()
    for trace in traces(folder):
        for step, events in events_by_step(trace).items():
            for event in events if step.startswith("ProfilerStep") else ():
                expected[event.name] += event.end - event.start
    assert found == expected


def test_work_of_gloo_alone_is_communication() -> None:
    """The step runs no operator, but two threads of gloo: 178.8 of its 210.1 ms."""
    (trace,), (file,) = traces("cpu-only"), files("cpu-only")
    ((start, end),) = host_steps(trace).values()
    spans = [
        (COMMUNICATION, (nanoseconds(event["ts"]), nanoseconds(event["ts"] + event["dur"])))
        for event in complete_events(trace)
        if event["name"] == "gloo:all_reduce"
    ]
    inside = [(kind, clipped(span, (start, end))) for kind, span in spans]
    (step,) = kineto.breakdown(read_trace(file), lambda _: True).steps
    assert step.exposed_comm_ns == step.comm_ns == sweep(inside)[frozenset([COMMUNICATION])]
    assert step.idle_ns == end - start - step.comm_ns
    assert step.step == 551


GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        (GPU_WORK, "it has launches and no GPU events"),
        (GPU_WORK | {"cuda_runtime", "cuda_driver"}, "it has calls of NCCL and no GPU events"),
    ],
)
def test_missing_work_of_a_gpu_is_not_told_by_the_host(
    left_out: set[str], reason: str, tmp_path: Path
) -> None:
    head, events, tail = split(gzip.decompress(SOURCE.read_bytes()).decode())
    texts = [text for event, text in events if category(event) not in left_out]
    path = tmp_path / "rank0.json"
    path.write_text(head + ",".join(texts) + tail)
    found = kineto.breakdown(read_trace(path), lambda _: True)
    assert not found.steps
    (damage,) = (damage for damage in found.damage if damage.kind == "no-device-times")
    assert damage.text.startswith(reason)


def test_work_of_another_device_is_not_told_by_the_host() -> None:
    """HTA says 382 ms of compute; the trace has operators of the host, for 55 of 341 ms."""
    found = kineto.breakdown(read_trace(files("mtia")[0]), lambda _: True)
    assert not found.steps
    assert [damage.kind for damage in found.damage] == ["no-device-times"]
