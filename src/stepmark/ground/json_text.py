"""Decode JSON text of files, whose depth is bounded: functions recurse as deep as a value."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_DEPTH = 100  # files of real jobs nest less than 20
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def decode(text: bytes | str, kind: Any = Any) -> Any:
    """Return the value of JSON text as `kind`. Raise ValueError for any other text."""
    check_depth(text)
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise ValueError(_with_line(str(error), text)) from None


def _with_line(error: str, text: bytes | str) -> str:
    """Return msgspec's error with the line and the column in place of the byte."""
    data = text.encode() if isinstance(text, str) else text
    place = re.search(r"^(?:JSON is malformed: )?(.*) \(byte (\d+)\)$", error)
    reason, end = "it ends too early", len(data.rstrip())
    if place:
        reason, end = place[1], int(place[2])
    elif "truncated" not in error:
        return error
    column = end - data.rfind(b"\n", 0, end)
    line = data.count(b"\n", 0, end) + 1
    return f"line {line}, column {column}: {reason}"


def as_object(value: object) -> Mapping[str, Any]:
    """Return a decoded object; {} for any other value."""
    return value if isinstance(value, dict) else {}


def check_depth(text: bytes | str) -> None:
    """Raise ValueError for JSON that nests deeper than MAX_DEPTH."""
    data = text.encode() if isinstance(text, str) else text
    if _is_deep(data) and _is_deep(_STRING.sub(b"", data)):
        raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")


def _is_deep(text: bytes) -> bool:
    """Return whether brackets nest deeper than MAX_DEPTH, those inside strings included."""
    brackets = text.translate(None, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):  # each turn removes the innermost level
        outer = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(outer) == len(brackets):  # what is left is never closed
            return len(outer) > MAX_DEPTH
        brackets = outer
    return bool(brackets)
