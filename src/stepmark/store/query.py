"""SQL over all runs. Views: `rows`, as `runs show` has them, `records` and `runs`.

`records` has one row per record that the reader reads, with its figures alone: launches of a
case, which share a row of `rows`, have one each, and so has a case that failed and was measured
on resume. Only the views that a query names are made; all, if it names none.
"""

import dataclasses
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from stepmark.cases.kind import KINDS
from stepmark.cases.record import Record
from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import load
from stepmark.ground.packages import load_package
from stepmark.ground.units import GIB, KIB
from stepmark.store.codec import to_plain
from stepmark.store.reader import RUN, Run, with_all_samples
from stepmark.store.view import declared, device_of, of_records
from stepmark.tables.columns import COUNT, FLAG, JSON, NUMBER, Column, Row, rows_of
from stepmark.tables.table import Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A record: as plain JSON, as it is written, and as a row of its kind."""

    plain: dict[str, Any]
    text: bytes
    row: Row


def _field(name: str) -> Callable[[_Line], object]:
    return lambda o: o.plain.get(name)


def _of_case(name: str) -> Callable[[_Line], object]:
    return lambda o: o.plain["case"].get(name)


def _level(name: str) -> Callable[[_Line], object]:
    return lambda o: (o.plain.get("levels") or {}).get(name)


def _phase(line: _Line) -> object:
    """Return the pass of an operator, or of the first place of a collective."""
    op = line.plain["case"].get("op") or {}
    labels = line.plain["case"].get("labels") or [{}]
    return op.get("phase") or labels[0].get("phase")


# The columns of a record, besides those of its kind.
_OF_RECORDS: tuple[Column[_Line], ...] = (
    Column("run_id", _field("run_id")),
    Column("kind", _field("kind")),
    Column("phase", _phase),
    Column("clock", _of_case("clock")),
    Column("op", _of_case("op"), JSON),
    Column("in_place", _of_case("in_place"), FLAG),
    Column("launch", lambda o: o.plain.get("launch") or 1, COUNT),
    Column("machine", _level("machine")),
    Column("process", _level("process")),
    Column("communicator", _level("communicator"), COUNT),
    Column("round", _level("round"), COUNT),
    Column("labels", _of_case("labels"), JSON),
    Column("median_s", lambda o: o.row.get("time_s", o.row.get("iteration_s")), NUMBER),
    Column("peak_memory_bytes", _field("peak_memory_bytes"), COUNT),
    Column("started_at", _field("started_at"), NUMBER),
    Column("reason", _field("reason")),
    Column("cause", _field("cause")),
    Column("message", _field("message")),
    Column("record", lambda o: o.text.decode(), JSON),
)
_OF_RUNS: tuple[Column[Run], ...] = (
    Column("run_id", lambda o: o.info.run_id),
    Column("created_at", lambda o: o.info.created_at),
    Column("command", lambda o: o.info.command),
    Column("num_cases", lambda o: o.info.num_cases, COUNT),
    Column("host", lambda o: o.info.environment.host),
    Column("device_name", lambda o: next((d.name for d in o.info.environment.devices), None)),
    Column("num_devices", lambda o: len(o.info.environment.devices), COUNT),
    Column("torch", lambda o: o.info.environment.torch),
    Column("driver", lambda o: o.info.environment.versions.get("driver")),
    Column("git_commit", lambda o: o.info.environment.git_commit),
    Column("stepmark", lambda o: o.info.environment.stepmark),
    Column("environment", lambda o: to_plain(o.info)["environment"], JSON),
    Column("settings", lambda o: to_plain(o.info)["settings"], JSON),
    Column("path", lambda o: str(o.path / RUN)),
)


_CONFIG: dict[str, Any] = {
    "allow_persistent_secrets": "false",
    "python_enable_replacements": "false",  # names of Python's variables are no tables
    "temp_directory": "",
    "threads": 1,  # each reserves memory, also beyond what a job's limit leaves
}


def sql(runs: Sequence[Run], query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return column names and rows. Raises ConfigError for what DuckDB refuses."""
    duckdb = load_package("duckdb")

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < GIB:  # without a limit it is -1
        raise ConfigError("ulimit -v", f"{limit // KIB}", "1 GiB or more: DuckDB crashes below")
    try:
        with duckdb.connect(config=_CONFIG) as connection:
            # Apart, so that SHOW TABLES has the views alone.
            connection.execute("CREATE SCHEMA stored")
            named = [name for name in _VIEWS if re.search(rf"\b{name}\b", query, re.IGNORECASE)]
            for name in named or _VIEWS:  # a query such as SHOW TABLES names none
                _VIEWS[name](runs).create_in(connection, f"stored.{name}")
                connection.execute(f"CREATE VIEW {name} AS FROM stored.{name}")
            # The views are loaded: the query itself may read no other file, and write none.
            connection.execute("SET enable_external_access = false")
            # Logs, profiles, temporary files and secrets are settings, too.
            connection.execute("SET lock_configuration = true")
            cursor = connection.execute(query)
            if cursor is None:  # nothing but white space or a comment
                raise ConfigError("sql", query, "a query over the views rows, records and runs")
            names = [str(column[0]) for column in cursor.description or ()]
            return names, list(cursor.fetchall())
    except (duckdb.Error, RuntimeError) as error:  # RuntimeError: a query that is no UTF-8
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError("sql", query, f"it fails: {reason.strip()}") from None


def rows_of_runs(runs: Sequence[Run]) -> Table:
    """Return the rows of all runs, as `runs show` has them."""
    rows: list[Row] = []
    for run in runs:
        records = list(with_all_samples(run.path, run.latest))
        rows += of_records(run.info, records).all_rows
    return Table(rows, declared())


def records_of_runs(runs: Sequence[Run]) -> Table:
    """Return the records of all runs."""
    lines = [line for run in runs for line in _lines(run)]
    own = {column.name for column in _OF_RECORDS}
    others = [column for column in declared() if column.name not in own]
    rows = [
        facts | {column.name: line.row.get(column.name) for column in others}
        for line, facts in zip(lines, rows_of(_OF_RECORDS, lines), strict=True)
    ]
    return Table(rows, (*_OF_RECORDS, *others))


def _lines(run: Run) -> Iterator[_Line]:
    """Yield the records of a run, each with its row: no two of a case are judged together."""
    records = list(with_all_samples(run.path, run.records))
    batches: dict[tuple[int, int], list[Record]] = {}
    places: list[tuple[int, int]] = []
    seen: dict[tuple[str, int], Iterator[int]] = {}
    for record in records:
        attempt = next(seen.setdefault((record.case.case_id, record.launch), count()))
        places.append((record.launch, attempt))
        batches.setdefault(places[-1], []).append(record)
    by_place = {place: _first_rows(run, batch) for place, batch in batches.items()}
    for record, text, place in zip(records, run.lines, places, strict=True):
        row = by_place[place].get(record.case.case_id, {})
        yield _Line(plain=json_text.decode(text), text=text, row=row)


def _first_rows(run: Run, records: Sequence[Record]) -> dict[str, Row]:
    """Return the row of each case: of all ranks together, of its first place in a model."""
    by_case: dict[str, Row] = {}
    device = device_of(run.info)
    for kind in dict.fromkeys(record.case.kind for record in records):
        for row in load(KINDS[kind].rows)(records, run.info, device=device):
            by_case.setdefault(str(row["case_id"]), row)
    return by_case


def runs_themselves(runs: Sequence[Run]) -> Table:
    """Return a row per run whose run.json can be read."""
    return Table(rows_of(_OF_RUNS, [run for run in runs if run.is_known]), _OF_RUNS)


_VIEWS = {"rows": rows_of_runs, "records": records_of_runs, "runs": runs_themselves}
