"""A step as a table for eyes and spreadsheets: a line an operation, repeats written out."""

import csv
import io
from collections.abc import Iterator, Sequence
from functools import partial

from stepmark.core.errors import ConfigError
from stepmark.core.workload import CommOp, Kernel, Operation, Workload
from stepmark.workload.durations import family, shape
from stepmark.workload.formats.walk import remarks, setup_remark, walk

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
    return remarks(
        (True, "model, settings, notes and the number of micro-batches"),
        (True, "which ranks form a group"),
        (True, "roots, peers, reductions, what is recomputed, which messages are one call"),
        setup_remark(workload),
    )


def _lines(workload: Workload, stages: Sequence[int]) -> Iterator[str]:
    yield _csv(COLUMNS) + "\n"
    for stage in stages:
        index = 0
        for operations, layer, microbatch in walk(workload, stage, partial(_ends, workload)):
            rows = []
            for (head, tail), own_layer, own_microbatch in operations:
                in_layer = "" if own_layer is None else own_layer + layer
                in_microbatch = "" if own_microbatch is None else own_microbatch + microbatch
                rows.append(f"{index},{stage},{head},{in_layer},{in_microbatch},{tail}\n")
                index += 1
            yield "".join(rows)


def _ends(workload: Workload, one: Operation) -> tuple[str, str]:
    """What of a row is the same wherever the operation runs: before and behind its place."""
    if isinstance(one, CommOp):
        group = workload.groups[one.group]
        size = one.message_bytes(group)
        what: list[object] = ["communication", one.collective, one.count, one.dtype, size]
        what += [one.group, group.size]
    else:
        dtype = None if isinstance(one.op, Kernel) else one.op.dtype
        what = ["computation", family(one.op), shape(one.op, dtype=False), dtype]
        what += [one.op.bytes_moved, None, None]
    time_us = None if one.time_s is None else f"{one.time_s * 1e6:.9g}"
    when = [one.stream, one.name, " ".join(one.after), time_us]
    return _csv([one.phase]), _csv([one.module, *what, *when])


def _csv(cells: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()
