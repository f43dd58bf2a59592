"""Trimmed traces and tables say of a step what the whole trace says."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepmark.ground.errors import ConfigError
from stepmark.tables.export import write_pieces
from stepmark.timeline.trace_columns import NONE, RankTrace
from stepmark.traces.kineto import export, links
from stepmark.traces.kineto.breakdown import breakdown
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.kineto.windows import gpu_windows
from stepmark.traces.trace_options import ConvertOptions

DATA = Path(__file__).parents[1] / "data" / "traces"


def options(**values: Any) -> ConvertOptions:
    return ConvertOptions(files=("x",), out=Path("out"), to="trimmed", **values)


def trim(file: Path, folder: Path, *steps: int) -> tuple[RankTrace, Path]:
    whole = read_trace(file)
    target = folder / f"{file.name.removesuffix('.gz')}"
    selection = export.select(whole, options(steps=steps or None))
    target.write_bytes(b"".join(export.trimmed(file, selection)))
    return whole, target


def gpu_rows(trace: RankTrace, window: tuple[int, int]) -> list[tuple[Any, ...]]:
    """GPU events in a window, with the numbers of the steps that launched them."""
    gpu, steps = trace.gpu, links.steps(trace)
    inside = np.flatnonzero((gpu.start <= window[1]) & (gpu.end >= window[0]))
    return [
        (
            *(int(gpu.start[row]), int(gpu.end[row]), trace.names[gpu.name[row]]),
            *(int(gpu.kind[row]), trace.streams[gpu.stream[row]], int(gpu.correlation[row])),
            *(steps.numbers[steps.of_gpu[row]] if steps.of_gpu[row] != NONE else None,),
        )
        for row in inside
    ]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("fsdp8/rank0.json.gz", (6,)),
        ("fsdp8/rank3.json.gz", (5, 6)),
        ("a100-nccl/rank0.json.gz", (5,)),
        ("mi300-rccl/rank0.json.gz", (15,)),
        ("absolute-ns/rank0.json.gz", (103,)),
    ],
)
def test_a_trimmed_trace_has_all_work_in_the_window_of_its_steps(
    name: str, step: tuple[int, ...], tmp_path: Path
) -> None:
    whole, target = trim(DATA / name, tmp_path, *step)
    selection = export.select(whole, options(steps=step))
    assert selection is not None
    again = read_trace(target)
    assert export.select(again, options(steps=step)) == selection
    numbers = step
    expected = [
        (*row[:-1], row[-1] if row[-1] in numbers else None)
        for row in gpu_rows(whole, selection.gpu)
    ]
    assert gpu_rows(again, selection.gpu) == expected
    assert any(row[-1] == step[0] for row in expected)
    assert links.steps(again).numbers == tuple(numbers)
    assert again.info.damage == whole.info.damage
    assert again.info.groups == whole.info.groups
    breakdowns = [
        breakdown(trace, lambda number: number in numbers) for trace in (whole, again)
    ]
    for table in ("steps", "comms", "kernels", "launches", "copies"):
        rows, expected_rows = (set(getattr(each, table)) for each in reversed(breakdowns))
        assert rows == expected_rows, table
    # The messages of the steps, on the host and on the GPU.
    for trace in (whole, again):
        args, _ = links.gpu_comms(trace)
        rows = np.isin(
            np.array([*links.steps(trace).numbers, NONE])[links.steps(trace).of_gpu], numbers
        )
        texts = [trace.comm_args[each] for each in args[rows] if each != NONE]
        if trace is whole:
            messages = texts
    assert texts == messages


def test_events_are_copied_with_all_their_fields_and_arrows(tmp_path: Path) -> None:
    file = DATA / "mi250" / "minitoy.json.gz"
    source = json.loads(gzip.decompress(file.read_bytes()))
    numbers = links.steps(read_trace(file)).numbers
    _, target = trim(file, tmp_path, numbers[0])
    trimmed = json.loads(target.read_bytes())
    events, rest = trimmed.pop("traceEvents"), iter(source.pop("traceEvents"))
    assert trimmed == source  # header and tail
    assert all(event in rest for event in events)  # in the order of the file
    kernels = {e["args"]["correlation"] for e in events if e.get("cat") == "kernel"}
    starts = {e["id"] for e in events if e.get("cat") == "ac2g" and e["ph"] == "s"}
    ends = {e["id"] for e in events if e.get("cat") == "ac2g" and e["ph"] == "f"}
    assert kernels
    assert kernels <= starts & ends
    assert {e["name"] for e in events if e["ph"] == "M"} >= {"process_name", "thread_name"}
    assert {e["name"] for e in events if e["name"].startswith("ProfilerStep")} == {
        f"ProfilerStep#{numbers[0]}"
    }


def test_without_steps_a_trace_is_copied_whole(tmp_path: Path) -> None:
    file = DATA / "info-after-events" / "simple_add.json.gz"
    _, target = trim(file, tmp_path)
    assert json.loads(target.read_bytes()) == json.loads(gzip.decompress(file.read_bytes()))


def test_a_cut_trace_becomes_a_valid_one(tmp_path: Path) -> None:
    text = gzip.decompress((DATA / "a100-nccl" / "rank0.json.gz").read_bytes())
    cut = tmp_path / "cut.json"
    cut.write_bytes(text[: len(text) * 2 // 3])
    (tmp_path / "out").mkdir()
    whole, target = trim(cut, tmp_path / "out")
    assert whole.info.damage
    assert len(json.loads(target.read_bytes())["traceEvents"]) == whole.info.num_events
    assert not read_trace(target).info.damage


def test_steps_that_are_not_consecutive_or_not_there_are_refused() -> None:
    marked = read_trace(DATA / "absolute-ns" / "rank0.json.gz")
    numbers = links.steps(marked).numbers
    with pytest.raises(ConfigError, match="102-103"):
        export.select(marked, options(steps=(7,)))
    assert numbers == (102, 103)
    unmarked = read_trace(DATA / "b200-vllm" / "rank0.json.gz")
    with pytest.raises(ConfigError, match="without ProfilerStep marks"):
        export.select(unmarked, options(steps=(7,)))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_have_names_and_integer_nanoseconds(suffix: str, tmp_path: Path) -> None:
    trace = read_trace(DATA / "a100-nccl" / "rank0.json.gz")
    rows: dict[str, list[dict[str, Any]]] = {}
    for table in export.tables(trace, 3, options(steps=(5,))):
        file = tmp_path / f"{table.name}.{suffix}"
        write_pieces(table.types, table.pieces, file)
        if suffix == "csv":
            rows[table.name] = list(csv.DictReader(file.read_text().splitlines()))
        else:
            import duckdb

            result = duckdb.sql(f"FROM '{file}'")
            rows[table.name] = [
                {
                    key: "" if value is None else str(value)
                    for key, value in zip(result.columns, row, strict=True)
                }
                for row in result.fetchall()
            ]
    gpu, steps = trace.gpu, links.steps(trace)
    own = np.flatnonzero(steps.of_gpu == steps.numbers.index(5))
    assert [(r["start_ns"], r["end_ns"], r["name"]) for r in rows["gpu"]] == [
        (str(gpu.start[row]), str(gpu.end[row]), trace.names[gpu.name[row]]) for row in own
    ]
    assert {(row["rank"], row["step"]) for row in rows["gpu"]} == {("3", "5")}
    sums = [row for row in rows["gpu"] if row["collective"] == "allreduce"]
    assert {row["dtype"] for row in sums} == {"Float"}
    assert all(int(row["in_elements"]) > 0 for row in sums)
    assert rows["calls"][0]["name"].startswith("cuda")
    assert {row["num_bytes"] for row in rows["gpu"] if row["kind"] == "kernel"} == {""}
    assert len(rows["comms"]) == len(rows["ops"])  # other ops are cut off in this file


def test_the_window_of_a_trimmed_trace_starts_where_the_step_before_ended(
    tmp_path: Path,
) -> None:
    """A copy of step 2 runs before the last kernel of step 1 has started."""
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
        | ({"args": {"correlation": correlation}} if correlation else {})
        for cat, name, pid, tid, ts, dur, correlation in (
            ("user_annotation", "ProfilerStep#1", 9, 9, 0, 10, 0),
            ("user_annotation", "ProfilerStep#2", 9, 9, 10, 10, 0),
            ("cuda_runtime", "cudaLaunchKernel", 9, 9, 1, 1, 1),
            ("cuda_runtime", "cudaLaunchKernel", 9, 9, 2, 1, 2),
            ("cuda_runtime", "cudaMemcpyAsync", 9, 9, 11, 1, 3),
            ("cuda_runtime", "cudaLaunchKernel", 9, 9, 13, 1, 4),
            ("kernel", "a", 0, 7, 3, 20, 1),
            ("gpu_memcpy", "Memcpy", 0, 8, 14, 2, 3),
            ("kernel", "b", 0, 7, 24, 10, 2),
            ("kernel", "c", 0, 7, 40, 5, 4),
        )
    ]
    file = tmp_path / "rank0.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    (tmp_path / "out").mkdir()
    whole, target = trim(file, tmp_path / "out", 2)
    windows = gpu_windows(whole, links.steps(whole))
    again = read_trace(target)
    assert (windows.start[1], windows.end[1]) == (34000, 45000)
    trimmed = gpu_windows(again, links.steps(again))
    assert (trimmed.start.tolist(), trimmed.end.tolist()) == ([34000], [45000])


def test_types_of_columns_do_not_depend_on_the_rank() -> None:
    def types(name: str) -> dict[str, dict[str, str]]:
        trace = read_trace(DATA / name)
        return {table.name: dict(table.types) for table in export.tables(trace, 0, options())}

    assert types("triton/triton.json.gz") == types("a100-nccl/rank0.json.gz")
