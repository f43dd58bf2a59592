"""Verdicts of a node check: each rate against the others' median and the data sheet.

docs/howto/check-nodes.md derives the rules.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from stepmark.ground import verdicts
from stepmark.ground.launches import Row, Sample
from stepmark.ground.ratio import Ratio
from stepmark.job_logs.nccl_log.network_rules import comma_list
from stepmark.nodes.node_check import Figure, NodeCheck, host_of

# Share of the data sheet's peak that a working device exceeds, by family. Sustained bf16
# products reach 68 to 71 % on the H200 and H100 of results/, a copy 89 to 90 %. The limit of
# products is lower because a power cap lowers their clock, on some devices to half the peak.
LEAST_SHARE = {"gemm": 0.4, "copy": 0.5}
# Share of a network port's rate below which two directions that agree may both be slow.
LEAST_OF_PORT = 0.5
MIN_OTHERS = 2  # of figures that are more than two
# An interval whose ends are farther apart says only that there were too few launches:
# Student's t of two launches is 64.
_MOST_WIDTH = 4.0
TOO_FEW = "too few launches"


class Outcome(StrEnum):
    """Outcome of a figure or node, from the mildest to the gravest."""

    HEALTHY = "healthy"
    CANNOT_TELL = "cannot tell"
    SLOW = "slow"
    FAILED = "failed"


_BAD = (Outcome.SLOW, Outcome.FAILED)


def gravest(outcomes: Iterable[Outcome]) -> Outcome:
    return max(outcomes, key=list(Outcome).index, default=Outcome.CANNOT_TELL)


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

    differences: properties that are not equal on all of them. unknown: what two alone cannot
    tell.
    """

    nodes: tuple[NodeVerdict, ...]
    figures: tuple[FigureVerdict, ...]
    differences: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

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
    figures = tuple(judge_figures([f for check in checks for f in check.figures], floor))
    counts = {check.host: check.num_devices for check in checks}
    reasons: dict[str, list[_Reason]] = {host: [] for host in (*counts, *expected)}
    for host in reasons.keys() - counts.keys():
        text = "no result of this expected host"
        reasons[host].append(_Reason(host, Outcome.FAILED, text))
    for check in checks:
        reasons[check.host] += _reasons_of(check, gpus_per_node)
    of_places = [
        _Reason(v.figure.where[0], v.outcome, f"{v.figure.name}: {v.reason}")
        for v in figures
        if len(v.figure.where) == 1
    ]
    for reason in (*of_places, *_of_pairs(figures)):
        reasons[host_of(reason.place)].append(reason)
    return FleetVerdict(
        nodes=tuple(
            NodeVerdict(
                host=host,
                outcome=gravest(reason.outcome for reason in reasons[host]),
                num_devices=counts.get(host, 0),
                reasons=_texts(reasons[host]),
            )
            for host in sorted(reasons)
        ),
        figures=figures,
        differences=tuple(_differences(checks)),
        unknown=tuple(_unknown(figures)),
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
    limits = {
        "; below the limit of the data sheet they are not": [
            f.name for f in alone if len(f.where) == 1 and f.peak
        ],
        "": [f.name for f in alone if len(f.where) == 1 and not f.peak],
    }
    for limit, names in limits.items():
        if names:
            text = "whether both are slow, since two are compared with each other alone"
            yield f"{', '.join(dict.fromkeys(names))}: {text}{limit}"
    if names := [figure.name for figure in alone if len(figure.where) == 2]:
        text = "which end is slow, since a slow end slows both directions"
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
    if gpus_per_node is not None and check.num_devices != gpus_per_node:
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
    reference = other or "the others' median"
    low = ratio.low
    high = ratio.high
    if len(set(figure.values)) == 1:  # equal values prove nothing, whatever those of others
        low = high = None
    if low is None or high is None:
        reason = "equal values" if len(figure.values) > 1 else "one launch"
        outcome = Outcome.CANNOT_TELL
    elif high < 1 - floor:
        reason = f"{ratio.speed:.3f} of {reference}"
        outcome = Outcome.SLOW
    elif low >= 1 - floor:
        reason = ""
        outcome = Outcome.HEALTHY
    elif is_too_wide(low, high):
        reason = f"{TOO_FEW} ({len(figure.values)})"
        outcome = Outcome.CANNOT_TELL
    else:
        reason = f"{low:.3f} to {high:.3f} of {reference}"
        outcome = Outcome.CANNOT_TELL
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


def _of_pairs(figures: Iterable[FigureVerdict]) -> Iterator[_Reason]:
    """Yield the reasons from figures of pairs.

    A place is slow if all its pairs are, while pairs among others are not. A slow pair of two
    other places does not tell which of them is the cause.
    """
    groups: dict[tuple[str, str, str], list[FigureVerdict]] = {}
    for verdict in figures:
        if len(verdict.figure.where) == 2:
            figure = verdict.figure
            groups.setdefault((figure.name, figure.unit, figure.device), []).append(verdict)
    for (name, _, _), members in groups.items():
        pairs: dict[str, list[FigureVerdict]] = {}
        for verdict in members:
            for place in verdict.figure.where:
                pairs.setdefault(place, []).append(verdict)
        suspects = {
            place for place, own in pairs.items() if all(v.outcome in _BAD for v in own)
        }
        if all(verdict.outcome in _BAD for verdict in members):
            suspects = set()  # nothing tells them from the others
        for place, own in pairs.items():
            if place in suspects:
                text = f"{name}: all {len(own)} pairs are slow"
                yield _Reason(place, Outcome.SLOW, text)
            else:
                yield _of_good_end(
                    place, name, [v for v in own if not suspects & set(v.figure.where)]
                )


def _of_good_end(place: str, name: str, pairs: Sequence[FigureVerdict]) -> _Reason:
    """Return the reason from a place's pairs, without those of which the other end is slow."""
    if slow := ["-".join(v.figure.where) for v in pairs if v.outcome in _BAD]:
        text = f"{name}: slow; which end is the cause is not known: {', '.join(slow)}"
        return _Reason(place, Outcome.CANNOT_TELL, text)
    if any(verdict.outcome is Outcome.HEALTHY for verdict in pairs):
        return _Reason(place, Outcome.HEALTHY, "")
    reason = pairs[0].reason if pairs else "no pair"
    return _Reason(place, Outcome.CANNOT_TELL, f"{name}: {reason}")
