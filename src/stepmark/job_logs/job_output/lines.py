"""Lines of a job's output: the rank that wrote each, without the launcher's prefixes."""

import re

_RANK_TAG = re.compile(r"\[rank(\d{1,8})\]:? ?")
_LAUNCHER_TAG = re.compile(
    r"^(?: {0,5}(?P<srun>\d{1,6}): |\[(?P<hydra>\d{1,6})\] "
    r"|\[(?:[\w.-]{1,80}@)?\d+,(?P<mpi>\d{1,6})\]<std(?:err|out)>: ?"
    r"|[a-z][a-z0-9.-]{0,62}\d: "  # pdsh
    r"|\[default(?P<local>\d+)\]: ?|\((?P<worker>[^()]{1,80})\) ?"
    r"|\[pod/[\w./-]{1,253}\] |[A-Za-z][\w.-]{0,63}-\d{1,6} +\| )"
)
# A numbered frame of a backtrace: its address, its symbol, of C++ and Rust too, or Python's
# file, which is indented further where a label precedes a traceback.
_FRAME = re.compile(
    r'^ {0,5}\d{1,6}: (?:File "|<?0x[\da-f]{4,16}\b'
    r"|[^\s(+]{0,500}(?:\([^()]{0,500})?\+0x[\da-f]"
    r"|[a-z_]\w{0,200}$|<.{1,500}>::[\w{}:]{1,200}$"
    r"|[\w<>&*$]{1,200}(?:::[\w<>{}$~&*,]{1,200})+(?:\(.*)?$)"
)
_LOGGER = re.compile(
    r"^(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]{1,80}:\d+\] ?"
    r"|^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,10}(?:Z| |[+-]\d\d:?\d\d)\s?"
    r"|^\[\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,10}\] ?"
    r"|^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d "
)


_NCCL_MARKS = (b"NCCL INFO ", b"NCCL WARN ", b"NCCL CALL ", b"NCCL TRACE ")


def has_nccl_line(text: bytes) -> bool:
    """Return whether a text has a line of NCCL's or RCCL's debug output."""
    return any(mark in text for mark in _NCCL_MARKS)


def split_tag(text: str) -> tuple[int | None, str, str]:
    """Return (rank, stream, line without the launcher's and the logger's prefixes)."""
    rank = None
    tag = ""
    if match := _RANK_TAG.search(text, 0, 90):
        return int(match[1]), f"rank{match[1]}", text[match.end() :]
    text = _LOGGER.sub("", text, count=1)
    if (match := _LAUNCHER_TAG.match(text)) and not (match["srun"] and _FRAME.match(text)):
        number = match["srun"] or match["mpi"] or match["hydra"]
        # What follows a tag may be indented, so a space after it is not its own.
        tag = match[0].rstrip(": ")
        text = text[match.end() :]
        rank = int(number) if number else None
    return rank, tag, _LOGGER.sub("", text, count=1)


def whole_lines(text: str) -> list[str]:
    """Return the lines. Of a last line without end, a last word that may be cut is left out."""
    lines = text.split("\n")
    if lines[-1][-1:].isalnum():
        lines[-1] = lines[-1].rpartition(" ")[0]
    return lines


def numbers_of(text: str) -> list[int]:
    """Return the numbers of "0, 2-4"."""
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        low, _, high = part.partition("-")
        if low.isdecimal():
            last = int(high) if high.isdecimal() else int(low)
            numbers += range(int(low), min(last, int(low) + 4096) + 1)
    return numbers
