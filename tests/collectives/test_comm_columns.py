"""Laws of the rows of collectives: rates, pooled launches, and who was waited for."""

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables.records import FAST, RUN_ID, gemm, measured

from stepmark.cases.record import Arrivals, Beside, Failed, Record, Skipped
from stepmark.collectives.comm_columns import rows
from stepmark.ground.stats import slowest_per_sample
from stepmark.model.collectives import FACTS, Collective
from stepmark.tables.columns import Row, number

from .comm_records import (
    LINK,
    NUM_RANKS,
    comm_case,
    comm_device,
    comm_measured,
    comm_run,
    flat,
    full_comm_run,
)

PAIRS = {"num_ranks": 2, "world_size": NUM_RANKS, "pair": (3, 5)}


def table(records: list[Record], **variables: str) -> list[Row]:
    return rows(records, comm_run(**variables), comm_device())


def value(row: Row, key: str) -> float:
    found = number(row, key)
    assert found is not None, key
    return found


@pytest.mark.parametrize("collective", Collective)
def test_busbw_is_algbw_times_the_factor_of_nccl_tests(collective: Collective) -> None:
    more = PAIRS if FACTS[collective].pair else {}
    (row,) = table([flat(comm_case(collective, 2**20, **more), 1e-3)])  # type: ignore[arg-type]
    if collective is Collective.BARRIER:
        assert row["algbw_gb_s"] is row["busbw_gb_s"] is row["pct_link"] is None
        return
    n = NUM_RANKS
    factor = {
        **dict.fromkeys(("broadcast", "reduce", "sendrecv", "incast", "multicast"), 1),
        **dict.fromkeys(("p2p", "p2p_both", "ping_pong"), 1),
        "all_reduce": 2 * (n - 1) / n,
    }.get(collective.value, (n - 1) / n)
    assert value(row, "busbw_gb_s") == pytest.approx(value(row, "algbw_gb_s") * factor)
    assert value(row, "algbw_gb_s") * 1e9 * value(row, "time_s") == pytest.approx(
        row["size_bytes"]
    )


SECONDS = st.lists(
    st.lists(st.floats(1e-6, 1e-2), min_size=4, max_size=4), min_size=2, max_size=4
)


@given(st.lists(SECONDS, min_size=1, max_size=3))
def test_order_of_the_times(launches: list[list[list[float]]]) -> None:
    num_ranks = min(map(len, launches))
    case = comm_case(num_ranks=num_ranks)
    records: list[Record] = [
        comm_measured(case, seconds[:num_ranks], launch=index + 1)
        for index, seconds in enumerate(launches)
    ]
    (row,) = rows(records, comm_run(num_ranks))
    medians = [median(slowest_per_sample(seconds[:num_ranks])) for seconds in launches]
    # The pooled time lies between the launches' own, and no fastest rank is above the slowest.
    ulp = 1 + 1e-12
    assert min(medians) / ulp <= value(row, "time_s") <= max(medians) * ulp
    assert value(row, "time_min_s") <= value(row, "time_s") * ulp
    order = [value(row, f"{key}_s") for key in ("min", "p10", "p50", "p90", "p99", "max")]
    assert order == sorted(order)
    assert row["n"] == 4 * len(launches)
    assert row["launches"] == len(launches)
    assert (row["launch_spread_pct"] is None) == (len(launches) == 1)


def test_launches_are_pooled_as_units() -> None:
    case = comm_case()
    records: list[Record] = [
        flat(case, time_s, n=n, launch=launch)
        for launch, (time_s, n) in enumerate([(1e-3, 100), (2e-3, 5), (4e-3, 5)], start=1)
    ]
    (row,) = table(records)
    assert row["time_s"] == 2e-3  # of launches, however many samples the first one has
    assert row["p50_s"] == 1e-3
    assert row["launch_spread_pct"] == pytest.approx(150)
    assert row["cv_pct"] is not None


def test_the_last_to_come_is_the_one_waited_for() -> None:
    seconds = [[100e-6] * 5, [100e-6] * 5, [40e-6] * 5, [110e-6] * 5]
    (row,) = table([comm_measured(comm_case(num_ranks=4), seconds)])
    assert (row["waited_for_rank"], row["slowest_rank"]) == (2, 3)
    assert row["waited_for_s"] == pytest.approx(60e-6)
    (sent,) = table([comm_measured(comm_case(Collective.SENDRECV, num_ranks=4), seconds)])
    assert sent["waited_for_rank"] is sent["time_min_s"] is None


def test_ranks_of_another_communicator_are_not_waited_for() -> None:
    case = comm_case(num_ranks=4, world_size=8, split="mod 2")
    even, odd = [50e-6] * 5, [100e-6] * 5
    seconds = [even if rank % 2 == 0 else odd for rank in range(8)]
    seconds[7] = [80e-6] * 5
    (row,) = table([comm_measured(case, seconds)])
    assert (row["waited_for_rank"], row["waited_for_s"]) == (7, pytest.approx(20e-6))
    factor = value(row, "busbw_gb_s") / value(row, "algbw_gb_s")
    assert factor == pytest.approx(2 * 3 / 4)


def test_world_ranks_of_a_pair() -> None:
    case = comm_case(Collective.P2P, **PAIRS)  # type: ignore[arg-type]
    record = comm_measured(case, [[1e-3] * 3, [2e-3] * 3])
    (row,) = table([record])
    assert (row["slowest_rank"], row["pair"]) == (5, "3-5")


@pytest.mark.parametrize(
    ("collective", "nvls", "over"),
    [
        ("all_reduce", "", None),
        ("all_reduce", "0", True),
        ("all_to_all", "", True),
        ("sendrecv", "0", True),
    ],
)
def test_over_the_link_is_impossible_only_without_reduction_in_the_switch(
    collective: str, nvls: str, over: bool | None
) -> None:
    case = comm_case(Collective(collective))
    time_s = case.message_bytes * case.busbw_factor / (LINK * 1.02)
    given_ = {"NCCL_NVLS_ENABLE": nvls} if nvls else {}
    (row,) = table([flat(case, time_s)], **given_)
    assert row["over_limit"] is over
    assert row["pct_link"] == pytest.approx(102)
    (under,) = table([flat(case, time_s * 1.02)], **given_)
    assert not under["over_limit"]


def test_no_link_is_held_against_other_wires() -> None:
    record, run = flat(comm_case(), 1e-3), comm_run()
    far = tuple(
        replace(found, host=f"node{found.rank // 4}") for found in run.environment.devices
    )
    hosts = replace(run, environment=replace(run.environment, devices=far))
    on_cpu = flat(comm_case(device="cpu", backend="gloo"), 1e-3)
    for row in (
        rows([record], hosts, comm_device())[0],
        rows([record], run)[0],
        table([on_cpu])[0],
    ):
        assert row["pct_link"] is row["over_limit"] is None
        assert row["busbw_gb_s"] is not None


def test_slowdown_is_against_the_same_case_alone() -> None:
    alone = comm_case()
    beside = replace(alone, beside="gemm:8192")
    both = Beside(
        alone_s=((1e-3,) * 3,) * 8, together_s=((1.2e-3,) * 3,) * 8, backend_run="cublas"
    )
    together = flat(beside, 3e-3, beside=both)
    first, second = table([flat(alone, 2e-3), together])
    assert first["slowdown"] is first["slowdown_beside"] is None
    assert second["slowdown"] == pytest.approx(1.5)
    assert second["slowdown_beside"] == pytest.approx(1.2)
    assert table([together])[0]["slowdown"] is None
    elsewhere = {"differs": ("torch: 1 -> 2",)}
    records = [flat(alone, 2e-3), replace(flat(alone, 1e-3), **elsewhere), together]
    assert [row["slowdown"] for row in table(records)] == [None, None, pytest.approx(1.5)]
    other = replace(together, **elsewhere)
    assert table([flat(alone, 2e-3), other])[1]["slowdown"] is None, "another environment"


def test_start_skew_is_unknown_where_clocks_disagree_by_more() -> None:
    record = flat(comm_case(num_ranks=2), 1e-3)
    late = ((0.0, 0.0, 0.0), (1e-6, 3e-6, 2e-6))

    def late_s(error_s: float | None) -> object:
        arrivals = Arrivals(late_s=late, error_s=error_s, issue_s=(8e-6, 9e-6))
        (row,) = table([replace(record, arrivals=arrivals)])
        assert row["issue_s"] == 9e-6
        return row["late_s"]

    assert late_s(0.0) == 2e-6
    assert late_s(1e-6) == 2e-6
    assert late_s(5e-6) is late_s(None) is None


def test_outcomes_keep_their_reason() -> None:
    case = comm_case()
    skipped = Skipped(run_id=RUN_ID, case=case, reason="needs 192 GiB")
    failed = Failed(
        run_id=RUN_ID, case=case, cause="timeout", message="60 s", ranks=(5,), launch=2
    )
    assert [table([one])[0]["status"] for one in (skipped, failed)] == ["skipped", "failed"]
    (row,) = table([flat(case, 1e-3), failed])
    assert (row["status"], row["message"]) == ("measured", "launch 2: timeout: 60 s")
    (wrong,) = table([flat(case, 1e-3, num_wrong=2), flat(case, 1e-3, launch=2, num_wrong=1)])
    assert (wrong["status"], wrong["num_wrong"]) == ("wrong", 3)
    (unchecked,) = table([flat(case, 1e-3, checked=False)])
    assert (unchecked["status"], unchecked["num_wrong"]) == ("measured", None)


def test_all_rows_have_the_same_columns_and_operators_none() -> None:
    records = [*full_comm_run(), measured(gemm(FAST), 1e-3)]
    found = table(records)
    assert len({frozenset(row) for row in found}) == 1
    assert len(found) == len({row["case_id"] for row in found})
    assert "gemm" not in {row["family"] for row in found}
