"""Tables of other benchmarks of communication, in the layouts of their sources."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.comm_records import comm_case, comm_run, flat

from stepmark.collectives.peer_formats import param_comms
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.reading import Table
from stepmark.ground.units import GB, GIB
from stepmark.model.collectives import Collective
from stepmark.text_tables import looks_like_tables, read_tables, tables_of
from stepmark.text_tables.validate import validate

MSCCLPP_HEAD = """\
# minBytes 1048576 maxBytes 1073741824 step: 1024(factor) warmup iters: 10 iters: 10
#
# Using devices
#  Rank  0 Pid  85576 on host-0 device  0 [0001:00:00.0] NVIDIA A100-SXM4-80GB
#  Rank  1 Pid  85577 on host-1 device  0 [0001:00:00.0] NVIDIA A100-SXM4-80GB
#
#                                        in-place                       out-of-place
#       size         count     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)     (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""


def mscclpp(blanks: int) -> str:
    """Rows as setw prints them; `blanks` stand where the in-place figures would."""
    rows = [
        (1048576, 262144, "27.96", "37.50", "37.50"),
        (1073741824, 268435456, "23275", "46.13", "46.13"),
    ]
    lines = [
        f"{size:12}  {count:12}{'':{blanks}}  {time:>7}  {algbw:>6}  {busbw:>6}  {0:5}"
        for size, count, time, algbw, busbw in rows
    ]
    return MSCCLPP_HEAD + "\n".join(lines) + "\n\n# Out of bounds values : 0 OK\n"


PARAM_WIDTHS = (18, 18, 18, 12, 12, 12, 12, 15, 12, 20)


def param_line(name: str, *cells: str) -> str:
    padded = (f"{cell:>{width}}" for cell, width in zip(cells, PARAM_WIDTHS, strict=True))
    return f"\t{name}{''.join(padded)}\n"


PARAM = "".join(
    (
        "\t MPI environment: {'world_size': 8, 'global_rank': 0, 'local_rank': 0}\n\n",
        param_line(
            *("COMMS-RES                       ", "total-size (B)", "nElementsPerRank"),
            *("Time(us):p50", "p75", "p95", "Min", "Max", "AlgBW(GB/s)", "BusBW(GB/s)"),
            "TotalTime(us):p50",
        ),
        param_line(
            *("COMMS-RES-all_reduce-float32", "1048576", "262144", "51.2", "52.2", "53.8"),
            *("49.7", "61.4", "20.480", "35.840", "0.0"),
        ),
        param_line(
            *("COMMS-RES-all_reduce-float32", "67108864", "16777216", "520.1", "530.5"),
            *("546.1", "504.5", "624.1", "129.031", "225.804", "0.0"),
        ),
    )
)
# Formats of printPreamble and reportBenchTimePt2Pt.
PAIR_HEADING = "{:>40}{:>20}{:>10}{:>10}{:>25}{:>10}{:>10}{:>15}{:>15}{:>18}{:>18}"
PAIR_ROW = "{:>15}{:>20}{:>10}{:>10}{:>25}{:>10}{:>10}{:>15}{:>15}{:>18}{:>18}"
PAIR_NAMES = (
    *("size (B)", "pingLatency(us):p50", "p75", "p95", "pingPongLatency(us):p50", "p75", "p95"),
    *("avgUniBW(GB/s)", "avgBiBW(GB/s)", "totalUniBW(GB/s)", "totalBiBW(GB/s)"),
)
PAIR_FIGURES = (
    *(268435456, "620.1", "640.2", "660.3", "1240.5", "1250.0", "1260.0"),
    *("433.100", "611.200", "866.200", "0.000"),
)
PAIRS = (
    "\t MPI environment: {'world_size': 4, 'global_rank': 0, 'local_rank': 0}\n\n"
    f"\tCOMMS-RES{PAIR_HEADING.format(*PAIR_NAMES)}\n"
    f"\tCOMMS-RES-pt2pt-float32{PAIR_ROW.format(*PAIR_FIGURES)}\n"
)
OSU = """\

# OSU MPI-CUDA Allreduce Latency Test v7.3
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
1048576                45.10             40.00             50.20         100
16777216             8630.58           8619.50           8642.46         10
"""
BENCH = """\
The average bandwidth of all_reduce over 4 ranks (5 warmups / 20 trials):

| payload |    busbw   |    algbw   |
| ------: | ---------: | ---------: |
|   32KiB |   1.18GBps |   0.79GBps |
|    2GiB | 360.00GBps | 240.00GBps |

Legend: 1KiB = 2**10 Bytes, 1MiB = 2**20 Bytes, 1GiB = 2**30 Bytes
"""
# The first releases with a row per payload divided by 2^30 and printed GBps.
BENCH_OF_JANUARY_2025 = BENCH.replace("iB |", "B |").replace("|   32KB", "|    32KB")
ONE_PAYLOAD = """\
The average bandwidth of all_reduce with a 4.0GB payload (5 trials, 16 ranks):
 algbw: 176.590 GBps (1412.7 Gbps)
 busbw: 331.106 GBps (2648.8 Gbps)
"""


def deepspeed_line(*cells: object) -> str:
    return "".join(f"{cell!s:<20}" for cell in cells)


DEEPSPEED = "\n".join(
    (
        "[2023-06-20 10:00:00,100] [INFO] [logging.py:96:log_dist] [Rank 0] "
        + deepspeed_line(
            *("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)"),
            *("tput_avg (Gbps)", "busbw_avg (Gbps)"),
        ),
        "broadcast",
        deepspeed_line(" ", "2.0 KB", 146, "11.12", "0.08", "0.43", "0.41"),
        deepspeed_line(" ", "98.25 MB", 1, "8317.12", "8317.12", "0.20", "0.19"),
        "reduce_scatter_tensor | [Caller Func: average_tensor]",
        deepspeed_line(" ", "678.86 MB", 40, "602.29", "9.69", "1468.06", "1376.31"),
        "_______________________________",
        "Breakdown with straggler effect",
        "-------------------------------",
        deepspeed_line(
            *("Comm. Op", "Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)"),
            *("Avg comm lat(ms)", "Avg straggler(ms)"),
        ),
        "broadcast",
        deepspeed_line(" ", "2.0 KB", 146, "9.12", "2.00", "0.06", "0.02"),
        "",
    )
)
TEXTS = {
    "mscclpp": mscclpp(33),
    "PARAM": PARAM,
    "PARAM's pairs": PAIRS,
    "OSU": OSU,
    "bench": BENCH,
    "bench of January 2025": BENCH_OF_JANUARY_2025,
    "one payload": ONE_PAYLOAD,
    "DeepSpeed": DEEPSPEED,
}


def one(text: str) -> Table:
    (table,) = tables_of(text, "x")
    return table


@pytest.mark.parametrize(("blanks", "placement"), [(0, "in-place"), (33, "out-of-place")])
def test_mscclpp_figures_belong_to_the_headings_above_them(blanks: int, placement: str) -> None:
    table = one(mscclpp(blanks))
    assert (table.tool, table.num_ranks, table.num_ranks_from) == (
        "mscclpp-test",
        2,
        "2 rank lines",
    )
    assert table.method == "mscclpp-test graph"
    last = table.readings[-1]
    assert (last.size_bytes, last.placement, last.num_wrong) == (2**30, placement, 0)
    assert last.time_s == pytest.approx(23275e-6)
    assert (last.algbw_bytes_per_s, last.busbw_bytes_per_s) == (46.13 * GB, 46.13 * GB)


def test_mscclpp_figures_without_columns_have_no_placement() -> None:
    head, _, rest = mscclpp(33).partition("  1048576")
    rows = "\n".join("\t".join(line.split()) for line in f"1048576{rest}".splitlines())
    assert {each.placement for each in one(f"{head.rstrip()}\n{rows}\n").readings} == {""}


def test_mscclpp_rows_with_both_placements_are_in_the_order_of_their_headings() -> None:
    text = MSCCLPP_HEAD + "1024 256 10.00 0.10 0.10 0 20.00 0.05 0.05 3\n"
    first, second = one(text).readings
    assert (first.placement, first.time_s) == ("in-place", pytest.approx(10e-6))
    assert (second.placement, second.num_wrong) == ("out-of-place", 3)
    assert "wrong-values" in {finding.rule for finding in validate(one(text))}


def test_param_rows_have_size_median_and_bandwidths() -> None:
    table = one(PARAM)
    assert (table.tool, table.collective, table.num_ranks) == ("PARAM", "all_reduce", 8)
    assert table.num_ranks_from == "world_size of its environment"
    first, last = table.readings
    assert (first.size_bytes, first.count, first.dtype) == (2**20, 2**18, DType.FP32)
    assert [each.busbw_bytes_per_s for each in (first, last)] == [35.84 * GB, 225.804 * GB]
    assert last.time_s == pytest.approx(520.1e-6)
    assert validate(table) == []


def test_a_heading_of_param_without_figures_moves_none() -> None:
    heading = "nElementsPerRank   nElementsPairPerRank"
    text = PARAM.replace("nElementsPerRank", heading).replace("Time(us)", "Latency(us)", 1)
    assert one(text).readings == one(PARAM).readings


def test_param_rows_of_other_tables_are_left_out() -> None:
    cut = "\tCOMMS-RES-all_reduce-float32        1073741824         41.187      77.226\n"
    table = one(PARAM + cut)
    assert len(table.readings) == 2
    assert table.notes == ("line 6: a row that does not fit the headings: left out",)
    assert tables_of(cut, "x") == []  # columns are not guessed


def test_param_pairs_have_a_column_per_figure() -> None:
    table = one(PAIRS)
    assert (table.tool, table.collective, table.num_ranks) == ("PARAM", "pt2pt", 4)
    assert {(each.size_bytes, each.dtype) for each in table.readings} == {(2**28, DType.FP32)}
    figures = {each.column: each.time_s or each.rate for each in table.readings}
    assert figures == {
        "pingLatency(us):p50": pytest.approx(620.1e-6),
        "pingPongLatency(us):p50": pytest.approx(1240.5e-6),
        "avgUniBW(GB/s)": pytest.approx(433.1 * GB),
        "avgBiBW(GB/s)": pytest.approx(611.2 * GB),
        "totalUniBW(GB/s)": pytest.approx(866.2 * GB),
        "totalBiBW(GB/s)": None,
    }
    assert table.columns == tuple(figures)
    assert table.readings[-1].rate_below == pytest.approx(0.0005 * GB)


@pytest.mark.parametrize(
    "text",
    [
        PAIRS.replace("611.200", ""),
        "\tCOMMS-RES-QUANT\t size (B)  nElementsPerRank  P95 Latency(us): Quant  Comms\n"
        "\tCOMMS-RES-QUANT-all_reduce-float32\t 1024  256  1.0  12.3\n",
        OSU.replace("Avg Latency(us)", "    Overall(us)").replace("Min Latency", "Compute"),
    ],
    ids=["lost figure", "quantized", "OSU"],
)
def test_rows_that_fit_no_heading_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "output"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read: no row fits its headings"):
        read_tables(path).check()


@given(
    st.sampled_from([Collective.ALL_REDUCE, Collective.ALL_TO_ALL, Collective.ALL_GATHER]),
    st.sampled_from([DType.BF16, DType.FP32, DType.FP8_E4M3]),
    st.integers(10, 32),
    st.floats(20e-6, 10.0),
)
def test_what_stepmark_writes_as_param_is_read_back(
    collective: Collective, dtype: DType, power: int, seconds: float
) -> None:
    case = comm_case(collective, 2**power, dtype)
    (text,) = param_comms([flat(case, seconds)], comm_run()).values()
    table = one(text)
    (reading,) = table.readings
    assert table.collective == collective
    assert (reading.size_bytes, reading.count) == (case.message_bytes, case.count)
    assert reading.dtype == dtype
    assert reading.time_s == pytest.approx(seconds, abs=0.05001e-6)
    algbw = case.message_bytes / seconds
    assert (reading.algbw_bytes_per_s or 0) == pytest.approx(algbw, abs=0.00051 * GB)
    busbw = algbw * case.busbw_factor
    assert (reading.busbw_bytes_per_s or 0) == pytest.approx(busbw, abs=0.00051 * GB)


def test_osu_times_are_averages_over_ranks() -> None:
    table = one(OSU)
    assert (table.tool, table.version, table.collective) == ("OSU", "7.3", "all_reduce")
    assert (table.method, table.num_ranks) == ("OSU MPI-CUDA", None)
    first = table.readings[0]
    assert (first.size_bytes, first.dtype) == (2**20, DType.FP32)
    assert first.time_s == pytest.approx(45.1e-6)


@pytest.mark.parametrize(
    ("title", "heading", "rate", "unit"),
    [
        ("Bandwidth", "Bandwidth (MB/s)", 279573.25e6, "busbw"),
        ("Bi-Directional Bandwidth", "Bandwidth (MB/s)", 279573.25e6, "GB/s"),
    ],
)
def test_osu_megabytes_are_decimal(title: str, heading: str, rate: float, unit: str) -> None:
    text = f"# OSU MPI-CUDA {title} Test v7.5\n# Size      {heading}\n268435456   279573.25\n"
    table = one(text)
    assert (table.unit, table.readings[0].rate) == (unit, pytest.approx(rate))
    assert table.collective == ("p2p" if unit == "busbw" else "")


def test_osu_sizes_of_one_rank_are_labels() -> None:
    table = one(OSU.replace("Allreduce", "Allgather"))
    assert {reading.size_bytes for reading in table.readings} == {None}
    assert table.readings[0].label == "size 1048576"
    assert any("part of one rank" in note for note in table.notes)


def test_a_failed_validation_of_osu_is_a_problem() -> None:
    text = (
        "# OSU MPI-CUDA Bandwidth Test v7.5\n# Size      Bandwidth (MB/s)        Validation\n"
        "1                       0.92              Pass\n"
        "2                       1.80              Fail\n"
    )
    assert [finding.rule for finding in validate(one(text))] == ["wrong-values"]
    assert validate(one(text.replace("Fail", "Pass"))) == []


def test_osu_columns_that_are_no_latency_give_no_table() -> None:
    text = OSU.replace("Avg Latency(us)", "    Overall(us)")
    assert tables_of(text.replace("Min Latency", "Compute"), "x") == []


def test_all_reduce_bench_has_bandwidths_of_binary_sizes() -> None:
    table = one(BENCH)
    assert (table.tool, table.collective, table.num_ranks) == (
        "all_reduce_bench.py",
        "all_reduce",
        4,
    )
    last = table.readings[-1]
    assert (last.size_bytes, last.rate, last.algbw_bytes_per_s) == (2**31, 360 * GB, 240 * GB)
    assert validate(table) == []


def test_releases_of_all_reduce_bench_that_print_kb_have_binary_rates() -> None:
    table = one(BENCH_OF_JANUARY_2025)
    last = table.readings[-1]
    assert (last.size_bytes, last.rate, last.algbw_bytes_per_s) == (2**31, 360 * GIB, 240 * GIB)
    assert [note for note in table.notes if "2^30" in note] == list(table.notes)
    assert validate(table) == []
    assert one(BENCH).notes == ()


def test_the_earlier_lines_of_all_reduce_bench_have_a_decimal_size() -> None:
    table = one(ONE_PAYLOAD)
    (reading,) = table.readings
    assert (table.num_ranks, reading.size_bytes, reading.rate) == (16, 4 * 10**9, 331.106 * GB)


def test_deepspeed_sizes_are_labels_with_their_calls() -> None:
    summary, stragglers = tables_of(DEEPSPEED, "x")
    found = [
        (each.label, each.column, each.num_calls, each.time_s)
        for each in summary.readings
        if each.column == "average"
    ]
    reduce_scatter = "reduce_scatter_tensor | [Caller Func: average_tensor] 678.86 MB"
    assert found == [
        ("broadcast 2.0 KB", "average", 146, pytest.approx(8e-5)),
        ("broadcast 98.25 MB", "average", 1, pytest.approx(8.31712)),
        (reduce_scatter, "average", 40, pytest.approx(9.69e-3)),
    ]
    rates = [each.busbw_bytes_per_s for each in summary.readings[::2]]
    assert rates == [0.41e9 / 8, 0.19e9 / 8, None]  # Gbit/s; versions differ in the last
    columns = {each.column: each.time_s for each in stragglers.readings}
    assert columns == {
        "average": pytest.approx(6e-5),
        "total": pytest.approx(9.12e-3),
        "average straggler": pytest.approx(2e-5),
        "total straggler": pytest.approx(2e-3),
    }


def windows(text: str) -> str:
    return text.replace("\n", "\r\n")


def marked(text: str) -> str:
    return "".join(f"[1,0]<stdout>:{line}\n" for line in text.splitlines())


def labelled(text: str) -> str:
    return "".join(f"0: {line}\n" for line in text.splitlines())


def between_logs(text: str) -> str:
    log = "vm:2567:2580 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
    return "".join(f"{line}\n{log}\n" for line in text.splitlines())


def figures(text: str) -> list[tuple[object, ...]]:
    return [
        (*each.measurement, each.time_s, each.rate, each.busbw_bytes_per_s)
        for table in tables_of(text, "x")
        for each in table.readings
    ]


@pytest.mark.parametrize("change", [windows, marked, labelled, between_logs])
@pytest.mark.parametrize("name", TEXTS)
def test_launchers_logs_and_line_ends_change_no_figure(
    name: str, change: Callable[[str], str]
) -> None:
    assert figures(TEXTS[name])
    assert figures(change(TEXTS[name])) == figures(TEXTS[name])


@pytest.mark.parametrize("name", TEXTS)
def test_the_beginning_of_a_file_shows_that_it_has_a_table(name: str) -> None:
    assert looks_like_tables(TEXTS[name])


@given(st.sampled_from(list(TEXTS)), st.floats(0, 1))
def test_a_cut_text_has_no_figure_that_the_whole_lacks(name: str, share: float) -> None:
    """A last number that lost digits is the only one that a cut can change."""
    text = TEXTS[name]
    whole, found = figures(text), figures(text[: int(share * len(text))])
    assert all(each in whole for each in found[:-4])


@given(
    st.sampled_from(list(TEXTS)), st.integers(0, 10**6), st.sampled_from(["9", "x", "\t", ""])
)
def test_a_damaged_text_ends_in_no_exception(name: str, at: int, sign: str) -> None:
    text = TEXTS[name]
    place = at % len(text)
    for table in tables_of(text[:place] + sign + text[place + 1 :], "x"):
        validate(table)
