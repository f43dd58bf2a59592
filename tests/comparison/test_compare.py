"""Sides are joined by what they measured; what may not be paired is refused."""

import dataclasses
from collections.abc import Mapping

import pytest

from stepmark.comparison.compare import Options, compare
from stepmark.comparison.comparison import Comparison, Series, Side
from stepmark.comparison.comparison_text import ratio_text
from stepmark.comparison.series import STRICT
from stepmark.ground.errors import ConfigError
from stepmark.ground.ratio import Ratio, Verdict

SIZES = (1024, 4096, 16384)


def series(size: int | None, *times: float, unit: str = "s", **fields: object) -> Series:
    plain: Mapping[str, object] = {
        "family": "all_reduce",
        "dtype": "fp32",
        "placement": "in-place",
        "num_ranks": 4,
        "method": "queued/1",
    }
    merged = {**plain, **fields}
    return Series(
        fields=merged,  # type: ignore[arg-type]
        size_bytes=size,
        unit=unit,
        launches={str(place): (time,) for place, time in enumerate(times)},
        busbw_factor=1.5,
    )


def side(name: str, *held: Series, **context: str) -> Side:
    return Side(name=name, series=held, context=context)


def curve(name: str, factor: float = 1.0, **fields: object) -> Side:
    held = [
        series(
            size,
            *(factor * (1e-5 + size * 1e-9) * (1 + e) for e in (0, 1e-3, -1e-3) * 8),
            **fields,
        )
        for size in SIZES
    ]
    return side(name, *held)


def only(comparison: Comparison) -> list[Verdict]:
    other = comparison.names[1]
    return [ratio.verdict for line in comparison.lines if (ratio := line.cells[other].ratio)]


def test_each_size_is_judged() -> None:
    found = compare([curve("a"), curve("b", 0.9)], Options())
    assert only(found) == [Verdict.FASTER] * 3
    (mean,) = found.overall
    assert mean.ratio.speed == pytest.approx(1 / 0.9)
    assert (mean.num_lines, mean.smallest_bytes, mean.largest_bytes) == (3, 1024, 16384)


def test_a_side_is_the_same_as_itself_whatever_the_statistic() -> None:
    for statistic in ("median", "mean"):
        found = compare([curve("a"), curve("b")], Options(statistic=statistic))
        assert only(found) == [Verdict.SAME] * 3
        stated = "of the samples of a launch the mean counts" in found.notes
        assert stated is (statistic == "mean")


def test_the_range_bounds_the_mean_alone() -> None:
    found = compare([curve("a"), curve("b")], Options(smallest_bytes=4096))
    assert len(found.lines) == 3
    assert found.overall[0].num_lines == 2


@pytest.mark.parametrize("name", STRICT)
def test_a_refusal_names_the_strict_field_that_differs(name: str) -> None:
    value = 8 if name in ("num_ranks", "mbs") else "another"
    sides = [curve("a", **{name: "one"}), curve("b", **{name: value})]
    with pytest.raises(ConfigError, match=f"{name}.*--allow {name}") as error:
        compare(sides, Options())
    assert str(value) in str(error.value)
    forced = compare(sides, Options(allowed=(name,)))
    assert len(forced.lines) == 3
    assert any(name in note for note in forced.notes)


def test_other_settings_are_compared_and_named() -> None:
    found = compare([curve("a", api="nccl"), curve("b", api="torch")], Options())
    assert "api differs: a nccl, b torch" in found.notes


def test_variables_that_differ_are_named() -> None:
    a = Side(name="a", series=curve("a").series, context={"NCCL_ALGO": "Ring", "torch": "2"})
    b = Side(name="b", series=curve("b").series, context={"torch": "2"})
    assert compare([a, b], Options()).notes == ("NCCL_ALGO differs: a Ring, b unset",)


def test_what_varies_within_a_side_tells_its_lines_apart() -> None:
    both = [*curve("x").series, *curve("x", 2.0, placement="out-of-place").series]
    found = compare([side("a", *both), side("b", *both)], Options())
    assert len(found.lines) == 6
    assert only(found) == [Verdict.SAME] * 6


def test_what_only_one_side_has_is_counted() -> None:
    found = compare([curve("a"), side("b", *curve("b").series[:1])], Options())
    assert len(found.lines) == 1
    assert "2 of 3 of a are not in b" in found.notes


def test_what_the_other_side_measured_by_another_method_says_so() -> None:
    first, second, third = curve("a", method="graph").series
    events = dataclasses.replace(third, fields={**third.fields, "method": "events"})
    found = compare(
        [side("a", first, second, third), side("b", first, second, events)], Options()
    )
    note = "1 of 3 of a are not in b by the same method (graph and events)"
    assert note in found.notes


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"something in common.*family differs"):
        compare([curve("a"), curve("b", family="all_gather")], Options())


def test_what_a_side_does_not_state_is_taken_as_the_same_and_said() -> None:
    found = compare([curve("a"), curve("b", placement="")], Options())
    assert "b does not state placement: taken as the same" in found.notes


def test_two_candidates_for_one_line_are_refused() -> None:
    both = [*curve("x").series, *curve("x", placement="out-of-place").series]
    with pytest.raises(ConfigError, match="placement"):
        compare([side("a", *both), curve("b", placement="")], Options())


def test_sizes_rounded_for_other_ranks_still_meet() -> None:
    a, b = side("a", series(1000000, 1.0, 1.0)), side("b", series(1000080, 1.0, 1.0))
    assert len(compare([a, b], Options()).lines) == 1
    far = side("b", series(1020000, 1.0, 1.0))
    with pytest.raises(ConfigError):
        compare([a, far], Options())


def test_rates_count_the_other_way() -> None:
    a = side("a", series(None, 100.0, 101.0, unit="samples/s"))
    b = side("b", series(None, 200.0, 202.0, unit="samples/s"))
    (line,) = compare([a, b], Options()).lines
    assert line.cells["b"].ratio is not None
    assert line.cells["b"].ratio.speed == pytest.approx(2.0)


def test_a_value_printed_as_zero_is_a_bound_and_no_ratio() -> None:
    zero = Series(
        fields=curve("x").series[0].fields,
        size_bytes=1024,
        unit="busbw",
        launches={},
        below=5e6,
    )
    one = Series(fields=zero.fields, size_bytes=1024, unit="busbw", launches={"1": (1e9,)})
    (line,) = compare([side("a", one), side("b", zero)], Options()).lines
    assert line.cells["b"].ratio is None
    assert line.cells["b"].series.below == 5e6


def single(name: str, factor: float = 1.0) -> Side:
    """One launch a size, as of a run of ours: many samples."""
    held = [
        Series(
            fields=one.fields, size_bytes=one.size_bytes, launches={"1": (1e-5 * factor,) * 9}
        )
        for one in curve("x").series
    ]
    return side(name, *held)


def test_one_launch_a_side_cannot_tell_unless_a_spread_is_known() -> None:
    sides = [single("a"), single("b", 0.9)]
    reasons = [line.cells["b"].ratio for line in compare(sides, Options()).lines]
    assert {one.reason for one in reasons if one} == {"one launch"}
    recorded = compare(sides, Options(recorded=(curve("earlier"),)))
    assert only(recorded) == [Verdict.FASTER] * 3
    assert recorded.lines[0].cells["b"].ratio is not None
    assert recorded.lines[0].cells["b"].ratio.low is not None
    noisy = compare(sides, Options(noise=0.1))
    assert only(noisy) == [Verdict.CANNOT_TELL] * 3


def test_a_spread_of_another_size_or_type_is_none() -> None:
    sides = [single("a"), single("b", 0.9)]
    other = curve("earlier", dtype="bf16")
    assert only(compare(sides, Options(recorded=(other,)))) == [Verdict.CANNOT_TELL] * 3


def test_a_single_printed_value_gives_the_ratio_only() -> None:
    a, b = side("a", series(1024, 2.0)), side("b", series(1024, 1.0))
    (line,) = compare([a, b], Options()).lines
    found = line.cells["b"].ratio
    assert found is not None
    assert (found.speed, found.low, found.reason) == (2.0, None, "one value")


def test_slower_trips_only_past_the_interval() -> None:
    limit = Options(fail_if_slower=0.05)
    assert compare([curve("a"), curve("b", 1.2)], limit).too_slow == tuple(
        (place, "b") for place in range(3)
    )
    assert compare([curve("a"), curve("b", 1.052)], limit).too_slow == ()
    assert compare([single("a"), single("b", 2.0)], limit).too_slow == ()
    assert compare([curve("a"), curve("b", 0.5)], limit).too_slow == ()


def test_three_sides_against_a_baseline() -> None:
    found = compare([curve("a"), curve("b", 0.9), curve("c", 1.1)], Options())
    assert [one.name for one in found.overall] == ["b", "c"]
    assert all(set(line.cells) == {"a", "b", "c"} for line in found.lines)


def test_sides_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="different names"):
        compare([curve("a"), curve("a")], Options())
    with pytest.raises(ConfigError, match="two or more"):
        compare([curve("a")], Options())


def test_exact_sizes_come_before_near_ones() -> None:
    """Steps finer than 1 %, of which one side has every other."""
    a = side("a", *(series(size, 1.0, 1.1) for size in range(1000, 1101, 4)))
    b = side("b", *(series(size, 1.0, 1.1) for size in range(1000, 1101, 8)))
    found = compare([a, b], Options())
    assert [line.size_bytes for line in found.lines] == list(range(1000, 1101, 4))[::2]


def test_figures_of_no_known_unit_have_no_direction() -> None:
    a, b = (
        side(name, series(1024, *v, unit="")) for name, v in (("a", (1, 1.1)), ("b", (2, 2.1)))
    )
    (line,) = compare([a, b], Options()).lines
    ratio = line.cells["b"].ratio
    assert ratio is not None
    assert (ratio.verdict, ratio.reason) == (Verdict.CANNOT_TELL, "--unit rate or time")


def test_a_record_that_says_less_still_counts() -> None:
    sides = [single("a"), single("b", 0.9)]
    sparse = side(
        "record",
        *(
            Series(
                fields={"family": "all_reduce", "placement": "in-place"},
                size_bytes=one.size_bytes,
                launches=one.launches,
            )
            for one in curve("x").series
        ),
    )
    found = compare(sides, Options(recorded=(sparse,)))
    assert only(found) == [Verdict.FASTER] * 3
    assert found.overall[0].ratio.low is not None


def test_what_had_no_effect_is_said() -> None:
    other = Options(recorded=(curve("earlier", dtype="bf16"),))
    assert "--noise-from has several launches of nothing" in " ".join(
        compare([single("a"), single("b")], other).notes
    )
    both = compare([curve("a"), curve("b")], Options(noise=0.02))
    assert any("--noise is not used" in note for note in both.notes)


def test_rounding_widens_the_interval() -> None:
    a, b = curve("a"), curve("b", 0.98)
    coarse = [
        Side(
            name=one.name,
            series=tuple(dataclasses.replace(s, rounding=0.2) for s in one.series),
        )
        for one in (a, b)
    ]
    assert only(compare([a, b], Options())) == [Verdict.FASTER] * 3
    assert only(compare(coarse, Options())) == [Verdict.CANNOT_TELL] * 3


def test_other_default_arguments_are_no_pair_and_others_are() -> None:
    a = curve("a", family="custom", default_tokens="1024")
    with pytest.raises(ConfigError, match="default_tokens differs"):
        compare([a, curve("b", family="custom", default_tokens="64")], Options())
    more = curve("b", family="custom", default_tokens="1024", default_block="8")
    assert len(compare([a, more], Options()).lines) == 3


def test_notes_that_are_alike_name_all_their_sides() -> None:
    def busy(name: str) -> Side:
        first, *_ = curve(name).series
        return side(name, dataclasses.replace(first, busy=frozenset({"0"})))

    notes = compare([busy("a"), busy("b"), busy("c")], Options()).notes
    assert "a, b, c: busy host in 1 of 24 launches" in notes


def test_an_interval_that_says_nothing_is_unknown() -> None:
    ratio = Ratio(speed=2.0, low=0.5, high=8.0, verdict=Verdict.CANNOT_TELL, reason="")
    assert ratio_text(ratio) == "2.000 [0.500, 8.000]"
    wide = dataclasses.replace(ratio, low=0.01, high=400.0)
    assert ratio_text(wide) == "2.000 [unknown]"
