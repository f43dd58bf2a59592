"""Which setting to use at which size, if any. Nothing is recommended that chance explains.

A setting wins a line when it is faster than the baseline with certainty, after Holm's
correction over all settings and lines, and by at least `min_gain`. Of several the fastest wins.
Over 250 lines: what is picked, the ranges made of it and their words change together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from stepmark.core.comparison import Comparison, Line
from stepmark.core.ratio import CONFIDENCE, Ratio, Verdict, holm
from stepmark.core.sweep import cut
from stepmark.core.units import format_bytes

# Fields whose values speak for themselves, in the order in which they are read; of others a
# label has the name too.
_PLAIN = ("family", "shape", "label", "phase", "dtype", "redop", "placement", "pair")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A line and what won it; `winner` is None where the baseline stays.

    `best` is the fastest setting that was seen, certain or not, and `reason` why it is not
    the winner. Ratios are of its speed to the baseline's.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`single` is a setting that wins somewhere and loses nowhere, if there is one."""

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
    """From ratios whose launches are rounds; with one round nothing is certain."""
    out = left_out or {}
    base, *others = comparison.names
    considered = [name for name in others if name not in out]
    tested = [
        (place, name, p)
        for place, line in enumerate(comparison.lines)
        for name in considered
        if (ratio := _ratio(line, name)) and (p := p_faster(ratio)) is not None
    ]
    fallen = holm([p for *_, p in tested], 1 - CONFIDENCE)
    certain = {
        (place, name)
        for (place, name, _), is_faster in zip(tested, fallen, strict=True)
        if is_faster
    }
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
    """One-sided p of "not faster at all"; None where nothing is known of the spread."""
    p_slower = ratio.p_slower(0.0)
    return None if p_slower is None else 1 - p_slower


def _ratio(line: Line, name: str) -> Ratio | None:
    cell = line.cells.get(name)
    return cell.ratio if cell else None


def _pick(line: Line, names: Sequence[str], certain: set[str], min_gain: float) -> Pick:
    ratios = {name: ratio for name in names if (ratio := _ratio(line, name))}
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
    """Most lines won; then the highest mean speed."""
    scored = []
    for name in names:
        ratios = [_ratio(pick.line, name) for pick in picks]
        won = sum(pick.winner == name for pick in picks)
        known = [found for found in ratios if found is not None]
        if won and len(known) == len(ratios) and not any(_loses(r, min_gain) for r in known):
            scored.append((won, sum(math.log(r.speed) for r in known), name))
    return max(scored)[-1] if scored else None


def _loses(ratio: Ratio, min_gain: float) -> bool:
    """Surely slower, or seen to be slower by as much as a gain must be to count."""
    return ratio.verdict is Verdict.SLOWER or ratio.speed * (1 + min_gain) < 1


def _ranges(picks: Sequence[Pick]) -> list[Range]:
    """By all that tells lines apart but their size, so that no size is in two ranges."""
    varying = _telling([pick.line for pick in picks])
    groups: dict[tuple[object, ...], list[Pick]] = {}
    for pick in picks:
        key = (frozenset(pick.line.fields.items()), pick.line.unit)
        groups.setdefault(key, []).append(pick)
    return [
        one for held in groups.values() for one in _merged(_label(held[0].line, varying), held)
    ]


def _telling(lines: Sequence[Line]) -> list[str]:
    """The family, the shape, and what else tells lines apart that these do not."""
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
    """Lines for people. `exports` has, by setting, the shell lines that make it."""
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
    best = max(entry.picks, key=lambda pick: pick.ratio.speed if pick.ratio else 0.0)
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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def rows(advice: Advice) -> list[dict[str, object]]:
    """One flat row per range, for files."""
    return [
        {
            "label": entry.label,
            "first_bytes": entry.first_bytes,
            "last_bytes": entry.last_bytes,
            "setting": entry.winner or advice.baseline,
            "is_change": entry.winner is not None,
            "best": best.best,
            "best_speed": best.ratio.speed if best.ratio else None,
            "reason": best.reason,
        }
        for entry in advice.ranges
        for best in [max(entry.picks, key=lambda p: p.ratio.speed if p.ratio else 0.0)]
    ]
