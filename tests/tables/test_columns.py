"""Declared columns: names are unique, units agree where a name is used twice, values fit."""

from pathlib import Path

import duckdb
import pytest

from stepmark.collectives.comm_columns import COMM_COLUMNS
from stepmark.operators.op_columns import OP_COLUMNS
from stepmark.store.run_export import export
from stepmark.store.view import sql_types, view
from stepmark.tables.columns import EVERYWHERE, Column, Unit, View, rows_of
from stepmark.tables.table import aligned, fitted
from stepmark.training.train_columns import TRAIN_COLUMNS

TABLES = {"op": OP_COLUMNS, "comm": COMM_COLUMNS, "train": TRAIN_COLUMNS}
RESULTS = Path(__file__).parents[2] / "results"
RUNS = ("h200-attention-burst", "h200-x4-comm-torch-api", "h200-x4-train-proxy-ddp")


@pytest.mark.parametrize("name", TABLES)
def test_names_and_titles_are_unique(name: str) -> None:
    columns: tuple[Column[object], ...] = TABLES[name]  # type: ignore[assignment]
    assert len({column.name for column in columns}) == len(columns)
    for one in View:
        titles = [column.title for column in columns if one in column.views]
        assert len(set(titles)) == len(titles)


def test_a_name_has_one_sql_type() -> None:
    found: dict[str, set[str]] = {}
    for columns in TABLES.values():
        for column in columns:
            found.setdefault(column.name, set()).add(column.unit.sql_type)
    assert {name: types for name, types in found.items() if len(types) > 1} == {}


@pytest.mark.parametrize("name", RUNS)
def test_values_are_of_the_declared_type(name: str, tmp_path: Path) -> None:
    seen = view(RESULTS / name)
    table = seen.rows + seen.comm_rows + seen.train_rows
    kinds = {"VARCHAR": str, "BOOLEAN": bool, "BIGINT": int, "DOUBLE": int | float}
    types = sql_types()
    for row in table:
        for key, value in row.items():
            assert value is None or isinstance(value, kinds[types[key]]), key
    export(table, seen.run, tmp_path / "x.parquet", "parquet", types)
    described = duckdb.sql(f"DESCRIBE SELECT * FROM '{tmp_path}/x.parquet'").fetchall()
    assert {key: kind for key, kind, *_ in described} == {key: types[key] for key in table[0]}


@pytest.mark.parametrize(
    ("unit", "value", "shown"),
    [
        (Unit.SECONDS, 1.5e-3, "1.5 ms"),
        (Unit.BYTES, 1536, "1.5 KiB"),
        (Unit.PERCENT, 12.345, "12.3"),
        (Unit.RATIO, 1.0, "1.000"),
        (Unit.ERROR, 0.00123, "1.2e-03"),
        (Unit.NUMBER, 123456.7, "123457"),
        (Unit.COUNT, 12, "12"),
        (Unit.FLAG, True, "True"),
        (Unit.TEXT, "bf16", "bf16"),
        *((unit, None, "") for unit in Unit),
    ],
)
def test_a_unit_says_how_its_values_read(unit: Unit, value: object, shown: str) -> None:
    assert unit.show(value) == shown


def test_a_row_has_every_column_in_order() -> None:
    columns = [Column("b", lambda one: one), Column("a", lambda one: None, views=EVERYWHERE)]
    assert [list(row.items()) for row in rows_of(columns, [1, 2])] == [
        [("b", 1), ("a", None)],
        [("b", 2), ("a", None)],
    ]


CELLS = [
    ["pass", "collective", "dtype", "calls", "bytes", "on the bus"],
    ["forward", "all_gather", "bf16", "32", "13 GiB", "11.38 GiB"],
    ["backward", "all_gather", "bf16", "32", "13 GiB", "11.38 GiB"],
    ["backward", "reduce_scatter", "fp32", "33", "26 GiB", "22.75 GiB"],
]
IS_RIGHT = [False, False, False, True, True, True]


@pytest.mark.parametrize("width", range(24, 80))
def test_a_table_in_parts_fits_and_has_every_cell(width: int) -> None:
    lines = [*fitted(["Title", *aligned(CELLS, IS_RIGHT), "", "note"], width)]
    assert lines[0] == "Title"
    assert lines[-2:] == ["", "note"]
    assert max(map(len, lines)) <= width
    for place in range(len(CELLS[0])):
        assert any(CELLS[0][place] in line and CELLS[0][0] in line for line in lines), place
    for row in CELLS[1:]:
        shown = [line for line in lines if line.startswith(row[0])]
        assert all(any(cell in line for line in shown) for cell in row)


def test_parts_repeat_the_columns_that_tell_rows_apart() -> None:
    lines = [*fitted(aligned(CELLS, IS_RIGHT), 52)]
    heads = [line.split() for line in lines if line.startswith("pass")]
    assert len(heads) == 2
    assert all(words[:2] == ["pass", "collective"] for words in heads)


def test_lines_that_fit_stay_as_they_are() -> None:
    table = aligned(CELLS, IS_RIGHT)
    assert [*fitted(table, 100)] == table
    assert [*fitted(["a line of text that no width changes"], 5)] == [
        "a line of text that no width changes"
    ]
