"""Critical paths: laws over random traces, and constructed traces of known truth.

Times of constructed events are microseconds.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from stepmark.model.kernel_groups import group_of
from stepmark.timeline.critical_path import Path as CriticalPath
from stepmark.traces.kineto.critical_path import critical_path
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.kineto.step_work import step_work
from stepmark.traces.trace_options import CriticalPathOptions
from stepmark.traces.trace_path_text import lines, tables

from .trace_scripts import AUTOGRAD, MAIN, Script

DATA = Path(__file__).parents[1] / "data" / "traces"


def path_of(folder: Path, *scripts: Script) -> CriticalPath:
    options = CriticalPathOptions(files=("x",))
    works = {}
    for script in scripts:
        (works[script.rank],) = step_work(options, read_trace(script.write(folder)))
    path = critical_path(works)
    check_tiles(path)
    return path


def check_tiles(path: CriticalPath) -> None:
    """Segments follow one another from the start of the window to its end."""
    ends = [path.window[0], *(segment.end for segment in path.segments)]
    starts = [*(segment.start for segment in path.segments), path.window[1]]
    assert starts == ends
    assert all(segment.end > segment.start for segment in path.segments)
    times = by_category(path)
    assert times.keys() == path.at_least.keys()
    window = path.window[1] - path.window[0]
    for category, time in path.at_least.items():
        assert 0 <= time <= window, category


def by_category(path: CriticalPath) -> dict[str, int]:
    times: Counter[str] = Counter()
    for segment in path.segments:
        times[segment.category] += segment.end - segment.start
    return dict(times)


def microseconds(path: CriticalPath) -> dict[str, float]:
    return {category: time / 1000 for category, time in by_category(path).items()}


def test_compute_bound(tmp_path: Path) -> None:
    """The host runs ahead: only the first launch is waited for."""
    script = Script()
    script.step(0, 20)
    script.op("aten::mm", 0, 5)
    for number, start in enumerate((10, 31, 52)):
        script.kernel("gemm", 4 + 2 * number, (start, start + 20))
    path = path_of(tmp_path, script)
    assert path.window == (0, 72000)
    assert microseconds(path) == {"compute": 60, "gaps": 2, "launch latency": 5, "host": 5}
    assert path.at_least["host"] == 67000
    assert [segment.name for segment in path.segments[:2]] == [
        "aten::mm",
        "from the launch to the start",
    ]


def test_host_bound(tmp_path: Path) -> None:
    """Each kernel ends long before the next is launched."""
    script = Script()
    script.step(0, 400)
    for number in range(4):
        start = 100 * number
        script.op("aten::slow", start, start + 90)
        script.kernel("gemm", start + 80, (start + 85, start + 95))
    path = path_of(tmp_path, script)
    assert microseconds(path) == {"compute": 10, "launch latency": 4, "host": 381}
    names = Counter(segment.name for segment in path.segments if segment.category == "host")
    assert names == {"aten::slow": 4, "Python and other host code": 3}
    # All of the host's time is waited for; without it the kernels remain.
    assert path.at_least["host"] == 40000


def test_communication_bound(tmp_path: Path) -> None:
    """The last kernel waits for an all-reduce on another stream."""
    scripts = []
    for rank in range(2):
        script = Script(rank, 2)
        script.step(0, 20)
        script.kernel("backward", 1, (5, 100))
        script.all_reduce(6, (102, 902))
        script.kernel("adam", 9, (906, 1000))
        scripts.append(script)
    path = path_of(tmp_path, *scripts)
    assert microseconds(path) == {
        **{"compute": 189, "communication": 800, "gaps": 6},
        **{"launch latency": 3, "host": 2},
    }
    assert sum(segment.is_inferred for segment in path.segments) == 2
    assert path.at_least["communication"] == 200000
    assert (path.absent, path.unmatched, path.without_clocks) == ((), 0, ())


@pytest.mark.parametrize("ahead", [0, 5000.5])
def test_a_straggler_is_on_the_path(tmp_path: Path, ahead: float) -> None:
    """Rank 1 computes longer; its clock may be ahead."""
    scripts = []
    for rank, last in enumerate((100, 500)):
        script = Script(rank, 2, ahead * rank)
        script.step(0, 20)
        script.kernel("backward", 1, (5, last))
        script.all_reduce(6, (last + 2, 702))
        script.kernel("adam", 9, (705, 800 - rank))
        scripts.append(script)
    path = path_of(tmp_path, *scripts)
    assert path.rank == 0
    assert by_category(path)["communication"] == 200000
    ranks = [(segment.rank, segment.name) for segment in path.segments]
    assert (1, "backward") in ranks
    assert (0, "backward") not in ranks
    assert (0, "adam") in ranks
    # Without the trace of rank 1 it is waiting or transfer, and said.
    alone = path_of(tmp_path, scripts[0])
    assert by_category(alone)["communication"] == 600000
    assert (alone.absent, alone.unmatched, alone.uncounted) == ((1,), 600000, 600000)
    assert alone.at_least["compute"] < 20000  # the sum may end at once


def test_ranks_without_a_common_clock_wait(tmp_path: Path) -> None:
    """Ends that do not fit one clock: the waiting is known, its cause is not."""
    scripts = []
    for rank, (late, ends) in enumerate(((0, (300, 600, 900)), (150, (300, 1600, 9000)))):
        script = Script(rank, 2)
        script.step(0, 20)
        for number, end in enumerate(ends):
            script.all_reduce(1 + 3 * number, (end - 200 + late, end))
        scripts.append(script)
    path = path_of(tmp_path, *scripts)
    assert path.without_clocks == (1,)
    times = microseconds(path)
    assert times["communication"] == 150  # the shorter kernels of rank 1
    assert times["peer"] == 450


def test_waiting_for_the_gpu_leads_back_to_its_work(tmp_path: Path) -> None:
    script = Script()
    script.step(0, 300)
    script.kernel("long", 1, (5, 200))
    script.call("cudaDeviceSynchronize", 10, 203)
    script.op("aten::after", 203, 240)
    script.kernel("short", 238, (241, 250))
    path = path_of(tmp_path, script)
    assert microseconds(path) == {"compute": 204, "launch latency": 5, "host": 41}
    names = [segment.name for segment in path.segments]
    assert names[-5:] == [
        *("long", "return from waiting for the GPU", "aten::after"),
        *("from the launch to the start", "short"),
    ]


def test_a_thread_waits_for_the_thread_that_started_it(tmp_path: Path) -> None:
    """The backward pass is launched by a thread that starts when the forward pass is done."""
    script = Script()
    script.step(0, 100)
    script.op("aten::forward", 0, 50)
    script.op("aten::backward", 52, 80, AUTOGRAD)
    script.kernel("grad", 78, (81, 90), thread=AUTOGRAD)
    path = path_of(tmp_path, script)
    host = [(s.name, (s.end - s.start) / 1000) for s in path.segments if s.category == "host"]
    assert host == [
        ("aten::forward", 50),
        ("Python and other host code", 2),
        ("aten::backward", 27),
    ]


def test_recorded_waits_go_before_times(tmp_path: Path) -> None:
    """By times alone `copy` would be the cause; the trace records the wait for `load`."""
    script = Script()
    script.step(0, 100)
    script.kernel("load", 1, (5, 40), stream=8)
    record = script.call("cudaEventRecord", 3, 4)
    wait = script.call("cudaStreamWaitEvent", 5, 6)
    script.kernel("copy", 7, (10, 55), stream=9)
    script.kernel("use", 9, (60, 90))
    inferred = path_of(tmp_path, script)
    assert [s.name for s in inferred.segments if s.category == "compute"] == ["copy", "use"]
    script.add(
        *("cuda_sync", "Stream Wait Event", (0, 7), (5, 6)),
        **{"stream": 7, "device": 0, "correlation": wait, "wait_on_stream": 8},
        **{"wait_on_cuda_event_record_corr_id": record},
    )
    path = path_of(tmp_path, script)
    assert [s.name for s in path.segments if s.category == "compute"] == ["load", "use"]
    assert not any(segment.is_inferred for segment in path.segments)


def random_script(seed: int, rank: int, world: int) -> Script:
    chance = random.Random(f"{seed} {rank}")
    script = Script(rank, world, chance.choice((0, 0, 300.25)))
    script.step(0, 5000)
    host, free = 0.0, [0.0] * 3
    for _ in range(chance.randrange(1, 60)):
        host += chance.choice((0.0, 0.5, 3, 40))
        thread = chance.choice((MAIN, MAIN, AUTOGRAD))
        script.op(chance.choice("abc"), host, host + 2, thread)
        stream = chance.randrange(3)
        start = max(host, free[stream]) + chance.choice((0.0, 0.5, 2, 30))
        end = start + chance.choice((0.0, 1, 10.125, 60))
        if chance.random() < 0.2:
            script.all_reduce(host, (start, end))
        else:
            script.kernel(chance.choice("xyz"), host, (start, end), stream, thread)
        free[stream] = end
        if chance.random() < 0.1:
            script.call(
                chance.choice(("cudaDeviceSynchronize", "cudaEventSynchronize")),
                host + 1,
                max(end, host + 2),
                thread,
            )
            host = max(end, host + 2)
    return script


def test_what_a_missing_rank_leaves_open_is_said(tmp_path: Path) -> None:
    """Two of three ranks: the sum takes 600 us at most on them, and may be waiting."""
    scripts = []
    for rank in range(2):
        script = Script(rank, 3)
        script.step(0, 20)
        script.kernel("backward", 1, (5, 50 + 50 * rank))
        script.all_reduce(6, (102, 702))
        scripts.append(script)
    path = path_of(tmp_path, *scripts)
    assert by_category(path)["communication"] == 600000
    assert (path.absent, path.unmatched) == ((2,), 600000)
    assert path.at_least["host"] < 110000


@pytest.mark.parametrize("seed", range(12))
def test_paths_of_random_traces_tile_their_windows(tmp_path: Path, seed: int) -> None:
    path_of(tmp_path, *(random_script(seed, rank, 3) for rank in range(1 + seed % 3)))


@pytest.mark.parametrize(
    "name", ["fsdp8", "dlrm8", "mi300-rccl", "cuda-sync", "hip-graph", "mi250"]
)
def test_paths_of_real_traces_tile_their_windows(name: str) -> None:
    options = CriticalPathOptions(files=("x",))
    works = {}
    for rank, file in enumerate(sorted((DATA / name).iterdir())):
        (works[rank],) = step_work(options, read_trace(file))
    path = critical_path(works)
    check_tiles(path)
    if name == "fsdp8":
        # Rank 7 launches late, and the others wait for it in NCCL.
        assert path.rank == 7
        assert by_category(path)["host"] > 0.9 * (path.window[1] - path.window[0])


def test_measured_steps_of_known_truth() -> None:
    """What the programs do: tests/data/critical-path/README.md."""
    options = CriticalPathOptions(files=("x",))
    folder = DATA.parent / "critical-path"
    names: dict[str, Counter[str]] = {}
    for file in sorted(folder.glob("*.json.gz")):
        (work,) = step_work(options, read_trace(file))
        path = critical_path({0: work})
        check_tiles(path)
        names[file.name.split(".")[0]] = Counter(
            group_of(segment.name) if segment.category == "compute" else segment.name
            for segment in path.segments
            if segment.category in ("compute", "copies") and "Memset" not in segment.name
        )
        times = by_category(path)
        window = path.window[1] - path.window[0]
        if file.name.startswith("sync0"):
            # 8 sleeps of 1 ms, and what the host needs to launch after each.
            assert 8_000_000 < times["host"] < 11_000_000
        else:
            assert times.get("host", 0) < 0.01 * window
            assert times["gaps"] < 0.01 * window
    streams = {"matrix products": 24, "other": 6, "elementwise": 6}
    assert names["streams0"] == names["streams1"] == streams
    assert names["copy0"] == {"Memcpy HtoD (Pinned -> Device)": 6, "elementwise": 6}
    # The product behind the last `item()` ends the step; others end while the host sleeps.
    assert names["sync0"]["reductions"] == 8
    assert names["sync0"]["matrix products"] >= 17


def test_communication_beside_the_path_may_be_waiting(tmp_path: Path) -> None:
    """Of a missing rank: bounds that count it as 0 say so where they stand."""
    script = Script(0, 2)
    script.step(0, 100)
    script.all_reduce(1, (10, 60))
    script.kernel("product", 4, (12, 90))
    path = path_of(tmp_path, script)
    assert (path.unmatched, path.uncounted) == (0, 50000)
    (compute,) = (row for row in tables([path])["categories"] if row["category"] == "compute")
    assert compute["bound_without_ns"] == 50000
    text = list(lines([path]))
    assert next(line for line in text if line.startswith("compute ")).endswith(" *")
    (remark,) = (line for line in text if line.startswith("* "))
    assert "0.050 ms of rank 0 on and beside it, may be waiting" in remark
    other = Script(1, 2)
    other.step(0, 100)
    other.all_reduce(1, (10, 60))
    assert not any(line.startswith("* ") for line in lines([path_of(tmp_path, script, other)]))
