"""Read rows of cells: CSV, its variants, tables of Markdown, and columns between spaces."""

import csv
import re
from collections.abc import Iterator

from stepmark.ground.read_text import lines_of

_DELIMITERS = ",\t;|"
_RULE = re.compile(r"\s*:?-+:?\s*")  # a cell of the line below a heading
_MARKDOWN = " *`"  # around the text of a cell
_BEFORE_UNIT = re.compile(r" +(?=[(\[%]|(?:s|ms|us|min|h)(?:\s|$))")  # inside a cell


def read_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the last line, from 1, and the cells of each row, the heading first.

    The delimiter is the one that the heading has most often; without any, it is space.
    """
    lines = lines_of(text)
    heading = next((line for line in lines if line.strip()), "")
    delimiter = max(_DELIMITERS, key=heading.count)
    is_markdown = delimiter == "|"
    if is_markdown:
        lines = [line.strip().removeprefix("|").removesuffix("|") for line in lines]
    if delimiter not in heading:
        lines = ["\t".join(_BEFORE_UNIT.sub("", line).split()) for line in lines]
        delimiter = "\t"
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    for cells in reader:
        if all(map(_RULE.fullmatch, cells)) or not any(map(str.strip, cells)):
            continue
        chars = _MARKDOWN if is_markdown else None
        yield reader.line_num, [cell.strip(chars) for cell in cells]
