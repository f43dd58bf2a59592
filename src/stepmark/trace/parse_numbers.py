"""Numbers as tables print them, and how far a printed figure can be from the true one."""

import math
import re

# Digits are limited, so that a line of a million digits costs nothing.
NUMBER = r"[+-]?(?:\d{1,20}(?:\.\d{0,25})?|\.\d{1,25})(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(NUMBER)
_MAX_LENGTH = 60
_ABSENT = frozenset(("", "-", "--", "n/a", "na", "nan", "-nan", "inf", "-inf", "none", "null"))


def is_number(text: str) -> bool:
    """Return whether the text is a plain number: no unit, no nan."""
    return _NUMBER.fullmatch(text) is not None


def is_cell(text: str) -> bool:
    """Return whether the text is a number or stands for a missing one (N/A, nan, -, "")."""
    return is_number(text) or text.lower() in _ABSENT


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


def rounding_error(text: str) -> float:
    """Return half a unit of the last digit: 0.005 for "0.47", 0.5e6 for "1.0e+07"; N/A: 0."""
    if not is_number(text):
        return 0.0
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** max(-300, min(300, int(exponent or 0) - decimals))
