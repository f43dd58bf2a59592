"""What a profiler trace says, computed slowly and independently of the reader under test.

Plain json, Python integers and one sweep over sorted edges: nothing of the package is imported.
Times are nanoseconds, taken from the decimal text of the file (a double keeps no nanoseconds of
an absolute Unix time). Definitions:

- GPU events: complete events (`ph` X) of category kernel, gpu_memcpy or gpu_memset.
- communication: kernels that carry collective arguments, or whose name says nccl, rccl, or one
  of the collectives that go through shared memory of GPUs (multimem_all_reduce_kernel of
  torch, cross_device_reduce of vLLM).
- memory: gpu_memcpy and gpu_memset. A memset is memory here; TraceLens counts it as compute.
- compute: every other kernel.
- Each nanosecond of the window belongs to one of compute, exposed communication (no compute
  runs), exposed memory (neither compute nor communication runs) and idle (nothing runs).
- A GPU event belongs to the step in whose host range (`ProfilerStep#N` of user_annotation) the
  call of the same correlation starts, on any thread. The window of a step is from the start of
  its first GPU event to the end of its last, and contains its own events alone; or windows tile
  the time (tiled_windows), and contain all events.

    python tests/traces/trace_truth.py FILE...      print one JSON object a file
"""

import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Interval = tuple[int, int]
COMPUTE, COMMUNICATION, MEMORY = "compute", "communication", "memory"
COLLECTIVE = re.compile("nccl|rccl|multimem|cross_device_reduce", re.IGNORECASE)
# The names of 2021 beside those of today.
CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "gpu_memcpy",
    "memcpy": "gpu_memcpy",
    "gpu_memset": "gpu_memset",
    "memset": "gpu_memset",
}
CALLS = ("cuda_runtime", "cuda_driver", "runtime")


@dataclass(frozen=True)
class GpuEvent:
    name: str
    category: str
    start: int  # ns
    end: int
    args: Json

    @property
    def kind(self) -> str:
        if self.category != "kernel":
            return MEMORY
        if COLLECTIVE.search(self.name) or "Collective name" in self.args:
            return COMMUNICATION
        return COMPUTE


def read(path: Path) -> Json:
    """Return the trace of a file; numbers with a fraction are Decimal."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    trace: Json = json.loads(text, parse_float=Decimal)
    return trace


def nanoseconds(microseconds: int | str | Decimal) -> int:
    """Return whole nanoseconds; what lies below them is rounded to the nearest."""
    return round(Decimal(microseconds) * 1000)


def complete_events(trace: Json) -> list[Json]:
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def gpu_events(trace: Json) -> list[GpuEvent]:
    """Return the GPU events of a trace in order of their starts."""
    events = []
    for event in complete_events(trace):
        category = CATEGORIES.get(str(event.get("cat")).lower())
        if category is not None:
            start = nanoseconds(event["ts"])
            end = start + nanoseconds(event["dur"])
            events.append(GpuEvent(event["name"], category, start, end, event.get("args", {})))
    return sorted(events, key=lambda event: (event.start, event.end))


def call_times(trace: Json) -> dict[Any, int]:
    """Return by correlation when the call on the host started."""
    return {
        event["args"]["correlation"]: nanoseconds(event["ts"])
        for event in complete_events(trace)
        if str(event.get("cat")).lower() in CALLS and "correlation" in event.get("args", {})
    }


def host_steps(trace: Json) -> dict[str, Interval]:
    """Return the host ranges of the profiler's steps."""
    steps = {}
    for event in complete_events(trace):
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep"):
            start = nanoseconds(event["ts"])
            steps[event["name"]] = start, start + nanoseconds(event["dur"])
    return dict(sorted(steps.items(), key=lambda item: item[1]))


def sweep(intervals: Iterable[tuple[str, Interval]]) -> Counter[frozenset[str]]:
    """Return for each set of kinds the nanoseconds in which exactly those kinds run.

    The empty set counts what lies between the first start and the last end.
    """
    edges: dict[int, Counter[str]] = defaultdict(Counter)
    for kind, (start, end) in intervals:
        edges[start][kind] += 1
        edges[end][kind] -= 1
    times: Counter[frozenset[str]] = Counter()
    running: Counter[str] = Counter()
    last = None
    for time in sorted(edges):
        if last is not None:
            times[frozenset(kind for kind, count in running.items() if count)] += time - last
        running.update(edges[time])
        last = time
    return times


def clipped(interval: Interval, window: Interval) -> Interval:
    """Return the part of an interval in a window, of no length if there is none."""
    start, end = max(interval[0], window[0]), min(interval[1], window[1])
    return (start, end) if start < end else (window[0], window[0])


def breakdown(
    events: Sequence[GpuEvent],
    window: Interval | None = None,
    kind: Callable[[GpuEvent], str] = lambda event: event.kind,
) -> dict[str, int]:
    """Return the parts of the window in ns; without one, of the span of the events."""
    if window is None:
        window = min(event.start for event in events), max(event.end for event in events)
    intervals = [(kind(event), clipped((event.start, event.end), window)) for event in events]
    # Edges of the window itself, so that idle time at its ends counts.
    intervals += [("none", (edge, edge)) for edge in window]
    times = sweep(intervals)

    def total(*kinds: str, without: Sequence[str] = ()) -> int:
        return sum(
            time
            for running, time in times.items()
            if running.issuperset(kinds) and running.isdisjoint(without)
        )

    parts = {
        COMPUTE: total(COMPUTE),
        "exposed_communication": total(COMMUNICATION, without=[COMPUTE]),
        "exposed_memory": total(MEMORY, without=[COMPUTE, COMMUNICATION]),
        "idle": times[frozenset()],
    }
    assert sum(parts.values()) == window[1] - window[0]
    return parts | {
        "window": window[1] - window[0],
        COMMUNICATION: total(COMMUNICATION),
        MEMORY: total(MEMORY),
        "overlap": total(COMMUNICATION, COMPUTE),
    }


def events_by_step(trace: Json) -> dict[str, list[GpuEvent]]:
    """Return the GPU events by step, also those "outside" of steps and those "unlinked"."""
    steps, calls = host_steps(trace), call_times(trace)
    found: dict[str, list[GpuEvent]] = {name: [] for name in (*steps, "outside", "unlinked")}
    for event in gpu_events(trace):
        call = calls.get(event.args.get("correlation"))
        if call is None:
            found["unlinked"].append(event)
            continue
        name = next((name for name, (a, b) in steps.items() if a <= call < b), "outside")
        found[name].append(event)
    return found


def tiled_windows(trace: Json) -> dict[str, Interval]:
    """Return windows that tile the time: a step's starts when the one before it has ended.

    The first starts with the end of what was launched before all steps, and without such with
    its host range, or its first event if that is earlier.
    """
    by_step, ranges = events_by_step(trace), host_steps(trace)
    others = by_step.pop("outside") + by_step.pop("unlinked")
    first = min(event.start for events in by_step.values() for event in events)
    earlier = [event.end for event in others if event.start < first]
    begin = max(earlier) if earlier else min(first, *(start for start, _ in ranges.values()))
    windows = {}
    for name, events in by_step.items():
        end = max([begin, *(event.end for event in events)])
        windows[name] = begin, end
        begin = end
    return windows


def kernel_sums(events: Iterable[GpuEvent]) -> dict[str, list[int]]:
    """Return count and total ns by name."""
    sums: dict[str, list[int]] = {}
    for event in events:
        count_total = sums.setdefault(event.name, [0, 0])
        count_total[0] += 1
        count_total[1] += event.end - event.start
    return sums


def message(args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what makes two messages the same."""
    names = ("Collective name", "dtype", "Process Group Name", "Group size")
    return tuple(str(args.get(name)) for name in (*names, "In msg nelems", "Out msg nelems"))


def messages(trace: Json) -> dict[str, dict[str, int]]:
    """Return counts of messages by GPU kernels and by the host's record_param_comms."""
    kernels = Counter(
        " ".join(message(event.args)) if "Collective name" in event.args else "unknown"
        for event in gpu_events(trace)
        if event.kind == COMMUNICATION
    )
    calls = Counter(
        " ".join(message(event.get("args", {})))
        for event in complete_events(trace)
        if event["name"] == "record_param_comms"
    )
    return {"kernels": dict(kernels), "calls": dict(calls)}


def collectives(traces: Mapping[int, Json]) -> list[Json]:
    """Match the collectives of the ranks and return durations and arrivals in ns.

    The nth kernel of a process group is one collective on all of its ranks, in the order in
    which the host asked for them: a communicator demands that order of every rank. Kernels
    without collective arguments match nothing. Clocks are taken as they are.
    """
    found: dict[tuple[str, str, int], dict[int, GpuEvent]] = defaultdict(dict)
    for rank, trace in traces.items():
        calls, counts = call_times(trace), Counter[tuple[str, str]]()
        kernels = [event for event in gpu_events(trace) if "Collective name" in event.args]
        for event in sorted(kernels, key=lambda event: calls[event.args["correlation"]]):
            group = (
                str(event.args.get("Process Group Name")),
                str(event.args.get("Process Group Ranks")),
            )
            found[(*group, counts[group])][rank] = event
            counts[group] += 1
    matched = []
    for (group_name, _, number), events in sorted(found.items()):
        base = {rank: int(traces[rank].get("baseTimeNanoseconds", 0)) for rank in events}
        starts = {rank: base[rank] + event.start for rank, event in events.items()}
        ends = [base[rank] + event.end for rank, event in events.items()]
        messages = {message(event.args) for event in events.values()}
        matched.append(
            {
                "group": group_name,
                "number": number,
                "message": messages.pop() if len(messages) == 1 else None,
                "latency": min(event.end - event.start for event in events.values()),
                "waits": {rank: max(starts.values()) - start for rank, start in starts.items()},
                "end_skew": max(ends) - min(ends),
            }
        )
    return matched


def report(path: Path) -> Json:
    """Return all figures of a file."""
    trace = read(path)
    events = gpu_events(trace)
    steps = events_by_step(trace)
    return {
        "file": path.name,
        "rank": trace.get("distributedInfo", {}).get("rank"),
        "gpu_events": dict(Counter(event.category for event in events)),
        "devices": sorted({str(event.args.get("device")) for event in events}),
        "streams": sorted({str(event.args.get("stream")) for event in events}),
        "all": breakdown(events) if events else None,
        "steps": {
            name: {"gpu_events": len(own)} | (breakdown(own) if own else {})
            for name, own in steps.items()
        },
        "host_steps": {name: end - start for name, (start, end) in host_steps(trace).items()},
        "messages": messages(trace),
    }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(json.dumps(report(Path(argument)), indent=1) + "\n")
