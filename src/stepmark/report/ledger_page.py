"""Two ledgers beside each other on a page: predicted and measured, or two runs."""

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go

from stepmark.core.errors import ConfigError
from stepmark.core.kernel_groups import COMMUNICATION
from stepmark.core.ledger import WAITING, Group, Ledger, Line
from stepmark.core.prediction import LEFT_OUT
from stepmark.report.figures import COLOURS, INK, Drawn, styled
from stepmark.report.ledger import (
    NAMES,
    difference_lines,
    lines_of,
    power_lines,
    source_line,
    words_of,
)
from stepmark.report.page import figure_section, section
from stepmark.report.predicted_steps import StepReport
from stepmark.report.trace_page import COLOURS_OF


def html(
    first: Ledger,
    second: Ledger,
    names: tuple[str, str] = NAMES,
    *,
    step: str = "the step",
    text: Sequence[str] = (),
    more: Sequence[str] = (),
) -> str:
    """Return the sections: the waterfalls, and the lines. more: tables after them."""
    lines = [*difference_lines(first, second, names), *more]
    return figure_section(*waterfalls((first, second), names, step)) + section(
        f"Lines of {escape(step)}", _paragraphs(text) + _table(lines)
    )


def sections(report: StepReport | ConfigError) -> str:
    """Return what a run says of its predicted steps, or why the prediction is refused."""
    title = "Predicted and measured"
    if isinstance(report, ConfigError):
        return section(title, f'<p class="warning">{escape(str(report))}</p>')
    sentences = _paragraphs(step.sentence for step in report.steps)
    notes = [*(f"note: {note}" for note in report.notes), report.commitment]
    parts = [section(title, sentences + _paragraphs(notes, "quiet"))]
    for step in report.steps:
        text = [source_line(step.measured), *step.replayed]
        measured = step.measured.ledger
        if step.predicted is None:
            parts.append(figure_section(*waterfalls([measured], NAMES[1:], step.name)))
            parts.append(section(f"Source of {escape(step.name)}", _paragraphs(text)))
            continue
        more = ["", *power_lines(*step.power)]
        parts.append(html(step.predicted, measured, step=step.name, text=text, more=more))
    return "\n".join(parts)


def _paragraphs(texts: Iterable[str], kind: str = "") -> str:
    return "".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts)


def _table(lines: Sequence[str]) -> str:
    return f'<pre class="table">{escape(chr(10).join(lines).strip())}</pre>'


def waterfalls(
    ledgers: Sequence[Ledger], names: Sequence[str], step: str = "the step"
) -> Drawn:
    """Return the lines of each ledger, one after the other up to the step's time."""
    lines = [line for group in Group for line in lines_of(ledgers, group)]
    words = [escape(words_of(line)).replace(" under ", "<br>under ") for line in lines]
    figure = go.Figure()
    for own, name, colour in zip(ledgers, names, COLOURS, strict=False):
        marker = {"marker": {"color": colour}}
        figure.add_waterfall(
            orientation="h",
            y=[*words, "step"],
            x=[*(own.lines.get(line, 0) / 1e6 for line in lines), own.window_ns / 1e6],
            measure=[*["relative"] * len(lines), "total"],
            text=[_label(own.lines.get(line, 0)) for line in lines] + [_label(own.window_ns)],
            textposition="outside",
            textfont={"size": 11},
            cliponaxis=False,
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
        "Each line begins where the one above ends, so the lines add up to the step. "
        "Compute that overlaps communication has lines of its own."
    )
    return (
        f"Ledger of {step}, {' and '.join(names)}",
        note,
        styled(figure, height=150 + 32 * (len(lines) + 1)).update_layout(margin_r=48),
    )


def _label(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.1f}" if time_ns else ""


def stages(ledgers: Sequence[Ledger]) -> Drawn:
    """Return a bar per pipeline stage, of its lines; waiting is apart from transfers."""
    figure = go.Figure()
    names = [f"stage {stage}" for stage in range(len(ledgers))]
    for line in (line for group in Group for line in _lines_of(ledgers, group)):
        words = escape(WAITING if line[1] == WAITING else words_of(line))
        figure.add_bar(
            orientation="h",
            y=names,
            x=[_ns(own, line) / 1e6 for own in ledgers],
            name=words,
            showlegend=line[0] is not Group.OVERLAPPED,
            marker={
                "color": COLOURS_OF.get(line[1], COLOURS_OF[LEFT_OUT]),
                "pattern": {"shape": "/" if line[0] is Group.OVERLAPPED else ""},
            },
            hovertemplate="%{y}: %{x:.3f} ms " + words + "<extra></extra>",
        )
    figure.update_xaxes(title="ms")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_layout(barmode="stack")
    note = (
        "Lines add up to the step, which is as long in each stage. Hatched: compute under "
        "communication."
    )
    return "Ledger of the step by stage", note, styled(figure, height=260 + 30 * len(ledgers))


def _lines_of(ledgers: Sequence[Ledger], group: Group) -> Sequence[Line]:
    """Return the lines of a group; of communication, transfer and waiting."""
    if group is Group.COMM:
        return [(group, COMMUNICATION), (group, WAITING)]
    return lines_of(ledgers, group)


def _ns(own: Ledger, line: Line) -> int:
    waiting_ns = own.within.get(WAITING, 0)
    parts = {COMMUNICATION: own.total(Group.COMM) - waiting_ns, WAITING: waiting_ns}
    return parts[line[1]] if line[0] is Group.COMM else own.lines.get(line, 0)
