import gzip
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.job_logs.log_sources import collect
from stepmark.text_tables.profiler_table import DEVICE_WORK, ProfilerTable, RowKind
from stepmark.text_tables.profiler_tables_verb import (
    looks_like_profiler_table,
    read_tables,
    run_table,
)
from stepmark.text_tables.profiler_text import DAMAGED

DATA = Path(__file__).parents[1] / "data" / "profiler-tables"
SLIDES = Path(__file__).parents[2] / "examples" / "frontier-profiler-table.txt"
MS = 1e6
Truth = list[dict[str, object]]


@pytest.fixture(scope="module")
def slides() -> list[ProfilerTable]:
    return read_tables(SLIDES)


def truth_of(name: str) -> Truth:
    truth: Truth = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return truth


def device_us(truth: Truth, words: str = "") -> float:
    """Return the device time of kernels and copies by the profiler's own numbers."""
    return sum(
        float(str(event["self_dev"]))
        for event in truth
        if event["device"] != "CPU" and not event["note"] and words in str(event["name"])
    )


def written(path: Path, text: str) -> Path:
    file = path / "table.txt"
    file.write_text(text)
    return file


def rules(table: ProfilerTable) -> Counter[str]:
    return Counter(flag.rule for flag in table.flags)


def test_gpt_j_is_communication_bound(slides: list[ProfilerTable]) -> None:
    table = slides[0]
    answer = table.communication
    assert (len(table.rows), table.columns["self_device"]) == (20, "Self CUDA")
    assert answer.bound is True
    # 6478.273 s of record_param_comms less 6465.912 s of markers, each printed to 1 ms.
    assert answer.low_ns == pytest.approx(12.360e9, abs=1e3)
    # 100 % is 6465.912 / 0.9978 s within half a hundredth of a percent, less the markers.
    assert 13.98e9 < (answer.device_low_ns or 0) < 14.1e9
    assert 14.5e9 < (answer.device_high_ns or 0) < 14.6e9
    assert answer.high_ns == answer.device_high_ns
    assert answer.share_low == pytest.approx(0.848, abs=0.001)
    assert answer.reasons[2].startswith("at least 10.14 s of it is beside no other kernel")


def test_big_bird_is_not_communication_bound(slides: list[ProfilerTable]) -> None:
    answer = slides[1].communication
    assert answer.bound is False
    assert answer.low_ns == 0
    assert answer.high_ns == pytest.approx(316.4665 * MS)  # the last row, plus its rounding
    assert answer.share_high == pytest.approx(0.0799, abs=0.0001)
    assert any("down to 316.466ms" in reason for reason in answer.reasons)
    assert any("leaves at most 754.4 ms" in reason for reason in answer.reasons)
    assert "save at most 8.2% of the steps, which take 3.845 s" in answer.reasons[-1]


def test_impossible_figures_of_gpt_j(slides: list[ProfilerTable]) -> None:
    table = slides[0]
    assert rules(table) == {
        "marker": 1,
        "host-call": 7,
        "over-all": 1,
        "concurrent": 13,
        "negative": 1,
    }
    flagged = {(flag.rule, flag.row, flag.printed) for flag in table.flags}
    assert ("host-call", "hipLaunchKernel", "883.350s") in flagged
    assert ("negative", "aten::item", "-233.000us") in flagged
    assert ("over-all", "record_param_comms", "7400.400s") in flagged
    assert ("concurrent", "record_param_comms", "6478.273s") in flagged
    lines = SLIDES.read_text().split("\n")
    assert all(flag.printed in lines[flag.line - 1] for flag in table.flags)
    assert rules(slides[1]) == {"host-call": 1}


def test_perftools_of_the_slides(slides: list[ProfilerTable]) -> None:
    by_function, by_size = slides[2:]
    rows = {row.name: row for row in by_function.rows}
    assert len(by_function.rows) == 12
    assert rows["examples/distributed/FSDP/T5_training.py"].value("events") == 1181
    assert rows["python.to"].value("events") == 15  # named on the line below
    # One empty cell too many.
    assert rows["python.validation"].value("acc_time") == 39.16e9
    assert rows["python.validation"].value("events") == 213_526
    assert by_function.rows[4].value("time_pct") == 6.9  # "3.6.9%": a bar became a point
    (flag,) = by_function.flags
    assert (flag.rule, flag.row, flag.printed) == ("percent", "python.train", "295.79")
    assert by_function.communication.bound is None
    assert by_function.communication.share_low == pytest.approx(0.1776, abs=1e-4)

    total, train = by_size.rows[:2]
    assert total.value("copy_in") == 854.88 * 2**20
    edges = ("0", "16", "256", "4KiB", "1MiB", "16MiB")
    assert [total.value(f"HtoA_{edge}") for edge in edges] == [58, 0, 80, 448, 192, 1]
    assert (total.value("AtoH_0"), total.value("AtoA_1MiB")) == (6121.2, 25)
    assert (train.value("AtoH_0"), train.value("events")) == (6000, 1_286_371)
    assert by_size.flags == ()


def test_perftools_checks_find_wrong_figures(tmp_path: Path) -> None:
    text = SLIDES.read_text().replace("20.3%\t38.945723", "20.3%\t83.945723")
    text = text.replace("\t4.57\t8.0\t0.0\t16.0\t448.0", "\t4.57\t8.0\t0.0\t16.0")
    by_size = read_tables(written(tmp_path, text))[3]
    assert rules(by_size) == {"percent": 1, DAMAGED: 1}
    assert by_size.communication.low_ns is None


BARS = """
Table 2:  Time and Bytes Transferred for Accelerator Regions

   Host |    Host |    Acc |  Acc |  Acc Copy | Acc Copy | HtoA |  4KiB<= | Events |Function
  Time% |    Time |  Time% | Time |        In |      Out |CpySz |    HtoA |        | PE=HIDE
        |         |        |      | (MiBytes) |(MiBytes) |  <16 |   CpySz |        |
        |         |        |      |           |          |Count |  <64KiB |        |
        |         |        |      |           |          |      |   Count |        |

 100.0% | 10.5000 | 100.0% | 8.00 |     3,840 |     1.50 |  2.0 | 100,000 |    216 |Total
|----------------------------------------------------------------------------------------
|  61.5% |  6.4575 |  75.0% | 6.00 |     3,840 |     1.50 |  2.0 | 100,000 |    204 |main
||---------------------------------------------------------------------------------------
||  50.0% |  5.2500 |  25.0% | 2.00 |        -- |       -- |   -- |      -- |  100 |nccl.send
3|  50.0% |  5.2500 |  25.0% | 2.00 |        -- |       -- |   -- |      -- |  100 |line.20
|========================================================================================
"""


def test_perftools_with_bars(tmp_path: Path) -> None:
    (table,) = read_tables(written(tmp_path, BARS))
    assert list(table.columns) == [
        *("time_pct", "time", "acc_time_pct", "acc_time", "copy_in", "copy_out"),
        *("HtoA_0", "HtoA_4KiB", "events"),
    ]
    assert [row.name for row in table.rows] == ["Total", "main", "nccl.send", "line.20"]
    assert table.rows[0].value("HtoA_4KiB") == 100_000
    assert table.rows[2].value("copy_in") is None
    assert table.flags == ()
    assert table.communication.low_ns == pytest.approx(2e9, abs=6e6)


@pytest.mark.parametrize("name", ["h100", "h100-memory", "h200-fsdp8"])
def test_tables_of_torch_agree_with_its_numbers(name: str) -> None:
    truth = truth_of(name)
    work = device_us(truth)
    for table in read_tables(DATA / f"{name}.txt.gz"):
        assert DAMAGED not in rules(table)
        assert table.totals["self_device"].value == pytest.approx(work * 1e3, abs=500)
        waiting = Counter(
            (str(event["name"])[:20], event["count"], round(float(str(event["self_dev"])), 3))
            for event in truth
        )
        for row in table.rows:
            own = row.figures["self_device"]
            keys = [
                key
                for key in waiting
                if key[0] == row.name[:20]
                and key[1] == row.value("calls")
                and own.low <= key[2] * 1e3 + 1
                and key[2] * 1e3 - 1 <= own.high
            ]
            assert keys, row
            waiting[keys[0]] -= 1
            assert waiting[keys[0]] >= 0


def test_communication_of_real_jobs_lies_within_the_bounds() -> None:
    for name, communication_us in (("h100", 66.945), ("h200-fsdp8", 296_302.548)):
        device_ns = device_us(truth_of(name)) * 1e3
        for table in read_tables(DATA / f"{name}.txt.gz"):
            answer = table.communication
            assert answer.low_ns is not None
            assert answer.high_ns is not None
            assert answer.low_ns - 1 <= communication_us * 1e3 <= answer.high_ns + 1
            assert (answer.device_low_ns or 0) - 600 <= device_ns
            assert device_ns <= (answer.device_high_ns or 0) + 600
            assert answer.bound in (None, communication_us * 2e3 > device_ns)
    complete = read_tables(DATA / "h200-fsdp8.txt.gz")[2].communication
    assert complete.share_high == pytest.approx(0.557, abs=0.001)


def test_rows_of_a_complete_table_count_device_time_once() -> None:
    (table,) = read_tables(DATA / "h100-memory.txt.gz")
    own = sum(row.value("self_device") or 0 for row in table.rows if row.kind in DEVICE_WORK)
    assert own == pytest.approx(table.totals["self_device"].value, abs=1000)
    by_name = {row.name: row for row in table.rows}
    assert by_name["Optimizer.step#AdamW.step"].kind is RowKind.ANNOTATION
    assert by_name["Memcpy DtoD (Device -> Device)"].kind is RowKind.COPY


def test_calls_of_the_runtime_are_flagged_in_todays_tables() -> None:
    table = read_tables(DATA / "h100.txt.gz")[2]
    names = {flag.row for flag in table.flags if flag.rule == "host-call"}
    assert names == {
        *("cudaEventSynchronize", "cudaEventRecordWithFlags", "cudaEventQuery"),
        *("cudaStreamIsCapturing", "INVALID"),
    }
    assert rules(table).keys() == {"host-call"}


@pytest.mark.parametrize("unit", [None, "s", "ms"])
def test_a_live_table(unit: str | None, tmp_path: Path) -> None:
    """Columns that are not read, and source stacks on lines of their own."""
    torch = pytest.importorskip("torch")
    profiler = torch.profiler
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
        with_stack=True,
        experimental_config=verbose,
    ) as profile:
        left = torch.randn(64, 64)
        for _ in range(3):
            left = (left @ left).relu().softmax(0)
    averages = profile.key_averages(group_by_input_shape=True, group_by_stack_n=3)
    text = averages.table(sort_by="cpu_time_total", row_limit=-1, time_unit=unit)
    (table,) = read_tables(written(tmp_path, text))
    assert not rules(table), table.flags
    assert len(table.rows) == len(averages)
    expected = sorted(averages, key=lambda event: event.cpu_time_total, reverse=True)
    half = {None: 500, "ms": 500, "s": 500_000}[unit]
    for row, event in zip(table.rows, expected, strict=True):
        assert event.key.startswith(row.name.removesuffix("..."))
        assert row.value("calls") == event.count
        assert row.value("cpu") == pytest.approx(event.cpu_time_total * 1e3, abs=half)
        assert row.value("self_cpu") == pytest.approx(event.self_cpu_time_total * 1e3, abs=half)
    total = sum(event.self_cpu_time_total for event in averages) * 1e3
    assert table.totals["self_cpu"].value == pytest.approx(total, abs=half)
    assert table.communication.bound is None
    assert table.communication.reasons[0].startswith("it has no Self CUDA (or of another")


def test_lost_rows_leave_no_answer(tmp_path: Path) -> None:
    lines = SLIDES.read_text().split("\n")
    place = next(n for n, line in enumerate(lines) if line.startswith("aten::mul"))
    lines[place - 3] = lines[place - 3][:40]
    table = read_tables(written(tmp_path, "\n".join(lines)))[1]
    assert rules(table)[DAMAGED] == 1
    assert (table.communication.bound, table.communication.high_ns) == (None, None)


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("\t944.254ms\t", "\t844.254ms\t", "average"),
        ("\t19.32%\t", "\t29.32%\t", "percent"),
        ("3.862ms\t1.19%\t80.099ms\t", "93.862ms\t1.19%\t80.099ms\t", "self-total"),
        ("\t1.117s\t451.718us", "\t9.117s\t3.686ms", "over-all"),
    ],
)
def test_changed_figures_are_flagged(old: str, new: str, rule: str, tmp_path: Path) -> None:
    text = SLIDES.read_text()
    assert text.count(old) == 1
    if rule == "average":  # BigBird's table has no calls
        text = text.replace("662\n", "663\n")
        assert rule in rules(read_tables(written(tmp_path, text))[0])
        return
    assert rule in rules(read_tables(written(tmp_path, text.replace(old, new)))[1])


def test_unlisted_rows_are_unbounded_in_an_unsorted_table(tmp_path: Path) -> None:
    lines = SLIDES.read_text().split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith("ProfilerStep*"))
    rows = lines[start : start + 19]
    Random(1).shuffle(rows)
    lines[start : start + 19] = rows
    table = read_tables(written(tmp_path, "\n".join(lines)))[1]
    answer = table.communication
    assert answer.high_ns == pytest.approx(754.4 * MS, abs=0.1 * MS)  # by the operators alone


def test_markers_that_are_not_shown_give_no_answer(tmp_path: Path) -> None:
    """Sorted by CPU time, a table of ROCm shows no marker row; its sum is still impossible."""
    lines = [line for line in SLIDES.read_text().split("\n") if not line.startswith("\tMarker")]
    answer = read_tables(written(tmp_path, "\n".join(lines)))[0].communication
    assert answer.bound is None
    assert "455 times the time of the host" in answer.reasons[0]


XPU = """
-----------------------  ----------  ----------  ----------  ----------  ----------  ----------
                   Name    Self CPU   CPU total    Self XPU  Self XPU %   XPU total  # of Calls
-----------------------  ----------  ----------  ----------  ----------  ----------  ----------
               aten::mm     9.000ms     9.000ms     3.000ms      75.00%     3.000ms          10
            gemm_kernel     0.000us     0.000us     3.000ms      75.00%     3.000ms          10
  ccl_all_reduce_kernel     0.000us     0.000us     1.000ms      25.00%     1.000ms           2
-----------------------  ----------  ----------  ----------  ----------  ----------  ----------
Self CPU time total: 9.000ms
Self XPU time total: 4.000ms
"""


@pytest.mark.parametrize("prefix", ["", "> "])
def test_another_device_and_quotes(prefix: str, tmp_path: Path) -> None:
    (table,) = read_tables(written(tmp_path, XPU.replace("\n", f"\n{prefix}")))
    assert table.columns["self_device"] == "Self XPU"
    assert table.totals["self_device"].value == 4 * MS
    assert not table.flags
    assert table.communication.high_ns == pytest.approx(1 * MS, abs=0.01 * MS)


def test_names_are_no_figures(tmp_path: Path) -> None:
    (table,) = read_tables(written(tmp_path, XPU.replace("gemm_kernel", "         5s")))
    assert not {"name", "Name"} & table.rows[1].figures.keys()
    assert table.rows[1].kind is RowKind.DEVICE_ROW


def test_annotations_of_the_user_are_no_kernels(tmp_path: Path) -> None:
    annotation = XPU.split("\n")[5].replace("gemm_kernel", "eval (data)")
    on_host = annotation.replace("0.000us", "1.000ms").replace("3.000ms", "0.000us")
    text = XPU.replace("  ccl_all", f"{annotation}\n{on_host}\n  ccl_all")
    (table,) = read_tables(written(tmp_path, text))
    kinds = [row.kind for row in table.rows if row.name == "eval (data)"]
    assert kinds == [RowKind.ANNOTATION, RowKind.OPERATOR]


OLD = """
------------  ----------------  --------------  --------------  ------------  ---------------
Name          Self CPU total %  Self CPU total  CPU total %     CUDA total    Number of Calls
------------  ----------------  --------------  --------------  ------------  ---------------
conv2d                  26.12%       224.779us          26.12%     281.568us                1
add                     25.49%       219.349us          25.49%     276.480us                1
------------  ----------------  --------------  --------------  ------------  ---------------
Self CPU time total: 860.565us
CUDA time total: 1.091ms
"""


@pytest.mark.parametrize(
    "text",
    [
        OLD,
        XPU.replace("--  --", "-----"),
        "\n".join(XPU.split("\n")[2:]),
        "only display top-level ops" + XPU,
        XPU.replace("Self XPU time", "XPU time"),
        XPU.replace("        10\n", "        1\n", 1),
    ],
    ids=["torch-1.7", "other-rule", "no-rule", "top-level", "no-sum", "cut-row"],
)
def test_layouts_that_are_not_read_are_said(text: str, tmp_path: Path) -> None:
    (table,) = read_tables(written(tmp_path, text))
    assert rules(table)[DAMAGED]
    assert (table.communication.bound, table.communication.high_ns) == (None, None)


def test_perftools_with_an_unknown_column_is_said(tmp_path: Path) -> None:
    (table,) = read_tables(written(tmp_path, BARS.replace("Events", "Faults")))
    assert (rules(table), table.rows) == ({DAMAGED: 1}, ())
    assert table.communication.low_ns is None


def test_output_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_table(SLIDES, f"{tmp_path}/", f"{tmp_path}/") == 0
    text = capsys.readouterr().out
    assert text.count("communication-bound: yes") == 1
    assert text.count("communication-bound: no\n") == 1
    assert "448.0 HtoA from 4KiB" in text
    document = json.loads((tmp_path / "profiler-tables.json").read_text())
    assert document["rows"][0]["self_device_s"] == 6478.273
    assert document["tables"][0]["low_s"] == pytest.approx(12.36, abs=1e-5)
    assert {path.name for path in tmp_path.glob("*.csv")} == {
        *("tables.csv", "rows.csv", "flags.csv")
    }
    run_table(SLIDES, "-")
    assert len(json.loads(capsys.readouterr().out)["tables"]) == 4


def test_what_is_a_table(tmp_path: Path) -> None:
    assert looks_like_profiler_table(SLIDES.read_bytes())
    assert looks_like_profiler_table(BARS.encode())
    assert not looks_like_profiler_table(b'{"traceEvents": []}')
    assert not looks_like_profiler_table(b"Name CPU\nName\tsize\n" + bytes(3))
    with pytest.raises(ConfigError, match="key_averages"):
        run_table(written(tmp_path, "nothing here\n"))


def test_a_flagged_figure_of_perftools_gives_no_answer(tmp_path: Path) -> None:
    text = SLIDES.read_text().replace("\t61.46\t", "\t617.46\t")
    by_size = read_tables(written(tmp_path, text))[3]
    assert rules(by_size) == {"percent": 1, "over-all": 1}
    assert (by_size.communication.bound, by_size.communication.low_ns) == (None, 0)


def test_logs_names_the_command_that_reads_tables() -> None:
    with pytest.raises(ConfigError, match=f"use stepmark trace breakdown {SLIDES}"):
        collect([str(SLIDES)])


def xpu_table() -> str:
    """A table of an Intel GPU; figures as such a profile has them."""
    names = ("Name", "Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg")
    device = ("Self XPU", "Self XPU %", "XPU total", "XPU time avg", "# of Calls")
    none = ("0.00%", "0.000us", "0.00%", "0.000us", "0.000us")
    rows = (
        (
            *("aten::mm", "94.47%", "65.799ms", "95.46%", "66.492ms", "66.492ms"),
            *("829.920us", "68.36%", "829.920us", "829.920us", "1"),
        ),
        ("gemm_kernel", *none, "829.920us", "68.36%", "829.920us", "829.920us", "1"),
        ("Memset (DEVICE)", *none, "11.840us", "0.98%", "11.840us", "11.840us", "1"),
        (
            *("c10d::allreduce_", "0.02%", "14.358us", "0.49%", "340.000us", "340.000us"),
            *("0.000us", "0.00%", "372.240us", "372.240us", "1"),
        ),
        ("oneccl_allreduce", *none, "372.240us", "30.66%", "372.240us", "372.240us", "1"),
        (
            *("urEnqueueUSMFill", "0.35%", "244.582us", "0.35%", "244.582us", "244.582us"),
            *("0.000us", "0.00%", "0.000us", "0.000us", "1"),
        ),
    )
    rule = "  ".join(("-" * 40, *("-" * 12 for _ in range(10))))
    lines = [
        "  ".join((f"{r[0]:>40}", *(f"{c:>12}" for c in r[1:])))
        for r in (names + device, *rows)
    ]
    sums = ["Self CPU time total: 69.652ms", "Self XPU time total: 1.214ms"]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule, *sums, ""])


def test_a_table_of_an_xpu_is_read_as_that_of_a_gpu(tmp_path: Path) -> None:
    (table,) = read_tables(written(tmp_path, xpu_table()))
    assert table.columns["self_device"] == "Self XPU"
    kinds = {row.name: row.kind for row in table.rows}
    assert kinds["gemm_kernel"] is RowKind.KERNEL
    assert kinds["Memset (DEVICE)"] is RowKind.COPY
    assert kinds["oneccl_allreduce"] is RowKind.COMM_KERNEL
    assert kinds["c10d::allreduce_"] is RowKind.COLLECTIVE
    assert kinds["urEnqueueUSMFill"] is RowKind.HOST_CALL
    assert rules(table) == {}
    assert table.communication.bound is False
    assert table.communication.low_ns == pytest.approx(372_240, abs=1)
    assert (table.communication.high_ns or 0) < 0.4 * MS


def test_a_cut_table_of_an_xpu_says_so(tmp_path: Path) -> None:
    text = xpu_table()
    (table,) = read_tables(written(tmp_path, text[: text.index("urEnqueue")]))
    assert DAMAGED in rules(table)
    assert table.communication.bound is None
