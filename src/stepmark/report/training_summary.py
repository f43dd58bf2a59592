"""What the training steps of a run found, one finding per line, as report/summary.py."""

from collections import Counter
from collections.abc import Sequence

from stepmark.core.columns import Row, digits, number, text
from stepmark.core.units import format_time
from stepmark.report.summary import LEAD
from stepmark.report.training_remarks import remarks, title


def train_lines(rows: Sequence[Row]) -> list[str]:
    """Empty without rows. Each line starts with what it is about, LEAD columns wide."""
    if not rows:
        return []
    statuses = Counter(text(row, "status") for row in rows)
    said = [("training", ", ".join(f"{n} {status}" for status, n in statuses.items()))]
    for row in rows:
        if number(row, "time_s") is None:
            continue
        said.append(("step", f"{title(row)}: {_reached(row)}"))
        said += [("", line) for line in remarks(row)]
    return [f"{lead:<{LEAD}}{line}" for lead, line in said]


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
