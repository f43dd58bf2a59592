"""Read the summary that DeepSpeed's communication logger prints (deepspeed.comm.log_summary).

A line with the operation stands above a row per message size. Sizes are in binary units and
rounded, so they are labels here. Times are milliseconds: the average is trimmed by a tenth at
both ends, so that it times the calls is not the total. With show_straggler=True a second table
divides them into communication, the shortest time of any rank, and waiting for stragglers.
Bus bandwidth (Gbit/s) is kept where the size is counted as nccl-tests does: versions differ in
the size of gathers and scatters. Format: utils/comms_logging.py of deepspeedai/DeepSpeed.
"""

import re
from collections.abc import Iterator, Sequence

from stepmark.ground.reading import Reading, Table
from stepmark.text_tables.nccl_lines import split_prefix
from stepmark.text_tables.printed_figures import NUMBER, parse_number
from stepmark.text_tables.stopped_outputs import StoppedOutput

_MARK = "Comm. Op"
_HEADINGS = re.compile(
    r"\bComm\. Op\s+Message Size\s+Count\s+(?:Total (?P<kind>Latency|comm lat)\(ms\)\s+"
    r"(?:Avg Latency\(ms\)\s+tput_avg \(Gbps\)\s+busbw_avg \(Gbps\)"
    r"|Total straggler\(ms\)\s+Avg comm lat\(ms\)\s+Avg straggler\(ms\)))\s*$"
)
_OPERATION = re.compile(r"\s*(?P<name>[a-z]\w{2,60}(?: \| \[Caller Func: \w{1,80}\])?)\s*$")
_ROW = re.compile(
    r"\s*(?P<size>0B|\d{1,20}(?:\.\d{1,3})? [KMGTP]?B)\s+(?P<count>\d{1,12})"
    rf"\s+(?P<first>{NUMBER})\s+(?P<second>{NUMBER})\s+(?P<third>{NUMBER})"
    rf"\s+(?P<fourth>{NUMBER})\s*$"
)
# Operations whose size is that of nccl-tests in all versions.
_WHOLE = re.compile(r"(?:all_reduce|inference_all_reduce|broadcast|reduce|i?send|i?recv)\b")
_COLUMNS = ("average", "total")
_STRAGGLER_COLUMNS = (*_COLUMNS, "average straggler", "total straggler")
_MAX_GAP = 60


def read(text: str, lines: Sequence[str], file: str) -> tuple[list[Table], list[StoppedOutput]]:
    """Return (tables, headings without rows), in order."""
    tables: list[Table] = []
    stops: list[StoppedOutput] = []
    heads = enumerate(lines) if _MARK in text else ()
    for index, line in heads:
        if _MARK not in line or not (head := _HEADINGS.search(line)):
            continue
        has_stragglers = head["kind"] != "Latency"
        readings = tuple(_readings(lines, index, has_stragglers=has_stragglers))
        if not readings:
            stop = StoppedOutput(
                tool="DeepSpeed's communication logger",
                first_line=index + 1,
                header_line=index + 1,
                last_line=index + 1,
            )
            stops.append(stop)
            continue
        table = Table(
            file=file,
            first_line=index + 1,
            last_line=readings[-1].line,
            title="communication and stragglers" if has_stragglers else "communication",
            tool="DeepSpeed",
            unit="s",
            columns=_STRAGGLER_COLUMNS if has_stragglers else _COLUMNS,
            readings=readings,
            notes=("sizes are as printed, in binary units and rounded",),
        )
        tables.append(table)
    return tables, stops


def _readings(lines: Sequence[str], head: int, *, has_stragglers: bool) -> Iterator[Reading]:
    """Yield the figures below the headings on line `head` (from 0)."""
    tag, _ = split_prefix(lines[head])
    name, last = "", head
    for index in range(head + 1, len(lines)):
        line_tag, text = split_prefix(lines[index])
        if index - last > _MAX_GAP or _MARK in text:
            return
        if line_tag != tag:
            continue
        if operation := _OPERATION.match(text):
            name = operation["name"]
        elif name and (row := _ROW.match(text)):
            last = index
            yield from _row_readings(row, name, index + 1, has_stragglers=has_stragglers)


def _row_readings(
    row: re.Match[str], name: str, number: int, *, has_stragglers: bool
) -> Iterator[Reading]:
    figures = [parse_number(row[key]) for key in ("first", "second", "third", "fourth")]
    total, second, third, busbw = figures
    times = {"average": third if has_stragglers else second, "total": total}
    if has_stragglers:
        times |= {"average straggler": busbw, "total straggler": second}
    is_comparable = not has_stragglers and busbw and _WHOLE.match(name)
    for column, milliseconds in times.items():
        if milliseconds is None or milliseconds < 0:
            continue
        is_rate = is_comparable and column == "average"
        yield Reading(
            line=number,
            label=f"{name} {row['size']}",
            column=column,
            num_calls=int(row["count"]),
            time_s=milliseconds * 1e-3,
            busbw_bytes_per_s=busbw * 1e9 / 8 if busbw and is_rate else None,
        )
