"""What stepmark writes is read back, and what rccl-tests writes beside its text."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.collectives.comm_records import comm_run
from tests.tables.records import full_run, run_info

from stepmark.collectives.nccl_tests import output_lines
from stepmark.collectives.peer_formats import json_document
from stepmark.ground.reading import IN_PLACE, Reading, Table
from stepmark.operators.op_columns import rows as op_rows
from stepmark.tables.columns import Row, number
from stepmark.tables.export import write_csv
from stepmark.text_tables import find, tables_of
from stepmark.text_tables.printed_figures import rounding_error
from stepmark.text_tables.validate import validate

from .table_samples import RCCL_NODE, RCCL_NODES, made_up_rows


def compared(table: Table, row: Row, found: Sequence[Reading]) -> None:
    """One of the readings is this row's, within the rounding of print."""
    time_s = number(row, "time_s") or 0.0
    near = []
    for one in found:
        half = 1e-9 * time_s if one.printed is None else rounding_error(one.printed[0]) * 1e-6
        if one.time_s is not None and abs(one.time_s - time_s) <= half + 1e-12:
            near.append(one)
    assert near, (table.title, row["shape"])


def check_round_trip(tables: Sequence[Table]) -> None:
    expected = [row for row in made_up_rows() if row["time_s"] and row["size_bytes"]]
    readings = [(table, one) for table in tables for one in table.readings if one.size_bytes]
    assert len(readings) == len(expected)
    for row in expected:
        same = [
            (table, one)
            for table, one in readings
            if table.collective == row["collective"]
            and one.size_bytes == row["size_bytes"]
            and one.placement == row["placement"]
            and one.dtype == row["dtype"]
            and one.redop == row["redop"]
            and one.root == row["root"]
        ]
        assert same, row["shape"]
        compared(same[0][0], row, [one for _, one in same])


def test_our_text_of_nccl_tests_is_read_back() -> None:
    tables = tables_of("\n".join(output_lines(made_up_rows(), comm_run())), "x")
    check_round_trip(tables)
    assert {table.tool for table in tables} == {"stepmark"}
    assert {"stepmark queued", "stepmark graph"} <= {table.method for table in tables}
    rules = {finding.rule for table in tables for finding in validate(table)}
    assert not rules & {"algbw-time", "busbw-factor", "ranks-factor", "size-count"}
    assert not rules & {"rows-missing"}


def test_our_json_of_nccl_tests_is_read_back() -> None:
    document = json_document(made_up_rows(), comm_run(), ["comm", "all_reduce"])
    tables = tables_of(json.dumps(document), "x")
    check_round_trip(tables)
    assert {table.tool for table in tables} == {"stepmark"}
    rules = {finding.rule for table in tables for finding in validate(table)}
    assert not rules & {"algbw-time", "size-count"}


def test_our_csv_is_read_back(tmp_path: Path) -> None:
    write_csv(made_up_rows(), tmp_path / "comm.csv")
    tables = find(tmp_path / "comm.csv")
    check_round_trip(tables)
    first = tables[0]
    assert (first.tool, first.collective, first.num_ranks) == ("stepmark", "all_reduce", 8)
    rules = {finding.rule for table in tables for finding in validate(table)}
    assert not rules & {"algbw-time", "busbw-factor", "ranks-factor", "size-count"}
    assert "wrong-values" in rules


def test_our_operators_csv_is_read_back(tmp_path: Path) -> None:
    expected = op_rows(full_run(), run_info())
    write_csv(expected, tmp_path / "op.csv")
    tables = find(tmp_path / "op.csv")
    times = [row["time_s"] for row in expected if row["time_s"] and row["rank"] is None]
    found = [one.time_s for table in tables for one in table.readings]
    assert sorted(found, key=repr) == sorted(times, key=repr)
    assert {table.collective for table in tables} == {
        row["family"] for row in expected if row["time_s"]
    }
    assert all(one.label for table in tables for one in table.readings)


def test_rccls_csv_has_ranks_in_its_columns() -> None:
    text = RCCL_NODE + "".join(
        f"0,AllReduce,4,{size},float,sum,{place},{20 + place}.5,{size / 20500:.4f},"
        f"{size / 20500 * 1.5:.4f},0\n"
        for size in (1024, 2048)
        for place in (0, 1)
    )
    (table,) = tables_of(text, "x")
    assert not table.notes
    (cut,) = tables_of(text[:-20], "x")
    assert (len(cut.readings), cut.notes) == (3, ("line 5: 8 of 11 cells: left out",))
    assert (table.tool, table.collective, table.num_ranks) == ("rccl-tests", "all_reduce", 4)
    assert [one.time_s for one in table.readings] == pytest.approx([20.5e-6, 21.5e-6] * 2)
    nodes = (
        RCCL_NODES + '0, "AllGather", 2, 16, 8, 1, 1048576, "float", "none", 1, 50, 20, 19, 0\n'
    )
    (table,) = tables_of(nodes, "x")
    assert (table.collective, table.num_ranks) == ("all_gather", 16)
    assert (table.readings[0].placement, table.readings[0].dtype) == (IN_PLACE, "fp32")


def test_several_gpus_of_a_rank_count_each() -> None:
    text = RCCL_NODES + "0,AllGather,2,4,2,3,1048576,float,none,0,50,20,19,0\n"
    (table,) = tables_of(text, "x")
    assert (table.num_ranks, table.num_ranks_from) == (12, "4 ranks x 3 GPUs, its columns")


def test_rows_of_single_ranks_are_no_second_measurement(tmp_path: Path) -> None:
    flat = op_rows(full_run(), run_info())
    measured = [row for row in flat if row["time_s"]]
    write_csv([*measured, *(row | {"rank": 3} for row in measured)], tmp_path / "op.csv")
    readings = [one for table in find(tmp_path / "op.csv") for one in table.readings]
    assert len(readings) == sum(row["rank"] is None for row in measured)


@pytest.mark.parametrize("as_list", [False, True])
def test_rccls_json_is_lines_or_a_list(as_list: bool) -> None:
    results = [
        {
            "#wrong": "0",
            "algBw": 0.05,
            "busBw": 0.08,
            "gpus": 4,
            "inPlace": place,
            "name": "AllReduce",
            "redop": "sum",
            "size": 1024,
            "time": 19.2 + place,
            "type": "float",
        }
        for place in (0, 1)
    ]
    lines = "\n".join(json.dumps(one) for one in results)
    (table,) = tables_of(json.dumps(results) if as_list else lines, "x")
    assert (table.tool, table.collective, table.num_ranks) == ("rccl-tests", "all_reduce", 4)
    assert [one.time_s for one in table.readings] == pytest.approx([19.2e-6, 20.2e-6])
    assert [one.num_wrong for one in table.readings] == [0, 0]
