"""What a table's figures say about its collective and its ranks, with the reason in words.

busbw / algbw is 2(n-1)/n for an all-reduce and (n-1)/n for collectives with a part per rank,
whose size is n x count elements. A printed ratio is an interval: half a unit in the last
place of each figure. Only a number of ranks that alone fits the rows is taken.
"""

import math
from collections.abc import Sequence

from stepmark.core.collectives import FACTS, Collective, Parts
from stepmark.core.dtypes import DType
from stepmark.core.reading import Reading
from stepmark.trace.numerals import half_unit, value_of

MOST_RANKS = 2**20
# Of the rows: a typing error or a row of another run does not hide the rest.
_AGREE = 0.9
# Rows that are looked at: more tell nothing new.
_ENOUGH = 4000
Known = tuple[int | None, str]


def itemsize_of(dtype: str) -> int | None:
    """Bytes of an element, or None for a type that is not known."""
    return DType(dtype).itemsize if dtype in DType.__members__.values() else None


def parts_of(readings: Sequence[Reading]) -> int | None:
    """size / (count x element): how many parts, if that is whole and the same in all rows."""
    found = set()
    for reading in readings[:_ENOUGH]:
        itemsize = itemsize_of(reading.dtype)
        if not reading.count or not reading.size_bytes or itemsize is None:
            continue
        parts, rest = divmod(reading.size_bytes, reading.count * itemsize)
        if rest:
            return None
        found.add(parts)
    return found.pop() if len(found) == 1 else None


def collective_of(readings: Sequence[Reading]) -> tuple[str, str]:
    """(collective, reason) if size, redop, root and factor leave one; ("", "") otherwise."""
    factor, parts = factor_interval(readings), parts_of(readings)
    if factor and factor[0] > 1.01:
        return "all_reduce", f"busbw/algbw is {_middle(factor):.4g}: above 1"
    redops = {reading.redop for reading in readings}
    if redops & {"", "none"}:
        return "", ""
    if parts and parts > 1:
        return "reduce_scatter", f"it reduces, and size is {parts} x count elements"
    rooted = {reading.root for reading in readings}
    if parts == 1 and None not in rooted and factor and factor[0] > 0:
        if -1 not in rooted:
            return "reduce", "it reduces to a root"
        if rooted == {-1}:
            return "all_reduce", "it reduces, has no root, and size is count elements"
    return "", ""


def num_ranks_of(readings: Sequence[Reading], collective: str) -> Known:
    """(ranks, reason) of the collective's figures; (None, reason why not) otherwise."""
    facts = FACTS.get(Collective(collective)) if collective in set(Collective) else None
    parts = parts_of(readings)
    if facts is None:
        if parts and parts > 1:
            return parts, f"size is {parts} x count elements in all rows"
        return None, ""
    if facts.parts is Parts.PER_RANK and parts:
        return parts, f"size is {parts} x count elements in all rows"
    twice = {"2(n-1)/n": 2, "(n-1)/n": 1}.get(facts.busbw)
    factor = factor_interval(readings) if twice else None
    if twice is None or factor is None:
        return None, ""
    return _ranks_by_factor(factor, twice, facts.busbw)


def factor_interval(readings: Sequence[Reading]) -> tuple[float, float] | None:
    """Where busbw / algbw of nearly all rows can lie, or None where rows do not agree."""
    edges: list[tuple[float, int]] = []
    total = 0
    for reading in readings[:_ENOUGH]:
        if interval := _interval(reading):
            edges += [(interval[0], -1), (interval[1], 1)]
            total += 1
    depth, best, found = 0, 0, (0.0, 0.0)
    edges.sort()
    for index, (value, step) in enumerate(edges):
        depth -= step
        if depth > best:
            best, found = depth, (value, edges[index + 1][0])
    return found if total and best >= _AGREE * total else None


def _ranks_by_factor(factor: tuple[float, float], twice: int, formula: str) -> Known:
    low, high = factor
    shown = f"busbw/algbw is {_middle(factor):.4g}"
    first = math.ceil(twice / (twice - low)) if low < twice else MOST_RANKS + 1
    last = math.floor(twice / (twice - high)) if high < twice else MOST_RANKS + 1
    first = max(first, 1)
    if first == last <= MOST_RANKS:
        return first, f"{shown}: {formula} with {first} ranks"
    if first > last or first > MOST_RANKS:
        return None, f"{shown}, which is {formula} of no number of ranks"
    upto = f"to {last}" if last <= MOST_RANKS else "and more"
    return None, f"{shown}: {formula} fits {first} {upto} ranks"


def _interval(reading: Reading) -> tuple[float, float] | None:
    """Of one row's busbw / algbw; None where it says nothing. A time is finer than algbw."""
    if reading.printed is None:
        algbw, busbw = reading.algbw_bytes_per_s, reading.busbw_bytes_per_s
        if not algbw or busbw is None:
            return None
        return busbw / algbw * (1 - 1e-5), busbw / algbw * (1 + 1e-5)
    time, algbw, busbw = map(value_of, reading.printed)
    if algbw is None or busbw is None or not reading.size_bytes:
        return None
    of_time, of_algbw, of_busbw = map(half_unit, reading.printed)
    if algbw <= of_algbw or busbw < 0:
        return None
    lowest, highest = max(busbw - of_busbw, 0), busbw + of_busbw
    low, high = lowest / (algbw + of_algbw), highest / (algbw - of_algbw)
    if time and reading.time_s and reading.algbw_bytes_per_s:
        second, rate = reading.time_s / time, reading.algbw_bytes_per_s / algbw
        scale = second * rate / reading.size_bytes
        low = max(low, lowest * max(time - of_time, 0) * scale)
        high = min(high, highest * (time + of_time) * scale)
    return (low - 1e-9, high + 1e-9) if low <= high else None


def _middle(interval: tuple[float, float]) -> float:
    return (interval[0] + interval[1]) / 2
