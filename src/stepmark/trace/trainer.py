"""What training loops print of their speed: Hugging Face Trainer results, throughput lines.

Of a result dict the runtime is a time and every `..._per_second` a rate; loss and epoch are
no measure of speed and left out. Dicts that lost a quote on their way are read too, as are
JSON files of several lines and the `key = value` lines of "***** train metrics *****".
Throughput lines ("images/sec: 123.4", "throughput: 1.2 samples/s") of one wording are one
table: its readings are the repeats, in order.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stepmark.core.reading import Reading, Table
from stepmark.trace.headings import heading_above, label_above
from stepmark.trace.numerals import NUMBER, ungrouped, value_of

_METRIC = re.compile(
    rf"""['"]?(?<![\w])(?P<key>[a-z]{{0,20}}_?(?:runtime|[a-z]+_per_second(?:_per_[a-z]+)?))['"]?
    \s{{0,40}}[:=]\s{{0,40}}['"]?(?P<value>\d{{1,4}}:\d\d:\d\d(?:\.\d{{1,9}})?|{NUMBER})(?![\w:])""",
    re.VERBOSE,
)
_HINT = re.compile(r"_per_second|_runtime|\bruntime")
_THING = r"(?:samples?|images?|imgs?|tokens?|toks?|sequences?|seqs?|examples?)"
_PER = r"\s?(?:/|per)\s?(?:s|sec|secs|second)\b"
_GROUPED = rf"(?:\d{{1,3}}(?:,\d{{3}}){{1,6}}(?:\.\d{{1,9}})?|{NUMBER})"
_AFTER = re.compile(
    rf"[:=]\s{{0,20}}(?P<value>{_GROUPED})\s?(?P<unit>{_THING}){_PER}", re.IGNORECASE
)
# The words in front of a figure, to the last number or mark.
_LABEL = re.compile(r"[A-Za-z_/() -]{1,60}$")
_BEFORE = re.compile(
    rf"(?P<unit>{_THING}){_PER}[^:=\n\d]{{0,20}}(?:on \d{{1,6}} [\w()]{{1,12}})?\s?"
    rf"[:=]\s{{0,20}}(?P<value>{_GROUPED})(?![\w/])",
    re.IGNORECASE,
)
_SLASH, _LAST_LETTERS = re.compile(r"/\s?[sS]"), frozenset("segnkq")
_ANY = re.compile(rf"_per_second|runtime|{_THING}{_PER}", re.IGNORECASE)
_LONGEST = 4096
_NAMES = {"img": "images", "image": "images", "tok": "tokens", "seq": "sequences"}
_RESULT_LINES = 40


@dataclass(slots=True)
class _Result:
    first_line: int
    last_line: int
    readings: list[Reading] = field(default_factory=list)
    is_closed: bool = False


def is_mentioned(text: str) -> bool:
    """Whether any line could be one of these: spares long logs a second look."""
    if any(word in text for word in ("_per_second", "runtime", " per s", " Per s")):
        return True
    # samples/s, but not GB/s. A search for the slash alone is many times as fast.
    before = (
        text[max(0, found.start() - 2) : found.start()] for found in _SLASH.finditer(text)
    )
    return any(word.rstrip()[-1:].lower() in _LAST_LETTERS for word in before)


def read(lines: Sequence[str], file: str) -> list[Table]:
    """All results and throughput lines, in order; their index is left at 0."""
    return [
        *(_result_table(found, lines, file) for found in _results(lines)),
        *_throughputs(lines, file),
    ]


def _results(lines: Sequence[str]) -> Iterator[_Result]:
    """Metrics of one line, or of lines that follow each other up to a brace."""
    held: _Result | None = None
    for number, line in enumerate(lines, 1):
        if held and (held.is_closed or number - held.last_line > _RESULT_LINES):
            yield held
            held = None
        if len(line) <= _LONGEST and _HINT.search(line):
            metrics = list(_metrics(line, number))
            if held and metrics and _repeats(held, metrics):
                yield held
                held = None
            if metrics:
                held = held or _Result(number, number)
                held.readings += metrics
                held.last_line = number
        if held and ("}" in line or not line.strip()):
            held.is_closed = True
    if held:
        yield held


def _repeats(held: _Result, metrics: Sequence[Reading]) -> bool:
    return bool({one.label for one in held.readings} & {one.label for one in metrics})


def _metrics(line: str, number: int) -> Iterator[Reading]:
    for found in _METRIC.finditer(line):
        value = _value(found["value"])
        if value is None or value < 0:
            continue
        is_time = found["key"].endswith("runtime")
        rate = value if not is_time and value > 0 else None
        places = len(found["value"].partition(".")[2])
        yield Reading(
            line=number,
            label=found["key"],
            time_s=value if is_time and value > 0 else None,
            rate=rate,
            rate_below=0.5 * 10.0**-places if not is_time and value == 0 else None,
        )


def _value(text: str) -> float | None:
    """Seconds of "0:01:23.45", or the number."""
    parts = text.split(":")
    if len(parts) == 1:
        return value_of(text)
    hours, minutes, seconds = (float(part) for part in parts)
    return (hours * 60 + minutes) * 60 + seconds


def _result_table(found: _Result, lines: Sequence[str], file: str) -> Table:
    heading = heading_above(lines, found.first_line)
    label = label_above(lines, found.first_line)
    return Table(
        file=file,
        index=0,
        first_line=found.first_line,
        last_line=found.last_line,
        title=": ".join(filter(None, (heading, label))),
        tool="trainer",
        unit="per second",
        readings=tuple(found.readings),
    )


def _throughputs(lines: Sequence[str], file: str) -> Iterator[Table]:
    """One table per wording, its readings the repeats."""
    held: dict[tuple[str, str], list[Reading]] = {}
    for number, line in enumerate(lines, 1):
        if "/" not in line and "per" not in line:
            continue
        if len(line) > _LONGEST or not _ANY.search(line) or "_per_second" in line:
            continue
        found = _AFTER.search(line) or _BEFORE.search(line)
        value = value_of(ungrouped(found["value"])) if found else None
        if not found or not value or value < 0:
            continue
        unit = _unit(found["unit"])
        words = _LABEL.search(line, max(0, found.start() - 60), found.start())
        label = " ".join(words[0].split()) if words else ""
        label = label if found["unit"] and label else unit
        readings = held.setdefault((label, unit), [])
        readings.append(Reading(line=number, label=label, rate=value, cycle=len(readings)))
    for (label, unit), readings in held.items():
        yield Table(
            file=file,
            index=0,
            first_line=readings[0].line,
            last_line=readings[-1].line,
            title=heading_above(lines, readings[0].line),
            tool="trainer",
            unit=unit,
            collective=label,
            readings=tuple(readings),
        )


def _unit(word: str) -> str:
    bare = word.lower().rstrip("s")
    return f"{_NAMES.get(bare, bare + 's')}/s"
