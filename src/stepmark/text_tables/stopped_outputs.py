"""Find the outputs of nccl-tests and rccl-tests that end before their last row.

Such an output is what a test leaves that failed, hung or was killed: its header without rows,
or fewer sizes than its parameter line asks for and no footer. An output without parameter line
and footer, such as a copied table, says nothing of its end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.ground.units import format_bytes
from stepmark.text_tables import nccl_lines
from stepmark.text_tables.nccl_lines import Row, Sweep
from stepmark.text_tables.nccl_text import Output

NO_ROW_FITS = "no row fits its headings"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedOutput:
    """One output that stops or cannot be read, with what it asked for. None: unknown."""

    tool: str
    first_line: int  # of the file, from 1
    first_text: str = ""  # of that line
    header_line: int | None  # of the column headings; None: it stops before them
    last_line: int  # of its last complete row, else of a torn one, of its header, its beginning
    num_rows: int = 0  # complete rows of the last sweep
    num_sizes: int | None = None  # rows of a complete sweep
    last_size_bytes: int | None = None  # of the last complete row
    is_row_torn: bool = False  # the last row has figures of less than all columns
    unread: str = ""  # why no row below the headings can be read; "" where there is none

    @property
    def text(self) -> str:
        """Return e.g. "stops after 8 of 25 sizes (the last row, line 31, is 1 KiB)"."""
        if self.unread:
            return f"cannot be read: {self.unread} (line {self.header_line})"
        if self.header_line is None:
            return f"stops before its table (it begins in line {self.first_line})"
        sizes = f" of {self.num_sizes} sizes" if self.num_sizes else ""
        if self.last_size_bytes is None:
            torn = " inside its first row" if self.is_row_torn else " after its header"
            return (
                f"stops{torn} (line {self.last_line}): none{sizes or ' of its rows'} is there"
            )
        size = format_bytes(self.last_size_bytes)
        rows = f"{self.num_rows}{sizes or ' rows'}"
        torn = ", and the next row is cut" if self.is_row_torn else ""
        return f"stops after {rows} (the last row, line {self.last_line}, has {size}{torn})"

    def finding(self, file: str) -> Finding:
        """Return that it ends before its last row, or that no row of it can be read."""
        why = "; it hung or failed there, or still ran, or the output was cut"
        return Finding(
            rule="table-unread" if self.unread else "table-incomplete",
            severity=Severity.WARNING,
            text=f"The output of {self.tool} {self.text}{'' if self.unread else why}.",
            evidence=(Evidence(file=file, line=self.first_line, text=self.first_text),),
        )


def stops_of(outputs: Iterable[Output]) -> list[StoppedOutput]:
    """Return those of the outputs that end before their last row."""
    return [stop for stop in map(_stop, outputs) if stop]


def _stop(output: Output) -> StoppedOutput | None:
    facts = output.facts
    sweep = nccl_lines.sweep_of(facts)
    num_sizes = sweep.num_sizes if sweep else None
    width = output.stated_width or max((len(row.cells) for row in output.rows), default=0)
    complete = [row for row in output.rows if len(row.cells) >= width > 0]
    is_torn = bool(output.rows) and len(output.rows[-1].cells) < width
    if complete and (facts.is_complete or not (is_torn or _lacks_sizes(complete, sweep))):
        return None
    num_rows = len(complete)
    if num_sizes and num_rows > num_sizes:
        num_rows = (num_rows - 1) % num_sizes + 1
    last_row = (complete or output.rows)[-1:]
    has_only_others = output.has_other_rows and not output.rows
    last_line = output.header_line or output.first_line
    return StoppedOutput(
        tool=nccl_lines.tool_of(facts, ""),
        first_line=output.first_line,
        first_text=output.first_text,
        header_line=output.header_line or None,
        last_line=last_row[0].last_line if last_row else last_line,
        num_rows=num_rows,
        num_sizes=num_sizes,
        last_size_bytes=complete[-1].size if complete else None,
        is_row_torn=is_torn,
        unread=NO_ROW_FITS if has_only_others else "",
    )


def _lacks_sizes(rows: Sequence[Row], sweep: Sweep | None) -> bool:
    """Return whether the last row has another size than the last one that was asked for.

    Printed sizes are rounded down to whole elements of each rank: a row above the size before
    the last is the last one.
    """
    if sweep is None or not sweep.num_sizes or sweep.num_sizes < 2:
        return False
    num_steps = sweep.num_sizes - 2
    before_last = sweep.min_bytes + num_steps * sweep.step
    if sweep.is_factor:
        before_last = sweep.min_bytes * sweep.step**num_steps
    return rows[-1].size <= before_last
