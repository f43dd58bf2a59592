"""A step as a table for eyes and spreadsheets: a line an operation, repeats written out."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence

from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.workload import CommOp, ComputeOp, Kernel, Operation, Workload
from stepmark.workload.durations import family, shape
from stepmark.workload.formats.walk import walk

COLUMNS = (
    *("index", "stage", "phase", "layer", "microbatch", "module", "kind", "operation"),
    *("shape", "dtype", "bytes", "group", "group_size", "stream", "name", "after", "time_us"),
)


def write(workload: Workload, stages: Sequence[int] | None = None) -> Iterator[str]:
    """Lines of a CSV, of all stages one after the other or of those named; index is per stage.

    shape is an operator's shape, or a collective's count of elements; bytes is what an operator
    moves, or a message's size as nccl-tests counts it. Raises ConfigError for an unknown stage.
    """
    known = range(len(workload.stages))
    chosen = known if stages is None else stages
    if unknown := [stage for stage in chosen if stage not in known]:
        raise ConfigError("stage", unknown[0], f"from 0 to {len(known) - 1}")
    return _lines(workload, chosen)


def lost(workload: Workload) -> list[str]:
    """What stands in no column."""
    found = [
        "model, settings, notes and the number of micro-batches",
        "which ranks form a group",
        "roots, peers, reductions, what is recomputed, which messages are one call",
    ]
    if any(stage.setup for stage in workload.stages):
        found.append("what runs once before the first step")
    return found


def _lines(workload: Workload, stages: Sequence[int]) -> Iterator[str]:
    yield _csv(COLUMNS) + "\n"
    ends = _ends(workload)
    for stage in stages:
        index = 0
        for operations, layer, microbatch in walk(workload, stage, ends):
            rows = []
            for (head, tail), own_layer, own_microbatch in operations:
                in_layer = "" if own_layer is None else own_layer + layer
                in_microbatch = "" if own_microbatch is None else own_microbatch + microbatch
                rows.append(f"{index},{stage},{head},{in_layer},{in_microbatch},{tail}\n")
                index += 1
            yield "".join(rows)


def _ends(workload: Workload) -> Callable[[Operation], tuple[str, str]]:
    """What of a row is the same wherever the operation runs: before and behind its place."""
    return lambda one: (
        _csv([one.phase]),
        _csv([one.module, *_what(one, workload), *_when(one)]),
    )


def _what(one: Operation, workload: Workload) -> list[object]:
    if isinstance(one, CommOp):
        group = workload.groups[one.group]
        size = one.message_bytes(group)
        named = [one.collective, one.count, one.dtype, size, one.group, group.size]
        return ["communication", *named]
    return ["computation", family(one.op), shape(one.op, dtype=False), *_cost(one), None, None]


def _cost(one: ComputeOp) -> tuple[DType | None, int | None]:
    return (None if isinstance(one.op, Kernel) else one.op.dtype), one.op.bytes_moved


def _when(one: Operation) -> list[object]:
    time_us = None if one.time_s is None else f"{one.time_s * 1e6:.9g}"
    return [one.stream, one.name, " ".join(one.after), time_us]


def _csv(cells: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()
