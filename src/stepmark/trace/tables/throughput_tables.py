"""Speeds in the results of a Hugging Face Trainer: a dict on a line, or JSON of several lines.

The runtime is a time and every `..._per_second` a rate; loss and epoch are left out. A dict
that lost a quote when it was copied is read as well.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stepmark.core.reading import Reading, Table
from stepmark.trace.parse_numbers import NUMBER, parse_number
from stepmark.trace.tables.table_titles import heading_above, label_above

_METRIC = re.compile(
    rf"""['"]?(?<!\w)(?P<key>[a-z]{{0,20}}_?(?:runtime|[a-z]+_per_second(?:_per_[a-z]+)?))['"]?
    \s{{0,40}}:\s{{0,40}}(?P<value>{NUMBER})(?![\w:])""",
    re.VERBOSE,
)
_MAX_LINE = 4096
_MAX_RESULT_LINES = 40


@dataclass(slots=True)
class _Result:
    first_line: int
    last_line: int
    readings: list[Reading] = field(default_factory=list)
    is_closed: bool = False


def is_mentioned(text: str) -> bool:
    """Return whether any line could hold a result; spares long logs a second pass."""
    return "_per_second" in text or "runtime" in text


def read(lines: Sequence[str], file: str) -> list[Table]:
    """Return a table per result, in order; their index is left at 0."""
    return [
        Table(
            file=file,
            first_line=result.first_line,
            last_line=result.last_line,
            title=": ".join(
                filter(
                    None,
                    (
                        heading_above(lines, result.first_line),
                        label_above(lines, result.first_line),
                    ),
                )
            ),
            tool="trainer",
            unit="per second",
            readings=tuple(result.readings),
        )
        for result in _results(lines)
    ]


def _results(lines: Sequence[str]) -> Iterator[_Result]:
    """Yield the metrics of one line, or of the lines up to a closing brace."""
    result: _Result | None = None
    for number, line in enumerate(lines, 1):
        metrics = []
        if len(line) <= _MAX_LINE and is_mentioned(line):
            metrics = list(_metrics(line, number))
        if result and (
            result.is_closed
            or number - result.last_line > _MAX_RESULT_LINES
            or {metric.label for metric in metrics} & {one.label for one in result.readings}
        ):
            yield result
            result = None
        if metrics:
            result = result or _Result(number, number)
            result.readings += metrics
            result.last_line = number
        if result and ("}" in line or not line.strip()):
            result.is_closed = True
    if result:
        yield result


def _metrics(line: str, number: int) -> Iterator[Reading]:
    for match in _METRIC.finditer(line):
        value = parse_number(match["value"])
        if value is None or value < 0:
            continue
        is_time = match["key"].endswith("runtime")
        decimals = len(match["value"].partition(".")[2])
        yield Reading(
            line=number,
            label=match["key"],
            time_s=value if is_time and value > 0 else None,
            rate=value if not is_time and value > 0 else None,
            rate_below=0.5 * 10.0**-decimals if not is_time and value == 0 else None,
        )
