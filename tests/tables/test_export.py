"""Exports hold every row and every value; a target is whole or untouched."""

import csv
import importlib
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.store.test_runs import INFO

from stepmark.ground.errors import ConfigError
from stepmark.store.run_export import EXPORTERS, _scalars, export
from stepmark.tables.export import write_csv, write_json, write_tables

ROWS: list[dict[str, object]] = [
    {"family": "gemm", "m": 4096, "median_s": 1.5e-3, "ok": True, "note": 'a,"b"\nc'},
    {"family": "copy", "m": None, "median_s": math.inf, "extra": [1, 2], "big": 2**70},
]


def test_csv_reads_back(tmp_path: Path) -> None:
    write_csv(ROWS, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        back = list(csv.DictReader(file))
    assert list(back[0]) == ["family", "m", "median_s", "ok", "note", "extra", "big"]
    assert [float(row["median_s"]) for row in back] == [1.5e-3, math.inf]
    assert back[0]["note"] == 'a,"b"\nc'
    assert (back[1]["m"], back[1]["ok"], back[1]["extra"]) == ("", "", "[1, 2]")


def test_json_is_valid_without_inf(tmp_path: Path) -> None:
    write_json(ROWS, tmp_path / "a.json")
    back = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert back == [ROWS[0], {**ROWS[1], "median_s": "inf"}]


def test_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    write_json(ROWS[:1], "-")
    assert json.loads(capsys.readouterr().out) == ROWS[:1]
    write_tables({"a": ROWS[:1], "b": [{"x": 1}]}, "-", "csv")
    assert capsys.readouterr().out.endswith("# b\nx\n1\n")


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_folder_gets_a_file_per_table(tmp_path: Path, kind: Any) -> None:
    tables = {"a": ROWS, "b": ROWS[:1]}
    for target in (tmp_path, f"{tmp_path}/new/deep/"):
        write_tables(tables, target, kind)
        assert sorted(p.name for p in Path(target).glob("*.*")) == [f"a.{kind}", f"b.{kind}"]


def test_several_tables_in_a_file(tmp_path: Path) -> None:
    write_tables({"a": [{"x": 1}], "b": []}, tmp_path / "t.json", "json")
    assert json.loads((tmp_path / "t.json").read_text()) == {"a": [{"x": 1}], "b": []}
    with pytest.raises(ConfigError, match="2 tables"):
        write_tables({"a": ROWS, "b": []}, tmp_path / "t.csv", "csv")
    write_tables({"a": [{"x": 1}]}, tmp_path / "t.csv", "csv")
    assert (tmp_path / "t.csv").read_text() == "x\n1\n"


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space"):
        write_csv(ROWS, file)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("target", ["/proc/nowhere/a.csv", "/dev/full", "/proc/x/"])
def test_where_nothing_can_be_written(target: str) -> None:
    with pytest.raises(ConfigError, match=r"^csv ") as caught:
        write_csv(ROWS, target)
    assert "\n" not in str(caught.value)


def test_a_device_is_written_not_replaced() -> None:
    write_csv(ROWS, "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_parquet_keeps_types_and_values(tmp_path: Path) -> None:
    file = tmp_path / "it's.parquet"
    export(ROWS, INFO, file, "parquet")
    with duckdb.connect() as connection:
        cursor = connection.execute("SELECT * FROM read_parquet(?)", [str(file)])
        names = [column[0] for column in cursor.description]
        back = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    assert back[0] == {**ROWS[0], "extra": None, "big": None}
    text = {"extra": "[1, 2]", "big": float(2**70), "ok": None, "note": None}
    assert back[1] == {**ROWS[1], **text}
    with pytest.raises(ConfigError, match="parquet"):
        export([], INFO, file, "parquet")
    with pytest.raises(ConfigError, match="output"):
        export(ROWS, INFO, tmp_path / "absent" / "a.parquet", "parquet")


def test_csv_and_json_exports(tmp_path: Path) -> None:
    export(ROWS, INFO, tmp_path, "csv")
    assert (tmp_path / f"{INFO.run_id}.csv").is_file()
    export(ROWS, INFO, tmp_path / "a.json", "json")
    back = json.loads((tmp_path / "a.json").read_text())
    assert back["run"]["environment"]["torch"] == INFO.environment.torch
    assert len(back["rows"]) == 2


def test_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="csv, json, parquet, tensorboard, wandb, mlflow"):
        export(ROWS, INFO, tmp_path / "x", "excel")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    real = importlib.import_module

    def missing(name: str) -> types.ModuleType:
        if name.startswith(kind):
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=rf"pip install 'stepmark\[{kind}\]'"):
        export(ROWS, INFO, tmp_path / "x", kind)
    assert kind in EXPORTERS


class Recorder:
    """Stands for a tracker's module: notes every call, returns itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> "Recorder":
            self.calls.append((name, args or kwargs))
            return self

        return self if name == "summary" else call

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None: ...


def test_trackers_get_every_finite_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    wandb, mlflow = Recorder(), Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    export(ROWS, INFO, tmp_path / "w", "wandb")
    export(ROWS, INFO, tmp_path / "m", "mlflow")
    numbers = [4096.0, 1.5e-3, float(2**70)]
    assert list(dict(wandb.calls)["update"][0].values()) == numbers
    assert list(dict(mlflow.calls)["log_metrics"][0].values()) == numbers
    assert dict(wandb.calls)["finish"] == {}


def test_names_in_a_tracker_tell_rows_apart_and_lose_none() -> None:
    row: dict[str, object] = {"family": "gemm", "shape": "4x4", "case_id": "0123456789", "n": 7}
    assert _scalars([row]) == {"gemm/4x4/01234567/n": 7.0}
    assert len(_scalars([row, row, {**row, "case_id": "f"}])) == 3
