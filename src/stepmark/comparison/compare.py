"""Comparison of sides with a baseline, line by line, with a verdict on each ratio.

Notes say in sentences what limits it.
"""

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import itemgetter
from statistics import fmean, median

from stepmark.comparison.comparison import (
    UNKNOWN,
    Cell,
    Comparison,
    Line,
    Overall,
    Series,
    Side,
)
from stepmark.comparison.series import NAMING, STRICT, Pair, join, named_apart
from stepmark.ground.errors import ConfigError
from stepmark.ground.grouping import group_by
from stepmark.ground.launches import Order, Row, Sample
from stepmark.ground.ratio import (
    BUSY,
    CONFIDENCE,
    Ratio,
    Verdict,
    holm,
)
from stepmark.ground.units import KIB, MIB
from stepmark.ground.variance import Variance
from stepmark.ground.verdicts import judge, judge_mean
from stepmark.model.ops import CUSTOM

# Sizes at which collectives vary differently: latency, protocols, bandwidth.
_BANDS = (64 * KIB, 4 * MIB)
_WARMUP_DIFFERENCE = 0.25  # lines, relative to those that count in the shorter log
_SHORT_SOAK_S = 1.0  # shorter ones leave clocks above those of sustained load
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"median": median, "mean": fmean}
_IN_ROUNDS = "; in rounds they would not: stepmark sweep --env NAME=A,B -- COMMAND"
# No variable chooses the function of a file.
_IN_LAUNCHES = ": --launches 3 alternates the functions of one file (FILE.py:a,b)"
_SIDES = "{sides}"  # in a note, the names of all sides of which it says the same
Pairs = Sequence[tuple[Series, Series]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a comparison. `noise` is the relative standard deviation of one launch."""

    noise: float | None = None
    statistic: str = "median"  # of the samples of a launch
    allowed: tuple[str, ...] = ()  # fields of join.STRICT that may differ
    fail_if_slower: float | None = None
    smallest_bytes: int | None = None  # of the geometric mean
    largest_bytes: int | None = None
    recorded: tuple[Side, ...] = ()  # runs with several launches: their spread
    # Runs on the same machine with the same software as a side, by its name.
    history: Mapping[str, tuple[Side, ...]] = field(default_factory=dict)


def compare(sides: Sequence[Side], options: Options) -> Comparison:
    """Compare every other side with the first. Raises ConfigError where nothing is paired."""
    if len(sides) < 2:
        raise ConfigError("sides", len(sides), "two or more")
    if len({side.name for side in sides}) < len(sides):
        names = ", ".join(side.name for side in sides)
        raise ConfigError("sides", names, "different names, e.g. tcp=a.txt plugin=b.txt")
    sides, options = _named_apart(sides, options)
    by_round = all(side.by_round for side in sides)
    base, *others = sides
    cells: dict[int, dict[str, Cell]] = {}
    means: list[Overall] = []
    notes = [f"{side.name}: {note}" for side in sides for note in side.notes]
    notes += _context_notes(sides)
    alike: list[tuple[str, str]] = []
    if options.statistic != "median":
        notes.append(f"of the samples of a launch the {options.statistic} counts")
    for other in others:
        joined, own_notes = join(base, other, options.allowed)
        notes += own_notes
        both = _pairs(base, other, joined)
        ratios = _judge(base, other, both, options)
        for (place, base_series, other_series), judged in zip(joined, ratios, strict=True):
            row = cells.setdefault(place, {base.name: _cell(base_series, None, options)})
            row[other.name] = _cell(_completed(other_series, base_series), judged, options)
        if mean := _overall(base, other, both, options):
            means.append(mean)
        for differences in (_basis_notes, _soak_notes, _warmup_notes):
            notes += differences(base.name, other.name, both)
        alike += _busy_notes(base.name, other.name, both)
        if not by_round:
            alike += _order_notes(base.name, other.name, both)
    for text, own in group_by(dict.fromkeys(alike), itemgetter(1)).items():
        notes.append(text.replace(_SIDES, ", ".join(name for name, _ in own)))
    lines = tuple(
        Line(fields=first.fields, size_bytes=first.size_bytes, unit=first.unit, cells=row)
        for first, row in ((base.series[place], cells[place]) for place in sorted(cells))
    )
    notes += _unused(lines, options)
    return Comparison(
        names=tuple(side.name for side in sides),
        lines=lines,
        overall=tuple(means),
        notes=tuple(dict.fromkeys(notes)),
        by_round=by_round,
        too_slow=_too_slow(lines, options),
        fail_if_slower=options.fail_if_slower,
    )


def _named_apart(sides: Sequence[Side], options: Options) -> tuple[Sequence[Side], Options]:
    """Return all that is read with names that tell models apart."""
    past = list(options.history.values())
    sides, recorded, *past = named_apart([sides, options.recorded, *past])
    history = dict(zip(options.history, past, strict=True))
    return sides, replace(options, recorded=recorded, history=history)


def rows_by_line(base: Side, other: Side) -> dict[int, Row]:
    """Return what is judged, by the line's place in the baseline, whatever else differs."""
    ((base, other),) = named_apart([(base, other)])
    joined, _ = join(base, other, STRICT)
    return {
        place: _row(base, other, *pair, Options())
        for (place, *_), pair in zip(joined, _pairs(base, other, joined), strict=True)
        if all(series.launches for series in pair)
    }


def _pairs(base: Side, other: Side, joined: Sequence[Pair]) -> list[tuple[Series, Series]]:
    """Return the pairs of two sides; of sides by round, only with rounds that both have."""
    by_round = base.by_round and other.by_round
    return [(_of_rounds(a, b), _of_rounds(b, a)) if by_round else (a, b) for _, a, b in joined]


def _of_rounds(series: Series, other: Series) -> Series:
    common = {name: v for name, v in series.launches.items() if name in other.launches}
    return replace(series, launches=common)


def _completed(series: Series, base: Series) -> Series:
    """Return the series with the baseline's bus bandwidth factor if it states no ranks."""
    if series.busbw_factor or series.fields.get("num_ranks") is not None:
        return series
    return replace(series, busbw_factor=base.busbw_factor)


def _centres(series: Series, statistic: str) -> dict[str, float]:
    return {launch: STATISTICS[statistic](values) for launch, values in series.launches.items()}


def _cell(series: Series, judged: Ratio | None, options: Options) -> Cell:
    logs = [math.log(value) for value in _centres(series, options.statistic).values()]
    value = math.exp(fmean(logs)) if logs else None
    return Cell(series=series, value=value, ratio=judged)


def _judge(base: Side, other: Side, pairs: Pairs, options: Options) -> list[Ratio | None]:
    """Return the ratio of each pair with its verdict; None where a value is only bounded."""
    rows = {
        place: _row(base, other, *pair, options)
        for place, pair in enumerate(pairs)
        if all(series.launches for series in pair)
    }
    judged = dict(zip(rows, judge(list(rows.values())), strict=True))
    return [_checked(pair, judged.get(place)) for place, pair in enumerate(pairs)]


def _checked(pair: tuple[Series, Series], judged: Ratio | None) -> Ratio | None:
    """Return the ratio without a verdict where the values cannot carry one."""
    if judged is None:
        return None
    if pair[0].unit == UNKNOWN:
        return _ratio_only(judged.speed, "--unit rate or time")
    if any(s.busy and s.fields.get("device_type") == "cpu" for s in pair):
        # Other work may slow one side more than the other, in every round.
        return replace(judged, verdict=Verdict.CANNOT_TELL, reason=BUSY)
    values = max(sum(map(len, series.launches.values())) for series in pair)
    return (
        _ratio_only(judged.speed, "one value") if judged.low is None and values == 1 else judged
    )


def _row(base: Side, other: Side, first: Series, second: Series, options: Options) -> Row:
    fields = first.fields
    band = None if first.size_bytes is None else bisect(_BANDS, first.size_bytes)
    kind = (first.unit, *(fields.get(n) for n in ("family", "method", "device_type")), band)
    return Row(
        kind=kind,
        base=_sample(base, first, options),
        other=_sample(other, second, options),
        by_round=base.by_round and other.by_round,
        noise=options.noise,
        repeats=_mean_noise(first, second),
    )


def _mean_noise(first: Series, second: Series) -> Variance | None:
    """Return the mean variance of a launch of both sides, by repeats of such tables."""
    if first.noise is None or second.noise is None:
        return None
    value = (first.noise.value + second.noise.value) / 2
    return Variance(value, min(first.noise.df, second.noise.df))  # the same repeats of both


def _sample(side: Side, series: Series, options: Options) -> Sample:
    # Launches of the same measurement in runs of history.
    past = [
        run
        for earlier in options.history.get(side.name, ())
        for other in earlier.series
        if (other.fields, other.size_bytes, other.unit)
        == (series.fields, series.size_bytes, series.unit)
        for run in _by_run(_logs(other, options.statistic))
    ]
    if not past and (recorded := _recorded(series, options)):
        past = _by_run(_logs(recorded, options.statistic))
    return Sample(
        logs=_logs(series, options.statistic),
        starts=series.starts,
        past=tuple(past),
        rounding=series.rounding,
    )


def _by_run(logs: Mapping[str, float]) -> list[dict[str, float]]:
    runs: dict[str, dict[str, float]] = {}
    for launch, log in logs.items():
        runs.setdefault(launch.partition("/")[0], {})[launch] = log
    return list(runs.values())


def _logs(series: Series, statistic: str) -> dict[str, float]:
    """Return the logarithms of centres as times; of a rate, of the time of one unit."""
    return {
        launch: math.log(value if series.is_time else 1 / value)
        for launch, value in _centres(series, statistic).items()
    }


def _ratio_only(speed: float, reason: str) -> Ratio:
    return Ratio(speed=speed, low=None, high=None, verdict=Verdict.CANNOT_TELL, reason=reason)


def _is_same_kind(recorded: Series, series: Series) -> bool:
    """Whether both are the same measurement at the same size, by the fields that both state."""
    same_size = recorded.size_bytes == series.size_bytes and recorded.unit == series.unit
    stated = (
        (recorded.fields.get(name), series.fields.get(name)) for name in (*STRICT, *NAMING)
    )
    return same_size and all(
        left == right or left in (None, "") or right in (None, "") for left, right in stated
    )


def _recorded(series: Series, options: Options) -> Series | None:
    """Return the first recorded series of the same kind with several launches."""
    several = (s for side in options.recorded for s in side.series if len(s.launches) > 1)
    return next((recorded for recorded in several if _is_same_kind(recorded, series)), None)


def _overall(base: Side, other: Side, pairs: Pairs, options: Options) -> Overall | None:
    """Return the geometric mean: each launch gives the mean of its logarithms over all lines.

    None over lines of several units, such as a trainer's seconds and samples/s.
    """
    pairs = [
        pair
        for pair in pairs
        if all(series.launches for series in pair) and _in_range(pair[0].size_bytes, options)
    ]
    if len({first.unit for first, _ in pairs}) != 1:
        return None
    rows = [_row(base, other, *pair, options) for pair in pairs]
    mean = judge_mean(rows)
    if mean is None:
        speed = math.exp(fmean(row.base.mean - row.other.mean for row in rows))
        is_single = all(len(series.launches) == 1 for pair in pairs for series in pair)
        mean = _ratio_only(speed, "one launch" if is_single else "lines without an interval")
    for pair in pairs:  # one line without a verdict leaves none to their mean
        mean = _checked(pair, mean) or mean
    sizes = [first.size_bytes for first, _ in pairs if first.size_bytes is not None]
    return Overall(
        name=other.name,
        ratio=mean,
        num_lines=len(pairs),
        smallest_bytes=min(sizes, default=None),
        largest_bytes=max(sizes, default=None),
    )


def _unused(lines: Sequence[Line], options: Options) -> list[str]:
    """Return notes on options that had no effect."""
    repeated = any(
        sum(len(cell.series.launches) > 1 for cell in line.cells.values()) > 1 for line in lines
    )
    notes = []
    if options.noise is not None and repeated:
        notes.append("--noise is not used where both sides have several launches")
    firsts = (next(iter(line.cells.values())).series for line in lines)  # the baseline's
    if options.recorded and not any(_recorded(first, options) for first in firsts):
        notes.append("--noise-from has several launches of nothing that is compared")
    return notes


def _in_range(size: int | None, options: Options) -> bool:
    if size is None:
        return options.smallest_bytes is None and options.largest_bytes is None
    low = options.smallest_bytes is None or size >= options.smallest_bytes
    return low and (options.largest_bytes is None or size <= options.largest_bytes)


def _too_slow(lines: Sequence[Line], options: Options) -> tuple[tuple[int, str], ...] | None:
    """Return lines that are certainly slower than the limit, after Holm over all of them."""
    limit = options.fail_if_slower
    if limit is None:
        return None
    tested = [
        (place, name, p)
        for place, line in enumerate(lines)
        for name, cell in line.cells.items()
        if cell.ratio and (p := cell.ratio.p_slower(limit)) is not None
    ]
    # One-sided: the interval leaves half of what it leaves out on this side.
    is_slower = holm([p for *_, p in tested], (1 - CONFIDENCE) / 2)
    return tuple((place, name) for place, name, _ in compress(tested, is_slower))


def _context_notes(sides: Sequence[Side]) -> list[str]:
    """Return variables and versions that differ; sides that are files state none."""
    runs = [side for side in sides if side.context]
    notes = []
    for name in dict.fromkeys(name for run in runs for name in run.context):
        values = [run.context.get(name, "unset") for run in runs]
        if len(set(values)) > 1:
            by_run = ", ".join(f"{r.name} {v}" for r, v in zip(runs, values, strict=True))
            notes.append(f"{name} differs: {by_run}")
    return notes


def _basis_notes(base: str, other: str, pairs: Pairs) -> Iterator[str]:
    """Yield what a ratio is of where the numbers of ranks differ."""
    for left, right in pairs:
        ranks = left.fields.get("num_ranks"), right.fields.get("num_ranks")
        if None in ranks or ranks[0] == ranks[1]:
            continue
        if left.unit == "busbw":
            yield (
                "ratios are of the bus bandwidth as printed, not of time: its factor depends "
                "on num_ranks, which differs"
            )
        elif left.busbw_factor and right.busbw_factor:
            yield (
                "ratios are of time at equal size; each side's bus bandwidth has its own "
                f"factor: {base} {left.busbw_factor:g}, {other} {right.busbw_factor:g}"
            )


def _order_notes(base: str, other: str, pairs: Pairs) -> Iterator[tuple[str, str]]:
    """Yield how to measure without drift, where one side was measured before the other."""
    for pair in pairs:
        first, second = (
            Sample(logs=dict.fromkeys(series.launches, 0.0), starts=series.starts)
            for series in pair
        )
        if Row(kind="", base=first, other=second).order is Order.BLOCKS:
            is_custom = pair[0].fields.get("family") == CUSTOM
            yield (
                other,
                f"{base} and {_SIDES} were measured one after the other, so intervals include "
                f"drift{_IN_LAUNCHES if is_custom else _IN_ROUNDS}",
            )


def _soak_notes(base: str, other: str, pairs: Pairs) -> Iterator[str]:
    """Yield where one side was loaded for less time than the other before its samples."""
    soaks = [
        (first.soak_s, second.soak_s)
        for first, second in pairs
        if first.soak_s is not None and second.soak_s is not None
    ]
    uneven = [own for own in soaks if min(own) < _SHORT_SOAK_S and max(own) > 1.5 * min(own)]
    if uneven:
        first_s, second_s = uneven[0]
        yield (
            f"{len(uneven)} of {len(soaks)} operators had different soaks, such as "
            f"{first_s:.2g} s in {base} and {second_s:.2g} s in {other}: after a short one "
            "clocks are higher; give both sides the same, longer --budget"
        )


def _warmup_notes(base: str, other: str, pairs: Pairs) -> Iterator[str]:
    """Yield where the steps that count are of different parts of two training logs."""
    for first, second in pairs:
        if first.num_warmup is None or second.num_warmup is None:
            continue
        fewest = min(len(own) for each in (first, second) for own in each.launches.values())
        if abs(first.num_warmup - second.num_warmup) > fewest * _WARMUP_DIFFERENCE:
            yield (
                f"warm-up is unequal: {first.num_warmup} lines of {base} and "
                f"{second.num_warmup} of {other}, so the medians are of different parts of the "
                "jobs; give logs of more steps"
            )


def _busy_notes(base: str, other: str, pairs: Pairs) -> Iterator[tuple[str, str]]:
    """Yield in how many launches the host was busy, which slows what the host does."""
    for name, series in ((base, [a for a, _ in pairs]), (other, [b for _, b in pairs])):
        busy = {launch for each in series for launch in each.busy}
        launches = {launch for each in series for launch in each.launches}
        if busy:
            yield name, f"{_SIDES}: busy host in {len(busy)} of {len(launches)} launches"
