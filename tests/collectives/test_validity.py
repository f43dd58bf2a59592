"""What speaks against a figure stands in its row, and the summary counts it."""

import dataclasses
import io

import pytest
from rich.console import Console
from tests.tables.records import COPY, FAST, full_run, gemm, made_up_device, measured, run_info
from tests.training.train_records import fsdp, micro, train_measured, train_run

from stepmark.cases.record import HostLoad, Measured, Telemetry
from stepmark.collectives import comm_columns, nccl_tests
from stepmark.collectives.comm_remarks import comm_lines
from stepmark.model.ops import Copy, Gemm
from stepmark.operators import op_columns, op_printing
from stepmark.runs.summary import train_lines
from stepmark.tables.columns import Row
from stepmark.tables.row_tables import print_rows
from stepmark.training import train_columns

from .comm_records import comm_case, comm_measured, comm_run

CALM = HostLoad(num_cores=8, own_threads=1, runnable_before=8, runnable=8.0, steal=0.04)
LOADS = {
    None: CALM,
    "busy host": dataclasses.replace(CALM, runnable=8.5),
    "busy host ": dataclasses.replace(CALM, runnable_before=9),
    "CPU steal": dataclasses.replace(CALM, steal=0.06),
    " ": HostLoad(num_cores=8, own_threads=1),
    "  ": dataclasses.replace(CALM, runnable=12.0, own_threads=12),
}


def with_load(record: Measured, load: HostLoad | None) -> Measured:
    states = tuple(Telemetry(host=load) for _ in record.samples.seconds)
    return dataclasses.replace(record, telemetry=states)


def with_samples(record: Measured, *seconds: float) -> Measured:
    samples = dataclasses.replace(record.samples, seconds=(seconds,))
    return dataclasses.replace(record, samples=samples)


def op_row(*records: Measured, known: bool = False) -> Row:
    device = made_up_device() if known else None
    return op_columns.rows(records, run_info(), device=device)[0]


@pytest.mark.parametrize("reason", LOADS)
def test_a_busy_host_is_in_every_kind_of_row(reason: str | None) -> None:
    load, expected = LOADS[reason], (reason or "").strip() or None
    comm = with_load(comm_measured(comm_case(num_ranks=2), [[1e-3] * 5] * 2), load)
    train = with_load(train_measured(fsdp(2), [[1.0] * 5] * 2), load)
    assert op_row(with_load(measured(COPY, 1e-3), load))["validity"] == expected
    assert comm_columns.rows([comm], comm_run(2))[0]["validity"] == expected
    assert train_columns.rows([train], train_run(2))[0]["validity"] == expected


def test_records_without_a_load_have_nothing_against_them() -> None:
    assert op_row(with_load(measured(COPY, 1e-3), None))["validity"] is None


def test_launches_do_not_add_up_their_threads() -> None:
    load = dataclasses.replace(CALM, runnable=9.0, own_threads=2)
    launches = [
        dataclasses.replace(
            with_load(comm_measured(comm_case(num_ranks=2), [[1e-3] * 5] * 2), load), launch=n
        )
        for n in range(1, 9)
    ]
    assert comm_columns.rows(launches, comm_run(2))[0]["validity"] == "busy host"


@pytest.mark.parametrize(("width", "expected"), [(0.19, None), (0.21, "spread above 20 %")])
def test_a_spread_above_a_fifth(width: float, expected: str | None) -> None:
    seconds = (1 - width, 1.0, 1 + width) * 7
    assert op_row(with_samples(measured(COPY, 1.0), *seconds))["validity"] == expected
    comm = comm_measured(comm_case(num_ranks=2), [list(seconds)] * 2)
    assert comm_columns.rows([comm], comm_run(2))[0]["validity"] == expected


def test_launches_far_apart_are_a_spread() -> None:
    launches = [
        comm_measured(comm_case(num_ranks=2), [[time_s] * 5] * 2, launch=number)
        for number, time_s in enumerate((1e-3, 1.3e-3), 1)
    ]
    assert comm_columns.rows(launches, comm_run(2))[0]["validity"] == "spread above 20 %"


def test_the_optimizer_of_a_cycle_is_no_spread() -> None:
    """Every second sample has one and takes twice as long."""
    steady = train_measured(micro(2, grad_accum=2), [[1.0, 2.0] * 8] * 2)
    assert train_columns.rows([steady], train_run(2))[0]["validity"] is None
    uneven = train_measured(micro(2, grad_accum=2), [[1.0, 2.0, 3.0, 4.0] * 4] * 2)
    assert train_columns.rows([uneven], train_run(2))[0]["validity"] == "spread above 20 %"


def test_a_case_has_no_ratio_to_itself() -> None:
    slow, fast = gemm(Gemm(m=512, n=512, k=512)), gemm(FAST)
    alone = op_columns.rows([measured(fast, 1e-3)], run_info())
    assert (alone[0]["pct_ceiling"], alone[0]["ceiling"] is not None) == (None, True)
    both = op_columns.rows([measured(fast, 1e-3, 1.1e-3), measured(slow, 1e-3)], run_info())
    shares = [row["pct_ceiling"] for row in both]
    assert shares[:3] == [None] * 3
    assert isinstance(shares[3], float)


def test_a_figure_above_its_ceiling() -> None:
    norm = next(r for r in full_run() if isinstance(r, Measured) and r.case.family == "norm")
    row = op_columns.rows([norm, measured(COPY, 10.0)], run_info())[0]
    assert row["pct_ceiling"] > 101
    assert row["validity"] == "above the measured ceiling"
    assert op_row(measured(COPY, 1e-5), known=True)["validity"] == "above limit"


@pytest.mark.parametrize(
    ("num_bytes", "num_sets", "clock", "expected"),
    [
        (2**20, 4, "event-rotate/1", "cache not defeated"),
        (25_000_000, 2, "graph-rotate/1", "cache not defeated"),  # exactly twice the cache
        (25_000_000, 3, "graph-rotate/1", None),
        (2**20, 4, "event-flush/2", None),
        (2**20, 1, "event-hot/1", None),
        (2**30, 4, "event-rotate/1", None),
    ],
)
def test_operands_that_fit_in_caches(
    num_bytes: int, num_sets: int, clock: str, expected: str | None
) -> None:
    case = dataclasses.replace(COPY, op=Copy(num_bytes=num_bytes))
    record = measured(case, 1.0, num_sets=num_sets)
    record = dataclasses.replace(
        record, samples=dataclasses.replace(record.samples, method=clock)
    )
    row = op_row(record, known=True)
    assert (row["validity"], row["sets"]) == (expected, num_sets)
    assert op_row(record)["validity"] is None  # a device whose cache is not known


def test_rows_in_cache_are_named_under_the_table() -> None:
    small = [dataclasses.replace(COPY, op=Copy(num_bytes=2**i)) for i in range(10, 20)]
    records = [measured(case, 1.0, num_sets=1) for case in (*small, COPY)]
    table = op_columns.rows(records, run_info(), device=made_up_device())
    text = io.StringIO()
    print_rows(table, Console(file=text, width=240), op_columns.OP_COLUMNS)
    (line,) = [each for each in text.getvalue().splitlines() if "together" in each]
    assert line.startswith("cache not defeated: all operand sets together do not exceed twice")
    assert line.count("(1 sets)") == 8
    assert line.endswith(", and 2 more")


def test_summaries_count_each_reason() -> None:
    doubtful = with_load(with_samples(measured(COPY, 1.0), 0.5, 1.0, 1.5), LOADS["busy host"])
    table = op_columns.rows([doubtful, measured(gemm(FAST), 1.0)], run_info())
    counted = "doubtful: busy host 1, spread above 20 % 1 (of 2)"
    assert op_printing.doubtful_lines(table)[-1] == counted
    comm = with_load(
        comm_measured(comm_case(num_ranks=2), [[1e-3] * 5] * 2), LOADS["CPU steal"]
    )
    table = comm_columns.rows([comm], comm_run(2))
    assert "doubtful   CPU steal 1 (of 1)" in comm_lines(table)
    doubt = "# doubtful: CPU steal 1 (of 1); --wide shows which"
    assert doubt in nccl_tests.output_lines(table, comm_run(2))
    train = with_load(train_measured(fsdp(2), [[1.0] * 5] * 2), LOADS["busy host"])
    table = train_columns.rows([train], train_run(2))
    assert "doubtful   busy host 1 (of 1)" in train_lines(table)
    calm = op_columns.rows([measured(COPY, 1.0)], run_info())
    assert op_printing.doubtful_lines(calm) == []


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [((0.5, 1.0, 1.5), "40.0"), ((0.1, 1.0, 9.0), "unknown"), ((1.0,), "")],
)
def test_a_spread_above_the_time_is_unknown(seconds: tuple[float, ...], shown: str) -> None:
    (column,) = (each for each in op_columns.OP_COLUMNS if each.name == "spread_pct")
    (row,) = op_columns.rows([with_samples(measured(COPY, 1.0), *seconds)], run_info())
    assert column.shown(row) == shown
