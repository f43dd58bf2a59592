"""Numbers as tables print them, and how far the printed figure can be from the true one."""

import math
import re

# Bounded, so that a line of a million digits costs nothing.
NUMBER = r"[+-]?(?:\d{1,20}(?:\.\d{0,25})?|\.\d{1,25})(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(NUMBER)
_LONGEST = 60
_ABSENT = frozenset(("", "-", "--", "n/a", "na", "nan", "-nan", "inf", "-inf", "none", "null"))
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3}){1,6}(?:\.\d{1,15})?")


def is_number(text: str) -> bool:
    """A plain number, with an exponent or not; no unit, no nan."""
    return _NUMBER.fullmatch(text) is not None


def is_absent(text: str) -> bool:
    """What stands in a cell without a figure: N/A, nan, -, nothing."""
    return text.lower() in _ABSENT


def is_cell(text: str) -> bool:
    """A number or what stands for one that is missing."""
    return is_number(text) or is_absent(text)


def value_of(text: str) -> float | None:
    """The number, or None for one that is absent, not finite or no number."""
    if len(text) > _LONGEST or "_" in text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def whole_of(text: str) -> int | None:
    """The number if it is a whole one of at most 62 bits, in any spelling: 8 of "8.0"."""
    value = value_of(text)
    if value is None or not value.is_integer() or abs(value) >= 2**62:
        return None
    return int(value)


def ungrouped(text: str) -> str:
    """1234.5 of "1,234.5"."""
    return text.replace(",", "") if "," in text and _GROUPED.fullmatch(text) else text


def half_unit(text: str) -> float:
    """Half a unit in the last printed place: 0.005 of "0.47", 0.5e6 of "1.0e+07"; 0 of N/A."""
    if not is_number(text):
        return 0.0
    mantissa, _, exponent = text.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** max(-300, min(300, int(exponent or 0) - places))
