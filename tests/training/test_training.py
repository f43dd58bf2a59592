"""Rows of training: rates follow from samples alone, and say what they leave out."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables.records import FAST, gemm, measured

from stepmark.cases.case import Label
from stepmark.cases.flops import per_token
from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.cases.train_words import shape_text, techniques
from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    Fp8,
    GradSync,
    Precision,
    Recompute,
    Schedule,
)
from stepmark.ground.dtypes import DType
from stepmark.model.parallel import ParallelConfig
from stepmark.tables.columns import Row, number
from stepmark.training.train_columns import per_rank_rows, rows
from stepmark.training.training_printing import best_batches
from stepmark.training.training_rates import PHASES, drift, mean_phases
from stepmark.training.training_words import remarks, title

from .train_records import (
    SHARES,
    STRAGGLER,
    flat,
    fsdp,
    full_train_run,
    micro,
    model,
    noisy,
    single,
    told,
    train_device,
    train_measured,
    train_run,
)


def row_of(record: Measured) -> Row:
    (row,) = rows([record], train_run(), train_device())
    return row


def test_one_row_per_record_with_the_same_columns() -> None:
    records = full_train_run()
    table = rows(records, train_run(), train_device())
    assert len(table) == len(records)
    assert len({tuple(sorted(row.keys() - {"status"})) for row in table}) == 1
    assert [row["status"] for row in table] == [
        *("measured",) * 4,
        *("wrong", "failed", "skipped"),
    ]
    assert rows([measured(gemm(), 1e-3)], train_run()) == []


def test_rates_done_by_hand() -> None:
    """8,192 tokens a rank in half a second."""
    row = row_of(flat(fsdp(), 0.5))
    assert row["tokens_per_s_gpu"] == pytest.approx(2 * 4096 / 0.5)
    assert row["tokens_per_s"] == pytest.approx(8 * 2 * 4096 / 0.5)
    assert row["tokens_per_s_gpu_median"] == pytest.approx(row["tokens_per_s_gpu"])
    # 54.624e9 FLOPs a token by palm-all, 1,000 TFLOP/s peak.
    assert row["tflops_palm_all"] == pytest.approx(54.624e9 * 16384 / 1e12, rel=1e-4)
    assert row["mfu_palm_all_pct"] == pytest.approx(89.5, abs=0.1)
    assert row["tflops_hfu"] == row["tflops"]
    assert row["over_limit"] is False


@given(
    cycles=st.lists(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4), min_size=1),
    rest=st.lists(st.floats(0.1, 10.0), max_size=3),
)
def test_the_rate_is_tokens_of_whole_cycles_over_their_time(
    cycles: list[list[float]], rest: list[float]
) -> None:
    """An incomplete last cycle, which lacks its optimizer, has no part in it."""
    whole = [value for cycle in cycles for value in cycle]
    case = micro(2)
    row = row_of(train_measured(case, [[*whole, *rest]] * 2))
    tokens = case.tokens_per_step * len(whole)
    assert row["tokens_per_s"] == pytest.approx(tokens / sum(whole))
    assert row["whole_cycles"] == len(cycles)
    assert row["n"] == len(whole) + len(rest)


def test_without_a_whole_cycle_there_is_no_rate_and_a_reason() -> None:
    row = row_of(flat(micro(2, grad_accum=8), 0.5, n=7))
    assert row["tokens_per_s_gpu"] is None
    assert row["tflops"] is None
    assert row["over_limit"] is None
    assert number(row, "tokens_per_s_gpu_median") == pytest.approx(2 * 4096 / 0.5)
    assert any(line.startswith("no rate: fewer samples") for line in remarks(row))


def test_each_sample_counts_with_its_slowest_rank() -> None:
    row = row_of(train_measured(fsdp(2), [[1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]]))
    assert (row["time_s"], row["min_s"]) == (2.0, 2.0)


def test_a_rate_is_of_the_rank_that_took_longest_for_all() -> None:
    """Ranks that take turns at being slow spent 6 s each, not 8."""
    row = row_of(train_measured(fsdp(2), [[1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]]))
    assert row["tokens_per_s"] == pytest.approx(2 * 2 * 4096 * 4 / 6.0)


def test_the_best_batch_is_named() -> None:
    table = [
        row_of(flat(TrainCase(model=model("llama-3.1-8b"), mbs=mbs), seconds))
        for mbs, seconds in ((1, 1.0), (2, 1.2), (4, 4.4))
    ]
    (line,) = best_batches(table)
    assert line.startswith("best mbs 2: ")
    assert best_batches(table[:1]) == []


def test_models_of_one_name_are_told_apart_in_a_table() -> None:
    """Their micro-batches are no choice of one model."""
    narrow = model("llama-3.1-8b")
    wide = replace(narrow, hidden_size=2 * narrow.hidden_size)
    records = [
        flat(TrainCase(model=narrow, mbs=1), 1.0),
        flat(TrainCase(model=wide, mbs=2), 1.0),
    ]
    table = rows(records, train_run())
    names = ["llama-3.1-8b (hidden 4096)", "llama-3.1-8b (hidden 8192)"]
    assert [row["model"] for row in table] == names
    assert [row["model"] for row in per_rank_rows(records, train_run())] == names
    assert best_batches(table) == []


def test_a_calibration_is_no_candidate_and_says_what_it_is() -> None:
    step = TrainCase(model=model("llama-3.1-8b"), mbs=2)
    part = replace(step, mbs=1, labels=(Label(role="kernels"), Label(role="host")))
    table = [row_of(flat(case, 1.0)) for case in (step, part)]
    assert best_batches(table) == []
    assert [row["calibrates"] for row in table] == [None, "kernels, host"]
    name = title(table[0]).replace("mbs 2", "mbs 1")
    assert title(table[1]) == f"{name} (calibration: kernels, host)"


def test_a_straggler_is_last_more_often_than_by_chance() -> None:
    few = row_of(train_measured(fsdp(2), [[2.0, 2.0, 1.0], [1.0, 1.0, 2.0]]))
    assert few["vs_median_rank"] == pytest.approx(2 / 1.5)
    assert not any("straggler" in line for line in remarks(few))
    always = row_of(train_measured(fsdp(2), [[2.0] * 20, [1.0] * 20]))
    assert any("straggler: rank 0" in line for line in remarks(always))


def test_conventions_and_recompute_in_one_row() -> None:
    row = row_of(flat(micro(), 0.5))
    each = per_token(micro())
    rate = number(row, "tokens_per_s_gpu") or 0.0
    assert row["tflops"] == pytest.approx(each.causal * rate / 1e12)
    assert row["tflops_torchtitan"] == pytest.approx(each.torchtitan * rate / 1e12)
    assert row["tflops_hfu"] == pytest.approx(each.hfu * rate / 1e12)
    assert each.hfu > each.causal
    assert (number(row, "hfu_pct") or 0) > (number(row, "mfu_pct") or 0)


def test_experts_have_no_palm_figure() -> None:
    case = TrainCase(model=model("mixtral-8x7b"))
    row = row_of(flat(case, 1.0))
    assert row["tflops_palm_all"] is None
    assert row["mfu_palm_all_pct"] is None
    assert number(row, "tflops")


def test_fp8_is_held_against_both_peaks() -> None:
    row = row_of(flat(single(fp8=Fp8.TENSORWISE), 0.5))
    assert row["peak_dtype"] == "bf16"
    assert row["mfu_fp8_pct"] == pytest.approx((number(row, "mfu_pct") or 0) / 2)
    assert row_of(flat(single(), 0.5))["mfu_fp8_pct"] is None


def test_fp32_is_never_held_against_the_bf16_peak() -> None:
    row = row_of(flat(single(precision=Precision.FP32), 0.5))
    assert row["mfu_pct"] is None
    assert row["peak_dtype"] is None


@pytest.mark.parametrize(
    ("time_s", "expected"),
    # The limit is 1,000 TFLOP/s x 2.2 / 2.0 GHz; 8,192 tokens are 395 TFLOP.
    [(0.365, False), (0.350, True)],
)
def test_more_than_the_device_can_is_an_error(time_s: float, expected: bool) -> None:
    row = row_of(flat(single(), time_s))
    assert row["over_limit"] is expected
    assert ("impossible" in "".join(remarks(row))) is expected


def test_nominal_conventions_may_pass_the_peak() -> None:
    row = row_of(flat(single(), 0.4))
    assert row["over_limit"] is False
    assert (number(row, "mfu_palm_all_pct") or 0) > 100
    assert any("nominal" in line and "palm-all" in line for line in remarks(row))


def test_unknown_devices_have_no_peak_but_the_measured_ceiling() -> None:
    """8192^3 in 1.5 ms is 733 TFLOP/s; a CPU's step is not held against it."""
    records = [measured(gemm(FAST), 1.5e-3), flat(single(), 0.9)]
    (row,) = rows(records, train_run())
    assert row["mfu_pct"] is None
    assert row["peak_tflops"] is None
    assert row["over_limit"] is None
    ceiling = FAST.flops / 1.5e-3
    assert row["ceiling_tflops"] == pytest.approx(ceiling / 1e12)
    causal = number(row, "tflops") or 0.0
    assert row["pct_ceiling"] == pytest.approx(100 * causal * 1e12 / ceiling)
    cpu = replace(single(), device="cpu")
    (row,) = rows([records[0], flat(cpu, 0.9)], train_run(), train_device())
    assert row["ceiling_tflops"] is None
    assert row["mfu_pct"] is None


def test_phases_are_of_the_slowest_rank_and_add_up() -> None:
    record = noisy(micro(), 0.7, Random(3), n=16)
    row = row_of(record)
    assert row["slowest_rank"] == STRAGGLER
    assert row["vs_median_rank"] == pytest.approx(1.08, rel=0.01)
    fwd, bwd, optim = SHARES
    own_s = 0.7 * 1.08
    assert row["fwd_s"] == pytest.approx(fwd * own_s, rel=0.01)
    assert row["bwd_s"] == pytest.approx(bwd * own_s, rel=0.01)
    # Not 0, though three of four samples have no optimizer.
    assert row["optim_s"] == pytest.approx(optim * own_s, rel=0.01)
    means = mean_phases(record, STRAGGLER)
    seconds = record.samples.seconds[STRAGGLER]
    assert sum(means[name] for name in PHASES) == pytest.approx(sum(seconds) / len(seconds))
    assert means["optim_s"] == pytest.approx(optim * own_s / 4, rel=0.02)


def test_phases_that_cannot_be_told_apart_are_unknown() -> None:
    case, seconds = single(), [[0.5] * 4]
    bare = replace(told(case, seconds), fwd_s=(), bwd_s=(), optim_s=())
    row = row_of(train_measured(case, seconds, training=bare))
    assert [row[name] for name in PHASES] == [None] * 4
    assert row["data_s"] == pytest.approx(0.0005)
    pipeline = replace(told(case, seconds), fwd_s=(), bwd_s=())
    row = row_of(train_measured(case, seconds, training=pipeline))
    assert [row[name] for name in PHASES] == [None, None, pytest.approx(0.05), None]


def test_memory_is_of_the_rank_with_most() -> None:
    row = row_of(flat(fsdp(), 0.5))
    assert (row["allocated_gib"], row["reserved_gib"], row["device_gib"]) == (67, 77, 140)
    assert row["memory_gib"] == row["reserved_gib"]
    each = per_rank_rows([flat(fsdp(), 0.5)], train_run())
    assert [one["allocated_gib"] for one in each] == [60 + rank for rank in range(8)]
    assert [one["memory_gib"] for one in each] == [one["reserved_gib"] for one in each]


def test_memory_on_a_cpu_is_that_of_the_process() -> None:
    """torch's allocator counts none there, and the host's size is no use of it."""
    record = flat(fsdp(), 0.5)
    assert record.training is not None
    nothing = (None,) * 8
    resident = tuple((2 + rank) * 2**30 for rank in range(8))
    on_cpu = replace(
        record.training,
        allocated_bytes=nothing,
        reserved_bytes=nothing,
        resident_bytes=resident,
    )
    row = row_of(replace(record, training=on_cpu))
    assert (row["allocated_gib"], row["reserved_gib"], row["memory_gib"]) == (None, None, 9)
    older = row_of(replace(record, training=replace(on_cpu, resident_bytes=())))
    assert older["memory_gib"] is None


def test_rows_of_ranks_single_out_the_straggler() -> None:
    each = per_rank_rows(full_train_run()[1:2], train_run())
    assert [row["rank"] for row in each] == list(range(8))
    slow = [row["rank"] for row in each if (number(row, "vs_median_rank") or 0) > 1.05]
    assert slow == [STRAGGLER]


REMARKS: list[tuple[dict[str, object], str]] = [
    ({"alloc_retries": (0, 2)}, "memory ran out and its cache was flushed 2 times"),
    ({"reserved_bytes": (1, 139 * 2**30)}, "reserved memory is 99 % of the device's"),
    ({"data_s": ((0.1,) * 12,) * 2}, "the host waits 100 ms for a batch, 20 % of a sample"),
    ({"recompiles": 3, "graph_breaks": 1}, "3 recompiles after the first sample, 1 graph br"),
    ({"fwd_s": ((0.1,) * 12, (0.14,) * 12)}, "rank 1's forward takes 1.167 x the median's"),
]


@pytest.mark.parametrize(("change", "line"), REMARKS)
def test_remarks_say_what_spoils_a_figure(change: dict[str, object], line: str) -> None:
    case, seconds = fsdp(2), [[0.5] * 12] * 2
    plain = row_of(train_measured(case, seconds))
    changed = told(case, seconds, **change)  # type: ignore[arg-type]
    row = row_of(train_measured(case, seconds, training=changed))
    assert remarks(plain) == []
    assert any(line in one for one in remarks(row))


@pytest.mark.parametrize(
    ("uncounted_s", "line"),
    [
        ((1e-3, 0.0), ""),
        ((1e-3, 8e-3), "the samples add up to 0.2 % less than the 4 s that passed"),
        ((-0.1, 8e-3), "the samples add up to 2.5 % more than the 4 s that passed"),
    ],
)
def test_time_in_no_sample_is_named_where_it_counts(
    uncounted_s: tuple[float, ...], line: str
) -> None:
    case, seconds = fsdp(2), [[1.0] * 4] * 2
    training = told(case, seconds, elapsed_s=(4.0, 4.0), uncounted_s=uncounted_s)
    row = row_of(train_measured(case, seconds, training=training))
    assert (row["elapsed_s"], row["uncounted_s"]) == (4.0, max(uncounted_s, key=abs))
    lines = [each for each in remarks(row) if "add up" in each]
    assert lines == ([f"{line} by the host's clock"] if line else [])


@pytest.mark.parametrize(
    ("device", "soak_s", "is_short"),
    [("cuda", 0.4, True), ("cuda", 2.01, False), ("cpu", 0.0, False)],
)
def test_a_short_soak_is_named(device: str, soak_s: float, is_short: bool) -> None:
    case, seconds = single(device=device), [[1.0] * 4]
    training = told(case, seconds, elapsed_s=(4.0,), uncounted_s=(0.0,))
    record = train_measured(case, seconds, training=training)
    record = replace(record, samples=replace(record.samples, soak_s=soak_s))
    text = f"short soak {soak_s:.1f} s: the device may be cooler than in a long job"
    assert (text in remarks(row_of(record))) == is_short
    assert text not in remarks(row_of(train_measured(case, seconds))), "an older record"


def test_a_rank_that_is_slow_now_and_then_is_no_straggler() -> None:
    """Of twelve samples of two ranks, eight are the slower one's: chance."""
    case, seconds = fsdp(2), [[0.5] * 12] * 2
    fwd_s = ((0.1,) * 12, (0.14,) * 8 + (0.09,) * 4)
    row = row_of(train_measured(case, seconds, training=told(case, seconds, fwd_s=fwd_s)))
    assert row["slow_fwd_rank"] is None
    assert remarks(row) == []


def test_times_that_still_fall_are_said_to_drift() -> None:
    falling = [[2.0 - 0.02 * index for index in range(12)]]
    row = row_of(train_measured(single(), falling))
    assert row["drift_pct"] == pytest.approx(100 * (1.83 / 1.95 - 1))
    assert any(line.startswith("not steady") for line in remarks(row))
    assert row_of(flat(single(), 0.5, n=12))["drift_pct"] is None


def test_noise_is_hardly_ever_a_drift() -> None:
    """Three standard deviations: 2.7 in 1,000 by the normal limit."""
    random = Random(11)
    found = [drift([random.gauss(1.0, 0.05) for _ in range(20)]) for _ in range(400)]
    assert sum(one is not None for one in found) <= 6


def test_an_optimizer_in_one_of_four_samples_is_no_drift() -> None:
    """Nor does an incomplete cycle make one, nor does their number cost time."""
    saw = [1.0, 1.0, 1.0, 2.0] * 12 + [1.0]
    assert drift(saw, 4) is None
    rising = [1.0 + 1e-5 * index for index in range(20_000)]
    assert drift(rising) == pytest.approx(1.15 / 1.05 - 1, rel=0.03)


def test_a_case_is_named_by_what_is_unusual() -> None:
    assert shape_text(single()) == "single mbs 2 seq 4096: amp"
    assert techniques(fsdp()) == "amp"
    case = fsdp(
        fp8=Fp8.ROWWISE,
        fp8_head=True,
        fp8_all_gather=True,
        compile=CompileScope.MODEL,
        compile_mode="max-autotune",
        recompute=Recompute.OPS,
        schedule=Schedule.MICRO,
        grad_accum=8,
        grad_sync=GradSync.LAST,
        loss_chunks=4,
        reduce_dtype=DType.BF16,
        reshard="no",
        prefetch=2,
        precision=Precision.BF16,
    )
    assert shape_text(case) == (
        "fsdp x8 mbs 2 seq 4096 micro: bf16, fp8 rowwise +head +all-gather, "
        "compile model max-autotune, ac selective, accum 8 reduced last, loss in 4 chunks, "
        "reduce bf16, reshard no, prefetch 2"
    )
    two = TrainCase(
        model=model(),
        parallel=ParallelConfig(tp=2, dp_shard=4),
        data_parallel=DataParallel.FSDP,
        recompute=Recompute.BLOCKS,
        recompute_blocks=(1, 4),
    )
    assert shape_text(two) == "fsdp x tp2 x8 mbs 1 seq 4096: amp, ac 1/4"
