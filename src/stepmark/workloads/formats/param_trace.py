"""PARAM's "basic" trace of communication, a JSON file per rank, as commsTraceReplay takes it.

Names and fields as facebookresearch/param reads them (1e115ff): train/comms/pt,
commsTraceParser.py (_parseBasicTrace) and commsTraceReplay.py. Sizes are elements of one rank's
input and output. A collective of the stream "compute" is waited for at once, another where an
operation comes that starts after it. Of computation the format has products of two matrices
and embedding lookups. Read is a folder of one JSON file per rank, or one file for all.

A message names the process group of its two ranks, which are ranks of the world: the replay
gives both to torch.distributed (pytorch_dist_backend.py: isend, irecv, P2POp).

Messages of one call are posted one after the other, by source and destination, since
commsTraceReplay waits for each (is_blocking) and posts those of a batch (use_batch) twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType, parse_dtype
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.collectives import FACTS, Collective, RedOp
from stepmark.model.ops import EmbeddingBag, Gemm, Layout, Phase
from stepmark.step.source_file import decoded
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Group, Operation, Workload
from stepmark.workloads.formats.loss import Representable, communication, present, tallied
from stepmark.workloads.formats.ranks import (
    Instances,
    Issued,
    check_rank,
    disagreements,
    first_rank,
    group_of,
    name_of,
    names_of,
    stages_of,
    transfer,
)
from stepmark.workloads.formats.walk import remarks, walk

Count = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
Ranks = Annotated[int, msgspec.Meta(ge=0, le=2**24)]


class Entry(msgspec.Struct, kw_only=True):
    """Fields of an entry. `comms` or `compute` determines which are needed."""

    comms: str | None = None
    compute: str | None = None
    req: Any = None
    start_ns: float | None = msgspec.field(default=None, name="startTime_ns")
    markers: list[str] | None = None
    world_size: Ranks | None = None
    root: Ranks | None = None
    pg_id: int | None = None
    global_ranks: list[Ranks] | None = None
    in_msg_size: Count | None = None
    out_msg_size: Count | None = None
    in_split: list[Count] | None = None
    out_split: list[Count] | None = None
    dtype: str = "float"
    src_rank: Ranks | None = None
    dst_rank: Ranks | None = None
    use_batch: bool | None = None
    fused: bool | None = None  # ours: posted in one call with the entry before
    count: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1
    mm_dim: Count | None = None
    mm0_dim0: Count | None = None
    mm0_dim1: Count | None = None
    mm1_dim0: Count | None = None
    mm1_dim1: Count | None = None
    direction: str = "forward"
    emb_dim: Count | None = None
    num_embs: Count | None = None
    batch_size: Count | None = None
    num_emb_tables: Count | None = None
    bag_size: Count | None = None


# The size that gives `count`, and the number of parts in it; 0: one per rank.
_INPUT = ("in", 1)
_OUTPUT = ("out", 1)
_PER_RANK = ("in", 0)

# By the letters of a name: our name, and the size that gives `count`.
READ_NAMES: dict[str, tuple[str, tuple[str, int]]] = {
    "allreduce": (Collective.ALL_REDUCE, _INPUT),
    "allgather": (Collective.ALL_GATHER, _INPUT),
    "allgatherbase": (Collective.ALL_GATHER, _INPUT),
    "reducescatter": (Collective.REDUCE_SCATTER, _OUTPUT),
    "reducescatterbase": (Collective.REDUCE_SCATTER, _OUTPUT),
    "alltoall": (Collective.ALL_TO_ALL, _PER_RANK),
    "alltoallsingle": (Collective.ALL_TO_ALL, _PER_RANK),
    "alltoallv": (Collective.ALL_TO_ALL_V, _PER_RANK),
    "alltoallbase": (Collective.ALL_TO_ALL_V, _PER_RANK),
    "broadcast": (Collective.BROADCAST, _INPUT),
    "reduce": (Collective.REDUCE, _INPUT),
    "gather": (Collective.GATHER, _INPUT),
    "scatter": (Collective.SCATTER, _OUTPUT),
    "send": (SEND, _INPUT),
    "isend": (SEND, _INPUT),
    "recv": (RECV, _OUTPUT),
    "irecv": (RECV, _OUTPUT),
    "recvanysource": (RECV, _OUTPUT),
    "barrier": (Collective.BARRIER, _INPUT),
}
SILENT = ("wait", "init", "batchisendirecv")


def _gemm(entry: Entry, where: str) -> Gemm:
    square = entry.mm_dim
    m, k, inner, n = (
        square if dim is None else dim
        for dim in (entry.mm0_dim0, entry.mm0_dim1, entry.mm1_dim0, entry.mm1_dim1)
    )
    if not (m and n and k) or inner != k:
        raise ConfigError(where, f"{m} x {k}, {inner} x {n}", "mm_dim, or mm0_dim0 to mm1_dim1")
    return Gemm(
        m=m, n=n, k=k, dtype=parse_dtype(entry.dtype, f"{where}: dtype"), layout=Layout.NN
    )


def _lookup(entry: Entry, where: str) -> EmbeddingBag:
    backward = entry.direction.lower() == "backward"
    sizes = (entry.num_embs, entry.emb_dim, entry.bag_size, entry.batch_size)
    rows, dim, pooling, batch = (size or 0 for size in sizes)
    if not all((rows, dim, pooling, batch)):
        raise ConfigError(
            where, "missing", "num_embs, emb_dim, bag_size and batch_size above 0"
        )
    return EmbeddingBag(
        rows=rows,
        dim=dim,
        pooling=pooling,
        batch=batch * (entry.num_emb_tables or 1),
        phase=Phase.BWD if backward else Phase.FWD,
    )


COMPUTATIONS: dict[str, Callable[[Entry, str], Gemm | EmbeddingBag]] = {
    "gemm": _gemm,
    "emb_lookup": _lookup,
}


def letters_only(name: str) -> str:
    """Return the lower-case letters of a name, by which PARAM compares names."""
    return "".join(char for char in name.lower() if char.isalpha())


def phase_and_module(entry: Entry) -> tuple[Phase, str]:
    """Return an entry's markers, which are free text; ours are phase and module."""
    markers = entry.markers or []
    if len(markers) == 2 and markers[0] in set(Phase):
        return Phase(markers[0]), markers[1]
    return Phase.STEP, " ".join(markers)


def dtype_of(entry: Entry, where: str) -> DType:
    name = "uint8" if entry.dtype.lower() == "bool" else entry.dtype
    return parse_dtype(name, f"{where}: dtype", MESSAGE_DTYPES)


def count_of(
    entry: Entry, counted: tuple[str, int], size: int, collective: str, where: str
) -> int:
    if collective == Collective.BARRIER:
        return 0
    side, parts = counted
    elements = entry.in_msg_size if side == "in" else entry.out_msg_size
    if elements is None:
        raise ConfigError(f"{where}: {side}_msg_size", "missing", "a number of elements")
    divisor = parts or size
    if elements % divisor and collective != Collective.ALL_TO_ALL_V:
        raise ConfigError(
            f"{where}: {side}_msg_size", elements, f"a multiple of {divisor} ranks"
        )
    return -(-elements // divisor)


STREAM = "communication"  # of what is waited for later
_WHAT = "PARAM trace"


def read(path: Path, *, starts: bool = False) -> Workload:
    """Read a folder with 0.json, 1.json, ..., or one file that all ranks follow.

    Neighbouring ranks with the same program become one stage. starts: operations keep their
    start times, so that no two are alike. Raise ConfigError for others.
    """
    if path.is_dir():
        paths = _rank_files(path)
        world = len(paths)
        entries_of_ranks = [_entries(file) for file in paths]
        readers = [
            Reader(entries, file.name, world, rank)
            for rank, (file, entries) in enumerate(zip(paths, entries_of_ranks, strict=True))
        ]
    else:
        entries = _entries(path)
        sizes = [entry.world_size or 1 for entry in entries]
        last = [max(entry.global_ranks) + 1 for entry in entries if entry.global_ranks]
        pairs = [max(entry.src_rank or 0, entry.dst_rank or 0) + 1 for entry in entries]
        world = max((*sizes, *last, *pairs), default=1)
        readers = [Reader(entries, path.name, world, None)]
    programs = [reader.operations() for reader in readers]
    groups = {name: group for reader in readers for name, group in reader.groups.items()}
    times = [reader.starts() for reader in readers] if starts else None
    stages, blocks = stages_of(programs, times)
    foreign = sum(reader.num_foreign for reader in readers)
    uneven = sum(reader.num_uneven for reader in readers)
    workload = Workload(
        name=path.stem,
        rules="param-trace",
        source="facebookresearch/param, basic trace",
        world_size=world,
        groups=groups,
        blocks=blocks,
        stages=stages,
        notes=tuple(
            remarks(
                (foreign, f"{foreign} collectives of groups without their rank are left out"),
                (uneven, f"{uneven} all-to-alls of uneven parts are read with equal ones"),
            )
        ),
    )
    workload.check()
    differ = disagreements(workload) if path.is_dir() else ()
    return replace(workload, notes=workload.notes + differ)


def _rank_files(path: Path) -> list[Path]:
    paths = [path / f"{rank}.json" for rank in range(sum(1 for _ in path.glob("*.json")))]
    absent = [file.name for file in paths if not file.is_file()]
    if absent or not paths:
        lacks = absent[0] if absent else "0.json"
        raise ConfigError(_WHAT, path, f"a folder of 0.json, 1.json, ...: it has no {lacks}")
    return paths


def _entries(path: Path) -> list[Entry]:
    return decoded(path, list[Entry], _WHAT, "a JSON list of comms and compute")


def _is_posted(entry: Entry) -> bool:
    return letters_only(entry.comms or "") in ("isend", "irecv")


def _calls_of(entries: Iterable[Entry], world_size: int) -> list[list[Entry]]:
    """Return the entries by call, its parts in an order that is alike on all ranks.

    Parts that are posted in a row are one call, unless `fused` says otherwise.
    """

    def place(entry: Entry) -> tuple[bool, int]:
        ahead = (entry.dst_rank or 0) - (entry.src_rank or 0)
        return letters_only(entry.comms or "") != "isend", ahead % world_size

    calls: list[list[Entry]] = []
    for entry in entries:
        is_part = calls and _is_posted(entry) and _is_posted(calls[-1][-1])
        if is_part and entry.fused is not False:
            calls[-1].append(entry)
        else:
            calls.append([entry])
    return [
        [
            msgspec.structs.replace(entry, fused=at > 0)
            for at, entry in enumerate(sorted(call, key=place))
        ]
        for call in calls
    ]


def _awaited_later(calls: Sequence[Sequence[Entry]]) -> set[str]:
    """Return the requests of calls for which nothing waits directly after them."""
    later: set[str] = set()
    awaited: set[str] = set()
    waits: list[str] = []  # directly after the call, from the last
    for call in reversed(calls):
        requests = {str(entry.req) for entry in call}
        name = letters_only(call[0].comms or "")
        if name == "wait":
            waits += requests
            awaited |= requests
        elif name not in SILENT:
            if set(waits[-len(call) :]) != requests:
                later |= requests & awaited
            waits.clear()
    return later


class Reader:
    """Entries of one rank, or of all alike (rank None), as operations."""

    def __init__(
        self, entries: Sequence[Entry], file: str, world_size: int, rank: int | None
    ) -> None:
        calls = _calls_of(entries, world_size)
        self._entries = list(chain(*calls))
        self._file = file
        self._world = world_size
        self._rank = rank
        inits = {
            entry.pg_id: entry
            for entry in entries
            if entry.comms == "init" and entry.global_ranks
        }
        self._ranks = {key: tuple(init.global_ranks or ()) for key, init in inits.items()}
        names = {key: " ".join(init.markers or ()) for key, init in inits.items()}
        groups: dict[str, Group] = {}
        for key, name in names.items():
            if name and name not in groups:
                groups[name] = group_of(self._ranks[key], f"{file}: global_ranks")
        ranks = {str(key): members for key, members in self._ranks.items()}
        # Whether it is a file of ours, whose communicators have names.
        self.is_named = bool(names_of(groups, ranks, world_size, first=0))
        self._group_names: dict[int | None, str] = names if self.is_named else {}  # by pg_id
        self.groups: dict[str, Group] = groups if self.is_named else {}
        self._awaited_later = _awaited_later(calls)
        self._later: dict[str, int] = {}  # those requests, numbered
        self._num_later = 0
        self._due: list[int] = []  # those that were waited for since the last computation
        self._new_due: list[int] = []  # since the last operation
        self._begun_ns: list[float | None] = []  # by operation
        self.num_foreign = self.num_uneven = 0  # collectives that are read otherwise, or not

    def operations(self) -> list[Operation]:
        """Return the operations; `groups` has their groups afterwards."""
        operations: list[Operation] = []
        for index, entry in enumerate(self._entries):
            where = f"{self._file}[{index}]"
            if entry.comms is None and entry.compute is None:
                raise ConfigError(where, "neither", "comms or compute")
            name = letters_only(entry.comms or "")
            if name == "wait":
                if (number := self._later.pop(str(entry.req), None)) is not None:
                    self._due.append(number)
                    self._new_due.append(number)
            elif entry.comms is None:
                operations += self._computations(entry, where)
            elif name not in SILENT and (op := self._communication(entry, index, where)):
                operations.append(op)
            if new := len(operations) - len(self._begun_ns):
                self._begun_ns += [entry.start_ns, *[None] * (new - 1)]
        return operations

    def starts(self) -> list[float | None]:
        """Return the seconds of each operation's start since the first one."""
        first = min((ns for ns in self._begun_ns if ns is not None), default=0.0)
        return [None if ns is None else (ns - first) * 1e-9 for ns in self._begun_ns]

    def _after(self, *, later: bool = False) -> tuple[str, ...]:
        """Return the messages after which the next operation starts.

        later: it is waited for later itself, so that the next computation waits for all, too.
        """
        due = list(self._new_due if later else self._due)
        self._new_due.clear()
        if not later:
            self._due.clear()
        backs = [self._num_later - 1 - number for number in due]
        return tuple(f"{STREAM}~{back}" if back else STREAM for back in backs)

    def _communication(self, entry: Entry, index: int, where: str) -> CommOp | None:
        name = letters_only(entry.comms or "")
        if name not in READ_NAMES:
            raise not_one_of(f"{where}: comms", entry.comms, READ_NAMES)
        collective, counted = READ_NAMES[name]
        members = self._ranks.get(entry.pg_id)
        if members is not None and self._rank is not None and self._rank not in members:
            self.num_foreign += 1
            return None
        self.num_uneven += any(len(set(s or ())) > 1 for s in (entry.in_split, entry.out_split))
        pair = collective in (SEND, RECV)
        # Two ranks alone are no group of a mesh.
        in_world = pair and not self.is_named and len(members or ()) <= 2
        group = self._group(None if in_world else entry.pg_id, where)
        later = str(entry.req) in self._awaited_later
        after = self._after(later=later)
        if later:
            self._later[str(entry.req)] = self._num_later
            self._num_later += 1
        phase, module = phase_and_module(entry)
        size = self.groups[group].size
        own = self._rank or (members[0] if members else 0)
        ranks = self.groups[group].members(own)
        return CommOp(
            collective=str(collective),
            dtype=dtype_of(entry, where),
            count=count_of(entry, counted, size, collective, where),
            group=group,
            phase=phase,
            module=module,
            stream=STREAM if later else COMPUTE,
            name=STREAM if later else "",
            after=after,
            redop=RedOp.SUM
            if not pair and FACTS[Collective(collective)].reduces
            else RedOp.NONE,
            root=ranks.index(entry.root) if not pair and entry.root in ranks else None,
            peer=self._peer(entry, ranks, where) if pair else None,
            fused=bool(entry.fused),
        )

    def _group(self, pg_id: int | None, where: str) -> str:
        if pg_id not in self._group_names:
            ranks = self._ranks.get(pg_id, tuple(range(self._world)))
            if max(ranks) >= self._world:
                allowed = f"a folder of all ranks: there is no {self._world}.json"
                raise ConfigError(f"{where}: global_ranks", ranks, allowed)
            group = group_of(ranks, f"{where}: global_ranks")
            name = name_of(group, self._world)
            self._group_names[pg_id] = name
            self.groups[name] = group
        return self._group_names[pg_id]

    def _peer(self, entry: Entry, ranks: Sequence[int], where: str) -> int:
        """Return the distance to the other rank. ranks: of the group, with this rank."""
        if entry.src_rank is None or entry.dst_rank is None:
            raise ConfigError(f"{where}: src_rank, dst_rank", "missing", "two ranks")
        pair = (entry.src_rank, entry.dst_rank)
        if not set(pair) <= set(ranks):
            raise ConfigError(f"{where}: src_rank, dst_rank", pair, f"ranks of {ranks}")
        ahead = ranks.index(entry.dst_rank) - ranks.index(entry.src_rank)
        sends = READ_NAMES[letters_only(entry.comms or "")][0] == SEND
        return (ahead if sends else -ahead) % len(ranks)

    def _computations(self, entry: Entry, where: str) -> Iterator[ComputeOp]:
        build = COMPUTATIONS.get((entry.compute or "").lower())
        if build is None:
            allowed = f"one of {', '.join(COMPUTATIONS)}"
            raise ConfigError(f"{where}: compute", entry.compute, allowed)
        op = build(entry, where)
        phase, module = phase_and_module(entry)
        for _ in range(entry.count):
            yield ComputeOp(op=op, phase=phase, module=module, after=self._after())


@dataclass(frozen=True, slots=True)
class Line:
    """An operation's entry without its request; "" where PARAM has none."""

    operation: Operation
    text: str
    pair: tuple[int, int] | None  # source and destination of a message


class Queue:
    """Numbering of requests, with their waits; those of one group call follow its last part.

    What nothing waits for is waited for at the end, as a request without a wait is read as one
    that is waited for at once.
    """

    def __init__(self, workload: Workload) -> None:
        self._issued = Issued(workload)
        self._outstanding: set[int] = set()
        self._due: set[int] = set()  # those for which the next entry waits
        self._batch: list[Line] = []  # sends and receives that may be one call
        self._next = 0

    def add(self, line: Line) -> Iterator[str]:
        op = line.operation
        if not (self._batch and line.pair and isinstance(op, CommOp) and op.fused):
            yield from self._flush()
        self._due |= self._outstanding & set(self._issued.find(op.after))
        if line.pair:
            self._batch.append(line)
        elif line.text and isinstance(op, CommOp):
            yield from self._post([line])
        elif line.text:
            yield from self._wait()
            yield line.text + "}"

    def end(self) -> Iterator[str]:
        yield from self._flush()
        self._due = set(self._outstanding)
        yield from self._wait()

    def _flush(self) -> Iterator[str]:
        if self._batch:
            batch = self._batch
            self._batch = []
            yield from self._post(batch)

    def _wait(self) -> Iterator[str]:
        for request in sorted(self._due):
            yield _WAIT.format(request)
        self._outstanding -= self._due
        self._due = set()

    def _post(self, lines: Sequence[Line]) -> Iterator[str]:
        yield from self._wait()
        requests: dict[int, int] = {}  # by place in the call
        for at in sorted(range(len(lines)), key=lambda at: lines[at].pair or ()):
            line = lines[at]
            call = f',"fused":{"true" if requests else "false"}' if line.pair else ""
            yield f'{line.text}{call},"req":{self._next}}}'
            requests[at] = self._next
            self._next += 1
        for at, line in enumerate(lines):
            self._issued.note(line.operation.name, requests[at])
            is_awaited_at_once = line.operation.stream == COMPUTE
            (self._due if is_awaited_at_once else self._outstanding).add(requests[at])
        yield from self._wait()


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
    count_computes = ", ".join(sorted({op.dtype for op in comms} & set(_STAND_INS)))
    redops = ", ".join(sorted({op.redop for op in comms} - {"none", "sum"}))
    places = ("layers", "micro-batches", "what is recomputed", "times")
    facts = ("model", "settings", "notes", "which messages are one call")
    lacking = remarks(
        (omitted, f"{omitted} computations that are no product or embedding lookup"),
        (narrowed, "layouts, scaling and output types of products, skew and type of lookups"),
        (
            any(op.stream != COMPUTE for op in ops),
            "streams: only where each message is waited for",
        ),
        (count_computes, f"{count_computes}: written as another type of the same size"),
        (redops, f"reductions other than sum: {redops}"),
        (
            Collective.ALL_TO_ALL_V in collectives,
            "uneven parts of an all_to_all_v: written as equal ones",
        ),
        (
            Collective.BROADCAST in collectives,
            "broadcast: in the file, but commsTraceReplay stops at one",
        ),
        (
            any(op.root for op in comms),
            "roots: in the file, but commsTraceReplay takes rank 0",
        ),
    )
    return [
        *present(workload, *places, *facts),
        *present(workload, "start times"),
        *lacking,
    ]


def kept(workload: Workload, stage: int) -> Representable:
    """Return the messages of the file of a stage's first rank: its entries, read back."""
    rank = first_rank(workload, stage)
    check_rank(workload, rank, NAMES)
    instances = Instances(workload)
    line = _lines(workload, rank, instances)
    entries = [
        Entry(comms="init", pg_id=number, global_ranks=list(ranks), markers=[name])
        for number, name, ranks in instances.members()
    ]
    written = []
    for op, times, setup in communication(workload, stage):
        if not setup and (text := line(op).text):
            entry = msgspec.json.decode(text + "}", type=Entry)
            entries.append(msgspec.structs.replace(entry, fused=False))
            written.append((op, times))
    reader = Reader(entries, f"{rank}.json", workload.world_size, rank)
    result = Representable()
    for (op, times), read_back in zip(written, reader.operations(), strict=True):
        assert isinstance(read_back, CommOp)
        result.add(read_back, reader.groups[read_back.group], times, label=op.group)
    return result


def _file(workload: Workload, rank: int) -> Iterator[str]:
    instances = Instances(workload)
    inits = [
        _text({"comms": "init", "pg_id": number, "global_ranks": ranks, "markers": [name]})
        + "}"
        for number, name, ranks in instances.members()
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
    if entries := list(queue.end()):
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
        entry["pg_id"] = instances.of_pair(op.group, source, target)
        entry["world_size"] = 2
        entry["src_rank"] = source
        entry["dst_rank"] = target
        entry["use_batch"] = False
    return entry


def _compute(compute: ComputeOp) -> dict[str, Any] | None:
    op = compute.op
    if isinstance(op, Gemm) and not op.dtype.is_narrow:
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
