"""A step as a CSV for people and spreadsheets: a line per operation, repeats written out."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from stepmark.ground.errors import ConfigError
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Operation, Workload
from stepmark.tables.columns import Row
from stepmark.workloads.durations import family, shape
from stepmark.workloads.formats.loss import Representable, communication, present
from stepmark.workloads.formats.walk import walk

_PLACE = ("index", "stage", "phase", "layer", "microbatch", "module", "kind", "operation")
_WHAT = ("shape", "dtype", "bytes", "group", "group_size", "stream", "name", "after")
COLUMNS = (*_PLACE, *_WHAT, "time_us")


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


def kept(workload: Workload, stage: int) -> Representable:
    """Return the messages of a stage's lines: all of the step."""
    result = Representable()
    for op, times, setup in communication(workload, stage):
        if not setup:
            result.add(op, workload.groups[op.group], times)
    return result


def rows(workload: Workload, stages: Iterable[int]) -> Iterator[Row]:
    """Yield a row per operation, as the file has it, with FLOPs and with time_s in seconds."""
    for stage in stages:
        index = 0
        for operations, layer, microbatch in walk(workload, stage, partial(_row, workload)):
            for row, own_layer, own_microbatch in operations:
                yield row | {
                    "index": index,
                    "stage": stage,
                    "layer": None if own_layer is None else own_layer + layer,
                    "microbatch": None
                    if own_microbatch is None
                    else own_microbatch + microbatch,
                }
                index += 1


def _row(workload: Workload, op: Operation) -> Row:
    cells = (str(op.phase), op.module, *_cells(workload, op))
    row: Row = dict.fromkeys(_PLACE) | dict(
        zip(("phase", *_PLACE[5:], *_WHAT), cells, strict=True)
    )
    flops = op.op.flops if isinstance(op, ComputeOp) else None
    return row | {"flops": flops, "time_s": op.time_s}


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
    """Return the constant parts of an operation's line, before and after its place."""
    time_us = None if op.time_s is None else f"{op.time_s * 1e6:.9g}"
    return _csv([op.phase]), _csv([op.module, *_cells(workload, op), time_us])


def _cells(workload: Workload, op: Operation) -> list[object]:
    """Return the cells from the kind of an operation to those after which it starts."""
    if isinstance(op, CommOp):
        group = workload.groups[op.group]
        size = op.message_bytes(group)
        what: list[object] = ["communication", op.collective, str(op.count), str(op.dtype)]
        what += [size, op.group, group.size]
    else:
        dtype = None if isinstance(op.op, Kernel) else str(op.op.dtype)
        what = ["computation", family(op.op), shape(op.op, dtype=False), dtype]
        what += [op.op.bytes_moved, None, None]
    return [*what, op.stream, op.name, " ".join(op.after)]


def _csv(cells: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()
