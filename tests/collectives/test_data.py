"""Laws of the check: it accepts every right result and sees every corruption.

Collectives are simulated in one process, reductions in the type itself and in a random order.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stepmark.cases.comm_case import CommCase
from stepmark.collectives.bench.data import PREMUL_FACTOR, check, fill, poison
from stepmark.collectives.bench.values import BITS_OF, ROWS, expected
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.collectives import FACTS, Collective, RedOp

REDOPS = tuple(redop for redop in RedOp if redop is not RedOp.NONE)
REDUCING = tuple(c for c in Collective if FACTS[c].reduces)
MOVING = tuple(c for c in Collective if not FACTS[c].reduces and c is not Collective.BARRIER)
UNSIGNED = {DType.UINT8: 2**8, DType.UINT32: 2**32, DType.UINT64: 2**64}
# Types whose values are drawn and reduced in the same way.
CLASSES = (
    (DType.FP8_E4M3, DType.FP8_E5M2),
    (DType.BF16, DType.FP16),
    (DType.FP32, DType.FP64),
    (DType.INT8, DType.INT32, DType.INT64),
    tuple(UNSIGNED),
)


def test_every_type_is_in_a_class() -> None:
    assert sorted(itertools.chain(*CLASSES)) == sorted(MESSAGE_DTYPES)


def case_of(
    collective: Collective,
    dtype: DType,
    n: int = 3,
    *,
    count: int = 300,
    redop: RedOp | None = None,
) -> CommCase:
    facts = FACTS[collective]
    n = 2 if facts.pair else n
    sizes = itertools.cycle((count, 0, 7, count // 2, 13))
    return CommCase(
        collective=collective,
        count=count,
        dtype=dtype,
        num_ranks=n,
        world_size=n,
        redop=redop or RedOp.NONE,
        root=n - 1 if facts.rooted else -1,
        pair=(0, 1) if facts.pair else None,
        matrix=tuple(tuple(next(sizes) for _ in range(n)) for _ in range(n))
        if collective is Collective.ALL_TO_ALL_V
        else None,
    )


def sends(case: CommCase, round: int = 1) -> list[Tensor]:
    buffers = []
    for index in range(case.num_ranks):
        buffers.append(torch.empty(case.send_count(index), dtype=TORCH_DTYPE[case.dtype]))
        fill(case, index, buffers[-1], round)
    return buffers


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS_OF[tensor.element_size()])


def wrongs(case: CommCase, recvs: list[Tensor], round: int = 1) -> list[int]:
    return [check(case, index, recv, round).num_wrong for index, recv in enumerate(recvs)]


# Reductions in the type itself.


def add(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return (a.float() + b.float()).to(a.dtype)
    return (bits(a) + bits(b)).view(a.dtype) if not a.is_floating_point() else a + b


def times(a: Tensor, b: Tensor | float) -> Tensor:
    if a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return (a.float() * (b.float() if isinstance(b, Tensor) else b)).to(a.dtype)
    if a.is_floating_point():
        return a * b
    factor = bits(b) if isinstance(b, Tensor) else int(b)
    return (bits(a) * factor).view(a.dtype)


def best(a: Tensor, b: Tensor, pick: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if a.is_floating_point():
        return pick(
            a.double() if a.element_size() > 1 else a.float(),
            b.to(torch.float32) if a.element_size() == 1 else b.double(),
        ).to(a.dtype)
    if a.dtype in (torch.int8, torch.int32, torch.int64):
        return pick(a, b)
    flip = -(2 ** (8 * a.element_size() - 1))  # order of unsigned numbers by their bits
    return (pick(bits(a) ^ flip, bits(b) ^ flip) ^ flip).view(a.dtype)


def divided(total: Tensor, n: int, dtype: DType) -> Tensor:
    if dtype.is_integer:
        values = [
            int(v) % UNSIGNED[dtype] if dtype in UNSIGNED else int(v) for v in bits(total)
        ]
        quotients = [math.trunc(v / n) if abs(v) < 2**52 else v // n for v in values]
        half = 2 ** (8 * dtype.itemsize - 1)
        wrapped = [(q + half) % (2 * half) - half for q in quotients]
        return torch.tensor(wrapped, dtype=BITS_OF[dtype.itemsize]).view(TORCH_DTYPE[dtype])
    wide = total.float() if dtype.is_fp8 else total.double()
    return (wide / n).to(total.dtype)


def reduced(case: CommCase, parts: list[Tensor], *, scale_first: bool = False) -> Tensor:
    """The parts as one, in a random order; avg: 1/n first, as NCCL does it with floats."""
    order = torch.randperm(len(parts)).tolist()
    n, redop = case.num_ranks, case.redop
    chosen = [parts[at] for at in order]
    if redop is RedOp.MULSUM:
        chosen = [times(part, PREMUL_FACTOR) for part in chosen]
    if scale_first:
        share = (
            torch.tensor(1 / n, dtype=torch.float64)
            .to(chosen[0].dtype)
            .expand(chosen[0].shape)
            .contiguous()
        )
        chosen = [times(part, share) for part in chosen]
    total = chosen[0]
    for part in chosen[1:]:
        match redop:
            case RedOp.PROD:
                total = times(total, part)
            case RedOp.MIN:
                total = best(total, part, torch.minimum)
            case RedOp.MAX:
                total = best(total, part, torch.maximum)
            case _:
                total = add(total, part)
    return divided(total, n, case.dtype) if redop is RedOp.AVG and not scale_first else total


# What each rank receives.


def moved(  # noqa: PLR0911, a row per collective
    case: CommCase, sent: list[Tensor]
) -> list[Tensor]:
    n, c, root = case.num_ranks, case.count, case.root
    none = sent[0][:0]
    match case.collective:
        case Collective.ALL_GATHER:
            return [cat(sent)] * n
        case Collective.GATHER:
            return [cat(sent) if i == root else none for i in range(n)]
        case Collective.INCAST:
            return [cat(sent) if i == root else none for i in range(n)]
        case Collective.SCATTER:
            return list(sent[root].split(c))
        case Collective.MULTICAST:
            parts = iter(sent[root].split(c))
            return [none if i == root else next(parts) for i in range(n)]
        case Collective.BROADCAST:
            return [sent[root]] * n
        case Collective.ALL_TO_ALL:
            return [cat([s.split(c)[i] for s in sent]) for i in range(n)]
        case Collective.ALL_TO_ALL_V:
            pieces = [s.split(list(row)) for s, row in zip(sent, case.counts, strict=True)]
            return [cat([piece[i] for piece in pieces]) for i in range(n)]
        case Collective.SENDRECV:
            return [sent[i - 1] for i in range(n)]
        case Collective.P2P:
            return [none, sent[0]]
        case Collective.P2P_BOTH:
            return [sent[1], sent[0]]
        case Collective.PING_PONG:
            return [sent[0], sent[0]]
    raise AssertionError(case.collective)


def cat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([bits(t) for t in tensors]).view(tensors[0].dtype)


def received(case: CommCase, sent: list[Tensor], *, scale_first: bool = False) -> list[Tensor]:
    match case.collective:
        case Collective.REDUCE_SCATTER:
            split = [s.split(case.count) for s in sent]
            return [
                reduced(case, [parts[i] for parts in split], scale_first=scale_first)
                for i in range(case.num_ranks)
            ]
        case Collective.ALL_REDUCE | Collective.REDUCE:
            return [reduced(case, sent, scale_first=scale_first)] * case.num_ranks
    return moved(case, sent)


# Data that move.


# Bits alone move. Each collective is seen with two types, each type with some collective.
@pytest.mark.parametrize(
    ("collective", "dtype"),
    [
        *((collective, DType.BF16) for collective in MOVING),
        *zip(itertools.cycle(MOVING), MESSAGE_DTYPES, strict=False),
        *zip(MOVING[::-1], itertools.cycle((DType.UINT32, DType.UINT8)), strict=False),
    ],
)
def test_what_arrives_as_sent_is_right_and_nothing_else_is(
    collective: Collective, dtype: DType
) -> None:
    for n in (2, 3, 8) if dtype is DType.BF16 else (3,):
        case = case_of(collective, dtype, n)
        right = received(case, sends(case))
        checks = [check(case, i, recv, 1) for i, recv in enumerate(right)]
        assert [c.num_wrong for c in checks] == [0] * case.num_ranks
        assert [c.num_compared for c in checks] == [
            case.recv_count(i) * (collective is not Collective.REDUCE)
            for i in range(case.num_ranks)
        ]
        assert all(c.max_rel_err == 0 and c.tolerance == 0 for c in checks)
        stale = received(case, sends(case, 0))
        for index, recv in enumerate(right):
            if not recv.numel():
                continue
            assert_seen(case, index, recv, stale[index])


def assert_seen(case: CommCase, index: int, recv: Tensor, stale: Tensor) -> None:
    """Poison, stale, shifted, swapped parts, one changed element."""
    fresh = torch.empty_like(recv)
    poison(fresh)
    assert check(case, index, fresh, 1).num_wrong == recv.numel()
    assert check(case, index, stale, 1).num_wrong > recv.numel() / 4
    flat = bits(recv)
    for shift in {1, 16, 256, case.count // 2, case.count} & set(range(flat.numel())):
        moved_on = flat.roll(shift).view(recv.dtype)
        assert check(case, index, moved_on, 1).num_wrong > 0, shift
    for at in (0, flat.numel() // 2, flat.numel() - 1):
        one = flat.clone()
        one[at] ^= 1 << (8 * recv.element_size() - 2)
        assert check(case, index, one.view(recv.dtype), 1).num_wrong == 1, at


@pytest.mark.parametrize("collective", [Collective.ALL_TO_ALL, Collective.ALL_GATHER])
def test_a_shift_by_whole_blocks_is_seen(collective: Collective) -> None:
    case = case_of(collective, DType.BF16, 2, count=3 * ROWS + 5)
    recv = received(case, sends(case))[0]
    for blocks in (1, 2, 3):
        shifted = bits(recv).roll(blocks * ROWS).view(recv.dtype)
        assert check(case, 0, shifted, 1).num_wrong > 0.9 * recv.numel()


def test_positions_of_a_long_message_are_all_different_blocks() -> None:
    case = case_of(Collective.P2P, DType.INT64, count=300 * ROWS)
    data = sends(case)[0].view(-1, ROWS)
    assert len({tuple(row.tolist()) for row in data}) == 300
    assert data.unique().numel() > ROWS * 0.95


def test_pieces_of_any_length_agree_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(Collective.ALL_TO_ALL_V, DType.FP32, 3, count=5 * ROWS + 3)
    right = received(case, sends(case))
    monkeypatch.setattr("stepmark.collectives.bench.data._CHUNK", {"cpu": ROWS})
    assert wrongs(case, right) == [0, 0, 0]


def test_in_place_all_gather_keeps_what_fill_wrote() -> None:
    case = dataclasses.replace(case_of(Collective.ALL_GATHER, DType.FP16, 2), in_place=True)
    whole = torch.empty(2 * case.count, dtype=torch.float16)
    poison(whole)
    fill(case, 1, whole[case.count :], 4)
    assert check(case, 1, whole, 4).num_wrong == case.count  # rank 0's part is missing
    fill(case, 0, whole[: case.count], 4)
    assert check(case, 1, whole, 4).num_wrong == 0


def test_a_barrier_has_nothing_to_check() -> None:
    case = CommCase(
        collective=Collective.BARRIER, count=0, dtype=DType.UINT8, num_ranks=2, world_size=2
    )
    found = check(case, 0, torch.empty(0, dtype=torch.uint8), 0)
    assert (found.num_wrong, found.num_compared) == (0, 0)


# Reductions.


# Every type with every reduction, and any two values together: collectives take turns.
@pytest.mark.parametrize(
    ("collective", "dtype", "redop", "n"),
    [
        (REDUCING[(i + j) % len(REDUCING)], dtype, redop, (2, 3, 8)[(i + 2 * j) // 3 % 3])
        for i, dtype in enumerate(MESSAGE_DTYPES)
        for j, redop in enumerate(REDOPS)
    ],
)
def test_right_reductions_are_right_in_any_order(
    collective: Collective, dtype: DType, redop: RedOp, n: int
) -> None:
    case = case_of(collective, dtype, n, redop=redop)
    for recvs in right_results(case):
        checks = [check(case, i, recv, 1) for i, recv in enumerate(recvs)]
        assert [c.num_wrong for c in checks] == [0] * n
        defined = [n - 1] if collective is Collective.REDUCE else list(range(n))
        assert [i for i, c in enumerate(checks) if c.num_compared == case.count] == defined


def right_results(case: CommCase) -> list[list[Tensor]]:
    sent = sends(case)
    floats = case.redop is RedOp.AVG and not case.dtype.is_integer
    return [
        received(case, sent, scale_first=way) for way in ((False, True) if floats else (False,))
    ]


@pytest.mark.parametrize(
    ("dtype", "redop"),
    [
        (dtypes[(at + turn) % len(dtypes)], redop)
        for turn, redop in enumerate(REDOPS)
        for at, dtypes in enumerate(CLASSES)
    ],
)
def test_reductions_that_went_wrong_are_seen(dtype: DType, redop: RedOp) -> None:
    for collective, n in (
        (Collective.ALL_REDUCE, 2),
        (Collective.ALL_REDUCE, 8),
        (Collective.REDUCE_SCATTER, 3),
    ):
        case = case_of(collective, dtype, n, redop=redop)
        sent = sends(case)
        right = received(case, sent)
        stale = received(case, sends(case, 0))
        fresh = torch.empty_like(right[0])
        poison(fresh)
        assert check(case, 0, fresh, 1).num_wrong == case.count
        assert check(case, 0, stale[0], 1).num_wrong > 0
        assert check(case, 0, sent[0][: case.count], 1).num_wrong > 0  # only its own part
        for shift in (1, 16, 256):
            assert check(case, 0, bits(right[0]).roll(shift).view(right[0].dtype), 1).num_wrong
        if collective is Collective.REDUCE_SCATTER:
            assert check(case, 0, right[1], 1).num_wrong > 0
        for rank in {0, n // 2, n - 1}:
            parts = [s[: case.count] for s in sent]
            others = [part for at, part in enumerate(parts) if at != rank]
            assert check(case, 0, reduced(case, others), 1).num_wrong > 0, f"without {rank}"
            late = sends(case, 0)[rank][: case.count]
            assert check(case, 0, reduced(case, [*others, late]), 1).num_wrong > 0
            rolled = bits(parts[rank]).roll(1).view(late.dtype)
            assert check(case, 0, reduced(case, [*others, rolled]), 1).num_wrong > 0
            if redop in (RedOp.MIN, RedOp.MAX):
                continue  # taking a part twice is no error of these
            doubled = reduced(case, [*parts, parts[rank]])
            assert check(case, 0, doubled, 1).num_wrong > 0, f"{rank} twice"
            other = parts[(rank + 1) % n]
            assert check(case, 0, reduced(case, [*others, other]), 1).num_wrong > 0


@pytest.mark.parametrize(
    ("n", "dtype", "redop"),
    [
        *itertools.product(
            [64],
            [DType.FP8_E5M2, DType.FP8_E4M3, DType.BF16, DType.FP32, DType.INT8, DType.UINT32],
            [RedOp.SUM, RedOp.PROD, RedOp.MAX, RedOp.AVG],
        ),
        (1000, DType.BF16, RedOp.SUM),
        # The other 8 bits and the sum in bf16 show the same.
        pytest.param(1000, DType.FP8_E5M2, RedOp.SUM, marks=pytest.mark.slow),
        (1000, DType.INT8, RedOp.SUM),
        (1000, DType.FP8_E4M3, RedOp.PROD),
        pytest.param(1000, DType.BF16, RedOp.AVG, marks=pytest.mark.slow),
        (1000, DType.FP8_E4M3, RedOp.AVG),
        (1000, DType.INT8, RedOp.AVG),
        (1000, DType.UINT32, RedOp.MAX),
    ],
)
def test_many_ranks(n: int, dtype: DType, redop: RedOp) -> None:
    case = case_of(Collective.ALL_REDUCE, dtype, n, count=2000, redop=redop)
    sent = sends(case)
    # An e4m3 average of 1000 ranks with 1/n first is wrong by a factor of 2: 1/n underflows.
    underflows = dtype is DType.FP8_E4M3 and n == 1000
    scale_first = redop is RedOp.AVG and not dtype.is_integer and not underflows
    for way in {False, scale_first}:
        recv = reduced(case, sent, scale_first=way)
        assert check(case, 5, recv, 1).num_wrong == 0
    if n == 1000 and dtype is DType.INT8 and redop is RedOp.AVG:
        return  # no int8 is an average of 1000 of them but 0
    assert check(case, 5, bits(recv).roll(1).view(recv.dtype), 1).num_wrong > 0
    assert check(case, 5, reduced(case, sent[1:]), 1).num_wrong > 0
    if redop is not RedOp.MAX:
        assert check(case, 5, reduced(case, [*sent, sent[7]]), 1).num_wrong > 0


@pytest.mark.parametrize("redop", [RedOp.SUM, RedOp.MULSUM, RedOp.PROD])
@pytest.mark.parametrize("dtype", [d for d in MESSAGE_DTYPES if d.is_integer])
def test_whole_numbers_do_wrap(dtype: DType, redop: RedOp) -> None:
    case = case_of(Collective.ALL_REDUCE, dtype, 8, redop=redop)
    values = [
        [int(v) % UNSIGNED.get(dtype, 2**64) if dtype in UNSIGNED else int(v) for v in bits(s)]
        for s in sends(case)
    ]
    factor = 2 if redop is RedOp.MULSUM else 1
    exact = [
        math.prod(column) if redop is RedOp.PROD else factor * sum(column)
        for column in zip(*values, strict=True)
    ]
    size = 8 * dtype.itemsize
    low, high = (0, 2**size) if dtype in UNSIGNED else (-(2 ** (size - 1)), 2 ** (size - 1))
    assert sum(not low <= value < high for value in exact) > case.count / 4


def test_one_rank_alone_has_its_own_data() -> None:
    for dtype, redop in itertools.product(MESSAGE_DTYPES, REDOPS):
        case = case_of(Collective.ALL_REDUCE, dtype, 1, redop=redop)
        (recv,) = received(case, sends(case))
        assert wrongs(case, [recv]) == [0], (dtype, redop)


def test_only_averages_have_a_tolerance_and_it_sees_a_missing_part() -> None:
    ranks = (2, 3, 6, 8, 12, 100)
    for dtype, (at, redop) in itertools.product(MESSAGE_DTYPES, enumerate(RedOp)):
        for n in ranks if redop is RedOp.AVG else (ranks[at % len(ranks)],):
            tolerance = expected(dtype, redop, n).tolerance
            rounds = redop is RedOp.AVG and not dtype.is_integer and n & (n - 1)
            assert (tolerance > 0) == bool(rounds), (dtype, redop, n)
            assert tolerance < 0.4, (dtype, redop, n)


def test_unsigned_values_lie_on_both_sides_of_the_sign_bit() -> None:
    for dtype, redop in itertools.product(UNSIGNED, (RedOp.MIN, RedOp.MAX)):
        signs = {bool(v < 0) for v in expected(dtype, redop, 4).bits.tolist()}
        assert signs == {True, False}


def test_the_error_is_relative_to_what_is_right() -> None:
    case = case_of(Collective.ALL_REDUCE, DType.FP32, 2, redop=RedOp.SUM)
    (recv, _) = received(case, sends(case))
    wrong = recv.clone()
    wrong[3] *= 1.5
    found = check(case, 0, wrong, 1)
    assert (found.num_wrong, found.max_rel_err) == (1, 0.5)
    wrong[4] = math.nan
    assert check(case, 0, wrong, 1).max_rel_err == math.inf
    assert check(case, 0, wrong, 1).num_wrong == 2
