"""What `stepmark logs` found in its files, and its ways out: text, JSON, CSV, a page."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.cli.log_inputs import Inputs
from stepmark.cli.log_sources import Rows, Source, read_sources
from stepmark.cli.log_text import (
    Asked,
    Viewed,
    files_text,
    finding_text,
    source_text,
    table_text,
)
from stepmark.core.errors import ConfigError
from stepmark.core.finding import Finding, Severity

if TYPE_CHECKING:
    from stepmark.core.reading import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that was found in the files."""

    asked: Asked
    viewed: tuple[Viewed, ...]
    tables: "tuple[tuple[Table, tuple[Finding, ...]], ...]"
    without_tables: tuple[str, ...]  # files that were looked through for nothing

    @property
    def findings(self) -> list[Finding]:
        return [
            *(one for each in self.viewed for one in each.source.findings),
            *(one for _, found in self.tables for one in found),
        ]

    @property
    def exit_code(self) -> int:
        """1 where a job fails, hangs or gives wrong data."""
        return int(any(one.severity is Severity.PROBLEM for one in self.findings))

    def text(self) -> Iterator[str]:
        """Lines for people."""
        for place, each in enumerate(self.viewed):
            yield from [""] * (place > 0)
            yield from source_text(each, self.asked)
        if self.viewed and self.tables:
            yield ""
        yield from self._table_lines()

    def write(self, *, json: str | None, csv: str | None, html: str | None) -> None:
        """To the files asked for. Raises ConfigError for a path that cannot be written."""
        from stepmark.store.export import write_json, write_tables  # noqa: PLC0415

        if json:
            write_json(self.document(), json, "logs")
        if csv:
            write_tables(self._csv_tables(), csv, "csv")
        if html:
            self._write_page(html)

    def document(self) -> dict[str, object]:
        """All of it as plain values, whatever flags ask for less text."""
        return {
            "sources": [
                {
                    "kind": each.source.kind,
                    "files": each.source.files,
                    "findings": [_finding_row(one) for one in each.source.findings],
                    "histogram": each.rows,
                    "tuning": list(each.source.tuning),
                    "curve": each.totals,
                    **dict(each.source.rows),
                }
                for each in self.viewed
            ],
            "tables": [
                asdict(table) | {"findings": [_finding_row(one) for one in found]}
                for table, found in self.tables
            ],
            "exit_code": self.exit_code,
        }

    def _csv_tables(self) -> dict[str, Rows]:
        """Only what was asked for where something was; else all that has rows."""
        from stepmark.report import tables_found  # noqa: PLC0415

        many = len(self.viewed) > 1
        found: dict[str, Rows] = {}
        for each in self.viewed:
            named = {
                "histogram": each.rows,
                "tuning": list(each.source.tuning),
                **dict(each.source.rows),
            }
            if self.asked.histogram or self.asked.tuning:
                wanted = {"histogram": self.asked.histogram, "tuning": self.asked.tuning}
                named = {name: named[name] for name in wanted if wanted[name]}
            for name, rows in named.items():
                label = {"source": each.source.kind} if many else {}
                found.setdefault(name, []).extend(label | row for row in rows)
        if not (self.asked.histogram or self.asked.tuning) or not self.viewed:
            if self.tables:
                found["tables"] = tables_found.rows(self.tables)
            found["findings"] = [_finding_row(one) for one in self.findings]
        return {name: rows for name, rows in found.items() if rows} or {"findings": []}

    def _write_page(self, target: str) -> None:
        from stepmark.report.histogram_figures import page  # noqa: PLC0415
        from stepmark.store.files import write_text  # noqa: PLC0415

        sections = [
            (f"{each.source.kind}: {files_text(each.source)}", each.rows, each.source.findings)
            for each in self.viewed
        ]
        write_text(target, page("stepmark logs", sections), "html")

    def _table_lines(self) -> Iterator[str]:
        if not self.tables and not self.without_tables:
            return
        for table, found in self.tables:
            yield from table_text(table)
            yield from finding_text(found)
        for file in self.without_tables:
            yield f"{file}: no table found"


def answer(inputs: Inputs, asked: Asked) -> Answer:
    """Read all inputs. Raises ConfigError."""
    sources = read_sources(inputs, asked.ranks)
    viewed = tuple(_viewed(source, asked) for source in sources)
    # Whoever asks for the messages of a job's output asks for none of its tables.
    about_messages = viewed and (asked.histogram or asked.tuning)
    held = set(inputs.logs) if about_messages else set()
    tables, without = _tables([path for path in inputs.tables if path not in held])
    if asked.curve and not viewed:
        raise ConfigError("curve", asked.curve, "logs, dumps or inspector lines to hold to it")
    if asked.page and not viewed:
        allowed = "logs, dumps or inspector lines: tables have no histogram"
        raise ConfigError("html", inputs.tables[0], allowed)
    return Answer(
        asked=asked,
        viewed=viewed,
        tables=tables,
        without_tables=without if not viewed else (),
    )


def _tables(
    paths: Sequence[Path],
) -> "tuple[tuple[tuple[Table, tuple[Finding, ...]], ...], tuple[str, ...]]":
    """(tables with what is wrong with them, files without any)."""
    from stepmark.trace.tables import find  # noqa: PLC0415
    from stepmark.trace.tables.validate import validate  # noqa: PLC0415

    by_file = {path: find(path) for path in paths}
    found = ((table, tuple(validate(table))) for own in by_file.values() for table in own)
    return tuple(found), tuple(str(path) for path, own in by_file.items() if not own)


def _viewed(source: Source, asked: Asked) -> Viewed:
    from stepmark.report import expected, histogram  # noqa: PLC0415

    bins = histogram.parse_bins(asked.bins) if asked.bins else None
    by = histogram.BY if asked.by is None else histogram.parse_by(asked.by)
    seen = source.num_ranks_seen
    known, totals = None, None
    if asked.curve:
        from stepmark.cli.log_curve import read_curves  # noqa: PLC0415

        curves = read_curves(asked.curve, asked.runs)
        known = expected.expected(source.histogram, curves, force=asked.force)
        totals = expected.totals(source.histogram, known, seen)
        if asked.steps:
            totals["seconds_per_rank_and_step"] = totals["seconds_per_rank"] / asked.steps
    rows = histogram.rows(
        source.histogram, by=by, bins=bins, num_ranks_seen=seen, expected=known
    )
    return Viewed(source=source, rows=rows, totals=totals)


def _finding_row(one: Finding) -> dict[str, object]:
    first = one.evidence[0] if one.evidence else None
    return {
        "severity": one.severity.value,
        "rule": one.rule,
        "text": one.text,
        "count": one.count,
        "file": first.file if first else None,
        "line": first.line or None if first else None,
        "evidence": [asdict(proof) for proof in one.evidence],
    }
