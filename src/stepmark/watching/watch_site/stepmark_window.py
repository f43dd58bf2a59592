"""Times and profiles a few steps of a job under `stepmark watch`, after torch is imported.

A step ends when an optimizer has made its step, which torch reports to a global hook. The job's
results do not depend on this file: an error in it ends the watching, with one line on stderr.
It imports torch and the standard library alone, as the job's environment may be another one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gzip
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.profiler
import torch.profiler
from torch._C._autograd import _disable_profiler, _get_sequence_nr, _profiler_enabled
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerAction, ProfilerActivity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_record_function: Any = torch.autograd.profiler.record_function
SCHEMA = 1
# Variables with the rank of a process that does not use torch.distributed.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_DEFAULT_RANKS = 8
_QUIET_STEPS = 64
_MAX_ATTEMPTS = 3
_EXIT_S = 10.0
_MAX_CHARACTERS = 200


_CHUNK = 1 << 20
_KERNEL = b'"cat": "kernel"'  # as Kineto writes it
# Marks of our steps while they are recorded, and in the file. Those of a profiler of the job,
# which marks its steps even while it waits, get another name.
_MARK = b'"StepmarkStep#'
_MARK_IN_FILE = b'"ProfilerStep#'
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
        self._profiler = profiler
        self._last = last
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
        mark = self._mark
        self._mark = None
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
        plain = f"{packed}.json"
        has_kernels = False
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


class Window:
    """The steps of one process: warm-up, unprofiled, profiled, and unprofiled again.

    plan: warmup, unprofiled, steps (numbers of steps), ranks (to profile; None: the first
    eight), shapes, and folder (of the run, which exists). Between the unprofiled and the
    profiled steps is one that the profiler throws away; the writing disturbs the one after.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.folder: str = plan["folder"]
        self.leave: Any = None  # what _hook_exits has replaced
        self.begin_again()

    def begin_again(self) -> None:
        """Begin with nothing: at first, and in a forked process."""
        self._unhook_exits()
        self.pid = os.getpid()
        self.thread = 0
        self.optimizers: set[int] = set()  # those that have stepped since the last step's end
        self.sequence = -1
        self.quiet = 0
        self.count = 0  # steps that have ended
        self.dropped = self.plan["warmup"] + self.plan["unprofiled"] + 1  # by the profiler
        self.began: Any = None  # time at which the current step began
        self.steps: list[tuple[str, Any, Any]] = []  # kind, begin and end
        self.profile: StepProfile | None = None
        self.attempts = 0
        self.is_acting = self.is_other_active = self.is_pending = self.is_done = False
        self.path = ""
        self.report: dict[str, Any] = {"schema": SCHEMA, "trace": None, "reason": None}

    @property
    def last(self) -> int:
        """The last profiled step."""
        return int(self.dropped + self.plan["steps"])

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep an error from the job: it ends the watching. Profilers that start are ours."""
        was_acting = self.is_acting
        self.is_acting = True
        try:
            yield
        except Exception as error:  # noqa: BLE001, the job goes on whatever happens here
            self.is_done = True
            self._unhook_exits()
            self.report["reason"] = f"watching failed: {error!r}"[:_MAX_CHARACTERS]
            sys.stderr.write(f"stepmark watch: pid {os.getpid()}: {self.report['reason']}\n")
            for action in (self._discard, self._write):
                with contextlib.suppress(Exception):
                    action()
        finally:
            self.is_acting = was_acting

    def stepped(self, optimizer: object, *, is_compiled: bool = False) -> None:
        """Take one optimizer step. A compiled one is not within a record_function."""
        if not self.is_done:
            with self.guarded():
                if self._ends_step(optimizer):
                    self._end_step(type(optimizer).__name__)
                    is_near = self.dropped - 1 <= self.count <= self.last
                    self.is_pending = is_near and self.report["is_chosen"]
                    if self.is_pending and is_compiled:
                        self._begin_step()

    def _hook_exits(self) -> None:
        """Begin a step when the optimizer's record_function is left, so that marks nest."""
        leave = self.leave = _record_function.__exit__

        @functools.wraps(leave)
        def leave_and_begin(*args: Any) -> None:
            leave(*args)
            if self.is_pending and threading.get_ident() == self.thread:
                with self.guarded():
                    self._begin_step()

        _record_function.__exit__ = leave_and_begin

    def _unhook_exits(self) -> None:
        leave = self.leave
        self.leave = None
        if leave is not None:
            _record_function.__exit__ = leave

    def _ends_step(self, optimizer: object) -> bool:
        """Whether it is the first optimizer to step twice since the last step's end.

        A second step without any forward pass in between belongs to the same training step:
        it is of another part of the parameters, as in DeepSpeed's ZeRO 3. A replayed CUDA graph
        has no forward pass either, so after many such steps each one counts.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False
        thread = threading.get_ident()
        self.thread = self.thread or thread
        if thread != self.thread:
            return False
        sequence = _get_sequence_nr()
        before = self.sequence
        if id(optimizer) not in self.optimizers:
            self.optimizers.add(id(optimizer))
            self.sequence = sequence
            return False
        self.sequence = sequence
        if sequence == before and self.quiet < _QUIET_STEPS:
            self.quiet += 1
            return False
        self.quiet = self.quiet if sequence == before else 0
        self.optimizers = {id(optimizer)}
        return True

    def _end_step(self, optimizer: str) -> None:
        end = _now()
        self.count += 1
        if self.count == 1:
            self._introduce(optimizer)
        kind = self._kind()
        if kind and self.began is not None:
            self.steps.append((kind, self.began, end))
        self.began = end
        if self.count == self.dropped - 2 and self.report["is_chosen"]:
            self._hook_exits()
        if self.count > self.last + 1 + self.plan["unprofiled"] and _is_over(end):
            self._write()
            self.is_done = True

    def _kind(self) -> str:
        """Return the kind of the step that has just ended; "" for one that does not count."""
        warmup = self.plan["warmup"]
        unprofiled = self.plan["unprofiled"]
        if self.dropped < self.count <= self.last:
            return "profiled"
        if self.is_other_active:
            return ""
        if warmup < self.count <= warmup + unprofiled:
            return "unprofiled"
        is_after = self.last + 1 < self.count <= self.last + 1 + unprofiled
        return "after" if is_after else ""

    def _begin_step(self) -> None:
        """Begin, mark or end the profile between two steps."""
        self.is_pending = False
        if self.profile is not None:
            self.profile.step(self.count)
            if self.count == self.last:
                self._write_trace()
        elif self.count == self.dropped - 1 and self.is_other_active:
            self.dropped += 1  # at the end of the next step it is tried again
            self.report["notes"]["put_off"] = "the job's own profiler was active"
        elif self.count == self.dropped - 1:
            began_s = time.perf_counter()
            has_shapes = self.plan["shapes"]
            self.profile = StepProfile(self.dropped, self.last, has_shapes=has_shapes)
            self.report["start_s"] = time.perf_counter() - began_s
        self.began = _now()

    def make_way(self) -> None:
        """End our profile before another one of this process begins; later try again."""
        self._discard()
        self.attempts += 1
        self.dropped = self.count + 2
        self.steps = [step for step in self.steps if step[0] != "profiled"]
        if self.attempts == _MAX_ATTEMPTS:
            raise RuntimeError("the job's own profiler began in the profile, every time")

    def _discard(self, *, waits: bool = True) -> None:
        profile = self.profile
        self.profile = None
        if profile is not None:
            profile.stop(waits=waits)

    def _write_trace(self) -> None:
        began_s = time.perf_counter()
        profile = self.profile
        assert profile is not None
        self._discard()
        trace = f"traces/rank{self.report['rank']}.json.gz"
        has_kernels = profile.write(os.path.join(self.folder, trace))
        self.report |= {
            "trace": trace,
            "profiled_steps": [self.dropped + 1, self.last],
            "has_kernels": has_kernels,
            "write_s": time.perf_counter() - began_s,
        }
        if torch.cuda.is_initialized() and not has_kernels:
            self.report["notes"]["kernels"] = "CUPTI or the driver gave no kernels"
        self._write()
        self._unhook_exits()

    def _introduce(self, optimizer: str) -> None:
        """Find out which rank this is, and claim its report. A second process gets its own."""
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if is_distributed else _number(_RANK, 0)
        size = torch.distributed.get_world_size() if is_distributed else _number(_WORLD_SIZE, 1)
        ranks = self.plan["ranks"]
        is_cuda = torch.cuda.is_initialized()
        self.report |= {
            "rank": rank,
            "world_size": size,
            "host": socket.gethostname(),
            "pid": self.pid,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
            "clock": "CUDA events" if is_cuda else "host clock",
            "optimizer": optimizer,
            "is_chosen": rank < _DEFAULT_RANKS if ranks is None else rank in ranks,
            "notes": {},
        }
        self.path = os.path.join(self.folder, "ranks", f"rank{rank}.json")
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            self.path = self.path[:-4] + f"{self.report['host']}.{self.pid}.json"
            self.report["is_chosen"] = False
            self.report["notes"]["second"] = "an earlier process of this rank is watched"
        self._write()

    def at_exit(self) -> None:
        """Report a job that has ended before the end of the plan, or without any step."""
        # torchrun's agent and a rank's workers make no steps.
        is_helper = "torch.distributed.run" in sys.modules or multiprocessing.parent_process()
        if self.is_done or self.pid != os.getpid() or (is_helper and not self.path):
            return
        with self.guarded():
            if self.profile is not None:
                end = _now()
                limit_s = time.monotonic() + _EXIT_S
                while not _is_over(end) and time.monotonic() < limit_s:
                    time.sleep(0.01)
                self._discard(waits=_is_over(end))  # a collective may hang before it
            if not self.path:
                rank = _number(_RANK, 0)
                host = socket.gethostname()
                self.report |= {"rank": rank, "host": host, "pid": self.pid}
                name = f"rank{rank}.{host}.{self.pid}.json"
                self.path = os.path.join(self.folder, "ranks", name)
                number = "only one" if self.optimizers else "no"
                self.report["reason"] = f"{number} optimizer step was seen"
            elif self.report["is_chosen"] and not self.report["trace"]:
                self.report["reason"] = (  # the first step of all is only the start of one
                    f"the job ended after {self.count + 1} steps; the profile needs "
                    f"{self.last + 1}"
                )
            self._write()
        self.is_done = True

    def _write(self) -> None:
        if not self.path:
            return
        for kind in ("unprofiled", "profiled", "after"):
            self.report[f"{kind}_s"] = [
                _seconds(begin, end)
                for each, begin, end in self.steps
                if each == kind and _is_over(end)
            ]
        self.report["steps"] = self.count
        temporary = f"{self.path}.{self.pid}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self.report, file)
        os.replace(temporary, self.path)


def _now() -> Any:
    """Return an event on the current stream, which does not make the host wait, or a time."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_over(time_or_event: Any) -> bool:
    try:
        return isinstance(time_or_event, float) or bool(time_or_event.query())
    except RuntimeError:  # the GPU has failed
        return False


def _seconds(begin: Any, end: Any) -> float | None:
    """Return the time between two values of `_now`; None where CUDA began in between."""
    if isinstance(begin, float) != isinstance(end, float):
        return None
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000.0)


def _number(names: tuple[str, ...], default: int) -> int:
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), default)


def _is_full_graph() -> bool:
    """Whether torch.compile(fullgraph=True) traces now, where any call of ours is an error."""
    try:
        frame = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
        return bool(frame.one_graph or getattr(frame, "error_on_graph_break", False))
    except Exception:  # noqa: BLE001, another version of torch: such steps are not seen
        return True


# Evaluated while tracing, as torch._dynamo.assume_constant_result marks it.
_is_full_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _tracked(function: Callable[..., Any], window: Window, *, ends: bool) -> Callable[..., Any]:
    """Return a function of torch's profiler that tells the window of profilers of the job."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not window.is_acting:
            window.is_other_active = not ends
            if not ends and window.profile is not None:
                with window.guarded():
                    window.make_way()
        return function(*args, **kwargs)

    return call


def begin(plan: str) -> Window:
    """Watch this process. Called once, when torch is imported."""
    window = Window(json.loads(plan))

    def call(optimizer: object) -> None:
        window.stepped(optimizer, is_compiled=True)

    untraced_call = _disable_dynamo(call)

    def hook(optimizer: object, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            window.stepped(optimizer)
        elif not _is_full_graph():
            untraced_call(optimizer)

    register_optimizer_step_post_hook(hook)
    os.register_at_fork(after_in_child=window.begin_again)
    atexit.register(window.at_exit)
    module: Any = torch.autograd.profiler
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
        tracked = _tracked(getattr(module, name), window, ends=name.startswith("_disable"))
        setattr(module, name, tracked)
    return window
