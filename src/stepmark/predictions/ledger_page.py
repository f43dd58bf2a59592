"""Two ledgers beside each other on a page: predicted and measured, or two runs."""

import re
from collections.abc import Iterator, Sequence

from stepmark.ground.errors import ConfigError
from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.predictions.predicted_steps import StepReport
from stepmark.tables.columns import digits
from stepmark.tables.figures import Axis, Figure, Kind, Series
from stepmark.tables.page import Html, Section, heading, items, paragraph, preformatted
from stepmark.timeline import ledger_svg
from stepmark.timeline.ledger import WAITING, Group, Ledger, Line
from stepmark.timeline.ledger_text import (
    NAMES,
    UNEXPLAINED,
    difference_lines,
    lines_of,
    power_lines,
    source_line,
    words_of,
)
from stepmark.timeline.timeline import LEFT_OUT
from stepmark.traces.trace_page import COLOURS_OF

_PATTERNS = {Group.OVERLAPPED: "/"}


def sections(
    first: Ledger,
    second: Ledger,
    names: tuple[str, str] = NAMES,
    *,
    step: str = "the step",
    text: Sequence[str] = (),
) -> list[Section]:
    """Return the sections: the picture, and the lines."""
    lines = preformatted(*difference_lines(first, second, names), is_table=True)
    return [
        picture((first, second), names, step),
        Section(f"Lines of {step}", [*map(paragraph, text), lines]),
    ]


def picture(ledgers: Sequence[Ledger], names: Sequence[str], step: str) -> Section:
    """Return the section with the picture of one ledger, or of two."""
    note = "Each line begins where the one above ends, so the lines add up to the step."
    title = f"Ledger of {step}, {' and '.join(names)}"
    return Section(title, [paragraph(note, "quiet"), ledger_svg.html(ledgers, names, title)])


def headline(report: StepReport | ConfigError) -> str:
    """Return the answer about the first step in a few words, "" without one."""
    if isinstance(report, ConfigError) or not report.steps:
        return ""
    return clauses(report.steps[0].sentence)[0]


def answer(report: StepReport | ConfigError) -> Iterator[Html]:
    """Yield what a reader sees first: of each step the ledger, and what is worth doing."""
    if isinstance(report, ConfigError):
        yield paragraph(str(report), "warning")
        return
    for index, step in enumerate(report.steps):
        first, rest = clauses(step.sentence)
        if index:
            yield heading(first, 2)
        yield paragraph(rest)
        ledgers = [step.measured.ledger]
        ledgers[:0] = [step.predicted] if step.predicted is not None else []
        names = NAMES[-len(ledgers) :]
        yield ledger_svg.html(ledgers, names, f"Ledger of {step.name}")
        if step.suggestions:
            yield heading("Worth doing")
            gains_ns = [each.gain_ns for each in step.suggestions if each.gain_ns]
            if len(gains_ns) > 1:
                yield paragraph(_together(sum(gains_ns), step.measured.ledger), "quiet")
            texts = [f"{each.text}:" for each in step.suggestions]
            yield items(texts, [each.command for each in step.suggestions])


def _together(gain_ns: int, measured: Ledger) -> str:
    gain, step = (digits(time_ns / 1e6, 3) for time_ns in (gain_ns, measured.window_ns))
    return f"Together at most {gain} of the {step} ms."


def clauses(sentence: str) -> tuple[str, str]:
    """Return the first clause of a sentence, and the others."""
    first, *others = re.split(r"; (?![^(]*\))", sentence, maxsplit=1)
    rest = "".join(others)
    return first, rest[:1].upper() + rest[1:]


def evidence(report: StepReport | ConfigError) -> Iterator[Section]:
    """Yield the sections with every line of the ledgers and where they are from."""
    if isinstance(report, ConfigError):
        return
    for step in report.steps:
        text = map(paragraph, [source_line(step.measured), *step.replayed])
        lines = []
        if step.predicted is not None:
            lines = [*difference_lines(step.predicted, step.measured.ledger), ""]
            lines += power_lines(*step.power)
        table = [preformatted(*lines, is_table=True)] if lines else []
        yield Section(f"Lines of {step.name}", [*table, *text])
    notes = [*(f"note: {note}" for note in report.notes), report.commitment]
    yield Section("Prediction", [paragraph(note, "quiet") for note in notes])


def stages(ledgers: Sequence[Ledger]) -> Figure:
    """Return a bar per pipeline stage, of its lines."""
    names = [f"stage {stage}" for stage in range(len(ledgers))]
    note = "Lines add up to the step, which is as long in each stage."
    return stacked("Ledger of the step by stage", note, ledgers, names)


def stacked(title: str, note: str, ledgers: Sequence[Ledger], names: Sequence[str]) -> Figure:
    """Return a bar per ledger, of its lines; waiting is apart from transfers."""
    has_unexplained = any(UNEXPLAINED in own.lines for own in ledgers)
    crossed = "; crossed: unexplained time" if has_unexplained else ""
    return Figure(
        title=title,
        note=f"{note} Hatched: compute under communication{crossed}.",
        x=Axis(title="ms"),
        y=Axis(categories=names),
        series=[
            Series(
                kind=Kind.BARS,
                name=WAITING if line[1] == WAITING else words_of(line),
                x=[_ns(own, line) / 1e6 for own in ledgers],
                y=names,
                colour=COLOURS_OF.get(line[1], COLOURS_OF[LEFT_OUT]),
                pattern="x" if line == UNEXPLAINED else _PATTERNS.get(group, ""),
                is_in_legend=group is not Group.OVERLAPPED,
            )
            for group in Group
            for line in _lines_of(ledgers, group)
        ],
        height=260 + 30 * len(ledgers),
    )


def _lines_of(ledgers: Sequence[Ledger], group: Group) -> Sequence[Line]:
    """Return the lines of a group; of communication, transfer and waiting."""
    if group is Group.COMM:
        return [(group, COMMUNICATION), (group, WAITING)]
    return lines_of(ledgers, group)


def _ns(own: Ledger, line: Line) -> int:
    waiting_ns = own.within.get(WAITING, 0)
    parts = {COMMUNICATION: own.total(Group.COMM) - waiting_ns, WAITING: waiting_ns}
    return parts[line[1]] if line[0] is Group.COMM else own.lines.get(line, 0)
