"""Parse printed numbers with their precision; infer a table's collective and ranks from them.

busbw / algbw is 2(n-1)/n for an all-reduce and (n-1)/n for collectives with a part per rank,
whose size is n x count elements. A printed ratio is an interval: half a unit in the last
place of each figure. A number of ranks is returned only if no other one fits the rows.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache

from stepmark.ground.dtypes import DType
from stepmark.ground.reading import Reading
from stepmark.model.collectives import FACTS, Collective, Parts

# Digits are limited, so that a line of a million digits costs nothing.
NUMBER = r"[+-]?(?:\d{1,20}(?:\.\d{0,25})?|\.\d{1,25})(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(NUMBER)
_MAX_LENGTH = 60
_CACHE = 65536  # checks look at each figure several times
_MAX_PLAIN = 20  # digits and point
_ROUNDING: list[float] = [
    0.5 * 10.0 ** float(-num_decimals) for num_decimals in range(_MAX_PLAIN + 1)
]
_ABSENT = frozenset(("", "-", "--", "n/a", "na", "nan", "-nan", "inf", "-inf", "none", "null"))


def is_number(text: str) -> bool:
    """Return whether the text is a plain number: no unit, no nan."""
    return _NUMBER.fullmatch(text) is not None


def is_cell(text: str) -> bool:
    """Return whether the text is a number or stands for a missing one (N/A, nan, -, "")."""
    return is_number(text) or text.lower() in _ABSENT


@lru_cache(_CACHE)
def parse_number(text: str) -> float | None:
    """Return the number, or None for a missing or infinite one."""
    if len(text) > _MAX_LENGTH or "_" in text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_integer(text: str) -> int | None:
    """Return a whole number of at most 62 bits in any spelling: 8 for "8.0"; else None."""
    value = parse_number(text)
    if value is None or not value.is_integer() or abs(value) >= 2**62:
        return None
    return int(value)


@lru_cache(_CACHE)
def rounding_error(text: str) -> float:
    """Return half a unit of the last digit: 0.005 for "0.47", 0.5e6 for "1.0e+07"; N/A: 0."""
    whole, _, decimals = text.partition(".")
    if f"{whole}{decimals}".isdecimal() and len(text) <= _MAX_PLAIN:
        return _ROUNDING[len(decimals)]
    if not is_number(text):
        return 0.0
    mantissa, _, exponent = text.lower().partition("e")
    num_decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** max(-300, min(300, int(exponent or 0) - num_decimals))


MAX_RANKS = 2**20
# Share of the rows: a typing error or a row of another run does not hide the rest.
_MIN_AGREEMENT = 0.9
_MAX_ROWS = 4000
RanksAndReason = tuple[int | None, str]


@lru_cache(_CACHE)
def itemsize_of(dtype: str) -> int | None:
    """Return the bytes of an element, or None for an unknown type."""
    return DType(dtype).itemsize if dtype in DType.__members__.values() else None


def parts_of(readings: Sequence[Reading]) -> int | None:
    """Return size / (count x element) if it is whole and the same in all rows."""
    parts = set()
    for reading in readings[:_MAX_ROWS]:
        itemsize = itemsize_of(reading.dtype)
        if not reading.count or not reading.size_bytes or itemsize is None:
            continue
        quotient, remainder = divmod(reading.size_bytes, reading.count * itemsize)
        if remainder:
            return None
        parts.add(quotient)
    return parts.pop() if len(parts) == 1 else None


def collective_of(readings: Sequence[Reading]) -> tuple[str, str]:
    """Return (collective, reason) if the figures leave only one; ("", "") otherwise."""
    factor = factor_interval(readings)
    parts = parts_of(readings)
    if factor and factor[0] > 1.01:
        return "all_reduce", f"busbw/algbw is {_middle(factor):.4g}: above 1"
    if {reading.redop for reading in readings} & {"", "none"}:
        return "", ""
    if parts and parts > 1:
        return "reduce_scatter", f"it reduces, and size is {parts} x count elements"
    roots = {reading.root for reading in readings}
    if parts == 1 and None not in roots and factor and factor[0] > 0:
        if -1 not in roots:
            return "reduce", "it reduces to a root"
        if roots == {-1}:
            return "all_reduce", "it reduces, has no root, and size is count elements"
    return "", ""


def num_ranks_of(readings: Sequence[Reading], collective: str) -> RanksAndReason:
    """Return (ranks, reason), or (None, reason why not)."""
    facts = FACTS.get(Collective(collective)) if collective in set(Collective) else None
    parts = parts_of(readings)
    if parts and (facts.parts is Parts.PER_RANK if facts else parts > 1):
        return parts, f"size is {parts} x count elements in all rows"
    twice = {"2(n-1)/n": 2, "(n-1)/n": 1}.get(facts.busbw) if facts else None
    factor = factor_interval(readings) if twice else None
    if facts is None or twice is None or factor is None:
        return None, ""
    return _ranks_by_factor(factor, twice, facts.busbw)


def factor_interval(readings: Sequence[Reading]) -> tuple[float, float] | None:
    """Return the range of busbw / algbw in nearly all rows, or None if rows do not agree."""
    return common_interval(list(filter(None, map(_interval, readings[:_MAX_ROWS]))))


def common_interval(
    intervals: Sequence[tuple[float, float]], agreement: float = _MIN_AGREEMENT
) -> tuple[float, float] | None:
    """Return the range that most intervals share, or None if fewer than this share do."""
    edges = sorted([(low, -1) for low, _ in intervals] + [(high, 1) for _, high in intervals])
    depth = 0
    deepest = 0
    best = (0.0, 0.0)
    for index, (value, step) in enumerate(edges):
        depth -= step
        if depth > deepest:
            deepest = depth
            best = (value, edges[index + 1][0])
    return best if intervals and deepest >= agreement * len(intervals) else None


def overlap(left: tuple[float, float], right: tuple[float, float], slack: float) -> bool:
    """Return whether two ranges overlap. slack: of rounding, relative."""
    error = slack * max(abs(left[0]), abs(right[0]))
    return left[0] <= right[1] + error and right[0] <= left[1] + error


def _ranks_by_factor(factor: tuple[float, float], twice: int, formula: str) -> RanksAndReason:
    low, high = factor
    ratio = f"busbw/algbw is {_middle(factor):.4g}"
    first = math.ceil(twice / (twice - low)) if low < twice else MAX_RANKS + 1
    last = math.floor(twice / (twice - high)) if high < twice else MAX_RANKS + 1
    first = max(first, 1)
    if first == last <= MAX_RANKS:
        return first, f"{ratio}: {formula} with {first} ranks"
    if first > last or first > MAX_RANKS:
        return None, f"{ratio}, which is {formula} of no number of ranks"
    upto = f"to {last}" if last <= MAX_RANKS else "and more"
    return None, f"{ratio}: {formula} fits {first} {upto} ranks"


def _interval(reading: Reading) -> tuple[float, float] | None:
    """Return the interval of one row's busbw / algbw. A time is finer than algbw."""
    if reading.printed is None:
        exact_algbw = reading.algbw_bytes_per_s
        exact_busbw = reading.busbw_bytes_per_s
        if not exact_algbw or exact_busbw is None:
            return None
        ratio = exact_busbw / exact_algbw
        return ratio * (1 - 1e-5), ratio * (1 + 1e-5)
    time, algbw, busbw = map(parse_number, reading.printed)
    if algbw is None or busbw is None or not reading.size_bytes:
        return None
    time_error, algbw_error, busbw_error = map(rounding_error, reading.printed)
    if algbw <= algbw_error or busbw < 0:
        return None
    lowest = max(busbw - busbw_error, 0)
    highest = busbw + busbw_error
    low = lowest / (algbw + algbw_error)
    high = highest / (algbw - algbw_error)
    if time and reading.time_s and reading.algbw_bytes_per_s:
        second = reading.time_s / time
        rate = reading.algbw_bytes_per_s / algbw
        scale = second * rate / reading.size_bytes
        low = max(low, lowest * max(time - time_error, 0) * scale)
        high = min(high, highest * (time + time_error) * scale)
    return (low - 1e-9, high + 1e-9) if low <= high else None


def _middle(interval: tuple[float, float]) -> float:
    return (interval[0] + interval[1]) / 2
