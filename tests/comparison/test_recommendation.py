"""Nothing is recommended that chance explains; what is real and repeated is."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.comparison.compare import Options, compare
from stepmark.comparison.comparison import Comparison, Series, Side
from stepmark.comparison.recommendation import (
    Advice,
    Range,
    advise,
    confirm,
    p_faster,
    rows,
    text_of,
)
from stepmark.comparison.series import STRICT
from stepmark.ground.launches import Row, Sample
from stepmark.ground.ratio import Ratio, Verdict
from stepmark.ground.verdicts import judge

SIZES = [2**power for power in range(10, 30, 2)]
Gain = Callable[[str, int], float]
NOTHING: Gain = lambda name, size: 1.0  # noqa: E731


def sides(
    names: Sequence[str], random: Random, *, rounds: int, noise: float, gain: Gain = NOTHING
) -> list[Side]:
    """A round shifts all settings alike, as a drift does; each try has noise of its own."""
    drift = [random.gauss(1, noise) for _ in range(rounds)]
    return [
        Side(
            name=name,
            series=tuple(
                Series(
                    fields={"family": "all_reduce", "placement": "in-place", "method": "m/1"},
                    size_bytes=size,
                    launches={
                        f"{name}-{place}": (shift * random.gauss(1, noise) / gain(name, size),)
                        for place, shift in enumerate(drift)
                    },
                )
                for size in SIZES
            ),
        )
        for name in names
    ]


NAMES = ["default", *"BCDEFG"]


def advised(
    seed: int,
    *,
    rounds: int,
    noise: float = 0.01,
    gain: Gain = NOTHING,
    names: Sequence[str] = NAMES,
) -> Advice:
    found = sides(names, Random(seed), rounds=rounds, noise=noise, gain=gain)
    return advise(compare(found, Options(allowed=STRICT)), min_gain=0.01)


def confirmed(
    advice: Advice, seed: int, *, rounds: int, noise: float = 0.01, gain: Gain = NOTHING
) -> Advice:
    """Return what fresh rounds confirm of a selection, in which only its settings are."""
    names = [advice.baseline, *advice.selected]
    fresh = sides(names, Random(seed), rounds=rounds, noise=noise, gain=gain)
    return confirm(advice, compare(fresh, Options(allowed=STRICT)), rounds)


def won(advice: Advice) -> list[str]:
    return [pick.winner for pick in advice.picks if pick.winner]


def test_noise_is_not_recommended() -> None:
    # Of 6 settings, 10 sizes, 3 rounds: under 2 % of sweeps may say anything at all.
    false = sum(bool(won(advised(seed, rounds=3, noise=0.02))) for seed in range(100))
    assert false <= 2


def test_noise_is_not_recommended_with_more_rounds() -> None:
    false = sum(bool(won(advised(seed, rounds=6, noise=0.02))) for seed in range(1000, 1100))
    assert false <= 2


def test_one_round_recommends_nothing() -> None:
    advice = advised(1, rounds=1, gain=lambda name, size: 2.0 if name == "C" else 1.0)
    assert won(advice) == []
    assert advice.single is None
    assert all(pick.reason == "one round: too few repeats" for pick in advice.picks)
    assert advice.num_tests == 0
    assert text_of(advice, {})[0] == (
        "keep the default: nothing can be recommended because how repeats differ is not known"
    )


def test_ten_percent_are_found() -> None:
    def gain(name: str, size: int) -> float:
        return 1.1 if name == "C" else 1.0

    advice = advised(1, rounds=5, noise=0.004, gain=gain)
    assert won(advice) == ["C"] * len(SIZES)
    assert advice.single == "C"
    advice = confirmed(advice, 2, rounds=4, noise=0.004, gain=gain)
    assert won(advice) == ["C"] * len(SIZES)
    (one,) = advice.ranges
    assert (one.first_bytes, one.last_bytes) == (SIZES[0], SIZES[-1])
    lines = text_of(advice, {"C": "export X=C"})
    assert re.fullmatch(
        r"recommended: faster on 10 of 10 lines: \+\d+\.\d% to \+\d+\.\d% "
        r"\(\d+\.\d to \d+\.\d%\), confirmed by 4 fresh rounds; "
        r"seen more than 1\.0% slower on none",
        lines[0],
    )
    assert lines[1:] == ["  export X=C"]


def test_a_selection_is_no_recommendation() -> None:
    """Gains of the selection are too high, so without fresh rounds none is recommended."""
    advice = advised(1, rounds=5, noise=0.004, gain=lambda n, s: 1.1 if n == "C" else 1.0)
    assert advice.selected == ("C",)
    alone = confirm(advice, None, 0)
    assert won(alone) == []
    assert alone.single is None
    lines = text_of(alone, {})
    assert lines[0].startswith("selected, not confirmed: C on 10 of 10 lines, +")
    assert lines[1] == "keep the default: what was selected has no fresh rounds"
    assert all("unconfirmed: no fresh rounds" in line for line in lines[2:])
    with pytest.raises(AssertionError, match="selection"):
        text_of(advice, {"C": ""})


def test_figures_of_a_recommendation_are_those_of_fresh_rounds() -> None:
    """A gain of 10 % in the selection that is 5 % in fresh rounds is shown as 5 %."""
    advice = advised(1, rounds=5, noise=0.002, gain=lambda n, s: 1.1 if n == "C" else 1.0)
    now = confirmed(
        advice, 2, rounds=3, noise=0.002, gain=lambda n, s: 1.05 if n == "C" else 1.0
    )
    assert won(now) == ["C"] * len(SIZES)
    assert all(pick.ratio and 1.03 < pick.ratio.speed < 1.07 for pick in now.picks)
    assert {row["fresh_rounds"] for row in rows(now)} == {3}
    assert all(1.0 < row["best_low"] < 1.07 for row in rows(now))  # type: ignore[operator]


def test_a_gain_that_fresh_rounds_do_not_show_is_not_recommended() -> None:
    advice = advised(1, rounds=5, noise=0.002, gain=lambda n, s: 1.1 if n == "C" else 1.0)
    now = confirmed(advice, 2, rounds=3, noise=0.002)
    assert won(now) == []
    assert now.single is None
    assert all(pick.reason.startswith("unconfirmed: ") for pick in now.picks)
    verdict = "keep the default: fresh rounds do not confirm what was selected"
    assert text_of(now, {})[1] == verdict


def test_another_setting_is_selected_only_where_it_is_certainly_faster() -> None:
    """Of equal settings, one is confirmed, not one by line."""
    advice = advised(4, rounds=6, noise=0.002, gain=lambda n, s: 1.1 if n != "default" else 1.0)
    assert len(advice.selected) == 1
    (selected,) = advice.selected
    reasons = {pick.reason for pick in advice.picks}
    others = {f"{name} is not certainly faster than it" for name in {*NAMES} - {selected}}
    assert len(reasons) > 1
    assert reasons <= {"", *others}


def test_a_recommendation_without_the_verdict_faster_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one size, a verdict needs more than the one-sided test of a recommendation."""
    monkeypatch.setattr(f"{__name__}.SIZES", [2**20])
    seen = set()
    for seed in range(40):
        gain: Gain = lambda name, size: 1.04 if name == "B" else 1.0  # noqa: E731
        advice = advised(seed, rounds=5, noise=0.01, gain=gain, names=NAMES[:2])
        if not advice.selected:
            continue
        now = confirmed(advice, seed + 1000, rounds=5, noise=0.01, gain=gain)
        if not won(now):
            continue
        (pick,) = now.picks
        assert pick.ratio
        is_unsure = pick.ratio.verdict is not Verdict.FASTER
        assert ("1 of these 1 line without" in text_of(now, {"B": ""})[-1]) == is_unsure
        seen.add(is_unsure)
    assert seen == {False, True}


def test_what_was_dropped_is_not_considered() -> None:
    gain: Gain = lambda name, size: 2.0 if name == "B" else 1.0  # noqa: E731
    both = sides(NAMES[:2], Random(1), rounds=5, noise=0.001, gain=gain)
    comparison = compare(both, Options(allowed=STRICT))
    advice = confirm(advise(comparison, min_gain=0.01, dropped={"B": 2}), None, 0)
    assert advice.considered == ()
    assert text_of(advice, {}) == ["keep the default: no other is the fastest anywhere"]


def test_three_rounds_find_what_is_large() -> None:
    advice = advised(
        1, rounds=3, noise=0.002, gain=lambda name, size: 1.5 if name == "C" else 1.0
    )
    assert won(advice).count("C") >= 8


def test_a_gain_that_is_certain_but_small_is_not_recommended() -> None:
    advice = advised(
        1, rounds=8, noise=1e-5, gain=lambda name, size: 1.005 if name == "C" else 1.0
    )
    assert won(advice) == []
    assert {pick.reason for pick in advice.picks} == {"under 1.0% faster"}
    assert {pick.best for pick in advice.picks} == {"C"}


def crossing(name: str, size: int) -> float:
    """B is better below 64 KiB, C from 1 MiB on; each is worse where it is not better."""
    if name == "B":
        return 1.3 if size <= 2**16 else 0.7
    if name == "C":
        return 1.2 if size >= 2**20 else 0.8
    return 1.0


def test_sizes_with_one_winner_are_one_range() -> None:
    advice = advised(2, rounds=5, noise=0.002, gain=crossing, names=["default", "B", "C"])
    assert advice.single is None
    ranges = [(one.winner, one.first_bytes, one.last_bytes) for one in advice.ranges]
    # Cut at the geometric mean of the neighbours: 64 and 256 KiB, 256 KiB and 1 MiB.
    assert ranges == [
        ("B", 2**10, 2**17),
        (None, 2**17 + 1, 2**19),
        ("C", 2**19 + 1, 2**28),
    ]
    advice = confirmed(advice, 3, rounds=4, noise=0.002, gain=crossing)
    said = "\n".join(text_of(advice, {"B": "export X=B", "C": "export X=C"}))
    assert "export" not in said
    assert "by size, what is certainly faster, confirmed by 4 fresh rounds:" in said
    assert "all_reduce 1 KiB to 128 KiB: B +" in said
    assert "keep the default (best: " in said


def test_ranges_hold_every_size_once() -> None:
    for seed in range(20):
        random = Random(seed)
        table = {(n, s): random.choice([0.7, 1.0, 1.4]) for n in NAMES for s in SIZES}
        advice = advised(seed, rounds=5, noise=0.001, gain=lambda n, s, t=table: t[n, s])  # type: ignore[misc]
        held = [pick.line.size_bytes for one in advice.ranges for pick in one.picks]
        assert held == SIZES
        for one in advice.ranges:
            assert {pick.winner for pick in one.picks} == {one.winner}
            for pick in one.picks:
                assert one.first_bytes <= pick.line.size_bytes <= one.last_bytes  # type: ignore[operator]
        for before, after in zip(advice.ranges, advice.ranges[1:], strict=False):
            assert before.winner != after.winner
            assert after.first_bytes == (before.last_bytes or 0) + 1


def test_a_setting_that_loses_somewhere_is_not_the_one() -> None:
    def gain(name: str, size: int) -> float:
        return 0.97 if size == SIZES[3] else 1.2

    advice = advised(
        3, rounds=5, noise=0.001, gain=lambda n, s: gain(n, s) if n == "B" else 1.0
    )
    assert advice.single is None
    assert set(won(advice)) == {"B"}


def test_what_is_left_out_wins_nothing() -> None:
    found = sides(
        NAMES[:3], Random(1), rounds=5, noise=0.001, gain=lambda n, s: 2.0 if n == "B" else 1.0
    )
    comparison: Comparison = compare(found, Options(allowed=STRICT))
    advice = advise(comparison, min_gain=0.01, left_out={"B": "another method"})
    assert won(advice) == []
    assert text_of(advice, {})[0] == "not considered: B: another method"
    advice = advise(comparison, min_gain=0.01, left_out={"B": "x", "C": "y"})
    assert text_of(advice, {})[2:] == [
        "keep the default: nothing can be recommended because every other setting is left out"
    ]


def test_lines_without_a_size_are_ranges_of_their_own() -> None:
    def side(name: str, speed: float) -> Side:
        return Side(
            name=name,
            series=tuple(
                Series(
                    fields={"family": "gemm", "shape": shape, "method": "m/1"},
                    launches={f"{name}{i}": (1e-3 / speed * (1 + i * 1e-4),) for i in range(4)},
                )
                for shape in ("8x8x8", "16x16x16")
            ),
        )

    comparison = compare([side("default", 1.0), side("B", 1.5)], Options(allowed=STRICT))
    advice = advise(comparison, min_gain=0.01)
    assert [(one.label, one.winner) for one in advice.ranges] == [
        ("gemm 8x8x8", "B"),
        ("gemm 16x16x16", "B"),
    ]
    assert [row["setting"] for row in rows(advice)] == ["B", "B"]


FIELDS: dict[str, tuple[str | int | bool | None, ...]] = {
    "family": ("broadcast", "reduce"),
    "root": (0, 3),
    "num_ranks": (2, 4),
    "split": (None, "half"),
    "api": ("torch", "raw"),
    "placement": ("in-place", "out-of-place"),
}


@given(
    st.lists(st.sampled_from(list(FIELDS)), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 2**30), min_size=1, max_size=4, unique=True),
    st.integers(0, 2**30),
)
def test_ranges_of_a_label_ascend_and_are_disjoint(
    varied: list[str], sizes: list[int], seed: int
) -> None:
    random = Random(seed)
    plain: dict[str, str | int | bool | None] = {"family": "broadcast", "method": "m/1"}
    kinds = [
        plain | dict(zip(varied, values, strict=True))
        for values in itertools.product(*(FIELDS[name] for name in varied))
    ]

    def side(name: str) -> Side:
        return Side(
            name=name,
            series=tuple(
                Series(
                    fields=fields,
                    size_bytes=size,
                    launches={
                        f"{name}{i}": (speed * (1 + i * 1e-4),)
                        for speed in [random.choice([0.5, 1.0, 2.0])]
                        for i in range(4)
                    },
                )
                for fields in kinds
                for size in sizes
            ),
        )

    advice = advise(
        compare([side("default"), side("B")], Options(allowed=STRICT)), min_gain=0.01
    )
    by_label: dict[str, list[Range]] = {}
    for one in advice.ranges:
        by_label.setdefault(one.label, []).append(one)
    assert len(by_label) == len(kinds)
    for held in by_label.values():
        assert len({frozenset(p.line.fields.items()) for one in held for p in one.picks}) == 1
        bounds = [bound for one in held for bound in (one.first_bytes, one.last_bytes)]
        assert all(a <= b for a, b in itertools.pairwise(bounds))  # type: ignore[operator]
        for before, after in itertools.pairwise(held):
            assert after.first_bytes == (before.last_bytes or 0) + 1


def test_a_label_says_what_tells_lines_apart_and_no_more() -> None:
    def side(name: str, speed: float) -> Side:
        return Side(
            name=name,
            series=tuple(
                Series(
                    fields={"family": family, "redop": redop, "root": root, "num_ranks": 2},
                    size_bytes=1024,
                    launches={f"{name}{i}": (1 / speed * (1 + i * 1e-4),) for i in range(4)},
                )
                for family, redop, root in (
                    ("all_reduce", "sum", None),
                    ("reduce", "sum", 0),
                    ("reduce", "sum", 1),
                    ("broadcast", "none", 0),
                )
            ),
        )

    advice = advise(
        compare([side("default", 1.0), side("B", 1.5)], Options(allowed=STRICT)), min_gain=0.01
    )
    assert [one.label for one in advice.ranges] == [
        "all_reduce",
        "reduce root 0",
        "reduce root 1",
        "broadcast root 0",
    ]


def ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    base, other = (
        Sample(logs={f"{side}/{n}": math.log(time) for n, time in enumerate(times)})
        for side, times in (("a", a), ("b", b))
    )
    return judge([Row(kind="", base=base, other=other)])[0]


@pytest.mark.parametrize(
    ("speed", "low", "high"), [(1.5, 0.0, 0.01), (1.0, 0.49, 0.51), (0.7, 0.99, 1.0)]
)
def test_p_faster_falls_with_speed(speed: float, low: float, high: float) -> None:
    times = (1.0, 1.01, 0.99, 1.005, 0.995)
    found = ratio(times, [time / speed for time in times])
    p = p_faster(found)
    assert p is not None
    assert low <= p <= high
    slower = found.p_slower(0.0)
    assert slower == pytest.approx(1 - p)


def test_equal_repeats_are_not_certain() -> None:
    """Values that were rounded alike say nothing of how they differ."""

    def side(name: str, time_s: float) -> Side:
        launches = {f"{name}{i}": (time_s,) for i in range(3)}
        return Side(
            name=name, series=(Series(fields={"family": "all_reduce"}, launches=launches),)
        )

    assert p_faster(ratio((1.0, 1.0), (0.5, 0.5))) is None
    comparison = compare([side("default", 1.0), side("B", 0.5)], Options(allowed=STRICT))
    (pick,) = advise(comparison, min_gain=0.01).picks
    assert pick.winner is None
    assert pick.reason == "identical repeats: nothing is known of how they differ"
