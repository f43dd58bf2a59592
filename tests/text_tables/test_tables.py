"""Files to tables: the slides' tables as a whole, value tables, CSV, what is refused."""

import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepmark.ground.reading import IN_PLACE, Table
from stepmark.job_logs.log_summary import name_of, rows, table_lines
from stepmark.text_tables import find, looks_like_tables, tables_of
from stepmark.text_tables.validate import validate

from .nccl_samples import FAMILIES, SIZES, modern

DATA = Path(__file__).parents[1] / "data"
SLIDES = DATA.parents[1] / "examples" / "frontier-rccl.txt"
LOG = "node1:1:2 [0] NCCL INFO Channel 02/0 : 36[d9000] -> 45[de000] [send] via NET/Socket/4\n"
VALUES = """Message Size\tNo Plugin\tWith Plugin
65536\t0.85\t0
131072\t1.17\t0.01
262144\t10\t2.5
"""


@pytest.fixture(name="slides", scope="module")
def _slides() -> list[Table]:
    return find(SLIDES)


def cells(table: Table, column: str) -> list[float | None]:
    return [reading.rate for reading in table.readings if reading.column == column]


def test_the_slides_tables_are_found_in_order(slides: Sequence[Table]) -> None:
    shown = [(table.tool, table.title) for table in slides]
    experiments = [
        ("trainer", f"Experiment Data - {model}: {how}")
        for model in ("GPT-J", "BigBird Oscar")
        for how in (
            "Without the plugin",
            "With the plugin",
            "With the plugin + NCCL_NET_GDR_LEVEL=3",
        )
    ]
    assert shown == [
        ("rccl-tests", "RCCL Test Data - Single Node"),
        ("rccl-tests", "RCCL Test Data - 2 Nodes With TCP/IP for Inter Node Communications"),
        ("rccl-tests", "RCCL Test Data - 2 Nodes with the Plugin"),
        ("rccl-tests", "RCCL Test Data - 2 Nodes with the Plugin + NCCL_NET_GDR_LEVEL=3"),
        ("values", "RCCL Test Data - All_reduce on 2 nodes, 16 ranks (n16N2)"),
        ("values", "Comparison of NCCL_ALGO, 64 nodes, 512 ranks"),
        *experiments,
        ("values", "Revisit RCCL All_reduce on 2 nodes, 16 ranks (-n16 -N2)"),
        ("values", "TensorFlow Example"),
    ]
    assert [table.index for table in slides] == list(range(1, 15))


def test_ranks_and_collective_of_the_slides_come_with_their_reason(
    slides: Sequence[Table],
) -> None:
    lines = SLIDES.read_text().splitlines()
    for table, num_ranks, factor in zip(
        slides[:4], (8, 16, 16, 16), (1.75, *[1.875] * 3), strict=True
    ):
        assert (table.collective, table.num_ranks) == ("all_reduce", num_ranks)
        reason = f"busbw/algbw is {factor:g}: 2(n-1)/n with {num_ranks} ranks"
        assert table.num_ranks_from == reason
        line = int(table.collective_from.removeprefix("the command in line "))
        assert "all_reduce_perf -b 64K" in lines[line - 1]
        assert table.method == ""
        assert len(table.readings) == 34
        assert not table.notes


def test_the_comparison_is_the_in_place_bandwidth_of_the_three_tables(
    slides: Sequence[Table],
) -> None:
    for table in (slides[4], slides[12]):
        assert (table.collective, table.num_ranks, table.unit) == ("all_reduce", 16, "")
        for source, column in zip(slides[1:4], table.columns, strict=True):
            in_place = [
                reading.busbw_bytes_per_s
                for reading in source.readings
                if reading.placement == IN_PLACE
            ]
            shown = [rate * 1e9 for rate in cells(table, column) if rate is not None]
            assert len(shown) == 17
            assert shown == pytest.approx(in_place)
    assert [r.rate for r in slides[4].readings] == [r.rate for r in slides[12].readings]


def test_zeros_of_the_algorithm_table_are_bounds(slides: Sequence[Table]) -> None:
    table = slides[5]
    assert (table.collective, table.num_ranks) == ("", 512)
    assert any("collective is not known" in note for note in table.notes)
    censored = [reading for reading in table.readings if reading.rate is None]
    assert [(one.column, one.size_bytes) for one in censored] == [
        ("ALGO=Ring", 2**16),
        ("ALGO=Ring", 2**17),
        ("ALGO=Ring", 2**18),
    ]
    assert {one.rate_below for one in censored} == {0.005}
    assert {one.rate_below for one in table.readings if one.rate is not None} == {None}


def test_images_per_second_have_labels_and_a_unit_said_beside(slides: Sequence[Table]) -> None:
    table = slides[13]
    assert (table.unit, table.collective) == ("images/s", "images/s")
    found = {(one.label, one.column): one.rate for one in table.readings}
    assert found["64 nodes, 512 ranks", "With the Plugin + GDR=3"] == 508689.71
    assert found["16 nodes, 128 ranks", "No Plugin"] == 118874.19
    assert len(found) == 9
    assert {one.size_bytes for one in table.readings} == {None}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (VALUES, [2**16, 2**17, 2**18]),
        (VALUES.replace("\t", ","), [2**16, 2**17, 2**18]),
        (
            VALUES.replace("65536", "64 KiB")
            .replace("131072", "128K")
            .replace("262144", "0.25M"),
            [2**16, 2**17, 2**18],
        ),
        (
            VALUES.replace("65536", "1")
            .replace("131072", "2")
            .replace("262144", "4")
            .replace("Message Size", "Size (MB)"),
            [2**20, 2**21, 2**22],
        ),
    ],
    ids=["tabs", "commas", "units", "unit in the head"],
)
def test_value_tables_in_every_dress_are_one(text: str, sizes: list[int]) -> None:
    (table,) = tables_of(text, "x")
    assert table.columns == ("No Plugin", "With Plugin")
    assert [one.size_bytes for one in table.readings[::2]] == sizes
    assert cells(table, "With Plugin") == [None, 0.01, 2.5]
    assert table.readings[1].rate_below == 0.005


@pytest.mark.parametrize(
    ("above", "title"),
    [
        ("Two nodes\n\n", "Two nodes"),
        ("## Two nodes\n\n", "Two nodes"),
        ("**Two nodes**\n\n- a remark\n\n", "Two nodes"),
        ("Two nodes\n\nA sentence of words.\n\n", "Two nodes"),
        ("Two nodes\n\nwords of a text\nthat goes on\n\n", "Two nodes"),
        ("words of a text\nthat goes on\n\n", ""),
        ("- a remark\n\n", ""),
        ("Two nodes\n\n" + "words of a text,\nmore\n\n" * 40, ""),
    ],
)
def test_a_title_is_the_nearest_heading(above: str, title: str) -> None:
    (table,) = tables_of(f"Before.\n\n{above}{VALUES}", "x")
    assert table.title == title


def test_tables_with_other_separators_are_not_read() -> None:
    assert tables_of(VALUES.replace("\t", " | "), "x") == []


def test_a_unit_in_the_head_scales() -> None:
    text = "size\ta\tb busbw (GB/s)\n1024\t12.5\t0.15\n2048\t13\t0.3\n"
    (table,) = tables_of(text, "x")
    assert table.unit == ""
    assert [r.rate for r in table.readings] == pytest.approx([12.5, 0.15e9, 13, 0.3e9])


def test_tables_of_text_are_no_value_tables() -> None:
    text = (
        "Time%\tTime\tFunction\n100.0%\t601.9\tTotal\n73.9%\t444.8\tmain\n"
        "a\tb\nx\t1\n1  2  3\n4  5  6\nSome words 1\nmore words 2\n"
    )
    assert tables_of(text, "x") == []


def test_gzipped_and_utf16_files_are_read(tmp_path: Path) -> None:
    packed, wide = tmp_path / "a.gz", tmp_path / "b.txt"
    packed.write_bytes(gzip.compress(modern().encode()))
    wide.write_text(modern(), encoding="utf-16")
    for path in (packed, wide):
        (table,) = find(path)
        assert len(table.readings) == 2 * len(SIZES)


def test_a_text_without_tables_has_none() -> None:
    assert tables_of("Some notes.\n\nNothing was measured on 3 nodes.\n", "x") == []
    assert tables_of('{"a": 1}', "x") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_look_like_tables(family: str) -> None:
    assert looks_like_tables(FAMILIES[family][0]())


def test_a_log_does_not_look_like_tables() -> None:
    logs = LOG * 200 + (
        "node1:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x7fc9c4000000 recvbuff "
        "0x7fc9bc000000 count 33554432 datatype 7 op 0 root 0 comm 0x5631f0816b40 [nranks=1]\n"
        "node1:1:2 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto SIMPLE "
        "channel{Lo..Hi}={0..15}\n"
        "node1:1:2 [0] NCCL INFO   AllReduce |  14.4/ 0.0 |  14.4/   6.2 |\n"
        "node1:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 80 nNodes 10 localRanks 8 localRank 0\n"
        "NCCL version 2.20.3+cuda12.3\n"
    )
    assert not looks_like_tables(logs)
    assert tables_of(logs, "x") == []
    assert looks_like_tables(SLIDES.read_text())
    assert looks_like_tables(VALUES)


def test_a_log_around_a_table_leaves_it_whole() -> None:
    lines = modern().splitlines(keepends=True)
    noisy = "".join(line + LOG * 3 for line in lines)
    (table,) = tables_of(noisy, "x")
    (plain,) = tables_of(modern(), "x")
    assert [r.printed for r in table.readings] == [r.printed for r in plain.readings]


def test_rows_and_listing_say_what_was_found(slides: Sequence[Table]) -> None:
    found = [(table, validate(table)) for table in slides]
    flat = rows(found)
    assert [row["rows"] for row in flat] == [17] * 6 + [1] * 6 + [17, 3]
    assert (flat[0]["min_bytes"], flat[0]["max_bytes"]) == (2**16, 2**32)
    assert flat[5]["collective"] is None
    assert len({tuple(row) for row in flat}) == 1
    listing = "\n".join(line for table in slides for line in table_lines(table))
    for table in slides:
        assert f":{table.index}  {table.title[:60]}" in listing
    assert name_of(slides[1]).endswith("rccl.txt:2")
    assert "ranks: 16 (busbw/algbw is 1.875: 2(n-1)/n with 16 ranks)" in listing


def test_markup_in_a_title_is_printed_as_it_stands() -> None:
    (table,) = tables_of(f"Test :on: [/bold] of [red]\n\n{VALUES}", "x[/y]")
    assert "Test :on: [/bold] of [red]" in table_lines(table)[0]
