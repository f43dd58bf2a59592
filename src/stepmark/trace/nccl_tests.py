"""Text that nccl-tests, rccl-tests and nccom-test print, and what people paste of it.

One reader for all versions: 1.x (milliseconds), 2.0 - 2.11 (an `error` column), 2.13 and
later, options -S, -I, -C, -N, -d all, rccl-tests with one placement or more columns, Neuron's
nccom-test, with launcher prefixes, log lines between rows and rows broken in two. Tables
whose header cells were lost or scrambled are read by how many figures their rows have.

What is known of the method: docstring of nccl_facts.method_of. With -C the time column is
the time to enqueue and no time of the operation: such readings have their bus bandwidth as
`rate` and no time_s. The `error` column before 2.13 is a difference, no count: num_wrong is
None. nccom-test's GB/s are GiB/s (its documented example: 32 MiB in 768 us is "40.69").

Over 250 lines: how each field of a table is known.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from stepmark.core.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table
from stepmark.core.units import GB, GIB
from stepmark.trace import infer, nccl_facts
from stepmark.trace.headings import heading_above
from stepmark.trace.nccl_facts import Facts
from stepmark.trace.nccl_outputs import Output, outputs_of
from stepmark.trace.nccl_rows import Layout, Row, layout_of
from stepmark.trace.numerals import half_unit, value_of

# How the notes begin that validate() turns into findings.
ROWS_MISSING = "the footer's average bus bandwidth"
OUT_OF_BOUNDS = "the footer counts values out of bounds"


def read(lines: Sequence[str], file: str) -> list[Table]:
    """All tables of these lines, in order; their index is left at 0."""
    made = [(output, _table(output, lines, file)) for output in outputs_of(lines)]
    kept = [(output, table) for output, table in made if table.readings]
    alone = _alone([output for output, _ in kept])
    return [
        replace(table, notes=(*table.notes, alone)) if alone and output.facts.ranks else table
        for output, table in kept
    ]


def _alone(outputs: Sequence[Output]) -> str:
    """A note if several outputs look like one job whose processes did not find each other."""
    held = [output for output in outputs if output.facts.ranks]
    same = {(output.facts.parameters, output.facts.started) for output in held}
    singles = all({rank for rank, _, _ in output.facts.ranks} == {0} for output in held)
    tags = {output.tag for output in held}
    if len(held) < 2 or len(same) > 1 or not (singles or len(tags) == len(held)):
        return ""
    return (
        f"{len(held)} complete outputs with equal parameters, each with rank 0: if one mpirun "
        "started them, the program was built without MPI and each is a job of its own"
    )


def _table(output: Output, lines: Sequence[str], file: str) -> Table:
    facts, rows = output.facts, output.rows
    first_line = min(output.first_line, rows[0].line)
    heading = heading_above(lines, output.command_line or first_line)
    said = " ".join((heading, lines[output.command_line - 1] if output.command else ""))
    tool = nccl_facts.tool_of(facts, said)
    layout = layout_of(rows, facts.columns)
    kept = [row for row in rows if layout and len(row.cells) == layout.width]
    readings = _readings(kept, layout, output, tool) if layout else []
    collective, collective_from = _collective(output, readings, file)
    num_ranks, num_ranks_from, notes = _num_ranks(facts, readings, collective)
    is_zero_true = num_ranks == 1
    command = nccl_facts.command_from(lines[output.command_line - 1]) if output.command else ""
    return Table(
        file=file,
        index=0,
        first_line=first_line,
        last_line=max(row.last_line for row in rows),
        title=heading or command,
        tool=tool,
        version=facts.version,
        unit="busbw" if any(reading.rate is not None for reading in readings) else "",
        collective=collective,
        collective_from=collective_from,
        num_ranks=num_ranks,
        num_ranks_from=num_ranks_from,
        method=nccl_facts.method_of(facts, tool),
        readings=tuple(_censored(one, is_zero_true) for one in readings),
        notes=(
            *_lost(rows, kept, layout),
            *_about_units(facts, tool, rows),
            *(_missing_collective(readings) if not collective else ()),
            *notes,
            *_footer_notes(facts, readings),
        ),
    )


def _readings(rows: Sequence[Row], layout: Layout, output: Output, tool: str) -> list[Reading]:
    columns = output.facts.columns
    milliseconds = {"bytes", "n"} <= set(columns) or "(ms)" in columns
    enqueue = "cputime" in columns
    placements = _placements(layout, columns + output.facts.placements)
    is_count = not _is_error_column(rows, layout, columns)
    rate_unit = float(GIB) if tool == "nccom-test" else GB
    at = [layout.columns.index(name) for name in ("time", "algbw", "busbw")]
    wrong_at = layout.columns.index("wrong") if is_count and "wrong" in layout.columns else None
    width = len(layout.columns)
    found = []
    for row, cycle in zip(rows, _cycles(rows, output.num_openings > 1), strict=True):
        cells = row.cells[1:] if layout.has_root else row.cells
        root = value_of(row.cells[0]) if layout.has_root else None
        for index, placement in enumerate(placements):
            half = cells[index * width : (index + 1) * width]
            printed = half[at[0]], half[at[1]], half[at[2]]
            time, algbw, busbw = map(value_of, printed)
            if time is None and algbw is None and busbw is None:
                continue
            busbw_si = None if busbw is None else busbw * rate_unit
            seconds = None if time is None else time * (1e-3 if milliseconds else 1e-6)
            found.append(
                Reading(
                    line=row.line,
                    size_bytes=row.size,
                    count=row.count,
                    dtype=nccl_facts.dtype_named(row.dtype),
                    redop=row.redop,
                    root=None if root is None else int(root),
                    placement=placement,
                    time_s=None if enqueue or not seconds or seconds < 0 else seconds,
                    algbw_bytes_per_s=None if algbw is None else algbw * rate_unit,
                    busbw_bytes_per_s=busbw_si,
                    rate=busbw_si if enqueue and busbw_si and busbw_si > 0 else None,
                    num_wrong=None if wrong_at is None else _num_wrong(half[wrong_at]),
                    cycle=cycle,
                    printed=printed,
                )
            )
    return found


def _placements(layout: Layout, columns: Sequence[str]) -> tuple[str, ...]:
    """Out-of-place stands first. One group alone is told apart only by its header."""
    if layout.halves == 2:
        return OUT_OF_PLACE, IN_PLACE
    told = [word for word in (OUT_OF_PLACE, IN_PLACE) if word in columns]
    return (told[0] if len(told) == 1 else "",)


def _is_error_column(rows: Sequence[Row], layout: Layout, columns: Sequence[str]) -> bool:
    """Before 2.13 the last figure is a difference such as 4e-07, not a count."""
    if "error" in columns or "res" in columns:
        return True
    if "#wrong" in columns or "wrong" not in layout.columns:
        return False
    last = layout.columns.index("wrong") + layout.has_root
    return any("e-" in row.cells[last] or row.cells[last] == "0e+00" for row in rows)


def _num_wrong(text: str) -> int | None:
    value = value_of(text.rstrip("*"))
    return None if value is None or value < 0 else int(value)


def _cycles(rows: Sequence[Row], mixed: bool) -> list[int]:
    """Which repeat of its sweep each row belongs to: a sweep begins where sizes fall.

    A sweep of one size repeats it. mixed: lines of several outputs, each size several times.
    """
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(rows):
        root = row.cells[0] if len(row.cells) % 4 else ""
        kinds.setdefault((row.dtype, row.redop, root), []).append(index)
    cycles = [0] * len(rows)
    for held in kinds.values():
        sizes = [rows[index].size for index in held]
        repeated = mixed or (len(set(sizes)) == 1 and sizes[0] > 0)
        seen: dict[int, int] = {}
        cycle, last = 0, -1
        for index, size in zip(held, sizes, strict=True):
            cycle += size < last
            cycles[index] = seen.get(size, 0) if repeated else cycle
            seen[size], last = seen.get(size, 0) + 1, size
    return cycles


def _censored(reading: Reading, is_zero_true: bool) -> Reading:
    """A bandwidth printed as 0 is one below half of the last digit, unless it must be 0."""
    zero = reading.busbw_bytes_per_s == 0
    if not zero or is_zero_true or not reading.size_bytes or reading.printed is None:
        return reading
    algbw = reading.algbw_bytes_per_s or None
    below = half_unit(reading.printed[2]) * GB
    return replace(
        reading, rate=None, rate_below=below, busbw_bytes_per_s=None, algbw_bytes_per_s=algbw
    )


def _collective(output: Output, readings: Sequence[Reading], file: str) -> tuple[str, str]:
    """As stated in the output, its command, its file's name, or left by its figures."""
    if output.facts.started:
        return output.facts.started, "the line 'Collective test starting'"
    if output.command:
        return output.command, f"the command in line {output.command_line}"
    name = PurePath(file).name
    if in_name := nccl_facts.collective_in_text(name):
        return in_name, f"the file's name, {name}"
    return infer.collective_of(readings)


def _num_ranks(
    facts: Facts, readings: Sequence[Reading], collective: str
) -> tuple[int | None, str, tuple[str, ...]]:
    """(ranks, reason, notes)."""
    if facts.ranks:
        ranks = {rank: group for rank, group, _ in facts.ranks}
        same = [rank for rank, group in ranks.items() if group == ranks.get(0, 0)]
        of_all = f" of group 0, of {len(ranks)} in all" if len(same) < len(ranks) else ""
        reason = f"{len(same)} rank lines{of_all}"
        if len(ranks) == len(facts.ranks):
            return len(same), reason, ()
        twice = len(facts.ranks) - len(ranks)
        note = (
            f"{twice} rank lines name a rank a second time: outputs of several processes that "
            "did not find each other (a build without MPI) stand mixed"
        )
        return len(same), reason, (note,)
    num_ranks, reason = infer.num_ranks_of(readings, collective)
    if num_ranks is not None:
        return num_ranks, reason, ()
    why = f" ({reason})" if reason else ""
    return None, "", (f"the number of ranks is not known{why} (compare --ranks N)",)


def _missing_collective(readings: Sequence[Reading]) -> tuple[str, ...]:
    parts = infer.parts_of(readings)
    hint = ""
    if parts and parts > 1:
        hint = f"; size is {parts} x count: one of all_gather, all_to_all, gather, scatter"
    return (f"the collective is not known (compare --collective NAME){hint}",)


def _lost(rows: Sequence[Row], kept: Sequence[Row], layout: Layout | None) -> list[str]:
    """A note for each row that was left out, the first few of them."""
    if layout is None:
        return []
    complete = {row.line for row in kept}
    lost = [row for row in rows if row.line not in complete]
    notes = [
        f"line {row.line}: the last row is cut off after {len(row.cells)} of {layout.width} "
        "figures and left out"
        if row is rows[-1] and len(row.cells) < layout.width
        else f"line {row.line}: a row with {len(row.cells)} figures in place of "
        f"{layout.width} is left out"
        for row in lost[:5]
    ]
    return notes + ([f"{len(lost) - 5} more rows are left out"] if len(lost) > 5 else [])


def _about_units(facts: Facts, tool: str, rows: Sequence[Row]) -> list[str]:
    notes = []
    if {"bytes", "n"} <= set(facts.columns):
        notes.append("layout of nccl-tests 1.x: times are milliseconds")
    if "cputime" in facts.columns:
        notes.append("the time column is the time to enqueue (-C): it says nothing of busbw")
    if tool == "nccom-test":
        notes.append("nccom-test's GB/s are 2**30 bytes per second")
    starred = next((row for row in rows if any("*" in cell for cell in row.cells)), None)
    if starred:
        notes.append(f"{OUT_OF_BOUNDS}: an asterisk in line {starred.line}")
    return notes


def _footer_notes(facts: Facts, readings: Sequence[Reading]) -> list[str]:
    notes = [f"{OUT_OF_BOUNDS}: {facts.num_wrong}"] if facts.num_wrong else []
    average = value_of(facts.average)
    shown = [reading.printed[2] for reading in readings if reading.printed]
    rates = [rate for text in shown if (rate := value_of(text)) is not None]
    if average is None or not rates:
        return notes
    mean = sum(rates) / len(rates)
    rounding = sum(map(half_unit, shown)) / len(shown) + max(half_unit(facts.average), 5e-6)
    if abs(mean - average) > rounding + 1e-9 + abs(average) * 1e-5:
        notes.append(
            f"{ROWS_MISSING} is {average:g}, that of the rows here {mean:g}: rows are missing "
            "or were changed"
        )
    return notes
