"""The last lines of a run: what it found, in the order a reader asks.

One finding per line; each line starts with what it is about, LEAD columns wide.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.core.columns import Row, digits, number, text
from stepmark.core.record import RunInfo
from stepmark.core.units import format_bytes, format_time
from stepmark.report.comm_remarks import NO_STRAGGLER, matrices, slow_lines, straggler
from stepmark.report.outcomes import MATMULS
from stepmark.report.row_tables import describe, grouped
from stepmark.report.training_words import remarks, title

if TYPE_CHECKING:
    from rich.console import Console

# A compute-bound matmul or attention this far under its peak is worth a line.
OUTLIER_PCT = 50.0
# A rank this much slower than the median rank is worth a line.
SLOW_RANK = 1.03
# Every line starts with what it is about, this many columns wide.
LEAD = 11


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
    devices = run.environment.devices
    names = Counter(device.name for device in devices)
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
    cases: dict[str, Row] = {}
    for row in rows:
        if row["rank"] is None:
            cases.setdefault(text(row, "case_id"), row)
    return list(cases.values())


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
        best_s = number(best[key], "time_s") if key in best else None
        if best_s is None or time_s < best_s:
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
    counts = Counter(text(row, "throttle") for row in jobs if row["throttle"])
    return [f"throttled  {reason}: {count} cases" for reason, count in counts.items()]


_WAY = ("collective", "dtype", "num_ranks", "mode", "api", "split", "beside")


def comm_lines(rows: Sequence[Row]) -> list[str]:
    """Empty without rows. Each line starts with what it is about, LEAD columns wide."""
    if not rows:
        return []
    statuses = Counter(text(row, "status") for row in rows)
    entries = [("collective", ", ".join(f"{n} {status}" for status, n in statuses.items()))]
    right = [row for row in rows if row["status"] == "measured"]
    for group in grouped([row for row in right if not row["pair"]], _WAY):
        entries += [("busbw" if group[0]["busbw_gb_s"] is not None else "time", _best(group))]
        entries += [
            ("straggler", f"{_way(group[0])}: {line}")
            for line in straggler(group)
            if line != NO_STRAGGLER
        ]
    for matrix in matrices(rows):
        entries += [("pairs", f"{matrix.title}: {line}") for line in slow_lines(matrix)]
    entries += [("wrong", describe(row)) for row in rows if row["status"] == "wrong"]
    entries += [
        ("impossible", f"{describe(row)}: busbw above the link")
        for row in rows
        if row["over_limit"]
    ]
    return [f"{lead:<{LEAD}}{line}" for lead, line in entries]


def _way(row: Row) -> str:
    words = [text(row, "collective"), text(row, "dtype"), f"x{row['num_ranks']}"]
    words += [text(row, "mode")] if row["mode"] != "queued" else []
    words += [text(row, "api")] if row["api"] != "torch" else []
    words += [f"split {row['split']}"] if row["split"] else []
    words += [f"beside {row['beside']}"] if row["beside"] else []
    return " ".join(words)


def _best(group: Sequence[Row]) -> str:
    """The highest busbw of one way of calling, and the shortest time."""
    soonest = min(number(row, "time_s") or 0.0 for row in group)
    best = max(group, key=lambda row: number(row, "busbw_gb_s") or 0.0)
    if best["busbw_gb_s"] is None:
        return f"{_way(best)} {format_time(soonest)}"
    share = number(best, "pct_link")
    link = "" if share is None else f", {share:.0f} % of the link"
    size = format_bytes(number(best, "size_bytes") or 0)
    rate = digits(number(best, "busbw_gb_s"))
    return f"{_way(best)} {rate} GB/s at {size}{link}; at least {format_time(soonest)}"


def train_lines(rows: Sequence[Row]) -> list[str]:
    """Empty without rows. Each line starts with what it is about, LEAD columns wide."""
    if not rows:
        return []
    statuses = Counter(text(row, "status") for row in rows)
    entries = [("training", ", ".join(f"{n} {status}" for status, n in statuses.items()))]
    for row in rows:
        if number(row, "time_s") is None:
            continue
        entries.append(("step", f"{title(row)}: {_reached(row)}"))
        entries += [("", line) for line in remarks(row)]
    return [f"{lead:<{LEAD}}{line}" for lead, line in entries]


def _reached(row: Row) -> str:
    words = [format_time(number(row, "time_s") or 0.0)]
    if (rate := number(row, "tokens_per_s_gpu")) is not None:
        words.append(f"{digits(rate)} tokens/s/GPU")
    if (rate := number(row, "tflops")) is not None:
        share = number(row, "mfu_pct")
        mfu = "peak n/a" if share is None else f"MFU {share:.1f} %"
        words.append(f"{digits(rate)} TFLOP/s causal ({mfu})")
    first, last = number(row, "loss_first"), number(row, "loss_last")
    if first is not None and last is not None:
        words.append(f"loss {first:.3f} -> {last:.3f}")
    return ", ".join(words)
