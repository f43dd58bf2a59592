"""Columns of a profiler trace of one process, in integer nanoseconds since 1970.

Columns of one table have the same length; rows are in the order of their start. Texts are
indices into `RankTrace.names`, threads and streams into lists of labels.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Names of types alone: columns are described without numpy.
Ints: TypeAlias = "NDArray[np.int64]"
Flags: TypeAlias = "NDArray[np.bool_]"

NONE = -1  # in columns of indices and ids: there is none


class GpuKind(IntEnum):
    """Kind of work on a GPU, by the category that the profiler gives it."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CommArgs:
    """Arguments of a call of torch.distributed, as its trace states them.

    collective: torch's name, e.g. "_allgather_base"; dtype: torch's, e.g. "BFloat16".
    elements are those of this rank's own buffers. ranks: () where they are not given or cut
    short (from 30 ranks on). seq: number of the collective in its group.
    """

    collective: str
    dtype: str
    in_elements: int
    out_elements: int
    group: str = ""
    group_desc: str = ""
    group_size: int | None = None
    ranks: tuple[int, ...] = ()
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    source: int | None = None
    target: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuColumns:
    """Kernels, copies and memsets."""

    start: Ints
    end: Ints
    name: Ints
    kind: Ints  # GpuKind
    stream: Ints  # RankTrace.streams
    correlation: Ints  # of the call that launched it
    external: Ints  # id of the host operation, or NONE
    num_bytes: Ints  # of copies and memsets, or NONE
    comm: Ints  # RankTrace.comm_args that its own arguments state, or NONE
    seq: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class CallColumns:
    """Calls of the runtime and the driver."""

    start: Ints
    end: Ints
    name: Ints
    thread: Ints
    correlation: Ints
    external: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class OpColumns:
    """Operations of torch on the host.

    sequence joins an operation of the backward pass with the one of the forward pass that
    caused it; forward_thread is then that one's thread as the profiler numbers it, else NONE.
    shapes: RankTrace.shapes, where the operation is one whose shapes are kept.
    """

    start: Ints
    end: Ints
    name: Ints
    thread: Ints
    external: Ints
    sequence: Ints
    forward_thread: Ints
    shapes: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanColumns:
    """Annotations of the user, of torch and of modules (with_stack)."""

    start: Ints
    end: Ints
    name: Ints
    thread: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class CommColumns:
    """Calls of torch.distributed on the host: record_param_comms, or operators of gloo.

    work_start and work_end: of gloo's work on its own thread, or NONE.
    """

    start: Ints
    end: Ints
    thread: Ints
    external: Ints
    comm: Ints  # RankTrace.comm_args
    seq: Ints
    work_start: Ints
    work_end: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncColumns:
    """Waits that the profiler records on request (cuda_sync).

    awaited: stream whose event is waited for; recorded: correlation of the call that recorded
    this event, or NONE.
    """

    start: Ints
    end: Ints
    name: Ints
    stream: Ints
    correlation: Ints
    awaited: Ints
    recorded: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGroup:
    """A process group as the trace's header lists it."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What could not be read, or cannot be right: how often, with the first case."""

    kind: str  # a short stable name: "cut", "undecodable", "negative-duration", ...
    count: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Facts of one process's trace. None and () are what the file does not state."""

    file: str
    rank: int | None
    world_size: int | None
    backend: str
    groups: tuple[TraceGroup, ...]
    devices: tuple[str, ...] | None  # (): the file states that the host has none
    is_rocm: bool
    trace_id: str
    first: int | None  # start of the first event that was read, and end of the last
    last: int | None
    num_events: int
    num_bytes: int  # of JSON that were read
    cut: str = ""  # why the file ends early, if it does
    base_ns: int = 0  # to which the file's times are relative
    damage: tuple[Damage, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One process's trace."""

    info: RankInfo
    names: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]  # (process, thread)
    streams: tuple[tuple[int, str], ...]  # (device, stream)
    comm_args: tuple[CommArgs, ...]
    shapes: tuple[str, ...]  # JSON of the inputs' shapes
    operands: tuple[tuple[str, str], ...]  # JSON of their types and strides
    gpu: GpuColumns
    calls: CallColumns
    ops: OpColumns
    spans: SpanColumns
    comms: CommColumns
    syncs: SyncColumns


TABLES = {
    "gpu": GpuColumns,
    "calls": CallColumns,
    "ops": OpColumns,
    "spans": SpanColumns,
    "comms": CommColumns,
    "syncs": SyncColumns,
}
