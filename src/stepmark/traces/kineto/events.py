"""Events of a Kineto trace as msgspec decodes them: only the fields that are used."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from stepmark.ground import json_text
from stepmark.timeline.trace_columns import CommArgs, TraceGroup

# Events that are not read, by the name of their damage.
LEFT_OUT = {
    "no-time": "events whose time or duration is missing or no number",
    "negative-duration": "events of negative duration",
    "time-out-of-range": "events at an impossible time",
    "other-device": "events of a device other than CUDA's and ROCm's",
    "marker": "Marker events of ROCm, which are no work of the GPU",
}

_ARGS = {
    "external_id": "External id",
    "old_external_id": "external id",
    "sequence": "Sequence number",
    "forward_thread": "Fwd thread id",
    "collective": "Collective name",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group_size": "Group size",
    "group": "Process Group Name",
    "group_desc": "Process Group Description",
    "group_ranks": "Process Group Ranks",
    "in_splits": "In split size",
    "out_splits": "Out split size",
    "source": "Src Rank",
    "target": "Dst Rank",
    "seq": "Seq",
    "rank": "Rank",
    "input_dims": "Input Dims",
    "input_strides": "Input Strides",
    "input_types": "Input type",
    "concrete_inputs": "Concrete Inputs",
    "num_bytes": "bytes",
    "old_num_bytes": "size",
    "awaited": "wait_on_stream",
    "recorded": "wait_on_cuda_event_record_corr_id",
}


class Args(Struct, rename=_ARGS, gc=False):
    """Arguments of any event."""

    correlation: int | None = None
    stream: int | str | None = None
    device: int | str | None = None
    external_id: int | None = None
    old_external_id: int | None = None
    num_bytes: int | None = None
    old_num_bytes: int | None = None
    awaited: int | None = None
    recorded: int | None = None
    sequence: int | None = None
    forward_thread: int | None = None
    collective: str | None = None
    dtype: str = ""
    in_elements: int = 0
    out_elements: int = 0
    group_size: int | None = None
    group: str | int = ""
    group_desc: str = ""
    group_ranks: str | list[int] = ""
    in_splits: str | list[int] = ""
    out_splits: str | list[int] = ""
    source: int | None = None
    target: int | None = None
    seq: int | None = None
    rank: int | None = None
    input_dims: msgspec.Raw = msgspec.Raw(b"")
    input_strides: msgspec.Raw = msgspec.Raw(b"")
    input_types: msgspec.Raw = msgspec.Raw(b"")
    concrete_inputs: msgspec.Raw = msgspec.Raw(b"")
    name: Any = None  # of metadata events
    labels: Any = None


class Event(Struct, gc=False):
    """One event. Times are microseconds; a float has room for nanoseconds below 2**43."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float | None = None
    dur: float | None = None
    args: Args | None = None


class Group(Struct):
    """A process group of distributedInfo. Old versions have uid instead of pg_desc."""

    pg_name: str | int = ""
    pg_desc: str = ""
    pg_size: int | None = None
    ranks: list[int] | str = ""


class Distributed(Struct):
    """The part of the header about torch.distributed."""

    backend: str = ""
    rank: int | None = None
    world_size: int | None = None
    pg_config: list[Group] = []
    nccl_version: str = ""


class Device(Struct):
    """A GPU of the header."""

    name: str = ""


class Header(Struct, rename={"base_ns": "baseTimeNanoseconds", "devices": "deviceProperties"}):
    """What stands before or after the events."""

    base_ns: int | None = None
    devices: list[Device] | None = None
    distributed: Distributed | None = msgspec.field(default=None, name="distributedInfo")
    trace_id: str = ""
    cupti_version: Any = None
    cuda_runtime_version: Any = None
    cuda_driver_version: Any = None
    roctracer_version: Any = None
    hip_runtime_version: Any = None
    hip_driver_version: Any = None


def comm_args_of(args: Args) -> CommArgs:
    return CommArgs(
        collective=args.collective or "",
        dtype=args.dtype,
        in_elements=args.in_elements,
        out_elements=args.out_elements,
        group=str(args.group),
        group_desc=args.group_desc,
        group_size=args.group_size,
        ranks=_numbers(args.group_ranks),
        in_splits=_numbers(args.in_splits),
        out_splits=_numbers(args.out_splits),
        source=args.source,
        target=args.target,
    )


def _numbers(value: str | Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of "[0, 1, 2]"; () for a list that was cut ("[0, 1, ...]")."""
    if not isinstance(value, str):
        return tuple(value)
    try:
        return tuple(json_text.decode(value, list[int]))
    except ValueError:
        return ()


def group_of(group: Group) -> TraceGroup:
    ranks = _numbers(group.ranks)
    return TraceGroup(
        name=str(group.pg_name),
        desc=group.pg_desc,
        ranks=ranks,
        size=len(ranks) or group.pg_size,
    )
