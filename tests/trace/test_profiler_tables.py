import gzip
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from stepmark.app.profiler_tables import looks_like_profiler_table, read_tables, run_table
from stepmark.core.errors import ConfigError
from stepmark.core.profiler_table import DEVICE_WORK, ProfilerTable, RowKind
from stepmark.trace.tables.profiler_text import DAMAGED

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
    assert answer is not None
    assert (len(table.rows), table.device, table.sorted_by) == (20, "CUDA", ("device",))
    assert answer.bound is True
    # 6478.273 s of record_param_comms less 6465.912 s of markers, each printed to 1 ms.
    assert answer.low_ns == pytest.approx(12.360e9, abs=1e3)
    # 100 % is 6465.912 / 0.9978 s within half a hundredth of a percent, less the markers.
    assert 13.98e9 < (answer.device_low_ns or 0) < 14.1e9
    assert 14.5e9 < (answer.device_high_ns or 0) < 14.6e9
    assert answer.high_ns == answer.device_high_ns
    assert answer.share_low == pytest.approx(0.848, abs=0.001)
    assert (answer.steps, answer.steps_ns) == (2, 14.228e9)
    assert answer.largest.startswith("c10d::reduce_ has 662 of the 686 calls shown, and 63%")


def test_big_bird_is_not_communication_bound(slides: list[ProfilerTable]) -> None:
    answer = slides[1].communication
    assert answer is not None
    assert answer.bound is False
    assert answer.low_ns == 0
    assert answer.high_ns == pytest.approx(316.4665 * MS)  # the last row, plus its rounding
    assert answer.share_high == pytest.approx(0.0799, abs=0.0001)
    assert any("down to 316.466ms" in reason for reason in answer.reasons)
    assert any("leaves at most 754.4 ms" in reason for reason in answer.reasons)


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
    assert rows["python.train"].words == {}
    assert rows["python.Tensor.backward"].words["source"].endswith("_tensor.py line.428")
    assert rows["examples/distributed/FSDP/T5_training.py"].words["source"] == "line.148"
    assert rows["python.to"].words["source"].endswith("modeling_utils.py line.2576")
    # One empty cell too many.
    assert rows["python.validation"].value("acc_time") == 39.16e9
    assert rows["python.validation"].value("events") == 213_526
    assert by_function.rows[4].level == 3  # "3.6.9%" is a bar that became a point
    (flag,) = by_function.flags
    assert (flag.rule, flag.row, flag.printed) == ("percent", "python.train", "295.79")
    assert by_function.communication is not None
    assert by_function.communication.bound is None
    assert by_function.communication.share_low == pytest.approx(0.1776, abs=1e-4)

    total, train = by_size.rows[:2]
    assert total.value("copy_in") == 854.88 * 2**20
    assert [total.value(f"copy_in_{edge}") for edge in (0, 16, 256, 4096, 2**20, 2**24)] == [
        *(58, 0, 80, 448, 192, 1)
    ]
    assert (total.value("copy_out_0"), total.value("copy_peer_1048576")) == (6121.2, 25)
    assert (train.value("copy_out_0"), train.value("events")) == (6000, 1_286_371)
    assert by_size.flags == ()


def test_perftools_checks_find_wrong_figures(tmp_path: Path) -> None:
    text = SLIDES.read_text().replace("\t850.31\t0.0\t0.0\t64.0", "\t190.31\t0.0\t0.0\t64.0")
    text = text.replace("20.3%\t38.945723", "20.3%\t83.945723")
    text = text.replace("\t4.57\t8.0\t0.0\t16.0\t448.0", "\t4.57\t8.0\t0.0\t16.0")
    by_size = read_tables(written(tmp_path, text))[3]
    assert rules(by_size) == {"bins": 1, "percent": 1, DAMAGED: 1}
    assert by_size.communication is not None
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
        *("copy_in_0", "copy_in_4096", "events"),
    ]
    assert [(row.level, row.name) for row in table.rows] == [
        *((0, "Total"), (1, "main"), (2, "nccl.send"), (3, "line.20"))
    ]
    assert table.rows[0].value("copy_in_4096") == 100_000
    assert table.rows[2].value("copy_in") is None
    assert table.flags == ()
    assert table.communication is not None
    assert table.communication.low_ns == pytest.approx(2e9, abs=6e6)


@pytest.mark.parametrize("name", ["h100", "h100-memory", "h200-fsdp8"])
def test_tables_of_torch_agree_with_its_numbers(name: str) -> None:
    truth = truth_of(name)
    work = device_us(truth)
    for table in read_tables(DATA / f"{name}.txt.gz"):
        assert not {DAMAGED, "cut"} & rules(table).keys()
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
            assert answer is not None
            assert answer.low_ns is not None
            assert answer.high_ns is not None
            assert answer.low_ns - 1 <= communication_us * 1e3 <= answer.high_ns + 1
            assert (answer.device_low_ns or 0) - 600 <= device_ns
            assert device_ns <= (answer.device_high_ns or 0) + 600
            assert answer.bound in (None, communication_us * 2e3 > device_ns)
    complete = read_tables(DATA / "h200-fsdp8.txt.gz")[2].communication
    assert complete is not None
    assert complete.share_high == pytest.approx(0.557, abs=0.001)


def test_rows_of_a_complete_table_count_device_time_once() -> None:
    (table,) = read_tables(DATA / "h100-memory.txt.gz")
    own = sum(row.value("self_device") or 0 for row in table.rows if row.kind in DEVICE_WORK)
    assert own == pytest.approx(table.totals["self_device"].value, abs=1000)
    by_name = {row.name: row for row in table.rows}
    assert by_name["Optimizer.step#AdamW.step"].kind is RowKind.ANNOTATION
    assert by_name["Memcpy DtoD (Device -> Device)"].kind is RowKind.COPY
    assert by_name["aten::addmm"].value("self_device_mem") == 192 * 2**20
    assert by_name["aten::addmm"].words["shapes"].startswith("[[2048], [4096, 2048]")
    assert by_name["aten::addmm"].value("flops") == 412316860.416


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
    """Memory, shapes, FLOPs and source stacks of a CPU run; torch exchanges the last two."""
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
        assert row.value("cpu_mem") == pytest.approx(event.cpu_memory_usage, abs=6)
    total = sum(event.self_cpu_time_total for event in averages) * 1e3
    assert table.totals["self_cpu"].value == pytest.approx(total, abs=half)
    products = [row for row in table.rows if row.name == "aten::mm"]
    assert [row.value("flops") for row in products] != [None]
    assert table.communication is not None
    assert table.communication.bound is None


def test_lost_rows_leave_no_answer(tmp_path: Path) -> None:
    lines = SLIDES.read_text().split("\n")
    place = next(n for n, line in enumerate(lines) if line.startswith("aten::mul"))
    lines[place - 3] = lines[place - 3][:40]
    table = read_tables(written(tmp_path, "\n".join(lines)))[1]
    assert rules(table)[DAMAGED] == 1
    assert table.communication is not None
    assert (table.communication.bound, table.communication.high_ns) == (None, None)


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("\t944.254ms\t", "\t844.254ms\t", "average"),
        ("\t19.32%\t", "\t29.32%\t", "percent"),
        ("3.862ms\t1.19%\t80.099ms\t", "93.862ms\t1.19%\t80.099ms\t", "self-total"),
        ("\t1.032s\t417.547us", "\t1.232s\t498.466us", "order"),
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
    assert answer is not None
    assert table.sorted_by == ()
    assert answer.high_ns == pytest.approx(754.4 * MS, abs=0.1 * MS)  # by the operators alone


def test_markers_that_are_not_shown_give_no_answer(tmp_path: Path) -> None:
    """Sorted by CPU time, a table of ROCm shows no marker row; its sum is still impossible."""
    lines = [line for line in SLIDES.read_text().split("\n") if not line.startswith("\tMarker")]
    answer = read_tables(written(tmp_path, "\n".join(lines)))[0].communication
    assert answer is not None
    assert answer.bound is None
    assert "455 times the time of the host" in answer.reasons[0]


OLD = """
------------  ----------------  --------------  --------------  ------------  ---------------
Name          Self CPU total %  Self CPU total  CPU total %     CUDA total    Number of Calls
------------  ----------------  --------------  --------------  ------------  ---------------
conv2d                  26.12%       224.779us          26.12%     281.568us                1
_convolution            25.49%       219.349us          25.49%     276.480us                1
------------  ----------------  --------------  --------------  ------------  ---------------
Self CPU time total: 860.565us
CUDA time total: 1.091ms
"""
QUOTED = """
> -----------------------  ----------  ----------  ------------  ----------
>                     Name    Self XPU  Self XPU %     XPU total  # of Calls
> -----------------------  ----------  ----------  ------------  ----------
>                aten::mm     3.000ms      75.00%       3.000ms          10
>             gemm_kernel     3.000ms      75.00%       3.000ms          10
>   ccl_all_reduce_kernel     1.000ms      25.00%       1.000ms           2
> -----------------------  ----------  ----------  ------------  ----------
> Self CPU time total: 9.000ms
> Self XPU time total: 4.000ms
"""


def test_tables_of_old_torch_and_other_devices(tmp_path: Path) -> None:
    (old,) = read_tables(written(tmp_path, OLD))
    assert [row.value("self_cpu") for row in old.rows] == [224_779, 219_349]
    assert [row.value("device") for row in old.rows] == [281_568, 276_480]
    assert old.device == "CUDA"
    assert DAMAGED not in rules(old)
    (quoted,) = read_tables(written(tmp_path, QUOTED))
    assert quoted.device == "XPU"
    assert quoted.totals["self_device"].value == 4 * MS
    assert not quoted.flags
    # Without CPU times kernels and operators look alike, and each time stands twice.
    for table in (old, quoted):
        assert table.communication is not None
        assert (table.communication.bound, table.communication.high_ns) == (None, None)


def test_output_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_table(SLIDES, f"{tmp_path}/", f"{tmp_path}/") == 0
    text = capsys.readouterr().out
    assert text.count("communication-bound: yes") == 1
    assert text.count("communication-bound: no\n") == 1
    assert "448 of 4 KiB to under 64 KiB" in text
    document = json.loads((tmp_path / "profiler-tables.json").read_text())
    first = document["tables"][0]
    assert first["rows"][0]["self_device_s"] == 6478.273
    assert first["communication"]["low_s"] == pytest.approx(12.36, abs=1e-5)
    assert {path.name for path in tmp_path.glob("*.csv")} == {
        *("rows.csv", "flags.csv", "copies.csv")
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
