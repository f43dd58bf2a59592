"""What limits a comparison of two sides, in sentences."""

from collections.abc import Iterator, Sequence

from stepmark.comparison.comparison import Series, Side
from stepmark.ground.launches import Order, Row, Sample

_SHORT_SOAK_S = 1.0  # shorter ones leave clocks above those of sustained load
Pairs = Sequence[tuple[Series, Series]]


def notes_on(base: str, other: str, pairs: Pairs) -> Iterator[str]:
    """Yield how the measurements of two sides differ. base, other: names of the sides."""
    yield from _basis_notes(base, other, pairs)
    yield from _order_notes(base, other, pairs)
    yield from _soak_notes(base, other, pairs)
    yield from _busy_notes(base, other, pairs)


def context_notes(sides: Sequence[Side]) -> list[str]:
    """Return variables and versions that differ; sides that are files state none."""
    runs = [side for side in sides if side.context]
    notes = []
    for name in dict.fromkeys(name for run in runs for name in run.context):
        values = [run.context.get(name, "unset") for run in runs]
        if len(set(values)) > 1:
            by_run = ", ".join(f"{r.name} {v}" for r, v in zip(runs, values, strict=True))
            notes.append(f"{name} differs: {by_run}")
    return notes


def _basis_notes(base: str, other: str, pairs: Pairs) -> Iterator[str]:
    """Yield what a ratio is of where the numbers of ranks differ."""
    for left, right in pairs:
        ranks = left.fields.get("num_ranks"), right.fields.get("num_ranks")
        if None in ranks or ranks[0] == ranks[1]:
            continue
        if left.unit == "busbw":
            yield (
                "ratios are of the bus bandwidth as printed, not of time: its factor depends "
                "on num_ranks, which differs"
            )
        elif left.busbw_factor and right.busbw_factor:
            yield (
                "ratios are of time at equal size; each side's bus bandwidth has its own "
                f"factor: {base} {left.busbw_factor:g}, {other} {right.busbw_factor:g}"
            )


def _order_notes(base: str, other: str, pairs: Pairs) -> Iterator[str]:
    """Yield how to measure without drift, where one side was measured before the other."""
    for pair in pairs:
        first, second = (
            Sample(logs=dict.fromkeys(series.launches, 0.0), starts=series.starts)
            for series in pair
        )
        if Row(kind="", base=first, other=second).order is Order.BLOCKS:
            yield (
                f"{base} and {other} were measured one after the other, so intervals include "
                "drift; in rounds they would not: stepmark sweep --env NAME=A,B -- COMMAND"
            )


def _soak_notes(base: str, other: str, pairs: Pairs) -> Iterator[str]:
    """Yield where one side was loaded for less time than the other before its samples."""
    soaks = [
        (first.soak_s, second.soak_s)
        for first, second in pairs
        if first.soak_s is not None and second.soak_s is not None
    ]
    uneven = [own for own in soaks if min(own) < _SHORT_SOAK_S and max(own) > 1.5 * min(own)]
    if uneven:
        first_s, second_s = uneven[0]
        yield (
            f"{len(uneven)} of {len(soaks)} operators had different soaks, such as "
            f"{first_s:.2g} s in {base} and {second_s:.2g} s in {other}: after a short one "
            "clocks are higher; give both sides the same, longer --budget"
        )


def _busy_notes(base: str, other: str, pairs: Pairs) -> Iterator[str]:
    """Yield in how many launches the host was busy, which slows what the host does."""
    for name, series in ((base, [a for a, _ in pairs]), (other, [b for _, b in pairs])):
        busy = {launch for each in series for launch in each.busy}
        launches = {launch for each in series for launch in each.launches}
        if busy:
            yield f"{name}: busy host in {len(busy)} of {len(launches)} launches"
