"""Histograms of messages as plotly figures and a page."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.graph_objects import Figure

from stepmark.findings.finding import Finding
from stepmark.findings.histogram import MESSAGE, lines
from stepmark.ground.units import format_bytes
from stepmark.tables.columns import Row, number, text
from stepmark.tables.figures import COLOURS, Drawn, styled
from stepmark.tables.page import document, figure_section


def drawn(rows: Sequence[Row]) -> list[Drawn]:
    """Return calls and bytes by size, and the expected time where it is known."""
    if not rows:
        return []
    figures = [
        ("Calls by message size", _note(rows), bars(rows, "calls_per_rank", "calls per rank")),
        ("Bytes by message size", _note(rows), bars(rows, "bytes_per_rank", "bytes per rank")),
    ]
    if any(number(row, "expected_per_rank_s") for row in rows):
        note = "Calls times the time of one by the measured curve; overlap is not subtracted."
        figure = bars(rows, "expected_per_rank_s", "expected seconds per rank")
        figures.append(("Expected time by message size", note, figure))
    return figures


def bars(rows: Sequence[Row], key: str, title: str) -> Figure:
    """Draw one bar per bin, stacked by collective, dtype, group and phase."""
    order = sorted({(number(row, "from_bytes") or 0.0, _bin(row)) for row in rows})
    names = list(dict.fromkeys(name for _, name in order))
    figure = go.Figure()
    series = dict.fromkeys(_series(row) for row in rows)
    for index, name in enumerate(series):
        group = [row for row in rows if _series(row) == name]
        figure.add_bar(
            x=[_bin(row) for row in group],
            y=[number(row, key) for row in group],
            name=escape(name),
            marker_color=COLOURS[index % len(COLOURS)],
            # Above seven colours a pattern tells equal ones apart.
            marker_pattern_shape=("", "/", "x", ".")[index // len(COLOURS) % 4],
            hovertext=[_hover(row, name) for row in group],
            hoverinfo="text",
        )
    figure.update_xaxes(
        title="message size", type="category", categoryorder="array", categoryarray=names
    )
    figure.update_yaxes(title=title, rangemode="tozero")
    figure.update_layout(barmode="stack")
    return styled(figure, height=360 + 20 * (len(series) // 5))


def page(title: str, sections: Sequence[tuple[str, Sequence[Row], Sequence[Finding]]]) -> str:
    """Return one self-contained document: per source a heading, findings, figures, rows."""
    return document(title, "", "\n".join(_source(*source) for source in sections))


def _source(name: str, rows: Sequence[Row], findings: Sequence[Finding]) -> str:
    parts = [f"<h2>{escape(name)}</h2>"]
    parts += [
        f'<p class="{"quiet" if finding.severity == "note" else "warning"}">'
        f"{escape(f'{finding.severity}: {finding.text}')}</p>"
        for finding in findings
    ]
    parts += [figure_section(*figure) for figure in drawn(rows)]
    if rows:
        parts.append(f"<h2>Rows</h2><pre>{escape(chr(10).join(lines(rows)))}</pre>")
    return f"<section>{''.join(parts)}</section>"


def _note(rows: Sequence[Row]) -> str:
    if all(row["size_is"] == MESSAGE for row in rows):
        return "Sizes as nccl-tests counts them: the largest buffer of any rank."
    return "The number of ranks is not known for all: those sizes are of one rank's part."


def _bin(row: Row) -> str:
    """Name a bin; an exact size has its bytes too, because two sizes may round to one."""
    low, high = number(row, "from_bytes"), number(row, "below_bytes")
    if low is None or high != low + 1:
        return text(row, "bin")
    return f"{format_bytes(low)}<br>{low:.0f} B" if low >= 1024 else format_bytes(low)


def _series(row: Row) -> str:
    words = (text(row, key) for key in ("collective", "dtype", "group", "phase"))
    return " ".join(word for word in words if word) or "all"


def _hover(row: Row, name: str) -> str:
    texts = [
        name,
        f"{text(row, 'bin')} ({text(row, 'size_is')})",
        f"{number(row, 'calls_per_rank') or 0:.6g} calls per rank, {row['calls']} in all",
        f"{format_bytes(number(row, 'bytes_per_rank') or 0)} per rank",
    ]
    return "<br>".join(escape(line) for line in texts)
