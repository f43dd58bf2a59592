"""Sides against a baseline, line by line, each ratio judged."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """How sides are compared. `noise` is a relative standard deviation of one launch."""

    floor: float = EFFECT_FLOOR
    noise: float | None = None
    statistic: str = "median"  # of the samples of a launch
    allowed: tuple[str, ...] = ()  # fields of join.STRICT that may differ
    fail_if_slower: float | None = None
    smallest_bytes: int | None = None  # of the geometric mean
    largest_bytes: int | None = None
    recorded: tuple[Side, ...] = field(default=())  # with several launches: how these differ


def compare(sides: Sequence[Side], options: Options) -> Comparison:
    """Every other side against the first. Raises ConfigError where nothing can be paired."""
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
    for other in others:
        joined = join(base, other, options.allowed)
        notes += joined.notes
        pairs[other.name] = []
        for place, mine, theirs in joined.pairs:
            held = cells.setdefault(place, {base.name: _cell(mine, None, options)})
            held[other.name] = _cell(theirs, _judge(mine, theirs, options), options)
            pairs[other.name].append((mine, theirs))
    lines = tuple(_line(base.series[place], cells[place]) for place in sorted(cells))
    notes += _unused(lines, options)
    overall = tuple(
        found for name, held in pairs.items() if (found := _overall(name, held, options))
    )
    return Comparison(
        names=tuple(side.name for side in sides),
        lines=lines,
        overall=overall,
        notes=tuple(dict.fromkeys(notes)),
        too_slow=_too_slow(lines, options),
        fail_if_slower=options.fail_if_slower,
    )


def _context_notes(sides: Sequence[Side]) -> list[str]:
    """Variables and versions that are not the same everywhere. Files tell of none."""
    known = [side for side in sides if side.context]
    notes = []
    for name in dict.fromkeys(name for side in known for name in side.context):
        values = [side.context.get(name, "unset") for side in known]
        if len(set(values)) > 1:
            told = ", ".join(f"{s.name} {v}" for s, v in zip(known, values, strict=True))
            notes.append(f"{name} differs: {told}")
    return notes


def _line(series: Series, cells: Mapping[str, Cell]) -> Line:
    return Line(
        fields=series.fields,
        size_bytes=series.size_bytes,
        unit=series.unit,
        busbw_factor=series.busbw_factor,
        cells=cells,
    )


def _centres(series: Series, statistic: str) -> dict[str, float]:
    return {launch: STATISTICS[statistic](values) for launch, values in series.launches.items()}


def _times(series: Series, statistic: str) -> dict[str, float]:
    """Centres as times; of a rate, the time of one unit."""
    centres = _centres(series, statistic)
    return centres if series.is_time else {k: 1 / value for k, value in centres.items()}


def _cell(series: Series, found: Ratio | None, options: Options) -> Cell:
    centres = _centres(series, options.statistic)
    logs = [math.log(value) for value in centres.values()]
    return Cell(
        value=math.exp(fmean(logs)) if logs else None,
        below=series.below,
        num_launches=len(centres),
        num_values=sum(map(len, series.launches.values())),
        ratio=found,
    )


def _judge(mine: Series, theirs: Series, options: Options) -> Ratio | None:
    """None where a value is only bounded."""
    if not mine.launches or not theirs.launches:
        return None
    times = [list(_times(series, options.statistic).values()) for series in (mine, theirs)]
    found = ratio(
        *times,
        spread=_spread(mine, theirs, options),
        floor=options.floor,
        rounding=(mine.rounding, theirs.rounding),
    )
    if mine.unit == UNKNOWN:
        return _ratio_only(found, "--unit rate or time")
    values = [sum(map(len, series.launches.values())) for series in (mine, theirs)]
    if found.low is None and max(values) == 1:
        return _ratio_only(found, "one value")
    return found


def _ratio_only(found: Ratio, reason: str) -> Ratio:
    return Ratio(
        speed=found.speed, low=None, high=None, verdict=Verdict.CANNOT_TELL, reason=reason
    )


def _spread(mine: Series, theirs: Series, options: Options) -> Spread | None:
    """How launches of this differ, where a side has one launch only."""
    if options.noise is not None:
        return Spread(
            sd_log=options.noise, num_launches=None, source=f"noise {options.noise:.2%} as told"
        )
    if (known := _recorded(mine, options)) is not None:
        name, one = known
        times = list(_times(one, options.statistic).values())
        return spread_of(times, f"{len(times)} launches of {name}")
    for series in (mine, theirs):
        if len(series.launches) > 1:
            times = list(_times(series, options.statistic).values())
            return spread_of(times, f"{len(times)} launches of the other side")
    return None


def _is_same_kind(recorded: Series, series: Series) -> bool:
    """The same thing at the same size, as far as both say."""
    same_size = recorded.size_bytes == series.size_bytes and recorded.unit == series.unit
    stated = (
        (recorded.fields.get(name), series.fields.get(name)) for name in (*STRICT, *NAMING)
    )
    return same_size and all(
        one == other or one in (None, "") or other in (None, "") for one, other in stated
    )


def _recorded(series: Series, options: Options) -> tuple[str, Series] | None:
    """With the name of the side: what is on record of this, in several launches."""
    for side in options.recorded:
        for one in side.series:
            if len(one.launches) > 1 and _is_same_kind(one, series):
                return side.name, one
    return None


def _overall(
    name: str, pairs: Sequence[tuple[Series, Series]], options: Options
) -> Overall | None:
    """Launches are the unit here too: each gives the mean of its logarithms over all lines.

    None over lines of several units, such as a trainer's seconds and samples/s.
    """
    held = [
        (mine, theirs)
        for mine, theirs in pairs
        if mine.launches and theirs.launches and _in_range(mine.size_bytes, options)
    ]
    if not held or len({mine.unit for mine, _ in held}) > 1:
        return None
    sides = [_pooled([pair[index] for pair in held], options.statistic) for index in (0, 1)]
    spread = _spread_of_mean(held, sides, options)
    sizes = [mine.size_bytes for mine, _ in held if mine.size_bytes is not None]
    found = ratio(*sides, spread=spread, floor=options.floor)
    if found.low is None and all(len(s.launches) == 1 for pair in held for s in pair):
        values = max(len(v) for pair in held for s in pair for v in s.launches.values())
        found = _ratio_only(found, "one value" if values == 1 else "one launch")
    if held[0][0].unit == UNKNOWN:
        found = _ratio_only(found, "--unit rate or time")
    return Overall(
        name=name,
        ratio=found,
        num_lines=len(held),
        smallest_bytes=min(sizes, default=None),
        largest_bytes=max(sizes, default=None),
    )


def _spread_of_mean(
    held: Sequence[tuple[Series, Series]], sides: Sequence[Sequence[float]], options: Options
) -> Spread | None:
    if options.noise is not None:  # of each line; lines of one launch may move together
        return Spread(sd_log=options.noise, num_launches=None, source="noise as told")
    if max(map(len, sides)) > 1:
        return spread_of(max(sides, key=len), "launches of the other side")
    known = [_recorded(mine, options) for mine, _ in held]
    if None in known:
        return None
    recorded = _pooled([one for _, one in filter(None, known)], options.statistic)
    return spread_of(recorded, f"{len(recorded)} launches on record")


def _unused(lines: Sequence[Line], options: Options) -> list[str]:
    """What was asked for and had no effect."""
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


def _pooled(held: Sequence[Series], statistic: str) -> list[float]:
    """Geometric mean over the series, by launch; of all at once where they share none."""
    centres = [_times(series, statistic) for series in held]
    shared = [launch for launch in centres[0] if all(launch in one for one in centres)]
    if not shared:
        return [math.exp(fmean(fmean(map(math.log, one.values())) for one in centres))]
    return [math.exp(fmean(math.log(one[launch]) for one in centres)) for launch in shared]


def _too_slow(lines: Sequence[Line], options: Options) -> tuple[tuple[int, str], ...] | None:
    """Lines whose interval's near end is past the limit, after Holm over all of them."""
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
    fallen = holm([p for *_, p in tested], (1 - CONFIDENCE) / 2)
    return tuple(
        (place, name)
        for (place, name, _), is_slow in zip(tested, fallen, strict=True)
        if is_slow
    )
