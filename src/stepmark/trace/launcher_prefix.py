"""What launchers write in front of each line: the task's tag, a time stamp, a host."""

import re

# A tag names the task; a time stamp differs from line to line and names nothing.
_TAG = re.compile(
    r"""\s*(?:
        \[(?:default|rank)?\d{1,6}(?:,\s?\d{1,6})?\](?:<std(?:out|err)>)?:?  # torchrun, mpirun
      | \d{1,6}:(?=\s)                                                  # srun --label
      | \([A-Za-z_][^()\n]{0,80}\bpid=\d{1,9}[^()\n]{0,60}\)             # Ray
      | [A-Za-z][\w.-]{0,63}:(?=\s+(?:\#|\d{1,19}\s+\d{1,19}\s+[a-z]))    # pdsh, clush
    )[ ]?""",
    re.VERBOSE,
)
_STAMP = re.compile(
    r"\s*\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?[ ]?"
)
_MOST = 3


def split_prefix(line: str) -> tuple[str, str]:
    """(tag, rest): the tag is "" for a line that no launcher marked."""
    tags, rest = [], line
    for _ in range(_MOST):
        if stamp := _STAMP.match(rest):
            rest = rest[stamp.end() :]
        elif tag := _TAG.match(rest):
            tags.append(re.sub(r"<.*>:?|:", "", tag[0]).strip())
            rest = rest[tag.end() :]
        else:
            break
    return " ".join(tags), rest
