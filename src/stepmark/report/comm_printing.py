"""Rows of collectives as a wide table: percentiles, ranks and limits side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepmark.report.printing import Column, print_rows
from stepmark.report.tables import Row

if TYPE_CHECKING:
    from rich.console import Console

_PRINTED: tuple[Column, ...] = (
    ("model", "model", False, 5),
    ("role", "message", False, 0),
    ("collective", "collective", False, 0),
    ("size_bytes", "size", True, 0),
    ("dtype", "dtype", False, 3),
    ("redop", "redop", False, 7),
    ("placement", "placement", False, 2),
    ("pair", "pair", False, 0),
    ("num_ranks", "ranks", True, 4),
    ("mode", "mode", False, 4),
    ("api", "api", False, 6),
    ("max_ctas", "CTAs", True, 0),
    ("beside", "beside", False, 1),
    ("time_s", "time", True, 0),
    ("p50_s", "p50", True, 6),
    ("p99_s", "p99", True, 2),
    ("min_s", "min", True, 5),
    ("max_s", "max", True, 5),
    ("cv_pct", "cv %", True, 4),
    ("n", "n", True, 5),
    ("launches", "launches", True, 6),
    ("launch_spread_pct", "spread %", True, 3),
    ("algbw_gb_s", "algbw", True, 3),
    ("busbw_gb_s", "busbw", True, 0),
    ("pct_link", "% link", True, 1),
    ("num_wrong", "#wrong", True, 1),
    ("slowest_rank", "slowest", True, 4),
    ("waited_for_rank", "waited for", True, 3),
    ("waited_for_s", "by", True, 3),
    ("late_s", "start skew", True, 4),
    ("issue_s", "issue", True, 5),
    ("slowdown", "x alone", True, 0),
    ("slowdown_beside", "compute x alone", True, 0),
    ("status", "status", False, 0),
)


def wide(rows: Sequence[Row], console: "Console") -> None:
    """The rows that ran, then one line per skipped or failed case. GB/s are 1e9 bytes."""
    print_rows(rows, console, _PRINTED)
