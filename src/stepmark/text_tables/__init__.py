"""Find the tables of results in a file by its content, whatever its name.

- nccl_text.py, nccl_lines.py, nccl_notes.py, nccl_json.py: nccl-tests and rccl-tests.
- stopped_outputs.py: outputs that end before their last row.
- benchmark_text.py: mscclpp-test, PARAM, OSU, all_reduce_bench, DeepSpeed.
- delimited_rows.py: rows of CSV, TSV and Markdown.
- result_csv.py, slide_tables.py, printed_figures.py: CSVs, slides, printed numbers.
- validate.py: figures of a table against each other.
- profiler_table.py, profiler_text.py, perftools.py, profiler_checks.py: tables of profilers.
- profiler_tables_verb.py: `stepmark trace breakdown FILE`.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.ground.garbage import no_collection
from stepmark.ground.read_text import lines_of, read_text
from stepmark.ground.reading import MEASUREMENT, Table
from stepmark.ground.units import comma_list, format_bytes
from stepmark.text_tables import (
    benchmark_text,
    nccl_json,
    nccl_text,
    result_csv,
    slide_tables,
)
from stepmark.text_tables.stopped_outputs import NO_ROW_FITS, StoppedOutput, stops_of

_MARKS = re.compile(  # a line's head crosses no newline: thousands of empty lines may follow
    r"^\#?[^\S\n]*nThreads?:? +\d+ +nGpus:? +\d"
    r"|^\S*[^\S\n]*\#\s+(?:size|bytes)\s+(?:count|N)\s+type\b"
    r"|out-of-place\s+in-place"
    r"|Collective test starting:|Out of bounds values\s*:|Avg bus bandwidth\s*:"
    r"|^[^\n\d]{0,40}\d{1,19}[\s|]+\d{1,19}[\s|]+"
    r"(?:u?int(?:8|32|64)|half|float|double|bfloat16|f8e\wm\d|fp8\w*)[\s|]"
    r"|_samples_per_second|_steps_per_second|\"(?:out_of_place|alg_bw|algBw|nccl_version)\""
    r"|\bCOMMS-RES|Comm\. Op {2,}Message Size|#\s*OSU \S+ .*Test|The average bandwidth "
    r"|#\s+size\s+count\s+time\s+algbw"
    r"|^(?:numCycle|collective),\s?\S|^family,(?:[\w.]+,){3}",
    re.MULTILINE,
)
_HEAD = 65536


@dataclass(frozen=True, slots=True)
class FileTables:
    """All tables of a file, in order, and the outputs in it that end before their last row."""

    file: str
    tables: list[Table]
    stopped: list[StoppedOutput]

    def check(self) -> None:
        """Raise ConfigError for headings without rows in a file without any table."""
        if self.stopped and not self.tables:
            stop = self.stopped[0]
            allowed = f"a file with a row of results: its output of {stop.tool} {stop.text}"
            raise ConfigError("file", self.file, allowed)


def find(path: Path) -> list[Table]:
    """Return all tables of a file, in order of appearance and numbered from 1.

    Raises ConfigError for a file that cannot be read, is empty or binary. A text without any
    table gives an empty list.
    """
    return read_tables(path).tables


def read_tables(path: Path) -> FileTables:
    """Return the tables of a file, and its outputs that stop. Raises ConfigError as find."""
    with no_collection():
        return _numbered(read_text(path), str(path))


def tables_of(text: str, file: str) -> list[Table]:
    """Return all tables of a text that was read already."""
    return _numbered(text, file).tables


def _numbered(text: str, file: str) -> FileTables:
    tables, stopped = _read(text, file)
    tables.sort(key=lambda table: table.first_line)
    numbered = [
        replace(table, index=index, notes=(*table.notes, *repeat_notes(table)))
        for index, table in enumerate(tables, 1)
    ]
    return FileTables(file, numbered, stopped)


def repeat_notes(table: Table) -> tuple[str, ...]:
    """Return a note on the sizes and labels that occur more than once."""
    counts = Counter(
        map(MEASUREMENT, (each for each in table.readings if each.size_bytes != 0))
    )
    if max(counts.values(), default=0) < 2:
        return ()
    names = {
        reading.label or format_bytes(reading.size_bytes or 0): None
        for reading in table.readings
        if counts[reading.measurement] > 1
    }
    sizes = comma_list(names, 3)
    return (f"repeats: the table has {sizes} up to {max(counts.values())} times",)


def looks_like_tables(head: str) -> bool:
    """Return whether the beginning of a text has marks of a table; a quick test for sorting.

    A log of NCCL alone has none. It may be wrong either way: tables may begin after the head.
    """
    head = head[:_HEAD]
    return bool(_MARKS.search(head)) or bool(slide_tables.read(lines_of(head), ""))


def _read_csv(text: str, head: str, file: str) -> tuple[list[Table], list[StoppedOutput]]:
    is_stepmark = result_csv.is_stepmark(head)
    read = result_csv.read_stepmark if is_stepmark else result_csv.read_rccl
    tables = read(text, file)
    lost = [] if is_stepmark else result_csv.missing_rccl_names(head)
    unread = f"its heading lacks {', '.join(lost)}" if lost else NO_ROW_FITS
    if is_stepmark:
        unread = "none of its rows has a time"
    stop = StoppedOutput(
        tool="stepmark" if is_stepmark else "rccl-tests",
        first_line=1,
        header_line=1,
        last_line=1,
        unread=unread if "\n" in text.strip() else "",
    )
    return tables, [] if tables else [stop]


def _read(text: str, file: str) -> tuple[list[Table], list[StoppedOutput]]:
    head = text[:_HEAD].lstrip()
    if result_csv.is_stepmark(head) or result_csv.is_rccl(head):
        return _read_csv(text, head, file)
    if head[:1] in ("{", "["):
        tables, stops = nccl_json.read(text, file)
        tables = tables or result_csv.read_rccl_json(text, file)
        if tables or stops:
            return tables, stops
    lines = lines_of(text)
    outputs = nccl_text.outputs_of(lines)
    others, other_stops = benchmark_text.read(text, lines, file)
    tables = [
        *nccl_text.tables_of(outputs, lines, file),
        *slide_tables.read(lines, file),
        *slide_tables.read_trainer(lines, file),
        *others,
    ]
    return tables, [*stops_of(outputs), *other_stops]
