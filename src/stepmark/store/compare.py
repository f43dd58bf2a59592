"""Comparison of sides with a baseline, line by line, with a verdict on each ratio."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from statistics import fmean, median

from stepmark.core.comparison import (
    UNKNOWN,
    Cell,
    Comparison,
    Line,
    Overall,
    Series,
    Side,
)
from stepmark.core.errors import ConfigError
from stepmark.core.ratio import (
    CONFIDENCE,
    EFFECT_FLOOR,
    Ratio,
    Spread,
    Verdict,
    holm,
    ratio,
    spread_of,
)
from stepmark.store.series import NAMING, STRICT, join

STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"median": median, "mean": fmean}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a comparison. `noise` is the relative standard deviation of one launch."""

    floor: float = EFFECT_FLOOR
    noise: float | None = None
    statistic: str = "median"  # of the samples of a launch
    allowed: tuple[str, ...] = ()  # fields of join.STRICT that may differ
    fail_if_slower: float | None = None
    smallest_bytes: int | None = None  # of the geometric mean
    largest_bytes: int | None = None
    recorded: tuple[Side, ...] = ()  # runs with several launches: their spread


def compare(sides: Sequence[Side], options: Options) -> Comparison:
    """Compare every other side with the first. Raises ConfigError where nothing is paired."""
    if len(sides) < 2:
        raise ConfigError("sides", len(sides), "two or more")
    if len({side.name for side in sides}) < len(sides):
        names = ", ".join(side.name for side in sides)
        raise ConfigError("sides", names, "different names, e.g. tcp=a.txt plugin=b.txt")
    base, *others = sides
    cells: dict[int, dict[str, Cell]] = {}
    pairs: dict[str, list[tuple[Series, Series]]] = {}
    notes = [f"{side.name}: {note}" for side in sides for note in side.notes]
    notes += _context_notes(sides)
    if options.statistic != "median":
        notes.append(f"of the samples of a launch the {options.statistic} counts")
    for other in others:
        joined = join(base, other, options.allowed)
        notes += joined.notes
        pairs[other.name] = []
        for place, *pair in joined.pairs:
            base_series, other_series = pair
            row = cells.setdefault(place, {base.name: _cell(base_series, None, options)})
            judged = _judge(base_series, other_series, options)
            row[other.name] = _cell(_completed(other_series, base_series), judged, options)
            pairs[other.name].append((base_series, other_series))
        notes += _basis_notes(base.name, other.name, pairs[other.name])
    lines = tuple(_line(base.series[place], cells[place]) for place in sorted(cells))
    notes += _unused(lines, options)
    means = (_overall(name, of_side, options) for name, of_side in pairs.items())
    return Comparison(
        names=tuple(side.name for side in sides),
        lines=lines,
        overall=tuple(filter(None, means)),
        notes=tuple(dict.fromkeys(notes)),
        too_slow=_too_slow(lines, options),
        fail_if_slower=options.fail_if_slower,
    )


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


def _line(series: Series, cells: Mapping[str, Cell]) -> Line:
    return Line(
        fields=series.fields,
        size_bytes=series.size_bytes,
        unit=series.unit,
        cells=cells,
    )


def _completed(series: Series, base: Series) -> Series:
    """Return the series with the baseline's bus bandwidth factor if it states no ranks."""
    if series.busbw_factor or series.fields.get("num_ranks") is not None:
        return series
    return replace(series, busbw_factor=base.busbw_factor)


def _basis_notes(
    base: str, other: str, pairs: Sequence[tuple[Series, Series]]
) -> Iterator[str]:
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


def _centres(series: Series, statistic: str) -> dict[str, float]:
    return {launch: STATISTICS[statistic](values) for launch, values in series.launches.items()}


def _times(series: Series, statistic: str) -> dict[str, float]:
    """Return centres as times; for a rate, the time of one unit."""
    centres = _centres(series, statistic)
    return centres if series.is_time else {k: 1 / value for k, value in centres.items()}


def _cell(series: Series, judged: Ratio | None, options: Options) -> Cell:
    centres = _centres(series, options.statistic)
    logs = [math.log(value) for value in centres.values()]
    return Cell(
        fields=series.fields,
        size_bytes=series.size_bytes,
        busbw_factor=series.busbw_factor,
        value=math.exp(fmean(logs)) if logs else None,
        below=series.below,
        num_launches=len(centres),
        num_values=sum(map(len, series.launches.values())),
        ratio=judged,
    )


def _judge(base: Series, other: Series, options: Options) -> Ratio | None:
    """Return the ratio with its verdict; None where a value is only bounded."""
    if not base.launches or not other.launches:
        return None
    times = [list(_times(series, options.statistic).values()) for series in (base, other)]
    judged = ratio(
        *times,
        spread=_spread(base, other, options),
        floor=options.floor,
        rounding=(base.rounding, other.rounding),
    )
    if base.unit == UNKNOWN:
        return _ratio_only(judged, "--unit rate or time")
    values = [sum(map(len, series.launches.values())) for series in (base, other)]
    if judged.low is None and max(values) == 1:
        return _ratio_only(judged, "one value")
    return judged


def _ratio_only(measured: Ratio, reason: str) -> Ratio:
    return Ratio(
        speed=measured.speed, low=None, high=None, verdict=Verdict.CANNOT_TELL, reason=reason
    )


def _spread(base: Series, other: Series, options: Options) -> Spread | None:
    """Return how launches of this vary, for a side with only one."""
    if options.noise is not None:
        return Spread(
            sd_log=options.noise, num_launches=None, source=f"noise {options.noise:.2%} as told"
        )
    if (match := _recorded(base, options)) is not None:
        name, recorded = match
        times = list(_times(recorded, options.statistic).values())
        return spread_of(times, f"{len(times)} launches of {name}")
    for series in (base, other):
        if len(series.launches) > 1:
            times = list(_times(series, options.statistic).values())
            return spread_of(times, f"{len(times)} launches of the other side")
    return None


def _is_same_kind(recorded: Series, series: Series) -> bool:
    """Whether both are the same measurement at the same size, by the fields that both state."""
    same_size = recorded.size_bytes == series.size_bytes and recorded.unit == series.unit
    stated = (
        (recorded.fields.get(name), series.fields.get(name)) for name in (*STRICT, *NAMING)
    )
    return same_size and all(
        left == right or left in (None, "") or right in (None, "") for left, right in stated
    )


def _recorded(series: Series, options: Options) -> tuple[str, Series] | None:
    """Return the recorded side with several launches of the same kind, and those launches."""
    for side in options.recorded:
        for recorded in side.series:
            if len(recorded.launches) > 1 and _is_same_kind(recorded, series):
                return side.name, recorded
    return None


def _overall(
    name: str, pairs: Sequence[tuple[Series, Series]], options: Options
) -> Overall | None:
    """Return the geometric mean: each launch gives the mean of its logarithms over all lines.

    None over lines of several units, such as a trainer's seconds and samples/s.
    """
    pairs = [
        (base, other)
        for base, other in pairs
        if base.launches and other.launches and _in_range(base.size_bytes, options)
    ]
    base_series = [base for base, _ in pairs]
    if len({series.unit for series in base_series}) != 1:
        return None
    all_series = [series for pair in pairs for series in pair]
    sides = [_pooled(series, options.statistic) for series in zip(*pairs, strict=True)]
    spread = _spread_of_mean(base_series, sides, options)
    sizes = [series.size_bytes for series in base_series if series.size_bytes is not None]
    mean = ratio(*sides, spread=spread, floor=options.floor)
    if mean.low is None and all(len(series.launches) == 1 for series in all_series):
        values = max(len(v) for series in all_series for v in series.launches.values())
        mean = _ratio_only(mean, "one value" if values == 1 else "one launch")
    if base_series[0].unit == UNKNOWN:
        mean = _ratio_only(mean, "--unit rate or time")
    return Overall(
        name=name,
        ratio=mean,
        num_lines=len(pairs),
        smallest_bytes=min(sizes, default=None),
        largest_bytes=max(sizes, default=None),
    )


def _spread_of_mean(
    base_series: Sequence[Series], sides: Sequence[Sequence[float]], options: Options
) -> Spread | None:
    if options.noise is not None:  # of each line; lines of one launch may move together
        return Spread(sd_log=options.noise, num_launches=None, source="noise as told")
    if max(map(len, sides)) > 1:
        return spread_of(max(sides, key=len), "launches of the other side")
    matches = [_recorded(series, options) for series in base_series]
    if None in matches:
        return None
    times = _pooled([series for _, series in filter(None, matches)], options.statistic)
    return spread_of(times, f"{len(times)} launches on record")


def _unused(lines: Sequence[Line], options: Options) -> list[str]:
    """Return notes on options that had no effect."""
    repeated = any(
        sum(cell.num_launches > 1 for cell in line.cells.values()) > 1 for line in lines
    )
    notes = []
    if options.noise is not None and repeated:
        notes.append("--noise is not used where both sides have several launches")
    if options.recorded and not any(_recorded_in(line, options) for line in lines):
        notes.append("--noise-from has several launches of nothing that is compared")
    return notes


def _recorded_in(line: Line, options: Options) -> bool:
    like = Series(fields=line.fields, size_bytes=line.size_bytes, unit=line.unit, launches={})
    return _recorded(like, options) is not None


def _in_range(size: int | None, options: Options) -> bool:
    if size is None:
        return options.smallest_bytes is None and options.largest_bytes is None
    low = options.smallest_bytes is None or size >= options.smallest_bytes
    return low and (options.largest_bytes is None or size <= options.largest_bytes)


def _pooled(group: Sequence[Series], statistic: str) -> list[float]:
    """Return geometric means over the series by launch; one mean where they share none."""
    times = [_times(series, statistic) for series in group]
    shared = [launch for launch in times[0] if all(launch in by_launch for by_launch in times)]
    if not shared:
        return [math.exp(fmean(fmean(map(math.log, each.values())) for each in times))]
    return [math.exp(fmean(math.log(each[launch]) for each in times)) for launch in shared]


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
