"""Collectives: how their size is counted, their bus bandwidth, and which ranks take part.

Sizes and factors are those of nccl-tests (doc/PERFORMANCE.md of NVIDIA/nccl-tests, and
`*GetCollByteCount` in its sources), so that figures are comparable. `count` is nccl-tests'
count argument: elements per rank, per peer or in total, depending on the collective.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stepmark.ground.errors import ConfigError

# nccl-tests 2.13.12 and later: parts of a message start at multiples of this.
ALIGN_BYTES = 16

# matrix[i][j]: elements from rank i to rank j.
Matrix = tuple[tuple[int, ...], ...]


class Collective(StrEnum):
    """A collective or point-to-point operation."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_V = "all_to_all_v"  # uneven parts
    GATHER = "gather"
    SCATTER = "scatter"
    SENDRECV = "sendrecv"  # each rank to the next one, around a ring
    P2P = "p2p"  # one pair, one direction
    P2P_BOTH = "p2p_both"  # one pair, both directions at once
    PING_PONG = "ping_pong"  # one pair, there and back; its time is one way
    INCAST = "incast"  # all to one, message by message
    MULTICAST = "multicast"  # one to all, message by message
    BARRIER = "barrier"


_SQUEEZED = {name.replace("_", ""): name.value for name in Collective} | {
    "bcast": "broadcast",
    "alltoallsingle": "all_to_all",
}


def collective_named(text: str) -> str:
    """Return our name of a collective in any usual spelling; the text itself for others."""
    bare = re.sub(r"_perf(?:_\w+)?$", "", text.strip().lower())
    return _SQUEEZED.get(re.sub(r"[ _-]", "", bare.removeprefix("nccl")), bare)


# By the beginning of torch's name without underscores; the first that fits.
_OF_TORCH = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all_v", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "barrier", "send", "recv"),
)


def torch_collective(name: str) -> str:
    """Return our name of a call as torch's backends record it; "" for others.

    E.g. allreduce_coalesced, _allgather_base, all_to_allv, _reduce_oop and irecv. NCCL's
    barrier is an all-reduce of one element: all_reduce_barrier.
    """
    bare = re.sub("[^a-z]|^_*(?:monitored|i(?=send|recv))", "", name.lower())
    return next((c for c in _OF_TORCH if bare.startswith(c.replace("_", ""))), "")


class RedOp(StrEnum):
    """Reduction operation. MULSUM multiplies each rank's values by a factor, then sums."""

    NONE = "none"
    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    MULSUM = "mulsum"


class Mode(StrEnum):
    """Timing mode of successive calls; docs/definitions.md says what each includes."""

    AHEAD = "queued-ahead"
    QUEUED = "queued"
    GRAPH = "graph"
    BLOCKING = "blocking"


class Api(StrEnum):
    """Library that issues the call: torch.distributed, or libnccl with its own communicator."""

    TORCH = "torch"
    NCCL = "nccl"


class Registration(StrEnum):
    """Registration of buffers with the communicator, as -R of nccl-tests."""

    NONE = "none"
    LOCAL = "local"  # ncclCommRegister
    SYMMETRIC = "symmetric"  # ncclCommWindowRegister with NCCL_WIN_COLL_SYMMETRIC


class Parts(StrEnum):
    """Unit of `count`."""

    WHOLE = "whole"  # the whole buffer
    PER_RANK = "per rank"  # the largest buffer holds one part of each rank
    PER_OTHER = "per other rank"  # one part of each rank but the root


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties of a collective that do not depend on the implementation.

    `synchronizing`: no rank can finish before all have arrived, so the shortest time of any
    rank is the transfer without waiting.
    """

    parts: Parts
    busbw: str  # the factor's name in _FACTOR
    reduces: bool = False
    rooted: bool = False
    pair: bool = False
    synchronizing: bool = False


_FACTOR: dict[str, Callable[[int], float]] = {
    "2(n-1)/n": lambda n: 2 * (n - 1) / n,
    "(n-1)/n": lambda n: (n - 1) / n,
    "1": lambda n: 1.0,
    "none": lambda n: 0.0,
}

FACTS: dict[Collective, Facts] = {
    Collective.ALL_REDUCE: Facts(
        parts=Parts.WHOLE, busbw="2(n-1)/n", reduces=True, synchronizing=True
    ),
    Collective.ALL_GATHER: Facts(parts=Parts.PER_RANK, busbw="(n-1)/n", synchronizing=True),
    Collective.REDUCE_SCATTER: Facts(
        parts=Parts.PER_RANK, busbw="(n-1)/n", reduces=True, synchronizing=True
    ),
    Collective.BROADCAST: Facts(parts=Parts.WHOLE, busbw="1", rooted=True),
    Collective.REDUCE: Facts(parts=Parts.WHOLE, busbw="1", reduces=True, rooted=True),
    Collective.ALL_TO_ALL: Facts(parts=Parts.PER_RANK, busbw="(n-1)/n", synchronizing=True),
    Collective.ALL_TO_ALL_V: Facts(parts=Parts.PER_RANK, busbw="(n-1)/n", synchronizing=True),
    Collective.GATHER: Facts(parts=Parts.PER_RANK, busbw="(n-1)/n", rooted=True),
    Collective.SCATTER: Facts(parts=Parts.PER_RANK, busbw="(n-1)/n", rooted=True),
    Collective.SENDRECV: Facts(parts=Parts.WHOLE, busbw="1"),
    Collective.P2P: Facts(parts=Parts.WHOLE, busbw="1", pair=True),
    Collective.P2P_BOTH: Facts(parts=Parts.WHOLE, busbw="1", pair=True),
    Collective.PING_PONG: Facts(parts=Parts.WHOLE, busbw="1", pair=True),
    Collective.INCAST: Facts(parts=Parts.PER_OTHER, busbw="1", rooted=True),
    Collective.MULTICAST: Facts(parts=Parts.PER_OTHER, busbw="1", rooted=True),
    Collective.BARRIER: Facts(parts=Parts.WHOLE, busbw="none", synchronizing=True),
}


# In place: the receive buffer, or the rank's part of it, is also the send buffer. For other
# collectives the result would be undefined. torch.distributed has three only in this form.
_IN_PLACE = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.BROADCAST,
    Collective.REDUCE,
)
ONE_BUFFER = (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE)
ALL_TO_ALLS = (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL_V)
# A gather and its mirror image, which sends as much.
GATHERS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def is_synchronizing(name: str) -> bool:
    """Return whether no rank can finish before all have arrived; False for other messages."""
    return name in FACTS and FACTS[Collective(name)].synchronizing


def placements(collective: Collective, api: Api) -> tuple[bool, ...]:
    """Return the values of `in_place` that an API supports."""
    if collective not in _IN_PLACE:
        return (False,)
    return (True,) if api is Api.TORCH and collective in ONE_BUFFER else (False, True)


def busbw_factor(collective: Collective, num_ranks: int) -> float:
    """Return busbw / algbw: 0 for a barrier, which moves nothing, and for a single rank."""
    return _FACTOR[FACTS[collective].busbw](num_ranks)


def num_parts(collective: Collective, num_ranks: int) -> int:
    """Return the size of the largest buffer of any rank in units of `count`."""
    return {Parts.WHOLE: 1, Parts.PER_RANK: num_ranks, Parts.PER_OTHER: num_ranks - 1}[
        FACTS[collective].parts
    ]


def trimmed_count(collective: Collective, num_bytes: int, itemsize: int, num_ranks: int) -> int:
    """Return the largest `count` that fits num_bytes, rounded as in nccl-tests.

    Parts are trimmed to a multiple of 16 bytes, so the count of a small message is 0.
    """
    parts = num_parts(collective, num_ranks)
    if FACTS[collective].parts is Parts.WHOLE:
        return num_bytes // itemsize
    per_align = max(1, ALIGN_BYTES // itemsize)
    return num_bytes // itemsize // parts // per_align * per_align


def sizes(begin: int, end: int, *, factor: float = 0.0, step: int = 0) -> list[int]:
    """Return sizes from begin to end: times `factor` if above 1, else plus `step`.

    Raise ConfigError if neither leads from begin to end.
    """
    if begin > end:
        raise ConfigError("begin", begin, f"at most the end, {end}")
    if not math.isfinite(factor):
        raise ConfigError("factor", factor, "a finite number")
    if factor <= 1 and step <= 0 and begin < end:
        raise ConfigError("factor", factor, "a factor above 1, or a step of at least a byte")
    steps = []
    size = begin
    while size <= end:
        steps.append(size)
        if len(steps) > 100_000:
            raise ConfigError("step", step, "steps that give at most 100000 sizes")
        size = max(size + 1, int(size * factor)) if factor > 1 else size + max(step, 1)
    return steps


def ordered_pairs(num_ranks: int, partners: int | None) -> Iterator[tuple[int, int]]:
    """Yield all pairs, or those in which each rank sends to and receives from `partners`.

    Distances from source to target are spread evenly, from 1 on.
    """
    if partners is not None and partners >= num_ranks:
        raise ConfigError("partners", partners, f"less than the number of ranks ({num_ranks})")
    count = partners or num_ranks - 1
    distances = [1 + i * (num_ranks - 1) // count for i in range(count)]
    for source in range(num_ranks):
        for target in sorted((source + distance) % num_ranks for distance in distances):
            yield source, target


def groups(num_ranks: int, split: str) -> list[tuple[int, ...]]:
    """Return the ranks of each communicator, as NCCL_TESTS_SPLIT divides them; "" is one.

    "mod 4" (or "% 4"), "div 8" ("/ 8"), "and 0x7" ("& 0x7"), "or 1" ("| 1"): ranks with
    the same result form one communicator. Source: nccl-tests, common.cu.
    """
    if not split:
        return [tuple(range(num_ranks))]
    word, value = parse_split(split)
    colours: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        colours.setdefault(_SPLITS[word](rank, value), []).append(rank)
    return [tuple(ranks) for ranks in colours.values()]


_SPLIT_WORDS = {"%": "mod", "/": "div", "&": "and", "|": "or"}
_SPLITS: dict[str, Callable[[int, int], int]] = {
    "mod": operator.mod,
    "div": operator.floordiv,
    "and": operator.and_,
    "or": operator.or_,
}


def parse_split(text: str) -> tuple[str, int]:
    """Parse "MOD 4" or "%4" into ("mod", 4). Raise ConfigError."""
    squeezed = text.strip().lower()
    for sign, word in (*_SPLIT_WORDS.items(), *zip(_SPLITS, _SPLITS, strict=True)):
        if squeezed.startswith(sign):
            try:
                value = int(squeezed.removeprefix(sign).strip(), 0)
            except ValueError:
                break
            if value > 0 or (word in ("and", "or") and value == 0):
                return word, value
            break
    raise ConfigError(
        "group-split", text, "one of 'mod N', 'div N' (N from 1), 'and MASK' and 'or MASK'"
    )


def spread_counts(num_ranks: int, count: int, spread: float, itemsize: int) -> Matrix:
    """Return the elements that rank i sends to rank j, as nccl-tests generates them.

    spread 0: every peer gets `count`. spread 1: proportional to the distance (j - i) mod n,
    nothing to the rank itself. Between: a blend. Each part is trimmed to 16 bytes.
    """
    total = count * num_ranks * itemsize
    distances = num_ranks * (num_ranks - 1) // 2

    def part(i: int, j: int) -> int:
        if num_ranks == 1:
            return count
        even = total / num_ranks
        far = (j - i) % num_ranks * total / distances
        num_bytes = int((1 - spread) * even + spread * far)
        return num_bytes // ALIGN_BYTES * ALIGN_BYTES // itemsize

    return tuple(tuple(part(i, j) for j in range(num_ranks)) for i in range(num_ranks))


def largest_buffer(matrix: Sequence[Sequence[int]]) -> int:
    """Return the elements of the largest send or receive buffer of any rank."""
    rows = [sum(row) for row in matrix]
    columns = [sum(column) for column in zip(*matrix, strict=True)]
    return max(rows + columns, default=0)
