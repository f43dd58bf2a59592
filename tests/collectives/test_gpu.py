"""Timers of a GPU against each other, and libnccl. Needs two CUDA or ROCm devices.

Written for the CI of a machine with GPUs: elsewhere all is skipped.
"""

import statistics
from typing import Any

import pytest
import torch
from tests.collectives import on_gpus
from tests.ranks_pool import Pool

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow
from stepmark.cases.record import Measured, Record
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import (
    FACTS,
    Api,
    Collective,
    Mode,
    RedOp,
    Registration,
    placements,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),  # of torch, which are not ours
]


@pytest.fixture(scope="module")
def two() -> Any:
    pool = Pool(2, "cuda")
    yield pool
    pool.close()


def case_of(collective: Collective = Collective.ALL_REDUCE, **more: Any) -> CommCase:
    facts = FACTS[collective]
    given: dict[str, Any] = {
        "count": 0 if collective is Collective.BARRIER else 2**18,
        "dtype": DType.BF16,
        "redop": RedOp.SUM if facts.reduces else RedOp.NONE,
        "root": 1 if facts.rooted else -1,
        "pair": (0, 1) if facts.pair else None,
        "spread": 0.5 if collective is Collective.ALL_TO_ALL_V else None,
        "in_place": placements(collective, more.get("api", Api.TORCH))[0],
        **more,
    }
    return CommCase(collective=collective, num_ranks=2, world_size=2, **given)


def measured(two: Pool, cases: list[CommCase], iterations: int = 200) -> list[Measured]:
    records: list[Record] = two.run(
        on_gpus.measure, cases, CommHow(iterations=iterations), timeout_s=300
    )[0]
    found = [record for record in records if isinstance(record, Measured)]
    assert len(found) == len(cases), [r for r in records if not isinstance(r, Measured)]
    assert [record.num_wrong for record in found] == [0] * len(cases)
    return found


def median_s(record: Measured) -> float:
    return max(statistics.median(seconds) for seconds in record.samples.seconds)


@pytest.mark.parametrize("api", Api)
def test_every_collective_is_right(two: Pool, api: Api) -> None:
    cases = [
        case_of(one, api=api, in_place=in_place)
        for one in Collective
        for in_place in placements(one, api)
    ]
    measured(two, cases, iterations=5)


@pytest.mark.parametrize("registration", [Registration.LOCAL, Registration.SYMMETRIC])
@pytest.mark.parametrize("unalign", [0, 1])
def test_every_collective_is_right_in_registered_buffers(
    two: Pool, registration: Registration, unalign: int
) -> None:
    cases = [
        case_of(
            one, api=Api.NCCL, in_place=in_place, registration=registration, unalign=unalign
        )
        for one in Collective
        if one is not Collective.BARRIER
        for in_place in placements(one, Api.NCCL)
    ]
    for record in measured(two, cases, iterations=5):
        assert record.comm_memory is not None
        assert record.comm_memory.buffer_bytes > 0


def test_queued_calls_of_libnccl_come_from_the_compiled_loop(two: Pool) -> None:
    cases = [
        case_of(one, api=Api.NCCL, mode=Mode.QUEUED, in_place=in_place)
        for one in Collective
        for in_place in placements(one, Api.NCCL)
    ]
    for record in measured(two, cases, iterations=50):
        assert record.samples.method.startswith("queued-compiled/")


def test_a_large_message_takes_as_long_in_each_mode(two: Pool) -> None:
    """1 GiB: what a launch costs its host does not show."""
    cases = [case_of(count=2**29, mode=mode) for mode in Mode]
    times = [median_s(record) for record in measured(two, cases, iterations=40)]
    assert max(times) < 1.1 * min(times)


def test_a_small_message_costs_most_where_the_host_waits(two: Pool) -> None:
    modes = (Mode.GRAPH, Mode.AHEAD, Mode.QUEUED, Mode.BLOCKING)
    cases = [case_of(count=8, mode=mode) for mode in modes]
    graph, ahead, queued, blocking = (median_s(record) for record in measured(two, cases))
    assert graph - 0.2e-6 < ahead < graph + 1.5e-6
    assert 1.5 * ahead < queued < blocking


def test_both_interfaces_reach_the_same_rate(two: Pool) -> None:
    torch_s, nccl_s = (
        median_s(record)
        for record in measured(
            two, [case_of(count=2**27, api=api) for api in Api], iterations=40
        )
    )
    assert torch_s == pytest.approx(nccl_s, rel=0.05)


@pytest.mark.parametrize("mode", [Mode.AHEAD, Mode.QUEUED, Mode.BLOCKING])
def test_who_comes_last_waits_least(two: Pool, mode: Mode) -> None:
    (record,) = measured(two, [case_of(mode=mode, skew_s=1e-3)])
    first, last = (statistics.median(seconds) for seconds in record.samples.seconds)
    assert first - last == pytest.approx(1e-3, rel=0.2)


@pytest.mark.parametrize("mode", [Mode.AHEAD, Mode.QUEUED])
def test_compute_beside_is_timed(two: Pool, mode: Mode) -> None:
    (record,) = measured(two, [case_of(count=2**26, mode=mode, beside="gemm:2048")])
    assert record.beside is not None
    for alone, together in zip(record.beside.alone_s, record.beside.together_s, strict=True):
        assert statistics.median(together) > 0.9 * statistics.median(alone)
