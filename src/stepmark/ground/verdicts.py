"""Verdicts on the rows of a table: ratios of speeds with intervals, judged together.

The launch is the statistical unit. docs/definitions.md derives the rules, and
validation/verdicts.py measures how often they are wrong.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, variance

from stepmark.ground.launches import Order, Row, past_runs, squares_within
from stepmark.ground.ratio import (
    CONFIDENCE,
    EFFECT_FLOOR,
    OF_REPEATS,
    Ratio,
    Verdict,
    interval,
    is_negligible,
    t_cdf,
    t_quantile,
)
from stepmark.ground.spread import Part, Spread, spread_of
from stepmark.ground.variance import MIN_ROWS, Prior, Variance, total

# Expected share of wrong verdicts among those of a table (Benjamini and Hochberg, JRSS B 57,
# 1995), as if it had one more row: 0.4 % for a single one.
FALSE_SHARE = 0.008
# If the whole table has moved, few rows have not (Storey, JRSS B 64, 2002). Never fewer
# than this share: rows of a launch move together.
_LEAST_UNMOVED = 0.25
_KNOWN_DF = 1e9  # of a variance that is known
# Two blocks, one measured after the other, differ by this much although nothing was changed
# (1 sd). Runs of one machine differ by 0.2 to 1.5 % where the device bounds them
# (collectives in graphs or from 1 MiB on, products; runs of results/, docs/diary).
_DRIFT = Variance(0.01**2, _KNOWN_DF)
_MIN_RUNS = 3  # of history, from which it is known how blocks differ
_MIN_SPREAD = 8  # rows of one launch a side, whose ratios show how much launches differ
# Variance of a single launch over that of history: it may be an outlier.
_SINGLE = 3.0
_MOST_LAUNCHES = 1000
# A launch in five may be slow in all rows. Two of one side are and none of the other with 5 %:
# what all rows of so few launches share is then no change. Of three it is 0.8 %.
_SLOW = 0.2
_MOST_BY_CHANCE = 0.01
_SLOWEST = 0.1  # as much slower than others a slow launch is at most
# Launches of a row are in two states if they are this far apart, in standard deviations within
# them as Student's t. Of rows without states _GAP_CHANCE look so (validation/verdicts.py).
_P_GAP = 0.99975
_GAP_CHANCE = 0.008
# Rows expected to have one side in one state and one in the other, from which on a row that
# differs alone, and not by far more than states do, may be such.
_MOST_SPLIT = 0.05
_P_INTERVAL = 0.5 + CONFIDENCE / 2
_P_ROW = 1 - FALSE_SHARE / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """The logarithm of a row's speed, and its error.

    launch: variance of one launch. error: of the difference. drift: its part that more
    launches do not lower. common: what all rows of its launches share; None if unknown. gap:
    between the two states in which launches are, if they are; num_rare: launches in the rarer
    one. doubt: why there is no verdict, however certain the difference is. repeats_df: degrees
    of freedom that repeats on other machines give. slow: as much as slow launches of so few may
    explain.
    """

    row: Row
    log_speed: float
    launch: Variance
    error: Variance
    drift: float = 0.0
    common: Variance | None = None
    gap: float = 0.0
    num_rare: int = 0
    doubt: str = ""
    repeats_df: int = 0
    slow: float = 0.0

    @property
    def p(self) -> float:
        t = max(0.0, abs(self.log_speed) - self.slow) / math.sqrt(self.error.value)
        return 2 * (1 - t_cdf(t, max(1, math.floor(self.error.df))))


SAME_LAUNCHES = Ratio(
    speed=1.0,
    low=1.0,
    high=1.0,
    verdict=Verdict.SAME,
    reason="the same launches",
    se_log=0.0,
)


def judge(rows: Sequence[Row]) -> list[Ratio]:
    """Return the ratio of speeds of each row with its verdict, judged as one table.

    speed: other over base. Faster and slower: the change is at least EFFECT_FLOOR, and at most
    FALSE_SHARE of such verdicts are wrong. Same: the 99 % interval lies within it.
    """
    differences = _differences([row for row in rows if not row.is_same])
    certain = _certain(differences)
    doubted = _doubted(differences, certain)
    by_row = {id(difference.row): difference for difference in doubted}
    return [
        SAME_LAUNCHES
        if row.is_same
        else _judge_row(row, by_row.get(id(row)), id(row) in certain)
        for row in rows
    ]


def _differences(rows: Sequence[Row]) -> list[_Difference]:
    """Return the differences of rows whose error is known, kind by kind."""
    by_kind: dict[tuple[Hashable, bool], list[Row]] = {}
    for row in rows:
        if row.stated is not None or row.of_repeats is not None:
            continue
        by_kind.setdefault((row.kind, row.order is Order.PAIRED), []).append(row)
    differences = [_by_stated_noise(row, row.stated) for row in rows if row.stated is not None]
    differences += [_by_repeats(row, row.of_repeats) for row in rows if row.of_repeats]
    for (_, is_paired), group in by_kind.items():
        differences += _paired(group) if is_paired else _unpaired(group)
    return differences


def _by_stated_noise(row: Row, noise: float) -> _Difference:
    launch = Variance(noise**2, _KNOWN_DF)
    rounding = (row.base.rounding**2 + row.other.rounding**2) / 12
    error = launch.scaled(1 / len(row.base.logs) + 1 / len(row.other.logs))
    return _Difference(
        row=row,
        log_speed=row.base.mean - row.other.mean,
        launch=launch,
        error=error.plus(rounding),
    )


def _by_repeats(row: Row, launch: Variance) -> _Difference:
    """Return the difference by the noise of other machines.

    Their repeats were measured one right after the other; two tables may be days apart.
    """
    rounding = (row.base.rounding**2 + row.other.rounding**2) / 12
    return _Difference(
        row=row,
        log_speed=row.base.mean - row.other.mean,
        launch=launch,
        error=total([launch.scaled(2).plus(rounding), _DRIFT]),
        drift=_DRIFT.value,
    )


def _paired(rows: Sequence[Row]) -> Iterable[_Difference]:
    """Yield differences by round: what a round has in common cancels.

    Where rows and rounds are too few to show how launches vary, repeats on other machines are
    the prior of their variance; of a single round they are all that is known. They say little
    of launches that are slow in all rows.
    """
    by_round = [
        {launch: log - row.other.logs[launch] for launch, log in row.base.logs.items()}
        for row in rows
    ]
    spread = spread_of([[Part(runs=[logs])] for logs in by_round])
    shift = median(fmean(logs.values()) for logs in by_round)
    for place, (row, logs) in enumerate(zip(rows, by_round, strict=True)):
        squares, df = squares_within([logs])
        rounding = (row.base.rounding**2 + row.other.rounding**2) / 12
        if df and squares == 0 and rounding == 0:
            continue  # equal values prove nothing
        repeats = row.repeats if spread is None or spread.seen_df is None else None
        if spread is None and repeats is None:
            continue
        # Of one launch, as for unpaired rows: a difference has the variance of two.
        own = spread.own[place].scaled(0.5) if spread else Variance(0.0, 0)
        common = spread.common.scaled(0.5) if spread else Variance(0.0, 1)
        if repeats:
            own = Prior(
                variance=repeats.value, df=repeats.df, seen_df=repeats.df + df
            ).moderated(Variance(own.value, df))
        launch = total([own.plus(rounding / 2).widened(_P_ROW), common])
        yield _Difference(
            row=row,
            log_speed=fmean(logs.values()),
            launch=launch,
            error=launch.scaled(2 / len(logs)),
            common=None if repeats else common.scaled(2 / len(logs)),
            repeats_df=math.floor(repeats.df) if repeats else 0,
            slow=min(abs(shift), _SLOWEST) if repeats and _is_by_chance(row) else 0.0,
        )


def _unpaired(rows: Sequence[Row]) -> Iterable[_Difference]:
    shift = median(row.base.mean - row.other.mean for row in rows)
    states = [max(_states(row, 0.0), _states(row, shift)) for row in rows]
    differences = []
    for row, (gap, num_rare) in zip(rows, states, strict=True):
        if gap:  # alone: the variance of the others is not theirs
            differences += [
                replace(d, gap=gap, num_rare=num_rare, doubt="two states")
                for d in _alike([row])
            ]
    others = [row for row, (gap, _) in zip(rows, states, strict=True) if not gap]
    return [*differences, *_alike(others)]


def _states(row: Row, shift: float) -> tuple[float, int]:
    """Return how far apart the two states of launches are, and how many are in the rarer one.

    Both are 0 where no states are seen. shift: of the sides, which is no state. From eight
    launches on, their number in each state is judged as any other variation.
    """
    base = sorted(row.base.logs.values())
    logs = sorted([*base, *(log + shift for log in row.other.logs.values())])
    if len(logs) < 4 or _split_by_chance(len(base), len(row.other.logs)) < FALSE_SHARE:
        return 0.0, 0
    gap, low = max((after - before, before) for before, after in pairwise(logs))
    states = [[log for log in logs if log <= low], [log for log in logs if log > low]]
    if base in states:
        return 0.0, 0  # the sides differ
    squares, df = squares_within({str(n): x for n, x in enumerate(s)} for s in states)
    rounding = max(row.base.rounding, row.other.rounding)
    spread = math.sqrt(squares / df + rounding**2 / 12)
    if gap <= t_quantile(_P_GAP, df) * spread:
        return 0.0, 0
    return gap, min(map(len, states))


def _split_by_chance(base: int, other: int, rare: float = 0.5) -> float:
    """Return how often sides of so many launches are in one of two states each.

    rare: share of launches in one of them.
    """
    return rare**base * (1 - rare) ** other + (1 - rare) ** base * rare**other


def _alike(rows: Sequence[Row]) -> Sequence[_Difference]:
    """Return the differences of rows of a kind without states."""
    spread = spread_of([_parts(row) for row in rows])
    if spread is None:
        return []
    variances = {id(row): spread.of_launch(n).value for n, row in enumerate(rows)}
    differences = [
        difference
        for place, row in enumerate(rows)
        if (difference := _unpaired_row(row, spread, place)) is not None
    ]
    drifting = [d.row for d in differences if d.row.order is Order.BLOCKS]
    drift = _drift_of(drifting, variances)
    return [
        replace(d, error=total([d.error, drift]), drift=drift.value)
        if d.row.order is Order.BLOCKS
        else d
        for d in _widened_by_shift(_widened_by_spread(differences))
    ]


def _parts(row: Row) -> list[Part]:
    """Return the runs of both sides; those of the same past vary alike."""
    base, other = row.base, row.other
    if base.past and base.past == other.past:
        return [Part(runs=[base.logs, other.logs, *past_runs(base.past)])]
    return [
        Part(runs=[side.logs, *past_runs(side.past)], weight=1 / len(side.logs))
        for side in (base, other)
    ]


def _unpaired_row(row: Row, spread: Spread, place: int) -> _Difference | None:
    """Return the difference without drift; None where nothing is known of its variance."""
    sides = (row.base, row.other)
    counts = math.fsum(1 / len(side.logs) for side in sides)
    # A rounded value is uniform within its last digit.
    rounding = math.fsum(side.rounding**2 / 12 / len(side.logs) for side in sides)
    own = spread.own[place].plus(rounding / counts)
    squares, df = squares_within([row.base.logs, row.other.logs])
    if own.value + spread.common.value == 0 or (df and squares == 0 and not rounding):
        return None  # equal values prove nothing
    if min(len(side.logs) for side in sides) == 1:
        own = own.scaled(_SINGLE)
    launch = total([own.widened(_P_ROW, spread.seen_df), spread.common])
    return _Difference(
        row=row,
        log_speed=row.base.mean - row.other.mean,
        launch=launch,
        error=launch.scaled(counts),
        common=spread.common.scaled(counts),
    )


def _widened_by_shift(differences: Sequence[_Difference]) -> Sequence[_Difference]:
    """Widen the errors of so few launches that all rows may differ by their states alone.

    What history shows of launches decides where there is some.
    """
    log_speeds = [d.log_speed for d in differences if _is_by_chance(d.row)]
    if len(log_speeds) < MIN_ROWS:
        return differences
    shift = _shift_by_chance(median(log_speeds))
    return [
        replace(d, error=total([d.error, shift])) if _is_by_chance(d.row) else d
        for d in differences
    ]


def _shift_by_chance(log_speed: float) -> Variance:
    """Return the variance of states of launches that differ by as much as all rows do."""
    return Variance(min(abs(log_speed), _SLOWEST) ** 2, _KNOWN_DF)


def _is_by_chance(row: Row) -> bool:
    """Whether all launches of one side, and none of the other, may be slow."""
    if row.base.past or row.other.past:
        return False
    by_chance = _split_by_chance(len(row.base.logs), len(row.other.logs), _SLOW)
    return by_chance > _MOST_BY_CHANCE


def _widened_by_spread(differences: Sequence[_Difference]) -> Sequence[_Difference]:
    """Give rows with one launch a side the variance that the ratios of a table show.

    Else theirs is that of the past, of which a single launch may be an outlier. The median
    absolute deviation from the table's own median ignores rows that moved; it is widened by its
    own error.
    """
    single = [d for d in differences if len(d.row.base.logs) == len(d.row.other.logs) == 1]
    if len(single) < _MIN_SPREAD:
        return differences
    middle = median(d.log_speed for d in single)
    spread = 1.4826 * median(
        abs(d.log_speed - middle) / math.sqrt(_own_error(d).value) for d in single
    )
    factor = max(1 / _SINGLE, (spread * (1 + 1 / math.sqrt(len(single)))) ** 2)
    widened = {}
    for d in single:
        own = _own_error(d).scaled(factor)
        own = Variance(own.value, min(own.df, len(single) / 2))
        error = total([own, d.common]) if d.common else own
        widened[id(d)] = replace(d, error=error, launch=error.scaled(1 / 2))
    return [widened.get(id(d), d) for d in differences]


def _own_error(difference: _Difference) -> Variance:
    """Return the error without what all rows of a launch share."""
    common = difference.common.value if difference.common else 0.0
    return Variance(difference.error.value - common, difference.error.df)


def _drift_of(rows: Sequence[Row], launch: Mapping[int, float]) -> Variance:
    """Return the variance of the difference of two blocks: of history, else the default.

    launch: variance of a launch by the id of the row.
    """
    excess = []
    num_runs = []
    pasts = [(id(row), side.past) for row in rows for side in (row.base, row.other)]
    for key, past in pasts:
        if len(past) >= _MIN_RUNS:
            per_run = fmean(1 / len(run) for run in past)
            between = variance([fmean(run.values()) for run in past])
            excess.append(max(0.0, between - launch[key] * per_run))
            num_runs.append(len(past))
    return Variance(2 * fmean(excess), min(num_runs) - 1) if excess else _DRIFT


def _certain(differences: Sequence[_Difference]) -> set[int]:
    """Return ids of rows that differ, by the share of wrong verdicts in the table.

    Where the table has moved, most rows are expected to differ as it does. That many of them do
    says nothing of those that differ against it.
    """
    share = FALSE_SHARE * len(differences) / (len(differences) + 1)
    moved = _table_moved(differences)
    if not moved:
        return _least_p(differences, share)
    with_it = [d for d in differences if d.log_speed * moved > 0]
    against = [d for d in differences if d.log_speed * moved <= 0]
    unmoved = 2 * (sum(d.p > 0.5 for d in differences) + 1) / len(differences)
    relaxed = share / min(1.0, max(_LEAST_UNMOVED, unmoved))
    return _least_p(with_it, relaxed) | _least_p(against, share)


def _least_p(differences: Sequence[_Difference], share: float) -> set[int]:
    """Return ids of rows that differ if this share of them may be wrong."""
    ordered = sorted(differences, key=lambda difference: difference.p)
    count = len(ordered)
    last = max(
        (place for place, d in enumerate(ordered, 1) if d.p <= share * place / count), default=0
    )
    return {id(difference.row) for difference in ordered[:last]}


def _doubted(differences: Sequence[_Difference], certain: set[int]) -> Sequence[_Difference]:
    """Name rows that differ alone, as those do whose sides happen to be in different states."""
    split = [d for d in differences if d.gap]
    gaps = [d.gap for d in split]
    others = [d for d in differences if not d.gap]
    num_states = len(gaps) - _GAP_CHANCE * len(differences)
    if not gaps or not others:
        return differences
    middle = median(d.log_speed for d in others)
    num_launches = sum(len(d.row.base.logs) + len(d.row.other.logs) for d in split)
    # By the rule of succession: launches that were seen in the rarer state, and one more.
    rare = (1 + sum(d.num_rare for d in split)) / (2 + num_launches)

    def is_doubted(d: _Difference) -> bool:
        by_chance = _split_by_chance(len(d.row.base.logs), len(d.row.other.logs), rare)
        return (
            id(d.row) in certain
            and num_states * by_chance / (1 - by_chance) > _MOST_SPLIT
            and abs(d.log_speed - middle) >= median(gaps) / 2
            and abs(d.log_speed) <= 2 * max(gaps)  # which states may explain
        )

    doubt = f"two states, as {len(gaps)} other rows"
    return [replace(d, doubt=doubt) if not d.gap and is_doubted(d) else d for d in differences]


def _table_moved(differences: Sequence[_Difference]) -> float:
    """Return the weighted mean of rows if launches alone do not explain it, else 0."""
    like = [d for d in differences if not d.gap]
    if len(like) < 2 or any(d.common is None or d.drift for d in like):
        return 0.0
    weights = [1 / d.error.value for d in like]
    mean = fmean([d.log_speed for d in like], weights)
    common = [d.common for d in like if d.common]
    sd = fmean([math.sqrt(part.value) for part in common], weights)
    error = Variance(sd**2, min(part.df for part in common))
    return mean if abs(mean) > error.quantile(_P_ROW) else 0.0


def _mean_of(rows: Sequence[Row]) -> _Difference | None:
    """Return the mean of rows, each launch giving one value; None if launches differ."""
    sides = []
    for samples in ([row.base for row in rows], [row.other for row in rows]):
        names = samples[0].logs.keys()
        if len(names) < 2 or any(sample.logs.keys() != names for sample in samples):
            return None
        logs = {name: fmean(sample.logs[name] for sample in samples) for name in names}
        sides.append(replace(samples[0], logs=logs))
    base, other = sides
    row = Row(kind="mean", base=base, other=other, by_round=rows[0].by_round)
    counts = 1 / len(base.logs) + 1 / len(other.logs)
    if row.order is Order.PAIRED:
        gains = [log - other.logs[name] for name, log in base.logs.items()]
        error = Variance(variance(gains) / len(gains), len(gains) - 1)
    else:
        error = total(
            [
                Variance(variance(side.logs.values()) / len(side.logs), len(side.logs) - 1)
                for side in sides
            ]
        )
    return _Difference(
        row=row,
        log_speed=base.mean - other.mean,
        launch=error.scaled(1 / counts),
        error=error,
    )


def judge_mean(rows: Sequence[Row]) -> Ratio | None:
    """Return the geometric mean of the ratios of rows; None if nothing is known of its error.

    Each launch gives one mean, so rows that drift together count once. Rows that share no
    launches, have one, or rest on repeats, are assumed to move together.
    """
    if all(row.is_same for row in rows):
        return SAME_LAUNCHES
    mean = _mean_of(rows) if len(rows) > 1 else None
    if mean is None or any(difference.repeats_df for difference in _differences(rows)):
        return _mean_of_ratios(rows)
    if mean.error.value == 0:
        return None
    counts = mean.error.value / mean.launch.value
    spread = spread_of([_parts(row) for row in rows])
    assert spread is not None
    of_launch = [spread.of_launch(place) for place in range(len(rows))]
    launch = mean.launch
    if spread.seen_df:
        seen = Variance(fmean(own.value for own in spread.own), spread.seen_df)
        launch = launch.widened(_P_ROW, total([seen, spread.common]).df)
    else:
        launch = launch.widened(_P_ROW)
    mean = replace(mean, launch=launch, error=launch.scaled(counts))
    if _is_by_chance(mean.row):
        shift = _shift_by_chance(mean.log_speed)
        mean = replace(mean, error=total([mean.error, shift]))
    if mean.row.order is Order.BLOCKS:
        by_row = {id(row): own.value for row, own in zip(rows, of_launch, strict=True)}
        drift = _drift_of(rows, by_row)
        mean = replace(mean, error=total([mean.error, drift]), drift=drift.value)
    return _judge_row(mean.row, mean, bool(_certain([mean])))


def _mean_of_ratios(rows: Sequence[Row]) -> Ratio | None:
    differences = _differences([row for row in rows if not row.is_same])
    if len(differences) < len(rows):
        return None
    launch, error = (
        Variance(fmean(math.sqrt(part.value) for part in parts) ** 2, min(p.df for p in parts))
        for parts in ([d.launch for d in differences], [d.error for d in differences])
    )
    mean = _Difference(
        row=rows[0],
        log_speed=fmean(d.log_speed for d in differences),
        launch=launch,
        error=error,
        drift=fmean(d.drift for d in differences),
        repeats_df=min(d.repeats_df for d in differences),
        slow=max(d.slow for d in differences),
    )
    return _judge_row(rows[0], mean, bool(_certain([mean])))


def _judge_row(row: Row, difference: _Difference | None, is_certain: bool) -> Ratio:
    if difference is None:
        counts = len(row.base.logs), len(row.other.logs)
        return Ratio(
            speed=math.exp(row.base.mean - row.other.mean),
            low=None,
            high=None,
            verdict=Verdict.CANNOT_TELL,
            reason="one launch" if max(counts) == 1 else "identical values",
        )
    half = difference.error.quantile(_P_INTERVAL) + difference.slow
    low, speed, high = interval(difference.log_speed, half)
    verdict = Verdict.CANNOT_TELL
    if is_certain and not difference.doubt and max(speed, 1 / speed) >= 1 + EFFECT_FLOOR:
        verdict = Verdict.FASTER if speed > 1 else Verdict.SLOWER
    elif is_negligible(low, high):
        verdict = Verdict.SAME
    launches = None
    reason = f"{len(row.base.logs)} and {len(row.other.logs)} launches"
    reason = reason if row.stated is None else f"noise {row.stated:.2%} as stated"
    if verdict is Verdict.CANNOT_TELL:
        launches = _launches_that_tell(difference)
        reason = "within drift" if difference.drift else "within noise"
        reason = f"needs {launches} launches a side" if launches else reason
        reason = difference.doubt or reason
    if row.of_repeats or (difference.repeats_df and verdict is not Verdict.CANNOT_TELL):
        reason = f"noise {math.sqrt(difference.launch.value):.1%} {OF_REPEATS}"
    return Ratio(
        speed=speed,
        low=low,
        high=high,
        verdict=verdict,
        reason=reason,
        se_log=math.sqrt(difference.error.value),
        df=max(1, math.floor(difference.error.df)),
        launches=launches,
        drift=difference.drift,
        repeats_df=difference.repeats_df,
        slow=difference.slow,
    )


def equal_ratio(launch_sd: float, *, base: int, now: int) -> Ratio:
    """Return the ratio that equal sides would have, of which the first was measured before.

    launch_sd: of a launch, relative, which these launches alone show. base, now: their numbers.
    Rows move together, so that more of them show no more.
    """
    single = _SINGLE if min(base, now) == 1 else 1.0
    launch = Variance(launch_sd**2 * single, max(1, base + now - 2)).widened(_P_ROW)
    error = total([launch.scaled(1 / base + 1 / now), _DRIFT])
    return Ratio(
        speed=1.0,
        low=None,
        high=None,
        verdict=Verdict.CANNOT_TELL,
        reason="not measured",
        se_log=math.sqrt(error.value),
        df=max(1, math.floor(error.df)),
        drift=_DRIFT.value,
    )


def _launches_that_tell(difference: _Difference) -> int | None:
    """Return how many launches a side would give a verdict, if they vary as those of now.

    None if drift alone is too large, or if _MOST_LAUNCHES would not do.
    """
    change = abs(difference.log_speed)
    limit = math.log1p(EFFECT_FLOOR)
    own = min(len(difference.row.base.logs), len(difference.row.other.logs))

    def tells(count: int) -> bool:
        df = difference.launch.df + 2 * (count - own)
        launches = Variance(2 * difference.launch.value / count, df)
        error = total([launches, Variance(difference.drift, _DRIFT.df)])
        is_by_chance = _split_by_chance(count, count, _SLOW) > _MOST_BY_CHANCE
        slow = difference.slow if is_by_chance else 0.0
        is_certain = change >= limit and error.quantile(_P_ROW) + slow < change
        return is_certain or error.quantile(_P_INTERVAL) + slow < limit - change

    if not tells(_MOST_LAUNCHES):
        return None
    return bisect_left(range(_MOST_LAUNCHES), True, lo=own + 1, key=tells)
