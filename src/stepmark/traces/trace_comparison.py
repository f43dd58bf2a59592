"""Traces of two sides: time per step of each operation, and the difference.

A side has a trace, or a folder of them, for each launch. The launch is the unit of verdicts:
the steps of one share placement, clocks and neighbours, by which launches differ.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from stepmark.ground.launches import Row as Judged
from stepmark.ground.launches import Sample
from stepmark.ground.ratio import Ratio, Verdict
from stepmark.ground.verdicts import FALSE_SHARE, judge
from stepmark.tables.columns import (
    MS,
    RATIO,
    SIGNED_MS,
    Row,
    digits,
    given,
    known,
    number,
    text,
)
from stepmark.tables.table import Table
from stepmark.traces import trace_breakdown
from stepmark.traces.trace_kernels_text import (
    COLUMNS,
    MOST_ROWS,
    Label,
    Ranks,
    Sum,
    label_columns,
    num_steps,
    whole_of,
)

# Tiles, with the order in which they are walked, and other numbers. Not those in the names of
# types (bf16) and of lambdas (#2), which are other functions.
_SIZES = re.compile(
    r"(?<=_)\d+x\d+(?:x\d+)*(?:_\d+x\d+)*(?:_[hv](?=_))?|(?<![A-Za-z0-9.#])\d+(?![\w.])"
)
_FIELDS = ("a_ns", "b_ns", "difference_ns")
Sums = dict[Label, Sum]
Launches = Sequence[Ranks]
_ONE_LAUNCH = "one launch"
# Sums of both sides, of which by_step_ns is by launch; and the steps of all ranks by launch.
Pair = tuple[tuple[Sum, Sum], tuple[Counter[int], Counter[int]]]


def rows(a: Launches, b: Launches, by: str) -> list[Row]:
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
    return sorted(table, key=lambda row: -abs(known(row, "difference_ns")))


def step_rows(
    a: Sequence[trace_breakdown.Ranks], b: Sequence[trace_breakdown.Ranks]
) -> list[Row]:
    """Return a row for each part of a step, as in a breakdown, in nanoseconds per step."""
    sides = [[trace_breakdown.tables(times)["steps"] for times in side] for side in (a, b)]
    counts = [Counter(dict(enumerate(map(len, launches)))) for launches in sides]
    pairs: dict[str, tuple[Sum, Sum]] = {}
    for title, column in trace_breakdown.PARTS.items():
        if any(row[column] is None for side in sides for rows in side for row in rows):
            continue
        sums = (Sum(kernels=1), Sum(kernels=1))
        for own, launches in zip(sums, sides, strict=True):
            for launch, rows in enumerate(launches):
                own.by_step_ns[launch] = sum(int(known(row, column)) for row in rows)
            own.time_ns = own.by_step_ns.total()
        if sums[0].time_ns or sums[1].time_ns:
            pairs[title] = sums
    rows = _compared([(pair, (counts[0], counts[1])) for pair in pairs.values()])
    return [{"part": title} | row for title, row in zip(pairs, rows, strict=True)]


def _compared(pairs: Sequence[Pair]) -> list[Row]:
    """Return the figures of rows, whose verdicts are those of one table."""
    samples = [_samples(pair) for pair in pairs]
    judged = iter(judge([Judged(kind="", base=own[0], other=own[1]) for own in samples if own]))
    return [
        _figures(pair) | (_verdict(next(judged)) if own else _unjudged(pair))
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


def _sums(launches: Launches) -> Sums:
    sums: Sums = {}
    for launch, ranks in enumerate(launches):
        for _, own in ranks:
            for label, each in own.sums.items():
                by_launch = Counter({launch: each.time_ns})
                sums.setdefault(label, Sum()).add(replace(each, by_step_ns=by_launch))
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
    """Return logarithms of means by launch; None of single launches, or of none in one."""
    sides = [
        {launch: own.by_step_ns[launch] / counts[launch] for launch in sorted(counts)}
        for own, counts in zip(*pair, strict=True)
    ]
    if min(map(len, sides)) < 2 or not all(all(times.values()) for times in sides):
        return None
    first, second = (
        Sample(logs={f"{side}/{launch}": math.log(time) for launch, time in times.items()})
        for side, times in zip("ab", sides, strict=True)
    )
    return first, second


def _verdict(speed: Ratio) -> Row:
    """Return the columns of a verdict. The bounds are of times, which are 1 / speed."""
    return {
        "low": 1 / speed.high if speed.high else None,
        "high": 1 / speed.low if speed.low else None,
        "verdict": speed.verdict.value,
        "reason": speed.reason,
    }


def _unjudged(pair: Pair) -> Row:
    """Return the columns of a row of which a side has one launch, or no time in a launch."""
    has_both = all(own.time_ns for own in pair[0])
    reason = _ONE_LAUNCH if min(map(len, pair[1])) < 2 else "not in every launch"
    return {
        "low": None,
        "high": None,
        "verdict": Verdict.CANNOT_TELL.value if has_both else "",
        "reason": reason if has_both else "",
    }


def _counts(launches: Launches) -> Counter[int]:
    return Counter(dict(enumerate(map(num_steps, launches))))


def total(a: Launches, b: Launches) -> Row:
    """Return the sums over all rows, with their verdict."""
    a_sum, b_sum = (whole_of(_sums(ranks).values()) for ranks in (a, b))
    return _compared([((a_sum, b_sum), (_counts(a), _counts(b)))])[0]


def lines(table: Sequence[Row], sums: Mapping[str, object], by: str) -> list[str]:
    """Return the table as text, with the sum of all rows, if there is one."""
    of_label = label_columns(by)
    first = of_label[0].name
    rows = list(table[:MOST_ROWS])
    if more := table[MOST_ROWS:]:
        rest: Row = {name: sum(known(row, name) for row in more) for name in _FIELDS}
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
    if row.get("reason") == _ONE_LAUNCH:  # of all rows: the first line says so
        verdict = ""
    elif verdict == Verdict.CANNOT_TELL.value:
        verdict = f"{verdict} ({row['reason']})"
    if row.get("verdict") and row.get("a_calls") != row.get("b_calls"):
        before, after = (digits(number(row, name)) for name in ("a_calls", "b_calls"))
        verdict += f" ({before} calls, then {after})"
    return verdict.strip()


_SHOWN = (
    given("a_ns", MS, "A ms/step"),
    given("b_ns", MS, "B ms/step"),
    given("difference_ns", SIGNED_MS, "B - A"),
    given("time_ratio", RATIO, "B / A", _ratio_words),
    given("verdict", words=_verdict_words),
)


def headline(steps: Sequence[Row]) -> Iterator[str]:
    """Yield the verdict on the step, and what would give one where launches are too few."""
    for row in steps[:1]:
        low, high = (digits(number(row, n), 3) if row[n] else "?" for n in ("low", "high"))
        interval = "" if row["low"] is None else f" [{low}, {high}]"
        yield f"step: B / A {_ratio_words(row)}{interval}: {row['verdict']} ({row['reason']})"
        if row["reason"] == _ONE_LAUNCH:
            yield (
                "steps of one launch are not repeats of it; several launches of each side: "
                "stepmark trace compare A1,A2,A3 B1,B2,B3"
            )


def remarks(a: Launches, b: Launches, table: Sequence[Row]) -> Iterator[str]:
    """Yield what limits the comparison."""
    if any(row["low"] is not None for row in table):
        yield (
            "verdicts rest on the differences between launches; of faster and slower, "
            f"{FALSE_SHARE:.1%} are wrong on average"
        )
    if len({tuple(rank for rank, _ in ranks) for ranks in (*a, *b)}) > 1:
        yield "the launches have different ranks"
