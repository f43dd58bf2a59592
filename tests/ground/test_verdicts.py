"""Verdicts on tables whose truth is known."""

import dataclasses
import math
import random
from collections.abc import Sequence
from statistics import NormalDist

import pytest

from stepmark.ground.launches import Order, Row, Sample
from stepmark.ground.ratio import Ratio, Verdict, t_cdf
from stepmark.ground.variance import Variance
from stepmark.ground.verdicts import judge, judge_mean

TOLD = (Verdict.FASTER, Verdict.SLOWER)


def row(
    a: Sequence[float], b: Sequence[float], *, by_round: bool = False, **past: object
) -> Row:
    names = ("", "") if by_round else ("a", "b")
    logs = [
        {f"{name}{n}": x for n, x in enumerate(v)}
        for name, v in zip(names, (a, b), strict=True)
    ]
    base, other = (Sample(logs=side, **past) for side in logs)  # type: ignore[arg-type]
    return Row(kind="", base=base, other=other, by_round=by_round)


def in_time(a: Sequence[float], b: Sequence[float], starts: Sequence[float]) -> Row:
    names = [f"{n}" for n in range(len(a) + len(b))]
    times = dict(zip(names, starts, strict=True))
    first, second = names[: len(a)], names[len(a) :]
    return Row(
        kind="",
        base=Sample(logs=dict(zip(first, a, strict=True)), starts={n: times[n] for n in first}),
        other=Sample(
            logs=dict(zip(second, b, strict=True)), starts={n: times[n] for n in second}
        ),
    )


def launches(draw: random.Random, n: int, sd: float = 0.01, mean: float = 0.0) -> list[float]:
    return [draw.gauss(mean, sd) for _ in range(n)]


def width(ratio: Ratio) -> float:
    assert ratio.low is not None
    assert ratio.high is not None
    return math.log(ratio.high / ratio.low)


def test_a_table_tells_what_one_row_cannot() -> None:
    draw = random.Random(1)
    rows = [row(launches(draw, 3), launches(draw, 3, mean=-0.03)) for _ in range(68)]
    assert [ratio.verdict for ratio in judge(rows)].count(Verdict.FASTER) > 50
    assert judge(rows[:1])[0].verdict is Verdict.CANNOT_TELL


def test_tables_of_equal_sides_are_rarely_wrong() -> None:
    draw, wrong = random.Random(2), 0
    for _ in range(100):
        rows = [row(launches(draw, 3), launches(draw, 3)) for _ in range(68)]
        wrong += any(ratio.verdict in TOLD for ratio in judge(rows))
    assert wrong <= 2


def test_launches_that_move_all_rows_are_no_68_proofs() -> None:
    draw, wrong = random.Random(3), 0
    for _ in range(100):
        a, b = launches(draw, 3), launches(draw, 3)
        rows = [
            row([x + draw.gauss(0, 0.001) for x in a], [x + draw.gauss(0, 0.001) for x in b])
            for _ in range(30)
        ]
        wrong += any(ratio.verdict in TOLD for ratio in judge(rows))
        mean = judge_mean(rows)
        wrong += mean is not None and mean.verdict in TOLD
    assert wrong <= 2


def test_the_order_of_launches() -> None:
    assert in_time([0.0, 0.0], [0.0, 0.0], [1, 2, 3, 4]).order is Order.BLOCKS
    assert in_time([0.0, 0.0], [0.0, 0.0], [3, 4, 1, 2]).order is Order.BLOCKS
    assert in_time([0.0, 0.0], [0.0, 0.0], [1, 3, 2, 4]).order is Order.MIXED
    assert row([0.0, 0.0], [0.0, 0.0]).order is Order.UNKNOWN
    assert row([0.0, 0.0], [0.0, 0.0], by_round=True).order is Order.PAIRED
    assert row([0.0], [0.0], by_round=True).order is Order.PAIRED


def test_blocks_have_drift_and_rounds_have_none() -> None:
    draw = random.Random(4)
    level = launches(draw, 20, sd=0.01)
    a, b = ([x + draw.gauss(0, 0.001) for x in level] for _ in range(2))
    (blocks,) = judge([in_time(a, b, range(40))])
    mixed_starts = [*range(0, 40, 2), *range(1, 40, 2)]
    (mixed,) = judge([in_time(a, b, mixed_starts)])
    (paired,) = judge([row(a, b, by_round=True)])
    assert width(paired) < width(mixed) < width(blocks)
    assert width(blocks) > 2 * 2.5 * 0.01  # the default's 1 %
    (far,) = judge([in_time(a, [x - 0.02 for x in b], range(40))])
    assert (far.verdict, far.reason) == (Verdict.CANNOT_TELL, "within drift")


def test_history_tells_how_blocks_of_this_machine_drift() -> None:
    draw = random.Random(5)
    past = tuple({f"{n}": x for n, x in enumerate(launches(draw, 5, 0.001))} for _ in range(12))
    starts = range(10)
    bare = in_time(launches(draw, 5, 0.001), launches(draw, 5, 0.001), starts)
    known = Row(
        kind="",
        base=Sample(logs=bare.base.logs, starts=bare.base.starts, past=past),
        other=Sample(logs=bare.other.logs, starts=bare.other.starts, past=past),
    )
    assert width(judge([known])[0]) < 0.5 * width(judge([bare])[0])


def test_one_launch_a_side_needs_history() -> None:
    (bare,) = judge([row([0.0], [-0.1])])
    assert (bare.verdict, bare.reason, bare.low) == (Verdict.CANNOT_TELL, "one launch", None)
    draw = random.Random(6)
    past = tuple({f"{n}": x for n, x in enumerate(launches(draw, 5, 0.003))} for _ in range(4))
    (known,) = judge([row([0.0], [-0.1], past=past)])
    assert known.verdict is Verdict.FASTER
    # Runs of one launch each count as launches of one.
    single = tuple({f"{n}": x} for n, x in enumerate(launches(draw, 20, 0.003)))
    assert judge([row([0.0], [-0.1], past=single)])[0].verdict is Verdict.FASTER


def test_the_ratios_of_a_table_contradict_a_quiet_history() -> None:
    draw, wrong = random.Random(7), 0
    for _ in range(50):
        pasts = [
            tuple({f"{n}": x for n, x in enumerate(launches(draw, 5, 0.003))} for _ in range(2))
            for _ in range(68)
        ]
        rows = [row(launches(draw, 1), launches(draw, 1), past=past) for past in pasts]
        wrong += any(ratio.verdict in TOLD for ratio in judge(rows))
    assert wrong <= 1


@pytest.mark.parametrize("change", [0.0, 0.004, 0.015])
def test_the_launches_that_would_tell_do(change: float) -> None:
    pattern = (0.01, -0.01, 0.0, 0.005, -0.005)
    few = [pattern[n % 5] for n in range(5)]
    (ratio,) = judge([row(few, [x - change for x in few])])
    assert ratio.launches is not None
    assert ratio.reason == f"needs {ratio.launches} launches a side"
    many = [pattern[n % 5] for n in range(ratio.launches)]
    (then,) = judge([row(many, [x - change for x in many])])
    assert then.verdict is (Verdict.FASTER if change > 0.01 else Verdict.SAME)


def test_values_that_do_not_vary_prove_nothing() -> None:
    (ratio,) = judge([row([0.0] * 5, [-0.1] * 5)])
    assert (ratio.verdict, ratio.reason) == (Verdict.CANNOT_TELL, "identical values")
    rounded = Sample(logs={"1": 0.0, "2": 0.0, "3": 0.0}, rounding=0.05)
    moved = Sample(logs={"4": 0.02, "5": 0.02, "6": 0.02}, rounding=0.05)
    (ratio,) = judge([Row(kind="", base=rounded, other=moved)])
    assert ratio.low is not None
    assert ratio.verdict is Verdict.CANNOT_TELL


def test_rounding_alone_makes_no_verdicts() -> None:
    """Equal sides, sd 0.5 %, printed to 1 % of the value."""
    draw, called = random.Random(3), 0
    for _ in range(2000):
        base, other = (
            Sample(
                logs={
                    f"{side}{n}": math.log(round(10 * math.exp(draw.gauss(0, 0.005)), 1))
                    for n in range(2)
                },
                rounding=0.01,
            )
            for side in "ab"
        )
        (ratio,) = judge([Row(kind="", base=base, other=other)])
        called += ratio.verdict is not Verdict.CANNOT_TELL
    assert called <= 20


def test_a_wild_measurement_names_its_launches() -> None:
    draw = random.Random(8)
    (ratio,) = judge([row(launches(draw, 3, 0.3), launches(draw, 3, 0.3, mean=-0.1))])
    assert ratio.verdict is Verdict.CANNOT_TELL
    assert ratio.launches is None or ratio.launches > 10


def stated(change: float, noise: float = 0.01) -> Row:
    """One launch a side, the second faster by this; its error is normal and known."""
    base, other = Sample(logs={"a": 0.0}), Sample(logs={"b": -change})
    return Row(kind="", base=base, other=other, noise=noise)


def change_of(p: float, noise: float = 0.01) -> float:
    """Return the change that has this two-sided p."""
    return NormalDist().inv_cdf(1 - p / 2) * noise * math.sqrt(2)


@pytest.mark.parametrize("count", [1, 4, 68])
def test_the_share_of_wrong_verdicts_is_the_documented_one(count: int) -> None:
    """0.8 % m / (m + 1): of the rows of a table together, or divided by m for the first."""
    share = 0.008 * count / (count + 1)
    for factor, is_told in ((0.99, True), (1.01, False)):
        together = [stated(change_of(factor * share)) for _ in range(count)]
        assert {ratio.verdict in TOLD for ratio in judge(together)} == {is_told}
        first = stated(change_of(factor * share / count))
        others = [stated(0.0) for _ in range(count - 1)]
        assert [ratio.verdict in TOLD for ratio in judge([first, *others])].count(True) == (
            is_told
        )


def test_where_all_rows_have_moved_a_quarter_counts_as_unmoved() -> None:
    """A row then needs a fourth of what Benjamini's and Hochberg's rule asks for."""

    def judged(change: float) -> Ratio:
        rows = []
        for sign in (1, -1) * 10:  # so that launches have nothing in common
            values = [0.01 * sign, -0.01 * sign, 0.0]
            rows.append(row(values, [value - change for value in values]))
        return judge(rows)[0]

    low, high = 0.012, 0.032
    for _ in range(10):
        middle = (low + high) / 2
        is_told = judged(middle).verdict is Verdict.FASTER
        low, high = (low, middle) if is_told else (middle, high)
    least = judged(high)
    assert least.se_log is not None
    p = 2 * (1 - t_cdf(math.log(least.speed) / least.se_log, least.df))
    assert p == pytest.approx(4 * 0.008 * 20 / 21, rel=0.01)


@pytest.mark.parametrize(
    ("levels", "drift"),
    [
        ((-0.003, 0.003), 0.01**2),  # too few: 1 %
        ((-0.005, 0.0, 0.005), 2 * 0.005**2),  # both blocks vary by 0.5 %
        ((-0.02, 0.0, 0.02), 2 * 0.02**2),
        ((-0.005, 0.005) * 4, 2 * 0.005**2 * 8 / 7),
    ],
)
def test_three_runs_show_the_drift_of_both_blocks(
    levels: Sequence[float], drift: float
) -> None:
    past = tuple({"1": level + 1e-6, "2": level - 1e-6} for level in levels)
    bare = in_time([1e-6, -1e-6], [-1e-6, 1e-6], range(4))
    sides = [dataclasses.replace(side, past=past) for side in (bare.base, bare.other)]
    (ratio,) = judge([dataclasses.replace(bare, base=sides[0], other=sides[1])])
    assert ratio.drift == pytest.approx(drift, rel=1e-4)


def test_a_single_launch_has_three_times_the_variance_of_history() -> None:
    past = ({f"{n}": 0.1 * (-1) ** n for n in range(10)},)
    (ratio,) = judge([row([0.0], [0.0], past=past)])
    of_launch = 10 * 0.1**2 / 9
    assert ratio.se_log == pytest.approx(math.sqrt(3 * (of_launch + of_launch)))


def single_launches(changes: Sequence[float]) -> list[Ratio]:
    """Rows of one launch a side, whose history varies by 0.01 %."""
    past = ({f"{n}": 1e-4 * (-1) ** n for n in range(10)},)
    return judge([row([0.0], [-change], past=past) for change in changes])


def test_from_eight_single_launches_on_their_ratios_contradict_history() -> None:
    apart = [0.1 * n for n in range(8)]
    (quiet,) = {round(width(ratio), 9) for ratio in single_launches([0.0] * 8)}
    assert width(single_launches(apart[:7])[0]) < 2 * quiet
    assert width(single_launches(apart)[0]) > 2 * quiet


def test_the_spread_of_ratios_is_their_standard_deviation_at_least() -> None:
    """Of normal ratios. A median of few is widened by what it may be too small."""
    deviation = 0.1
    normal = NormalDist(0, deviation)
    for count in (9, 20):
        changes = [normal.inv_cdf((n + 0.5) / count) for n in range(count)]
        ratio = single_launches(changes)[0]
        assert ratio.se_log is not None
        assert 1.1 < ratio.se_log / deviation < 1 + 2 / math.sqrt(count)
        assert ratio.df == count // 2  # a median knows less than all rows would


@pytest.mark.parametrize(("needed", "expected"), [(990, 990), (1010, None)])
def test_more_than_a_thousand_launches_are_not_asked_for(
    needed: int, expected: int | None
) -> None:
    """99.8 % of normal errors of so many launches a side are below the change of 5 %."""
    noise = 0.05 / NormalDist().inv_cdf(0.998) * math.sqrt(needed / 2) * (1 - 1e-6)
    (ratio,) = judge([stated(0.05, noise)])
    assert ratio.verdict is Verdict.CANNOT_TELL
    assert ratio.launches == expected


REPEATS = Variance(0.015**2, 5)


def of_rounds(a: Sequence[float], b: Sequence[float], repeats: Variance | None) -> Ratio:
    (ratio,) = judge([dataclasses.replace(row(a, b, by_round=True), repeats=repeats)])
    return ratio


def test_one_round_is_judged_by_repeats_on_other_machines() -> None:
    """A verdict is possible from ten standard deviations on, and says what it rests on."""
    assert of_rounds([0.3], [0.0], None).verdict is Verdict.CANNOT_TELL
    seen = of_rounds([0.3], [0.0], REPEATS)
    assert seen.verdict is Verdict.FASTER
    assert seen.reason == "noise 1.5% of repeats"
    assert of_rounds([0.0], [0.15 * math.sqrt(2)], REPEATS).verdict is Verdict.SLOWER
    assert of_rounds([0.1], [0.0], REPEATS).verdict is Verdict.CANNOT_TELL
    noisier = Variance(0.06**2, 5)
    assert of_rounds([0.3], [0.0], noisier).verdict is Verdict.CANNOT_TELL


def test_own_rounds_outweigh_repeats_as_they_become_more() -> None:
    """Of a machine that is four times as noisy as the repeats, and of one that is quieter."""
    draw = random.Random(6)
    widths = {}
    for count in (2, 5, 40):
        for sd in (0.002, 0.06):
            sides = (launches(draw, count, sd), launches(draw, count, sd))
            widths[count, sd] = width(of_rounds(*sides, REPEATS)) * math.sqrt(count)
    assert widths[5, 0.06] > widths[5, 0.002]
    assert widths[40, 0.06] > 3 * widths[40, 0.002]
    assert widths[40, 0.002] < widths[5, 0.002] < widths[2, 0.002]


def test_rows_that_show_their_noise_need_no_repeats() -> None:
    draw = random.Random(7)
    rows = [row(launches(draw, 3), launches(draw, 3), by_round=True) for _ in range(10)]
    loud = Variance(1.0, 5)
    with_repeats = [dataclasses.replace(each, repeats=loud) for each in rows]
    assert judge(with_repeats) == judge(rows)
    assert judge_mean(with_repeats) == judge_mean(rows)


def test_one_or_two_rounds_may_be_slow_and_three_are_not() -> None:
    """What all rows share, up to 10 %, is no verdict; a row that differs from them is."""
    slow = [of_rounds([0.08] * n, [0.0005 * k for k in range(n)], REPEATS) for n in (1, 2, 3)]
    assert [ratio.slow > 0 for ratio in slow] == [True, True, False]
    rows = [row([x], [0.0], by_round=True) for x in (0.2, 0.0, 0.01, -0.01)]
    ratios = judge([dataclasses.replace(each, repeats=REPEATS) for each in rows])
    assert ratios[0].verdict is Verdict.FASTER
    assert {ratio.verdict for ratio in ratios[1:]} == {Verdict.CANNOT_TELL}
    assert ratios[0].slow < 0.01
    assert (ratios[0].p_faster or 0.0) < 0.001 < (ratios[1].p_faster or 0.0)


def test_the_mean_of_few_rounds_rests_on_repeats() -> None:
    rows = [row([0.3], [0.0], by_round=True) for _ in range(3)]
    assert judge_mean(rows) is None
    mean = judge_mean([dataclasses.replace(each, repeats=REPEATS) for each in rows])
    assert mean is not None
    assert mean.verdict is Verdict.FASTER
    assert mean.reason.endswith("of repeats")
