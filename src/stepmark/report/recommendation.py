"""Recommendation of a setting by size. Nothing is recommended that chance explains.

A setting wins a line when it is faster than the baseline with certainty, after Holm's
correction over all settings and lines, and by at least `min_gain`. Of several the fastest wins.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, pairwise

from stepmark.core.comparison import Comparison, Line
from stepmark.core.ratio import CONFIDENCE, Ratio, Verdict, holm
from stepmark.core.sweep import cut
from stepmark.core.units import format_bytes
from stepmark.report.comparison import ratio_of

# Fields that a label shows without their name, in this order.
_PLAIN = ("family", "shape", "label", "phase", "dtype", "redop", "placement", "pair")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A line and the setting that won it; `winner` is None where the baseline stays.

    `best` is the fastest setting, certain or not, and `reason` why it is not the winner.
    `ratio` is its speed over the baseline's.
    """

    line: Line
    winner: str | None
    best: str | None
    ratio: Ratio | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Neighbouring sizes with one winner, bounds inclusive; None for lines without a size."""

    label: str
    first_bytes: int | None
    last_bytes: int | None
    picks: tuple[Pick, ...]

    @property
    def winner(self) -> str | None:
        return self.picks[0].winner

    @property
    def best(self) -> Pick:
        return max(self.picks, key=lambda pick: pick.ratio.speed if pick.ratio else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice for a sweep. `single` is a setting that wins somewhere and loses nowhere."""

    baseline: str
    considered: tuple[str, ...]  # settings that could have won
    picks: tuple[Pick, ...]
    ranges: tuple[Range, ...]
    single: str | None
    num_tests: int
    min_gain: float
    left_out: Mapping[str, str]  # settings that are not considered, and why


def advise(
    comparison: Comparison, *, min_gain: float, left_out: Mapping[str, str] | None = None
) -> Advice:
    """Return advice from ratios whose launches are rounds; one round makes nothing certain."""
    out = left_out or {}
    base, *others = comparison.names
    considered = [name for name in others if name not in out]
    tested = [
        (place, name, p)
        for place, line in enumerate(comparison.lines)
        for name in considered
        if (ratio := ratio_of(line, name)) and (p := p_faster(ratio)) is not None
    ]
    is_faster = holm([p for *_, p in tested], 1 - CONFIDENCE)
    certain = {(place, name) for place, name, _ in compress(tested, is_faster)}
    picks = tuple(
        _pick(line, considered, {name for at, name in certain if at == place}, min_gain)
        for place, line in enumerate(comparison.lines)
    )
    return Advice(
        baseline=base,
        considered=tuple(considered),
        picks=picks,
        ranges=tuple(_ranges(picks)),
        single=_single(picks, considered, min_gain),
        num_tests=len(tested),
        min_gain=min_gain,
        left_out=out,
    )


def p_faster(ratio: Ratio) -> float | None:
    """Return the one-sided p of "not faster at all"; None where the spread is unknown."""
    p_slower = ratio.p_slower(0.0)
    return None if p_slower is None else 1 - p_slower


def _pick(line: Line, names: Sequence[str], certain: set[str], min_gain: float) -> Pick:
    ratios = {name: ratio for name in names if (ratio := ratio_of(line, name))}
    if not ratios:
        return Pick(line=line, winner=None, best=None, ratio=None, reason="nothing to compare")
    ranked = sorted(ratios, key=lambda name: ratios[name].speed, reverse=True)
    for name in ranked:
        if name in certain and ratios[name].speed >= 1 + min_gain:
            return Pick(line=line, winner=name, best=name, ratio=ratios[name])
    best = ranked[0]
    reason = _why_not(ratios[best], best in certain, min_gain)
    return Pick(line=line, winner=None, best=best, ratio=ratios[best], reason=reason)


def _why_not(ratio: Ratio, is_certain: bool, min_gain: float) -> str:
    if ratio.speed <= 1:
        return "nothing was faster"
    if is_certain or ratio.speed < 1 + min_gain:
        return f"under {min_gain:.1%} faster"
    if ratio.se_log is None and ratio.reason == "identical values":
        return "identical repeats: nothing is known of how they differ"
    if ratio.se_log is None:
        return "one round: too few repeats"
    if ratio.verdict is Verdict.FASTER:
        return "not certain among so many comparisons: too few repeats"
    return "within noise"


def _single(picks: Sequence[Pick], names: Sequence[str], min_gain: float) -> str | None:
    """Return the setting that wins most lines and loses none; then the fastest on average."""
    scored = []
    for name in names:
        ratios = [ratio for pick in picks if (ratio := ratio_of(pick.line, name))]
        won = sum(pick.winner == name for pick in picks)
        if won and len(ratios) == len(picks) and not any(_loses(r, min_gain) for r in ratios):
            scored.append((won, sum(math.log(ratio.speed) for ratio in ratios), name))
    return max(scored)[-1] if scored else None


def _loses(ratio: Ratio, min_gain: float) -> bool:
    """Whether it is certainly slower, or seen slower by as much as a gain must be to count."""
    return ratio.verdict is Verdict.SLOWER or ratio.speed * (1 + min_gain) < 1


def _ranges(picks: Sequence[Pick]) -> list[Range]:
    """Return ranges by all fields but the size, so that no size is in two ranges."""
    names = _label_fields([pick.line for pick in picks])
    groups: dict[tuple[object, ...], list[Pick]] = {}
    for pick in picks:
        key = (frozenset(pick.line.fields.items()), pick.line.unit)
        groups.setdefault(key, []).append(pick)
    return [
        sizes
        for group in groups.values()
        for sizes in _merged(_label(group[0].line, names), group)
    ]


def _label_fields(lines: Sequence[Line]) -> list[str]:
    """Return the family, the shape, and fields that distinguish lines in which these agree."""
    every = dict.fromkeys((*_PLAIN, *(name for line in lines for name in line.fields)))
    names: list[str] = []
    num_distinct = 0
    for name in every:
        count = len({tuple(line.fields.get(n) for n in (*names, name)) for line in lines})
        if count > num_distinct or name in ("family", "shape"):
            names.append(name)
            num_distinct = count
    return names


def _label(line: Line, names: Sequence[str]) -> str:
    pairs = ((name, line.fields.get(name)) for name in names)
    return " ".join(
        f"{value}" if name in _PLAIN else f"{name} {value}"
        for name, value in pairs
        if value not in (None, "")
    )


def _merged(label: str, picks: Sequence[Pick]) -> list[Range]:
    sized = sorted(
        (pick for pick in picks if pick.line.size_bytes is not None),
        key=lambda pick: pick.line.size_bytes or 0,
    )
    ranges = [
        Range(label=label, first_bytes=None, last_bytes=None, picks=(pick,))
        for pick in picks
        if pick.line.size_bytes is None
    ]
    if not sized:
        return ranges
    runs = [tuple(run) for _, run in groupby(sized, key=lambda pick: pick.winner)]
    bounds = [cut(_size(a[-1]), _size(b[0])) for a, b in pairwise(runs)] + [_size(sized[-1])]
    first = _size(sized[0])
    for run, last in zip(runs, bounds, strict=True):
        ranges.append(Range(label=label, first_bytes=first, last_bytes=last, picks=run))
        first = last + 1
    return ranges


def _size(pick: Pick) -> int:
    return pick.line.size_bytes or 0


def text_of(advice: Advice, exports: Mapping[str, str]) -> list[str]:
    """Return the advice as text. `exports` has the shell lines of each setting."""
    lines = [f"not considered: {name}: {why}" for name, why in advice.left_out.items()]
    keep = "the default" if advice.baseline == "default" else advice.baseline
    won = [pick for pick in advice.picks if pick.winner]
    if not advice.considered:
        why = "every other setting is left out"
        return [*lines, f"keep {keep}: nothing can be recommended because {why}"]
    if not won:
        tests = f"in {_count(advice.num_tests, 'comparison')} nothing is certainly faster"
        if not advice.num_tests:
            tests = "nothing can be recommended because how repeats differ is not known"
        lines.append(f"keep {keep}: {tests}")
        lines += [f"  {_range_text(entry, keep)}" for entry in advice.ranges]
        return lines
    if advice.single:
        wins = [pick for pick in won if pick.winner == advice.single]
        lines.append(
            f"recommended: faster on {len(wins)} of {_count(len(advice.picks), 'line')} "
            f"({_gains(wins)}), seen more than {advice.min_gain:.1%} slower on none"
        )
        lines += [f"  {line}" for line in exports[advice.single].splitlines()]
    if not advice.single or len({pick.winner for pick in won}) > 1:
        lines.append(
            "by size, what is certainly faster:" if not advice.single else "best by size:"
        )
        lines += [f"  {_range_text(entry, keep)}" for entry in advice.ranges]
    return lines


def _range_text(entry: Range, keep: str) -> str:
    span = ""
    if entry.first_bytes is not None and entry.last_bytes is not None:
        span = f" {format_bytes(entry.first_bytes)} to {format_bytes(entry.last_bytes)}"
    head = f"{entry.label}{span}: "
    if entry.winner:
        return f"{head}{entry.winner} ({_gains(entry.picks)})"
    best = entry.best
    if best.ratio is None:
        return f"{head}keep {keep} ({best.reason})"
    where = ""
    if best.line.size_bytes is not None and len(entry.picks) > 1:
        where = f" at {format_bytes(best.line.size_bytes)}"
    return f"{head}keep {keep} (best: {best.best} {best.ratio.speed:.3f}{where}; {best.reason})"


def _gains(picks: Sequence[Pick]) -> str:
    speeds = [pick.ratio.speed for pick in picks if pick.ratio]
    low, high = min(speeds), max(speeds)
    text = f"{low - 1:+.1%}"
    return text if low == high else f"{text} to {high - 1:+.1%}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def rows(advice: Advice) -> list[dict[str, object]]:
    """Return one flat row per range."""
    return [
        {
            "label": entry.label,
            "first_bytes": entry.first_bytes,
            "last_bytes": entry.last_bytes,
            "setting": entry.winner or advice.baseline,
            "is_change": entry.winner is not None,
            "best": entry.best.best,
            "best_speed": entry.best.ratio.speed if entry.best.ratio else None,
            "reason": entry.best.reason,
        }
        for entry in advice.ranges
    ]
