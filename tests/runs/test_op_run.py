"""How users' own functions of one run are compared below its table."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.tables.records import measured, run_info

from stepmark.cases.case import OpCase
from stepmark.cases.record import Measured, Record, Skipped
from stepmark.ground.dtypes import DType
from stepmark.model.ops import Custom
from stepmark.operators.op_columns import rows
from stepmark.operators.op_printing import missing_launches
from stepmark.runs import op_run


def case(backend: str, tokens: int, bytes_moved: int = 8) -> OpCase:
    arguments = f"tokens={tokens}"
    op = Custom(digest="0", arguments=arguments, dtype=DType.BF16, bytes_moved=bytes_moved)
    return OpCase(op=op, backend=backend)


def launches(
    backend: str, tokens: int, *times_s: float, method: str = "event-rotate/2", wrong: int = 0
) -> Iterable[Measured]:
    for number, time_s in enumerate(times_s, 1):
        record = measured(case(backend, tokens), time_s, num_wrong=wrong)
        samples = replace(record.samples, method=method)
        yield replace(record, launch=number, samples=samples)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_wrong_results_are_those_of_the_function_and_launches_are_not_counted() -> None:
    records: list[Record] = []
    for tokens in (1, 2):
        records += launches("right", tokens, 1e-3, 1e-3, 1e-3)
    records += launches("factor", 1, 1e-3, 1e-3, 1e-3, wrong=5)
    records += launches("factor", 2, 1e-3, 1e-3, 1e-3)
    right, factor = op_run.functions(records)
    assert (right.name, right.notes) == ("right", ())
    assert factor.notes == ("wrong results of 1 case are left out",)


def test_functions_that_different_clocks_timed_have_a_ratio_and_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records: list[Record] = [
        *launches("eager", 1, 4e-4, 4e-4),
        *launches("fused", 1, 1e-4, 1e-4, method="graph-rotate/2"),
    ]
    op_run._compare_functions(records)
    out = capsys.readouterr().out
    assert "4.000" in out
    assert (
        "tokens=1: eager by event-rotate/2, fused by graph-rotate/2: only a graph is without "
        "the host's launch overhead" in out
    )


def test_functions_with_other_work_are_paired_by_their_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One moves half of the bytes; twice the tokens make up for it."""
    records: list[Record] = [
        measured(case(name, tokens, factor * tokens), time_s * tokens)
        for name, factor, time_s in (("softmax", 16, 4e-3), ("sum", 8, 1e-3))
        for tokens in (1, 2)
    ]
    op_run._compare_functions(records)
    out = capsys.readouterr().out
    assert out.count("4.000") == 3
    for tokens in (1, 2):
        assert out.count(f"tokens={tokens}: functions state different FLOPs or bytes") == 1


def test_launches_of_one_case_by_two_clocks_are_one_series() -> None:
    first, *_ = launches("f", 1, 1e-3)
    _, second = launches("f", 1, 9.0, 3e-3, method="graph-rotate/2")
    (side,) = op_run.functions([first, second])
    (series,) = side.series
    assert len(series.launches) == 2


def test_launches_for_which_a_budget_had_no_room_are_named() -> None:
    records: list[Record] = []
    for tokens in (1, 2):
        records += launches("f", tokens, 1e-3)
        records += [
            Skipped(run_id="r", case=case("f", tokens), reason="no time", launch=number)
            for number in (2, 3)
        ]
    lines = [*missing_launches(rows(records, run_info()))]
    assert lines == ["not measured, of 2 cases: launch 2, 3: no time"]
    assert [*missing_launches(rows([*launches("f", 1, 1e-3)], run_info()))] == []
