"""Recommendation of a setting by size. Nothing is recommended that chance explains.

A setting is selected for a line when it is faster than the baseline with certainty, after
Holm's correction over all settings and lines, and by at least `min_gain`. Of several the
fastest is selected, or the one for all lines where it may be as fast. Its gain is too high,
because it was selected for it. So a gain is recommended only if it is certain again, over the
lines that were selected, in fresh rounds, which had no part in the selection. Figure and
interval are theirs.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, groupby, pairwise

from stepmark.cases.sweep import cut
from stepmark.comparison.comparison import Comparison, Line
from stepmark.comparison.comparison_text import ratio_of, ratio_text
from stepmark.ground.ratio import BUSY, CONFIDENCE, Ratio, Verdict, holm
from stepmark.ground.units import comma_list, format_bytes, plural

_UNCONFIRMED = "unconfirmed"
_P_PROMISING = 0.1  # one-sided, of a gain that more rounds may confirm
_OF_RATIO = ("speed", "low", "high")
# Fields that a label shows without their name, in this order.
_PLAIN = ("family", "shape", "label", "phase", "dtype", "redop", "placement", "pair")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A line and the setting that won it; `winner` is None where the baseline stays.

    `best` is the fastest setting, certain or not, and `reason` why it is not the winner, or why
    a winner is not the fastest. `ratio` is its speed over the baseline's.
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
    """Advice for a sweep. `single` is a setting that wins somewhere and loses nowhere.

    slower: settings that are certainly slower than the baseline somewhere, and by how much.
    """

    baseline: str
    considered: tuple[str, ...]  # settings that could have won
    picks: tuple[Pick, ...]
    ranges: tuple[Range, ...]
    single: str | None
    num_tests: int
    min_gain: float
    left_out: Mapping[str, str]  # settings that are not considered, and why
    slower: Mapping[str, str] = field(default_factory=dict)
    fresh: int = 0  # rounds that confirmed the gains; 0: none did

    @property
    def selected(self) -> tuple[str, ...]:
        """Return the settings that win a line, in the order in which they are considered."""
        winners = {pick.winner for pick in self.picks}
        return tuple(name for name in self.considered if name in winners)

    @property
    def is_unconfirmed(self) -> bool:
        """Return whether what was selected has no fresh rounds yet."""
        return not self.fresh and any(p.reason.startswith(_UNCONFIRMED) for p in self.picks)

    @property
    def unsure(self) -> tuple[Ratio, ...]:
        """Return the ratios without which there is no verdict; none where there is one.

        There is one when a gain was confirmed or refuted, and when settings are certainly
        slower and no other looks faster.
        """
        if any(pick.winner for pick in self.picks) or self.fresh:
            return ()
        best = [pick.ratio for pick in self.picks if pick.ratio]
        if promising := [ratio for ratio in best if _is_promising(ratio, self.min_gain)]:
            return tuple(promising)
        return () if self.slower else tuple(r for r in best if r.verdict is Verdict.CANNOT_TELL)


def _is_promising(ratio: Ratio, min_gain: float) -> bool:
    """Return whether it looks faster, with a chance of one in ten if it were not."""
    p = p_faster(ratio)
    return ratio.speed >= 1 + min_gain and (p is None or p <= _P_PROMISING)


def advise(
    comparison: Comparison,
    *,
    min_gain: float,
    left_out: Mapping[str, str] | None = None,
    dropped: Collection[str] = (),
) -> Advice:
    """Return the selection from ratios whose launches are rounds. It is not confirmed yet.

    One round makes nothing certain. dropped: settings that were nowhere the fastest.
    """
    out = left_out or {}
    base, *others = comparison.names
    considered = [name for name in others if name not in out and name not in dropped]
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
    if single := _single(picks, considered, min_gain):
        picks = tuple(
            _simplified(pick, single, min_gain) if (place, single) in certain else pick
            for place, pick in enumerate(picks)
        )
    return Advice(
        baseline=base,
        considered=tuple(considered),
        picks=picks,
        ranges=tuple(_ranges(picks)),
        single=single,
        num_tests=len(tested),
        min_gain=min_gain,
        left_out=out,
        slower=_slower(comparison.lines, [name for name in others if name not in out]),
    )


def _slower(lines: Sequence[Line], names: Sequence[str]) -> dict[str, str]:
    """Return by how much settings are certainly slower, by name."""
    texts = {}
    for name in names:
        ratios = [ratio for line in lines if (ratio := ratio_of(line, name))]
        slow = [ratio for ratio in ratios if ratio.verdict is Verdict.SLOWER]
        if slow:
            where = f"on {len(slow)} of {plural(len(ratios), 'line')}"
            texts[name] = f"{name} is slower {where}: {_gains_of(slow)}"
    return texts


def confirm(advice: Advice, fresh: Comparison | None, rounds: int) -> Advice:
    """Return the gains of a selection that are certain in fresh rounds, with those ratios.

    fresh: the settings of the selection in fresh rounds; None where they are not complete.
    """
    lines = {_identity(line): line for line in fresh.lines} if fresh else {}
    measured = [(pick, lines.get(_identity(pick.line))) for pick in advice.picks]
    tested = {
        place: (ratio, p)
        for place, (pick, line) in enumerate(measured)
        if pick.winner
        and line
        and (ratio := ratio_of(line, pick.winner))
        and (p := p_faster(ratio)) is not None
    }
    is_faster = holm([p for _, p in tested.values()], 1 - CONFIDENCE)
    certain = dict(zip(tested, is_faster, strict=True))
    picks = []
    for place, (pick, line) in enumerate(measured):
        ratio = tested[place][0] if place in tested else None
        if ratio is None or line is None:
            reason = f"{_UNCONFIRMED}: no fresh rounds" if pick.winner else pick.reason
            picks.append(replace(pick, line=line or pick.line, winner=None, reason=reason))
        elif certain[place] and ratio.speed >= 1 + advice.min_gain:
            picks.append(replace(pick, line=line, ratio=ratio))
        else:
            reason = f"{_UNCONFIRMED}: {ratio_text(ratio)} in {plural(rounds, 'fresh round')}"
            picks.append(replace(pick, line=line, ratio=ratio, winner=None, reason=reason))
    return replace(
        advice,
        picks=tuple(picks),
        ranges=tuple(_ranges(picks)),
        single=_single(picks, advice.selected, advice.min_gain),
        num_tests=len(tested) or advice.num_tests,
        fresh=rounds if tested else 0,
    )


def _identity(line: Line) -> tuple[object, ...]:
    return frozenset(line.fields.items()), line.size_bytes, line.unit


def p_faster(ratio: Ratio) -> float | None:
    """Return the one-sided p of "not faster at all"; None where the spread is unknown."""
    return None if ratio.reason == BUSY else ratio.p_faster


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


def _simplified(pick: Pick, single: str, min_gain: float) -> Pick:
    """Return the setting for all lines as the winner, where the winner may not be faster."""
    ratio = ratio_of(pick.line, single)
    if not (ratio and pick.ratio and pick.ratio.low) or ratio.speed < 1 + min_gain:
        return pick
    if pick.ratio.low > ratio.speed or pick.winner == single:
        return pick
    reason = f"{pick.winner} is not certainly faster than it"
    return replace(pick, winner=single, best=single, ratio=ratio, reason=reason)


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
    runs = [tuple(run) for _, run in groupby(sized, key=lambda pick: pick.winner)]
    cuts = [cut(_size(a[-1]), _size(b[0])) for a, b in pairwise(runs)]
    firsts = [*map(_size, sized[:1]), *(each + 1 for each in cuts)]
    lasts = [*cuts, *map(_size, sized[-1:])]
    return [
        Range(label=label, first_bytes=None, last_bytes=None, picks=(pick,))
        for pick in picks
        if pick.line.size_bytes is None
    ] + [
        Range(label=label, first_bytes=first, last_bytes=last, picks=run)
        for run, first, last in zip(runs, firsts, lasts, strict=True)
    ]


def _size(pick: Pick) -> int:
    return pick.line.size_bytes or 0


def text_of(advice: Advice, exports: Mapping[str, str]) -> list[str]:
    """Return confirmed advice as text. `exports` has the shell lines of each setting."""
    lines = [f"not considered: {name}: {why}" for name, why in advice.left_out.items()]
    lines += _unconfirmed(advice.picks)
    keep = "the default" if advice.baseline == "default" else advice.baseline
    won = [pick for pick in advice.picks if pick.winner]
    assert advice.fresh or not won, "a selection is no recommendation"
    if not advice.considered:
        if advice.picks and not advice.left_out:
            return [*lines, f"keep {keep}: {_slowest(advice)}no other is the fastest anywhere"]
        why = "every other setting is left out"
        return [*lines, f"keep {keep}: nothing can be recommended because {why}"]
    if not won:
        tests = f"in {plural(advice.num_tests, 'comparison')} nothing is certainly faster"
        if advice.fresh:
            tests = "fresh rounds do not confirm what was selected"
        elif advice.is_unconfirmed:
            tests = "what was selected has no fresh rounds"
        elif not advice.num_tests:
            is_busy = any(pick.ratio and pick.ratio.reason == BUSY for pick in advice.picks)
            why = (
                "other work ran on this host" if is_busy else "how repeats differ is not known"
            )
            tests = f"nothing can be recommended because {why}"
        lines.append(f"keep {keep}: {_slowest(advice)}{tests}")
        lines += [f"  {_range_text(entry, keep)}" for entry in advice.ranges]
        return lines
    confirmed = f"confirmed by {plural(advice.fresh, 'fresh round')}"
    if advice.single:
        wins = [pick for pick in won if pick.winner == advice.single]
        lines.append(
            f"recommended: faster on {len(wins)} of {plural(len(advice.picks), 'line')}: "
            f"{_gains(wins)}, {confirmed}; seen more than {advice.min_gain:.1%} slower on none"
        )
        lines += [f"  {line}" for line in exports[advice.single].splitlines()]
    if not advice.single or len({pick.winner for pick in won}) > 1:
        lines.append(
            f"by size, what is certainly faster, {confirmed}:"
            if not advice.single
            else "best by size:"
        )
        lines += [f"  {_range_text(entry, keep)}" for entry in advice.ranges]
    return [*lines, *_one_sided(won)]


def _slowest(advice: Advice) -> str:
    """Return which settings are slower, as the beginning of a list of reasons."""
    return f"{comma_list(advice.slower.values(), 3)}; " if advice.slower else ""


def _one_sided(won: Sequence[Pick]) -> list[str]:
    """Return why lines are recommended of which the comparison cannot tell, if any."""
    unsure = sum(bool(p.ratio and p.ratio.verdict is not Verdict.FASTER) for p in won)
    text = (
        f"{unsure} of these {plural(len(won), 'line')} without the verdict faster above: a "
        "verdict asks faster or slower, a recommendation only whether it is faster (one-sided)"
    )
    return [text] if unsure else []


def _unconfirmed(picks: Sequence[Pick]) -> list[str]:
    by_name: dict[str, list[Pick]] = {}
    for pick in picks:
        if pick.best and pick.reason.startswith(_UNCONFIRMED):
            by_name.setdefault(pick.best, []).append(pick)
    return [
        f"selected, not confirmed: {name} on {len(lines)} of "
        f"{plural(len(picks), 'line')}, {_gains(lines)}"
        for name, lines in by_name.items()
    ]


def _range_text(entry: Range, keep: str) -> str:
    span = ""
    if entry.first_bytes is not None and entry.last_bytes is not None:
        span = f" {format_bytes(entry.first_bytes)} to {format_bytes(entry.last_bytes)}"
    head = f"{entry.label}{span}: "
    if entry.winner:
        why = "".join(f"; {r}" for r in dict.fromkeys(p.reason for p in entry.picks) if r)
        return f"{head}{entry.winner} {_gains(entry.picks)}{why}"
    best = entry.best
    if best.ratio is None:
        return f"{head}keep {keep} ({best.reason})"
    where = ""
    if best.line.size_bytes is not None and len(entry.picks) > 1:
        where = f" at {format_bytes(best.line.size_bytes)}"
    role = "selected" if best.reason.startswith(_UNCONFIRMED) else "best"
    speed = f"{best.ratio.speed:.3f}"
    return f"{head}keep {keep} ({role}: {best.best} {speed}{where}; {best.reason})"


def _gains(picks: Sequence[Pick]) -> str:
    """Return the gains of picks, such as "+4.1% (3.2 to 5.0%)"."""
    return _gains_of([pick.ratio for pick in picks if pick.ratio])


def _gains_of(ratios: Sequence[Ratio]) -> str:
    """Return changes of speed with their interval; of several the range, and all intervals."""
    speeds = [ratio.speed for ratio in ratios]
    text = f"{min(speeds) - 1:+.1%}"
    text += f" to {max(speeds) - 1:+.1%}" if len(speeds) > 1 else ""
    bounds = [bound for ratio in ratios for bound in (ratio.low, ratio.high) if bound]
    if not bounds:
        return text
    return f"{text} ({100 * (min(bounds) - 1):.1f} to {max(bounds) - 1:.1%})"


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
            **{f"best_{name}": getattr(entry.best.ratio, name, None) for name in _OF_RATIO},
            "fresh_rounds": advice.fresh if entry.winner else 0,
            "reason": entry.best.reason,
        }
        for entry in advice.ranges
    ]
