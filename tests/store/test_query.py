"""Views over all runs agree with the records that Python reads."""

import dataclasses
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from tests.store.test_codec import ALL
from tests.store.test_runs import INFO, measured
from tests.store.writers import new_run

from stepmark.cases.record import Measured
from stepmark.ground.errors import ConfigError
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.store import query as queries
from stepmark.store import view
from stepmark.store.reader import list_runs, read, read_records
from stepmark.tables import export


def sql(root: Path, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    return queries.sql([read(path) for path in list_runs(root)], query)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    # Signs of file patterns, and a quote, in the folder's name.
    root = tmp_path / "it's [a] run*s"
    for name in ("a", "b"):
        info = dataclasses.replace(INFO, run_id=name)
        with new_run(root, info) as writer:
            for record in ALL if name == "a" else [measured(n=4), measured(8, n=5001)]:
                writer.append(dataclasses.replace(record, run_id=name))
    return root


def test_one_row_per_record_of_every_family(root: Path) -> None:
    _, rows = sql(root, "SELECT kind, family, backend, op FROM records WHERE run_id = 'a'")
    found = sorted((kind, family, backend) for kind, family, backend, _ in rows)
    assert found == sorted((r.kind, r.case.family, r.case.backend) for r in ALL)
    assert all(json.loads(op)["family"] == family for _, family, _, op in rows)


def test_the_median_is_that_of_the_records(root: Path) -> None:
    _, rows = sql(root, "SELECT run_id, case_id, median_s, n, method FROM records WHERE n > 0")
    found = {(run_id, case_id): rest for run_id, case_id, *rest in rows}
    expected = {}
    for name in ("a", "b"):
        for record in read_records(root / name):
            if isinstance(record, Measured):
                summary = summarize(slowest_per_sample(record.samples.seconds))
                values = [pytest.approx(summary.median), summary.n, "graph-rotate/1"]
                expected[name, record.case.case_id] = values
    assert len(expected) == 14
    assert found == expected


def test_fields_of_an_operator_and_labels(root: Path) -> None:
    query = "SELECT op->>'num_groups', phase, dtype, model, role FROM records WHERE family = ?"
    _, rows = sql(root, query.replace("?", "'grouped-gemm'"))
    assert rows == [("8", "wgrad", "bf16", "llama-3.1-8b", "attention.qkv")] * 3
    _, rows = sql(root, "SELECT reason, cause FROM records WHERE family='copy' AND run_id='a'")
    assert sorted(rows, key=str) == [("needs 2 GiB", None), (None, "oom"), (None, None)]


def test_runs_view_joins(root: Path) -> None:
    columns, rows = sql(
        root,
        "SELECT device_name, num_devices, driver, count(*) AS c FROM runs"
        " JOIN records USING (run_id) GROUP BY ALL",
    )
    assert columns == ["device_name", "num_devices", "driver", "c"]
    assert rows == [("NVIDIA H200", 2, "570.1", len(ALL) + 2)]


def test_a_line_being_written_is_left_out(root: Path) -> None:
    with (root / "b" / "records.jsonl").open("ab") as file:
        file.write(b'{"schema":1,"kind":"measu')
    assert sql(root, "SELECT count(*) FROM records WHERE run_id = 'b'")[1] == [(2,)]


def test_no_runs_are_empty_views(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        for name in ("rows", "records", "runs"):
            columns, rows = sql(root, f"SELECT * FROM {name}")
            assert rows == []
            assert "run_id" in columns
    new_run(tmp_path, INFO).close()
    assert sql(tmp_path, "SELECT * FROM records")[1] == []
    assert sql(tmp_path, "SELECT count(*) FROM runs")[1] == [(1,)]


@pytest.mark.parametrize("query", ["SELEC 1", "SELECT x FROM records", "SELECT 1/'a'", "", "("])
def test_bad_sql_is_one_line(tmp_path: Path, query: str) -> None:
    with pytest.raises(ConfigError, match="sql") as caught:
        sql(tmp_path, query)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{target}'",
        "SELECT * FROM read_text('{source}')",
        "ATTACH '{target}'",
        "SET enable_external_access = true",
        "CALL enable_logging(storage='file', storage_path='{target}')",
        "FROM enable_logging(storage='stdout')",
        "SET log_query_path = '{target}'",
        "SET profiling_output = '{target}'",
        "PRAGMA enable_profiling = 'json'",
        "SET temp_directory = '{target}'",
        "SET secret_directory = '{target}'",
        "CREATE PERSISTENT SECRET s (TYPE http)",
        "SET threads = 100000",
        "INSTALL httpfs",
        "EXPORT DATABASE '{target}'",
        "SELECT '\udcff'",
    ],
)
def test_a_query_reaches_no_other_file(root: Path, tmp_path: Path, query: str) -> None:
    source, target = tmp_path / "secret.txt", tmp_path / "made"
    source.write_text("secret")
    with pytest.raises(ConfigError, match="sql"):
        sql(root, query.format(source=source, target=target))
    assert not target.exists()


PUBLISHED = Path(__file__).parents[2] / "results"
# Of each kind of case, with several ranks, launches, places in models, and steps that failed.
RUNS = (
    "h200-x2-gemm",
    "h200-x4-comm-contention",
    "h200-x4-comm-launches",
    "h200-x4-train-gpt2-1.5b-ddp",
    "h100-predictions-1",
    "h100-replays/llama-eager/replays/20261124-181403-e8b8",
)


def published(name: str) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The rows that `runs show` writes, and those of the views."""
    shown = json.loads(json.dumps(export.finite(view.view(PUBLISHED / name).all_rows)))
    runs = [read(PUBLISHED / name)]
    found = {}
    for each in ("rows", "records"):
        names, values = queries.sql(runs, f"SELECT * FROM {each}")
        found[each] = [dict(zip(names, row, strict=True)) for row in values]
    return shown, found


@pytest.mark.parametrize("name", RUNS)
def test_sql_and_show_agree_on_every_column(name: str) -> None:
    shown, found = published(name)
    assert len(shown) == len(found["rows"])
    num_figures = 0
    for row, other in zip(shown, found["rows"], strict=True):
        for column, value in row.items():
            is_plain = not isinstance(value, list | dict)
            assert other[column] == (value if is_plain else json.dumps(value)), column
            num_figures += isinstance(value, int | float)
        assert all(other[column] is None for column in other.keys() - row)
    assert num_figures > 5 * len(shown)


# A record alone has no other run beside it, no ceiling of this run, no pooled launches.
OF_THE_RUN = ("pct_reference", "ceiling", "ceiling_unit", "pct_ceiling", "slowdown", "validity")


@pytest.mark.parametrize(
    "name",
    [
        "h200-x4-train-gpt2-1.5b-ddp",
        "h200-x2-gemm",
        "h100-replays/llama-eager/replays/20261124-181403-e8b8",
    ],
)
def test_a_record_has_the_figures_of_its_row(name: str) -> None:
    shown, found = published(name)
    rows = {row["case_id"]: row for row in reversed(shown) if row.get("rank") is None}
    assert len(rows) == len(found["records"])
    for record in found["records"]:
        row = rows[record["case_id"]]
        assert record["median_s"] == row.get("time_s", row.get("iteration_s"))
        for column in (record.keys() & row.keys()) - {*OF_THE_RUN, "message"}:
            assert record[column] == row[column], column


def test_only_named_views_are_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(queries._VIEWS, "records", lambda runs: pytest.fail("made"))
    assert sql(root, "SELECT count(*) FROM runs")[1] == [(2,)]
    monkeypatch.undo()
    assert sql(root, "SHOW TABLES")[1] == [("records",), ("rows",), ("runs",)]


def test_too_little_address_space_is_a_sentence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (500 * 2**20, -1))
    with pytest.raises(ConfigError, match="ulimit -v: '512000' is invalid"):
        sql(root, "SELECT 1")
