"""Measure one training step: check support, build, compile, sample, check the losses."""

import importlib.util
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from stepmark.cases.case import SOAK_SHARE
from stepmark.cases.message import MessageKind, Tally
from stepmark.cases.plan import Entry, Profile, TrainHow
from stepmark.cases.record import Failed, Measured
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, Fp8, OptimizerKind, Precision, Schedule
from stepmark.measuring.context import MeasureContext, no_collection, release
from stepmark.measuring.environment import HAS_TRITON
from stepmark.measuring.ranks import CaseFailedError, Ranks, agreed, cause_of
from stepmark.measuring.run_cases import Bench
from stepmark.measuring.telemetry import Sampler
from stepmark.training import data, loop, profiling, trainer
from stepmark.training.model_parallel import (
    RankCoordinates,
    SequenceShard,
    coordinates_of,
)
from stepmark.training.results import Counter, check_losses, steady_results

_STEPS = 30
_CYCLES = 10

_POLL_S = 0.25
# A rank that is not blocked learns of the failure in `agreed` within this time.
_GRACE_S = 3.0
# Numbered identically on every rank, so a stale failure cannot trigger a later one.
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The failure of the first rank that failed."""

    rank: int
    position: int
    cause: str  # one of Failed's
    message: str
    trace: str


class FailureBroadcast:
    """Ends the wait of all ranks when one fails inside `with broadcast:`.

    on_blocked runs in a thread of rank 0, some seconds after another rank announced a failure,
    if this rank has not left the block by then.
    """

    def __init__(
        self, ranks: Ranks, position: int, on_blocked: Callable[[Problem], None]
    ) -> None:
        self._ranks = ranks
        self._position = position
        self._on_blocked = on_blocked
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._key = f"stepmark/failure/{next(_numbers)}"

    def __enter__(self) -> Self:
        if self._ranks.num_ranks > 1:
            self._store = dist.distributed_c10d._get_default_store()
            if self._ranks.rank == 0:
                self._thread = threading.Thread(
                    target=self._watch, name="failures", daemon=True
                )
                self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join(_GRACE_S)

    def announcing(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the step so that its failure is announced before this rank waits for others."""

        def call() -> Any:
            try:
                return step()
            except Exception as error:
                if self._store is not None:
                    cause, message, trace = cause_of(error)
                    problem = Problem(
                        rank=self._ranks.rank,
                        position=self._position,
                        cause=cause,
                        message=message,
                        trace=trace,
                    )
                    self._store.set(self._key, msgspec.json.encode(problem))
                raise

        return call

    def _watch(self) -> None:
        while not self._left.wait(_POLL_S):
            if not self._store.check([self._key]):
                continue
            if self._left.wait(_GRACE_S):
                return
            self._on_blocked(msgspec.json.decode(self._store.get(self._key), type=Problem))
            return


@dataclass(slots=True)
class TrainingBench(Bench):
    """Measures training steps, on all ranks.

    After a failure devices and communicators are in no known state, so new processes continue;
    but a search for the largest micro-batch ends with the first that runs out of memory.
    Process groups of a mesh cannot be aborted from outside: the parent kills hanging ranks.
    """

    context: MeasureContext
    how: TrainHow
    budget_s: float | None = None
    _too_large_mbs: dict[int, int] = field(default_factory=dict)  # by launch

    def __post_init__(self) -> None:
        for failure in self.context.failures:
            if failure.cause == "oom" and isinstance(failure.case, TrainCase):
                self._too_large_mbs.setdefault(failure.launch, failure.case.mbs)

    def why_not(self, entry: Entry) -> tuple[str, int | None] | None:
        case = cast("TrainCase", entry.case)
        too_large = self._too_large_mbs.get(entry.launch)
        if self.how.find_batch and too_large is not None:
            return f"mbs {too_large} ran out of memory already", None
        started = self.context.ranks.num_ranks
        if case.num_ranks != started:
            return f"needs {case.num_ranks} ranks, {started} were started", None
        reason = refusal(case, self.context)
        return None if reason is None else (reason, None)

    def measure(self, entry: Entry, share_s: float | None) -> Measured:
        end_s = None if share_s is None else time.monotonic() + share_s
        case = cast("TrainCase", entry.case)
        try:
            return self._with_broadcast(case, entry, end_s)
        except CaseFailedError as error:
            has_fallback = self.how.compile_fallback and case.compile is not CompileScope.NONE
            if not has_fallback or error.cause != "error":
                raise
            reason = error.message
        # Not in the handler: the error holds the model that failed.
        release(self.context)
        eager = replace(case, compile=CompileScope.NONE, compile_mode="default")
        record = self._with_broadcast(eager, entry, end_s)
        assert record.training is not None
        training = replace(record.training, compile_failed=reason)
        return replace(record, case=case, training=training)

    def failed(self, entry: Entry, record: Failed) -> Failed:
        case = cast("TrainCase", entry.case)
        if record.cause == "oom":
            self._too_large_mbs.setdefault(entry.launch, case.mbs)
        return _with_estimate(record, case, self.context)

    def restarts(self, entry: Entry) -> bool:
        return not self.how.find_batch or entry.launch not in self._too_large_mbs

    def limit_s(self, share_s: float | None) -> float:
        return self.how.timeout_s + (share_s or 0.0)

    def _with_broadcast(self, case: TrainCase, entry: Entry, end_s: float | None) -> Measured:
        context = self.context
        how = self.how
        try:
            with FailureBroadcast(
                context.ranks, entry.position, lambda problem: self._blocked(problem, entry)
            ) as broadcast:
                return _measure(case, context, how, end_s, broadcast, entry)
        finally:
            # The next case must not run out of variants: torch compiles eight of a function.
            torch.compiler.reset()
            counters.clear()

    def _blocked(self, problem: Problem, entry: Entry) -> None:
        """Record the failure when rank 0 is blocked in a collective that a failed rank
        abandoned."""
        case = cast("TrainCase", entry.case)
        error = CaseFailedError(problem.cause, problem.message, (problem.rank,), problem.trace)
        record = error.record(self.context.run_id, case, entry.launch)
        self.context.on_blocked(_with_estimate(record, case, self.context), problem.position)


def _with_estimate(record: Failed, case: TrainCase, context: MeasureContext) -> Failed:
    """Add to an out-of-memory failure the options with which the step fits, by estimate."""
    if record.cause != "oom" or context.ranks.device.type != "cuda":
        return record
    from stepmark.training.remedies import what_fits  # noqa: PLC0415 - only after a failure

    total = torch.cuda.get_device_properties(context.ranks.device).total_memory
    fitting = what_fits(case, total)
    hint = f"It should fit with {fitting} (estimate)"
    hint = hint if fitting else "By estimate no other options make it fit"
    return replace(record, message=f"{record.message.rstrip('.')}. {hint}")


def _measure(
    case: TrainCase,
    context: MeasureContext,
    how: TrainHow,
    end_s: float | None,
    broadcast: FailureBroadcast,
    entry: Entry,
) -> Measured:
    ranks = context.ranks
    started_at = time.time()
    begin = time.monotonic()

    def all_ranks(step: Callable[[], Any]) -> Any:
        return agreed(ranks, broadcast.announcing(step))

    rank_trainer: trainer.Trainer = all_ranks(lambda: trainer.make(case, ranks.device))
    place = coordinates_of(ranks.rank, case.parallel)
    share = SequenceShard(rank=place.cp, num_ranks=case.parallel.cp)
    batches = data.loader(case, place.data_rank, case.parallel.data_ranks, ranks.device, share)
    build_s = time.monotonic() - begin
    work = loop.Loop(case, rank_trainer, batches, ranks)
    all_ranks(work.first)
    counter = Counter(ranks.device)
    sampler = Sampler(context.device_index, more_threads=case.workers)

    def steady() -> None:
        with no_collection():
            work.soak(*_soak_s(case, how, end_s), sampler.temperature_c)
            with sampler:
                work.run(_num_steady(case, how), end_s, how.steady_s)

    all_ranks(steady)
    counts = counter.since(build_s, work.samples.first_s)
    messages, traces = all_ranks(
        lambda: _untimed(work, context, case, how, entry, rank_trainer.roots)
    )
    by_rank = ranks.gather((work.samples.without_losses(), sampler.telemetry(), counts))
    samples_by_rank, telemetry, states = zip(*by_rank, strict=True)
    loss = _mean_losses(work.samples, ranks, place)
    kernel = profiling.attention_kernel(case, ranks.device)
    samples, training = steady_results(case, samples_by_rank, states, loss)
    return Measured(
        run_id=context.run_id,
        case=case,
        samples=replace(samples, wall_s=time.monotonic() - begin),
        checks=(check_losses(loss, case),),
        telemetry=telemetry,
        backend_run=kernel,
        peak_memory_bytes=max(filter(None, training.allocated_bytes), default=None),
        started_at=started_at,
        training=replace(
            training,
            attention_run=kernel,
            interrupted=work.samples.interrupted,
            data=data.describe(case),
            messages=messages,
            traces=tuple(name for name, _ in traces),
            trace_sha256=tuple(digest for _, digest in traces),
        ),
    )


def _untimed(
    work: loop.Loop,
    context: MeasureContext,
    case: TrainCase,
    how: TrainHow,
    entry: Entry,
    roots: Sequence[nn.Module],
) -> tuple[tuple[tuple[MessageKind, Tally], ...], tuple[profiling.TraceFile, ...]]:
    """Return messages and files of traces, where requested and not interrupted."""
    messages: tuple[tuple[MessageKind, Tally], ...] = ()
    traces: tuple[profiling.TraceFile, ...] = ()
    ranks = context.ranks
    folder = context.folder
    if how.messages and not work.samples.interrupted:
        messages = profiling.record_messages(work, ranks, case)
    if (how.profile or entry.profile) and folder and not work.samples.interrupted:
        folder.mkdir(parents=True, exist_ok=True)
        traces = profiling.record_profile(
            work,
            ranks,
            case,
            folder,
            roots,
            is_profiled=ranks.rank in how.profile_ranks,
            launch=entry.launch,
            pauses=entry.profile is Profile.PAUSED,
        )
    return messages, traces


def _mean_losses(
    samples: loop.StepSamples, ranks: Ranks, place: RankCoordinates
) -> tuple[float, ...]:
    """Return mean losses by sample, over data ranks and parts of a sequence."""
    by_rank = ranks.gather([float(loss) for loss in samples.losses] if place.tp == 0 else [])
    columns = zip(*filter(None, by_rank), strict=False)
    return tuple(sum(column) / len(column) for column in columns)


def _num_steady(case: TrainCase, how: TrainHow) -> int:
    """Return the number of steady samples, in whole cycles."""
    usual = _STEPS if case.schedule is Schedule.STEP else _CYCLES * case.cycle
    num_steps = how.steps or usual
    return -(-num_steps // case.cycle) * case.cycle


def _soak_s(case: TrainCase, how: TrainHow, end_s: float | None) -> tuple[float, float]:
    """Return the least and the most seconds of load before steady samples.

    They are at most 30 % of the time left.
    """
    if case.device == "cpu":
        return 0.0, 0.0
    left_s = math.inf if end_s is None else max(0.0, end_s - time.monotonic())
    least, most = (min(own, SOAK_SHARE * left_s) for own in (how.soak_s, how.most_soak_s))
    return least, most


_CPU_LACKS = {
    "cudnn": "cuDNN attention needs a CUDA device",
    "efficient": "the memory-efficient attention needs a CUDA device",
}


def refusal(case: TrainCase, context: MeasureContext) -> str | None:
    """Return why this machine cannot run the case; None where it can be tried."""
    refusals = (_format_refusal, _optimizer_refusal, _compiler_refusal, _device_refusal)
    return next(filter(None, (refuse(case, context) for refuse in refusals)), None)


def _format_refusal(case: TrainCase, context: MeasureContext) -> str | None:
    if case.fp8 is Fp8.NONE:
        return None
    on_gpu = case.device == "cuda"
    if on_gpu and case.dtype.is_block_format and context.capabilities.capability < (10, 0):
        return f"{case.dtype} products need a Blackwell GPU: --precision fp8"
    if case.fp8 in (Fp8.TE, Fp8.NVFP4):
        return _te_refusal(case)
    return _torchao_refusal(case, context)


def _optimizer_refusal(case: TrainCase, context: MeasureContext) -> str | None:
    is_narrow = case.optimizer is OptimizerKind.ADAMW8BIT
    if is_narrow and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed: pip install torchao (extra fp8)"
    return None


def _torchao_refusal(case: TrainCase, context: MeasureContext) -> str | None:
    on_gpu = case.device == "cuda"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed: pip install torchao (extra fp8)"
    if case.fp8 is Fp8.MXFP8 and importlib.util.find_spec(_MXFP8) is None:
        return "this torchao has no MXFP8 linear layers: install 0.18 or later"
    is_compiled = case.compile is not CompileScope.NONE
    if on_gpu and case.fp8 is Fp8.ROWWISE and case.parallel.cp > 1 and is_compiled:
        # torch 2.11 on H200, recipes/technique_table.py; the cause is unknown, perhaps a race.
        return (
            "wrong gradients with cp, --fp8-recipe rowwise and --compile: without one of them"
        )
    if on_gpu and not context.capabilities.is_rocm and context.capabilities.capability < (8, 9):
        capability = ".".join(map(str, context.capabilities.capability))
        return f"FP8 products need compute capability 8.9, this device has {capability}"
    return None


_MXFP8 = "torchao.prototype.moe_training.mxfp8_linear"


def _te_refusal(case: TrainCase) -> str | None:
    other = "--fp8-recipe tensorwise" if case.fp8 is Fp8.TE else "--precision fp8"
    if importlib.util.find_spec("transformer_engine") is None:
        return f"transformer_engine is not installed: {other} uses torchao"
    if case.compile is not CompileScope.NONE:
        return f"TransformerEngine's narrow layers do not compile: {other}"
    return None if case.device == "cuda" else "TransformerEngine needs a CUDA device"


def _compiler_refusal(case: TrainCase, context: MeasureContext) -> str | None:
    if case.compile is CompileScope.NONE:
        return None
    if case.device == "cpu" and not context.capabilities.has_compiler:
        return "torch.compile needs a C++ compiler: none of $CXX, c++, g++, clang++ is here"
    if case.device == "cuda" and not HAS_TRITON:
        return "torch.compile needs triton, which is not installed"
    return None


def _device_refusal(case: TrainCase, context: MeasureContext) -> str | None:
    if case.device == "cpu":
        if case.cuda_graph:
            return "CUDA graphs need a CUDA device"
        if case.async_tp:
            return "asynchronous tensor parallelism needs CUDA devices (symmetric memory)"
        return _CPU_LACKS.get(case.attention)
    odd = case.model.d_qk % 8 or case.model.d_v % 8 or context.capabilities.is_rocm
    if case.parallel.cp > 1 and case.attention == "flash" and odd:
        return "flash attention takes no mask, which cp needs here: --attention auto"
    if case.precision is not Precision.FP32 and not torch.cuda.is_bf16_supported():
        return "this device has no bf16"
    return None
