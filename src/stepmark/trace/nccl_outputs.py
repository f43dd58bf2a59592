"""Lines of nccl-tests' output, and what people paste of it, to outputs: facts and rows.

Several outputs may stand in one text, one after the other or, marked by a launcher, line by
line mixed. A row may be broken by log lines; its rest is a line of figures alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepmark.trace import nccl_facts
from stepmark.trace.launcher_prefix import split_prefix
from stepmark.trace.nccl_facts import Facts
from stepmark.trace.nccl_rows import Row, continuation, parse_row, promised

_INTERESTING = re.compile(
    r"#|nThread|_perf|nccom-test|[Rr]ank|Out of bounds|Avg bus|rccl-tests|(?i:size|bytes)"
)
# A row behind a prefix. Quick, since logs have many lines of other kinds.
_TYPED = re.compile(
    r"\d[\s|,]+(?:u?int(?:8|16|32|64)?|char|half|float|double|bfloat16|f8e\dm\d|fp8\w*)[\s|,]"
)
_LOG = " NCCL "
_FIRST = re.compile(r"[\s|>*-]*\d")
# Columns of a scrambled header stand in two lines; a row's rest comes soon after its start.
_DEFAULT_WIDTH, _REST_WITHIN = 9, 400


@dataclass(slots=True)
class Output:
    """One output, as far as it was read."""

    first_line: int
    tag: str
    facts: Facts = field(default_factory=Facts)
    rows: list[Row] = field(default_factory=list)
    command: str = ""
    command_line: int = 0
    num_openings: int = 0
    promised_width: int = 0  # cells of a row, as the header says


@dataclass(slots=True)
class _Reader:
    """Lines in, outputs out; one open output per launcher tag."""

    open: dict[str, Output] = field(default_factory=dict)
    done: list[Output] = field(default_factory=list)
    command: str = ""
    command_line: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # tag: line until its row may go on

    def output(self, tag: str, number: int) -> Output:
        return self.open.setdefault(tag, Output(number, tag))

    def fresh(self, tag: str, number: int) -> Output:
        """An output without rows: a header after rows begins another one."""
        found = self.output(tag, number)
        if not found.rows:
            return found
        self.close(tag)
        return self.output(tag, number)

    def close(self, tag: str) -> None:
        self.waiting.pop(tag, None)
        found = self.open.pop(tag, None)
        if found and found.rows:
            self.done.append(found)

    def read(self, line: str, number: int) -> None:
        if _FIRST.match(line) and (row := parse_row(line, number)):
            self._add(row, "")
        elif _TYPED.search(line):
            tag, rest = split_prefix(line)
            if row := parse_row(rest, number):
                self._add(row, tag)
        elif self.waiting and self._continued(line, number):
            return
        elif _LOG not in line and _INTERESTING.search(line):
            tag, rest = split_prefix(line)
            self._note(rest, tag, number)

    def _add(self, row: Row, tag: str) -> None:
        found = self.output(tag, row.line)
        if found.facts.ended:
            self.close(tag)
            found = self.output(tag, row.line)
        if not found.rows and not found.command and self.command:
            found.command, found.command_line = self.command, self.command_line
            self.command = "" if not found.facts.parameters else self.command
        found.rows.append(row)
        if len(row.cells) < self._width(found):
            self.waiting[tag] = row.line + _REST_WITHIN
        else:
            self.waiting.pop(tag, None)

    def _width(self, output: Output) -> int:
        """Cells of a complete row, as far as known while reading."""
        return output.promised_width or max(len(output.rows[0].cells), _DEFAULT_WIDTH)

    def _continued(self, prefixed: str, number: int) -> bool:
        """Whether the line is the rest of its tag's last row."""
        tag, line = split_prefix(prefixed)
        if number > self.waiting.get(tag, 0):
            self.waiting.pop(tag, None)
            return False
        output = self.open[tag]
        row, width = output.rows[-1], self._width(output)
        cells = continuation(line)
        if not cells or len(row.cells) + len(cells) > width:
            return False
        row.cells += cells
        row.last_line = number
        if len(row.cells) == width:
            self.waiting.pop(tag)
        return True

    def _note(self, line: str, tag: str, number: int) -> None:
        if rank := nccl_facts.rank_of(line):
            found = self.output(tag, number)
            known = {rank[0] for rank in found.facts.ranks}
            found = found if found.rows and rank[0] not in known else self.fresh(tag, number)
            found.facts.ranks.append(rank)
        elif nccl_facts.opens_output(line):
            found = self.fresh(tag, number)
            found.num_openings += "nThread" in line
            nccl_facts.note(found.facts, line)
        elif placements := nccl_facts.placements_of(line):
            self.fresh(tag, number).facts.placements = placements
        elif columns := nccl_facts.columns_of(line):
            found = self.fresh(tag, number)
            found.facts.columns, head = columns, promised(columns)
            found.promised_width = head.width if head else 0
        elif collective := nccl_facts.collective_in_command(line):
            self.command, self.command_line = collective, number
        elif tag in self.open:
            nccl_facts.note(self.open[tag].facts, line)


def outputs_of(lines: Sequence[str]) -> list[Output]:
    """All outputs that have rows, by their first row."""
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        reader.read(line, number)
    for tag in list(reader.open):
        reader.close(tag)
    return sorted(reader.done, key=lambda output: output.rows[0].line)
