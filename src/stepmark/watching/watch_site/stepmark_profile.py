"""A torch.profiler profile of some steps of a watched job, and its trace."""

from __future__ import annotations

import gzip
import os
from typing import Any

import torch
import torch.autograd.profiler
import torch.profiler
from torch._C._autograd import _disable_profiler, _profiler_enabled
from torch.profiler import ProfilerAction, ProfilerActivity

_CHUNK = 1 << 20
_KERNEL = b'"cat": "kernel"'  # as Kineto writes it
# Marks of our steps while they are recorded, and in the file. Those of a profiler of the job,
# which marks its steps even while it waits, get another name.
_MARK, _MARK_IN_FILE = b'"StepmarkStep#', b'"ProfilerStep#'
_OTHER_MARK = b"\"step of the job's profiler #"


class StepProfile:
    """A profile of the steps after `dropped`, which is thrown away, to `last`."""

    def __init__(self, dropped: int, last: int, *, has_shapes: bool) -> None:
        activities = set(torch.profiler.supported_activities())
        if not torch.cuda.is_initialized():
            activities.discard(ProfilerActivity.CUDA)

        def schedule(step: int) -> ProfilerAction:
            if step <= dropped:
                return ProfilerAction.WARMUP
            if step < last:
                return ProfilerAction.RECORD
            return ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.NONE

        profiler: Any = torch.profiler.profile(
            activities=activities, schedule=schedule, record_shapes=has_shapes
        )
        profiler.step_num = dropped
        profiler.record_steps = False  # the marks are our own
        profiler.acc_events = True  # else torch 2.11 warns
        profiler.start()
        profiler.profiler.acc_events = False  # else the end takes seconds
        self._profiler, self._last = profiler, last
        self._mark: Any = None

    def step(self, count: int) -> None:
        """Note that step `count` of the job has ended."""
        self._leave_mark()
        self._profiler.step()
        if count < self._last:
            name = f"{_MARK[1:].decode()}{count + 1}"
            self._mark = torch.autograd.profiler.record_function(name)
            self._mark.__enter__()

    def _leave_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def stop(self, *, waits: bool = True) -> None:
        """End it, after its last step or before. A process that ends in a profile crashes.

        waits: for the GPU, as torch does; work that never ends must not keep the process.
        """
        self._leave_mark()
        try:
            if waits:
                self._profiler.stop()
        finally:
            if _profiler_enabled():  # the GPU has failed, or is not waited for
                _disable_profiler()

    def write(self, path: str) -> bool:
        """Write the trace. Return whether it has kernels."""
        folder, name = os.path.split(path)
        packed = os.path.join(folder, f".{name}.{os.getpid()}")
        plain, has_kernels = f"{packed}.json", False
        try:
            self._profiler.export_chrome_trace(plain)
            # The job waits: the lowest level of compression.
            with open(plain, "rb") as source, gzip.open(packed, "wb", 1) as target:
                while chunk := source.read(_CHUNK) + source.readline():
                    has_kernels = has_kernels or _KERNEL in chunk
                    chunk = chunk.replace(_MARK_IN_FILE, _OTHER_MARK)
                    target.write(chunk.replace(_MARK, _MARK_IN_FILE))
            os.replace(packed, path)
        finally:
            for rest in (plain, packed):
                if os.path.exists(rest):
                    os.unlink(rest)
        return has_kernels
