"""Rows as HTML tables that sort, filter and show the command of a row."""

from collections.abc import Sequence
from html import escape

from stepmark.report.printing import cell
from stepmark.report.tables import Row, number, text

Column = tuple[str, str, bool]  # key, heading, numeric

COLUMNS: tuple[Column, ...] = (
    ("model", "model", False),
    ("role", "role", False),
    ("pass", "pass", False),
    ("family", "operator", False),
    ("shape", "shape", False),
    ("scale", "scale", False),
    ("layout", "layout", False),
    ("dtype", "dtype", False),
    ("backend", "backend", False),
    ("backend_run", "ran as", False),
    ("rank", "rank", True),
    ("time_s", "time", True),
    ("mean_s", "mean", True),
    ("p10_s", "p10", True),
    ("p90_s", "p90", True),
    ("n", "n", True),
    ("vs_median_rank", "/ median rank", True),
    ("tflops", "TFLOP/s", True),
    ("gb_per_s", "GB/s", True),
    ("arithmetic_intensity", "FLOP/byte", True),
    ("pct_peak", "% peak", True),
    ("pct_hbm", "% HBM", True),
    ("pct_ceiling", "% measured ceiling", True),
    ("pct_reference", "% reference", True),
    ("bound", "bound", False),
    ("max_rel_err", "max rel. err", True),
    ("num_wrong", "# wrong", True),
    ("clock_mhz", "MHz", True),
    ("power_w", "W", True),
    ("throttle", "throttled", False),
    ("rate", "rate", False),
    ("method", "method", False),
    ("status", "status", False),
)

COMM_COLUMNS: tuple[Column, ...] = (
    ("model", "model", False),
    ("role", "message", False),
    ("collective", "collective", False),
    ("size_bytes", "size", True),
    ("dtype", "dtype", False),
    ("redop", "redop", False),
    ("placement", "placement", False),
    ("pair", "pair", False),
    ("num_ranks", "ranks", True),
    ("split", "split", False),
    ("mode", "mode", False),
    ("api", "api", False),
    ("backend", "backend", False),
    ("root", "root", True),
    ("spread", "spread", True),
    ("skew_s", "skew", True),
    ("max_ctas", "CTAs", True),
    ("beside", "beside", False),
    ("time_s", "time", True),
    ("time_min_s", "fastest rank", True),
    ("p10_s", "p10", True),
    ("p90_s", "p90", True),
    ("p99_s", "p99", True),
    ("min_s", "min", True),
    ("max_s", "max", True),
    ("cv_pct", "cv %", True),
    ("n", "n", True),
    ("launches", "launches", True),
    ("launch_spread_pct", "spread %", True),
    ("algbw_gb_s", "algbw GB/s", True),
    ("busbw_gb_s", "busbw GB/s", True),
    ("pct_link", "% link", True),
    ("num_wrong", "# wrong", True),
    ("slowest_rank", "slowest rank", True),
    ("waited_for_rank", "waited for rank", True),
    ("waited_for_s", "by", True),
    ("late_s", "start skew", True),
    ("issue_s", "issue", True),
    ("slowdown", "x alone", True),
    ("slowdown_beside", "compute x alone", True),
    ("clock_mhz", "MHz", True),
    ("power_w", "W", True),
    ("throttle", "throttled", False),
    ("method", "method", False),
    ("status", "status", False),
)

TRAIN_COLUMNS: tuple[Column, ...] = (
    ("model", "model", False),
    ("scale", "scale", False),
    ("strategy", "strategy", False),
    ("num_ranks", "ranks", True),
    ("mbs", "mbs", True),
    ("seq_len", "seq", True),
    ("schedule", "sample is", False),
    ("techniques", "techniques", False),
    ("time_s", "sample", True),
    ("p10_s", "p10", True),
    ("p90_s", "p90", True),
    ("min_s", "min", True),
    ("max_s", "max", True),
    ("n", "n", True),
    ("warmup_samples", "warm-up", True),
    ("drift_pct", "drift %", True),
    ("tokens_per_s_gpu", "tokens/s/GPU", True),
    ("tokens_per_s", "tokens/s", True),
    ("tflops", "TFLOP/s causal", True),
    ("tflops_torchtitan", "torchtitan", True),
    ("tflops_palm_all", "palm-all", True),
    ("tflops_hfu", "with recompute", True),
    ("mfu_pct", "MFU % (causal)", True),
    ("mfu_torchtitan_pct", "MFU % (torchtitan)", True),
    ("mfu_palm_all_pct", "MFU % (palm-all)", True),
    ("hfu_pct", "HFU %", True),
    ("mfu_fp8_pct", "% FP8 peak (causal)", True),
    ("pct_ceiling", "% measured ceiling", True),
    ("fwd_s", "fwd", True),
    ("bwd_s", "bwd", True),
    ("optim_s", "optim", True),
    ("other_s", "other", True),
    ("data_s", "data wait", True),
    ("allocated_gib", "GiB allocated", True),
    ("reserved_gib", "GiB reserved", True),
    ("alloc_retries", "alloc retries", True),
    ("clock_mhz", "MHz", True),
    ("power_w", "W", True),
    ("throttle", "throttled", False),
    ("loss_first", "first loss", True),
    ("loss_last", "last loss", True),
    ("num_wrong", "# wrong", True),
    ("slowest_rank", "slowest rank", True),
    ("vs_median_rank", "/ median rank", True),
    ("build_s", "build", True),
    ("first_s", "first sample", True),
    ("recompiles", "recompiles", True),
    ("graph_breaks", "graph breaks", True),
    ("attention_run", "attention", False),
    ("method", "method", False),
    ("status", "status", False),
)


def table(rows: Sequence[Row], columns: Sequence[Column] = COLUMNS) -> str:
    """All that ran. A click on a row shows the command that measures it alone."""
    ran = [row for row in rows if row["status"] in ("measured", "wrong")]
    if not ran:
        return "<p>Nothing was measured.</p>"
    columns = [c for c in columns if any(row[c[0]] is not None for row in ran)]
    heads = "".join(
        f'<th scope="col" aria-sort="none"{_numeric(right)}>'
        f'<button type="button">{escape(heading)}</button></th>'
        for _, heading, right in columns
    )
    lines = "\n".join(_line(row, columns) for row in ran)
    return (
        '<p class="tools"><input class="filter" type="search" placeholder="Filter rows" '
        'aria-label="Filter rows"> <span class="shown quiet"></span></p>'
        '<pre class="command" aria-live="polite">Click a row for the command that measures it '
        'alone; click a heading to sort.</pre><div class="box"><table class="rows">'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )


def _line(row: Row, columns: Sequence[tuple[str, str, bool]]) -> str:
    kinds = ["each"] if row.get("rank") is not None else []
    kinds += ["bad"] if row["status"] == "wrong" or row["over_limit"] else []
    cells = []
    for key, _, right in columns:
        shown = cell(row, key)
        if key == "rank" and row["rank"] is None and row["num_ranks"] != 1:
            shown = "all"
        if key == "status" and row["over_limit"]:
            shown += ", above limit"
        value = number(row, key)
        order = "" if value is None else f' data-v="{value!r}"'
        cells.append(f"<td{_numeric(right)}{order}>{escape(shown)}</td>")
    opened = f'<tr class="{" ".join(kinds)}" data-command="{escape(text(row, "command"))}">'
    return opened + "".join(cells) + "</tr>"


def _numeric(right: bool) -> str:
    return ' class="num"' if right else ""
