"""Figures are data: what is drawn of them is plotly's, and all words in it are escaped."""

import json
from collections.abc import Iterator
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from tests.collectives.comm_records import comm_device, comm_run, full_comm_run
from tests.training.train_records import full_train_run

from stepmark.collectives import comm_figures
from stepmark.collectives.comm_columns import rows as comm_rows
from stepmark.operators import op_figures
from stepmark.operators.op_columns import rows as operator_rows
from stepmark.tables.figures import (
    COLOURS,
    INK,
    Axis,
    Cells,
    Figure,
    Kind,
    Mark,
    Panel,
    Series,
    draw,
)
from stepmark.tables.page import Page, Section, paragraph, plotly_js
from stepmark.training import training_figures

from .records import EVIL, full_run, made_up_device, run_info


def curve(name: str, **more: object) -> Series:
    made = Series(kind=Kind.CURVE, name=name, x=[1, 1000], y=[0.5, float("nan")])
    return replace(made, **more)  # type: ignore[arg-type]


def figure(*series: Series) -> Figure:
    return Figure(
        title=EVIL, note=EVIL, x=Axis(title=EVIL), y=Axis(), series=series, height=300
    )


def everything() -> Iterator[Figure]:
    """Figures with every kind of series, axis and mark."""
    yield from training_figures.figures(full_train_run())
    run, device = comm_run(), comm_device()
    yield from comm_figures.figures(comm_rows(full_comm_run(), run, device), run, device)
    run, device = run_info(), made_up_device()
    yield from op_figures.figures(operator_rows(full_run(), run, device=device), run, device)
    speeds = curve(EVIL, y=[0.5, 2.0], intervals=[(0.25, 1), (0, 9)])
    one = figure(speeds, curve("limit", kind=Kind.LINE))
    yield replace(one, right=Panel(x=Axis(base=2), y=Axis(), series=[curve(EVIL)]))
    bars = Series(kind=Kind.BARS, name=EVIL, x=[1.0], y=[EVIL], labels=[EVIL], pattern="/")
    spans = replace(bars, starts=[1.0], colour=[INK], hover=[EVIL])
    for each in (bars, spans):
        yield replace(figure(each), y=Axis(categories=[EVIL], ticks={0: EVIL}))
    cells = Cells(
        x=[0],
        y=[0],
        values=[1.0],
        limits=(0, 1),
        unit="us",
        more_is_better=False,
        labels=[EVIL],
    )
    marks = [Mark(x=(0, 1), y=(0, 1)), Mark(y=(1, 1), name=EVIL), Mark(x=(0, 1))]
    yield replace(figure(), cells=cells, marks=marks)


def test_what_is_drawn_is_valid_and_has_no_markup_of_names() -> None:
    """plotly's Python package, which pages do not need, knows every attribute of plotly.js."""
    kinds = set()
    for each in everything():
        drawn = draw(each)
        go.Figure(drawn)  # raises for an unknown attribute or value
        text = json.dumps(drawn, allow_nan=False)
        assert "<script" not in text
        kinds |= {series.kind for series in each.series}
    assert kinds == set(Kind)


def test_series_of_one_name_have_one_style_and_one_entry() -> None:
    left = (curve("limit", colour=INK), curve("a"), curve("b"))
    both = replace(figure(*left), right=Panel(x=Axis(), y=Axis(), series=[curve("b")]))
    limit, a, b, other = draw(both)["data"]
    assert limit["line"]["color"] == INK
    assert [trace["line"]["color"] for trace in (a, b, other)] == [*COLOURS[:2], COLOURS[1]]
    assert b["marker"] == other["marker"]
    assert [trace["showlegend"] for trace in (a, b, other)] == [True, True, False]
    assert (b["xaxis"], other["xaxis"]) == ("x", "x2")
    assert a["y"] == [0.5, None]  # what is not finite is a gap


@pytest.mark.parametrize(
    ("base", "values", "ticks"),
    [
        (10, [30, 0, 400], ["10", "20", "50", "100", "200", "500", "1000", "2000", "5000"]),
        (10, [1e-3, 1e3], ["0.001", "0.01", "0.1", "1", "10", "100", "1000"]),
        (2, [4, 3000], ["4", "16", "64", "256", "1024", "4096"]),
        (2, [], None),
    ],
)
def test_ticks_of_a_logarithmic_axis(
    base: int, values: list[float], ticks: list[str] | None
) -> None:
    shown = figure(Series(kind=Kind.POINTS, name="", x=values, y=values))
    axis = draw(replace(shown, x=Axis(base=base)))["layout"]["xaxis"]
    assert axis["type"] == "log"
    assert axis.get("ticktext") == ticks


def test_a_page_lists_its_sections_and_leaves_out_empty_ones() -> None:
    part = Section(EVIL, (), [Section("Empty"), Section("Full", [paragraph(EVIL)]), figure()])
    page = Page(title=EVIL, lead=EVIL, command=EVIL, sections=[part, Section("Empty", (), [])])
    html = page.html().replace(plotly_js(), "")
    assert EVIL not in html
    links = [f'<li{kind}><a href="#script-alert-1-script' for kind in (' class="part"', "")]
    assert [html.count(link) for link in links] == [1, 1]
    assert "Empty" not in html
    assert html.count('<a href="#') == 3
    assert html.index("<nav>") < html.index('<section id="full"')
