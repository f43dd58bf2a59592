"""Verdicts of a node check: each rate against the others' median and the data sheet.

docs/howto/check-nodes.md derives the rules.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from stepmark.ground import verdicts
from stepmark.ground.grouping import group_by
from stepmark.ground.launches import Row, Sample
from stepmark.ground.ratio import Ratio
from stepmark.ground.units import comma_list
from stepmark.nodes.node_check import UNITS, Figure, NodeCheck, host_of

# Share of the data sheet's peak that a working device exceeds, by family. Sustained bf16
# products reach 68 to 71 % on the H200 and H100 of results/, a copy 89 to 90 %. The limit of
# products is lower because a power cap lowers their clock, on some devices to half the peak.
LEAST_SHARE = {"gemm": 0.4, "copy": 0.5}
# The least that healthy devices of results/ reach, by family, and the share of it below which
# all devices of a job may be slow alike. Others' usual shares are not known.
USUAL_SHARE = {"gemm": 0.68, "copy": 0.89}
_USUAL_DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
_LEAST_OF_USUAL = 0.9
# Share of a network port's rate below which two directions that agree may both be slow.
LEAST_OF_PORT = 0.5
MIN_OTHERS = 2  # of figures that are more than two
# An interval whose ends are farther apart says only that there were too few launches:
# Student's t of two launches is 64.
_MOST_WIDTH = 4.0
TOO_FEW = "too few launches"
_DIRECTIONS = ("out of", "into")  # by the end of a pair: source, destination


class Outcome(StrEnum):
    """Outcome of a figure or node, from the mildest to the gravest."""

    HEALTHY = "healthy"
    CANNOT_TELL = "cannot tell"
    SLOW = "slow"
    FAILED = "failed"


_BAD = (Outcome.SLOW, Outcome.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureVerdict:
    """A figure against the others: its speed over their median, with a 99 % interval.

    other: the only one that it is compared with, "" where there are more.
    """

    figure: Figure
    outcome: Outcome
    reason: str
    other: str = ""
    speed: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """The outcome of a host, and the reasons for what is not healthy, the gravest first."""

    host: str
    outcome: Outcome
    num_devices: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetVerdict:
    """All hosts by name, and all their figures.

    medians: of rates with a peak. differences: properties that are not equal on all of them.
    unknown: what two alone cannot tell. slow_links: source and destination of pairs of hosts
    that are slow, neither of which is known to be the cause.
    """

    nodes: tuple[NodeVerdict, ...]
    figures: tuple[FigureVerdict, ...]
    medians: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    slow_links: tuple[tuple[str, str], ...] = ()

    @property
    def failing_hosts(self) -> tuple[str, ...]:
        """Hosts that a job should avoid."""
        return tuple(node.host for node in self.nodes if node.outcome in _BAD)


@dataclass(frozen=True, slots=True)
class _Reason:
    """A sentence about a place, and the outcome that it stands for."""

    place: str
    outcome: Outcome
    text: str


def judge(
    checks: Sequence[NodeCheck],
    *,
    floor: float,
    expected: Sequence[str] = (),
    gpus_per_node: int | None = None,
) -> FleetVerdict:
    """Judge all hosts together. floor: slowdown against the others that is accepted."""
    measured = [figure for check in checks for figure in check.figures]
    figures = tuple(judge_figures(measured, floor))
    medians = dict(_medians(measured))
    counts = {check.host: check.num_devices for check in checks}
    reasons: dict[str, list[_Reason]] = {host: [] for host in (*counts, *expected)}
    for host in reasons.keys() - counts.keys():
        text = "no result of this expected host"
        reasons[host].append(_Reason(host, Outcome.FAILED, text))
    for check in checks:
        reasons[check.host] += _reasons_of(check, gpus_per_node)
    for text, slow_hosts in medians.items():
        for host in slow_hosts:
            reasons[host].append(_Reason(host, Outcome.CANNOT_TELL, f"the median of {text}"))
    of_places = [
        _Reason(v.figure.where[0], v.outcome, f"{v.figure.name}: {v.reason}")
        for v in figures
        if len(v.figure.where) == 1
    ]
    pairs = _all_pairs(figures)
    of_pairs = (reason for group in pairs for reason in _of_pairs(group))
    for reason in (*of_places, *of_pairs):
        reasons[host_of(reason.place)].append(reason)
    return FleetVerdict(
        nodes=tuple(
            NodeVerdict(
                host=host,
                outcome=max(
                    (reason.outcome for reason in reasons[host]),
                    key=list(Outcome).index,
                    default=Outcome.CANNOT_TELL,
                ),
                num_devices=counts.get(host, 0),
                reasons=_texts(reasons[host]),
            )
            for host in sorted(reasons)
        ),
        figures=figures,
        medians=tuple(medians),
        differences=tuple(_differences(checks)),
        unknown=tuple(_unknown(figures)),
        slow_links=tuple(dict.fromkeys(_slow_links(pairs))),
    )


def _medians(figures: Sequence[Figure]) -> Iterator[tuple[str, set[str]]]:
    """Yield the median of each rate that has a peak, and the hosts of one that is in doubt."""
    rated = (f for f in figures if f.peak and f.value and len(f.where) == 1)
    for (name, device, unit), members in group_by(
        rated, lambda figure: (figure.name, figure.device, figure.unit)
    ).items():
        rate = median(figure.value or 0.0 for figure in members)
        peak = members[0].peak or math.inf
        usual = USUAL_SHARE.get(name.split()[0], 0.0) if device in _USUAL_DEVICES else 0.0
        least = _LEAST_OF_USUAL * usual
        scale, printed_unit = UNITS[unit]
        text = f"{name}: {rate / scale:.4g} {printed_unit}, {rate / peak:.0%} of the peak "
        known = f"; usual from {usual:.0%} on, in doubt below {least:.0%}" if usual else ""
        yield (
            f"{text}({device}{known})",
            {host_of(f.where[0]) for f in members if max(rate, f.value or 0.0) < least * peak},
        )


def _differences(checks: Sequence[NodeCheck]) -> Iterator[str]:
    """Yield the properties that differ, each with its values, the rarest first."""
    places: dict[str, dict[str, list[str]]] = {}
    for fact in (fact for check in checks for fact in check.facts):
        places.setdefault(fact.name, {}).setdefault(fact.value, []).append(fact.where)
    for name, by_value in places.items():
        if len(by_value) > 1:
            rarest = sorted(by_value, key=lambda value: len(by_value[value]))
            texts = (f"{value} ({comma_list(by_value[value], 4)})" for value in rarest)
            yield f"{name}: {'; '.join(texts)}"


def _unknown(verdicts: Sequence[FigureVerdict]) -> Iterator[str]:
    """Yield what figures that have a single other leave open."""
    failed = {v.figure.name for v in verdicts if v.outcome is Outcome.FAILED}
    alone = [v.figure for v in verdicts if v.other and v.figure.name not in failed]
    open_questions = (
        (1, "whether both are slow, since two are compared with each other alone"),
        (2, "which end is slow, since a slow end slows both directions"),
    )
    for num_places, text in open_questions:
        names = [figure.name for figure in alone if len(figure.where) == num_places]
        if names:
            yield f"{', '.join(dict.fromkeys(names))}: {text}"


def _texts(reasons: Sequence[_Reason]) -> tuple[str, ...]:
    """Return what is not healthy, the gravest first; equal texts of several places once."""
    if not reasons:
        return ("nothing was measured",)
    places: dict[tuple[Outcome, str], list[str]] = {}
    for reason in reasons:
        if reason.outcome is not Outcome.HEALTHY:
            places.setdefault((reason.outcome, reason.text), []).append(reason.place)
    order = list(Outcome)
    return tuple(
        f"{', '.join(dict.fromkeys(places[key]))}: {key[1]}"
        for key in sorted(places, key=lambda key: -order.index(key[0]))
    )


def _reasons_of(check: NodeCheck, gpus_per_node: int | None) -> Iterator[_Reason]:
    """Yield the reasons that need no comparison with others."""
    if gpus_per_node not in (None, check.num_devices) and check.checked_at:
        text = f"{check.num_devices} GPUs, where --gpus-per-node is {gpus_per_node}"
        yield _Reason(check.host, Outcome.FAILED, text)
    for remark in check.failures:
        yield _Reason(remark.where, Outcome.FAILED, remark.text)
    for remark in check.unclear:
        yield _Reason(remark.where, Outcome.CANNOT_TELL, remark.text)


def judge_figures(figures: Sequence[Figure], floor: float) -> Iterator[FigureVerdict]:
    """Yield a verdict per figure, in groups of comparable ones."""
    groups: dict[tuple[str, str, str, int], list[Figure]] = {}
    for figure in figures:
        key = (figure.name, figure.unit, figure.device, len(figure.where))
        groups.setdefault(key, []).append(figure)
    for key, members in groups.items():
        valid = [figure for figure in members if figure.value is not None]
        others: dict[int, str] = {}
        if len(valid) == 2:
            names = ["-".join(figure.where) for figure in valid]
            others = dict(zip(map(id, valid), reversed(names), strict=True))
        rows = {
            index: Row(
                kind=key,
                base=_sample(figure, medians),
                other=_sample(figure, figure.values),
                by_round=True,
            )
            for index, (figure, medians) in enumerate(
                zip(members, _medians_of_others(members), strict=True)
            )
            if figure.value is not None and medians
        }
        ratios = dict(zip(rows, verdicts.judge(list(rows.values())), strict=True))
        for index, figure in enumerate(members):
            other = others.get(id(figure), "")
            yield _judge_figure(figure, ratios.get(index), floor, other)


def _sample(figure: Figure, rates: Sequence[float]) -> Sample:
    """Return logarithms of times by launch, which is one for all devices of a host."""
    host = host_of(figure.where[0])
    return Sample(logs={f"{host} {n}": -math.log(rate) for n, rate in enumerate(rates)})


def _judge_figure(
    figure: Figure, ratio: Ratio | None, floor: float, other: str
) -> FigureVerdict:
    """Return the verdict on a figure. ratio: of its speed to the others', if there are any.

    other: the place of the only other, if there is one alone.
    """
    value = figure.value
    if value is None:
        return FigureVerdict(
            figure=figure, outcome=Outcome.CANNOT_TELL, reason="no finite rate"
        )
    limit = LEAST_SHARE.get(figure.name.split()[0])
    if limit and figure.peak and value < limit * figure.peak:
        reason = f"{value / figure.peak:.0%} of the peak; a working device has {limit:.0%}"
        return FigureVerdict(figure=figure, outcome=Outcome.FAILED, reason=reason)
    if ratio is None:
        reason = "too few others to compare with"
        return FigureVerdict(figure=figure, outcome=Outcome.CANNOT_TELL, reason=reason)
    low = ratio.low
    high = ratio.high
    if len(set(figure.values)) == 1:  # equal values prove nothing, whatever those of others
        low = high = None
    outcome, reason = _compared(figure, ratio.speed, (low, high), floor, other)
    if outcome is Outcome.HEALTHY and other and len(figure.where) == 2:
        share = value / figure.peak if figure.peak else None
        if share is None or share < LEAST_OF_PORT:
            known = f"{share:.0%} of the link's rate" if share else "the link's rate is unknown"
            reason = f"{known}, and two directions may both be slow"
            outcome = Outcome.CANNOT_TELL
    return FigureVerdict(
        figure=figure,
        outcome=outcome,
        reason=reason,
        other=other,
        speed=ratio.speed,
        low=low,
        high=high,
    )


def _compared(
    figure: Figure,
    speed: float,
    interval: tuple[float | None, float | None],
    floor: float,
    other: str,
) -> tuple[Outcome, str]:
    """Return the outcome by the speed over the others' and its interval, and the reason."""
    low, high = interval
    reference = other or "the others' median"
    if low is None or high is None:
        return Outcome.CANNOT_TELL, "equal values" if len(figure.values) > 1 else "one launch"
    if high < 1 - floor:
        return Outcome.SLOW, f"{speed:.3f} of {reference}"
    if low >= 1 - floor:
        return Outcome.HEALTHY, ""
    if is_too_wide(low, high):
        return Outcome.CANNOT_TELL, f"{TOO_FEW} ({len(figure.values)})"
    return Outcome.CANNOT_TELL, f"{low:.3f} to {high:.3f} of {reference}"


def is_too_wide(low: float, high: float) -> bool:
    """Return whether an interval of a ratio is too wide to say anything of it."""
    return high > _MOST_WIDTH * low


def _medians_of_others(figures: Sequence[Figure]) -> list[list[float]]:
    """Return for each of comparable figures the medians of the others, launch by launch.

    Those that share a place with it are left out, and a launch with too few others. Of two
    figures each is the other's, also where they are the directions of one link.
    """
    valid = [figure for figure in figures if figure.value is not None]
    min_others = 1 if len(valid) == 2 else MIN_OTHERS
    at: dict[str, list[int]] = {}
    for index, figure in enumerate(figures):
        for place in figure.where:
            at.setdefault(place, []).append(index)
    sharing = [
        {index for place in figure.where for index in at[place] if len(valid) > 2} | {number}
        for number, figure in enumerate(figures)
    ]
    medians: list[list[float]] = [[] for _ in figures]
    for launch in range(max(len(figure.values) for figure in figures)):
        ordered = sorted(
            (figure.values[launch], index)
            for index, figure in enumerate(figures)
            if figure.value is not None and len(figure.values) > launch
        )
        positions = {index: position for position, (_, index) in enumerate(ordered)}
        for figure, same_place, own in zip(figures, sharing, medians, strict=True):
            left_out = sorted(positions[index] for index in same_place if index in positions)
            count = len(ordered) - len(left_out)
            if count >= min_others and len(figure.values) > launch:
                middle = ((count - 1) // 2, count // 2)
                own.append(fmean(ordered[_shifted(rank, left_out)][0] for rank in middle))
    return medians


def _shifted(rank: int, left_out: Sequence[int]) -> int:
    """Return the position of the rank-th value once rising positions are left out."""
    places = range(len(left_out))
    return rank + bisect_right(places, rank, key=lambda place: left_out[place] - place)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Figures of pairs that are comparable, and the places that explain the slow ones.

    causes: by place the ends at which it is slow: 0 as source, 1 as destination.
    """

    members: Sequence[FigureVerdict]
    causes: Mapping[str, Collection[int]]

    @property
    def name(self) -> str:
        return self.members[0].figure.name

    def is_explained(self, verdict: FigureVerdict) -> bool:
        """Return whether an end of a pair is known to be slow."""
        places = verdict.figure.where
        return any(end in self.causes.get(place, ()) for end, place in enumerate(places))


def _all_pairs(figures: Iterable[FigureVerdict]) -> list[_Pairs]:
    """Return figures of pairs by what is comparable.

    A place is slow if all its pairs are, while pairs among others are not. Of the other pairs,
    those out of a place and those into it are judged by themselves.
    """
    groups = group_by(
        (verdict for verdict in figures if len(verdict.figure.where) == 2),
        lambda verdict: (verdict.figure.name, verdict.figure.unit, verdict.figure.device),
    )
    result = []
    for members in groups.values():
        if all(verdict.outcome in _BAD for verdict in members):
            result.append(_Pairs(members, {}))  # nothing tells them from the others
            continue
        is_slow: dict[str, bool] = {}
        for verdict in members:
            for place in verdict.figure.where:
                is_slow[place] = is_slow.get(place, True) and verdict.outcome in _BAD
        whole = {place: (0, 1) for place, slow in is_slow.items() if slow}
        rest = [v for v in members if not whole.keys() & set(v.figure.where)]
        result.append(_Pairs(members, {**_slow_ends(rest), **whole}))
    return result


def _slow_ends(pairs: Iterable[FigureVerdict]) -> dict[str, set[int]]:
    """Return the places all of whose pairs in one direction are slow, with that end.

    Two of these pairs at least have another end that is no such place: a single slow link, or
    a pair of two suspects, does not tell which end is the cause.
    """
    by_end: dict[tuple[str, int], list[FigureVerdict]] = {}
    for verdict in pairs:
        for end, place in enumerate(verdict.figure.where):
            by_end.setdefault((place, end), []).append(verdict)
    suspects = {key for key, own in by_end.items() if all(v.outcome in _BAD for v in own)}
    ends: dict[str, set[int]] = {}
    for place, end in suspects:
        opposite = 1 - end
        others = [verdict.figure.where[opposite] for verdict in by_end[place, end]]
        if sum((other, opposite) not in suspects for other in others) > 1:
            ends.setdefault(place, set()).add(end)
    return ends


def _of_pairs(pairs: _Pairs) -> Iterator[_Reason]:
    """Yield the reasons from figures of pairs.

    A slow pair of which neither end is known to be slow does not tell which is the cause.
    """
    by_place: dict[str, list[FigureVerdict]] = {}
    for verdict in pairs.members:
        for place in verdict.figure.where:
            by_place.setdefault(place, []).append(verdict)
    for place, own in by_place.items():
        ends = pairs.causes.get(place, ())
        if len(ends) == 2:
            text = f"{pairs.name}: all {len(own)} pairs are slow"
            yield _Reason(place, Outcome.SLOW, text)
            continue
        for end in ends:
            count = sum(verdict.figure.where[end] == place for verdict in own)
            text = f"{pairs.name}: all {count} pairs {_DIRECTIONS[end]} it are slow"
            yield _Reason(place, Outcome.SLOW, text)
        rest = [verdict for verdict in own if not pairs.is_explained(verdict)]
        if rest or not ends:
            yield _of_good_end(place, pairs.name, rest)


def _slow_links(pairs: Iterable[_Pairs]) -> Iterator[tuple[str, str]]:
    """Yield source and destination of slow pairs of two hosts that no slow host explains."""
    for group in pairs:
        for verdict in group.members:
            source, destination = map(host_of, verdict.figure.where)
            is_slow = verdict.outcome in _BAD and not group.is_explained(verdict)
            if is_slow and source != destination:
                yield source, destination


def _of_good_end(place: str, name: str, pairs: Sequence[FigureVerdict]) -> _Reason:
    """Return the reason from a place's pairs, without those of which the other end is slow."""
    if slow := ["-".join(v.figure.where) for v in pairs if v.outcome in _BAD]:
        text = f"{name}: slow; which end is the cause is not known: {', '.join(slow)}"
        return _Reason(place, Outcome.CANNOT_TELL, text)
    if any(verdict.outcome is Outcome.HEALTHY for verdict in pairs):
        return _Reason(place, Outcome.HEALTHY, "")
    reason = pairs[0].reason if pairs else "no pair"
    return _Reason(place, Outcome.CANNOT_TELL, f"{name}: {reason}")
