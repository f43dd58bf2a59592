"""PARAM's "basic" trace of communication, a JSON file per rank, as commsTraceReplay takes it.

Names and fields as facebookresearch/param reads them (1e115ff): train/comms/pt,
commsTraceParser.py (_parseBasicTrace) and commsTraceReplay.py. Sizes are elements of one rank's
input and output. A collective of the stream "compute" is waited for at once, another where an
operation comes that starts after it. Of computation the format has products of two matrices
and embedding lookups. Reading is in param_trace_reader.py.

A message names the process group of its two ranks, which are ranks of the world: the replay
gives both to torch.distributed (pytorch_dist_backend.py: isend, irecv, P2POp).

Messages of one call are posted one after the other, by source and destination, since
commsTraceReplay waits for each (is_blocking) and posts those of a batch (use_batch) twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.ops import EmbeddingBag, Gemm, Phase
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Operation, Workload
from stepmark.workloads.formats.loss import Kept, communication, present, tallied
from stepmark.workloads.formats.param_trace_reader import COMPUTATIONS, Entry, Reader, read
from stepmark.workloads.formats.ranks import (
    Instances,
    Issued,
    check_rank,
    first_rank,
    transfer,
)
from stepmark.workloads.formats.walk import remarks, walk


@dataclass(frozen=True, slots=True)
class Line:
    """An operation's entry without its request; "" where PARAM has none."""

    operation: Operation
    text: str
    pair: tuple[int, int] | None  # source and destination of a message


class Queue:
    """Numbering of requests, with their waits; those of one group call follow its last part."""

    def __init__(self, workload: Workload) -> None:
        self._issued = Issued(workload)
        self._outstanding: set[int] = set()
        self._batch: list[Line] = []  # sends and receives that may be one call
        self._next = 0

    def add(self, line: Line) -> Iterator[str]:
        op = line.operation
        if not (self._batch and line.pair and isinstance(op, CommOp) and op.fused):
            yield from self.flush()
        for request in self._issued.find(op.after):
            if request in self._outstanding:
                self._outstanding.discard(request)
                yield _WAIT.format(request)
        if line.pair:
            self._batch.append(line)
        elif line.text and isinstance(op, CommOp):
            yield from self._post([line])
        elif line.text:
            yield line.text + "}"

    def flush(self) -> Iterator[str]:
        if self._batch:
            batch, self._batch = self._batch, []
            yield from self._post(sorted(batch, key=lambda line: line.pair or ()))

    def _post(self, lines: Sequence[Line]) -> Iterator[str]:
        first = self._next
        for request, line in enumerate(lines, first):
            yield f'{line.text},"req":{request}}}'
        self._next += len(lines)
        for request, line in enumerate(lines, first):
            op = line.operation
            is_awaited = self._issued.note(op.name, request)
            if op.stream == COMPUTE:
                yield _WAIT.format(request)
            elif is_awaited:
                self._outstanding.add(request)


_WAIT = '{{"comms":"wait","req":{}}}'


__all__ = ["files", "kept", "omissions", "read", "write"]

# PARAM has no types of 8-bit floats and none of unsigned words: others of their size stand in.
DTYPES = {
    DType.FP64: "double",
    DType.FP32: "float",
    DType.TF32: "float",
    DType.BF16: "bfloat16",
    DType.FP16: "half",
    DType.FP8_E4M3: "uint8",
    DType.FP8_E5M2: "uint8",
    DType.INT8: "int8",
    DType.UINT8: "uint8",
    DType.INT32: "int",
    DType.UINT32: "int",
    DType.INT64: "long",
    DType.UINT64: "long",
}
_STAND_INS = (DType.FP8_E4M3, DType.FP8_E5M2, DType.UINT32, DType.UINT64)

# PARAM's name, and parts of `count` in input and output: 0 stands for one part per rank.
NAMES: dict[str, tuple[str, int, int]] = {
    Collective.ALL_REDUCE: ("all_reduce", 1, 1),
    Collective.ALL_GATHER: ("all_gather_base", 1, 0),
    Collective.REDUCE_SCATTER: ("reduce_scatter_base", 0, 1),
    Collective.ALL_TO_ALL: ("all_to_all", 0, 0),
    Collective.ALL_TO_ALL_V: ("all_to_allv", 0, 0),
    Collective.BROADCAST: ("broadcast", 1, 1),
    Collective.REDUCE: ("reduce", 1, 1),
    Collective.GATHER: ("gather", 1, 0),
    Collective.SCATTER: ("scatter", 0, 1),
    SEND: ("isend", 1, 1),
    RECV: ("irecv", 1, 1),
    Collective.BARRIER: ("barrier", 0, 0),
}


def write(workload: Workload, rank: int = 0) -> Iterator[str]:
    """Yield the file `{rank}.json` of one rank's step; PARAM wants that of every rank.

    Each file declares all process groups, which every rank must create in the same order.
    Raise ConfigError for an unknown rank and for a collective that PARAM lacks.
    """
    check_rank(workload, rank, NAMES)
    return _file(workload, rank)


def files(
    workload: Workload, ranks: Iterable[int] | None = None
) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield names and contents of a folder that commsTraceReplay takes as --trace-path."""
    for rank in range(workload.world_size) if ranks is None else ranks:
        yield f"{rank}.json", write(workload, rank)


def omissions(workload: Workload, stages: Iterable[int] | None = None) -> list[str]:
    """Return what the format cannot express of this workload, or PARAM's replay ignores."""
    ops = tallied(workload, stages)
    comms = [op for op in ops if isinstance(op, CommOp)]
    collectives = {op.collective for op in comms}
    entries = {op: _compute(op) for op in ops if isinstance(op, ComputeOp)}
    omitted = sum(ops[op] for op, entry in entries.items() if entry is None and not op.is_wait)
    narrowed = any(
        COMPUTATIONS[entry["compute"]](Entry(**entry), "") != op.op
        for op, entry in entries.items()
        if entry
    )
    streams = any(op.stream != COMPUTE for op in ops)
    stand_ins = ", ".join(sorted({op.dtype for op in comms} & set(_STAND_INS)))
    redops = ", ".join(sorted({op.redop for op in comms} - {"none", "sum"}))
    uneven = Collective.ALL_TO_ALL_V in collectives
    broadcast = Collective.BROADCAST in collectives
    rooted = any(op.root for op in comms)
    places = ("layers", "micro-batches", "what is recomputed", "times")
    lines = present(
        workload, *places, "model", "settings", "notes", "which messages are one call"
    )
    lines += present(workload, "start times")
    return lines + remarks(
        (omitted, f"{omitted} computations that are no product or embedding lookup"),
        (narrowed, "layouts, scaling and output types of products, skew and type of lookups"),
        (streams, "streams: only where each message is waited for"),
        (stand_ins, f"{stand_ins}: written as another type of the same size"),
        (redops, f"reductions other than sum: {redops}"),
        (uneven, "uneven parts of an all_to_all_v: written as equal ones"),
        (broadcast, "broadcast: in the file, but commsTraceReplay stops at one"),
        (rooted, "roots: in the file, but commsTraceReplay takes rank 0"),
    )


def kept(workload: Workload, stage: int) -> Kept:
    """Return the messages of the file of a stage's first rank: its entries, read back."""
    rank = first_rank(workload, stage)
    check_rank(workload, rank, NAMES)
    instances = Instances(workload)
    line = _lines(workload, rank, instances)
    entries = [
        Entry(comms="init", pg_id=number, global_ranks=list(ranks))
        for number, _, ranks in instances.members()
    ]
    written = []
    for op, times, setup in communication(workload, stage):
        if not setup and (text := line(op).text):
            entries.append(msgspec.json.decode(text + "}", type=Entry))
            written.append((op, times))
    reader = Reader(entries, f"{rank}.json", workload.world_size, rank)
    result = Kept()
    for (op, times), read_back in zip(written, reader.operations(), strict=True):
        assert isinstance(read_back, CommOp)
        result.add(read_back, reader.groups[read_back.group], times, label=op.group)
    return result


def _file(workload: Workload, rank: int) -> Iterator[str]:
    instances = Instances(workload)
    inits = [
        _text({"comms": "init", "pg_id": number, "global_ranks": ranks}) + "}"
        for number, _, ranks in instances.members()
    ]
    head = ",\n".join(inits)
    yield "[\n" + head
    separator = ",\n" if head else ""
    queue = Queue(workload)
    stage = workload.stage_of(rank)
    for operations, _, _ in walk(workload, stage, _lines(workload, rank, instances)):
        entries = [entry for line, _, _ in operations for entry in queue.add(line)]
        if entries:
            yield separator + ",\n".join(entries)
            separator = ",\n"
    if entries := list(queue.flush()):
        yield separator + ",\n".join(entries)
    yield "\n]\n"


def _lines(workload: Workload, rank: int, instances: Instances) -> Callable[[Operation], Line]:
    def line(op: Operation) -> Line:
        if isinstance(op, ComputeOp):
            entry = _compute(op)
        elif workload.groups[op.group].size == 1:
            entry = None
        else:
            entry = _communication(op, workload, rank, instances)
        if entry is None:
            return Line(op, "", None)
        pair = (entry["src_rank"], entry["dst_rank"]) if "src_rank" in entry else None
        return Line(op, _text({**entry, "markers": [op.phase, op.module]}), pair)

    return line


def _communication(
    op: CommOp, workload: Workload, rank: int, instances: Instances
) -> dict[str, Any]:
    ranks = workload.groups[op.group].members(rank)
    name, parts_in, parts_out = NAMES[op.collective]
    entry: dict[str, Any] = {"comms": name, "pg_id": instances.number(op.group, rank)}
    entry["world_size"] = len(ranks)
    if op.collective == Collective.BARRIER:
        return entry
    entry["in_msg_size"] = (parts_in or len(ranks)) * op.count
    entry["out_msg_size"] = (parts_out or len(ranks)) * op.count
    entry["dtype"] = DTYPES[op.dtype]
    if op.collective == Collective.ALL_TO_ALL_V:
        entry["in_split"] = entry["out_split"] = [op.count] * len(ranks)
    if op.root is not None:
        entry["root"] = ranks[op.root]
    if op.peer is not None:
        source, target = transfer(op, ranks, rank)
        entry["pg_id"] = instances.of_pair(source, target)
        entry["world_size"] = 2
        entry["src_rank"], entry["dst_rank"] = source, target
        entry["use_batch"] = False
    return entry


def _compute(compute: ComputeOp) -> dict[str, Any] | None:
    op = compute.op
    if isinstance(op, Gemm) and not op.dtype.is_fp8:
        dims = {"mm0_dim0": op.m, "mm0_dim1": op.k, "mm1_dim0": op.k, "mm1_dim1": op.n}
        return {"compute": "gemm", "count": 1, **dims, "dtype": DTYPES[op.dtype]}
    if isinstance(op, EmbeddingBag):
        return {
            "compute": "emb_lookup",
            "count": 1,
            "direction": "forward" if op.phase is Phase.FWD else "backward",
            "emb_dim": op.dim,
            "num_embs": op.rows,
            "batch_size": op.batch,
            "num_emb_tables": 1,
            "bag_size": op.pooling,
        }
    return None


def _text(entry: dict[str, Any]) -> str:
    """Encode an entry without the last brace, so that a request can follow."""
    return msgspec.json.encode(entry).decode()[:-1]
