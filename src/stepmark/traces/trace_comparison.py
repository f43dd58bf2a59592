"""Two traces side by side: time per step of each operation, and the difference."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from stepmark.ground.launches import Row as Judged
from stepmark.ground.launches import Sample
from stepmark.ground.ratio import Ratio, Verdict
from stepmark.ground.verdicts import FALSE_SHARE, judge
from stepmark.tables.columns import MS, RATIO, SIGNED_MS, Row, digits, given, text
from stepmark.tables.table import Table
from stepmark.traces import trace_breakdown
from stepmark.traces.trace_kernels_text import (
    COLUMNS,
    MOST_ROWS,
    Label,
    Ranks,
    Sum,
    label_columns,
    number,
    whole_of,
)

_MS = 1e6  # nanoseconds
# Tiles, with the order in which they are walked, and other numbers. Not those in the names of
# types (bf16) and of lambdas (#2), which are other functions.
_SIZES = re.compile(
    r"(?<=_)\d+x\d+(?:x\d+)*(?:_\d+x\d+)*(?:_[hv](?=_))?|(?<![A-Za-z0-9.#])\d+(?![\w.])"
)
_LEAST_OF_STATES = 4  # steps a side: of fewer, one in each state is no state
_FIELDS = ("a_ns", "b_ns", "difference_ns")
Sums = dict[Label, Sum]
# Sums of both sides, and the number of ranks by step.
Pair = tuple[tuple[Sum, Sum], tuple[Counter[int], Counter[int]]]


def rows(a: Ranks, b: Ranks, by: str) -> list[Row]:
    """Return a row for each label, the largest difference first, in nanoseconds per step.

    time_ratio is B's time over A's. Two kernels, of one side each, are joined where their
    names differ in tiles and other sizes alone, and no other kernel has such a name.
    """
    first = _sums(a)
    second = _sums(b)
    counts = (_counts(a), _counts(b))
    if by == "name":
        first, second = _joined(first, second)
    labels = list(dict.fromkeys((*first, *second)))
    pairs = [(first.get(label, Sum()), second.get(label, Sum())) for label in labels]
    table = [
        dict(zip(COLUMNS[by], label, strict=True)) | row
        for label, row in zip(labels, _compared([(p, counts) for p in pairs]), strict=True)
    ]
    return sorted(table, key=lambda row: -abs(number(row, "difference_ns")))


def step_rows(a: trace_breakdown.Ranks, b: trace_breakdown.Ranks) -> list[Row]:
    """Return a row for each part of a step, as in a breakdown, in nanoseconds per step."""
    sides = [trace_breakdown.tables(times)["steps"] for times in (a, b)]
    steps = [[int(str(row["step"] or 0)) for row in rows] for rows in sides]
    pairs: dict[str, tuple[Sum, Sum]] = {}
    for title, column in trace_breakdown.PARTS.items():
        if any(row[column] is None for rows in sides for row in rows):
            continue
        sums = (Sum(kernels=1), Sum(kernels=1))
        for own, rows, numbers in zip(sums, sides, steps, strict=True):
            for step, row in zip(numbers, rows, strict=True):
                own.by_step_ns[step] += int(number(row, column))
            own.time_ns = own.by_step_ns.total()
        if sums[0].time_ns or sums[1].time_ns:
            pairs[title] = sums
    counts = (Counter(steps[0]), Counter(steps[1]))
    rows = _compared([(pair, counts) for pair in pairs.values()])
    return [{"part": title} | row for title, row in zip(pairs, rows, strict=True)]


def _compared(pairs: Sequence[Pair]) -> list[Row]:
    """Return the figures of rows, whose verdicts are those of one table."""
    samples = [_samples(pair) for pair in pairs]
    judged = iter(
        judge(
            [Judged(kind="", base=own[0], other=own[1], by_step=True) for own in samples if own]
        )
    )
    return [
        _figures(pair) | (_verdict(next(judged), own) if own else _unjudged(pair))
        for pair, own in zip(pairs, samples, strict=True)
    ]


def _figures(pair: Pair) -> Row:
    sums, ranks = pair
    counts = [own.total() or 1 for own in ranks]
    a, b = (Fraction(own.time_ns, n) for own, n in zip(sums, counts, strict=True))
    row: Row = dict(zip(_FIELDS, map(float, (a, b, b - a)), strict=True))
    return row | {
        "time_ratio": float(b / a) if a and b else None,
        "only_in": "" if all(own.kernels for own in sums) else "a" if sums[0].kernels else "b",
        "a_calls": sums[0].calls / counts[0],
        "b_calls": sums[1].calls / counts[1],
        "a_total_ns": sums[0].time_ns,
        "b_total_ns": sums[1].time_ns,
    }


def _sums(ranks: Ranks) -> Sums:
    sums: Sums = {}
    for _, own in ranks:
        for label, each in own.sums.items():
            sums.setdefault(label, Sum()).add(each)
    return sums


def _joined(a: Sums, b: Sums) -> list[Sums]:
    """Return the sums, those of a pair of kernels by the name that they have in common."""
    single = a.keys() ^ b.keys()
    counts = [Counter(plain_name(name) for (name,) in own.keys() & single) for own in (a, b)]
    plain = {label: (plain_name(label[0]),) for label in single}
    names = {k: new for k, new in plain.items() if counts[0][new[0]] == counts[1][new[0]] == 1}
    return [{names.get(k, k): v for k, v in own.items()} for own in (a, b)]


def plain_name(name: str) -> str:
    """Return a kernel's name without tiles and other sizes; functions and types stay."""
    return _SIZES.sub("*", name.removeprefix("void "))


def _samples(pair: Pair) -> tuple[Sample, Sample] | None:
    """Return logarithms by step, of each the mean of its ranks; None unless all have time."""
    sides = [
        {step: own.by_step_ns[step] / counts[step] for step in sorted(counts)}
        for own, counts in zip(*pair, strict=True)
    ]
    if min(map(len, sides)) < 2 or not all(all(times.values()) for times in sides):
        return None
    first, second = (
        Sample(logs={f"{side}/{step}": math.log(time) for step, time in times.items()})
        for side, times in zip("ab", sides, strict=True)
    )
    return first, second


def _verdict(speed: Ratio, samples: tuple[Sample, Sample]) -> Row:
    """Return the columns of a verdict. The bounds are of times, which are 1 / speed."""
    reason = speed.reason.replace("launches", "steps")
    num_steps = min(len(sample.logs) for sample in samples)
    if num_steps < _LEAST_OF_STATES and "two states" in reason:
        reason = f"{num_steps} steps a side are too few"
    return {
        "low": 1 / speed.high if speed.high else None,
        "high": 1 / speed.low if speed.low else None,
        "verdict": speed.verdict.value,
        "reason": reason,
    }


def _unjudged(pair: Pair) -> Row:
    """Return the columns of a row of which a side has no time, in a step or in all."""
    row: Row = {"low": None, "high": None, "verdict": "", "reason": ""}
    if not all(own.time_ns for own in pair[0]):
        return row
    is_single = min(map(len, pair[1])) < 2
    reason = "a single step" if is_single else "not in every step"
    return row | {"verdict": Verdict.CANNOT_TELL.value, "reason": reason}


def without_verdicts(table: Sequence[Row], files: Sequence[str]) -> str:
    """Remove the verdicts of rows whose sides are ranks of one job, and return the reason."""
    for row in table:
        row |= {"low": None, "high": None, "verdict": "", "reason": "ranks of one job"}
    return (
        "both sides are ranks of one job in one window, and neither is a change of the other: "
        "there are no verdicts; which rank the others wait for: "
        + shlex.join(["stepmark", "trace", "breakdown", *files])
    )


def _counts(ranks: Ranks) -> Counter[int]:
    return Counter(step for _, sums in ranks for step in sums.steps)


def total(a: Ranks, b: Ranks, table: Sequence[Row]) -> Row:
    """Return the sums over all rows, with their verdict."""
    a_sum, b_sum = (whole_of(_sums(ranks).values()) for ranks in (a, b))
    assert sum(number(row, "a_total_ns") for row in table) == a_sum.time_ns
    assert sum(number(row, "b_total_ns") for row in table) == b_sum.time_ns
    return _compared([((a_sum, b_sum), (_counts(a), _counts(b)))])[0]


def lines(table: Sequence[Row], sums: Mapping[str, object], by: str) -> list[str]:
    """Return the table as text, with the sum of all rows, if there is one."""
    of_label = label_columns(by)
    first = of_label[0].name
    rows = list(table[:MOST_ROWS])
    if more := table[MOST_ROWS:]:
        rest: Row = {name: sum(number(row, name) for row in more) for name in _FIELDS}
        rows.append(rest | {first: f"{len(more)} more rows (--csv has all)"})
    if sums:
        rows.append({**sums, first: "sum"})
    return Table(rows, [*_SHOWN, *of_label]).text()


def _ratio_words(row: Row) -> str:
    a = number(row, "a_ns")
    b = number(row, "b_ns")
    return f"{b / a:.3f}" if a and b else ""


def _verdict_words(row: Row) -> str:
    """Return the verdict, with what limits it."""
    if only := row.get("only_in"):
        return f"only in {str(only).upper()}"
    verdict = text(row, "verdict")
    if verdict == Verdict.CANNOT_TELL.value:
        verdict = f"{verdict} ({row['reason']})"
    if verdict and row.get("a_calls") != row.get("b_calls"):
        before, after = (digits(number(row, name)) for name in ("a_calls", "b_calls"))
        verdict += f" ({before} calls, then {after})"
    return verdict


_SHOWN = (
    given("a_ns", MS, "A ms/step"),
    given("b_ns", MS, "B ms/step"),
    given("difference_ns", SIGNED_MS, "B - A"),
    given("time_ratio", RATIO, "B / A", _ratio_words),
    given("verdict", words=_verdict_words),
)


def remarks(a: Ranks, b: Ranks, table: Sequence[Row]) -> Iterator[str]:
    """Yield what limits the comparison."""
    if any(row["low"] is not None for row in table):
        yield (
            "verdicts rest on the steps of one trace a side, which share clocks and placement: "
            f"another launch can differ by more; of faster and slower, {FALSE_SHARE:.1%} are "
            "wrong on average"
        )
    if [rank for rank, _ in a] != [rank for rank, _ in b]:
        yield "the two sides have different ranks"
