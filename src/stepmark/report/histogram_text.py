"""Histograms of messages as text: aligned rows, a summary, what is unknown."""

from collections.abc import Sequence

from stepmark.core.columns import Row, number, text
from stepmark.core.message import Histogram
from stepmark.core.units import format_bytes, format_time
from stepmark.report.histogram import BY, MESSAGE, ranks_seen, size_of

_PRINTED: tuple[tuple[str, str], ...] = (
    ("collective", "collective"),
    ("dtype", "dtype"),
    ("group", "group"),
    ("phase", "phase"),
    ("num_ranks", "ranks"),
    ("bin", "size"),
    ("size_is", "size is"),
    ("calls_per_rank", "calls/rank"),
    ("calls", "calls"),
    ("bytes_per_rank", "bytes/rank"),
    ("bytes", "bytes"),
    ("time_s", "time"),
    ("busbw_gb_s", "busbw GB/s"),
    ("expected_per_rank_s", "expected/rank"),
    ("times_expected", "took / expected"),
    ("curve", "curve"),
)
_NUMBERS = frozenset(key for key, _ in _PRINTED) - {*BY, "size_is", "curve"}


def lines(table: Sequence[Row]) -> list[str]:
    """The rows as aligned text, without columns that have nothing to say."""
    shown = [(key, head) for key, head in _PRINTED if any(_cell(row, key) for row in table)]
    cells = [[head for _, head in shown]]
    cells += [[_cell(row, key) for key, _ in shown] for row in table]
    widths = [max(len(line[place]) for line in cells) for place in range(len(shown))]
    return [
        "  ".join(
            value.rjust(width) if key in _NUMBERS else value.ljust(width)
            for value, width, (key, _) in zip(line, widths, shown, strict=True)
        ).rstrip()
        for line in cells
    ]


def _cell(row: Row, key: str) -> str:
    value = number(row, key)
    if value is None:
        return text(row, key)
    if key in ("bytes", "bytes_per_rank"):
        return format_bytes(value)
    if key in ("time_s", "expected_per_rank_s"):
        return format_time(value)
    if key == "calls_per_rank":
        return f"{value:.0f}" if value == int(value) else f"{value:.2f}"
    if key in ("busbw_gb_s", "times_expected"):
        return f"{value:.4g}"
    return str(row[key])


def summary(histogram: Histogram, num_ranks_seen: int | None = None) -> list[str]:
    """A few lines: per collective its calls, bytes and range of sizes."""
    seen = num_ranks_seen or ranks_seen(histogram) or 1
    found = []
    for name in sorted({kind.collective for kind in histogram}):
        held = [(kind, tally) for kind, tally in histogram.items() if kind.collective == name]
        sizes = sorted({size_of(kind)[0] for kind, _ in held})
        calls = sum(tally.calls for _, tally in held)
        total = sum(tally.calls * size_of(kind)[0] for kind, tally in held)
        what = {size_of(kind)[1] for kind, _ in held}
        span = format_bytes(sizes[0])
        span += f" to {format_bytes(sizes[-1])}" if len(sizes) > 1 else ""
        plural = "s" if calls != seen else ""
        unknown = ", sizes of one rank's part" if what != {MESSAGE} else ""
        found.append(
            f"{name}: {calls / seen:.6g} call{plural} per rank, {len(sizes)} "
            f"size{'s' if len(sizes) > 1 else ''} ({span}{unknown}), "
            f"{format_bytes(total / seen)} per rank"
        )
    return found


def unknown_ranks(histogram: Histogram) -> str:
    """A line for kinds whose size as nccl-tests counts is unknown; "" where all are known."""
    calls = sum(tally.calls for kind, tally in histogram.items() if kind.message_bytes is None)
    if not calls:
        return ""
    return (
        f"the number of ranks is unknown for {calls} calls: their sizes are one rank's part; "
        "--ranks N gives it"
    )
