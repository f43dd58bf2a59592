"""Tables of a profiler in a text file, for `stepmark trace breakdown FILE`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.ground.garbage import no_collection
from stepmark.ground.read_text import decode, is_binary, lines_of, read_text
from stepmark.store.view import print_text
from stepmark.tables.export import write_json, write_tables
from stepmark.text_tables import perftools, profiler_checks, profiler_tables_text, profiler_text
from stepmark.text_tables.profiler_table import ProfilerTable


def run_table(path: Path, json: str | Path | None = None, csv: str | Path | None = None) -> int:
    """Print the tables of a file, or write them where json or csv is "-".

    Raises ConfigError for a file without any.
    """
    tables = read_tables(path)
    if "-" not in (str(json), str(csv)):
        for table in tables:
            print_text((*profiler_tables_text.text(table), ""))
    if json:
        write_json(profiler_tables_text.plain_rows(tables), json, "profiler-tables")
    if csv:
        write_tables(profiler_tables_text.plain_rows(tables), csv, "csv")
    return 0


def read_tables(path: Path) -> list[ProfilerTable]:
    """Return the tables of a file, checked. Raises ConfigError for a file without any."""
    with no_collection():
        tables = list(_tables(lines_of(read_text(path)), str(path)))
    if not tables:
        allowed = "a text with a table of torch.profiler's key_averages() or of Perftools"
        raise ConfigError("file", path, allowed)
    return sorted(tables, key=lambda table: table.first_line)


def _tables(lines: Sequence[str], file: str) -> Iterator[ProfilerTable]:
    for tool, answers in ((profiler_text, profiler_checks), (perftools, perftools)):
        for table in tool.read(lines, file):
            flagged = replace(table, flags=(*table.flags, *profiler_checks.flags(table)))
            yield replace(flagged, communication=answers.communication(flagged))


def looks_like_profiler_table(head: bytes) -> bool:
    """Return whether the beginning of a file, decompressed, has the headings of a table."""
    return not is_binary(head) and any(_tables(lines_of(decode(head)), ""))
