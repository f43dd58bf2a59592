"""Units of figures by the words around them; none where these name two."""

import pytest

from stepmark.core.units import GB
from stepmark.report.log_summary import rows
from stepmark.trace.tables import tables_of
from stepmark.trace.tables.slide_tables import FigureUnit, unit_of

NOTHING = FigureUnit()
SCALE = dict.fromkeys(("busbw", "algbw", "GB/s"), GB)


@pytest.mark.parametrize(
    ("column", "seconds"),
    [
        *(("A (us)", 1e-6), ("B [ms]", 1e-3), ("time (s)", 1.0), ("C ( ns )", 1e-9)),
        *(("A (µs)", 1e-6), ("A (μs)", 1e-6), ("Run (s)", 1.0)),
        *(("latency us", 1e-6), ("Latencies, ms", 1e-3), ("time_us", 1e-6), ("lat [us]", 1e-6)),
        *(("time(s)", 1.0), ("step time (seconds)", 1.0)),
    ],
)
def test_times(column: str, seconds: float) -> None:
    # Also in a table of rates: its own heading counts.
    for title in ("", "AllReduce busbw GB/s"):
        assert unit_of(column, (title, "size"), "") == FigureUnit("s", seconds)
    if "A" not in column:
        assert unit_of("A", (column, "size"), "") == FigureUnit("s", seconds)


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        *(("A (GB/s)", "GB/s"), ("busbw (GB/s)", "busbw"), ("algbw", "algbw")),
        *(("images/s", "images/s"), ("samples/s", "samples/s"), ("img/sec", "images/s")),
        *(("tokens per s", "tokens/s"), ("GBps over time", "GB/s")),
        ("images/s (time limit 5 s)", "images/s"),
    ],
)
def test_rates(column: str, unit: str) -> None:
    for title in ("", "AllReduce latency (us)"):
        assert unit_of(column, (title, "size"), "") == FigureUnit(unit, SCALE.get(unit, 1.0))


@pytest.mark.parametrize(
    "column",
    [
        *("A", "step(s)", "GPU(s)", "A (US)", "time's", "time of it's", "A (1/s)", "A (/s)"),
        *("latency", "time", "busbw (MB/s)", "busbw (Gb/s)", "GiB/s", "400 Gbps", "Gbit/s"),
        *("time (us) busbw (GB/s)", "time (us) [ms]", "algbw and busbw", "flat us"),
    ],
)
def test_what_is_not_said_or_said_twice(column: str) -> None:
    assert unit_of(column, ("", "size"), "") == NOTHING


def test_a_latency_is_no_rate_though_the_title_names_one() -> None:
    assert unit_of("Latency", ("busbw (GB/s)", "size"), "") == NOTHING
    assert unit_of("Latency", ("all in us (us)", "size"), "") == FigureUnit("s", 1e-6)


def test_the_text_beside_counts_last_and_brackets_in_it_do_not() -> None:
    assert unit_of("A", ("Two nodes", "size"), "in images/s") == FigureUnit("images/s")
    assert unit_of("A", ("busbw", "size"), "in images/s") == FigureUnit("busbw", GB)
    assert unit_of("A", ("Two nodes", "size"), "seen by us (us)") == NOTHING


def test_a_table_of_times_has_times_and_no_rates() -> None:
    text = (
        "# AllReduce\n\nSize | A (us) | B [ms]\n--- | --- | ---\n1MB | 12 | 0\n2MB | 20 | 3\n"
    )
    (table,) = tables_of(text, "x")
    assert (table.unit, table.collective) == ("", "all_reduce")
    times = [one.time_s for one in table.readings]
    assert times == [pytest.approx(12e-6), None, pytest.approx(20e-6), pytest.approx(3e-3)]
    assert {(one.rate, one.rate_below) for one in table.readings} == {(None, None)}
    assert "1 times are 0 and left out" in table.notes
    assert not [note for note in table.notes if "does not say" in note]
    assert rows([(table, ())])[0]["unit"] == "s"


def test_a_table_without_a_unit_has_none() -> None:
    (table,) = tables_of("size\tA\tLatency\n1024\t12.5\t0.15\n2048\t13\t0.3\n", "x")
    assert table.unit == ""
    assert [one.rate for one in table.readings] == [12.5, 0.15, 13, 0.3]
    assert "the table does not say what its figures are" in table.notes
    assert rows([(table, ())])[0]["unit"] is None


@pytest.mark.parametrize("text", ["²", "1²", "٣"])
def test_a_size_in_other_digits_is_no_size(text: str) -> None:
    lines = f"size\tA\n{text}\t12.5\n{text}\t13\n"
    assert all(
        one.size_bytes is None for table in tables_of(lines, "x") for one in table.readings
    )
