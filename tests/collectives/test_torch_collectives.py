"""Every collective of torch.distributed on four gloo ranks delivers what it should."""

import itertools
from collections.abc import Iterable

import pytest
from tests.collectives import on_ranks
from tests.collectives.cases import case_of, in_every_form
from tests.ranks_pool import Pool

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow
from stepmark.cases.record import Measured, Record, Skipped
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType
from stepmark.model.collectives import Collective, RedOp

TWO_CHECKS = CommHow(iterations=2, warmups=1, checks=2)
# Whose results are defined: how many elements all ranks together receive, in messages of
# `count` elements. A law of its own, beside data.py's.
RECEIVED = {
    Collective.ALL_REDUCE: 4,
    Collective.ALL_GATHER: 16,
    Collective.REDUCE_SCATTER: 4,
    Collective.BROADCAST: 4,
    Collective.REDUCE: 1,
    Collective.ALL_TO_ALL: 16,
    Collective.GATHER: 4,
    Collective.SCATTER: 4,
    Collective.SENDRECV: 4,
    Collective.P2P: 1,
    Collective.P2P_BOTH: 2,
    Collective.PING_PONG: 2,
    Collective.INCAST: 3,
    Collective.MULTICAST: 3,
    Collective.BARRIER: 0,
}


def measured(pool: Pool, cases: list[CommCase], how: CommHow = TWO_CHECKS) -> list[Record]:
    records, *others = pool.run(on_ranks.measure, cases, how)
    assert others == [[], [], []], "only rank 0 passes records on"
    assert [record.case for record in records] == cases
    found: list[Record] = records
    return found


def assert_right(records: Iterable[Record]) -> None:
    for record in records:
        assert isinstance(record, Measured), record
        assert len(record.checks) == len(record.samples.seconds) == len(record.case.members)  # type: ignore[union-attr]
        assert record.num_wrong == 0, record


def compared(record: Record) -> int:
    assert isinstance(record, Measured), record
    return sum(check.num_compared for check in record.checks)


def test_every_collective_in_every_form_is_right(pool: Pool) -> None:
    records = measured(pool, in_every_form())
    assert_right(records)
    for record in records:
        case = record.comm
        if case.collective is Collective.ALL_TO_ALL_V:
            expected = sum(map(sum, case.counts))
        else:
            expected = RECEIVED[case.collective] * case.count
        assert compared(record) == 2 * expected, case.collective  # two rounds


def test_every_root_gets_its_turn(pool: Pool) -> None:
    rooted = [c for c in RECEIVED if case_of(c).root >= 0]
    assert_right(measured(pool, [case_of(c, root=at % 4) for at, c in enumerate(rooted, 2)]))


def reductions() -> list[CommCase]:
    """Every type summed, and every reduction of a float and of a whole number."""
    redops = [op for op in RedOp if op is not RedOp.NONE]
    pairs = {(RedOp.SUM, dtype) for dtype in MESSAGE_DTYPES}
    pairs |= set(itertools.product(redops, (DType.BF16, DType.INT32)))
    return [case_of(redop=redop, dtype=dtype) for redop, dtype in sorted(pairs)]


def test_every_reduction_is_right_or_said_to_be_missing(pool: Pool) -> None:
    records = measured(pool, reductions(), CommHow(iterations=1, warmups=0))
    skipped = {(r.comm.redop, r.comm.dtype) for r in records if isinstance(r, Skipped)}
    assert_right(record for record in records if not isinstance(record, Skipped))
    assert skipped == {
        *itertools.product([RedOp.SUM], [DType.FP8_E4M3, DType.FP8_E5M2]),
        *itertools.product([RedOp.SUM], [DType.UINT32, DType.UINT64]),
        *itertools.product([RedOp.MULSUM], [DType.BF16, DType.INT32]),
        (RedOp.AVG, DType.INT32),
    }


def test_reductions_to_one_and_to_each_part(pool: Pool) -> None:
    kinds = (Collective.REDUCE, Collective.REDUCE_SCATTER)
    redops = (RedOp.PROD, RedOp.MAX, RedOp.AVG)
    assert_right(measured(pool, [case_of(k, redop=op) for k in kinds for op in redops]))


def test_every_type_moves(pool: Pool) -> None:
    kinds = (Collective.ALL_GATHER, Collective.SENDRECV)
    cases = [case_of(kind, dtype=dtype) for kind in kinds for dtype in MESSAGE_DTYPES]
    records = measured(pool, cases, CommHow(iterations=1, warmups=0))
    skipped = {(r.comm.collective, r.comm.dtype) for r in records if isinstance(r, Skipped)}
    assert_right(record for record in records if not isinstance(record, Skipped))
    fp8 = {(Collective.ALL_GATHER, DType.FP8_E4M3), (Collective.ALL_GATHER, DType.FP8_E5M2)}
    assert skipped == fp8 | set(itertools.product(kinds, (DType.UINT32, DType.UINT64)))


# Who takes part


def test_the_first_two_ranks_alone(pool: Pool) -> None:
    kinds = (Collective.ALL_REDUCE, Collective.SCATTER, Collective.SENDRECV, Collective.INCAST)
    records = measured(pool, [case_of(kind, num_ranks=2) for kind in kinds])
    assert_right(records)
    assert {len(record.comm.members) for record in records} == {2}


@pytest.mark.parametrize("split", ["mod 2", "div 2"])
def test_communicators_side_by_side(pool: Pool, split: str) -> None:
    kinds = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.GATHER)
    records = measured(pool, [case_of(kind, num_ranks=2, split=split) for kind in kinds])
    assert_right(records)
    for record in records:
        assert record.comm.members == (0, 1, 2, 3)
        two_of_two = 2 * 2 * {Collective.ALL_GATHER: 4}.get(record.comm.collective, 2)
        assert compared(record) == two_of_two * record.comm.count


def test_a_pair_in_reversed_order(pool: Pool) -> None:
    kinds = (Collective.P2P, Collective.P2P_BOTH, Collective.PING_PONG)
    records = measured(pool, [case_of(kind, pair=(3, 1)) for kind in kinds])
    assert_right(records)
    one_way = records[0]
    assert isinstance(one_way, Measured)
    # Checks stand in the order of the pair: its source receives nothing.
    assert [check.num_compared for check in one_way.checks] == [0, 2 * one_way.comm.count]
    assert one_way.samples.method == "queued/1"  # although rank 0 took no part
