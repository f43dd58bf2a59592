"""What the figures of a table are, by the words of their headings: times, rates, or not said.

Less is better for times and more for rates, so words that name both, or two units, count as
none. Units are lower case as they are written: "(US)" is a country.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepmark.core.units import GB

_SECONDS = {
    f"{prefix}{name}": scale
    for prefix, scale in (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("µ", 1e-6), ("μ", 1e-6))
    for name in ("s", "sec", "secs", "second", "seconds")
} | {"ns": 1e-9, "nsec": 1e-9}
_SECONDS |= {
    f"{prefix}{name}": scale
    for prefix, scale in (("milli", 1e-3), ("micro", 1e-6), ("nano", 1e-9))
    for name in ("second", "seconds")
}
_UNIT = f"(?P<unit>{'|'.join(sorted(_SECONDS, key=len, reverse=True))})"
_TIME = r"(?i:(?:time|latency|latencies|(?<![a-z])lat)s?(?![a-z]))"
# "time (us)", "latency, ms"; not "5 s", "GB/s", "images per s" or "it's".
_TIME_IN = re.compile(
    rf"{_TIME}.{{0,12}}?(?<![A-Za-z0-9/'’])(?<!\d )(?<!per ){_UNIT}(?![\w'’])"
)
_TIME_WORD = re.compile(_TIME)
# "A (us)", "B [ms]", "run (s)"; not the plural of "step(s)".
_BRACKETED = re.compile(rf"(?:\[|(?<!\w)\(|\((?!\s*s\s*\)))\s*{_UNIT}\s*[\])]")
_RATES = (
    (re.compile(r"bus ?_?(?:bw|bandwidth)", re.I), "busbw"),
    (re.compile(r"alg(?:o(?:rithm)?)? ?_?(?:bw|bandwidth)", re.I), "algbw"),
    (re.compile(r"\b(?:images?|img)s?(?:/| per )s", re.I), "images/s"),
    (re.compile(r"\bsamples?(?:/| per )s", re.I), "samples/s"),
    (re.compile(r"\btok(?:en)?s?(?:/| per )s", re.I), "tokens/s"),
    (re.compile(r"\bGB(?:/s|ps\b)"), "GB/s"),
)
# Bandwidths that are no GB/s: bits, binary units, other prefixes.
_OTHER_BANDWIDTH = re.compile(r"\b(?:[KkMT]i?B|GiB|[KkMGT]i?b(?:its?)?)(?:/s|ps\b| per s)")
_BANDWIDTHS = ("busbw", "algbw", "GB/s")


@dataclass(frozen=True, slots=True)
class Meaning:
    """unit: of rates, "" where it is not clear. seconds: the unit of times; None: no times."""

    unit: str = ""
    seconds: float | None = None

    @property
    def scale(self) -> float:
        """From a printed rate to SI."""
        return GB if self.unit in _BANDWIDTHS else 1.0

    @property
    def is_said(self) -> bool:
        return bool(self.unit) or self.seconds is not None


def meaning(column: str, headings: Sequence[str], prose: str) -> Meaning:
    """Of a column's figures: by its own heading, else the table's, else the text beside it."""
    own = _said(column, is_heading=True)
    if own:
        return own
    around = (_said(" ".join(headings), is_heading=True), _said(prose, is_heading=False))
    found = next((one for one in around if one), Meaning())
    # A column of latencies in a table of bandwidths: which unit, nothing tells.
    return Meaning() if found.unit and _TIME_WORD.search(column) else found


def _said(text: str, *, is_heading: bool) -> Meaning | None:
    """None: nothing. Meaning(): too much."""
    seconds = set(_times(text, is_heading=is_heading))
    rates = {unit for pattern, unit in _RATES if pattern.search(text)}
    other = _OTHER_BANDWIDTH.search(text) is not None
    if len(rates) > 1:
        rates.discard("GB/s")
    if not (seconds or rates or other):
        return None
    if other or len(seconds) + len(rates) > 1:
        return Meaning()
    return Meaning(unit=rates.pop()) if rates else Meaning(seconds=seconds.pop())


def _times(text: str, *, is_heading: bool) -> Iterator[float]:
    for pattern in (_TIME_IN, _BRACKETED) if is_heading else (_TIME_IN,):
        yield from (_SECONDS[found["unit"]] for found in pattern.finditer(text))
