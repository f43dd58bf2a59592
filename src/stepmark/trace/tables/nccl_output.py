"""Split lines of nccl-tests' output, also pasted ones, into outputs: facts and rows.

Several outputs may stand in one text, one after the other or, marked by a launcher, line by
line mixed. A row may be broken by log lines; its rest is a line of figures alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepmark.trace.tables import nccl_lines
from stepmark.trace.tables.nccl_lines import OutputFacts
from stepmark.trace.tables.nccl_rows import Row, header_layout, parse_continuation, parse_row

_MENTIONS_OUTPUT = re.compile(
    r"#|nThread|_perf|[Rr]ank|Out of bounds|Avg bus|rccl-tests|(?i:size|bytes)"
)
# A row behind a prefix. Quick, since logs have many lines of other kinds.
_TYPED_ROW = re.compile(
    r"\d[\s|,]+(?:u?int(?:8|16|32|64)?|char|half|float|double|bfloat16|f8e\dm\d|fp8\w*)[\s|,]"
)
_ROW_START = re.compile(r"[\s|>*-]*\d")
_DEFAULT_WIDTH = 9  # cells of a row where the header does not state it
_MAX_LINES_WITHIN_ROW = 400

# Launchers' prefixes. A tag names the task; a time stamp differs from line to line.
_TAG = re.compile(
    r"""\s*(?:
        \[(?:default|rank)?\d{1,6}(?:,\s?\d{1,6})?\](?:<std(?:out|err)>)?:?  # torchrun, mpirun
      | \d{1,6}:(?=\s)                                                  # srun --label
      | \([A-Za-z_][^()\n]{0,80}\bpid=\d{1,9}[^()\n]{0,60}\)             # Ray
      | [A-Za-z][\w.-]{0,63}:(?=\s+(?:\#|\d{1,19}\s+\d{1,19}\s+[a-z]))    # pdsh, clush
    )[ ]?""",
    re.VERBOSE,
)
_TIME_STAMP = re.compile(
    r"\s*\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?[ ]?"
)
_MAX_PREFIXES = 3


@dataclass(slots=True)
class Output:
    """One output, as far as it was read."""

    first_line: int
    tag: str  # of the launcher
    facts: OutputFacts = field(default_factory=OutputFacts)
    rows: list[Row] = field(default_factory=list)
    collective: str = ""  # of the command above
    command_line: int = 0
    num_parameter_lines: int = 0
    stated_width: int = 0  # cells of a row, as the header says

    @property
    def width(self) -> int:
        """Cells of a complete row, as far as known while reading."""
        return self.stated_width or max(len(self.rows[0].cells), _DEFAULT_WIDTH)


def outputs_of(lines: Sequence[str]) -> list[Output]:
    """Return all outputs that have rows, in the order of their first rows."""
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        reader.read(line, number)
    for tag in list(reader.open):
        reader.close(tag)
    return sorted(reader.closed, key=lambda output: output.rows[0].line)


def split_prefix(line: str) -> tuple[str, str]:
    """Return (tag, rest); the tag is "" for a line without a launcher's mark."""
    tags, rest = [], line
    for _ in range(_MAX_PREFIXES):
        if stamp := _TIME_STAMP.match(rest):
            rest = rest[stamp.end() :]
        elif tag := _TAG.match(rest):
            tags.append(re.sub(r"<.*>:?|:", "", tag[0]).strip())
            rest = rest[tag.end() :]
        else:
            break
    return " ".join(tags), rest


@dataclass(slots=True)
class _Reader:
    """Lines in, outputs out; one open output per launcher tag."""

    open: dict[str, Output] = field(default_factory=dict)
    closed: list[Output] = field(default_factory=list)
    collective: str = ""  # of a command whose output did not begin yet
    command_line: int = 0
    incomplete: dict[str, int] = field(default_factory=dict)  # tag: last line of its row

    def output(self, tag: str, number: int) -> Output:
        return self.open.setdefault(tag, Output(number, tag))

    def output_without_rows(self, tag: str, number: int) -> Output:
        """Begin another output if the current one has rows."""
        if self.output(tag, number).rows:
            self.close(tag)
        return self.output(tag, number)

    def close(self, tag: str) -> None:
        self.incomplete.pop(tag, None)
        output = self.open.pop(tag, None)
        if output and output.rows:
            self.closed.append(output)

    def read(self, line: str, number: int) -> None:
        if _ROW_START.match(line) and (row := parse_row(line, number)):
            self._add(row, "")
        elif _TYPED_ROW.search(line):
            tag, rest = split_prefix(line)
            if row := parse_row(rest, number):
                self._add(row, tag)
        elif self.incomplete and self._continue_row(line, number):
            return
        elif " NCCL " not in line and _MENTIONS_OUTPUT.search(line):
            tag, rest = split_prefix(line)
            self._add_facts(rest, tag, number)

    def _add(self, row: Row, tag: str) -> None:
        if self.output(tag, row.line).facts.is_complete:
            self.close(tag)
        output = self.output(tag, row.line)
        if not output.rows and not output.collective and self.collective:
            output.collective, output.command_line = self.collective, self.command_line
            self.collective = self.collective if output.facts.parameters else ""
        output.rows.append(row)
        if len(row.cells) < output.width:
            self.incomplete[tag] = row.line + _MAX_LINES_WITHIN_ROW
        else:
            self.incomplete.pop(tag, None)

    def _continue_row(self, prefixed: str, number: int) -> bool:
        """Return whether the line is the rest of its tag's last row, and add it if so."""
        tag, line = split_prefix(prefixed)
        if number > self.incomplete.get(tag, 0):
            self.incomplete.pop(tag, None)
            return False
        output = self.open[tag]
        row = output.rows[-1]
        cells = parse_continuation(line)
        if not cells or len(row.cells) + len(cells) > output.width:
            return False
        row.cells += cells
        row.last_line = number
        if len(row.cells) == output.width:
            self.incomplete.pop(tag)
        return True

    def _add_facts(self, line: str, tag: str, number: int) -> None:
        if rank := nccl_lines.rank_of(line):
            output = self.output(tag, number)
            if not output.rows or rank[0] in {known for known, _ in output.facts.ranks}:
                output = self.output_without_rows(tag, number)
            output.facts.ranks.append(rank)
        elif nccl_lines.opens_output(line):
            output = self.output_without_rows(tag, number)
            output.num_parameter_lines += "nThread" in line
            nccl_lines.add_facts(output.facts, line)
        elif placements := nccl_lines.placements_of(line):
            self.output_without_rows(tag, number).facts.placements = placements
        elif columns := nccl_lines.columns_of(line):
            output = self.output_without_rows(tag, number)
            layout = header_layout(columns)
            output.facts.columns, output.stated_width = columns, layout.width if layout else 0
        elif collective := nccl_lines.collective_in_command(line):
            self.collective, self.command_line = collective, number
        elif tag in self.open:
            nccl_lines.add_facts(self.open[tag].facts, line)
