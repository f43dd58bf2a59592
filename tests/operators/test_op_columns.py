"""Laws of the derived figures: rate x time is work, and what is unknown stays None."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from tests.tables.records import (
    COPY,
    FAST,
    RUN_ID,
    attention,
    full_run,
    gemm,
    made_up_device,
    measured,
    run_info,
)

from stepmark.cases.case import Label, Rate
from stepmark.cases.record import Failed, Measured, Skipped
from stepmark.ground.dtypes import DType
from stepmark.model.ops import Copy, EmbeddingBag, Gemm, Phase
from stepmark.operators.op_columns import OP_COLUMNS, rows
from stepmark.tables import row_tables
from stepmark.tables.columns import Row, View, number
from stepmark.tables.row_tables import print_rows

SLIM = Gemm(m=8192, n=8192, k=4096)


def one(*times_s: float, **more: object) -> Row:
    record = measured(gemm(num_ranks=len(times_s)), *times_s)
    return rows([record], run_info(), **more)[0]  # type: ignore[arg-type]


def test_rate_times_time_is_work() -> None:
    table = rows(full_run(), run_info(), device=made_up_device())
    ran = [row for row in table if row["time_s"]]
    assert len(ran) == 9
    for row in ran:
        time_s = number(row, "time_s") or 0.0
        assert (number(row, "tflops") or 0.0) * 1e12 * time_s == pytest.approx(row["flops"])
        gb_per_s = number(row, "gb_per_s") or 0.0
        assert gb_per_s * 1e9 * time_s == pytest.approx(row["bytes_moved"])


def test_operators_without_products_have_no_flop_rate() -> None:
    row = rows([measured(COPY, 1e-3)], run_info(), device=made_up_device())[0]
    assert row["tflops"] is row["pct_peak"] is row["arithmetic_intensity"] is None
    assert row["bound"] == "memory"
    assert row["pct_hbm"] == pytest.approx(100 * 2 * 2**30 / 1e-3 / 4e12)


def test_share_of_peak_follows_the_peak() -> None:
    device = made_up_device()
    share = number(one(2e-3, device=device), "pct_peak")
    assert share == pytest.approx(100 * 2 * 8192**3 / 2e-3 / 1e15)
    doubled = replace(device, peak_flops_per_s={DType.BF16: 2e15})
    assert number(one(2e-3, device=doubled), "pct_peak") == pytest.approx((share or 0) / 2)


def test_what_caches_serve_has_no_share_of_a_copy() -> None:
    def share(num_bytes: int) -> object:
        copy = replace(COPY, op=Copy(num_bytes=num_bytes))
        records = [measured(COPY, 1e-3), measured(copy, 1e-3)]
        info = run_info()
        (known,) = info.environment.devices
        devices = (replace(known, l2_bytes=2**20),)
        info = replace(info, environment=replace(info.environment, devices=devices))
        return rows(records, info)[1]["pct_ceiling"]

    assert share(2**24) is not None
    assert share(2**12) is None


def test_unknown_device_gives_none_and_the_measured_ceiling() -> None:
    slower = gemm(Gemm(m=4096, n=4096, k=4096))
    table = rows(
        [measured(gemm(), 2e-3), measured(slower, 0.5e-3), measured(COPY, 1e-3)], run_info()
    )
    assert [row["pct_peak"] for row in table] == [None] * 3
    assert [row["pct_hbm"] for row in table] == [None] * 3
    assert [row["over_limit"] for row in table] == [None] * 3
    # The fastest product is the ceiling, and has no ratio to itself.
    assert table[0]["pct_ceiling"] is None
    assert table[0]["ceiling"] == pytest.approx(table[0]["tflops"])
    assert table[1]["pct_ceiling"] == pytest.approx(50)  # an eighth of the work, a fourth of t
    assert (table[2]["ceiling_unit"], table[2]["pct_ceiling"]) == ("GB/s", None)
    assert [row["bound"] for row in table] == ["compute", "compute", "memory"]


def test_without_peak_or_copy_the_bound_is_unknown() -> None:
    assert one(2e-3)["bound"] is None


def test_a_gpu_spec_is_no_yardstick_for_the_cpu() -> None:
    record = measured(gemm(device="cpu"), 1.0)
    assert rows([record], run_info(), device=made_up_device())[0]["pct_peak"] is None


@pytest.mark.parametrize(
    ("op", "bound"),
    [(FAST, "compute"), (Gemm(m=8192, n=16, k=8192), "memory")],
)
def test_bound_is_the_longer_of_the_two_times(op: Gemm, bound: str) -> None:
    device = made_up_device()
    assert rows([measured(gemm(op), 1.0)], run_info(), device=device)[0]["bound"] == bound
    assert (op.flops / 1e15 > op.bytes_moved / 4e12) == (bound == "compute")


def test_a_wrong_result_sets_no_ceiling() -> None:
    wrong = measured(gemm(), 1e-9, num_wrong=1)
    table = rows([wrong, measured(gemm(SLIM), 2e-3)], run_info())
    assert [row["status"] for row in table] == ["wrong", "measured"]
    assert table[1]["ceiling"] == pytest.approx(table[1]["tflops"])


def test_slow_rank_stands_out() -> None:
    record = measured(gemm(num_ranks=4), 2e-3, 2e-3, 3e-3, 2e-3)
    table = rows([record], run_info(4))
    assert [row["rank"] for row in table] == [None, 0, 1, 2, 3]
    assert table[0]["time_s"] == 3e-3  # a job waits for its slowest rank
    assert [row["vs_median_rank"] for row in table[1:]] == [1, 1, 1.5, 1]
    assert table[1]["tflops"] == pytest.approx(1.5 * (number(table[0], "tflops") or 0))


def launch(number: int, *times_s: float, num_wrong: int = 0) -> Measured:
    record = measured(gemm(num_ranks=len(times_s)), *times_s, num_wrong=num_wrong)
    return replace(record, launch=number)


def test_launches_of_a_case_are_one_row() -> None:
    table = rows([launch(n, t) for n, t in enumerate((2e-3, 9e-3, 3e-3), 1)], run_info())
    (row,) = table
    assert row["time_s"] == 3e-3  # the median of the launches' medians
    assert row["launches"] == 3
    assert row["n"] == 15
    assert row["launch_spread_pct"] == pytest.approx(100 * 7 / 3)
    assert row["mean_s"] == pytest.approx(14e-3 / 3)
    assert "spread above 20 %" in str(row["validity"])
    assert row["ceiling"] == row["tflops"], "that of the row, not of its fastest launch"


def test_a_rank_of_launches_has_the_median_of_its_own() -> None:
    records = [launch(1, 1e-3, 2e-3), launch(2, 3e-3, 1e-3), launch(3, 4e-3, 9e-3)]
    table = rows(records, run_info(2))
    assert [row["rank"] for row in table] == [None, 0, 1]
    assert [row["time_s"] for row in table] == [3e-3, 3e-3, 2e-3]


def test_a_wrong_or_failed_launch_shows_in_the_row() -> None:
    (row,) = rows([launch(1, 1e-3), launch(2, 1e-3, num_wrong=7)], run_info())
    assert (row["status"], row["num_wrong"]) == ("wrong", 7)
    failed = Failed(run_id=RUN_ID, case=gemm(), cause="oom", message="no", ranks=(0,), launch=2)
    (row,) = rows([launch(1, 1e-3), failed], run_info())
    assert (row["status"], row["launches"]) == ("measured", 1)
    assert row["message"] == "launch 2: oom: no"


def test_one_row_per_label() -> None:
    labels = (Label(model="a", role="qkv", phase=Phase.FWD), Label(model="b", role="out"))
    table = rows([measured(gemm(FAST, *labels), 1e-3)], run_info())
    assert [(row["model"], row["role"], row["pass"]) for row in table] == [
        ("a", "qkv", "fwd"),
        ("b", "out", None),
    ]
    assert table[0]["case_id"] == table[1]["case_id"]


def test_skipped_and_failed_keep_their_reason() -> None:
    run = run_info()
    skipped = Skipped(run_id=RUN_ID, case=gemm(), reason="needs 200 GiB")
    failed = Failed(run_id=RUN_ID, case=gemm(SLIM), cause="oom", message="tried 9", ranks=(0,))
    table = rows([skipped, failed], run, device=made_up_device())
    assert [row["status"] for row in table] == ["skipped", "failed"]
    assert [row["message"] for row in table] == ["needs 200 GiB", "oom: tried 9"]
    assert {table[0][key] for key in ("time_s", "tflops", "pct_peak", "rank", "n")} == {None}


def test_all_rows_have_the_same_columns() -> None:
    table = rows(full_run(), run_info(), device=made_up_device())
    assert len({frozenset(row) for row in table}) == 1


def test_short_soak_is_said() -> None:
    run = run_info()
    table = rows(
        [
            measured(gemm(), 1e-3, soak_s=0.4),
            measured(gemm(SLIM), 1e-3, soak_s=2.0),
            measured(gemm(rate=Rate.BURST), 1e-3, soak_s=0.0),
        ],
        run,
    )
    assert [row["rate"] for row in table] == ["short soak 0.4 s", "sustained", "burst"]


@pytest.mark.parametrize(
    ("share_of_peak", "over"), [(1.0, False), (1.1, False), (1.105, False), (1.13, True)]
)
def test_flops_are_limited_by_the_highest_clock(share_of_peak: float, over: bool) -> None:
    # The made-up device is rated at 2 GHz and runs up to 2.2: 1.1 x peak, and 1 % of slack.
    time_s = FAST.flops / (1e15 * share_of_peak)
    assert one(time_s, device=made_up_device())["over_limit"] is over


def test_bytes_are_limited_only_far_outside_the_cache() -> None:
    run, device = run_info(), made_up_device()
    record = measured(COPY, COPY.op.bytes_moved / 5e12)
    assert rows([record], run, device=device)[0]["over_limit"] is True
    small = replace(COPY, op=replace(COPY.op, num_bytes=2**20))  # type: ignore[arg-type]
    cached = measured(small, small.op.bytes_moved / 5e12, num_sets=1)
    assert rows([cached], run, device=device)[0]["over_limit"] is False
    bag = EmbeddingBag(rows=10**7, dim=128, pooling=30, batch=65536, alpha=1.1)
    zipf = measured(replace(COPY, op=bag), bag.bytes_moved / 5e12)
    assert not rows([zipf], run, device=device)[0]["over_limit"]


def test_reference_share_above_100_is_faster() -> None:
    case = gemm()
    table = rows([measured(case, 1e-3)], run_info(), reference={case.case_id: 1.2e-3})
    assert table[0]["pct_reference"] == pytest.approx(120)


def test_device_state_is_that_of_the_slowest_rank() -> None:
    record = measured(gemm(num_ranks=2), 2e-3, 3e-3)
    fast, slow = record.telemetry
    slow = replace(slow, sm_clock_hz=1.2e9, throttle=("hw_thermal",))
    table = rows([replace(record, telemetry=(fast, slow))], run_info(2))
    assert [row["clock_mhz"] for row in table] == [1200, 1900, 1200]
    assert table[0]["throttle"] == "hw_thermal, sw_power_cap"


def test_attention_reads_aloud() -> None:
    assert attention(Phase.FWD).shape_text == "b2 s4096 h64/8 d128/128 causal"


def test_printed_rows_are_whole_when_not_on_a_terminal() -> None:
    console = Console(width=40, force_terminal=False, file=io.StringIO())
    print_rows(rows(full_run(), run_info(), device=made_up_device()), console, OP_COLUMNS)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    line = next(line for line in printed.splitlines() if "8192x8192x8192" in line)
    assert "1.5 ms" in line
    assert "733" in line
    assert "…" not in printed
    assert "skipped  gemm 8192x8192x8192 bf16 te: transformer-engine is not" in printed


def test_a_narrow_terminal_drops_columns_not_digits() -> None:
    table = rows(full_run(), run_info(), device=made_up_device())
    console_columns = [one for one in OP_COLUMNS if View.CONSOLE in one.views]
    wide = [column.name for column in row_tables.fitting(table, 10_000, console_columns)]
    narrow = [column.name for column in row_tables.fitting(table, 60, console_columns)]
    assert set(narrow) < set(wide)
    assert {"time_s", "tflops", "shape"} <= set(narrow)


def test_tables_need_neither_rich_nor_plotly() -> None:
    code = (
        "import sys; import stepmark.operators.op_columns\n"
        "print({'rich', 'plotly'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_spread_is_half_of_p10_to_p90_over_the_median() -> None:
    for row in rows(full_run(), run_info(), device=made_up_device()):
        spread, time_s = number(row, "spread_pct"), number(row, "time_s")
        if row["n"] is None or number(row, "n") == 1:
            assert spread is None
            continue
        low, high = number(row, "p10_s"), number(row, "p90_s")
        assert None not in (spread, time_s, low, high)
        assert spread * time_s / 100 == pytest.approx((high - low) / 2)  # type: ignore[operator]
