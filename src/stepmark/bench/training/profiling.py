"""Untimed samples after the timed ones: messages, a Kineto trace, time by kernel."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import profiler as torch_profiler
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity

from stepmark.bench.ranks import Ranks
from stepmark.bench.training.attention import prefix_kernel
from stepmark.bench.training.loop import Loop
from stepmark.bench.training.messages import MessageRecorder, merge
from stepmark.core.kernel_groups import group_of
from stepmark.core.message import MessageKind, Tally
from stepmark.core.train_case import TrainCase

_ROWS = 25
_NAME_WIDTH = 90
_STEP = "ProfilerStep"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTime:
    """Time of a kernel, an operator or a group of them, without that of its callees."""

    name: str
    seconds: float
    calls: int


class Profile:
    """Records the steps between start and stop on this rank.

    On CUDA times are those of kernels, on a CPU those of operators. Where the driver or CUPTI
    hides kernels, times are those of operators on the host, and the table notes it.
    """

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        plain = re.sub(r"[^\w.@+=-]+", "-", name)
        self.path = folder / f"{plain}-rank{rank}.json.gz"
        self._rank = rank
        self._steps = 0
        self._profiler: Any = None
        self._averages: list[Any] = []

    def start(self) -> None:
        activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(
            torch_profiler.supported_activities()
        )
        try:
            self._begin(activities)
        except RuntimeError:  # another profiler holds CUPTI, or it may not be used here
            self._begin({ProfilerActivity.CPU})

    def _begin(self, activities: Iterable[ProfilerActivity]) -> None:
        # Only with a schedule are steps marked in the trace.
        profiler = torch_profiler.profile(
            activities=activities, schedule=lambda _: ProfilerAction.RECORD, acc_events=True
        )
        profiler.start()
        self._profiler = profiler

    def step(self) -> None:
        """Mark the end of a step."""
        self._steps += 1
        self._profiler.step()

    def stop(self) -> tuple[str, ...]:
        """Write the trace. Return names of files in the folder."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        self._averages = list(self._profiler.key_averages())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete, so that no reader gets a partial file.
        unfinished = self.path.with_name(f".{self.path.name}")
        self._profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(self.path)
        return (self.path.name,)

    @property
    def has_kernels(self) -> bool:
        return any(_is_kernel(entry) for entry in self._averages)

    def self_times(self) -> list[SelfTime]:
        """Return times by kernel, or by operator without kernels: the longest first."""
        on_device = self.has_kernels
        entries = []
        for entry in self._averages:
            if entry.key.startswith(_STEP) or entry.is_user_annotation:
                continue
            if on_device and not _is_kernel(entry):
                continue
            micros = entry.self_device_time_total if on_device else entry.self_cpu_time_total
            entries.append(SelfTime(name=entry.key, seconds=micros * 1e-6, calls=entry.count))
        return sorted(entries, key=lambda item: -item.seconds)

    def table(self) -> str:
        """Return shares by group and of the longest kernels or operators, as lines of text."""
        times = self.self_times()
        total = sum(entry.seconds for entry in times)
        kind = "kernels" if self.has_kernels else "operators on the host"
        hidden = torch.cuda.is_available() and not self.has_kernels
        note = " (kernels were not recorded: CUPTI gave none)" if hidden else ""
        steps = max(self._steps, 1)
        head = f"rank {self._rank}: {total / steps * 1e3:.3f} ms of {kind} per step{note}"
        lines = [f"{head}, {self._steps} steps"]
        for title, rows in (("group", groups(times)), ("name", times[:_ROWS])):
            lines += ["", f"{'share':>7} {'ms/step':>10} {'calls/step':>10}  {title}"]
            lines += [_line(entry, total, steps) for entry in rows]
        return "\n".join(lines)


def groups(times: Iterable[SelfTime]) -> list[SelfTime]:
    """Return sums by group of kernels, the longest first."""
    sums: dict[str, tuple[float, int]] = {}
    for entry in times:
        name = group_of(entry.name)
        seconds, calls = sums.get(name, (0.0, 0))
        sums[name] = (seconds + entry.seconds, calls + entry.calls)
    entries = [SelfTime(name=name, seconds=s, calls=c) for name, (s, c) in sums.items()]
    return sorted(entries, key=lambda item: -item.seconds)


def _is_kernel(entry: Any) -> bool:
    return entry.device_type != DeviceType.CPU and not entry.is_user_annotation


def _line(entry: SelfTime, total: float, steps: int) -> str:
    share = entry.seconds / total if total else 0.0
    name, millis = entry.name, entry.seconds / steps * 1e3
    label = name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."
    return f"{share:>6.1%} {millis:>11.3f} {entry.calls / steps:>10.4g}  {label}"


_PROFILED = 3  # samples


def record_messages(
    work: Loop, ranks: Ranks, case: TrainCase
) -> tuple[tuple[MessageKind, Tally], ...]:
    """Return the messages of all ranks in one cycle."""
    recorder = MessageRecorder()

    def begins(phase: str) -> None:
        # A pipeline's forward and backward passes cannot be told apart.
        mixed = case.parallel.pp > 1 and phase == "forward"
        recorder.phase = "" if mixed else phase

    with recorder:
        work.untimed_cycle(on_phase=begins)
    return merge(ranks.gather(recorder.histogram()))


def record_profile(
    work: Loop, ranks: Ranks, case: TrainCase, folder: Path, *, is_profiled: bool, launch: int
) -> tuple[str, ...]:
    """Write Kineto traces of a few samples, in whole cycles; return all ranks' file names."""
    name = f"train-{case.case_id[:16]}" + (f"-launch{launch}" if launch > 1 else "")
    recorder = Profile(folder, name, ranks.rank) if is_profiled else None
    if recorder:
        recorder.start()
    for _ in range(max(1, _PROFILED // case.cycle)):
        work.untimed_cycle()
        if recorder:
            recorder.step()
    files = recorder.stop() if recorder else ()
    if recorder:
        (folder / f"{name}-rank{ranks.rank}.txt").write_text(recorder.table())
    return tuple(file for names in ranks.gather(tuple(files)) for file in names)


_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def attention_kernel(case: TrainCase, device: torch.device) -> str:
    """Return the kernel that torch's scaled_dot_product_attention uses for these shapes.

    Under context parallelism it is that of queries at the end of a sequence. "" where a full
    device has no memory for the query.
    """
    if case.attention != "auto":
        return case.attention
    model, tp, cp = case.model, case.parallel.tp, case.parallel.cp
    low = torch.float32 if case.precision == "fp32" else torch.bfloat16
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    length = model.seq_len if cp == 1 else model.seq_len // (2 * cp)
    shape = (case.mbs, heads, length, model.d_qk)
    try:
        query = torch.empty(shape, dtype=low, device=device, requires_grad=True)
        key = torch.empty(
            (case.mbs, kv_heads, model.seq_len, model.d_qk), dtype=low, device=device
        )
        value = torch.empty((*key.shape[:3], model.d_v), dtype=low, device=device)
        if cp > 1 and (kernel := prefix_kernel(query, value, "auto")):
            return kernel
        shape_of_mask = (length, model.seq_len)
        mask = torch.empty(shape_of_mask, dtype=torch.bool, device=device) if cp > 1 else None
    except torch.OutOfMemoryError:
        return ""
    choice = torch._fused_sdp_choice(
        query, key, value, mask, is_causal=cp == 1, enable_gqa=heads != kv_heads
    )
    return _KERNELS.get(int(choice), str(choice))
