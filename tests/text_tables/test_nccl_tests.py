"""Text of every release of nccl-tests and rccl-tests is read to the same readings."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Table
from stepmark.text_tables import find, tables_of
from stepmark.text_tables.printed_figures import parse_number, rounding_error
from stepmark.text_tables.validate import validate

from .nccl_samples import (
    FAMILIES,
    HEAD,
    MODERN_RANK,
    PARAMETERS,
    SIZES,
    cputime,
    half,
    modern,
    row,
    time_s,
    version_2_9,
)

DATA = Path(__file__).parents[1] / "data"
REAL = sorted((DATA / "nccl-tests").glob("*.txt"))
PREFIXES = (
    "[0] ",
    "0: ",
    "00: ",
    "[1,0]<stdout>:",
    "[1,0]<stdout>: ",
    "[default0]:",
    "(RayTrainWorker pid=4711, ip=10.0.0.1) ",
    "2025-11-21T03:04:05.123456789Z ",
    "[2025-11-21 03:04:05] [rank0]: ",
    "node-1.cluster: ",
    "[host-1:4711] ",
    "[prterun-host-1-4711@1,0]<stdout>: ",
    "job-worker-0/pytorch | ",
)
LOG = "vm:2567:2580 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"


def one(text: str, file: str = "output.txt") -> Table:
    (table,) = tables_of(text, file)
    return table


def times(table: Table) -> dict[tuple[int | None, str], float | None]:
    return {
        (reading.size_bytes, reading.placement): reading.time_s for reading in table.readings
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_all_sizes_and_their_times(family: str) -> None:
    build, placements, tool = FAMILIES[family]
    table = one(build())
    assert table.tool == tool
    assert len(table.readings) == placements * len(SIZES)
    for reading in table.readings:
        assert reading.size_bytes is not None
        assert reading.printed is not None
        expected = time_s(reading.size_bytes, reading.placement == IN_PLACE)
        unit = 1e-3 if family == "1.x" else 1e-6
        assert reading.time_s == pytest.approx(
            expected, abs=rounding_error(reading.printed[0]) * unit
        )
        assert reading.count == reading.size_bytes // 4
        assert reading.dtype == "fp32"
    if family not in ("2.9 reduce", "2.9 broadcast", "2.9 all_gather"):
        assert (table.collective, table.num_ranks) == ("all_reduce", 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_any_header_are_read_alike(family: str) -> None:
    """Copies often keep the rows alone."""
    build, _, _ = FAMILIES[family]
    text = build()
    rows = [line for line in text.splitlines() if re.match(r"[|\s]*\d", line)]
    bare, whole = one("\n".join(rows)), one(text)
    if family != "1.x":  # milliseconds are said in the header alone
        assert [r.time_s for r in bare.readings] == [r.time_s for r in whole.readings]
    assert [r.printed for r in bare.readings] == [r.printed for r in whole.readings]


def test_redop_and_root_stand_where_the_release_prints_them() -> None:
    def leads(text: str) -> set[tuple[str, int | None]]:
        return {(reading.redop, reading.root) for reading in one(text).readings}

    assert leads(version_2_9()) == {("sum", None)}
    assert leads(version_2_9(root=True)) == {("sum", 0)}
    assert leads(version_2_9(redop=False)) == {("", None)}
    assert leads(version_2_9(redop=False, root=True)) == {("", 0)}
    assert leads(modern()) == {("sum", -1)}


def test_the_error_column_is_no_count_of_wrong_elements() -> None:
    assert {reading.num_wrong for reading in one(version_2_9()).readings} == {None}
    assert {reading.num_wrong for reading in one(modern()).readings} == {0}
    body = [row(size, "sum", "-1", wrong="1e+06") for size in SIZES]
    assert {reading.num_wrong for reading in one(modern(body)).readings} == {1_000_000}
    body = [row(size, "sum", "-1", wrong="N/A") for size in SIZES]
    assert {reading.num_wrong for reading in one(modern(body)).readings} == {None}


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_outputs_are_read_with_their_facts(path: Path) -> None:
    (table,) = find(path)
    assert (table.tool, table.version, table.num_ranks) == ("nccl-tests", "2.19.6", 8)
    assert table.num_ranks_from == "8 rank lines"
    assert table.method == "nccl-tests queued"
    assert len(table.readings) == 24
    rules = {finding.rule for finding in validate(table)}
    assert not rules - {"slow-outlier", "placement-ratio"}


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_ranks_are_found_from_the_figures_alone(path: Path) -> None:
    text = "\n".join(line for line in path.read_text().splitlines() if "Rank" not in line)
    table = one(text, path.name)
    assert table.num_ranks == 8
    assert re.search(r"8 x count elements|2\(n-1\)/n with 8 ranks", table.num_ranks_from)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_launchers_prefix_changes_nothing(prefix: str) -> None:
    text = modern()
    plain = one(text)
    marked = one("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert marked == plain


@pytest.mark.parametrize("after", [5, 9])
def test_a_row_printed_in_parts_has_the_launchers_tag_again(after: int) -> None:
    tag, lines = "[1,0]<stdout>:", []
    for line in modern().splitlines():
        words = line.split()
        is_row = len(words) == 13 and words[0].isdecimal()
        parts = ["  ".join(words[:after]), "  ".join(words[after:])] if is_row else [line]
        lines.append("".join(f"{tag}{part}" for part in parts))
    assert times(one("\n".join(lines))) == times(one(modern()))


def test_outputs_that_are_mixed_line_by_line_are_told_apart_by_their_tag() -> None:
    lines = [modern(ranks=1).splitlines(), modern(ranks=1).splitlines()]
    mixed = [
        f"[1,{tag}]<stdout>:{line}"
        for pair in zip(*lines, strict=True)
        for tag, line in enumerate(pair)
    ]
    tables = tables_of("\n".join(mixed), "x")
    assert [len(table.readings) for table in tables] == [2 * len(SIZES)] * 2


def test_rank_lines_that_repeat_a_rank_are_processes_that_run_alone() -> None:
    """The same, but without tags: all that is left is rank 0 twice."""
    twice = f"{MODERN_RANK.format(rank=0)}\n" * 2
    text = modern(ranks=0).replace("# Using devices\n", f"# Using devices\n{twice}")
    table = one(text)
    assert table.num_ranks == 1
    assert any("without MPI" in note for note in table.notes)


def test_a_split_counts_the_ranks_of_rank_zeros_group() -> None:
    text = modern()
    for rank in (1, 3, 5, 7):
        text = text.replace(f"Rank {rank:2} Group  0", f"Rank {rank:2} Group  1")
    table = one(text)
    assert table.num_ranks == 4
    assert table.num_ranks_from == "4 rank lines of group 0, of 8 in all"


def broken(text: str, cut: int, glued: bool) -> str:
    """Each row cut after `cut` figures by log lines, as the first call prints them."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#") or len(words) != 13:
            found.append(line)
            continue
        head, tail = "  ".join(words[: 5 + cut]), "   ".join(words[5 + cut :])
        found += [head + LOG, LOG, tail] if glued else [head, LOG, LOG, tail]
    return "\n".join(found) + "\n"


@pytest.mark.parametrize("glued", [False, True], ids=["new line", "same line"])
@pytest.mark.parametrize("cut", [0, 4])
def test_rows_that_logs_break_in_two_are_joined(cut: int, glued: bool) -> None:
    assert times(one(broken(modern(), cut, glued))) == times(one(modern()))


def test_a_row_cut_at_the_end_is_left_out_and_said() -> None:
    text = modern()
    last = text.index(f"{SIZES[-1]}  ") + 60
    table = one(text[:last])
    assert len(table.readings) == 2 * (len(SIZES) - 1)
    assert any("cut off" in note for note in table.notes)


@given(st.integers(0, len(modern())))
def test_any_beginning_of_a_file_gives_a_beginning_of_its_rows(length: int) -> None:
    whole, found = one(modern()), tables_of(modern()[:length], "output.txt")
    kept = [reading for table in found for reading in table.readings]
    for mine, theirs in zip(kept[:-2], whole.readings, strict=False):
        assert mine == theirs
    assert len(kept) <= len(whole.readings)


def test_types_operations_and_cycles_share_one_table() -> None:
    body = [
        row(size, redop, "-1").replace("float", dtype)
        for dtype in ("float", "half")
        for redop in ("sum", "max")
        for _ in range(3)
        for size in SIZES
    ]
    table = one(modern(body))
    assert len(table.readings) == 2 * len(body)
    assert {(r.dtype, r.redop) for r in table.readings} == {
        (dtype, redop) for dtype in ("fp32", "fp16") for redop in ("sum", "max")
    }
    assert {reading.cycle for reading in table.readings} == {0, 1, 2}
    keys = [(r.dtype, r.redop, r.cycle, r.size_bytes, r.placement) for r in table.readings]
    assert len(set(keys)) == len(keys)


def test_a_sweep_of_one_size_repeats_it_and_trimmed_sizes_do_not() -> None:
    same = one(modern([row(2**20, "sum", "-1")] * 4))
    assert [reading.cycle for reading in same.readings] == [0, 0, 1, 1, 2, 2, 3, 3]
    trimmed = one(modern([row(size, "none", "-1") for size in (0, 0, 0, 1024, 4096)]))
    assert {reading.cycle for reading in trimmed.readings} == {0}


@pytest.mark.parametrize(
    ("change", "method"),
    [
        (PARAMETERS, "nccl-tests queued"),
        (PARAMETERS.replace("graph: 0", "graph: 5"), "nccl-tests graph"),
        (PARAMETERS.replace("agg iters: 1", "agg iters: 4"), "nccl-tests queued, 4 per group"),
        (PARAMETERS.removesuffix(" graph: 0"), ""),
        (
            f"{PARAMETERS}\n# Blocking Enabled: wait for completion and barrier after each "
            "collective ",
            "nccl-tests blocking 1",
        ),
        (
            f"{PARAMETERS}\n# Blocking Enabled: wait after each inner iteration (-m), no "
            "barrier ",
            "nccl-tests blocking 2",
        ),
        (
            f"{PARAMETERS}\n# Blocking Enabled: wait and barrier after each outer iteration "
            "(-n); time excludes barrier ",
            "nccl-tests blocking 3",
        ),
    ],
)
def test_the_method_is_what_the_header_says_and_no_more(change: str, method: str) -> None:
    assert one(modern(parameters=change)).method == method


def test_the_time_to_enqueue_is_no_time_of_the_operation() -> None:
    table = one(cputime())
    assert {reading.time_s for reading in table.readings} == {None}
    assert table.unit == "busbw"
    assert table.readings[-1].rate == table.readings[-1].busbw_bytes_per_s
    assert table.method.endswith("time to enqueue")
    assert not [f for f in validate(table) if f.rule in ("algbw-time", "busbw-factor")]


def test_bandwidth_that_was_rounded_to_zero_is_below_half_a_digit() -> None:
    table = one(modern([row(size, "sum", "-1") for size in (4, 8, 16, 2**20)]))
    small = table.readings[0]
    assert small.printed is not None
    assert small.printed[2] == "0.00"
    assert (small.rate, small.busbw_bytes_per_s, small.rate_below) == (None, None, 0.005e9)
    body = [row(size, "sum", "-1", factor=0.0) for size in SIZES]
    alone = one(modern(body, parameters=PARAMETERS.replace("nGpus 8", "nGpus 1"), ranks=1))
    assert {reading.busbw_bytes_per_s for reading in alone.readings} == {0.0}
    assert {reading.rate_below for reading in alone.readings} == {None}


@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "N/A", "1e999"])
def test_a_figure_that_is_none_leaves_the_row_and_no_number(text: str) -> None:
    first = "  ".join(
        ["1024", "256", "float", "sum", "-1", *[text] * 3, "0", *half(1024, True)]
    )
    table = one(modern([first, row(4096, "sum", "-1")]))
    assert [(r.size_bytes, r.placement) for r in table.readings] == [
        (1024, IN_PLACE),
        (4096, OUT_OF_PLACE),
        (4096, IN_PLACE),
    ]


def test_exponents_of_narrow_columns_are_numbers() -> None:
    line = (
        "1073741824  268435456  float  sum  -1  1.0e+07  0.11  0.19  0  10737418  0.10  0.17  0"
    )
    table = one(modern([line]))
    assert table.readings[0].time_s == pytest.approx(10.0)
    assert not [f for f in validate(table) if f.rule == "algbw-time"]


def test_several_outputs_are_several_tables() -> None:
    text = modern() + modern(name="all_gather_perf") + version_2_9()
    tables = tables_of(text, "x")
    assert [table.collective for table in tables] == ["all_reduce", "all_gather", "all_reduce"]
    assert [table.index for table in tables] == [1, 2, 3]
    assert [len(table.readings) for table in tables] == [2 * len(SIZES)] * 3


def test_what_is_not_known_is_not_guessed() -> None:
    body = [row(size, "none", "-1", factor=1.0) for size in SIZES]
    table = one("\n".join(body), "x")
    assert (table.collective, table.num_ranks) == ("", None)
    assert sum("is not known" in note for note in table.notes) == 2


@pytest.mark.parametrize(
    ("lead", "parts", "factor", "collective", "num_ranks"),
    [
        (("sum", "-1"), 1, 1.75, "all_reduce", 8),
        (("sum", "-1"), 1, 1.0, "all_reduce", 2),
        (("sum", "-1"), 8, 0.875, "reduce_scatter", 8),
        (("sum", "0"), 1, 1.0, "reduce", None),
        (("none", "-1"), 8, 0.875, "", 8),
        (("none", "0"), 1, 1.0, "", None),
    ],
)
def test_figures_that_leave_one_collective_name_it(
    lead: tuple[str, str], parts: int, factor: float, collective: str, num_ranks: int | None
) -> None:
    body = [row(size, *lead, parts=parts, factor=factor) for size in SIZES]
    table = one("\n".join(body), "x")
    assert (table.collective, table.num_ranks) == (collective, num_ranks)
    assert bool(table.collective_from) == bool(collective)
    assert bool(table.num_ranks_from) == bool(num_ranks)


@settings(max_examples=60)
@given(st.integers(2, 48))
def test_the_ranks_of_an_all_reduce_follow_from_its_bandwidths(num_ranks: int) -> None:
    factor = 2 * (num_ranks - 1) / num_ranks
    body = [row(2**power, "sum", "-1", factor=factor) for power in range(20, 34)]
    assert one("\n".join(body), "x").num_ranks == num_ranks


def test_too_many_ranks_for_the_printed_digits_stay_unknown() -> None:
    factor = 2 * 4095 / 4096
    table = one("\n".join(row(2**p, "sum", "-1", factor=factor) for p in range(20, 26)), "x")
    assert (table.collective, table.num_ranks) == ("all_reduce", None)
    assert any("2(n-1)/n fits" in note for note in table.notes)


def test_rows_of_two_sizes_of_job_name_neither() -> None:
    body = [row(2**p, "sum", "-1", factor=2 * 7 / 8) for p in range(20, 30)]
    mixed = [row(2**p, "sum", "-1", factor=2 * 15 / 16) for p in range(20, 30)]
    assert one("all_reduce_perf -g 1\n" + "\n".join(body), "x").num_ranks == 8
    assert one("all_reduce_perf -g 1\n" + "\n".join(body + mixed), "x").num_ranks is None
    nearly_all = [*body, row(2**30, "sum", "-1", factor=2 * 15 / 16)]
    assert one("all_reduce_perf -g 1\n" + "\n".join(nearly_all), "x").num_ranks == 8


def test_rows_behind_a_footer_are_another_output() -> None:
    bare = "\n".join(row(size, "sum", "-1") for size in SIZES[:3])
    tables = tables_of(f"{modern()}{bare}\n", "x")
    assert [len(table.readings) for table in tables] == [2 * len(SIZES), 6]


def test_a_title_is_no_place_for_the_environment() -> None:
    command = "WANDB_API_KEY=s3cret mpirun -x TOKEN=s3cret ./build/all_reduce_perf -b 8 -g 8"
    table = one(command + "\n" + HEAD + "\n" + "\n".join(row(s, "sum", "-1") for s in SIZES))
    assert table.title == "all_reduce_perf -b 8 -g 8"
    assert "s3cret" not in repr(table)


@pytest.mark.parametrize("text", ["0.47", "13993", "1.0e+07", "1002721", ".5", "3e-07"])
def test_half_a_unit_is_half_of_the_last_digit(text: str) -> None:
    value = parse_number(text)
    assert value is not None
    mantissa, _, exponent = text.partition("e")
    scale = 10.0 ** int(exponent or 0)
    step = value + 2 * rounding_error(text)
    digits = len(mantissa.partition(".")[2])
    assert round(step / scale, digits) == pytest.approx(
        round(float(mantissa) + 10.0**-digits, digits)
    )
