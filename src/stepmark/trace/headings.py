"""The heading that stands above a table in notes and slides."""

import re
from collections.abc import Sequence

# How far above a table its heading can stand, in lines.
REACH = 60
_LONGEST = 100
_BULLET = re.compile(r"\s*(?:[-*+•]|\d{1,2}[.)])\s+(?P<text>.*)")
_NO_HEADING = re.compile(
    r"\s*(?:[-+•(<{$>\[#]|\*\s|```|\d{1,2}[.)]\s|\d[\d.,]*(?:\t|\s{2})|\|"
    r"|.*(?:NCCL (?:INFO|WARN)|_perf\b|\b(?:srun|mpirun|mpiexec|torchrun)\b))"
)
_MARKDOWN = re.compile(r"\s*#{1,6}\s+(?P<text>[^\s#].*)")
# Lines of nccl-tests that read like a Markdown heading.
_OUTPUT = re.compile(
    r"#\s*(?:nThread|Using devices|Rank\b|out-of-place|size\b|bytes\b|\(B\)|Out of bounds|"
    r"Avg bus|Collective test|\w+-tests version|Blocking Enabled|Errors with|mode \w+ \()"
)


def heading_above(lines: Sequence[str], first_line: int) -> str:
    """The nearest heading above line `first_line` (from 1); "" if none is near."""
    for index in range(first_line - 2, max(-1, first_line - 2 - REACH), -1):
        found = _heading(lines, index)
        if found:
            return found
    return ""


def label_above(lines: Sequence[str], first_line: int) -> str:
    """The bullet that stands right above, past blank lines and a code fence."""
    for index in range(first_line - 2, max(-1, first_line - 8), -1):
        line = lines[index].strip()
        if not line or line.startswith("```"):
            continue
        bullet = _BULLET.match(lines[index])
        label = bullet["text"].strip("*_`: ") if bullet else ""
        return label if len(label) <= _LONGEST else ""
    return ""


def _heading(lines: Sequence[str], index: int) -> str:
    """This line without its marks, if it is a heading: alone, short and no sentence."""
    line = lines[index]
    if len(line) > 2 * _LONGEST or _OUTPUT.match(line.strip()):
        return ""
    above = lines[index - 1].strip() if index else ""
    if (markdown := _MARKDOWN.match(line)) and not above:
        return markdown["text"].strip("#*_ ")[:_LONGEST]
    text = line.strip()
    if not text or len(text) > _LONGEST or text[-1] in ".,;:{}\\" or _NO_HEADING.match(line):
        return ""
    below = lines[index + 1] if index + 1 < len(lines) else ""
    alone = not above and (not below.strip() or _BULLET.match(below) is not None)
    return text.strip("*_ ") if alone and "\t" not in text and _has_words(text) else ""


def _has_words(text: str) -> bool:
    return sum(char.isalpha() for char in text) >= 3
