"""Tables of nccl-tests that a job's output begins: how far each came."""

from dataclasses import dataclass, field

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import UnfinishedTable
from stepmark.text_tables import nccl_lines
from stepmark.text_tables.nccl_lines import OutputFacts, Row

_MAX_TABLES = 1000


@dataclass(slots=True)
class _OpenTable:
    """A table without its footer. Processes that each print one open several at a time."""

    first: Evidence
    last: Evidence
    facts: OutputFacts = field(default_factory=OutputFacts)
    num_opened: int = 1
    num_closed: int = 0
    num_rows: int = 0
    row: Row | None = None  # that is being printed: its size, and its figures after it

    @property
    def has_rows(self) -> bool:
        return self.num_rows > 0 or self.row is not None


@dataclass(slots=True)
class BenchmarkTables:
    """Tables that were begun and not finished, in order."""

    tables: list[_OpenTable] = field(default_factory=list)
    is_open: bool = False  # the last one is still being printed

    def leave_file(self) -> None:
        self.is_open = False

    def read(self, body: str, evidence: Evidence) -> bool:
        """Read a line; return whether it is one of a table."""
        facts = OutputFacts()
        nccl_lines.add_facts(facts, body)
        columns = nccl_lines.columns_of(body) if "redop" in body or "type" in body else []
        if facts.parameters or (columns and not self.is_open):
            self._begin(facts, columns, evidence)
        elif not self.is_open:
            return facts.is_complete
        elif columns:
            self.tables[-1].facts.columns, self.tables[-1].last = columns, evidence
        elif facts.max_bytes:
            self.tables[-1].facts.max_bytes = facts.max_bytes
        elif facts.is_complete:
            self._end(has_average=bool(facts.average))
        else:
            return self._row(self.tables[-1], body, evidence)
        return True

    def _begin(self, facts: OutputFacts, columns: list[str], evidence: Evidence) -> None:
        facts.columns = columns
        if self.is_open and not self.tables[-1].has_rows and facts.parameters:
            self.tables[-1].num_opened += 1
        elif len(self.tables) < _MAX_TABLES:
            self.tables.append(_OpenTable(evidence, evidence, facts))
            self.is_open = True

    def _end(self, *, has_average: bool) -> None:
        table = self.tables[-1]
        # The last line repeats what the average stated.
        table.num_closed += has_average or table.num_opened == 1
        if table.num_closed >= table.num_opened:
            self.tables.pop()
            self.is_open = False

    def _row(self, table: _OpenTable, body: str, evidence: Evidence) -> bool:
        """Read a row, or the figures that follow its size later."""
        row = nccl_lines.parse_row(body, evidence.line)
        figures = nccl_lines.parse_continuation(body) if row is None and table.row else []
        if row is None and not figures:
            return False
        if table.row is not None and figures:
            table.row.cells += figures
        table.row, table.last = row or table.row, evidence
        layout = nccl_lines.header_layout(table.facts.columns) if table.facts.columns else None
        if table.row and len(table.row.cells) >= (layout.width if layout else 3):
            table.num_rows, table.row = table.num_rows + 1, None
        return True

    def unfinished(self) -> tuple[UnfinishedTable, ...]:
        """Return what lacks its footer; an excerpt without the parameters may have none."""
        return tuple(
            UnfinishedTable(
                has_parameters=bool(table.facts.parameters),
                has_header=bool(table.facts.columns),
                num_rows=table.num_rows,
                num_sizes=nccl_lines.num_sizes(table.facts),
                num_tables=table.num_opened,
                num_finished=table.num_closed,
                first=table.first,
                last=table.last,
            )
            for table in self.tables
            if table.facts.parameters or not table.has_rows
        )
