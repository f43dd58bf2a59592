"""Any file of results to its tables: looks at what it holds, not at its name."""

import re
from dataclasses import replace
from pathlib import Path

from stepmark.core.reading import Table
from stepmark.trace import (
    nccl_tests,
    nccl_tests_json,
    own_csv,
    rccl_csv,
    trainer,
    values,
)
from stepmark.trace.opening import lines_of, read_text

_MARKS = re.compile(
    r"^\#?\s*nThreads?:? +\d+ +nGpus:? +\d"
    r"|^\S*\s*\#\s+(?:size|bytes)\s+(?:count|N)\s+type\b"
    r"|out-of-place\s+in-place|size\(B\)\s+count\(elems\)"
    r"|Collective test starting:|Out of bounds values\s*:|Avg bus bandwidth\s*:"
    r"|^[^\n\d]{0,40}\d{1,19}[\s|]+\d{1,19}[\s|]+"
    r"(?:u?int(?:8|32|64)|half|float|double|bfloat16|f8e\wm\d|fp8\w*)[\s|]"
    r"|_samples_per_second|_steps_per_second|\"(?:out_of_place|alg_bw|algBw)\""
    r"|^(?:numCycle|collective),\s?\S|^family,(?:[\w.]+,){3}",
    re.MULTILINE,
)
_HEAD = 65536


def find(path: Path) -> list[Table]:
    """All tables of a file, in order of appearance and numbered from 1.

    Raises ConfigError for a file that cannot be read, is empty or binary. A text without any
    table gives an empty list.
    """
    return tables_of(read_text(path), str(path))


def tables_of(text: str, file: str) -> list[Table]:
    """As find, of a text that was read already."""
    found = _read(text, file)
    found.sort(key=lambda table: table.first_line)
    return [replace(table, index=index) for index, table in enumerate(found, 1)]


def looks_like_tables(head: str) -> bool:
    """Whether the beginning of a text has what a table of ours has: quick, for sorting files.

    A log of NCCL alone has not. True is no promise; tables may also begin after the head.
    """
    head = head[:_HEAD]
    return bool(_MARKS.search(head)) or bool(values.read(lines_of(head), ""))


def _read(text: str, file: str) -> list[Table]:
    start = text[:_HEAD].lstrip()
    if own_csv.is_ours(start):
        return own_csv.read(text, file)
    if rccl_csv.is_csv(start):
        return rccl_csv.read(text, file)
    if start[:1] in "{[" and (found := nccl_tests_json.read(text, file)):
        return found
    if start[:1] in "{[" and (found := rccl_csv.read_json(text, file)):
        return found
    lines = lines_of(text)
    return [
        *nccl_tests.read(lines, file),
        *values.read(lines, file),
        *(trainer.read(lines, file) if trainer.is_mentioned(text) else ()),
    ]
