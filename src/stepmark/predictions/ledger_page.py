"""Two ledgers beside each other on a page: predicted and measured, or two runs."""

import re
from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go

from stepmark.ground.errors import ConfigError
from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.predictions.predicted_steps import StepReport
from stepmark.tables.figures import Drawn, styled
from stepmark.tables.page import section
from stepmark.timeline import ledger_svg
from stepmark.timeline.ledger import WAITING, Group, Ledger, Line
from stepmark.timeline.ledger_text import (
    NAMES,
    difference_lines,
    lines_of,
    power_lines,
    source_line,
    words_of,
)
from stepmark.timeline.prediction import LEFT_OUT
from stepmark.traces.trace_page import COLOURS_OF


def html(
    first: Ledger,
    second: Ledger,
    names: tuple[str, str] = NAMES,
    *,
    step: str = "the step",
    text: Sequence[str] = (),
) -> str:
    """Return the sections: the picture, and the lines."""
    lines = [*difference_lines(first, second, names)]
    return picture((first, second), names, step) + section(
        f"Lines of {escape(step)}", _paragraphs(text) + _table(lines)
    )


def picture(ledgers: Sequence[Ledger], names: Sequence[str], step: str) -> str:
    """Return the section with the picture of one ledger, or of two."""
    note = "Each line begins where the one above ends, so the lines add up to the step."
    title = f"Ledger of {step}, {' and '.join(names)}"
    drawn = ledger_svg.html(ledgers, names, title)
    return section(escape(title), _paragraphs([note], "quiet") + drawn)


def headline(report: StepReport | ConfigError) -> str:
    """Return the answer about the first step in a few words, "" without one."""
    if isinstance(report, ConfigError) or not report.steps:
        return ""
    return clauses(report.steps[0].sentence)[0]


def answer(report: StepReport | ConfigError) -> str:
    """Return what a reader sees first: of each step the ledger, and what is worth doing."""
    if isinstance(report, ConfigError):
        return f'<p class="warning">{escape(str(report))}</p>'
    parts = []
    for index, step in enumerate(report.steps):
        first, rest = clauses(step.sentence)
        parts += [f"<h2>{escape(first)}</h2>"] if index else []
        parts.append(_paragraphs([rest]))
        ledgers = [step.measured.ledger]
        ledgers[:0] = [step.predicted] if step.predicted is not None else []
        parts.append(ledger_svg.html(ledgers, NAMES[-len(ledgers) :], f"Ledger of {step.name}"))
        items = "".join(
            f"<li>{escape(each.text)}:<pre>{escape(each.command)}</pre></li>"
            for each in step.suggestions
        )
        parts.append(f"<h3>Worth doing</h3><ol>{items}</ol>" if items else "")
    return "\n".join(parts)


def clauses(sentence: str) -> tuple[str, str]:
    """Return the first clause of a sentence, and the others."""
    first, *others = re.split(r"; (?![^(]*\))", sentence, maxsplit=1)
    rest = "".join(others)
    return first, rest[:1].upper() + rest[1:]


def evidence(report: StepReport | ConfigError) -> str:
    """Return the sections with every line of the ledgers and where they are from."""
    if isinstance(report, ConfigError):
        return ""
    parts = []
    for step in report.steps:
        text = [source_line(step.measured), *step.replayed]
        lines = []
        if step.predicted is not None:
            lines = [*difference_lines(step.predicted, step.measured.ledger), ""]
            lines += power_lines(*step.power)
        table = _table(lines) if lines else ""
        parts.append(section(f"Lines of {escape(step.name)}", table + _paragraphs(text)))
    notes = [*(f"note: {note}" for note in report.notes), report.commitment]
    parts.append(section("Prediction", _paragraphs(notes, "quiet")))
    return "\n".join(parts)


def _paragraphs(texts: Iterable[str], kind: str = "") -> str:
    return "".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts)


def _table(lines: Sequence[str]) -> str:
    return f'<pre class="table">{escape(chr(10).join(lines).strip())}</pre>'


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
