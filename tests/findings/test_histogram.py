"""Histograms: no binning or grouping loses a call or a byte; curves hide no extrapolation."""

from collections.abc import Sequence
from math import isclose
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.comm_curve import ABOVE, BELOW, MEASURED, Curve, curve_of
from stepmark.cases.message import Histogram, MessageKind, Tally
from stepmark.findings.expected import expected, totals
from stepmark.findings.histogram import (
    BY,
    MESSAGE,
    PER_RANK,
    Bins,
    default_bins,
    lines,
    parse_bins,
    parse_by,
    rows,
    size_of,
    summary,
    unknown_ranks,
    with_ranks,
)
from stepmark.findings.histogram_figures import figures, section
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, busbw_factor, num_parts
from stepmark.tables.columns import Row
from stepmark.tables.page import Page

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def kind(
    collective: str = "all_reduce",
    size: int = 1024,
    ranks: int | None = 8,
    known: bool = True,
    **more: str,
) -> MessageKind:
    words = {"dtype": "bf16", "group": "0", "phase": "", **more}
    return MessageKind(
        collective=collective,
        num_ranks=ranks,
        call_bytes=size,
        message_bytes=size if known else None,
        **words,
    )


kinds = st.builds(
    kind,
    collective=st.sampled_from(NAMES),
    size=st.integers(0, 2**40),
    ranks=st.none() | st.integers(1, 1024),
    known=st.booleans(),
    dtype=st.sampled_from(("bf16", "fp32", "")),
    group=st.sampled_from(("0", "tp")),
    phase=st.sampled_from(("", "forward")),
)
tallies = st.builds(
    Tally,
    calls=st.integers(1, 10**6),
    ranks=st.integers(1, 64),
    timed_calls=st.just(0),
    seconds=st.just(0.0),
)
histograms = st.dictionaries(kinds, tallies, max_size=30)
edges = st.lists(st.integers(1, 2**41), min_size=1, max_size=9, unique=True).map(
    lambda held: Bins(name="edges", edges=tuple(sorted(held)))
)
all_bins = edges | st.sampled_from(("craypat", "pow2", "exact")).map(parse_bins)
all_by = st.lists(st.sampled_from(BY), unique=True).map(lambda by: parse_by(",".join(by)))


def total(table: Sequence[Row], key: str) -> float:
    return sum(value for row in table if isinstance(value := row[key], int | float))


# Laws


@given(histograms, all_bins, all_by, st.integers(1, 99))
def test_totals_are_conserved(held: Histogram, bins: Bins, by: tuple[str, ...], n: int) -> None:
    table = rows(held, by=by, bins=bins, num_ranks_seen=n)
    calls = sum(tally.calls for tally in held.values())
    assert total(table, "calls") == calls
    assert total(table, "bytes") == sum(t.calls * size_of(k)[0] for k, t in held.items())
    assert isclose(total(table, "calls_per_rank"), calls / n)
    for row in table:
        assert all(key in row for key in by)


@given(st.integers(0, 2**60), all_bins)
def test_every_size_is_in_the_one_bin_that_holds_it(size: int, bins: Bins) -> None:
    low, high = bins.of(size)
    assert low <= size
    assert high is None or size < high
    assert bins.of(low) == (low, high)
    if high is not None and bins.name != "exact":
        assert bins.of(high - 1) == (low, high)
        assert bins.of(high)[0] == high


@given(histograms, all_bins)
def test_bins_of_known_and_unknown_sizes_are_never_one(held: Histogram, bins: Bins) -> None:
    table = rows(held, by=(), bins=bins)
    for what in (MESSAGE, PER_RANK):
        wanted = sum(tally.calls for one, tally in held.items() if size_of(one)[1] == what)
        assert sum(row["calls"] for row in table if row["size_is"] == what) == wanted  # type: ignore[misc]


@given(st.sampled_from(NAMES), st.integers(1, 2**30), st.integers(1, 512))
def test_ranks_make_a_message_of_a_part(name: str, size: int, ranks: int) -> None:
    held = {kind(name, size, None, known=False): Tally(calls=3, ranks=1)}
    (sized,) = with_ranks(held, ranks)
    parts = 1 if name == "send" else num_parts(Collective(name), ranks)
    assert (sized.num_ranks, sized.message_bytes) == (ranks, size * parts)
    assert sum(tally.calls for tally in with_ranks(held, ranks).values()) == 3


points = st.dictionaries(
    st.integers(1, 2**32), st.floats(1e-6, 1.0), min_size=1, max_size=12
).map(lambda held: curve_of("all_reduce", 8, held.items(), "made up"))


@given(points, st.integers(1, 2**34))
def test_a_curve_stays_between_its_neighbours(curve: Curve, size: int) -> None:
    seconds, mark = curve.time_s(size)
    first, last = curve.points[0], curve.points[-1]
    if size < first[0]:
        assert (seconds, mark) == (first[1], BELOW)
    elif size > last[0]:
        # The bandwidth of the largest, not the slope between the last two.
        assert mark == ABOVE
        assert isclose(size / seconds, last[0] / last[1])
    else:
        assert mark == MEASURED
        low = max(point for point in curve.points if point[0] <= size)
        high = min(point for point in curve.points if point[0] >= size)
        bounds = sorted((low[1], high[1]))
        assert bounds[0] * (1 - 1e-9) <= seconds <= bounds[1] * (1 + 1e-9)


@given(st.floats(1e-6, 1e-3), st.floats(0.1, 2.0), st.integers(1, 2**20))
def test_a_power_law_is_met_everywhere(first_s: float, power: float, size: int) -> None:
    curve = curve_of(
        "all_reduce", 8, [(s, first_s * s**power) for s in (1, 64, 2**20)], "made up"
    )
    assert curve is not None
    assert isclose(curve.time_s(size)[0], first_s * size**power, rel_tol=1e-9)


def test_expected_time_is_count_times_time() -> None:
    curve = curve_of("all_reduce", 8, [(1024, 1e-5), (2048, 3e-5), (2048, 5e-5)], "made up")
    assert curve is not None
    held = {
        kind(size=1024): Tally(calls=30, ranks=3),
        kind(size=2048): Tally(calls=3, ranks=3, timed_calls=3, seconds=2.4e-4),
        kind("broadcast"): Tally(calls=7, ranks=3),
    }
    known = expected(held, [curve])
    table = rows(held, by=("collective",), bins=parse_bins("exact"), expected=known)
    by_size = {(row["collective"], row["from_bytes"]): row for row in table}
    assert by_size["all_reduce", 1024]["expected_s"] == pytest.approx(3e-4)
    assert by_size["all_reduce", 2048]["expected_per_rank_s"] == pytest.approx(4e-5)
    assert by_size["all_reduce", 2048]["times_expected"] == pytest.approx(2.0)
    assert by_size["broadcast", 1024]["expected_s"] is None
    found = totals(held, known, 3)
    assert found["seconds_per_rank"] == pytest.approx((3e-4 + 1.2e-4) / 3)
    assert (found["covered_calls"], found["uncovered_calls"]) == (33, 7)


def test_both_directions_of_a_link_run_at_once() -> None:
    curve = curve_of("sendrecv", 8, [(1024, 1e-5)], "made up")
    assert curve is not None
    held = {kind("send"): Tally(calls=5, ranks=1), kind("recv"): Tally(calls=3, ranks=1)}
    found = totals(held, expected(held, [curve]), 1)
    assert found["seconds_per_rank"] == pytest.approx(5e-5)


def test_what_lies_beyond_the_curve_is_counted() -> None:
    curve = curve_of("all_reduce", 8, [(1024, 1e-5)], "made up")
    assert curve is not None
    held = {kind(size=size): Tally(calls=2, ranks=1) for size in (8, 1024, 4096)}
    known = expected(held, [curve])
    found = totals(held, known, 1)
    assert (found["below_calls"], found["extrapolated_calls"]) == (2, 2)
    (row,) = rows(held, by=(), bins=parse_bins("1G"), expected=known)
    assert row["curve"] == f"{BELOW}, {ABOVE}, {MEASURED}"


def test_another_number_of_ranks_needs_force() -> None:
    curve = curve_of("all_gather", 8, [(2**20, 1e-4)], "eight.txt")
    assert curve is not None
    held = {kind("all_gather", 2**20, 16): Tally(calls=1, ranks=1)}
    with pytest.raises(ConfigError, match="all_gather of 16 ranks, not of 8; or --force"):
        expected(held, [curve])
    (one,) = expected(held, [curve], force=True).values()
    ratio = busbw_factor(Collective.ALL_GATHER, 16) / busbw_factor(Collective.ALL_GATHER, 8)
    assert one.seconds == pytest.approx(1e-4 * ratio)
    assert "other number of ranks" in one.mark


def test_a_curve_of_the_same_ranks_wins() -> None:
    curves = [curve_of("all_reduce", n, [(1024, n * 1e-6)], "x") for n in (4, 8, 16)]
    held = {kind(size=1024, ranks=8): Tally(calls=1, ranks=1)}
    (one,) = expected(held, [curve for curve in curves if curve]).values()
    assert (one.seconds, one.mark) == (8e-6, MEASURED)


def test_unknown_ranks_ask_for_them() -> None:
    held = {kind("all_gather", 1024, None, known=False): Tally(calls=2, ranks=1)}
    assert "--ranks N" in unknown_ranks(held)
    assert unknown_ranks(with_ranks(held, 8)) == ""
    curve = curve_of("all_gather", 8, [(1024, 1e-5)], "x")
    assert curve is not None
    with pytest.raises(ConfigError, match="--ranks N"):
        expected(held, [curve])


def test_a_curve_of_other_collectives_is_refused() -> None:
    curve = curve_of("broadcast", 8, [(1024, 1e-5)], "x")
    assert curve is not None
    with pytest.raises(ConfigError, match="times of all_reduce; it has broadcast"):
        expected({kind(): Tally(calls=1, ranks=1)}, [curve])


def test_busbw_of_timed_calls() -> None:
    held = {kind(size=8 * 10**9): Tally(calls=5, ranks=1, timed_calls=2, seconds=0.1)}
    (row,) = rows(held)
    assert row["busbw_gb_s"] == pytest.approx(2 * 8 * 1.75 / 0.1)
    assert rows({kind(): Tally(calls=5, ranks=1)})[0]["busbw_gb_s"] is None


# Bins as people name them


def test_craypat_bins() -> None:
    bins = parse_bins("CrayPat")
    labels = [bins.label(*bins.of(size)) for size in (0, 15, 16, 255, 256, 4096, 65536, 2**20)]
    assert labels[:5] == ["<16 B", "<16 B", "16 B<=<256 B", "16 B<=<256 B", "256 B<=<4 KiB"]
    assert labels[5:] == ["4 KiB<=<64 KiB", "64 KiB<=<1 MiB", "1 MiB<=<16 MiB"]
    assert bins.label(*bins.of(2**40)) == ">=16 MiB"


def test_edges_and_powers() -> None:
    bins = parse_bins("1K,64K,1M,16M")
    assert bins.edges == (2**10, 2**16, 2**20, 2**24)
    assert parse_bins("pow2").of(5000) == (4096, 8192)
    assert parse_bins("pow2").of(0) == (0, 1)
    assert parse_bins("exact").label(*parse_bins("exact").of(94380032)) == "94380032"


@pytest.mark.parametrize("name", ["", "64K,1K", "1K,1K", "x", "0,1K", "1K,,nan"])
def test_bad_bins(name: str) -> None:
    with pytest.raises(ConfigError, match="bins"):
        parse_bins(name)


def test_bad_by_and_ranks() -> None:
    with pytest.raises(ConfigError, match="some of collective,dtype,group,phase"):
        parse_by("collective,rank")
    assert parse_by("phase,collective") == ("collective", "phase")
    assert parse_by("") == ()
    with pytest.raises(ConfigError, match="from 1"):
        with_ranks({}, 0)


def test_many_sizes_are_binned_unless_asked() -> None:
    few = {kind(size=size): Tally(calls=1, ranks=1) for size in range(1, 17)}
    many = few | {kind(size=99): Tally(calls=1, ranks=1)}
    assert default_bins(few).name == "exact"
    assert default_bins(many).name == "pow2"


# Text and page


def test_lines_are_aligned_and_leave_out_what_is_empty() -> None:
    held = {
        kind("all_gather", 2**20): Tally(calls=16, ranks=8),
        kind("all_reduce", 64): Tally(calls=4, ranks=8),
    }
    table = rows(held, by=("collective",), bins=parse_bins("craypat"))
    assert lines(table) == [
        "collective  ranks            size  size is  calls/rank  calls  bytes/rank   bytes",
        "all_gather      8  1 MiB<=<16 MiB  message           2     16       2 MiB  16 MiB",
        "all_reduce      8    16 B<=<256 B  message        0.50      4        32 B   256 B",
    ]
    assert summary(held)[0] == "all_gather: 2 calls per rank, 1 size (1 MiB), 2 MiB per rank"


def test_bars_add_up_and_the_page_is_whole(tmp_path: Path) -> None:
    held = {
        kind("all_gather", size, group=group): Tally(calls=8, ranks=8)
        for size in (94380032, 94380048)  # alike but for the last digits: two bars
        for group in ("<b>0", "tp")
    }
    table = rows(held)
    calls, sizes = figures(table, per="rank and step")
    assert (calls.y.title, sizes.y.title) == (
        "calls per rank and step",
        "MiB per rank and step",
    )
    shown = sum(float(str(y)) for bar in sizes.series for y in bar.y)
    assert shown == pytest.approx(total(table, "bytes_per_rank") / 2**20)
    assert "1 calls per rank and step, 8 in all" in str(calls.series[0].hover)
    assert calls.title == "Calls by message size"
    bars = calls.series
    assert (
        sum(float(str(y)) for bar in bars for y in bar.y) == total(table, "calls_per_rank") == 4
    )
    assert len({x for bar in bars for x in bar.x}) == 2
    text = Page(title="title", sections=[section("source", table)]).html()
    assert "<b>0" not in text
    assert "src=" not in text.split("</script>")[-1]
    assert list(figures([])) == []
