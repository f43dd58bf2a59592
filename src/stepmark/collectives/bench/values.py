"""Contributions of ranks and their right result, for 4096 rows that elements are drawn from.

Data without reduction is random bits without NaN. Reductions are exact in any order of
summation wherever that is possible. In each row, one number w is spread over the ranks by
factors c, rotated by an amount of the row's own, so that every rank's part differs:

  sum, mulsum  w * c_rank. Floats: small whole numbers, sum |w c| within the significand; with
               many ranks most factors are 0. Integers: any odd w, which overflows and wraps.
  prod         floats: -2^(w * c_rank), within the exponent's range. Integers: g^c_rank, g odd.
  min, max     one rank has the best value, the others worse ones; both signs.
  avg          as sum. Floats: exact if the number of ranks is a power of two, else within one
               rounding per contribution and two for 1/n. Integers: sums are multiples of n.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import INT_POISON, TORCH_DTYPE, UNIT_ROUNDOFF
from stepmark.model.collectives import RedOp

PREMUL_FACTOR = 2.0  # of mulsum: each rank's values times this, then summed

# Bits are moved and compared as signed integers: few operations support unsigned types or fp8.
BITS_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = (DType.INT8, DType.INT32, DType.INT64)
# |exponent| of a product and of each step towards it: normal numbers only.
_MAX_EXPONENT = {
    DType.FP64: 1022,
    DType.FP32: 126,
    DType.BF16: 126,
    DType.FP16: 14,
    DType.FP8_E4M3: 6,
    DType.FP8_E5M2: 14,
}
ROWS = 4096


def hash64(x: Tensor) -> Tensor:
    """Mix int64 to int64 by the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = x + -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The right result by row of the table."""

    bits: Tensor
    wide: Tensor  # the same in fp64 or int64; unrounded where there is a tolerance
    tolerance: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """Wide values of a reduction by row: contributions of a rank, and the right result."""

    sent: Callable[[Tensor], Tensor]  # of (rank + rotation of the row) mod n
    result: Tensor
    roundings: int = 0


@lru_cache(maxsize=64)
def expected(dtype: DType, redop: RedOp, num_ranks: int) -> Expected:
    """Return the right result by row. RedOp.NONE: data without reduction."""
    scheme = None if redop is RedOp.NONE else _plan(dtype, redop, num_ranks)[1]
    bits = narrow(scheme.result, dtype) if scheme else _random_bits(dtype)
    if scheme is None or not scheme.roundings:
        name = "by rank and position, exact"
        return Expected(bits=bits, wide=widen(bits, dtype), tolerance=0.0, name=name)
    # gamma_k = k u / (1 - k u). Contributions of a row have one sign: errors are relative to
    # the result. Below 1, record.Check counts errors as absolute.
    share = scheme.roundings * UNIT_ROUNDOFF[dtype]
    relative = share / (1 - share)
    return Expected(
        bits=bits,
        wide=scheme.result,
        tolerance=relative * min(1.0, float(scheme.result.abs().max())),
        name=f"by rank and position, within {scheme.roundings} roundings",
    )


@lru_cache(maxsize=64)
def sent_bits(dtype: DType, redop: RedOp, num_ranks: int, index: int) -> Tensor:
    """Return by row the data that the rank with this index sends."""
    if redop is RedOp.NONE:
        return _random_bits(dtype)
    keys, scheme = _plan(dtype, redop, num_ranks)
    return narrow(scheme.sent((index + _draw(keys, 1, num_ranks)) % num_ranks), dtype)


@lru_cache(maxsize=8)
def _plan(dtype: DType, redop: RedOp, num_ranks: int) -> tuple[Tensor, "_Scheme"]:
    """Return a key per row, from which all of the row is drawn, and the reduction's values.

    Rows of integers whose result would be poison are replaced by another.
    """
    keys = torch.arange(ROWS)
    scheme = _scheme(dtype, redop, num_ranks, keys)
    if dtype.is_integer:
        bad = narrow(scheme.result, dtype) == _int_poison(dtype)
        keys = torch.where(bad, keys[~bad][0], keys)
        scheme = _scheme(dtype, redop, num_ranks, keys)
    return keys, scheme


def _int_poison(dtype: DType) -> int:
    return int.from_bytes(bytes([INT_POISON] * dtype.itemsize), "little")


def _draw(keys: Tensor, salt: int, below: int) -> Tensor:
    """Return integers from 0 to below - 1, by row."""
    return (hash64(keys + (salt << 40)) >> 1 & (1 << 62) - 1) % below


def _random_bits(dtype: DType) -> Tensor:
    bits = hash64(torch.arange(ROWS) + (7 << 40)).to(BITS_OF[dtype.itemsize])
    if dtype.is_integer:
        return torch.where(bits == _int_poison(dtype), 0, bits)
    # Without the exponent's highest bit it is finite.
    finite = widen(bits, dtype).isfinite()
    return torch.where(finite, bits, bits & ~(1 << (8 * dtype.itemsize - 2)))


def narrow(wide: Tensor, dtype: DType) -> Tensor:
    """Return fp64 or int64 as the bits of a type. Integers wrap."""
    if dtype.is_integer:
        return wide.to(BITS_OF[dtype.itemsize])
    rounded = (wide.float() if dtype.is_fp8 else wide).to(TORCH_DTYPE[dtype])
    return rounded.view(BITS_OF[dtype.itemsize])


def widen(bits: Tensor, dtype: DType) -> Tensor:
    """Return bits of a type as fp64 or int64; uint64 unchanged: only differences are used."""
    if dtype.is_integer:
        unsigned = dtype in (DType.UINT8, DType.UINT32)
        return bits.long() & (1 << 8 * dtype.itemsize) - 1 if unsigned else bits.long()
    values = bits.view(TORCH_DTYPE[dtype])
    return (values.float() if dtype.is_fp8 else values).double()


def _scheme(dtype: DType, redop: RedOp, num_ranks: int, keys: Tensor) -> _Scheme:
    is_integer = dtype.is_integer
    match redop:
        case RedOp.SUM | RedOp.MULSUM:
            factor = int(PREMUL_FACTOR) if redop is RedOp.MULSUM else 1
            if is_integer:
                return _wrapping_sum(num_ranks, factor, keys)
            return _float_sum(dtype, num_ranks, factor, 1, keys)
        case RedOp.AVG:
            if is_integer:
                return _whole_average(dtype, num_ranks, keys)
            return _float_sum(dtype, num_ranks, 1, num_ranks, keys)
        case RedOp.PROD:
            return (
                _wrapping_product(num_ranks, keys)
                if is_integer
                else _float_product(dtype, num_ranks, keys)
            )
        case RedOp.MIN | RedOp.MAX:
            return _best(dtype, num_ranks, 1 if redop is RedOp.MIN else -1, keys)
        case RedOp.NONE:
            raise AssertionError("data without reduction has no scheme")


def _factors(num_ranks: int, most: int) -> list[int]:
    """Return factors by rank with a sum up to `most`: m, m - 1, ..., 2, 1, 1, ..., 0, 0, ...

    Not all are equal, so that rotating them by any amount changes some: where they do not all
    fit, the last ranks have 0. m is as large as possible.
    """
    num_nonzero = max(1, min(num_ranks, most - 1))
    m = 1
    while m < num_nonzero and (m + 1) * (m + 2) // 2 + num_nonzero - m - 1 <= most:
        m += 1
    return [max(m - rank, 1) if rank < num_nonzero else 0 for rank in range(num_ranks)]


def _spread(num_ranks: int, limit: int, most: int | None = None) -> tuple[Tensor, int, int]:
    """Return factors, their sum, and the largest w for which sum |w c| is within `limit`.

    most: of the sum of factors; None: factors and w share the limit.
    """
    factors = _factors(num_ranks, most or limit // (4 if limit >= 64 else 2))
    return torch.tensor(factors), sum(factors), limit // sum(factors)


def _signed(keys: Tensor, largest: int) -> Tensor:
    """Return integers from -largest to largest, without 0."""
    return (1 + _draw(keys, 2, largest)) * (1 - 2 * _draw(keys, 3, 2))


def _float_sum(
    dtype: DType, num_ranks: int, factor: int, divisor: int, keys: Tensor
) -> _Scheme:
    """Return values of sum (factor x) / divisor, rounded only if the divisor is no power of 2.

    Libraries round 1/n, each product with it and each addition, or divide the sum. Then so
    few ranks contribute to a row that the smallest part still exceeds the tolerance.
    """
    limit = int(1 / UNIT_ROUNDOFF[dtype])
    rounds = divisor & (divisor - 1) != 0
    most = math.isqrt(int(limit / 1.5)) if rounds else None
    by_rank, total, largest = _spread(num_ranks, limit, most)
    # Times a power of two, so that results are at least 1 where the type's range allows it.
    room = math.frexp(torch.finfo(TORCH_DTYPE[dtype]).max / (largest * total))[1] - 1
    scale = 2.0 ** min(room, (divisor - 1).bit_length())
    w = _signed(keys, largest).double() * scale
    return _Scheme(
        sent=lambda turned: w * by_rank[turned],
        result=w * (factor * total) / divisor,
        roundings=int(by_rank.count_nonzero()) + 1 if rounds else 0,
    )


def _wrapping_sum(num_ranks: int, factor: int, keys: Tensor) -> _Scheme:
    factors = [max(7 - rank, 1) for rank in range(num_ranks)]
    factors[0] += 1 - sum(factors) % 2  # an odd total keeps all of w's bits
    w = hash64(keys) | 1
    by_rank = torch.tensor(factors)
    return _Scheme(sent=lambda turned: w * by_rank[turned], result=w * (factor * sum(factors)))


def _whole_average(dtype: DType, num_ranks: int, keys: Tensor) -> _Scheme:
    """Return multiples of n whose sum fits; all zeros where n itself does not."""
    signed = dtype in _SIGNED
    bits = 8 * dtype.itemsize - (signed or dtype is DType.UINT64)
    limit = ((1 << bits) - 1) // num_ranks
    by_rank, total, largest = _spread(num_ranks, max(limit, 1))
    w = _signed(keys, largest) * min(limit, 1)
    w = w if signed else w.abs()
    return _Scheme(sent=lambda turned: num_ranks * w * by_rank[turned], result=w * total)


def _float_product(dtype: DType, num_ranks: int, keys: Tensor) -> _Scheme:
    """Return negative factors only: one that is missing or doubled changes the sign."""
    by_rank, total, largest = _spread(num_ranks, _MAX_EXPONENT[dtype])
    w = _signed(keys, largest)
    return _Scheme(
        sent=lambda turned: -_power_of_two(w * by_rank[turned]),
        result=_power_of_two(w * total) * (-1.0) ** num_ranks,
    )


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent exactly, which pow() does not promise."""
    return (exponent + 1023 << 52).view(torch.float64)


def _wrapping_product(num_ranks: int, keys: Tensor) -> _Scheme:
    """Return powers of bases of the form 8x + 3, whose order modulo 2^bits is 2^(bits - 2)."""
    base = hash64(keys) & ~7 | 3
    powers = [1 + 2 * (rank * rank // 3 % 2) for rank in range(num_ranks)]
    powers[0] = 5 - sum(powers[1:]) % 2  # an odd total is never a multiple of the order
    by_rank = torch.tensor(powers)
    table = torch.stack([_power(base, exponent) for exponent in range(max(powers) + 1)])
    return _Scheme(
        sent=lambda turned: table.gather(0, by_rank[turned][None])[0],
        result=_power(base, sum(powers)),
    )


def _power(base: Tensor, exponent: int) -> Tensor:
    """Return base**exponent by squaring; it wraps."""
    result = torch.ones_like(base)
    while exponent:
        result = result * base if exponent % 2 else result
        base = base * base
        exponent = exponent // 2
    return result


def _best(dtype: DType, num_ranks: int, sign: int, keys: Tensor) -> _Scheme:
    """Give the rank with rotation 0 the best value of the row; sign 1: the smallest."""
    middle = 0
    if dtype.is_integer:
        limit = (1 << min(8 * dtype.itemsize - 1, 61)) - 1
        # Unsigned: the same order, around the middle of its range.
        middle = -(1 << 8 * dtype.itemsize - 1) if dtype not in _SIGNED else 0
    else:
        limit = int(1 / UNIT_ROUNDOFF[dtype])
    best = _draw(keys, 2, limit + limit // 2) - limit

    def sent(turned: Tensor) -> Tensor:
        behind = 1 + _draw(keys + (turned << 20), 3, limit // 2)
        return in_type(best + torch.where(turned == 0, 0, behind))

    def in_type(value: Tensor) -> Tensor:
        return sign * value + middle if dtype.is_integer else (sign * value).double()

    return _Scheme(sent=sent, result=in_type(best))
