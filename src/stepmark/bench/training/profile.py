"""A few steps under torch's profiler: a Kineto trace, and where the time went by kernel."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import profiler as torch_profiler
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity

_ROWS = 25
_NAME_WIDTH = 90
_STEP = "ProfilerStep"

# The first that matches a kernel's or an operator's name says what it is for. Attention before
# products, as its kernels are products too; optimizers before what they are built from.
_GROUPS: dict[str, str] = {
    "communication": r"nccl|rccl|c10d|gloo|all_?gather|reduce_?scatter|all_?reduce|symm_mem",
    "attention": r"flash|fmha|attention|sdpa|aiter",
    "optimizer": r"adam|multi_tensor_apply|foreach|lerp_|addcmul|addcdiv",
    "matrix products": r"gemm|cutlass|nvjet|cublas|xmma|::(add)?b?mm\b|scaled_mm|_mm_|linear",
    "copies": r"memcpy|memset|::copy_|::_to_copy|chunk_cat|split_with_sizes|::cat\b|::fill_",
    "fused by compile": r"triton_|cpp_fused|graph_\d",
}
_OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Time of a kernel, an operator or a group of them, without what it calls."""

    name: str
    seconds: float
    calls: int


class Profile:
    """Records the steps between start and stop on this rank. Also a context manager.

    On CUDA times are those of kernels, on a CPU those of operators. Where the driver or CUPTI
    keeps kernels hidden, times are operators' on the host, and the table says so.
    """

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        plain = re.sub(r"[^\w.@+=-]+", "-", name)
        self.path = folder / f"{plain}-rank{rank}.json.gz"
        self._rank = rank
        self._steps = 0
        self._profiler: Any = None
        self._averages: list[Any] = []

    def start(self) -> None:
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(
            torch_profiler.supported_activities()
        )
        try:
            self._begin(wanted)
        except RuntimeError:  # another profiler holds CUPTI, or it may not be used here
            self._begin({ProfilerActivity.CPU})

    def _begin(self, activities: Iterable[ProfilerActivity]) -> None:
        # With a schedule, if one that always records, steps are marked in the trace.
        profiler = torch_profiler.profile(
            activities=activities, schedule=lambda _: ProfilerAction.RECORD, acc_events=True
        )
        profiler.start()
        self._profiler = profiler

    def step(self) -> None:
        """To be called at the end of each step."""
        self._steps += 1
        self._profiler.step()

    def stop(self) -> tuple[str, ...]:
        """Writes the trace. Returns names of files in the folder."""
        self._finish()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A reader never meets half a file.
        unfinished = self.path.with_name(f".{self.path.name}")
        self._profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(self.path)
        return (self.path.name,)

    def _finish(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        self._averages = list(self._profiler.key_averages())

    def __enter__(self) -> "Profile":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self._profiler.stop()

    @property
    def has_kernels(self) -> bool:
        return any(_is_kernel(one) for one in self._averages)

    def spent(self) -> list[Spent]:
        """By kernel, or by operator without kernels: the longest first."""
        on_device = self.has_kernels
        found = []
        for one in self._averages:
            if one.key.startswith(_STEP) or one.is_user_annotation:
                continue
            if on_device and not _is_kernel(one):
                continue
            micros = one.self_device_time_total if on_device else one.self_cpu_time_total
            found.append(Spent(name=one.key, seconds=micros * 1e-6, calls=one.count))
        return sorted(found, key=lambda one: -one.seconds)

    def table(self) -> str:
        """Shares by group and of the longest kernels or operators, as lines of text."""
        spent = self.spent()
        total = sum(one.seconds for one in spent)
        what = "kernels" if self.has_kernels else "operators on the host"
        hidden = torch.cuda.is_available() and not self.has_kernels
        note = " (kernels were not recorded: CUPTI gave none)" if hidden else ""
        steps = max(self._steps, 1)
        head = f"rank {self._rank}: {total / steps * 1e3:.3f} ms of {what} per step{note}"
        lines = [f"{head}, {self._steps} steps"]
        for title, rows in (("group", groups(spent)), ("name", spent[:_ROWS])):
            lines += ["", f"{'share':>7} {'ms/step':>10} {'calls/step':>10}  {title}"]
            lines += [_line(one, total, steps) for one in rows]
        return "\n".join(lines)


def groups(spent: Iterable[Spent]) -> list[Spent]:
    """Summed by what kernels are for, the longest first."""
    sums: dict[str, tuple[float, int]] = {}
    for one in spent:
        name = group_of(one.name)
        seconds, calls = sums.get(name, (0.0, 0))
        sums[name] = (seconds + one.seconds, calls + one.calls)
    found = [Spent(name=name, seconds=s, calls=c) for name, (s, c) in sums.items()]
    return sorted(found, key=lambda one: -one.seconds)


def group_of(name: str) -> str:
    """What a kernel or an operator is for, as its name tells."""
    found = (group for group, words in _GROUPS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, _OTHER)


def _is_kernel(one: Any) -> bool:
    return one.device_type != DeviceType.CPU and not one.is_user_annotation


def _line(one: Spent, total: float, steps: int) -> str:
    share = one.seconds / total if total else 0.0
    shown = one.name if len(one.name) <= _NAME_WIDTH else one.name[: _NAME_WIDTH - 3] + "..."
    return (
        f"{share:>6.1%} {one.seconds / steps * 1e3:>11.3f} {one.calls / steps:>10.4g}  {shown}"
    )
