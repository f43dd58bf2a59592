"""Rows become the data frames of whatever is installed."""

import sys
from types import SimpleNamespace

import pytest

import stepmark as sm

ROWS = [
    {"name": "<gemm>", "time_s": 0.0015, "n": 1, "mixed": 1, "odd": "a", "more_bytes": 2048},
    {"name": None, "time_s": None, "n": 2, "mixed": 2.5, "odd": 3, "more_bytes": None},
]
PACKAGES = ("pandas", "polars", "pyarrow")
METHODS = {"pandas": "to_pandas", "polars": "to_polars", "pyarrow": "to_arrow"}


@pytest.mark.parametrize("package", PACKAGES)
def test_without_the_package_it_says_what_to_do(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    frame = getattr(sm.Table(ROWS), METHODS[package])
    with pytest.raises(sm.StepmarkError, match=f"^{package} is not installed: use pip install"):
        frame()
    with pytest.raises(ImportError, match=r"or rows\(\), which needs nothing\.$"):
        frame()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_column_has_one_type(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package gets lists by name of column, whichever it is."""
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(DataFrame=dict, table=dict))
    columns = getattr(sm.Table(ROWS), METHODS[package])()
    assert columns == {
        "name": ["<gemm>", None],
        "time_s": [0.0015, None],
        "n": [1, 2],
        "mixed": [1.0, 2.5],
        "odd": ["a", "3"],
        "more_bytes": [2048, None],
    }
    assert [type(value) for value in columns["mixed"]] == [float, float]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_installed_makes_a_frame(package: str) -> None:
    pytest.importorskip(package)
    frame = getattr(sm.Table(ROWS), METHODS[package])()
    assert frame.shape == (2, 6)
    assert list(frame["n"]) == [1, 2] or frame["n"].to_pylist() == [1, 2]


def test_html_has_units_and_escapes_text() -> None:
    html = sm.Table(ROWS)._repr_html_()
    for words in ("<th>name</th>", "<th>time</th>", "&lt;gemm&gt;", "1.5 ms", "2 KiB"):
        assert words in html
    assert "<gemm>" not in html


def test_html_leaves_out_empty_columns_and_says_how_many_rows_are_left() -> None:
    html = sm.Table([{"a": 1, "b": None}] * 45)._repr_html_()
    assert "<th>b</th>" not in html
    assert html.count("<tr>") == 41
    assert "5 more rows" in html


def test_it_is_a_sequence_of_rows() -> None:
    table = sm.Table(ROWS)
    assert list(table) == table.rows() == ROWS
    assert len(table) == 2
    assert repr(table) == "<Table: 2 rows>"
