"""Untimed samples after the timed ones: messages, and a Kineto trace with marks of modules."""

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch import profiler as torch_profiler
from torch._dynamo import OptimizedModule
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from stepmark.cases.message import MessageKind, Tally, summed
from stepmark.cases.train_case import TrainCase
from stepmark.measuring.ranks import Ranks
from stepmark.step.trace_ops import MARK, WHOLE
from stepmark.training.attention import prefix_kernel
from stepmark.training.loop import Loop
from stepmark.training.masked_attention import masked_kernel
from stepmark.training.messages import MessageRecorder
from stepmark.training.scores import all_scores
from stepmark.training.transformer import canonical_name

TraceFile = tuple[str, str]  # name and SHA-256


class Profile:
    """Records this rank's steps after the first ones, which warm the profiler up.

    Where the driver or CUPTI hides kernels, the trace has only what the host did.
    """

    def __init__(self, folder: Path, name: str, rank: int, num_warmups: int = 1) -> None:
        self._num_warmups = num_warmups
        plain = re.sub(r"[^\w.@+=-]+", "-", name)
        self.path = folder / f"{plain}-rank{rank}.json.gz"
        self._profiler: Any = None

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
        profiler: Any = torch_profiler.profile(
            activities=activities,
            schedule=lambda step: (
                ProfilerAction.RECORD if step >= self._num_warmups else ProfilerAction.WARMUP
            ),
            record_shapes=True,
            acc_events=True,  # else torch 2.11 warns
        )
        profiler.start()
        profiler.profiler.acc_events = False  # else the end takes seconds
        self._profiler = profiler

    def next_step(self) -> None:
        """Mark the end of a step and the begin of another."""
        self._profiler.step()

    def stop(self) -> tuple[str, ...]:
        """Write the trace. Return names of files in the folder."""
        self._profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete, so that no reader gets a partial file.
        unfinished = self.path.with_name(f".{self.path.name}")
        self._profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(self.path)
        return (self.path.name,)


class Annotations:
    """Marks calls of modules inside `with`, and the phase that last began, in a trace.

    Names are `stepmark::` and a module's path in the bare model, or a phase. Hooks inside a
    graph of torch.compile would not run, and could compile it again: such a module has marks
    around it.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = tuple(roots)
        self._handles: list[Any] = []
        self._open: list[Any] = []  # calls of modules are nested
        self._phase: Any = None

    def __enter__(self) -> Self:
        for path, module in (pair for root in self._roots for pair in marked_modules(root)):
            name = MARK + path

            def enter(*_call: object, name: str = name) -> None:
                self._open.append(record_function(name))
                self._open[-1].__enter__()

            self._handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                # always: recomputation in a backward pass ends with an exception.
                module.register_forward_hook(self._leave, always_call=True),
            ]
        return self

    def __exit__(self, *_error: object) -> None:
        self.end_phase()
        for handle in self._handles:
            handle.remove()

    def begin_phase(self, phase: str) -> None:
        self.end_phase()
        self._phase = record_function(MARK + phase)
        self._phase.__enter__()

    def end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _leave(self, *_call: object) -> None:
        self._open.pop().__exit__(None, None, None)


def marked_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules whose hooks run outside of compiled graphs, by their path."""
    if root._compiled_call_impl is not None:
        return
    is_compiled = isinstance(root, OptimizedModule)
    name = canonical_name(path) or is_compiled * WHOLE
    inside = [
        (f"{path}.{child}" if path else child, module)
        for child, module in root.named_children()
        if not is_compiled
    ]
    # Of a wrapper the module inside, which recomputation calls, too.
    if name and all(canonical_name(place) != name for place, _ in inside):
        yield name, root
    for place, module in inside:
        yield from marked_modules(module, place)


_PROFILED = 3  # samples
# A GPU that was idle runs faster until its power limit acts: steps are recorded after it does.
_SOAK_S = 1.0
_MOST_WARMUPS = 200
# After it an H200 keeps full clock for about 40 ms of products, until its power limit acts.
PAUSE_S = 0.3
_PASSES = ("forward", "backward", "optimizer")


def record_messages(
    work: Loop, ranks: Ranks, case: TrainCase
) -> tuple[tuple[MessageKind, Tally], ...]:
    """Return the messages of all ranks in one cycle."""
    recorder = MessageRecorder()

    def begins(phase: str) -> None:
        recorder.phase = "" if _is_mixed(case, phase) else phase

    with recorder:
        work.untimed_cycles(on_phase=begins)
    by_rank = ranks.gather(recorder.histogram())
    return tuple(summed(chain.from_iterable(by_rank), ranks=add).items())


def _is_mixed(case: TrainCase, phase: str) -> bool:
    """Return whether passes cannot be told apart: a pipeline runs forward and backward ones."""
    return case.parallel.pp > 1 and phase == "forward"


def record_profile(
    work: Loop,
    ranks: Ranks,
    case: TrainCase,
    folder: Path,
    roots: Sequence[nn.Module],
    *,
    is_profiled: bool,
    launch: int,
    pauses: bool = False,
) -> tuple[TraceFile, ...]:
    """Write Kineto traces of a few samples, in whole cycles; return all ranks' files.

    Cycles come before, whose launches are not in the trace. roots: modules that a step calls.
    pauses: as many cycles follow in which GPUs idle before each pass and the optimizer, but not
    within a pipeline's passes.
    """
    pauses = pauses and ranks.device.type == "cuda"
    num_warmups = _num_warmups(work, ranks, case)
    num_plain = max(1, _PROFILED // case.cycle)
    count = num_warmups + num_plain * (2 if pauses else 1)
    num_done = 0

    def pause(phase: str) -> None:
        if pauses and num_done >= num_warmups + num_plain and phase in _PASSES:
            torch.cuda.synchronize(ranks.device)
            time.sleep(PAUSE_S)

    def count_cycle(number: int) -> None:
        nonlocal num_done
        num_done = number + 1

    if not is_profiled:
        work.untimed_cycles(count, on_phase=pause, on_end=count_cycle)
        return _gathered(ranks, ())
    name = f"train-{case.case_id[:16]}{'-paused' if pauses else ''}"
    name += f"-launch{launch}" if launch > 1 else ""
    recorder = Profile(folder, name, ranks.rank, num_warmups)
    with Annotations(roots) as marks:
        recorder.start()

        def end_cycle(number: int) -> None:
            marks.end_phase()
            count_cycle(number)
            if num_done == num_warmups and ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)  # else their kernels are in the trace
            if number < count - 1:  # else there would be an empty step
                recorder.next_step()

        def begin(phase: str) -> None:
            marks.end_phase()
            pause(phase)
            if not _is_mixed(case, phase):
                marks.begin_phase(phase)

        work.untimed_cycles(count, on_phase=begin, on_end=end_cycle)
        names = recorder.stop()
    files = ((name, hashlib.sha256((folder / name).read_bytes())) for name in names)
    return _gathered(ranks, tuple((name, digest.hexdigest()) for name, digest in files))


def _num_warmups(work: Loop, ranks: Ranks, case: TrainCase) -> int:
    """Return the cycles before those that are recorded; the same number on all ranks."""
    if ranks.device.type != "cuda":
        return 1

    def soak() -> int:
        seconds = sorted(work.samples.seconds)
        cycle_s = seconds[len(seconds) // 2] * case.cycle
        return max(1, min(_MOST_WARMUPS, round(_SOAK_S / max(cycle_s, 1e-6))))

    warmups: int = ranks.decide(soak)
    return warmups


def _gathered(ranks: Ranks, files: tuple[TraceFile, ...]) -> tuple[TraceFile, ...]:
    return tuple(file for names in ranks.gather(files) for file in names)


_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def attention_kernel(case: TrainCase, device: torch.device) -> str:
    """Return the kernels of attention: that of torch's scaled_dot_product_attention for these
    shapes, and that of layers with windows, chunks, sinks or capped scores.

    Under context parallelism it is that of queries at the end of a sequence. "" where a full
    device has no memory for the query.
    """
    if case.attention != "auto":
        return case.attention
    is_plain = {scores.is_plain for scores in all_scores(case.model)}
    kernels = [masked_kernel(device.type)] if False in is_plain else []
    if True in is_plain:
        kernels.insert(0, _plain_kernel(case, device))
    return " and ".join(dict.fromkeys(filter(None, kernels)))


def _plain_kernel(case: TrainCase, device: torch.device) -> str:
    model = case.model
    tp = case.parallel.tp
    cp = case.parallel.cp
    low = torch.float32 if case.precision == "fp32" else torch.bfloat16
    heads = model.num_heads // tp
    kv_heads = max(1, model.num_kv_heads // tp)
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
