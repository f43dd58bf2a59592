"""Rows to files and trackers: CSV, JSON, Parquet; TensorBoard, W&B, MLflow when installed."""

import csv
import importlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, get_args

from stepmark.core.errors import ConfigError, not_one_of
from stepmark.core.record import RunInfo
from stepmark.store import codec
from stepmark.store.files import config_errors, write_text, written

Row = dict[str, object]
Kind = Literal["csv", "json", "parquet", "tensorboard", "wandb", "mlflow"]

# Columns that name a row in a tracker.
NAMING = ("family", "model", "role", "pass", "shape", "dtype", "backend", "rate", "rank")

# Trackers allow 240 to 250 characters; case and column follow.
_LONGEST_STEM = 180


def export(
    rows: list[Row],
    run: RunInfo,
    target: Path,
    kind: str,
    types: Mapping[str, str] | None = None,
) -> None:
    """Write a run's rows: to a file for csv, json, parquet, to a folder for the trackers.

    `types` are declared SQL types, which parquet columns without values take.
    """
    if kind not in get_args(Kind):
        raise not_one_of("to", kind, get_args(Kind))
    with config_errors(target):
        if kind == "parquet":
            _to_parquet(rows, target, types or {})
        else:
            EXPORTERS[kind](rows, run, target)


def write_csv(
    rows: list[Row], target: str | Path, name: str = "rows", field: str = "csv"
) -> None:
    """Write one table. '-' is stdout; in a folder the file is called <name>.csv."""
    write_text(_file_for(target, name, "csv", field), _csv_text(rows), field)


def write_json(
    document: object, target: str | Path, name: str = "rows", field: str = "json"
) -> None:
    """Write plain values. '-' is stdout; in a folder the file is <name>.json."""
    write_text(_file_for(target, name, "json", field), _json_text(document), field)


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


def columns_of(rows: list[Row]) -> list[str]:
    """Return the union of the rows' keys, in the order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _csv_text(rows: list[Row]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns_of(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    """Return a cell of a table: nested values as JSON."""
    return _json_text(value, indent=None) if isinstance(value, dict | list | tuple) else value


def _json_text(document: object, indent: int | None = 2) -> str:
    text = json.dumps(codec.finite(document), indent=indent, allow_nan=False, default=str)
    return text if indent is None else text + "\n"


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


def _to_parquet(rows: list[Row], target: Path, types: Mapping[str, str]) -> None:
    import duckdb  # noqa: PLC0415

    columns = columns_of(rows)
    if not columns:
        raise ConfigError("rows", "none", "at least one row for parquet")
    values = [[row.get(name) for row in rows] for name in columns]
    parts, lists = [], []
    for name, column in zip(columns, values, strict=True):
        sql_type = _sql_type(column, types.get(name))
        quoted = name.replace('"', '""')
        parts.append(f'unnest(?::{sql_type}[]) AS "{quoted}"')
        text = sql_type == "VARCHAR"
        lists.append([None if v is None else str(_cell(v)) if text else v for v in column])
    with duckdb.connect() as connection, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        quoted = str(file).replace("'", "''")
        connection.execute(f"CREATE TABLE rows_ AS SELECT {', '.join(parts)}", lists)
        try:
            connection.execute(f"COPY rows_ TO '{quoted}' (FORMAT parquet)")
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            allowed = f"a folder for temporary files ({reason})"
            raise ConfigError("TMPDIR", folder, allowed) from None
        with file.open("rb") as source, written(target) as stream:
            shutil.copyfileobj(source, stream)


def write_pieces(
    types: Mapping[str, str], pieces: Iterable[Sequence[Sequence[object]]], target: Path
) -> int:
    """Write columns that come in pieces, to .csv or .parquet, and return the number of rows.

    types: SQL types by column. None is an empty cell, in Parquet NULL. Memory is a piece's.
    """
    if target.suffix != ".parquet":
        with written(target) as stream:
            return _csv_pieces(types, pieces, stream)
    duckdb: Any = importlib.import_module("duckdb")
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
    if declared and (not kinds or (declared == "DOUBLE" and kinds <= {int, float})):
        return declared
    if kinds == {bool}:
        return "BOOLEAN"
    if kinds == {int} and all(abs(v) < 2**63 for v in column if isinstance(v, int)):
        return "BIGINT"
    return "DOUBLE" if kinds and kinds <= {int, float} else "VARCHAR"


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        allowed = f"an installed package: pip install 'stepmark[{extra}]'"
        raise ConfigError("to", extra, allowed) from None


def _scalars(rows: list[Row]) -> dict[str, float]:
    """Return finite numbers as {"gemm/llama-3.1-8b/.../column": value}, alike in all runs."""
    scalars: dict[str, float] = {}
    for row in rows:
        named = "/".join(str(row[key]) for key in NAMING if row.get(key) not in (None, ""))
        stem = named[:_LONGEST_STEM]  # or a long list of techniques would cut off the column
        case_id = str(row.get("case_id", ""))[:8]
        stem = f"{stem}/{case_id}" if case_id else stem
        for column, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            name = _tracker_name(f"{stem}/{column}")
            while name in scalars:  # rows that no column distinguishes
                name += "_"
            if math.isfinite(value):
                scalars[name] = float(value)
    return scalars


def _tracker_name(text: str) -> str:
    """Replace characters that some tracker refuses in a metric's name."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in text)[:240]


def _to_tensorboard(rows: list[Row], run: RunInfo, target: Path) -> None:
    files = _package("tensorboard.summary.writer.event_file_writer", "tensorboard")
    events = _package("tensorboard.compat.proto.event_pb2", "tensorboard")
    summaries = _package("tensorboard.compat.proto.summary_pb2", "tensorboard")
    writer = files.EventFileWriter(str(target / run.run_id))
    for tag, value in _scalars(rows).items():
        item = summaries.Summary.Value(tag=tag, simple_value=value)
        writer.add_event(events.Event(step=0, summary=summaries.Summary(value=[item])))
    writer.close()


def _to_wandb(rows: list[Row], run: RunInfo, target: Path) -> None:
    wandb = _package("wandb", "wandb")
    target.mkdir(parents=True, exist_ok=True)
    columns = columns_of(rows)
    data = [[_cell(row.get(name)) for name in columns] for row in rows]
    try:
        tracked = wandb.init(
            project="stepmark", name=run.run_id, dir=str(target), config=codec.to_plain(run)
        )
        tracked.log({"rows": wandb.Table(columns=columns, data=data, allow_mixed_types=True)})
        tracked.summary.update(_scalars(rows))
        tracked.finish()
    except wandb.Error as error:
        raise ConfigError("to", "wandb", f"it failed: {error}") from None


def _to_mlflow(rows: list[Row], run: RunInfo, target: Path) -> None:
    """Log to a folder, or to the server that MLFLOW_TRACKING_URI names."""
    # MLflow 3 refuses folders without this.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = _package("mlflow", "mlflow")
    try:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(target.resolve().as_uri())
        mlflow.set_experiment("stepmark")
        with mlflow.start_run(run_name=run.run_id):
            mlflow.log_params({"torch": run.environment.torch, "command": run.command[:500]})
            mlflow.log_metrics(_scalars(rows))
            mlflow.log_text(_json_text(rows), "rows.json")
            mlflow.log_text(codec.encode_run(run).decode(), "run.json")
    except mlflow.exceptions.MlflowException as error:
        raise ConfigError("to", "mlflow", f"it failed: {error}") from None


def _to_csv(rows: list[Row], run: RunInfo, target: Path) -> None:
    write_csv(rows, target, run.run_id, "output")


def _to_json(rows: list[Row], run: RunInfo, target: Path) -> None:
    write_json({"run": codec.to_plain(run), "rows": rows}, target, run.run_id, "output")


EXPORTERS: dict[str, Callable[[list[Row], RunInfo, Path], None]] = {
    "csv": _to_csv,
    "json": _to_json,
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
}
