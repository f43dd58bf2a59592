"""Tables of rows to files: CSV, JSON, Parquet."""

import csv
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import config_errors, write_text, written
from stepmark.ground.packages import load_package
from stepmark.tables.columns import Row


def write_csv(
    rows: list[Row], target: str | Path, name: str = "rows", field: str = "csv"
) -> None:
    """Write one table. '-' is stdout; in a folder the file is called <name>.csv."""
    write_text(_file_for(target, name, "csv", field), _csv_text(rows), field)


def write_json(
    document: object, target: str | Path, name: str = "rows", field: str = "json"
) -> None:
    """Write plain values. '-' is stdout; in a folder the file is <name>.json."""
    write_text(_file_for(target, name, "json", field), json_text(document), field)


def write_tables(
    tables: dict[str, list[Row]], target: str | Path, kind: Literal["csv", "json"]
) -> None:
    """Write a file per table to a folder, one object to JSON, the only table to a CSV file."""
    write: Callable[..., None] = write_csv if kind == "csv" else write_json
    if is_folder(target):
        for name, rows in tables.items():
            write(rows, target, name)
    elif kind == "json":
        write_json(tables, target)
    elif len(tables) == 1:
        write_csv(next(iter(tables.values())), target)
    elif str(target) == "-":
        write_text("-", "\n".join(f"# {name}\n{_csv_text(tables[name])}" for name in tables))
    else:
        allowed = f"a folder (add /): there are {len(tables)} tables: {', '.join(tables)}"
        raise ConfigError("csv", target, allowed)


def names_of(rows: list[Row]) -> list[str]:
    """Return the union of the rows' keys, in the order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _csv_text(rows: list[Row]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names_of(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def cell(value: object) -> object:
    """Return a cell of a table: nested values as JSON."""
    return json_text(value, indent=None) if isinstance(value, dict | list | tuple) else value


def json_text(document: object, indent: int | None = 2) -> str:
    text = json.dumps(finite(document), indent=indent, allow_nan=False, default=str)
    return text if indent is None else text + "\n"


def finite(value: Any) -> Any:
    """Replace inf and nan, which JSON lacks, by strings."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {str(key): finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case _:
            return value


def is_folder(target: str | Path) -> bool:
    return str(target).endswith(("/", os.sep)) or Path(target).is_dir()


def _file_for(target: str | Path, name: str, suffix: str, field: str) -> str | Path:
    """Return the file in a folder, or else the target itself."""
    path = Path(target)
    if str(target) == "-" or not is_folder(target):
        return target
    with config_errors(path, field):
        path.mkdir(parents=True, exist_ok=True)
    return path / f"{name}.{suffix}"


def write_parquet(rows: list[Row], target: Path, types: Mapping[str, str]) -> None:
    """Write rows; columns without values have their declared SQL types."""
    duckdb = load_package("duckdb")

    if not names_of(rows):
        raise ConfigError("rows", "none", "at least one row for parquet")
    relation, values = sql_relation(rows, {name: types.get(name) for name in names_of(rows)})
    with duckdb.connect() as connection, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        quoted = str(file).replace("'", "''")
        connection.execute(f"CREATE TABLE rows_ AS {relation}", values)
        try:
            connection.execute(f"COPY rows_ TO '{quoted}' (FORMAT parquet)")
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            allowed = f"a folder for temporary files ({reason})"
            raise ConfigError("TMPDIR", folder, allowed) from None
        with file.open("rb") as source, written(target) as stream:
            shutil.copyfileobj(source, stream)


def sql_relation(
    rows: Sequence[Row], types: Mapping[str, str | None]
) -> tuple[str, list[list[object]]]:
    """Return a SELECT of rows for DuckDB, and the values of its parameters, a list per column.

    types: SQL types by column, None where only the values tell.
    """
    parts: list[str] = []
    lists: list[list[object]] = []
    for name, declared in types.items():
        column = [row.get(name) for row in rows]
        sql_type = _sql_type(column, declared)
        quoted = name.replace('"', '""')
        parts.append(f'unnest(?::{sql_type}[]) AS "{quoted}"')
        is_text = sql_type in ("VARCHAR", "JSON")
        lists.append([None if v is None else str(cell(v)) if is_text else v for v in column])
    return f"SELECT {', '.join(parts)}", lists


def write_pieces(
    types: Mapping[str, str], pieces: Iterable[Sequence[Sequence[object]]], target: Path
) -> int:
    """Write columns that come in pieces, to .csv or .parquet, and return the number of rows.

    types: SQL types by column. None is an empty cell, in Parquet NULL. Memory is a piece's.
    """
    if target.suffix != ".parquet":
        with written(target) as stream:
            return _csv_pieces(types, pieces, stream)
    duckdb = load_package("duckdb")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, duckdb.connect() as sql:
        names = [str(Path(folder) / name) for name in ("rows.csv", "rows.parquet")]
        with Path(names[0]).open("wb") as stream:
            num_rows = _csv_pieces(types, pieces, stream)
        source, quoted = (name.replace("'", "''") for name in names)
        columns = ", ".join(f"'{name}': '{kind}'" for name, kind in types.items())
        sql.execute("SET threads = 1; SET memory_limit = '256MB'")
        sql.execute(
            f"COPY (FROM read_csv('{source}', columns = {{{columns}}}, header = true, "
            f"auto_detect = false, delim = ',', quote = '\"', escape = '\"', "
            f"max_line_size = {2**26})) TO '{quoted}' (FORMAT parquet)"
        )
        os.replace(names[1], target)
    return num_rows


def _csv_pieces(
    types: Mapping[str, str], pieces: Iterable[Sequence[Sequence[object]]], stream: IO[bytes]
) -> int:
    text = io.TextIOWrapper(stream, "utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(types)
    num_rows = 0
    for piece in pieces:
        num_rows += len(piece[0])
        writer.writerows(zip(*piece, strict=True))
    text.detach()
    return num_rows


def _sql_type(column: list[object], declared: str | None) -> str:
    """Return the declared type where the values allow it, else that of the values."""
    kinds = {type(value) for value in column if value is not None}
    if declared == "JSON":
        return declared
    if declared and (not kinds or (declared == "DOUBLE" and kinds <= {int, float})):
        return declared
    if kinds == {bool}:
        return "BOOLEAN"
    if kinds == {int} and all(abs(v) < 2**63 for v in column if isinstance(v, int)):
        return "BIGINT"
    return "DOUBLE" if kinds and kinds <= {int, float} else "VARCHAR"
