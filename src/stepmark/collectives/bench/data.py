"""Fill send buffers with data whose right result is known, and check receive buffers.

A hash of round, sender, destination and position picks a row of a table (values.py) for each
element, so that data that is misdirected, shifted, or left from an earlier round does not
match. One hash and one lookup per element serve every collective, reduction and type.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepmark.cases.comm_case import CommCase
from stepmark.cases.record import Check
from stepmark.collectives.bench.values import (
    BITS_OF,
    PREMUL_FACTOR,
    ROWS,
    Expected,
    expected,
    hash64,
    sent_bits,
    widen,
)
from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import poison  # no right result is NaN or its whole number
from stepmark.model.collectives import Collective

__all__ = ["PREMUL_FACTOR", "check", "fill", "poison"]

_CHUNK = {"cpu": 2**18}  # elements at a time, for the cache
_DEVICE_CHUNK = 2**22  # and 200 MiB of temporaries at most
_ALL = -1  # sender of data that every rank contributes to

# Sender, destination and number of elements of a part of a buffer.
Part = tuple[int, int, int]


def fill(case: CommCase, index: int, send: Tensor, round: int) -> None:
    """Fill the data that this rank sends in a round. In place it comes after `poison`."""
    table = sent_bits(case.dtype, case.redop, case.num_ranks, index).to(send.device)
    for piece, rows in _walk(_sent_parts(case, index), send, round):
        torch.index_select(table, 0, rows, out=piece)


def check(case: CommCase, index: int, recv: Tensor, round: int) -> Check:
    """Check every element that this rank must have received in a round.

    Exact results are compared bit by bit. The error of integers is the distance modulo 2^bits.
    """
    right = expected(case.dtype, case.redop, case.num_ranks)
    parts = _received_parts(case, index)
    num_wrong = 0
    max_rel_err = 0.0
    if not right.tolerance:
        num_wrong = _count_unequal(right.bits, parts, recv, round)
    if right.tolerance or num_wrong:
        over, max_rel_err = _errors(right, case.dtype, parts, recv, round)
        num_wrong = num_wrong or over
    return Check(
        max_rel_err=max_rel_err,
        tolerance=right.tolerance,
        num_wrong=num_wrong,
        num_compared=sum(count for _, _, count in parts),
        reference=right.name,
    )


def _count_unequal(bits: Tensor, parts: list[Part], recv: Tensor, round: int) -> int:
    table = bits.to(recv.device)
    wrong = torch.zeros((), dtype=torch.int64, device=recv.device)
    for piece, rows in _walk(parts, recv, round):
        wrong += torch.count_nonzero(piece != table.index_select(0, rows))
    return int(wrong)


def _errors(
    right: Expected, dtype: DType, parts: list[Part], recv: Tensor, round: int
) -> tuple[int, float]:
    """Return the number of elements over tolerance or not finite, and the largest error."""
    table = right.wide.to(recv.device)
    over = 0
    worst = 0.0
    for piece, rows in _walk(parts, recv, round):
        ref = table.index_select(0, rows)
        distance = (widen(piece, dtype) - ref).double().abs()
        error = distance / ref.double().abs().clamp_min(1.0)
        error = torch.where(error.isfinite(), error, math.inf)
        over += int((error > right.tolerance).sum())
        worst = max(worst, float(error.max()))
    return over, worst


def _sent_parts(case: CommCase, index: int) -> list[Part]:  # noqa: PLR0911, as below
    """Return the parts of the send buffer, in order."""
    n = range(case.num_ranks)
    c = case.count
    match case.collective:
        case Collective.REDUCE_SCATTER:
            return [(_ALL, to, c) for to in n]
        case Collective.ALL_REDUCE | Collective.REDUCE:
            return [(_ALL, 0, c)]
        case Collective.ALL_TO_ALL:
            return [(index, to, c) for to in n]
        case Collective.ALL_TO_ALL_V:
            return [(index, to, case.counts[index][to]) for to in n]
        case Collective.SCATTER:
            return [(index, to, c) for to in n] if index == case.root else []
        case Collective.MULTICAST:
            return [(index, to, c) for to in n if to != index] if index == case.root else []
        case _:
            return [(index, 0, case.send_count(index))]


def _received_parts(  # noqa: PLR0911, PLR0912, a row per collective
    case: CommCase, index: int
) -> list[Part]:
    """Return the defined parts of the receive buffer, in order."""
    n = case.num_ranks
    c = case.count
    root = case.root
    match case.collective:
        case Collective.ALL_REDUCE:
            return [(_ALL, 0, c)]
        case Collective.REDUCE:
            return [(_ALL, 0, c)] if index == root else []
        case Collective.REDUCE_SCATTER:
            return [(_ALL, index, c)]
        case Collective.ALL_TO_ALL:
            return [(sender, index, c) for sender in range(n)]
        case Collective.ALL_TO_ALL_V:
            return [(sender, index, case.counts[sender][index]) for sender in range(n)]
        case Collective.ALL_GATHER:
            return [(sender, 0, c) for sender in range(n)]
        case Collective.GATHER:
            return [(sender, 0, c) for sender in range(n)] if index == root else []
        case Collective.INCAST:
            return [(r, 0, c) for r in range(n) if r != root] if index == root else []
        case Collective.SCATTER:
            return [(root, index, c)]
        case Collective.MULTICAST:
            return [(root, index, c)] if index != root else []
        case Collective.BROADCAST:
            return [(root, 0, c)]
        case Collective.SENDRECV:
            return [((index - 1) % n, 0, c)]
        case Collective.P2P:
            return [(0, 0, c)] if index == 1 else []
        case Collective.P2P_BOTH:
            return [(1 - index, 0, c)]
        case Collective.PING_PONG:
            return [(0, 0, c)]
        case Collective.BARRIER:
            return []


@dataclass(frozen=True, slots=True)
class Move:
    """One send or receive of a rank: `count` elements from element `at` of a buffer."""

    sends: bool
    peer: int
    count: int
    at: int = 0
    from_send: bool = False  # which buffer: the send buffer, or the receive buffer


def moves(  # noqa: PLR0911, PLR0912, a row per collective
    case: CommCase, index: int
) -> list[Move]:
    """Return what this rank sends and receives, itself included, in nccl-tests' order.

    Only collectives made of sends and receives have moves; a ping-pong's are in order of time.
    """
    n = case.num_ranks
    c = case.count
    root = case.root
    others = [rank for rank in range(n) if rank != root]
    to = functools.partial(Move, True, from_send=True)
    of = functools.partial(Move, False)
    match case.collective:
        case Collective.ALL_TO_ALL:
            return _exchanged([c] * n, [c] * n)
        case Collective.ALL_TO_ALL_V:
            return _exchanged(case.counts[index], [row[index] for row in case.counts])
        case Collective.GATHER:
            return [to(root, c), *(of(r, c, r * c) for r in range(n) if index == root)]
        case Collective.SCATTER:
            return [*(to(r, c, r * c) for r in range(n) if index == root), of(root, c)]
        case Collective.SENDRECV:
            return [to((index + 1) % n, c), of((index - 1) % n, c)]
        case Collective.P2P:
            return [of(0, c) if index else to(1, c)]
        case Collective.P2P_BOTH:
            return [to(1 - index, c), of(1 - index, c)]
        case Collective.PING_PONG:  # received data is sent back
            return [of(0, c), Move(True, 0, c)] if index else [to(1, c), of(1, c)]
        case Collective.INCAST if index == root:
            return [of(r, c, place * c) for place, r in enumerate(others)]
        case Collective.MULTICAST if index == root:
            return [to(r, c, place * c) for place, r in enumerate(others)]
        case Collective.INCAST:
            return [to(root, c)]
        case Collective.MULTICAST:
            return [of(root, c)]
        case _:
            raise AssertionError(f"{case.collective} is more than sends and receives")


def _exchanged(sent: Sequence[int], received: Sequence[int]) -> list[Move]:
    """Return moves to and from every rank; empty parts are left out on both sides."""
    moves = list[Move]()
    out_at = 0
    in_at = 0
    for peer, (out, into) in enumerate(zip(sent, received, strict=True)):
        moves += [Move(True, peer, out, out_at, from_send=True)] if out else []
        moves += [Move(False, peer, into, in_at)] if into else []
        out_at = out_at + out
        in_at = in_at + into
    return moves


def _walk(parts: list[Part], buffer: Tensor, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of a buffer as bits, and the table's row of each of their elements.

    The hash of a position is that of its block of 4096 plus that of its place therein, so that
    each element costs one addition. Rows are the upper 12 of its 31 bits.
    """
    bits = buffer.view(BITS_OF[buffer.element_size()])
    begin = 0
    step = _CHUNK.get(buffer.device.type, _DEVICE_CHUNK)
    columns = _hash31(torch.arange(ROWS, device=buffer.device))
    for (_, _, count), stream in zip(parts, _streams(parts, round), strict=True):
        blocks = torch.arange(-(-count // ROWS), device=buffer.device)
        block_hash = _hash31(blocks + stream)[:, None]
        for at in range(0, count, step):
            length = min(step, count - at)
            hashes = block_hash[at // ROWS : -(-(at + length) // ROWS)]
            rows = torch.add(hashes, columns[:length])
            rows >>= 19
            yield bits[begin + at : begin + at + length], rows.view(-1)[:length]
        begin += count


def _streams(parts: list[Part], round: int) -> list[int]:
    """Return the start of the hash of each part."""
    senders = torch.tensor([sender for sender, _, _ in parts], dtype=torch.int64)
    receivers = torch.tensor([to for _, to, _ in parts], dtype=torch.int64)
    streams: list[int] = hash64(hash64(senders + (round << 32)) + receivers).tolist()
    return streams


def _hash31(x: Tensor) -> Tensor:
    """Mix int64 to int32 below 2^30: a sum of two fits in 31 bits."""
    return (hash64(x) & (1 << 30) - 1).int()
