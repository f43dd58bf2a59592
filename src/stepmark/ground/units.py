"""Units, formatting and parsing. Rates use GB = 1e9, sizes KiB/MiB/GiB, the inside SI."""

from collections import Counter
from collections.abc import Iterable

from stepmark.ground.errors import ConfigError

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 1e9
TFLOP = 1e12


def format_bytes(num_bytes: float) -> str:
    """Format a size in binary units, e.g. '1.5 GiB'."""
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def format_time(seconds: float) -> str:
    """Format a time with four significant digits, e.g. '12.34 us'."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def with_one_unit(first: str, word: str, second: str) -> str:
    """Join two quantities by a word, their unit once if they share it: '1.5 to 2 s'."""
    number, _, unit = first.partition(" ")
    return f"{number if second.endswith(f' {unit}') else first} {word} {second}"


def format_duration(seconds: float) -> str:
    """Format the time of a measurement, e.g. '40 s', '26 min' or '3.2 h'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_DURATION = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_duration(text: str, field: str) -> float:
    """Parse '60s', '2m', '500ms' or plain seconds; it must be positive and at most a week."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip()[len(number) :].strip() or "s"
    try:
        seconds = float(number) * _DURATION[unit]
    except (ValueError, KeyError):
        raise ConfigError(field, text, "a duration such as 60s, 500ms or 2m") from None
    if not 0 < seconds <= 7 * 86400:
        raise ConfigError(field, text, "a duration above 0 and at most 168h")
    return seconds


_SIZE = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 2**40}


def parse_bytes(text: str, field: str) -> int:
    """Parse '1K', '1.5M', '4GiB' or plain bytes, in binary units as in nccl-tests."""
    squeezed = text.strip().lower()
    number = squeezed.rstrip("bigkmt")
    unit = squeezed[len(number) :].removesuffix("b").removesuffix("i")
    try:
        num_bytes = float(number) * _SIZE[unit]
    except (ValueError, KeyError):
        raise ConfigError(field, text, "a size such as 1024, 1K, 1.5M or 4G") from None
    if not 0 <= num_bytes <= 2**50:
        raise ConfigError(field, text, "a size from 0 to 1024T")
    return int(num_bytes)


def parse_share(text: str, field: str) -> float:
    """Parse '5%' or '0.05' into a fraction above 0 and under 1."""
    squeezed = text.strip()
    try:
        number = float(squeezed.removesuffix("%"))
    except ValueError:
        raise ConfigError(field, text, "a share such as 5% or 0.05") from None
    share = number / 100 if squeezed.endswith("%") else number
    if not 0 < share < 1:
        raise ConfigError(field, text, "a share above 0 and under 100%")
    return share


def plural(number: int, noun: str) -> str:
    """Return e.g. "1 line", "3 lines", "2 processes"."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{ending}"


def counts_text(names: Iterable[str]) -> str:
    """Return e.g. "2 x a, 1 x b" for a, a, b."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def ranks_text(ranks: Iterable[int]) -> str:
    """Return e.g. 'rank 3' or 'ranks 0-3, 5'."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in spans[:12]]
    many = len(spans) > 1 or any(low != high for low, high in spans)
    return f"rank{'s' if many else ''} {', '.join(texts)}{', ...' if len(spans) > 12 else ''}"


def comma_list(words: Iterable[object], most: int = 8) -> str:
    """Return the first of many, e.g. "0, 1, 2 and 5 more"."""
    texts = [str(word) for word in words]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
