"""Verdicts on the rows of a table: ratios of speeds with intervals, judged together.

The launch is the statistical unit. docs/definitions.md derives the rules, and
validation/verdicts.py measures how often they are wrong.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean, median, variance

from stepmark.ground.launches import (
    Order,
    Row,
    launch_groups,
    past_runs,
    squares_within,
)
from stepmark.ground.ratio import (
    CONFIDENCE,
    EFFECT_FLOOR,
    Ratio,
    Verdict,
    interval,
    is_negligible,
    t_cdf,
)
from stepmark.ground.variance import Pool, Variance, pool_of, total

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
_P_INTERVAL = 0.5 + CONFIDENCE / 2
_P_ROW = 1 - FALSE_SHARE / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """The logarithm of a row's speed, and its error.

    launch: variance of one launch. error: of the difference. drift: its part that more
    launches do not lower.
    """

    row: Row
    log_speed: float
    launch: Variance
    error: Variance
    drift: float = 0.0

    @property
    def p(self) -> float:
        t = abs(self.log_speed) / math.sqrt(self.error.value)
        return 2 * (1 - t_cdf(t, max(1, math.floor(self.error.df))))


def judge(rows: Sequence[Row], *, floor: float = EFFECT_FLOOR) -> list[Ratio]:
    """Return the ratio of speeds of each row with its verdict, judged as one table.

    speed: other over base. Faster and slower: the change is at least the floor, and at most
    FALSE_SHARE of such verdicts are wrong. Same: the 99 % interval lies within the floor.
    """
    differences = {id(difference.row): difference for difference in _differences(rows)}
    certain = _certain(list(differences.values()))
    return [
        _judge_row(row, differences.get(id(row)), id(row) in certain, floor) for row in rows
    ]


def _differences(rows: Sequence[Row]) -> list[_Difference]:
    """Return the differences of rows whose error is known, kind by kind."""
    by_kind: dict[tuple[Hashable, bool], list[Row]] = {}
    for row in (row for row in rows if row.stated is None):
        by_kind.setdefault((row.kind, row.order is Order.PAIRED), []).append(row)
    differences = [_by_stated_noise(row, row.stated) for row in rows if row.stated is not None]
    for (_, is_paired), group in by_kind.items():
        differences += _paired(group) if is_paired else _unpaired(group)
    return differences


def _by_stated_noise(row: Row, noise: float) -> _Difference:
    launch = Variance(noise**2, _KNOWN_DF)
    return _Difference(
        row=row,
        log_speed=row.base.mean - row.other.mean,
        launch=launch,
        error=launch.scaled(1 / len(row.base.logs) + 1 / len(row.other.logs)),
    )


def _paired(rows: Sequence[Row]) -> Iterable[_Difference]:
    """Yield differences by round: what a round has in common cancels."""
    by_round = [
        {launch: log - row.other.logs[launch] for launch, log in row.base.logs.items()}
        for row in rows
    ]
    pool = pool_of(launch_groups(by_round))
    for row, logs in zip(rows, by_round, strict=True):
        squares, df = squares_within([logs])
        rounding = (row.base.rounding**2 + row.other.rounding**2) / 12
        if pool is None or (squares == 0 and rounding == 0):
            continue
        pair = pool.moderated(squares, df).plus(rounding)
        launch = pair.scaled(0.5).widened(_P_ROW)  # of one launch, as for unpaired rows
        yield _Difference(
            row=row,
            log_speed=fmean(logs.values()),
            launch=launch,
            error=launch.scaled(2 / len(logs)),
        )


def _unpaired(rows: Sequence[Row]) -> Iterable[_Difference]:
    base = [row.base for row in rows]
    other = [row.other for row in rows]
    groups = [group for side in (base, other) for group in launch_groups(s.logs for s in side)]
    # Sides with the same past have it once.
    for side in (base, [b for a, b in zip(base, other, strict=True) if a.past != b.past]):
        runs = [past_runs(sample.past) for sample in side]
        for of_run in zip_longest(*runs):
            groups += launch_groups(run for run in of_run if run)
    pool = pool_of(groups)
    if pool is None:
        return
    differences = [d for row in rows if (d := _unpaired_row(row, pool)) is not None]
    drifting = [d for d in differences if d.row.order is Order.BLOCKS]
    drift = _drift_of([d.row for d in drifting], pool) if drifting else _DRIFT
    for difference in _widened_by_spread(differences):
        apart = difference.row.order is Order.BLOCKS
        error = total([difference.error, drift]) if apart else difference.error
        yield replace(difference, error=error, drift=drift.value if apart else 0.0)


def _unpaired_row(row: Row, pool: Pool) -> _Difference | None:
    """Return the difference without drift; None where nothing is known of its variance."""
    parts = []
    for sample in (row.base, row.other):
        squares, df = squares_within([sample.logs, *past_runs(sample.past)])
        # A rounded value is uniform within its last digit.
        launch = pool.moderated(squares, df).plus(sample.rounding**2 / 12)
        parts.append(launch.scaled(1 / len(sample.logs)))
    error = total(parts)
    counts = 1 / len(row.base.logs) + 1 / len(row.other.logs)
    own, own_df = squares_within([row.base.logs, row.other.logs])
    is_rounded = row.base.rounding or row.other.rounding
    if error.value == 0 or (own_df and own == 0 and not is_rounded):
        return None  # equal values prove nothing
    factor = 1.0 if min(len(row.base.logs), len(row.other.logs)) > 1 else _SINGLE
    error = Variance(error.value * factor, min(error.df, pool.most_df))
    launch = error.scaled(1 / counts)
    # States that a process takes for all of its life do not lie between its steps.
    launch = launch if row.by_step else launch.widened(_P_ROW)
    return _Difference(
        row=row,
        log_speed=row.base.mean - row.other.mean,
        launch=launch,
        error=launch.scaled(counts),
    )


def _widened_by_spread(differences: Sequence[_Difference]) -> Sequence[_Difference]:
    """Widen the errors of rows with one launch a side, if the ratios of a table show more.

    Their variance is that of the past alone. The median absolute deviation from the table's
    own median ignores rows that moved; it is widened by its own error.
    """
    single = [d for d in differences if len(d.row.base.logs) == len(d.row.other.logs) == 1]
    if len(single) < _MIN_SPREAD:
        return differences
    middle = median(d.log_speed for d in single)
    spread = 1.4826 * median(
        abs(d.log_speed - middle) / math.sqrt(d.error.value) for d in single
    )
    factor = max(1.0, spread * (1 + 2 / math.sqrt(len(single)))) ** 2
    if factor == 1:
        return differences
    df = len(single) / 2
    return [
        replace(
            d,
            launch=Variance(d.launch.value * factor, min(d.launch.df, df)),
            error=Variance(d.error.value * factor, min(d.error.df, df)),
        )
        if len(d.row.base.logs) == len(d.row.other.logs) == 1
        else d
        for d in differences
    ]


def _drift_of(rows: Sequence[Row], pool: Pool) -> Variance:
    """Return the variance of the difference of two blocks: of history, else the default."""
    excess = []
    num_runs = []
    for past in (sample.past for row in rows for sample in (row.base, row.other)):
        if len(past) >= _MIN_RUNS:
            per_run = fmean(1 / len(run) for run in past)
            between = variance([fmean(run.values()) for run in past])
            excess.append(max(0.0, between - pool.variance * per_run))
            num_runs.append(len(past))
    return Variance(2 * fmean(excess), min(num_runs) - 1) if excess else _DRIFT


def _certain(differences: Sequence[_Difference]) -> set[int]:
    """Return ids of rows that differ, by the share of wrong verdicts in the table."""
    count = len(differences)
    if not count:
        return set()
    ordered = sorted(differences, key=lambda difference: difference.p)
    share = FALSE_SHARE * count / (count + 1)
    if _table_moved(differences):
        unmoved = 2 * (sum(difference.p > 0.5 for difference in ordered) + 1) / count
        share /= min(1.0, max(_LEAST_UNMOVED, unmoved))
    last = max(
        (place for place, d in enumerate(ordered, 1) if d.p <= share * place / count), default=0
    )
    return {id(difference.row) for difference in ordered[:last]}


def _table_moved(differences: Sequence[_Difference]) -> bool:
    """Whether the mean of all rows differs, with launches as the only source of variance."""
    if len(differences) < 2 or any(d.drift for d in differences):
        return False
    mean = _mean_of([difference.row for difference in differences])
    return mean is not None and abs(mean.log_speed) > mean.error.quantile(_P_ROW)


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


def judge_mean(rows: Sequence[Row], *, floor: float = EFFECT_FLOOR) -> Ratio | None:
    """Return the geometric mean of the ratios of rows; None if nothing is known of its error.

    Each launch gives one mean, so rows that drift together count once. Rows that share no
    launches, or have one, are assumed to move together.
    """
    mean = _mean_of(rows) if len(rows) > 1 else None
    if mean is None:
        return _mean_of_ratios(rows, floor)
    if mean.error.value == 0:
        return None
    counts = mean.error.value / mean.launch.value
    sides = ((row.base.logs for row in rows), (row.other.logs for row in rows))
    pool = pool_of([group for side in sides for group in launch_groups(side)])
    launch = mean.launch.widened(_P_ROW, pool.most_df if pool else None)
    mean = replace(mean, launch=launch, error=launch.scaled(counts))
    if mean.row.order is Order.BLOCKS:
        drift = _drift_of(rows, pool) if pool else _DRIFT
        mean = replace(mean, error=total([mean.error, drift]), drift=drift.value)
    return _judge_row(mean.row, mean, bool(_certain([mean])), floor)


def _mean_of_ratios(rows: Sequence[Row], floor: float) -> Ratio | None:
    differences = _differences(rows)
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
    )
    return _judge_row(rows[0], mean, bool(_certain([mean])), floor)


def _judge_row(
    row: Row, difference: _Difference | None, is_certain: bool, floor: float
) -> Ratio:
    if difference is None:
        counts = len(row.base.logs), len(row.other.logs)
        return Ratio(
            speed=math.exp(row.base.mean - row.other.mean),
            low=None,
            high=None,
            verdict=Verdict.CANNOT_TELL,
            reason="one launch" if max(counts) == 1 else "identical values",
        )
    low, speed, high = interval(difference.log_speed, difference.error.quantile(_P_INTERVAL))
    verdict = Verdict.CANNOT_TELL
    if is_certain and max(speed, 1 / speed) >= 1 + floor:
        verdict = Verdict.FASTER if speed > 1 else Verdict.SLOWER
    elif is_negligible(low, high, floor):
        verdict = Verdict.SAME
    launches = None
    reason = f"{len(row.base.logs)} and {len(row.other.logs)} launches"
    reason = reason if row.stated is None else f"noise {row.stated:.2%} as stated"
    if verdict is Verdict.CANNOT_TELL:
        launches = _launches_that_tell(difference, floor)
        reason = "within drift" if difference.drift else "within noise"
        reason = f"needs {launches} launches a side" if launches else reason
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


def _launches_that_tell(difference: _Difference, floor: float) -> int | None:
    """Return how many launches a side would give a verdict, if they vary as those of now.

    None if drift alone is too large, or if _MOST_LAUNCHES would not do.
    """
    change = abs(difference.log_speed)
    limit = math.log1p(floor)
    own = min(len(difference.row.base.logs), len(difference.row.other.logs))

    def tells(count: int) -> bool:
        df = difference.launch.df + 2 * (count - own)
        launches = Variance(2 * difference.launch.value / count, df)
        error = total([launches, Variance(difference.drift, _DRIFT.df)])
        is_certain = change >= limit and error.quantile(_P_ROW) < change
        return is_certain or error.quantile(_P_INTERVAL) < limit - change

    if not tells(_MOST_LAUNCHES):
        return None
    return bisect_left(range(_MOST_LAUNCHES), True, lo=own + 1, key=tells)
