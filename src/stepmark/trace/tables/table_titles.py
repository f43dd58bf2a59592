"""The heading above a table in notes, slides and logs."""

import re
from collections.abc import Sequence

MAX_DISTANCE = 60  # lines between a table and its heading
_MAX_LENGTH = 100
_BULLET = re.compile(r"\s*(?:[-*+•]|\d{1,2}[.)])\s+(?P<text>.*)")
_MARKDOWN = re.compile(r"\s*#{1,6}\s+(?P<text>[^\s#].*)")
# Bullets, code, rows of figures, log lines and commands.
_NOT_A_HEADING = re.compile(
    r"\s*(?:[-+•(<{$>\[#]|\*\s|```|\d{1,2}[.)]\s|\d[\d.,]*(?:\t|\s{2})|\|"
    r"|.*(?:NCCL (?:INFO|WARN)|_perf\b|\b(?:srun|mpirun|mpiexec|torchrun)\b))"
)
# Lines of nccl-tests that resemble a Markdown heading.
_NCCL_TESTS_LINE = re.compile(
    r"#\s*(?:nThread|Using devices|Rank\b|out-of-place|size\b|bytes\b|\(B\)|Out of bounds|"
    r"Avg bus|Collective test|\w+-tests version|Blocking Enabled|Errors with|mode \w+ \()"
)


def heading_above(lines: Sequence[str], first_line: int) -> str:
    """Return the nearest heading above line `first_line` (from 1), or ""."""
    lowest = max(-1, first_line - 2 - MAX_DISTANCE)
    headings = (_heading(lines, index) for index in range(first_line - 2, lowest, -1))
    return next(filter(None, headings), "")


def label_above(lines: Sequence[str], first_line: int) -> str:
    """Return the text of the bullet directly above, past blank lines and code fences."""
    for index in range(first_line - 2, max(-1, first_line - 8), -1):
        line = lines[index].strip()
        if not line or line.startswith("```"):
            continue
        bullet = _BULLET.match(lines[index])
        label = bullet["text"].strip("*_`: ") if bullet else ""
        return label if len(label) <= _MAX_LENGTH else ""
    return ""


def _heading(lines: Sequence[str], index: int) -> str:
    """Return this line without its markup if it is a heading: alone, short, no sentence."""
    line, text = lines[index], lines[index].strip()
    if len(line) > 2 * _MAX_LENGTH or _NCCL_TESTS_LINE.match(text):
        return ""
    above = lines[index - 1].strip() if index else ""
    if above:
        return ""
    if markdown := _MARKDOWN.match(line):
        return markdown["text"].strip("#*_ ")[:_MAX_LENGTH]
    if not text or len(text) > _MAX_LENGTH or text[-1] in ".,;:{}\\" or "\t" in text:
        return ""
    below = lines[index + 1] if index + 1 < len(lines) else ""
    if _NOT_A_HEADING.match(line) or (below.strip() and not _BULLET.match(below)):
        return ""
    return text.strip("*_ ") if sum(map(str.isalpha, text)) >= 3 else ""
