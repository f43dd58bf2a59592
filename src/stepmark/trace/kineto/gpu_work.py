"""Kinds of work on a GPU: compute, communication, memory."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from stepmark.core.kernel_groups import COMMUNICATION, group_of
from stepmark.core.trace_columns import NONE, GpuKind, RankTrace

if TYPE_CHECKING:
    from stepmark.core.trace_columns import Ints


class Work(IntEnum):
    """Kind of a GPU event."""

    COMPUTE = 0
    COMM = 1
    MEMORY = 2


def gpu_work(trace: RankTrace, comm: Ints) -> Ints:
    """Return the Work of each GPU event. comm: as links.gpu_comms returns it.

    Communication is what a call of torch.distributed launched, copies and helper kernels among
    it, and kernels of communication libraries by name. Other copies and memsets are memory.
    """
    is_named = np.array([group_of(name) == COMMUNICATION for name in trace.names], bool)
    kind = trace.gpu.kind
    is_comm = comm != NONE
    if kind.size:
        is_comm |= (kind == GpuKind.KERNEL) & is_named[trace.gpu.name]
    return np.where(
        is_comm, Work.COMM, np.where(kind == GpuKind.KERNEL, Work.COMPUTE, Work.MEMORY)
    )


def device_of(trace: RankTrace) -> Ints:
    """Return the device of each GPU event."""
    devices = np.array([device for device, _ in trace.streams], np.int64)
    return devices[trace.gpu.stream] if trace.gpu.stream.size else devices[:0]
