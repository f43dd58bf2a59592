"""The last lines of a run: what it found, in the order a reader asks."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.core.columns import Row, digits, number, text
from stepmark.core.record import RunInfo
from stepmark.report.row_tables import describe

if TYPE_CHECKING:
    from rich.console import Console

# A compute-bound matmul or attention this far under its peak is worth a line.
OUTLIER_PCT = 50.0
# A rank this much slower than the median rank is worth a line.
SLOW_RANK = 1.03
# Every line starts with what it is about, this many columns wide.
LEAD = 11
MATMULS = ("gemm", "bmm", "grouped-gemm")


def terminal_summary(
    run: RunInfo, rows: Sequence[Row], console: "Console", *, report: Path | None = None
) -> None:
    """Print the summary of a run."""
    for line in summary_lines(run, rows, report=report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_lines(
    run: RunInfo, rows: Sequence[Row], *, report: Path | None = None
) -> list[str]:
    """One finding per line; what was not measured has no line."""
    found = run.environment.devices
    names = Counter(device.name for device in found)
    device = ", ".join(f"{count} x {name}" for name, count in names.items())
    jobs = unique_cases(rows)
    statuses = Counter(text(row, "status") for row in jobs)
    lines = [
        f"device     {device or 'unknown'}",
        f"cases      {', '.join(f'{n} {status}' for status, n in statuses.items()) or 'none'}",
        *_best_lines(jobs),
        *_outlier_lines(jobs),
        *_slow_rank_lines(rows),
        *_throttle_lines(jobs),
    ]
    lines += [f"wrong      {describe(row)}" for row in jobs if row["status"] == "wrong"]
    lines += [f"impossible {describe(row)}: above limit" for row in jobs if row["over_limit"]]
    return lines + ([f"report     {report}"] if report else [])


def unique_cases(rows: Sequence[Row]) -> list[Row]:
    """One row per case: not per rank, and not again for each label."""
    kept: dict[str, Row] = {}
    for row in rows:
        if row["rank"] is None:
            kept.setdefault(text(row, "case_id"), row)
    return list(kept.values())


def _best_lines(jobs: Sequence[Row]) -> list[str]:
    lines = []
    right = [row for row in jobs if row["status"] == "measured"]
    products = [row for row in right if row["family"] in MATMULS and row["tflops"]]
    for dtype in dict.fromkeys(text(row, "dtype") for row in products):
        same = [row for row in products if row["dtype"] == dtype]
        best = max(same, key=lambda row: number(row, "tflops") or 0.0)
        share = number(best, "pct_peak")
        peak = "peak n/a" if share is None else f"{share:.1f} % of the dense peak"
        rate = digits(number(best, "tflops"))
        lines.append(f"matmul     {rate} TFLOP/s {dtype}, {peak} ({best['shape']})")
    copies = [row for row in right if row["family"] == "copy" and row["gb_per_s"]]
    if copies:
        best = max(copies, key=lambda row: number(row, "gb_per_s") or 0.0)
        share = number(best, "pct_hbm")
        peak = "peak n/a" if share is None else f"{share:.1f} % of memory bandwidth"
        lines.append(f"copy       {digits(number(best, 'gb_per_s'))} GB/s, {peak}")
    return lines


def _fastest(jobs: Sequence[Row]) -> list[Row]:
    """The best backend of each operator: a job would use that one."""
    best: dict[tuple[object, ...], Row] = {}
    for row in jobs:
        time_s = number(row, "time_s")
        if time_s is None:
            continue
        key = tuple(row[name] for name in ("family", "shape", "dtype", "layout", "pass"))
        held = number(best[key], "time_s") if key in best else None
        if held is None or time_s < held:
            best[key] = row
    return list(best.values())


def _outlier_lines(jobs: Sequence[Row], most: int = 3) -> list[str]:
    """The compute-bound cases farthest under the peak, or under the measured ceiling."""
    shares = []
    for row in _fastest(jobs):
        key = "pct_ceiling" if row["pct_peak"] is None else "pct_peak"
        share = number(row, key)
        if row["bound"] == "compute" and share is not None and share < OUTLIER_PCT:
            of = "the dense peak" if key == "pct_peak" else "the measured ceiling"
            shares.append((share, f"slow       {describe(row)}: {share:.1f} % of {of}"))
    lines = [line for _, line in sorted(shares)[:most]]
    more = len(shares) - most
    return lines + (
        [f"slow       and {more} more under {OUTLIER_PCT:.0f} %"] if more > 0 else []
    )


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


def _throttle_lines(jobs: Sequence[Row]) -> list[str]:
    seen = Counter(text(row, "throttle") for row in jobs if row["throttle"])
    return [f"throttled  {reason}: {count} cases" for reason, count in seen.items()]
