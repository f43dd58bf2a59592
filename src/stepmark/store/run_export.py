"""A run's rows to a file, or to a tracker that is installed: TensorBoard, W&B, MLflow."""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from stepmark.cases.record import RunInfo
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.files import config_errors
from stepmark.ground.packages import load_package
from stepmark.store import codec
from stepmark.tables.columns import Row
from stepmark.tables.export import (
    cell,
    json_text,
    names_of,
    write_csv,
    write_json,
    write_parquet,
)

_KINDS = ("csv", "json", "parquet", "tensorboard", "wandb", "mlflow")

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
    if kind not in _KINDS:
        raise not_one_of("to", kind, _KINDS)
    with config_errors(target):
        if kind == "parquet":
            write_parquet(rows, target, types or {})
        else:
            EXPORTERS[kind](rows, run, target)


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
            # Without characters that some tracker refuses.
            name = re.sub(r"[^\w\-. /]", "_", f"{stem}/{column}")[:240]
            while name in scalars:  # rows that no column distinguishes
                name += "_"
            if math.isfinite(value):
                scalars[name] = float(value)
    return scalars


def _to_tensorboard(rows: list[Row], run: RunInfo, target: Path) -> None:
    files = load_package("tensorboard.summary.writer.event_file_writer")
    events = load_package("tensorboard.compat.proto.event_pb2")
    summaries = load_package("tensorboard.compat.proto.summary_pb2")
    writer = files.EventFileWriter(str(target / run.run_id))
    for tag, value in _scalars(rows).items():
        item = summaries.Summary.Value(tag=tag, simple_value=value)
        writer.add_event(events.Event(step=0, summary=summaries.Summary(value=[item])))
    writer.close()


def _to_wandb(rows: list[Row], run: RunInfo, target: Path) -> None:
    wandb = load_package("wandb")
    target.mkdir(parents=True, exist_ok=True)
    columns = names_of(rows)
    data = [[cell(row.get(name)) for name in columns] for row in rows]
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
    mlflow = load_package("mlflow")
    try:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(target.resolve().as_uri())
        mlflow.set_experiment("stepmark")
        with mlflow.start_run(run_name=run.run_id):
            mlflow.log_params({"torch": run.environment.torch, "command": run.command[:500]})
            mlflow.log_metrics(_scalars(rows))
            mlflow.log_text(json_text(rows), "rows.json")
            mlflow.log_text(codec.encode_run(run).decode(), "run.json")
    except mlflow.exceptions.MlflowException as error:
        raise ConfigError("to", "mlflow", f"it failed: {error}") from None


EXPORTERS: dict[str, Callable[[list[Row], RunInfo, Path], None]] = {
    "csv": lambda rows, run, target: write_csv(rows, target, run.run_id, "output"),
    "json": lambda rows, run, target: write_json(
        {"run": codec.to_plain(run), "rows": rows}, target, run.run_id, "output"
    ),
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
}
