"""Units of figures by the words around them; none where these name two, or a time."""

import pytest

from stepmark.job_logs.log_summary import rows
from stepmark.text_tables import tables_of
from stepmark.text_tables.slide_tables import unit_of


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        *(("A (GB/s)", "GB/s"), ("busbw (GB/s)", "busbw"), ("algbw", "algbw")),
        *(("images/s", "images/s"), ("samples/s", "samples/s"), ("img/sec", "images/s")),
        ("tokens per s", "tokens/s"),
    ],
)
def test_rates(column: str, unit: str) -> None:
    for title in ("", "AllReduce busbw, GB/s"):
        assert unit_of(column, (title, "size"), "") == unit
    assert unit_of("A", (column, "size"), "") == unit


@pytest.mark.parametrize(
    "column",
    [
        *("A", "step(s)", "GPU(s)", "A (us)", "B [ms]", "A (1/s)", "latency", "time"),
        *("busbw (MB/s)", "busbw (Gb/s)", "GiB/s", "400 Gbps", "Gbit/s", "algbw and busbw"),
    ],
)
def test_what_is_not_stated_or_stated_twice(column: str) -> None:
    assert unit_of(column, ("", "size"), "") == ""


def test_a_latency_is_no_rate_though_the_title_names_one() -> None:
    assert unit_of("Latency", ("busbw (GB/s)", "size"), "") == ""


def test_the_text_below_counts_last() -> None:
    assert unit_of("A", ("Two nodes", "size"), "in images/s") == "images/s"
    assert unit_of("A", ("busbw", "size"), "in images/s") == "busbw"


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
