"""Tables of nccl-tests that a job's output begins: how far each came."""

from dataclasses import dataclass, field

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import UnfinishedTable
from stepmark.ground.read_text import printable
from stepmark.job_logs.job_output.lines import split_tag
from stepmark.text_tables import nccl_lines
from stepmark.text_tables.nccl_lines import OutputFacts, Row


@dataclass(slots=True)
class OpenTable:
    """A table without its footer. Its lines are parsed only if the footer does not come."""

    first: Evidence
    last: Evidence
    facts: OutputFacts = field(default_factory=OutputFacts)
    lines: list[tuple[int, bytes]] = field(default_factory=list)  # after the header
    num_footers: int = 0  # still expected: of each process, where every one prints a table

    def result(self) -> UnfinishedTable:
        rows: list[Row] = []
        for number, line in self.lines:
            body = split_tag(printable(line))[2]
            row = nccl_lines.parse_row(body, number)
            if row is not None:
                rows.append(row)
                self.last = Evidence(file=self.first.file, line=number, text=printable(line))
            elif rows:  # its figures may follow after lines of NCCL
                rows[-1].cells += nccl_lines.parse_continuation(body)
        layout = nccl_lines.layout_of(rows, self.facts.columns)
        width = layout.width if layout else 1
        return UnfinishedTable(
            has_header=bool(self.facts.columns),
            num_rows=sum(len(row.cells) >= width for row in rows),
            num_sizes=nccl_lines.num_sizes(self.facts),
            first=self.first,
            last=self.last,
        )


@dataclass(slots=True)
class BenchmarkTables:
    """Tables that were begun and not finished, in order."""

    tables: list[OpenTable] = field(default_factory=list)
    open: OpenTable | None = None  # that is being printed

    def read(self, body: str, evidence: Evidence) -> bool:
        """Read a line with a word of a header or footer; return whether it is one."""
        has_parameters = "minBytes" in body
        if has_parameters and (self.open is None or self.open.facts.columns):
            self.open = OpenTable(evidence, evidence)
            self.tables.append(self.open)
        table = self.open
        if table is None:
            return False
        columns = nccl_lines.columns_of(body) if "type" in body else []
        nccl_lines.add_facts(table.facts, body)
        table.num_footers += has_parameters
        if columns:
            table.facts.columns, table.last = columns, evidence
        if "Avg bus bandwidth" in body:
            table.num_footers -= 1
            if table.num_footers <= 0:
                self.tables.remove(table)
                others = [one for one in self.tables if one.first.file == evidence.file]
                self.open = others[-1] if others else None
        return has_parameters or bool(columns)
