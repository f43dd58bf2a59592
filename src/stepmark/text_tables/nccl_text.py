"""Read the text that nccl-tests and rccl-tests print, and excerpts of it.

One reader covers all versions: 1.x (milliseconds), 2.0 - 2.11 (an `error` column), 2.13 and
later, options -S, -I, -C, -N, -d all, rccl-tests with one placement or more columns, with
launcher prefixes, log lines between rows and rows broken in two. Tables whose header cells were
lost or scrambled are read by the number of figures in their rows.

With -C the time column is the time to enqueue: such readings have their bus bandwidth as `rate`
and no time_s. The `error` column before 2.13 is a difference, no count: num_wrong is None.
Several outputs may stand in one text, one after the other or, marked by a launcher, line by
line mixed. A row may be broken by log lines; its rest is a line of figures alone.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table
from stepmark.ground.units import GB
from stepmark.text_tables import nccl_lines, nccl_notes, printed_figures
from stepmark.text_tables.nccl_lines import Layout, OutputFacts, Row
from stepmark.text_tables.printed_figures import parse_number, rounding_error
from stepmark.text_tables.slide_tables import heading_above

_MENTIONS_OUTPUT = re.compile(
    r"#|nThread|_perf|[Rr]ank|Out of bounds|Avg bus|rccl-tests|(?i:size|bytes)"
)
# A row behind a prefix. Quick, since logs have many lines of other kinds.
_TYPED_ROW = re.compile(
    r"\d[\s|,]+(?:u?int(?:8|16|32|64)?|char|half|float|double|bfloat16|f8e\dm\d|fp8\w*)[\s|,]"
)
_ROW_START = re.compile(r"[\s|>*-]*\d")
_OTHER_ROW = re.compile(r"\d{1,19}[ \t]{1,40}\d{1,19}[ \t]{1,40}[\d.]")
_DEFAULT_WIDTH = 9  # cells of a row where the header does not state it
_MAX_LINES_WITHIN_ROW = 400
_CACHE = 4096  # texts of #wrong


@dataclass(slots=True)
class Output:
    """One output, as far as it has been read."""

    first_line: int
    first_text: str
    facts: OutputFacts = field(default_factory=OutputFacts)
    rows: list[Row] = field(default_factory=list)
    collective: str = ""  # of the command above
    command_line: int = 0
    num_parameter_lines: int = 0
    header_line: int = 0  # of the column headings
    has_other_rows: bool = False  # lines below the headings that are rows of another layout
    stated_width: int = 0  # cells of a row, as the header says

    @property
    def width(self) -> int:
        """Cells of a complete row, as far as known while reading."""
        return self.stated_width or max(len(self.rows[0].cells), _DEFAULT_WIDTH)


def outputs_of(lines: Sequence[str]) -> list[Output]:
    """Return all outputs, in order: also those that stop before their first row."""
    reader = OutputsReader()
    for number, line in enumerate(lines, 1):
        reader.read(line, number)
    return reader.result()


def _join(first: Output, second: Output) -> None:
    """Add to an output the facts of one that stands mixed with it."""
    second.first_line = first.first_line
    second.first_text = first.first_text
    second.num_parameter_lines += first.num_parameter_lines
    second.facts.ranks = first.facts.ranks + second.facts.ranks
    second.facts.version = second.facts.version or first.facts.version
    second.facts.tool = second.facts.tool or first.facts.tool
    second.facts.collective = second.facts.collective or first.facts.collective


def _num_repeats(output: Output) -> int:
    """Return how often rows of one kind and size stand at most."""
    counts = Counter((row.size, *row.kind) for row in output.rows)
    return max(counts.values(), default=0)


@dataclass(slots=True)
class OutputsReader:
    """Collects outputs from lines, in order; one open output per launcher tag."""

    open: dict[str, Output] = field(default_factory=dict)
    # Those directly before the open one, by tag.
    without_rows: dict[str, list[Output]] = field(default_factory=dict)
    closed: list[Output] = field(default_factory=list)
    collective: str = ""  # of a command whose output did not begin yet
    command_line: int = 0
    incomplete: dict[str, int] = field(default_factory=dict)  # tag: last line of its row

    _line: str = ""  # that is being read

    @property
    def is_inside(self) -> bool:
        """Return whether an output began and has no footer yet."""
        return any(not output.facts.is_complete for output in self.open.values())

    def result(self) -> list[Output]:
        """Return all outputs, after the last line."""
        for tag in list(self.open):
            self.close(tag)
        # By the first row, or by the first fact for want of rows.
        return sorted(
            (*self.closed, *(one for group in self.without_rows.values() for one in group)),
            key=lambda one: one.rows[0].line if one.rows else one.first_line,
        )

    def output(self, tag: str, number: int) -> Output:
        if tag not in self.open:
            self.open[tag] = Output(number, self._line)
        return self.open[tag]

    def output_without_rows(self, tag: str, number: int) -> Output:
        """Begin another output if the current one has rows."""
        if self.output(tag, number).rows:
            self.close(tag)
        return self.output(tag, number)

    def output_without_header(self, tag: str, number: int) -> Output:
        """Begin another output if the current one has rows below headings.

        Rows between parameters and headings are of another process, which runs without MPI.
        """
        output = self.output(tag, number)
        if output.facts.parameters and not output.header_line:
            return output
        return self.output_without_rows(tag, number)

    def close(self, tag: str) -> None:
        self.incomplete.pop(tag, None)
        output = self.open.pop(tag, None)
        if output is None:
            return
        if output.rows:
            before = self.without_rows.pop(tag, [])
            for _ in range(min(_num_repeats(output) - 1, len(before))):
                _join(before.pop(), output)
            self.closed += [*before, output]
        elif output.facts.parameters or output.header_line:
            self.without_rows.setdefault(tag, []).append(output)

    def read(self, line: str, number: int) -> None:
        self._line = line
        if _ROW_START.match(line) and (row := nccl_lines.parse_row(line, number)):
            self._add(row, "")
        elif _TYPED_ROW.search(line):
            tag, rest = nccl_lines.split_prefix(line)
            if row := nccl_lines.parse_row(rest, number):
                self._add(row, tag)
        elif self.incomplete and self._continue_row(line, number):
            return
        elif " NCCL " not in line and _MENTIONS_OUTPUT.search(line):
            tag, rest = nccl_lines.split_prefix(line)
            self._add_facts(rest, tag, number)
        elif self.open and _OTHER_ROW.search(line):
            tag, rest = nccl_lines.split_prefix(line)
            if tag in self.open and _OTHER_ROW.match(rest.lstrip()):
                self.open[tag].has_other_rows = self.open[tag].header_line > 0

    def _add(self, row: Row, tag: str) -> None:
        output = self.output(tag, row.line)
        if output.facts.is_complete:
            self.close(tag)
            output = self.output(tag, row.line)
        if self.collective and not output.rows and not output.collective:
            output.collective = self.collective
            output.command_line = self.command_line
            self.collective = self.collective if output.facts.parameters else ""
        output.rows.append(row)
        if len(row.cells) < output.width:
            self.incomplete[tag] = row.line + _MAX_LINES_WITHIN_ROW
        elif self.incomplete:
            self.incomplete.pop(tag, None)

    def _continue_row(self, prefixed: str, number: int) -> bool:
        """Return whether the line is the rest of its tag's last row, and add it if so."""
        tag, line = nccl_lines.split_prefix(prefixed)
        if number > self.incomplete.get(tag, 0):
            self.incomplete.pop(tag, None)
            return False
        output = self.open[tag]
        row = output.rows[-1]
        cells = nccl_lines.parse_continuation(line)
        if not cells or len(row.cells) + len(cells) > output.width:
            return False
        row.cells += cells
        row.last_line = number
        row.values = []
        if len(row.cells) == output.width:
            self.incomplete.pop(tag)
        return True

    def _add_facts(self, line: str, tag: str, number: int) -> None:
        if ranks := nccl_lines.ranks_of(line):
            output = self.output(tag, number)
            if not output.rows or ranks[0][0] in dict(output.facts.ranks):
                output = self.output_without_rows(tag, number)
            output.facts.ranks += ranks
            output.facts.gpus += nccl_lines.gpus_of(line)
        elif nccl_lines.opens_output(line):
            if nccl_lines.is_second(line, self.output(tag, number).facts):
                self.close(tag)
            output = self.output_without_rows(tag, number)
            output.num_parameter_lines += "nThread" in line
            nccl_lines.add_facts(output.facts, line)
        elif placements := nccl_lines.placements_of(line):
            self.output_without_header(tag, number).facts.placements = placements
        elif columns := nccl_lines.columns_of(line):
            output = self.output_without_header(tag, number)
            layout = nccl_lines.header_layout(columns)
            output.facts.columns = columns
            output.stated_width = layout.width if layout else 0
            output.header_line = output.header_line or number
        elif collective := nccl_lines.collective_in_command(line):
            self.collective = collective
            self.command_line = number
        elif tag in self.open:
            nccl_lines.add_facts(self.open[tag].facts, line)


def tables_of(outputs: Sequence[Output], lines: Sequence[str], file: str) -> list[Table]:
    """Return the tables of the outputs of these lines, in order; their index is left at 0."""
    tables = [_table(output, lines, file) for output in outputs if output.rows]
    return [table for table in tables if table.readings]


def _table(output: Output, lines: Sequence[str], file: str) -> Table:
    facts = output.facts
    rows = output.rows
    first_line = min(output.first_line, rows[0].line)
    heading = heading_above(lines, output.command_line or first_line)
    command_line = lines[output.command_line - 1] if output.command_line else ""
    tool = nccl_lines.tool_of(facts, f"{heading} {command_line}")
    layout = nccl_lines.layout_of(rows, facts.columns)
    complete = [row for row in rows if layout and len(row.cells) == layout.width]
    is_mixed = output.num_parameter_lines > 1
    cycles = _cycles(complete, is_mixed=is_mixed)
    readings = _readings(complete, cycles, layout, output) if layout else []
    collective, collective_from = _collective(output, readings, file)
    num_ranks, num_ranks_from, notes = _num_ranks(facts, readings, collective)
    is_whole = len(facts.gpus) == num_ranks  # neither split nor cut
    num_hosts, device = nccl_lines.hosts_and_device(facts.gpus if is_whole else ())
    if num_ranks != 1:  # the busbw of one rank is 0
        readings = [_with_bound(reading) for reading in readings]
    return Table(
        file=file,
        first_line=first_line,
        last_line=max(row.last_line for row in rows),
        title=heading or nccl_lines.command_from(command_line),
        tool=tool,
        version=facts.version,
        unit="busbw" if any(reading.rate is not None for reading in readings) else "",
        collective=collective,
        collective_from=collective_from,
        num_ranks=num_ranks,
        num_ranks_from=num_ranks_from,
        num_hosts=num_hosts,
        device=device,
        gpus_per_thread=nccl_lines.gpus_per_thread(facts),
        method=nccl_lines.method_of(facts, tool),
        readings=tuple(readings),
        notes=(
            *nccl_notes.incomplete_rows(rows, layout),
            *nccl_notes.unusual_columns(facts, rows),
            *(nccl_notes.rows_of_sweep(complete, cycles, facts) if not is_mixed else ()),
            *(nccl_notes.unknown_collective(readings) if not collective else ()),
            *notes,
            *nccl_notes.footer(facts, readings),
        ),
    )


def _readings(
    rows: Sequence[Row], cycles: Sequence[int], layout: Layout, output: Output
) -> list[Reading]:
    columns = output.facts.columns
    second = 1e-3 if {"bytes", "n"} <= set(columns) or "(ms)" in columns else 1e-6
    is_enqueue_time = "cputime" in columns
    placements = _placements(layout, columns + output.facts.placements)
    time_at, algbw_at, busbw_at = map(layout.columns.index, ("time", "algbw", "busbw"))
    has_count = "wrong" in layout.columns and not _is_error_column(rows, layout, columns)
    readings = []
    wrong_at = layout.columns.index("wrong") if has_count else None
    width = len(layout.columns)
    first = [layout.has_root + index * width for index in range(len(placements))]
    places = [
        (
            start + time_at,
            start + algbw_at,
            start + busbw_at,
            start + (wrong_at or 0),
            placement,
        )
        for start, placement in zip(first, placements, strict=True)
    ]
    dtypes = {name: nccl_lines.dtype_named(name) for name in {row.dtype for row in rows}}
    for row, cycle in zip(rows, cycles, strict=True):
        cells = row.cells
        values: Sequence[float | None] = row.values or [parse_number(cell) for cell in cells]
        root = values[0] if layout.has_root else None
        for time_place, algbw_place, busbw_place, wrong_place, placement in places:
            time = values[time_place]
            algbw = values[algbw_place]
            busbw = values[busbw_place]
            if time is algbw is busbw is None:
                continue
            wrong = None if wrong_at is None else _num_wrong(cells[wrong_place])
            has_rate = is_enqueue_time and busbw is not None and busbw > 0
            readings.append(
                Reading(
                    line=row.line,
                    size_bytes=row.size,
                    count=row.count,
                    dtype=dtypes[row.dtype],
                    redop=row.redop,
                    root=None if root is None else int(root),
                    placement=placement,
                    time_s=time * second if time and time > 0 and not is_enqueue_time else None,
                    algbw_bytes_per_s=None if algbw is None else algbw * GB,
                    busbw_bytes_per_s=None if busbw is None else busbw * GB,
                    rate=busbw * GB if busbw is not None and has_rate else None,
                    num_wrong=wrong,
                    cycle=cycle,
                    printed=(cells[time_place], cells[algbw_place], cells[busbw_place]),
                )
            )
    return readings


def _placements(layout: Layout, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the placements in order. A single one is named only by its header."""
    if layout.placements == 2:
        return OUT_OF_PLACE, IN_PLACE
    names = [word for word in (OUT_OF_PLACE, IN_PLACE) if word in columns]
    return (names[0] if len(names) == 1 else "",)


def _is_error_column(rows: Sequence[Row], layout: Layout, columns: Sequence[str]) -> bool:
    """Return whether the last figure is a difference such as 4e-07, as before 2.13."""
    if "#wrong" in columns or "error" in columns or "res" in columns:
        return "#wrong" not in columns
    last = layout.columns.index("wrong") + layout.has_root
    return any("e-" in row.cells[last] or row.cells[last] == "0e+00" for row in rows)


@lru_cache(_CACHE)
def _num_wrong(text: str) -> int | None:
    value = parse_number(text.rstrip("*"))
    return None if value is None or value < 0 else int(value)


def _cycles(rows: Sequence[Row], *, is_mixed: bool) -> list[int]:
    """Return the repeat of the sweep that each row belongs to: a sweep begins where sizes fall.

    A sweep in which a size occurs again without a fall repeats that size. is_mixed: lines of
    several outputs, each size several times.
    """
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(row.kind, []).append(index)
    cycles = [0] * len(rows)
    for indexes in kinds.values():
        sizes = [rows[index].size for index in indexes]
        falls = list(accumulate((b < a for a, b in pairwise(sizes)), initial=0))
        sent = [place for place in zip(falls, sizes, strict=True) if place[1] > 0]
        is_repeated = is_mixed or len(set(sent)) < len(sent)
        counts: dict[int, int] = {}
        for index, size, cycle in zip(indexes, sizes, falls, strict=True):
            cycles[index] = counts.get(size, 0) if is_repeated else cycle
            counts[size] = counts.get(size, 0) + 1
    return cycles


def _with_bound(reading: Reading) -> Reading:
    """Return a bandwidth printed as 0 as one below half of its last digit."""
    if reading.busbw_bytes_per_s != 0 or not reading.size_bytes or reading.printed is None:
        return reading
    return replace(
        reading,
        rate=None,
        rate_below=rounding_error(reading.printed[2]) * GB,
        busbw_bytes_per_s=None,
        algbw_bytes_per_s=reading.algbw_bytes_per_s or None,
    )


def _collective(output: Output, readings: Sequence[Reading], file: str) -> tuple[str, str]:
    """Return (collective, how it is known)."""
    if output.facts.collective:
        return output.facts.collective, "the line 'Collective test starting'"
    if output.collective:
        return output.collective, f"the command in line {output.command_line}"
    return nccl_lines.inferred_collective(file, readings)


def _num_ranks(
    facts: OutputFacts, readings: Sequence[Reading], collective: str
) -> tuple[int | None, str, tuple[str, ...]]:
    """Return (ranks, how they are known, notes)."""
    if facts.ranks:
        return _num_ranks_stated(facts)
    num_ranks, reason = printed_figures.num_ranks_of(readings, collective)
    if num_ranks is not None:
        return num_ranks, reason, ()
    detail = f" ({reason})" if reason else ""
    return None, "", (f"the number of ranks is not known{detail} (compare --ranks N)",)


def _num_ranks_stated(facts: OutputFacts) -> tuple[int | None, str, tuple[str, ...]]:
    """Return (ranks by the rank lines, how they are known, notes)."""
    groups = dict(facts.ranks)
    same = sum(group == groups.get(0, 0) for group in groups.values())
    of_all = f" of group 0, of {len(groups)} in all" if same < len(groups) else ""
    repeated = len(facts.ranks) - len(groups)
    lost = max(groups) + 1 - len(groups)
    notes = (
        f"{repeated} rank lines name a rank a second time: this is the mixed output of "
        "several processes that did not connect (a build without MPI)",
        f"the lines of {lost} ranks below rank {max(groups)} are missing",
    )
    num_threads = nccl_lines.parameters_of(facts).get("nThread", 1)
    per_process = max(num_threads, 1) * nccl_lines.gpus_per_thread(facts)
    if lost and not of_all:
        return same + lost, f"the line of rank {max(groups)}", notes[1:]
    if lost or (not repeated and len(groups) % per_process):
        note = f"{len(groups)} rank lines, which is no multiple of {per_process} per process"
        return None, "", (notes[1] if lost else note,)
    return same, f"{same} rank lines{of_all}", notes[:1] if repeated else ()
