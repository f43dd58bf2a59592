"""Two ledgers beside each other on a page: predicted and measured, or two runs."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from stepmark.core.ledger import Group, Ledger
from stepmark.report.figures import COLOURS, INK, Drawn, styled
from stepmark.report.ledger import NAMES, difference_lines, lines_of, words_of
from stepmark.report.page import figure_section, section


def html(
    first: Ledger,
    second: Ledger,
    names: tuple[str, str] = NAMES,
    *,
    step: str = "the step",
    text: Sequence[str] = (),
) -> str:
    """Return the sections: the waterfalls, and the lines under text such as the sentence."""
    lines = [*text, "", *difference_lines(first, second, names)]
    return figure_section(*waterfalls((first, second), names, step)) + section(
        f"Lines of {escape(step)}", f"<pre>{escape(chr(10).join(lines).strip())}</pre>"
    )


def waterfalls(ledgers: Sequence[Ledger], names: Sequence[str], step: str) -> Drawn:
    """Return the lines of each ledger, one after the other up to the step's time."""
    lines = [line for group in Group for line in lines_of(ledgers, group)]
    words = [escape(words_of(line)) for line in lines]
    figure = go.Figure()
    for own, name, colour in zip(ledgers, names, COLOURS, strict=False):
        marker = {"marker": {"color": colour}}
        figure.add_waterfall(
            orientation="h",
            y=[*words, "step"],
            x=[*(own.lines.get(line, 0) / 1e6 for line in lines), own.window_ns / 1e6],
            measure=[*["relative"] * len(lines), "total"],
            name=escape(name),
            increasing=marker,
            decreasing=marker,
            totals=marker,
            connector={"line": {"color": INK, "width": 0.5}},
            hovertemplate="%{y}: %{delta:.3f} ms<extra>" + escape(name) + "</extra>",
        )
    figure.update_xaxes(title="ms")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    note = (
        "Each line begins where the one above ends, so the lines add up to the step. Compute "
        "is alone where it does not say otherwise."
    )
    return (
        f"Ledger of the step: {' and '.join(names)}",
        note,
        styled(figure, height=150 + 32 * (len(lines) + 1)),
    )
