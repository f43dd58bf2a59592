"""Records of collectives: what is written is what is read, and what SQL sees of them."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cases.comm_samples import PLAIN, SAMPLES
from tests.store.test_query import sql
from tests.store.test_runs import INFO
from tests.store.writers import new_run

from stepmark.cases.comm_case import CommCase
from stepmark.cases.record import (
    SCHEMA,
    Arrivals,
    Beside,
    Check,
    CommMemory,
    Failed,
    Measured,
    Record,
    Samples,
    Skipped,
    Telemetry,
)
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.model.collectives import Registration
from stepmark.store import codec
from stepmark.store.commands import command_of

GOLDEN = Path(__file__).parents[1] / "data" / "records-schema2.jsonl"


def records_of(case: CommCase) -> list[Record]:
    """Measured in the third launch, on as many ranks as take part; skipped; failed."""
    n = len(case.members)
    check = Check(
        max_rel_err=0.0, tolerance=0.0, num_wrong=0, num_compared=4096, reference="exact"
    )
    measured = Measured(
        run_id="20261121-010000-cd34",
        case=case,
        samples=Samples(
            seconds=tuple((1e-3 + rank * 1e-6, 2.5e-4) for rank in range(n)),
            method=f"{case.mode}/1",
            calls_per_sample=20,
            num_sets=3,
            wall_s=0.75,
        ),
        checks=(check,) * n,
        telemetry=(Telemetry(power_w=312.5),) * n,
        backend_run="nccl 2.28.9",
        peak_memory_bytes=2**31,
        started_at=1795212780.125,
        launch=3,
        arrivals=Arrivals(
            late_s=tuple((0.0, rank * 1e-6) for rank in range(n)),
            error_s=None if case.split else 2e-6,
            issue_s=(8e-6,) * n,
            warmup_calls=5,
        ),
        beside=Beside(
            alone_s=((1e-3, 1.1e-3),) * n, together_s=((2e-3,),) * n, backend_run="cublas"
        )
        if case.beside
        else None,
    )
    skipped = Skipped(run_id="r", case=case, reason="needs 2 GiB", needed_bytes=1, launch=2)
    failed = Failed(
        run_id="r",
        case=case,
        cause="lost rank",
        message="rank 1 died",
        ranks=(1,),
        traceback="stacks\nof all",
        launch=2,
    )
    return [measured, skipped, failed]


ALL = [record for case in SAMPLES.values() for record in records_of(case)]


@pytest.mark.parametrize("record", ALL, ids=lambda r: f"{r.case.family}-{r.kind}")
def test_what_is_written_is_read(record: Record) -> None:
    line = codec.encode(record)
    back = codec.decode(line)
    assert back == record
    assert back.comm.case_id == record.comm.case_id
    assert codec.encode(back) == line


@given(
    late_s=st.lists(st.lists(st.floats(0, 1e9), max_size=3).map(tuple), max_size=3).map(tuple),
    error_s=st.none() | st.floats(allow_nan=False),
    skew_s=st.floats(0, 10),
    beside=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_any_content_survives(
    late_s: tuple[tuple[float, ...], ...], error_s: float | None, skew_s: float, beside: str
) -> None:
    case = dataclasses.replace(PLAIN, skew_s=skew_s, beside=beside)
    measured = records_of(case)[0]
    assert isinstance(measured, Measured)
    arrivals = Arrivals(late_s=late_s, error_s=error_s, issue_s=())
    record = dataclasses.replace(measured, arrivals=arrivals)
    back = codec.decode(codec.encode(record))
    assert back == record
    assert back.case.case_id == case.case_id


def test_registration_and_memory_survive() -> None:
    case = dataclasses.replace(PLAIN, registration=Registration.SYMMETRIC, unalign=2)
    memory = CommMemory(init_bytes=3, buffer_bytes=2, call_bytes=1)
    record = dataclasses.replace(ALL[0], case=case, comm_memory=memory)
    assert codec.decode(codec.encode(record)) == record


def test_a_line_stands_alone() -> None:
    plain = json.loads(codec.encode(ALL[0]))
    assert plain["schema"] == SCHEMA
    assert plain["case_id"] == PLAIN.case_id
    assert plain["command"] == command_of(PLAIN)
    assert plain["case"]["collective"] == "all_reduce"


def test_golden_of_schema_2() -> None:
    lines = GOLDEN.read_bytes().splitlines()
    assert [codec.decode(line) for line in lines] == [
        dataclasses.replace(record, schema=2) for record in ALL
    ]
    # A case keeps its identity, or old runs could not be resumed or compared.
    assert [json.loads(line)["case_id"] for line in lines] == [r.case.case_id for r in ALL]


def test_a_record_tells_what_kind_of_case_it_has() -> None:
    assert ALL[0].comm is ALL[0].case
    with pytest.raises(TypeError, match="all_reduce is not an operator"):
        _ = ALL[0].operator


def columns_of(record: Record) -> tuple[object, ...]:
    """What SQL should see, from the record itself."""
    one, median_s, n = record.comm, None, None
    if isinstance(record, Measured):
        summary = summarize(slowest_per_sample(record.samples.seconds))
        median_s, n = pytest.approx(summary.median), summary.n
    return (
        *(record.kind, one.case_id, one.family, one.dtype, one.backend, one.device),
        *(one.num_ranks, one.count, one.redop, one.in_place, one.mode, one.api),
        *(record.launch, getattr(record, "cause", None), median_s, n),
    )


def test_sizes_and_rates_of_collectives(tmp_path: Path) -> None:
    """busbw = size x factor / time, as nccl-tests; size and factor from the case itself."""
    with new_run(tmp_path, dataclasses.replace(INFO, run_id="a")) as writer:
        for record in ALL:
            writer.append(dataclasses.replace(record, run_id="a"))
    _, found = sql(
        tmp_path,
        "SELECT case_id, size_bytes, busbw_gb_s, median_s FROM records WHERE median_s > 0",
    )
    by_id = {record.case.case_id: record.comm for record in ALL}
    assert found
    for case_id, size_bytes, busbw, median_s in found:
        case = by_id[case_id]
        assert size_bytes == case.message_bytes
        bus_bytes = size_bytes * case.busbw_factor  # none within one rank
        assert busbw == (pytest.approx(bus_bytes / median_s / 1e9) if bus_bytes else None)


def test_columns_of_collectives(tmp_path: Path) -> None:
    with new_run(tmp_path, dataclasses.replace(INFO, run_id="a")) as writer:
        for record in ALL:
            writer.append(dataclasses.replace(record, run_id="a"))
    _, rows = sql(
        tmp_path,
        "SELECT kind, case_id, family, dtype, backend, device, num_ranks, count, redop,"
        " in_place, mode, api, launch, cause, median_s, n FROM records",
    )
    expected = [columns_of(record) for record in ALL]
    key = lambda row: (row[0], row[1])  # noqa: E731
    assert sorted(rows, key=key) == sorted(expected, key=key)
