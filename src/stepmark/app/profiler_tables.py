"""Tables of a profiler in a text file, for `stepmark trace breakdown FILE`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.core.profiler_table import ProfilerTable
from stepmark.report import profiler_tables
from stepmark.store.export import write_json, write_tables
from stepmark.trace.read_text import decode, is_binary, lines_of, no_collection, read_text
from stepmark.trace.tables import perftools, profiler_text
from stepmark.trace.tables.profiler_communication import checked


def run_table(path: Path, json: str | Path | None = None, csv: str | Path | None = None) -> int:
    """Print the tables of a file, or write them where json or csv is "-".

    Raises ConfigError for a file without any.
    """
    tables = read_tables(path)
    if "-" not in (str(json), str(csv)):
        for table in tables:
            sys.stdout.writelines(f"{line}\n" for line in (*profiler_tables.text(table), ""))
    if json:
        write_json(profiler_tables.document(tables), json, "profiler-tables")
    if csv:
        write_tables(profiler_tables.csv_rows(tables), csv, "csv")
    return 0


def read_tables(path: Path) -> list[ProfilerTable]:
    """Return the tables of a file, checked. Raises ConfigError for a file without any."""
    with no_collection():
        lines, file = lines_of(read_text(path)), str(path)
        found = [*map(checked, profiler_text.read(lines, file)), *perftools.read(lines, file)]
    found.sort(key=lambda table: table.first_line)
    if not found:
        allowed = "a text with a table of torch.profiler's key_averages() or of Perftools"
        raise ConfigError("file", path, allowed)
    return [replace(table, index=index) for index, table in enumerate(found, 1)]


def looks_like_profiler_table(head: bytes) -> bool:
    """Return whether the beginning of a file, decompressed, has the headings of a table."""
    if is_binary(head):
        return False
    lines: Sequence[str] = lines_of(decode(head))
    return profiler_text.has_table(lines) or perftools.has_table(lines)
