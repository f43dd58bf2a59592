"""Last lines of a run: one finding per line, the most important first.

Each line starts with its subject, LEAD columns wide.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from stepmark.cases.record import RunInfo
from stepmark.ground.units import counts_text, format_time
from stepmark.tables.columns import Row, digits, number, text
from stepmark.tables.outcomes import MATMULS
from stepmark.tables.row_tables import (
    LEAD,
    describe,
    grouped,
    statuses,
    unique_cases,
    validity_counts,
)
from stepmark.training.training_words import remarks, title

# A compute-bound matmul or attention this far under its peak is worth a line.
OUTLIER_PCT = 50.0
MAX_OUTLIERS = 3
# A rank this much slower than the median rank is worth a line.
SLOW_RANK = 1.03


def summary_lines(run: RunInfo, rows: Sequence[Row]) -> list[str]:
    """Return one finding per line; what was not measured has no line."""
    device = counts_text(device.name for device in run.environment.devices)
    jobs = unique_cases(rows)
    throttled = Counter(text(row, "throttle") for row in jobs if row["throttle"])
    lines = [
        f"device     {device or 'unknown'}",
        f"cases      {statuses(jobs) or 'none'}",
        *_best_lines(jobs),
        *_outlier_lines(jobs),
        *_convention_lines(jobs),
        *_slow_rank_lines(rows),
        *(f"throttled  {reason}: {count} cases" for reason, count in throttled.items()),
    ]
    lines += [f"wrong      {describe(row)}" for row in jobs if row["status"] == "wrong"]
    lines += [f"impossible {describe(row)}: above limit" for row in jobs if row["over_limit"]]
    return lines


def _convention_lines(jobs: Sequence[Row]) -> Iterator[str]:
    if any(row["executed_flops"] != row["flops"] and row["tflops"] for row in jobs):
        yield (
            "counted    attention bwd as 2 x fwd, as MFU does; executed_tflops in files also "
            "counts q k.T again (flash-attention's 2.5 x)"
        )


def _best_lines(jobs: Sequence[Row]) -> list[str]:
    lines = []
    right = [row for row in jobs if row["status"] == "measured"]
    products = [row for row in right if row["family"] in MATMULS and row["tflops"]]
    for group in grouped(products, ("dtype",)):
        best = max(group, key=lambda row: number(row, "tflops") or 0.0)
        share = number(best, "pct_peak")
        peak = "peak n/a" if share is None else f"{share:.1f} % of the dense peak"
        rate = digits(number(best, "tflops"))
        lines.append(f"matmul     {rate} TFLOP/s {best['dtype']}, {peak} ({best['shape']})")
    copies = [row for row in right if row["family"] == "copy" and row["gb_per_s"]]
    if copies:
        best = max(copies, key=lambda row: number(row, "gb_per_s") or 0.0)
        share = number(best, "pct_hbm")
        peak = "peak n/a" if share is None else f"{share:.1f} % of memory bandwidth"
        lines.append(f"copy       {digits(number(best, 'gb_per_s'))} GB/s, {peak}")
    return lines


def _outlier_lines(jobs: Sequence[Row]) -> list[str]:
    """Return the compute-bound cases farthest under the peak, or the measured ceiling."""
    shares = []
    timed = [row for row in jobs if row["time_s"] is not None]
    for group in grouped(timed, ("family", "shape", "dtype", "layout", "pass")):
        # The best backend, which a job would use.
        row = min(group, key=lambda row: number(row, "time_s") or 0.0)
        key = "pct_ceiling" if row["pct_peak"] is None else "pct_peak"
        share = number(row, key)
        if row["bound"] == "compute" and share is not None and share < OUTLIER_PCT:
            of = "the dense peak" if key == "pct_peak" else "the measured ceiling"
            shares.append((share, f"slow       {describe(row)}: {share:.1f} % of {of}"))
    lines = [line for _, line in sorted(shares)[:MAX_OUTLIERS]]
    if (more := len(shares) - MAX_OUTLIERS) > 0:
        lines.append(f"slow       and {more} more under {OUTLIER_PCT:.0f} %")
    return lines


def _slow_rank_lines(rows: Sequence[Row]) -> list[str]:
    cases: dict[object, set[object]] = {}
    worst: dict[object, float] = {}
    for row in rows:
        ratio = number(row, "vs_median_rank")
        if ratio is not None and ratio > SLOW_RANK:
            cases.setdefault(row["rank"], set()).add(row["case_id"])
            worst[row["rank"]] = max(worst.get(row["rank"], 0.0), ratio)
    return [
        f"slow rank  {rank}: up to {worst[rank]:.3f} x the median rank, in {len(ids)} cases"
        for rank, ids in cases.items()
    ]


def train_lines(rows: Sequence[Row]) -> list[str]:
    """Return findings about training; none without rows."""
    if not rows:
        return []
    entries = [("training", statuses(rows))]
    if counted := validity_counts(rows):
        entries.append(("doubtful", counted))
    for row in rows:
        if number(row, "time_s") is not None:
            entries.append(("step", f"{title(row)}: {_rates(row)}"))
            entries += [("", line) for line in remarks(row)]
    return [f"{lead:<{LEAD}}{line}" for lead, line in entries]


def _rates(row: Row) -> str:
    words = [format_time(number(row, "time_s") or 0.0)]
    if (rate := number(row, "tokens_per_s_gpu")) is not None:
        words.append(f"{digits(rate)} tokens/s/GPU")
    if (rate := number(row, "tflops")) is not None:
        share = number(row, "mfu_pct")
        mfu = "peak n/a" if share is None else f"MFU {share:.1f} %"
        words.append(f"{digits(rate)} TFLOP/s causal ({mfu})")
    first = number(row, "loss_first")
    last = number(row, "loss_last")
    if first is not None and last is not None:
        words.append(f"loss {first:.3f} -> {last:.3f}")
    return ", ".join(words)
