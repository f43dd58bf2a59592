"""Decode JSON text of files, whose depth is bounded: functions recurse as deep as a value."""

import re
from typing import Any

import msgspec

MAX_DEPTH = 100  # files of real jobs nest less than 20
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def decode(text: bytes | str, kind: Any = Any) -> Any:
    """Return the value of JSON text as `kind`. Raise ValueError for any other text."""
    check_depth(text)
    return msgspec.json.decode(text, type=kind)


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
