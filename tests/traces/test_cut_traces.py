"""A trace that ends early says so first, in every view; a file without events is refused."""

import gzip
import json
from pathlib import Path

import pytest

from stepmark.cli.main import status

pytestmark = pytest.mark.ranks

FSDP8 = Path(__file__).parents[1] / "data" / "traces" / "fsdp8"
TEXT = gzip.decompress((FSDP8 / "rank0.json.gz").read_bytes())
# A third of the trace has whole steps, and work of the GPU in them.
IN_EVENT = len(TEXT) // 3
VERBS = ("breakdown", "ledger", "messages", "kernels", "critical-path")


def write(folder: Path, packed: str = "") -> Path:
    """Write a cut trace. packed: "" or how the gzip file comes to be cut."""
    file = folder / ("cut.json.gz" if packed else "cut.json")
    if packed == "gzip":
        whole = gzip.compress(TEXT)
        file.write_bytes(whole[: len(whole) // 2])
    else:
        text = TEXT[:IN_EVENT]
        file.write_bytes(gzip.compress(text) if packed else text)
    return file


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert status(list(map(str, words))) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("packed", ["", "gzip", "inside"])
@pytest.mark.parametrize("verb", VERBS)
def test_the_first_line_says_what_was_read(
    verb: str, packed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, packed)
    first = run(capsys, "trace", verb, file).splitlines()[0]
    assert first.startswith("The trace is cut, the end is missing: ")
    document = json.loads(run(capsys, "trace", verb, file, "--json", "-"))
    assert next(iter(document.items())) == ("cut", first)


def test_events_time_and_bytes_are_those_of_the_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    first = run(capsys, "trace", file).splitlines()[0]
    end = max(TEXT.rfind(b"},", 0, IN_EVENT), TEXT.rfind(b"}\n", 0, IN_EVENT))
    events = json.loads(TEXT[: end + 1] + b"]}")["traceEvents"]
    assert f" {len(events):,} events over " in first
    assert f" {IN_EVENT:,} bytes" in first
    (over,) = (words.split()[0] for words in first.split(" events over ")[1:])
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X"
        and event["cat"] not in ("python_function", "gpu_user_annotation", "overhead")
    ]
    took_us = max(end for _, end in spans) - min(start for start, _ in spans)
    assert float(over) == pytest.approx(took_us / 1000, abs=2e-3)


def test_of_several_ranks_those_that_are_cut_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    for rank in (1, 2):
        name = f"rank{rank}.json.gz"
        (tmp_path / name).write_bytes((FSDP8 / name).read_bytes())
    first = run(capsys, "trace", tmp_path).splitlines()[0]
    assert first.startswith("1 of 3 traces are cut (rank 0)")
    assert "of rank 0, " in first
    # The ranks that are asked for are whole.
    assert "cut" not in run(capsys, "trace", tmp_path, "--ranks", "1,2").splitlines()[0]


def test_a_comparison_says_which_side_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    words = ("trace", "compare", FSDP8 / "rank0.json.gz", file)
    first = run(capsys, *words).splitlines()[0]
    assert first.startswith("B: The trace is cut")
    assert json.loads(run(capsys, *words, "--json", "-"))["cut"] == first


def test_what_is_missing_is_not_idle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    headline = run(capsys, "trace", file).splitlines()[2]
    assert headline.endswith(", the rest is idle or not in the cut trace")
    steps = json.loads(run(capsys, "trace", file, "--json", "-"))["steps"]
    assert {(row["idle_ns"], row["unknown_idle_ns"]) for row in steps} == {(None, None)}


def test_files_made_of_a_cut_trace_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    convert = ("trace", "convert", file, "--to", "csv", "--out", tmp_path / "csv")
    assert run(capsys, *convert).startswith("The trace is cut")
    run(capsys, "trace", file, "--html", tmp_path / "page.html")
    assert "The trace is cut" in (tmp_path / "page.html").read_text()
    assert status(["trace", str(file), "--csv", "-"]) == 0
    assert capsys.readouterr().err.startswith("The trace is cut")


@pytest.mark.parametrize("verb", ["breakdown", "ledger", "kernels"])
@pytest.mark.parametrize(
    ("header", "has_times"),
    [
        ({}, False),
        ({"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}, False),
        ({"deviceProperties": []}, True),
    ],
)
def test_a_trace_cut_before_its_first_gpu_event_has_no_times_of_the_host(
    header: dict[str, object],
    has_times: bool,
    verb: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": 10 * n, "dur": 5}
        for n, (cat, name) in enumerate([*[("cpu_op", "aten::mm")] * 4, ("kernel", "gemm")])
    ]
    text = json.dumps({**header, "traceEvents": events})
    file = tmp_path / "cut.json"
    file.write_text(text[: text.index("kernel")])
    printed = run(capsys, "trace", verb, file)
    assert printed.startswith("The trace is cut, the end is missing: ")
    assert " 4 events over 0.035 ms" in printed.splitlines()[0]
    assert ("it is cut before any work of a device" in printed) != has_times
    assert ("no times of any step" in printed) != has_times


def test_a_whole_trace_is_not_called_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(run(capsys, "trace", FSDP8 / "rank0.json.gz", "--json", "-"))
    assert document["cut"] is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": []}',
        '{"traceEvents": [{"ph": "X", "na',
        '{"name": "package", "version": "1.0.0", "dependencies": {"a": "^1"}}',
        '{"rows": [{"case_id": "0", "time_s": 1.5}]}',
        '[{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]',
        '{"traceEvents": [{"ph": "X", "name": "of a browser", "ts": 1, "dur": 2}]}',
    ],
)
def test_a_file_without_events_of_the_profiler_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    for verb in VERBS:
        assert status(["trace", verb, str(file)]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith(f"stepmark: trace {file} is invalid: it must be a ")


def test_breakdown_is_what_a_path_alone_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(capsys, "trace", "breakdown", FSDP8, "--steps", "5")
    assert run(capsys, "trace", FSDP8, "--steps", "5") == expected
    assert run(capsys, "trace", "--steps", "5", FSDP8) == expected
    monkeypatch.chdir(tmp_path)
    (tmp_path / "brekdown").symlink_to(FSDP8)
    (tmp_path / "kernels").symlink_to(FSDP8)
    assert run(capsys, "trace", "brekdown", "--steps", "5") == expected
    assert run(capsys, "trace", "./kernels", "--steps", "5") == expected
    assert status(["trace", "kernels"]) == 2  # the command, whose traces are missing
