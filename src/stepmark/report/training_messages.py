"""Messages of one cycle of training, as the histogram that `stepmark logs` prints of a log."""

from stepmark.core.columns import Row
from stepmark.core.message import Histogram, MessageKind, Tally
from stepmark.core.training import Training
from stepmark.core.units import format_bytes
from stepmark.report.histogram import lines as histogram_lines
from stepmark.report.histogram import rows, size_of, summed


def histogram(told: Training) -> Histogram:
    """Kinds that occur twice are added up."""
    found: dict[MessageKind, Tally] = {}
    for kind, tally in told.messages:
        held = found.get(kind)
        found[kind] = tally if held is None else summed(held, tally)
    return found


def message_rows(told: Training, num_ranks: int) -> list[Row]:
    """One row per collective, type, group, phase and bin of sizes; means over num_ranks."""
    return rows(histogram(told), num_ranks_seen=num_ranks)


def lines(told: Training, num_ranks: int) -> list[str]:
    """A total and the rows, as text; that there are none, where nothing was sent."""
    found = histogram(told)
    what = "one sample" if told.cycle == 1 else f"{told.cycle} samples, one of an optimizer"
    if not found:
        return [f"no messages in {what}"]
    calls = sum(tally.calls for tally in found.values())
    num_bytes = sum(tally.calls * size_of(kind)[0] for kind, tally in found.items())
    total = f"{calls / num_ranks:.6g} calls, {format_bytes(num_bytes / num_ranks)}"
    return [
        f"messages of {what}, not timed: {total} per rank",
        *histogram_lines(message_rows(told, num_ranks)),
    ]
