"""Read rows of cells: CSV, its variants, tables of Markdown, and columns between spaces."""

import csv
import re
from collections.abc import Iterator, Sequence

from stepmark.ground.read_text import lines_of

_DELIMITERS = ",\t;|"
_RULE = re.compile(r"\s*:?-+:?\s*")  # a cell of the line below a heading
_IS_RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?)?")
_MARKDOWN = " *`"  # around the text of a cell
_BEFORE_UNIT = re.compile(r" +(?=[(\[%]|(?:s|ms|us|min|h)(?:\s|$))")  # inside a cell
_WIDE = re.compile(r"\s{2,}")  # between cells that have spaces
_DECIMAL_COMMA = re.compile(r"^(\D*\d+),(\d{1,2}|\d{4,})(\D*)$")


def read_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the last line, from 1, and the cells of each row, the heading first.

    The delimiter is the one that the heading has most often; without any, it is space. Text
    around a table of Markdown is left out; between semicolons, numbers may have decimal commas.
    """
    lines = _without_text(lines_of(text))
    heading = next((line for line in lines if line.strip()), "")
    delimiter = max(_DELIMITERS, key=heading.count)
    is_markdown = delimiter == "|"
    if is_markdown:
        lines = [line.strip().removeprefix("|").removesuffix("|") for line in lines]
    if delimiter not in heading:
        lines = _between_spaces(lines)
        delimiter = "\t"
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    for cells in reader:
        if all(map(_RULE.fullmatch, cells)) or not any(map(str.strip, cells)):
            continue
        own = [cell.strip(_MARKDOWN if is_markdown else None) for cell in cells]
        if delimiter == ";":
            own = [_DECIMAL_COMMA.sub(r"\1.\2\3", cell) for cell in own]
        yield reader.line_num, own


def _without_text(lines: Sequence[str]) -> list[str]:
    """Return the lines with empty ones for those around the first table of Markdown."""
    rules = (number for number, line in enumerate(lines) if _IS_RULE.fullmatch(line.strip()))
    if not (rule := next(rules, 0)):
        return [*lines]
    end = next((n for n in range(rule, len(lines)) if "|" not in lines[n]), len(lines))
    return [line if rule - 1 <= n < end else "" for n, line in enumerate(lines)]


def _between_spaces(lines: Sequence[str]) -> list[str]:
    """Return lines with tabs between cells, which two spaces part where all rows have them."""
    wide = [_WIDE.split(line.strip()) for line in lines]
    sizes = {len(cells) for cells in wide if any(cells)}
    if sizes == {max(sizes, default=1)} and sizes != {1}:
        return ["\t".join(cells) for cells in wide]
    return ["\t".join(_BEFORE_UNIT.sub("", line).split()) for line in lines]
