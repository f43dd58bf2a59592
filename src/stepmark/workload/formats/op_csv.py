"""A step as a CSV for people and spreadsheets: a line per operation, repeats written out."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from stepmark.core.errors import ConfigError
from stepmark.core.workload import CommOp, Kernel, Operation, Workload
from stepmark.workload.durations import family, shape
from stepmark.workload.formats.loss import Kept, communication, present
from stepmark.workload.formats.walk import walk

COLUMNS = (
    *("index", "stage", "phase", "layer", "microbatch", "module", "kind", "operation"),
    *("shape", "dtype", "bytes", "group", "group_size", "stream", "name", "after", "time_us"),
)


def write(workload: Workload, stages: Sequence[int] | None = None) -> Iterator[str]:
    """Yield lines of a CSV of these or all stages, one after the other; index is per stage.

    shape is an operator's shape, or a collective's count of elements; bytes is what an operator
    moves, or a message's size as nccl-tests counts it. Raise ConfigError for an unknown stage.
    """
    all_stages = range(len(workload.stages))
    selected = all_stages if stages is None else stages
    if unknown := [stage for stage in selected if stage not in all_stages]:
        raise ConfigError("stage", unknown[0], f"from 0 to {len(all_stages) - 1}")
    return _lines(workload, selected)


def omissions(workload: Workload, stages: Iterable[int] | None = None) -> list[str]:
    """Return what has no column."""
    return [
        *present(workload, "model", "settings", "notes", "the number of micro-batches"),
        *present(workload, "which ranks form a group", "roots", "peers", "reductions"),
        *present(workload, "what is recomputed", "which messages are one call", "start times"),
    ]


def kept(workload: Workload, stage: int) -> Kept:
    """Return the messages of a stage's lines: all of the step."""
    result = Kept()
    for op, times, setup in communication(workload, stage):
        if not setup:
            result.add(op, workload.groups[op.group], times)
    return result


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


def _ends(workload: Workload, op: Operation) -> tuple[str, str]:
    """Return the constant parts of an operation's row, before and after its place."""
    if isinstance(op, CommOp):
        group = workload.groups[op.group]
        size = op.message_bytes(group)
        what: list[object] = ["communication", op.collective, op.count, op.dtype, size]
        what += [op.group, group.size]
    else:
        dtype = None if isinstance(op.op, Kernel) else op.op.dtype
        what = ["computation", family(op.op), shape(op.op, dtype=False), dtype]
        what += [op.op.bytes_moved, None, None]
    time_us = None if op.time_s is None else f"{op.time_s * 1e6:.9g}"
    when = [op.stream, op.name, " ".join(op.after), time_us]
    return _csv([op.phase]), _csv([op.module, *what, *when])


def _csv(cells: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()
