"""An output that ends before its last row is found, and none that is complete or copied."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.comm_records import comm_run

from stepmark.collectives.peer_formats import json_document
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.job_output import OutputReader
from stepmark.text_tables import FileTables, read_tables, tables_of
from stepmark.text_tables.nccl_text import outputs_of
from stepmark.text_tables.stopped_outputs import StoppedOutput, stops_of

from .nccl_samples import FAMILIES, HEAD, MODERN_RANK, PARAMETERS, SIZES, modern, row
from .table_samples import RCCL_NODE, made_up_rows

LINES = modern().splitlines()
FIRST_ROW = next(index for index, line in enumerate(LINES) if line.split()[:1] == ["1024"])


def file_tables(text: str) -> FileTables:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "output"
        path.write_text(text)
        return read_tables(path)


def stopped_outputs(lines: Sequence[str]) -> list[StoppedOutput]:
    return stops_of(outputs_of(lines))


def beginning(num_lines: int) -> str:
    return "\n".join(LINES[:num_lines])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_complete_output_does_not_stop(family: str) -> None:
    assert stopped_outputs(FAMILIES[family][0]().splitlines()) == []


@given(st.integers(3, len(LINES)))
def test_every_beginning_of_an_output_says_how_many_sizes_it_has(num_lines: int) -> None:
    stops = stopped_outputs(beginning(num_lines).splitlines())
    num_rows = max(0, min(num_lines - FIRST_ROW, len(SIZES)))
    if num_rows == len(SIZES):
        assert stops == []
        return
    (stop,) = stops
    assert (stop.num_rows, stop.num_sizes) == (num_rows, len(SIZES))
    assert stop.last_size_bytes == (SIZES[num_rows - 1] if num_rows else None)
    has_header = num_lines > LINES.index(HEAD.splitlines()[2])
    assert (stop.header_line is not None) == has_header


def test_the_text_names_the_line_and_the_sizes() -> None:
    (stop,) = stopped_outputs(beginning(FIRST_ROW).splitlines())
    header = FIRST_ROW - 1
    assert stop.text == f"stops after its header (line {header}): none of 11 sizes is there"
    (stop,) = stopped_outputs(beginning(FIRST_ROW + 3).splitlines())
    last = f"the last row, line {FIRST_ROW + 3}, has 16 KiB"
    assert stop.text == f"stops after 3 of 11 sizes ({last})"
    (stop,) = stopped_outputs(beginning(5).splitlines())
    assert stop.text == "stops before its table (it begins in line 1)"
    assert stop.tool == "nccl-tests"


def test_a_torn_last_row_is_no_complete_one() -> None:
    text = beginning(FIRST_ROW + 3)
    (stop,) = stopped_outputs(text[:-20].splitlines())
    assert (stop.num_rows, stop.is_row_torn, stop.last_size_bytes) == (2, True, 4096)
    assert stop.text.endswith("has 4 KiB, and the next row is cut)")


def test_copied_rows_say_nothing_of_an_end() -> None:
    rows = [row(size, "sum", "-1") for size in SIZES[:4]]
    assert stopped_outputs([*HEAD.splitlines(), *rows]) == []
    without_first = [line for line in LINES[:-2] if line.split()[:1] != ["1024"]]
    assert stopped_outputs(without_first) == []  # the last size is there


def test_rows_of_another_layout_are_no_stop_and_are_not_passed_over() -> None:
    text = "\n".join([*HEAD.splitlines(), "  1024   256   20.5   0.05   0.09"])
    (stop,) = stopped_outputs(text.splitlines())
    assert stop.text == "cannot be read: no row fits its headings (line 3)"
    with pytest.raises(ConfigError, match="nccl-tests cannot be read: no row fits"):
        file_tables(text).check()


def test_a_run_that_hung_and_the_one_after_it_are_two() -> None:
    """The second has all rows, and its ranks are not those of both."""
    (stop,) = stopped_outputs([*LINES[:FIRST_ROW], *LINES])
    assert (stop.first_line, stop.num_rows) == (1, 0)
    tables = tables_of("\n".join([*LINES[:FIRST_ROW], *LINES]), "x")
    assert [(table.num_ranks, len(table.readings)) for table in tables] == [(8, 22)]
    assert not any("without MPI" in note for note in tables[0].notes)


def test_outputs_printed_at_once_by_processes_without_mpi_do_not_stop() -> None:
    """Both headers stand above the rows of both, as when one program runs without MPI."""
    body = [row(size, "sum", "-1") for size in SIZES for _ in range(2)]
    head = [PARAMETERS, "# Using devices", MODERN_RANK.format(rank=0), *HEAD.splitlines()]
    lines = [*head, *head, *body, "# Out of bounds values : 0 OK"]
    assert stopped_outputs(lines) == []
    (table,) = tables_of("\n".join(lines), "x")
    assert any("without MPI" in note for note in table.notes)


@pytest.mark.parametrize("num_processes", [2, 5])
def test_headers_between_rows_of_other_processes_are_no_stop(num_processes: int) -> None:
    rows = [row(size, "sum", "-1") for size in SIZES for _ in range(num_processes)]
    head = HEAD.splitlines()
    lines = [*[PARAMETERS, *head] * (num_processes - 1), PARAMETERS, rows[0], *head, *rows[1:]]
    lines += ["# Avg bus bandwidth    : 0"] * num_processes
    assert stopped_outputs(lines) == []
    (stop,) = stopped_outputs([PARAMETERS, *head, *lines])  # one process more, without rows
    assert (stop.first_line, stop.num_rows) == (1, 0)


@given(st.integers(3, len(LINES)))
def test_output_of_a_job_has_the_stops_of_the_whole_text(num_lines: int) -> None:
    """Lines of the job around it do not matter, nor which words they have."""
    first = next(place for place, line in enumerate(LINES) if "minBytes" in line)
    lines = [f"[1,0]<stdout>:{line}" for line in LINES[first : first + num_lines]]
    lines = ["step 3 loss 2.1", *lines, "Error handling is on, step 4"]
    reader = OutputReader()
    reader.enter_file("x", 0)
    for number, line in enumerate(lines, 1):
        reader.read(line.encode(), number)
    reader.leave_file()
    assert reader.stopped == [stop.finding("x") for stop in stopped_outputs(lines)]


def test_a_json_that_was_never_closed_stops() -> None:
    document = json.dumps(json_document(made_up_rows()[:6], comm_run(), ["all_reduce_perf"]))
    cut = document[: document.index('"in_place"')]
    stopped = file_tables(cut).stopped
    assert [stop.tool for stop in stopped] == ["nccl-tests"]
    before = document[: document.index('"results"')]
    assert [stop.num_rows for stop in file_tables(before).stopped] == [0]
    assert file_tables(document).stopped == []


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        (beginning(FIRST_ROW), "nccl-tests"),
        (RCCL_NODE, "rccl-tests"),
        ("# OSU MPI Allreduce Latency Test v7.3\n# Size       Avg Latency(us)\n", "OSU"),
        ("\tCOMMS-RES  total-size (B)  nElementsPerRank  BusBW(GB/s)\n", "PARAM"),
    ],
    ids=["nccl-tests", "rccl-tests", "OSU", "PARAM"],
)
def test_headings_without_rows_are_refused(tmp_path: Path, text: str, tool: str) -> None:
    path = tmp_path / "output.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"{tool} stops after its header \(line \d+\)"):
        read_tables(path).check()


@pytest.mark.parametrize(
    ("heading", "words"),
    [
        (RCCL_NODE.replace(",busbw", ""), r"its heading lacks busbw \(line 1\)"),
        (RCCL_NODE.replace("busbw", "").replace("time", ""), r"its heading lacks busbw, time"),
        (RCCL_NODE.replace(",#wrong", ""), r"no row fits its headings \(line 1\)"),
    ],
    ids=["lost", "blank", "short"],
)
def test_a_csv_whose_heading_lost_names_is_refused(
    tmp_path: Path, heading: str, words: str
) -> None:
    path = tmp_path / "rccl.csv"
    path.write_text(heading + "0,AllReduce,4,1024,float,sum,0,20.5,0.05,0.07,0\n")
    with pytest.raises(ConfigError, match=f"rccl-tests cannot be read: {words}"):
        read_tables(path).check()
