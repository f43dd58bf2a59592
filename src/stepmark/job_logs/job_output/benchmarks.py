"""Tables of nccl-tests that a job's output begins: how far each came."""

from dataclasses import dataclass, field

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import UnfinishedTable
from stepmark.text_tables import nccl_lines
from stepmark.text_tables.nccl_lines import OutputFacts, Row


@dataclass(slots=True)
class _OpenTable:
    """A table without its footer."""

    first: Evidence
    last: Evidence
    facts: OutputFacts = field(default_factory=OutputFacts)
    rows: list[Row] = field(default_factory=list)
    num_footers: int = 0  # still expected: of each process, where every one prints a table

    def result(self) -> UnfinishedTable:
        layout = nccl_lines.layout_of(self.rows, self.facts.columns)
        width = layout.width if layout else 1
        return UnfinishedTable(
            has_parameters=bool(self.facts.parameters),
            has_header=bool(self.facts.columns),
            num_rows=sum(len(row.cells) >= width for row in self.rows),
            num_sizes=nccl_lines.num_sizes(self.facts),
            first=self.first,
            last=self.last,
        )


@dataclass(slots=True)
class BenchmarkTables:
    """Tables that were begun and not finished, in order."""

    tables: list[_OpenTable] = field(default_factory=list)
    open: _OpenTable | None = None  # that is being printed

    def read(self, body: str, evidence: Evidence) -> bool:
        """Read a line; return whether it is one of a table."""
        columns = nccl_lines.columns_of(body) if "type" in body else []
        has_parameters = "minBytes" in body
        if (has_parameters and (self.open is None or self.open.rows)) or (
            columns and self.open is None
        ):
            self.open = _OpenTable(evidence, evidence)
            self.tables.append(self.open)
        table = self.open
        if table is None:
            return False
        nccl_lines.add_facts(table.facts, body)
        table.num_footers += has_parameters
        table.facts.columns = columns or table.facts.columns
        row = nccl_lines.parse_row(body, evidence.line)
        if row is not None:
            table.rows.append(row)
        elif table.rows:  # its figures may follow after lines of NCCL
            table.rows[-1].cells += nccl_lines.parse_continuation(body)
        if row is not None or columns:
            table.last = evidence
        if "Avg bus bandwidth" in body:
            table.num_footers -= 1
            if table.num_footers <= 0:
                self.tables.remove(table)
                self.open = None
        return row is not None or bool(columns)

    def unfinished(self) -> tuple[UnfinishedTable, ...]:
        """Return what lacks its footer; an excerpt without the parameters may have none."""
        return tuple(
            table.result() for table in self.tables if table.facts.parameters or not table.rows
        )
