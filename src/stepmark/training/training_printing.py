"""Rows of training on a terminal: a block per case, a table where there are several."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepmark.cases.message import summed
from stepmark.cases.training import Training
from stepmark.findings.histogram import calls_and_bytes
from stepmark.findings.histogram import lines as histogram_lines
from stepmark.findings.histogram import rows as histogram_rows
from stepmark.ground.units import format_bytes, format_time
from stepmark.tables.columns import Row, View, digits, number, text
from stepmark.tables.row_tables import grouped, print_lines, print_rows
from stepmark.training.train_columns import TRAIN_COLUMNS
from stepmark.training.training_words import remarks, title

if TYPE_CHECKING:
    from rich.console import Console

_ALL_BUT_BATCH = ("model", "scale", "strategy", "num_ranks", "seq_len", "techniques")

_CONVENTIONS = (
    ("causal", "tflops", "mfu_pct"),
    ("torchtitan", "tflops_torchtitan", "mfu_torchtitan_pct"),
    ("palm-all", "tflops_palm_all", "mfu_palm_all_pct"),
    ("hfu", "tflops_hfu", "hfu_pct"),
)


def print_training(
    rows: Sequence[Row], console: "Console", per_rank: Sequence[Row] = ()
) -> None:
    """Print a block for each case, with a line per rank if `per_rank` rows are given.

    Then a table of all cases if there are several, else what was skipped or failed.
    """
    for row in rows:
        if number(row, "time_s") is None:
            continue
        print_lines(block(row), console)
        for group in grouped(per_rank, ("case_id", "launch")):
            if (group[0]["case_id"], group[0]["launch"]) == (row["case_id"], row["launch"]):
                print_rows(group, console, TRAIN_COLUMNS, View.RANKS)
        console.print()
    table = rows if len(rows) > 1 else [row for row in rows if number(row, "time_s") is None]
    print_rows(table, console, TRAIN_COLUMNS)
    print_lines(best_batches(rows), console)


def best_batches(rows: Sequence[Row]) -> list[str]:
    """Return the fastest micro-batch of cases that differ in nothing else, in words."""
    right = [row for row in rows if row["status"] == "measured" and row["tokens_per_s_gpu"]]
    right = [row for row in right if not row["calibrates"]]
    lines = []
    for group in grouped(right, _ALL_BUT_BATCH):
        if len({row["mbs"] for row in group}) < 2:
            continue
        best = max(group, key=lambda row: number(row, "tokens_per_s_gpu") or 0.0)
        rate = digits(number(best, "tokens_per_s_gpu"))
        lines.append(
            f"best mbs {best['mbs']}: {rate} tokens/s per GPU "
            f"({best['model']} {best['strategy']} {best['techniques']})"
        )
    return lines


def block(row: Row) -> list[str]:
    """Return lines about one measured case."""
    lines = (
        ("sample", _sample(row)),
        ("tokens/s", _tokens(row)),
        ("TFLOP/s", _flops(row)),
        ("phases", _phases(row)),
        ("memory", _memory(row)),
        ("device", _device(row)),
        ("loss", _loss(row)),
        ("start", _start(row)),
        ("ranks", _ranks(row)),
        *(("remark", line) for line in remarks(row)),
    )
    return [title(row), *(f"  {lead:<10}{line}" for lead, line in lines if line)]


def _time(row: Row, key: str) -> str:
    value = number(row, key)
    return "n/a" if value is None else format_time(value)


def _sample(row: Row) -> str:
    what = "forward and backward" if row["schedule"] == "micro" else "optimizer step"
    if row["schedule"] == "step" and row["grad_accum"] != 1:
        what += f" of {row['grad_accum']} micro-steps"
    spread = ", ".join(f"{name} {_time(row, f'{name}_s')}" for name in ("p10", "p90", "min"))
    spread += f", max {_time(row, 'max_s')}"
    return f"{_time(row, 'time_s')} per {what} ({spread}); {_counts(row)}"


def _counts(row: Row) -> str:
    dropped = number(row, "warmup_samples")
    plural = "" if row["n"] == 1 else "s"
    count = f"{row['n']} sample{plural}"
    return count if dropped is None else f"{count} after {dropped:.0f} of warm-up"


def _tokens(row: Row) -> str:
    typical = f"{_rate(number(row, 'tokens_per_s_gpu_median'))} by the median"
    if row["tokens_per_s_gpu"] is None:
        return f"{typical}, per GPU"
    per_gpu, total = (_rate(number(row, f"tokens_per_s{end}")) for end in ("_gpu", ""))
    return f"{per_gpu} per GPU, {total} in all; {typical}"


def _rate(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value >= 1000 else digits(value)


def _flops(row: Row) -> str:
    if row["tflops"] is None:
        return ""
    words = []
    for name, key, share in _CONVENTIONS:
        value = number(row, key)
        pct = number(row, share)
        if key == "tflops_hfu" and value == number(row, "tflops"):
            continue  # nothing is computed twice
        rate = "n/a" if value is None else digits(value)
        words.append(f"{name} {rate}" + ("" if pct is None else f" ({pct:.1f} %)"))
    return f"{', '.join(words)} per GPU; {_against(row)}"


def _against(row: Row) -> str:
    """Return the peaks that shares are of."""
    peak = number(row, "peak_tflops")
    words = ["peak n/a" if peak is None else f"of {digits(peak)} ({row['peak_dtype']} peak)"]
    if (share := number(row, "mfu_fp8_pct")) is not None:
        words.append(f"causal is {share:.1f} % of the FP8 peak")
    if (share := number(row, "pct_ceiling")) is not None:
        words.append(f"{share:.1f} % of the measured matmul ceiling")
    return ", ".join(words)


def _phases(row: Row) -> str:
    named = (("forward", "fwd_s"), ("backward", "bwd_s"), ("optimizer", "optim_s"))
    words = [
        f"{name} {_time(row, key)}"
        for name, key in (*named, ("other", "other_s"), ("waiting for data", "data_s"))
        if row[key] is not None
    ]
    return ", ".join(words)


def _memory(row: Row) -> str:
    allocated = number(row, "allocated_gib")
    reserved = number(row, "reserved_gib")
    if allocated is None:
        resident = number(row, "memory_gib")
        return "" if resident is None else f"{digits(resident)} GiB of a rank's process at most"
    total = number(row, "device_gib")
    of = "" if total is None else f" of {digits(total)}"
    cached = "" if reserved is None else f", {digits(reserved)} reserved{of}"
    return f"{digits(allocated)} GiB allocated at most{cached}"


def _device(row: Row) -> str:
    clock = number(row, "clock_mhz")
    power = number(row, "power_w")
    words = [f"{clock:.0f} MHz"] if clock is not None else []
    words += [f"{power:.0f} W"] if power is not None else []
    words += [f"attention {row['attention_run']}"] if row["attention_run"] else []
    return ", ".join(words)


def _loss(row: Row) -> str:
    first = number(row, "loss_first")
    last = number(row, "loss_last")
    if first is None or last is None:
        return ""
    data = text(row, "data_run") or text(row, "data")
    return f"{first:.4f} -> {last:.4f} ({data})"


def _start(row: Row) -> str:
    named = (("model and optimizer", "build_s"), ("first sample", "first_s"))
    return ", ".join(f"{name} {_time(row, key)}" for name, key in named if row[key])


def _ranks(row: Row) -> str:
    ratio = number(row, "vs_median_rank")
    if ratio is None:
        return ""
    return f"slowest is rank {row['slowest_rank']}, {ratio:.3f} x the median rank"


def message_lines(training: Training, num_ranks: int) -> list[str]:
    """Return a total and the rows as text, as `stepmark logs` prints those of a log."""
    messages = summed(training.messages)
    cycle = training.cycle
    what = "one sample" if cycle == 1 else f"{cycle} samples, one with the optimizer"
    if not messages:
        return [f"no messages in {what}"]
    calls, num_bytes = calls_and_bytes(messages)
    total = f"{calls / num_ranks:.6g} calls, {format_bytes(num_bytes / num_ranks)}"
    return [
        f"messages of {what}, not timed: {total} per rank",
        *histogram_lines(histogram_rows(messages, num_ranks_seen=num_ranks)),
    ]
