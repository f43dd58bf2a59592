"""Checks of tables: print rounding is no error, a changed figure is one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.findings.finding import Finding, Severity
from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Table
from stepmark.text_tables import find, tables_of
from stepmark.text_tables.validate import validate

from .nccl_samples import FAMILIES, FOOT, SIZES, average, half, modern, row

SLIDES = Path(__file__).parents[2] / "examples" / "frontier-rccl.txt"


@pytest.fixture(name="slides", scope="module")
def _slides() -> list[Table]:
    return find(SLIDES)


def one(text: str) -> Table:
    (table,) = tables_of(text, "x")
    return table


def rules(table: Table) -> dict[str, Finding]:
    found = validate(table)
    assert len({finding.rule for finding in found}) == len(found)
    return {finding.rule: finding for finding in found}


def counts(table: Table) -> dict[str, int]:
    return {rule: finding.count for rule, finding in rules(table).items()}


def test_the_slides_136_measurements_agree_with_themselves(slides: Sequence[Table]) -> None:
    """All of 4 x 17 x 2 lie within print rounding; the factor names the ranks."""
    assert sum(len(table.readings) for table in slides[:4]) == 136
    assert [counts(table) for table in slides[:4]] == [
        {},
        {},
        {"placement-ratio": 3},
        {"slow-outlier": 1, "placement-ratio": 2},
    ]


def test_the_32_mib_row_is_the_outlier_and_says_why(slides: Sequence[Table]) -> None:
    (evidence,) = rules(slides[3])["slow-outlier"].evidence
    assert SLIDES.read_text().splitlines()[evidence.line - 1].startswith("\t33554432\t")
    assert evidence.text == (
        "32 MiB out-of-place: 1.99 times what its neighbours suggest; slower than 64 MiB, "
        "2.04 times its in-place time"
    )


def test_placements_apart_are_listed_with_their_ratio(slides: Sequence[Table]) -> None:
    texts = [one.text for one in rules(slides[2])["placement-ratio"].evidence]
    assert [text.split(" = ")[1] for text in texts] == ["1.122", "1.126", "1.180"]
    assert [text.split(":")[0] for text in texts] == ["128 KiB", "256 KiB", "32 MiB"]
    texts = [one.text for one in rules(slides[3])["placement-ratio"].evidence]
    assert [text.split(" = ")[1] for text in texts] == ["1.170", "2.042"]


def test_outliers_of_the_algorithm_table(slides: Sequence[Table]) -> None:
    """Ring 64 MiB took eleven times its neighbours; the default at 32 MiB 1.44 times."""
    finding = rules(slides[5])["slow-outlier"]
    assert finding.count == 4
    heads = [one.text.split(";")[0] for one in finding.evidence]
    expect = "times what its neighbours suggest"
    assert heads == [
        f"32 MiB Default: 1.44 {expect}",
        f"2 MiB ALGO=Ring: 1.50 {expect}",
        f"16 MiB ALGO=Ring: 1.40 {expect}",
        f"64 MiB ALGO=Ring: 10.97 {expect}",
    ]
    assert "slower than 128 MiB" in finding.evidence[3].text


def test_tables_without_times_or_sizes_have_nothing_to_check(slides: Sequence[Table]) -> None:
    for table in (slides[4], *slides[6:]):
        assert counts(table) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_release_rounds_and_none_is_blamed(family: str) -> None:
    assert counts(one(FAMILIES[family][0]())) == {}


@given(st.integers(0, 2 * len(SIZES) - 1), st.sampled_from([1, 2]), st.sampled_from([0.9, 1.1]))
def test_any_figure_that_is_changed_is_found(index: int, which: int, by: float) -> None:
    table = one(modern())
    reading = table.readings[index]
    assert reading.printed is not None
    value = float(reading.printed[which]) * by
    if abs(value - float(reading.printed[which])) < 0.02:
        return
    printed = tuple(
        f"{value:.2f}" if place == which else text for place, text in enumerate(reading.printed)
    )
    assert len(printed) == 3
    changed = replace(reading, printed=printed)
    readings = [*table.readings[:index], changed, *table.readings[index + 1 :]]
    rule = ("algbw-time", "busbw-factor")[which - 1]
    assert counts(replace(table, readings=tuple(readings))) == {rule: 1}


def test_a_count_that_does_not_fit_the_size_is_found() -> None:
    body = [row(size, "sum", "-1") for size in SIZES]
    body[3] = body[3].replace(f" {SIZES[3] // 4} ", f" {SIZES[3] // 4 + 1} ")
    assert counts(one(modern(body))) == {"size-count": 1}


def test_wrong_elements_are_the_worst() -> None:
    body = [row(size, "sum", "-1", wrong="3" if size > 2**26 else "0") for size in SIZES]
    finding = validate(one(modern(body)))[0]
    assert (finding.rule, finding.severity) == ("wrong-values", Severity.PROBLEM)
    assert finding.count == 4
    text = modern().replace("Out of bounds values : 0 OK", "Out of bounds values : 5 FAILED")
    assert rules(one(text))["wrong-values"].severity is Severity.PROBLEM


def test_another_number_of_ranks_is_one_finding_and_names_it() -> None:
    """Eight rank lines, and bandwidths of two: as eight jobs that each believe to be alone."""
    body = [row(size, "sum", "-1", factor=2 * 15 / 16) for size in SIZES]
    found = rules(one(modern(body)))
    assert set(found) == {"ranks-factor"}
    assert "not that of 8 ranks" in found["ranks-factor"].text
    assert "16 ranks" in found["ranks-factor"].text


def test_missing_rows_are_seen_in_the_footers_average() -> None:
    foot = FOOT.format(average=average(SIZES))
    rows = [row(size, "sum", "-1") for size in SIZES]
    whole = modern().replace("# Out of bounds values : 0 OK\n", foot)
    assert counts(one(whole)) == {}
    for lost in (0, 4, len(SIZES) - 1):
        text = modern(rows[:lost] + rows[lost + 1 :]).replace(
            "# Out of bounds values : 0 OK\n", foot
        )
        found = rules(one(text))
        assert set(found) == {"rows-missing"}
        assert found["rows-missing"].severity is Severity.NOTE


def slowed(size: int, by: float, *, both: bool) -> str:
    """A sweep with one row that takes `by` times as long, in one placement or in both."""
    body = []
    for each in SIZES:
        words = [str(each), str(each // 4), "float", "sum", "-1"]
        for in_place in (False, True):
            time, algbw, busbw, wrong = half(each, in_place)
            if each == size and (both or not in_place):
                time, algbw = f"{float(time) * by:.2f}", f"{float(algbw) / by:.2f}"
                busbw = f"{float(busbw) / by:.2f}"
            words += [time, algbw, busbw, wrong]
        body.append("  ".join(words))
    return modern(body)


def test_a_slow_row_is_flagged_and_a_slow_regime_is_not() -> None:
    alone = counts(one(slowed(2**24, 2.0, both=False)))
    assert (alone["slow-outlier"], alone["placement-ratio"]) == (1, 1)
    # Slow in both placements and still faster than the next size: another algorithm, maybe.
    assert "slow-outlier" not in counts(one(slowed(2**24, 1.6, both=True)))
    assert "slow-outlier" not in counts(one(slowed(2**24, 1.2, both=False)))
    assert "slow-outlier" not in counts(one(slowed(2**24, 0.5, both=True)))


def test_a_faster_step_is_no_outlier(slides: Sequence[Table]) -> None:
    """64 -> 128 KiB on one node: the time falls, since the algorithm changes."""
    times = {(r.size_bytes, r.placement): r.time_s for r in slides[0].readings}
    small, large = times[2**16, OUT_OF_PLACE], times[2**17, OUT_OF_PLACE]
    assert small is not None
    assert large is not None
    assert large < small
    assert times[2**17, IN_PLACE]
    assert "slow-outlier" not in counts(slides[0])
