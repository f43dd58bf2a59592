"""Two traces side by side: time per step of each operation, and the difference."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from stepmark.core.columns import Row, aligned
from stepmark.core.ratio import Verdict, ratio
from stepmark.report.trace_kernels import (
    COLUMNS,
    MOST_ROWS,
    Label,
    Ranks,
    Sum,
    as_text,
    num_steps,
    number,
    whole_of,
)

_MS = 1e6  # nanoseconds
_TEMPLATE = re.compile(r"<.*>(?:\(.*\))?|\(.*\)|(?<=_)\d+x\d+\w*|(?<=[a-z_])\d+$")
_FIELDS = ("a_ns", "b_ns", "difference_ns")


def rows(a: Ranks, b: Ranks, by: str) -> list[Row]:
    """Return a row for each label, the largest difference first, in nanoseconds per step.

    time_ratio is B's time over A's. Kernels of one side are joined where their names differ
    in template arguments, tiles and numbers alone.
    """
    if by == "name":
        a, b = _joined(a, b), _joined(b, a)
    first, second = _sums(a), _sums(b)
    table = [
        dict(zip(COLUMNS[by], label, strict=True))
        | _compared((first.get(label, Sum()), second.get(label, Sum())), (a, b))
        for label in dict.fromkeys((*first, *second))
    ]
    return sorted(table, key=lambda row: -abs(number(row, "difference_ns")))


def _compared(sums: tuple[Sum, Sum], sides: tuple[Ranks, Ranks]) -> Row:
    """Return the figures of a row."""
    counts = [num_steps(ranks) or 1 for ranks in sides]
    a, b = (Fraction(own.time_ns, n) for own, n in zip(sums, counts, strict=True))
    row: Row = dict(zip(_FIELDS, map(float, (a, b, b - a)), strict=True))
    return row | {
        "time_ratio": float(b / a) if a and b else None,
        **(_verdict(sums, sides) if a and b else _judged()),
        "only_in": "" if all(own.kernels for own in sums) else "a" if sums[0].kernels else "b",
        "a_calls": sums[0].calls / counts[0],
        "b_calls": sums[1].calls / counts[1],
        "a_total_ns": sums[0].time_ns,
        "b_total_ns": sums[1].time_ns,
    }


def _sums(ranks: Ranks) -> dict[Label, Sum]:
    sums: dict[Label, Sum] = {}
    for _, own in ranks:
        for label, each in own.sums.items():
            sums.setdefault(label, Sum()).add(each)
    return sums


def _joined(ranks: Ranks, others: Ranks) -> Ranks:
    """Return the sums with shorter names of kernels that the other side does not have."""
    known = {label for _, own in others for label in own.sums}
    result = []
    for rank, own in ranks:
        sums: dict[Label, Sum] = {}
        for label, each in own.sums.items():
            name = label if label in known else (plain_name(label[0]),)
            sums.setdefault(name, Sum()).add(each)
        result.append((rank, replace(own, sums=sums)))
    return result


def plain_name(name: str) -> str:
    """Return a kernel's name without template arguments, tiles and the number at its end."""
    plain = _TEMPLATE.sub("*", name.removeprefix("void "))
    return plain if plain.strip("*") else name


def _verdict(sums: tuple[Sum, Sum], sides: tuple[Ranks, Ranks]) -> Row:
    """Return the verdict over steps: of each the mean of its ranks."""
    samples = [_by_step(own, ranks) for own, ranks in zip(sums, sides, strict=True)]
    if not all(map(all, samples)):
        return _judged(Verdict.CANNOT_TELL.value, "not in every step")
    if min(map(len, samples)) < 2:
        return _judged(Verdict.CANNOT_TELL.value, "a single step")
    speed = ratio(*samples)
    reason = speed.reason.replace("launches", "steps")
    return _judged(speed.verdict.value, reason, speed.high, speed.low)


def _judged(
    verdict: str = "", reason: str = "", high: float | None = None, low: float | None = None
) -> Row:
    """Return the columns of a verdict. high and low: of the speed, which is 1 / time."""
    ends = {"low": 1 / high if high else None, "high": 1 / low if low else None}
    return {**ends, "verdict": verdict, "reason": reason}


def _by_step(own: Sum, ranks: Ranks) -> list[float]:
    counts = Counter(step for _, sums in ranks for step in sums.steps)
    return [own.by_step_ns[step] / counts[step] for step in sorted(counts)]


def total(a: Ranks, b: Ranks, table: Sequence[Row]) -> Row:
    """Return the sums over all rows, with their verdict."""
    a_sum, b_sum = (whole_of(_sums(ranks).values()) for ranks in (a, b))
    assert sum(number(row, "a_total_ns") for row in table) == a_sum.time_ns
    assert sum(number(row, "b_total_ns") for row in table) == b_sum.time_ns
    return _compared((a_sum, b_sum), (a, b))


def lines(table: Sequence[Row], sums: Mapping[str, object], by: str) -> list[str]:
    """Return the table as text, with the sum of all rows."""
    cells = [["A ms/step", "B ms/step", "B - A", "B / A", "verdict", *COLUMNS[by]]]
    cells += [
        [*_numbers(row), *(as_text(row[name]) for name in COLUMNS[by])]
        for row in table[:MOST_ROWS]
    ]
    if table[MOST_ROWS:]:
        rest = {name: sum(number(row, name) for row in table[MOST_ROWS:]) for name in _FIELDS}
        cells.append([*_numbers(rest), f"{len(table) - MOST_ROWS} more rows (--csv has all)"])
    cells.append([*_numbers(sums), "sum"])
    width = len(cells[0])
    padded = [[*line, *[""] * (width - len(line))] for line in cells]
    return aligned(padded, [True] * 4 + [False] * (width - 4))


def _numbers(row: Mapping[str, object]) -> list[str]:
    a, b, difference = (number(row, name) for name in _FIELDS)
    time_ratio = f"{b / a:.3f}" if a and b else ""
    verdict = str(row.get("verdict", ""))
    if verdict == Verdict.CANNOT_TELL.value:
        verdict = f"{verdict} ({row['reason']})"
    if only := row.get("only_in"):
        verdict = f"only in {str(only).upper()}"
    return [f"{a / _MS:.3f}", f"{b / _MS:.3f}", f"{difference / _MS:+.3f}", time_ratio, verdict]


def remarks(a: Ranks, b: Ranks, table: Sequence[Row]) -> Iterator[str]:
    """Yield what limits the comparison."""
    judged = sum(row["low"] is not None for row in table)
    if judged:
        yield (
            "verdicts rest on the steps of one trace a side, which share clocks and placement: "
            "another launch can differ by more"
        )
    if judged > 20:
        yield f"of {judged} intervals at most about {judged / 100:.1g} are off by chance"
    if [rank for rank, _ in a] != [rank for rank, _ in b]:
        yield "the two sides have different ranks"
    if _is_host(a) != _is_host(b):
        yield "one side has times of the host, as its traces have no GPU: they do not compare"


def _is_host(ranks: Ranks) -> bool:
    return any(sums.is_host for _, sums in ranks)
