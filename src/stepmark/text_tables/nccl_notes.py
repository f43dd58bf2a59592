"""Notes on the text of nccl-tests: what is missing from an output, or unusual about it."""

from collections import Counter
from collections.abc import Sequence

from stepmark.ground.reading import Reading
from stepmark.text_tables import nccl_lines, printed_figures
from stepmark.text_tables.nccl_lines import Layout, OutputFacts, Row
from stepmark.text_tables.printed_figures import parse_number, rounding_error

# Beginnings of the notes that validate() turns into findings.
ROWS_MISSING = "rows are missing"
OUT_OF_BOUNDS = "the footer counts values out of bounds"
NOT_VALID = "the benchmark's own check of the data failed"
_MAX_NOTES = 5


def incomplete_rows(rows: Sequence[Row], layout: Layout | None) -> list[str]:
    """Return a note for each of the first rows that were left out."""
    if layout is None:
        return []
    lost = [row for row in rows if len(row.cells) != layout.width]
    notes = [
        f"line {row.line}: the last row is cut off after {len(row.cells)} of {layout.width} "
        "figures and left out"
        if row is rows[-1] and len(row.cells) < layout.width
        else f"line {row.line}: a row with {len(row.cells)} figures instead of "
        f"{layout.width} is left out"
        for row in lost[:_MAX_NOTES]
    ]
    more = len(lost) - _MAX_NOTES
    return notes + ([f"{more} more rows are left out"] if more > 0 else [])


def unusual_columns(facts: OutputFacts, rows: Sequence[Row]) -> list[str]:
    notes = []
    if {"bytes", "n"} <= set(facts.columns):
        notes.append("layout of nccl-tests 1.x: times are milliseconds")
    if "cputime" in facts.columns:
        notes.append("the time column is the time to enqueue (-C): it says nothing of busbw")
    short = next((row for row in rows if not row.redop), None)
    if short and "root" in facts.columns and "redop" in facts.columns:
        notes.append(f"line {short.line}: a row without the redop that the header names")
    others = (row for row in rows if not row.values)
    starred = next((row for row in others if any("*" in cell for cell in row.cells)), None)
    if starred:
        notes.append(f"{OUT_OF_BOUNDS}: an asterisk in line {starred.line}")
    return notes


def rows_of_sweep(rows: Sequence[Row], cycles: Sequence[int], facts: OutputFacts) -> list[str]:
    """Return a note if sweeps have fewer or more rows than the parameters ask for."""
    sweep = nccl_lines.sweep_of(facts)
    num_sizes = sweep.num_sizes if sweep else None
    if not num_sizes:
        return []
    sweeps: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for row, cycle in zip(rows, cycles, strict=True):
        sweeps.setdefault(row.kind, []).append((row.size, cycle))
    lost = added = 0
    for places in sweeps.values():
        sizes = [size for size, _ in places]
        for cycle, num_rows in Counter(cycle for _, cycle in places).items():
            # Sizes that never fall are one sweep: a row that stands twice begins no other.
            is_extra = cycle > 0 and num_rows < num_sizes and sizes == sorted(sizes)
            lost += 0 if is_extra else max(num_sizes - num_rows, 0)
            added += num_rows if is_extra else max(num_rows - num_sizes, 0)
    notes = [f"{ROWS_MISSING}: {lost} of those that the parameters ask for"] if lost else []
    if added:
        notes.append(f"{added} rows more than the parameters ask for: some stand twice")
    return notes


def footer(facts: OutputFacts, readings: Sequence[Reading]) -> list[str]:
    notes = [f"{OUT_OF_BOUNDS}: {facts.num_wrong}"] if facts.num_wrong else []
    average = parse_number(facts.average)
    printed = [reading.printed[2] for reading in readings if reading.printed]
    rates = [rate for text in printed if (rate := parse_number(text)) is not None]
    if average is None or not rates:
        return notes
    mean = sum(rates) / len(rates)
    rounding = sum(map(rounding_error, printed)) / len(printed)
    rounding += max(rounding_error(facts.average), 5e-6)
    if abs(mean - average) > rounding + 1e-9 + abs(average) * 1e-5:
        notes.append(
            f"{ROWS_MISSING} or were changed: the footer's average bus bandwidth is "
            f"{average:g}, that of the rows here {mean:g}"
        )
    return notes


def unknown_collective(readings: Sequence[Reading]) -> tuple[str, ...]:
    parts = printed_figures.parts_of(readings)
    hint = ""
    if parts and parts > 1:
        hint = f"; size is {parts} x count: one of all_gather, all_to_all, gather, scatter"
    return (f"{nccl_lines.UNKNOWN_COLLECTIVE}{hint}",)
