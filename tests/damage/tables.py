"""Outputs of nccl-tests with known values, and what is read from them."""

from collections import Counter
from pathlib import Path
from random import Random

from tests.damage.mutators import (
    HARMLESS,
    Effect,
    Inputs,
    Lines,
    Mutator,
    Output,
    encoded,
    joined_lines,
    line_within_line,
    of_a_line,
)
from tests.text_tables.nccl_samples import HEAD, MODERN_RANK, old_time

from stepmark.findings.finding import Severity
from stepmark.ground.errors import ConfigError
from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Table
from stepmark.model.collectives import FACTS, Collective, Parts, busbw_factor
from stepmark.text_tables import find
from stepmark.text_tables.validate import validate

# Program: (its collective, redop, root).
PROGRAMS = {
    "all_reduce_perf": (Collective.ALL_REDUCE, "sum", -1),
    "all_gather_perf": (Collective.ALL_GATHER, "none", -1),
    "reduce_scatter_perf": (Collective.REDUCE_SCATTER, "sum", -1),
    "alltoall_perf": (Collective.ALL_TO_ALL, "none", -1),
    "broadcast_perf": (Collective.BROADCAST, "none", 0),
    "reduce_perf": (Collective.REDUCE, "sum", 0),
    "sendrecv_perf": (Collective.SENDRECV, "sum", -1),
}
DTYPES = {
    "float": ("fp32", 4),
    "bfloat16": ("bf16", 2),
    "half": ("fp16", 2),
    "int8": ("int8", 1),
}
Fact = tuple[object, ...]


def new_time(us: float) -> str:
    """From 2.17.3 on: six characters."""
    return f"{us:.2f}" if us < 1e4 else f"{us:.1f}" if us < 1e5 else f"{us:.0f}"


def output(random: Random, num_ranks: int | None = None) -> Output:
    """Return a run of one program without a slow size."""
    program = random.choice(list(PROGRAMS))
    collective, redop, root = PROGRAMS[program]
    num_ranks = num_ranks or random.choice((2, 3, 8, 16, 24, 64, 128, 1000))
    dtype = random.choice(list(DTYPES))
    name, itemsize = DTYPES[dtype]
    factor = random.choice((2, 4))
    smallest = num_ranks * 16 * random.choice((64, 1024))
    num_sizes = random.randint(6, 16)
    sizes = [smallest * factor**index for index in range(num_sizes)]
    latency, rate = random.uniform(8, 100), random.uniform(1e4, 4e5)  # us, bytes per us
    written_time = random.choice((old_time, new_time))
    facts = FACTS[collective]
    parts = 1 if facts.parts is Parts.WHOLE else num_ranks
    rows, values, rates = [], Counter[Fact](), []
    for size in sizes:
        words = [str(size), str(size // itemsize // parts), dtype, redop, str(root)]
        for placement in (OUT_OF_PLACE, IN_PLACE):
            us = (latency + size / rate) * random.uniform(1, 1.03)
            algbw = size / us / 1e3
            busbw = algbw * busbw_factor(collective, num_ranks)
            cells = (written_time(us), f"{algbw:.2f}", f"{busbw:.2f}")
            values[
                (
                    *(collective.value, num_ranks, size, name, redop, root, placement),
                    *(*map(float, cells), 0),
                )
            ] += 1
            rates.append(busbw)
            words += [*cells, "0"]
        widths = (12, 13, 9, 7, 7, *(8, 7, 7, 7) * 2)
        rows.append(
            " ".join(f"{word:>{width}}" for word, width in zip(words, widths, strict=True))
        )
    head = [
        "# nccl-tests version 2.17.6 nccl-headers=22803 nccl-library=22803",
        f"# Collective test starting: {program}",
        f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: {factor}(factor) "
        "warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0",
        "#",
        "# Using devices",
        *(MODERN_RANK.format(rank=rank) for rank in range(num_ranks)),
        *HEAD.splitlines(),
    ]
    foot = [
        "# Out of bounds values : 0 OK",
        f"# Avg bus bandwidth    : {sum(rates) / len(rates):g} ",
        "#",
        f"# Collective test concluded: {program}",
        "#",
    ]
    return Output(lines=[*head, *rows, *foot], values=values)


def values_of(tables: list[Table]) -> Counter[Fact]:
    """Return what was read, as `output` counts it."""
    return Counter(
        (
            *(
                table.collective,
                table.num_ranks,
                one.size_bytes,
                one.dtype,
                one.redop,
                one.root,
            ),
            *(one.placement, *map(float, one.printed or ()), one.num_wrong),
        )
        for table in tables
        for one in table.readings
    )


def reading(path: Path) -> tuple[Counter[Fact], list[str]]:
    """Return (values, all that says that something is wrong) of a file."""
    try:
        tables = find(path)
    except ConfigError as error:
        return Counter(), [str(error)]
    signs = [] if tables else ["no table found"]
    for table in tables:
        signs += table.notes
        signs += [one.rule for one in validate(table) if one.severity is not Severity.NOTE]
    return values_of(tables), signs


def _row(lines: Lines, random: Random) -> int:
    """Return the place of a row of figures."""
    return random.choice([at for at, line in enumerate(lines) if line[:1] == " "])


def _reordered(lines: Lines, random: Random) -> bytes:
    rows = [line for line in lines if line[:1] == " "]
    first = lines.index(rows[0])
    random.shuffle(rows)
    return encoded([*lines[:first], *rows, *lines[first + len(rows) :]])


def _two_jobs(lines: Lines, random: Random) -> bytes:
    """Mix two outputs line by line, each behind its task's mark."""
    marked = [[f"{task}: {line}" for line in one] for task, one in enumerate((lines, lines))]
    return encoded([line for pair in zip(*marked, strict=True) for line in pair])


def _without_cell(lines: Lines, random: Random) -> bytes:
    at = _row(lines, random)
    cells = lines[at].split()
    del cells[random.randrange(len(cells))]
    return encoded([*lines[:at], " ".join(["", *cells]), *lines[at + 1 :]])


def _without_column(lines: Lines, random: Random) -> bytes:
    column = random.randrange(13)
    changed = []
    for line in lines:
        cells = line.split()
        if line[:1] == " " and len(cells) == 13:
            del cells[column]
        changed.append(" ".join(["", *cells]) if line[:1] == " " else line)
    return encoded(changed)


def _is_fast(row: str) -> bool:
    return min(float(row.split()[column]) for column in (6, 7, 10, 11)) >= 1


def _other_digit(lines: Lines, random: Random) -> bytes:
    """Change the first digit of a figure of rates above 1, where rounding does not hide it."""
    rows = [n for n, line in enumerate(lines) if line[:1] == " " and _is_fast(line)]
    at = random.choice(rows)
    cells = lines[at].split()
    column = random.choice((5, 6, 7, 9, 10, 11))
    digit = random.choice([d for d in "123456789" if d != cells[column][0]])
    cells[column] = digit + cells[column][1:]
    return encoded([*lines[:at], " ".join(["", *cells]), *lines[at + 1 :]])


def _other_size(lines: Lines, random: Random) -> bytes:
    at = _row(lines, random)
    cells = lines[at].split()
    cells[0] = random.choice([d for d in "123456789" if d != cells[0][0]]) + cells[0][1:]
    return encoded([*lines[:at], " ".join(["", *cells]), *lines[at + 1 :]])


def _decimal_commas(lines: Lines, _: Random) -> bytes:
    return encoded([line.replace(".", ",") if line[:1] == " " else line for line in lines])


def _without_rank_line(lines: Lines, random: Random) -> bytes:
    ranks = [n for n, line in enumerate(lines) if line.startswith("#  Rank")]
    at = random.choice(ranks[:-1])
    return encoded([*lines[:at], *lines[at + 1 :]])


def _without_last_rank_line(lines: Lines, _: Random) -> bytes:
    """Leave one rank less, which a factor of 1 does not contradict."""
    at = max(n for n, line in enumerate(lines) if line.startswith("#  Rank"))
    return encoded([*lines[:at], *lines[at + 1 :]])


def _cut_before_footer(lines: Lines, random: Random) -> bytes:
    at = _row(lines, random)
    return encoded(lines[: at + 1])


def _cut_anywhere(lines: Lines, random: Random) -> bytes:
    data = encoded(lines)
    first = data.index(b"\n ")
    return data[: random.randrange(first + 1, len(data))]


def _other_ranks(lines: Lines, random: Random) -> bytes:
    """Mix rows of a job of another world size in, as one shared file has them."""
    other = output(random, num_ranks=4)
    rows = [line for line in other.lines if line[:1] == " "]
    mixed = list(lines)
    for row in rows:
        mixed.insert(_row(mixed, random), row)
    return encoded(mixed)


def _wrong_values(lines: Lines, random: Random) -> bytes:
    at = _row(lines, random)
    cells = lines[at].split()
    cells[random.choice((8, 12))] = str(random.randint(1, 10**6))
    return encoded([*lines[:at], " ".join(["", *cells]), *lines[at + 1 :]])


def _broken_rows(lines: Lines, random: Random) -> bytes:
    """Break rows in two, as a narrow terminal does that puts newlines in."""
    at = _row(lines, random)
    cut = lines[at].index(lines[at].split()[4]) + 30
    rest = lines[at][cut:].strip()
    place = lines[at].rindex(rest)
    return encoded([*lines[:at], lines[at][:place], rest, *lines[at + 1 :]])


def _without_middle(lines: Lines, random: Random) -> bytes:
    first, last = sorted((_row(lines, random), _row(lines, random)))
    return encoded([*lines[:first], *lines[last + 1 :]])


MUTATORS = (
    *HARMLESS,
    *of_a_line("row", _row),
    Mutator("rows lost", Effect.DETECTABLE, _without_middle),
    Mutator("rows reordered", Effect.DETECTABLE, _reordered),
    Mutator("two jobs", Effect.DETECTABLE, _two_jobs),
    Mutator("cell lost", Effect.DETECTABLE, _without_cell),
    Mutator("column lost", Effect.DETECTABLE, _without_column),
    Mutator("other digit", Effect.DETECTABLE, _other_digit),
    Mutator("other size", Effect.DETECTABLE, _other_size),
    Mutator("decimal commas", Effect.DETECTABLE, _decimal_commas),
    Mutator("rank line lost", Effect.DETECTABLE, _without_rank_line),
    Mutator("last rank line lost", Effect.UNDETECTABLE, _without_last_rank_line),
    Mutator("cut before footer", Effect.DETECTABLE, _cut_before_footer),
    Mutator("cut anywhere", Effect.DETECTABLE, _cut_anywhere),
    Mutator("rows of other ranks", Effect.DETECTABLE, _other_ranks),
    Mutator("wrong values", Effect.DETECTABLE, _wrong_values),
    Mutator("row broken", Effect.DETECTABLE, _broken_rows),
    Mutator("lines joined", Effect.DETECTABLE, joined_lines),
    Mutator("line in line", Effect.DETECTABLE, line_within_line),
)


class Tables(Inputs):
    """Outputs of nccl-tests."""

    @property
    def mutators(self) -> tuple[Mutator, ...]:
        return MUTATORS

    def output(self, random: Random) -> Output:
        return output(random)

    def reading(self, path: Path) -> tuple[Counter[Fact], list[str]]:
        return reading(path)

    def truth(self, output: Output, mutator: Mutator, path: Path) -> Counter[Fact]:
        return output.values + output.values if mutator.name == "two jobs" else output.values
