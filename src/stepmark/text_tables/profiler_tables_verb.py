"""Tables of a profiler in a text file, for `stepmark trace breakdown FILE`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.ground.garbage import no_collection
from stepmark.ground.read_text import decode, is_binary, lines_of, read_text
from stepmark.ground.units import ranks_text
from stepmark.store.view import print_text
from stepmark.tables.columns import COUNT, Row, given
from stepmark.tables.export import write_json, write_tables
from stepmark.tables.table import Table
from stepmark.text_tables import perftools, profiler_checks, profiler_text
from stepmark.text_tables.profiler_table import (
    Communication,
    ProfilerTable,
    TableRow,
    time_text,
)

_MAX_ROWS = 40
_MAX_NAME = 52
_NS = 1e9
_BINS = ("HtoA", "AtoH", "AtoA")  # begin the keys of copies by size
_NOT_SHOWN = ("_pct", "_avg")
_ANSWERS = {True: "yes", False: "no", None: "the table cannot tell"}


def run_table(path: Path, json: str | Path | None = None, csv: str | Path | None = None) -> int:
    """Print the tables of a file, or write them where json or csv is "-".

    Raises ConfigError for a file without any.
    """
    tables = read_tables(path)
    if "-" not in (str(json), str(csv)):
        for table in tables:
            print_text((*text_of(table), ""))
    if json:
        write_json(plain_rows(tables), json, "profiler-tables")
    if csv:
        write_tables(plain_rows(tables), csv, "csv")
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


def text_of(table: ProfilerTable) -> Iterator[str]:
    """Yield a table: the answer and what it rests on, its rows, its impossible figures."""
    yield f"{table.file}:{table.first_line}  {table.title}".rstrip()
    yield f"    {table.tool}, {len(table.rows)} rows"
    yield from (f"    {line}" for line in _answer(table.communication))
    yield ""
    yield from (f"    {line}" for line in _rows(table))
    total = table.rows[0].figures if table.rows else {}
    bins = (key for key in total if key.startswith(_BINS) and total[key].value)
    if copies := [f"{total[key].printed} {table.columns[key]}" for key in bins]:
        yield f"    copies by size, bins {', '.join(copies)}"
    for rule, count in Counter(flag.rule for flag in table.flags).items():
        own = [flag for flag in table.flags if flag.rule == rule]
        lines = ranks_text(flag.line for flag in own).replace("rank", "line")
        lines += f" ({count} figures), first" if count > 1 else ""
        what = " ".join(filter(None, (own[0].column, own[0].printed)))
        words = (lines, own[0].row, what, own[0].reason)
        yield f"    ! {': '.join(filter(None, words))} [{rule}]"


def _answer(answer: Communication) -> Iterator[str]:
    """Yield whether communication bounds the job, and what this rests on."""
    yield f"communication-bound: {_ANSWERS[answer.bound]}"
    if answer.low_ns is not None and answer.device_low_ns is not None:
        share = f"at least {answer.share_low or 0:.1%}"
        share += "" if answer.share_high is None else f" and at most {answer.share_high:.1%}"
        times = time_text(answer.low_ns, answer.high_ns)
        device = time_text(answer.device_low_ns, answer.device_high_ns)
        yield f"  communication: {share} of the device time ({times} of {device})"
    yield from (f"  rests on: {reason}" for reason in answer.reasons)


def _rows(table: ProfilerTable) -> Iterator[str]:
    """Yield the first rows as printed, with their kinds."""
    figures = {key for row in table.rows for key in row.figures}
    columns = [
        given(""),  # a mark
        *(
            given(key, COUNT, title)
            for key, title in table.columns.items()
            if key in figures and not key.endswith(_NOT_SHOWN) and not key.startswith(_BINS)
        ),
        given("kind"),
        given("name"),
    ]
    flagged = {flag.line for flag in table.flags}
    rows: list[Row] = [
        {
            **{key: figure.printed for key, figure in row.figures.items()},
            "": "!" if row.line in flagged else "",
            "kind": row.kind,
            "name": row.name[:_MAX_NAME],
        }
        for row in table.rows[:_MAX_ROWS]
    ]
    yield from Table(rows).text(columns)
    if len(table.rows) > _MAX_ROWS:
        yield f"... and {len(table.rows) - _MAX_ROWS} more rows; --json has all"


def plain_rows(tables: Sequence[ProfilerTable]) -> dict[str, list[Row]]:
    """Return answers, rows and flags of all tables, flat: seconds, bytes, percent, counts."""
    plain: dict[str, list[Row]] = {"tables": [], "rows": [], "flags": []}
    for table in tables:
        name: Row = {"table": f"{table.file}:{table.first_line}"}
        answer: Row = name | {"title": table.title, "tool": table.tool}
        for key, value in asdict(table.communication).items():
            is_time = key.endswith("_ns") and value is not None
            answer[key.replace("_ns", "_s")] = value / _NS if is_time else value
        answer["reasons"] = "; ".join(table.communication.reasons)
        plain["tables"].append(answer)
        plain["rows"] += [name | _plain_row(row) for row in table.rows]
        plain["flags"] += [name | asdict(flag) for flag in table.flags]
    return {key: rows for key, rows in plain.items() if rows}


def _plain_row(row: TableRow) -> Row:
    plain: Row = {"line": row.line, "name": row.name, "kind": row.kind}
    for key, figure in row.figures.items():
        is_time = key.endswith(("cpu", "device", "time", "_avg"))
        unit = "_s" if is_time else "_bytes" if key.startswith("copy") else ""
        plain[key + unit] = figure.value / _NS if is_time else figure.value
    return plain
