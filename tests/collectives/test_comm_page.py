"""Figures, tables and lines about collectives say what the rows say."""

import io
import re
from importlib.resources import files as resources

import pytest
from plotly.offline import get_plotlyjs_version
from rich.console import Console
from tests.tables.records import check_page_of, full_run

from stepmark.collectives.comm_columns import COMM_COLUMNS, rows
from stepmark.collectives.comm_figures import contention, figures, heat_map, over_size
from stepmark.collectives.comm_remarks import comm_lines, matrices
from stepmark.model.collectives import Collective
from stepmark.operators.op_columns import rows as operator_rows
from stepmark.runs import run_page
from stepmark.tables.columns import Row, number
from stepmark.tables.figures import Kind
from stepmark.tables.page import plotly_js
from stepmark.tables.row_tables import print_rows

from .comm_records import LINK, SIZES, comm_case, comm_device, comm_run, flat, full_comm_run


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows(full_comm_run(), comm_run(), comm_device())


def test_every_right_measurement_is_a_point(table: list[Row]) -> None:
    held = [row for row in table if row["collective"] == "all_reduce" and row["time_s"]]
    figure = over_size(held, comm_run(), comm_device())
    assert figure.right
    *curves, link = figure.series
    times = figure.right.series
    assert {each.kind for each in (*curves, *times)} == {Kind.CURVE}
    for panel in (curves, times):
        assert sum(len(series.x) for series in panel) == len(held)
    assert (link.kind, link.y) == (Kind.LINE, [LINK / 1e9, LINK / 1e9])
    names = {series.name for series in curves}
    assert [series.name for series in times] == [series.name for series in curves]
    assert {"out-of-place queued-ahead", "in-place graph"} <= names
    assert "out-of-place queued-ahead beside gemm:8192" in names


def test_figures_of_what_was_measured(table: list[Row]) -> None:
    titles = [figure.title for figure in figures(table, comm_run(), comm_device())]
    assert titles[:3] == ["all_reduce bf16", "all_to_all bf16", "all_gather fp32"]
    assert "Beside compute" in titles
    assert sum(title.startswith("Pairs: ") for title in titles) == 2
    one = rows([flat(comm_case(), 1e-3)], comm_run())
    assert list(figures(one, comm_run(), None)) == []


def test_contention_shows_both_sides(table: list[Row]) -> None:
    figure = contention([row for row in table if row["time_s"]], comm_run())
    collective, compute = figure.series
    assert (collective.name, compute.name) == ("all_reduce", "gemm:8192")
    assert len(collective.x) == len(SIZES[5:])
    assert all(float(str(y)) > 1 for y in (*collective.y, *compute.y))


def test_noise_of_a_matrix_does_not_fill_its_colours(table: list[Row]) -> None:
    bandwidth, latency = (heat_map(matrix) for matrix in matrices(table))
    assert latency.cells
    assert latency.cells.limits[1] - latency.cells.limits[0] > 0.5 * 9
    assert bandwidth.cells
    assert bandwidth.cells.limits[0] == pytest.approx(127, rel=0.03)  # the slow link, all dark
    assert (len(bandwidth.marks), len(latency.marks)) == (1, 0)


def page(with_operators: bool) -> str:
    records, run, device = full_comm_run(), comm_run(), comm_device()
    held = full_run() if with_operators else []
    return (
        run_page.page(
            run,
            [*held, *records],
            operator_rows(held, run, device=device),
            device,
            rows(records, run, device),
        )
        .html()
        .replace(plotly_js(), "")
        .replace('href="#', "")
    )


def test_page_of_collectives_alone(table: list[Row]) -> None:
    own = page(with_operators=False)
    check_page_of(own, "Collectives", table)
    assert "needs 192 GiB" in own
    assert "timeout: no end after 60 s" in own


def test_page_of_both_has_two_tables_and_loads_nothing() -> None:
    own = page(with_operators=True)
    assert own.count('<div class="box rows">') == 2
    assert own.count('class="filter"') == 2
    ids = re.findall(r'\bid="([^"]+)"', own)
    assert len(ids) == len(set(ids))
    assert not re.findall(r"(src|href|action)\s*=|url\(|@import|https?://|fetch\(", own)


def test_wide_table_has_columns_only_where_there_is_something_to_say(table: list[Row]) -> None:
    def printed(held: list[Row]) -> str:
        console = Console(width=40, force_terminal=False, file=io.StringIO())
        print_rows(held, console, COMM_COLUMNS)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    everything, plain = printed(table), printed(rows([flat(comm_case(), 1e-3)], comm_run()))
    for heading in ("p99", "spread %", "% link", "x alone", "waited for", "start skew", "pair"):
        assert heading in everything
    for heading in ("spread %", "% link", "x alone", "pair", "beside"):
        assert heading not in plain.splitlines()[0]
    assert "117.4" in plain  # GB/s of 64 MiB in a millisecond, times 14/8
    assert "skipped  all_reduce 64 GiB x8 bf16 nccl: needs 192 GiB" in everything


def test_summary_names_best_straggler_slow_pair_and_wrong(table: list[Row]) -> None:
    lines = comm_lines(table)
    text = "\n".join(lines)
    best = max(
        number(row, "busbw_gb_s") or 0.0 for row in table if row["collective"] == "all_to_all"
    )
    assert re.search(rf"busbw      all_to_all bf16 x8 {best:.4g} GB/s at 4 GiB, \d+ % of", text)
    assert "straggler  all_reduce bf16 x8: slowest rank: 5, which delays the others" in text
    assert "slow: 3 -> 5" in text
    assert "wrong      gather 1 MiB x8" in text
    assert "time       barrier" in text
    assert comm_lines([]) == []
    assert not [line for line in lines if "impossible" in line]


def test_impossible_rates_are_said() -> None:
    case = comm_case(Collective.ALL_TO_ALL)
    (row,) = rows([flat(case, case.message_bytes / (2 * LINK))], comm_run(), comm_device())
    assert row["over_limit"] is True
    assert "impossible all_to_all 64 MiB x8" in "\n".join(comm_lines([row]))


def test_the_kept_plotly_is_of_the_release_that_makes_the_figures() -> None:
    """Figures are made by the Python package and drawn by the file: formats must agree."""
    file = resources("stepmark").joinpath("data", "plotly-basic.min.js")
    kept = file.read_text("utf-8")[:200]
    assert f"(basic - minified) v{get_plotlyjs_version().split('.')[0]}." in kept
