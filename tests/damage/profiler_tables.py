"""Tables that torch printed, with their cells, and what is read from them."""

import gzip
import re
from collections import Counter
from functools import cache
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

from stepmark.ground.errors import ConfigError
from stepmark.text_tables.profiler_tables_verb import read_tables

DATA = Path(__file__).parents[1] / "data" / "profiler-tables"
Fact = tuple[object, ...]
_TORCH = frozenset(("host-call",))  # faults of torch's own numbers


@cache
def _tables() -> list[list[str]]:
    """Return the lines of tables of up to 40 rows, each with the sums below it."""
    tables = []
    for name in ("h100", "h200-fsdp8"):
        text = gzip.decompress((DATA / f"{name}.txt.gz").read_bytes()).decode()
        for match in re.finditer(r"^-.*?^Self CUDA time total: \S+$", text, re.M | re.S):
            lines = match[0].split("\n")
            if len(lines) < 50:
                tables.append(lines)
    return tables


def output(random: Random) -> Output:
    lines = random.choice(_tables())
    values = Counter[Fact](tuple(re.split(r" {2,}", line.strip())) for line in lines[3:-3])
    values.update(("sum", line.split(": ")[1]) for line in lines[-2:])
    return Output(lines=lines, values=values)


def reading(path: Path) -> tuple[Counter[Fact], list[str]]:
    """Return (rows and sums, all that says that something is wrong) of a file."""
    try:
        tables = read_tables(path)
    except ConfigError as error:
        return Counter(), [str(error)]
    values, signs = Counter[Fact](), list[str]()
    for table in tables:
        values.update((row.name, *_printed(row.figures)) for row in table.rows)
        values.update(("sum", total.printed) for total in table.totals.values())
        signs += [flag.rule for flag in table.flags if flag.rule not in _TORCH]
    return values, signs


def _printed(figures: dict[str, object]) -> list[str]:
    return [str(figure.printed) for figure in figures.values()]


def _row(lines: Lines, random: Random) -> int:
    return random.randrange(3, len(lines) - 3)


def _other_digit(lines: Lines, random: Random) -> bytes:
    """Change the first digit of a total time of the CPU."""
    cell = re.compile(r"% +(?=[1-9]\d*\.\d+[mu]?s +[1-9\d.]+[mu]?s  )")
    places = [n for n, line in enumerate(lines) if len(list(cell.finditer(line))) > 0]
    at = random.choice(places)
    end = list(cell.finditer(lines[at]))[-1].end()
    digit = random.choice([d for d in "123456789" if d != lines[at][end]])
    line = lines[at][:end] + digit + lines[at][end + 1 :]
    return encoded([*lines[:at], line, *lines[at + 1 :]])


def _cut_anywhere(lines: Lines, random: Random) -> bytes:
    data = encoded(lines)
    return data[: random.randrange(len(data) - 1)]


_OF_A_ROW = of_a_line("row", _row)
_AMONG_OTHERS = next(mutator for mutator in HARMLESS if mutator.name == "lines of others")


class ProfilerTables(Inputs):
    """Tables of torch's profiler. Lines of others among the rows are said to be no rows."""

    @property
    def mutators(self) -> tuple[Mutator, ...]:
        lost = next(mutator for mutator in _OF_A_ROW if mutator.name == "row lost")
        return (
            *(mutator for mutator in HARMLESS if mutator is not _AMONG_OTHERS),
            Mutator(_AMONG_OTHERS.name, Effect.DETECTABLE, _AMONG_OTHERS.apply),
            *(mutator for mutator in _OF_A_ROW if mutator is not lost),
            Mutator(lost.name, Effect.UNDETECTABLE, lost.apply),  # tables show the first rows
            Mutator("lines joined", Effect.DETECTABLE, joined_lines),
            Mutator("line in line", Effect.DETECTABLE, line_within_line),
            Mutator("cut anywhere", Effect.DETECTABLE, _cut_anywhere),
            Mutator("other digit", Effect.DETECTABLE, _other_digit),
        )

    def output(self, random: Random) -> Output:
        return output(random)

    def reading(self, path: Path) -> tuple[Counter[Fact], list[str]]:
        return reading(path)
