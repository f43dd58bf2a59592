"""Measure a replay: make the groups, run iterations, then passes that time every operation."""

import itertools
import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import torch

from stepmark.cases.plan import Entry, ReplayHow
from stepmark.cases.record import METHOD_VERSIONS, Check, Measured, Samples
from stepmark.cases.replay_case import Pace, ReplayCase, Replayed
from stepmark.ground.units import format_bytes
from stepmark.measuring.context import MeasureContext, no_collection
from stepmark.measuring.ranks import agreed
from stepmark.measuring.run_cases import Bench
from stepmark.measuring.telemetry import Sampler
from stepmark.replays.bench.computation import Computation, needed_bytes
from stepmark.replays.bench.device_engine import DeviceEngine
from stepmark.replays.bench.engine import UNKNOWN, Engine, HostEngine, Program, Span
from stepmark.replays.bench.messages import Messenger, SharedBuffers, sizes
from stepmark.replays.bench.verification import verify
from stepmark.step.rank_program import Step, communicators, program
from stepmark.step.workload import Workload

(_VERSION,) = METHOD_VERSIONS["replay"]


@dataclass(slots=True)
class ReplayBench(Bench):
    """Replays the workload of the plan."""

    context: MeasureContext
    how: ReplayHow
    budget_s: float | None = None
    _messenger: Messenger | None = field(default=None, init=False)

    def why_not(self, entry: Entry) -> tuple[str, int | None] | None:
        case = cast("ReplayCase", entry.case)
        started = self.context.ranks.num_ranks
        if case.num_ranks != started:
            return f"needs {case.num_ranks} ranks, {started} were started", None
        steps = [*itertools.chain(*self._programs())]
        free = self.context.free_bytes()
        messages = sum(sizes(steps).values())
        operands = needed_bytes(steps, case.compute, self.context.capabilities)
        if messages + operands > 0.9 * free:
            parts = (
                f"messages {format_bytes(messages)}",
                f"operators {format_bytes(operands)}",
            )
            text = f"it needs more than is free, {format_bytes(free)}: {', '.join(parts)}"
            return text, messages + operands
        return None

    def measure(self, entry: Entry, share_s: float | None) -> Measured:
        case = cast("ReplayCase", entry.case)
        context = self.context
        ranks = self.context.ranks
        started_at = time.time()
        begin = time.monotonic()
        step = agreed(ranks, lambda: self._prepare(case))
        checks: tuple[Check, ...] = ()
        if self.how.check:
            check = partial(verify, step, ranks.rank, self._backend, ranks.device)
            checks = tuple(ranks.gather(agreed(ranks, check)))
        engine = self._engine(step)
        sampler = Sampler(context.device_index)
        with no_collection():
            warm_s, _ = agreed(ranks, lambda: self._iterations(engine, self.how.warmups))
            left_s = math.inf if share_s is None else begin + share_s - time.monotonic()
            # Half of what is left is for iterations, half for passes.
            num_fitting = min(ranks.gather(left_s / 2 / max(warm_s, default=1.0)))
            num_iterations = max(1, int(min(self.how.iterations, num_fitting)))
            num_passes = max(1, int(min(self.how.passes, num_fitting)))
            with sampler:
                seconds, blocked_s = agreed(
                    ranks, lambda: self._iterations(engine, num_iterations)
                )
            passes = agreed(ranks, lambda: self._passes(engine, len(step.steps), num_passes))
        by_rank = ranks.gather((seconds, blocked_s, passes, sampler.telemetry()))
        all_seconds, all_blocked, all_passes, telemetry = zip(*by_rank, strict=True)
        on_gpu = ranks.device.type == "cuda"
        return Measured(
            run_id=context.run_id,
            case=case,
            samples=Samples(
                seconds=tuple(map(tuple, all_seconds)),
                method=f"replay-{'blocking-' if case.blocking else ''}host/{_VERSION}",
                wall_s=time.monotonic() - begin,
            ),
            checks=checks,
            telemetry=telemetry,
            backend_run=self._backend,
            peak_memory_bytes=torch.cuda.max_memory_allocated(ranks.device) if on_gpu else None,
            started_at=started_at,
            replay=Replayed(
                spans=self._store(case, entry.launch, all_passes),
                num_passes=num_passes,
                blocked_s=() if on_gpu else tuple(map(tuple, all_blocked)),
                event_s=step.computation.event_s,
            ),
        )

    def restarts(self, entry: Entry) -> bool:
        return True  # its groups may be broken

    def limit_s(self, share_s: float | None) -> float:
        return self.how.timeout_s

    def abort(self) -> None:
        if self._messenger is not None:
            self._messenger.abort()

    def close(self) -> None:
        self.context.ranks.barrier()
        if self._messenger is not None:
            self._messenger.close()
            self._messenger = None
        self.context.ranks.barrier()

    @property
    def _backend(self) -> str:
        return "nccl" if self.context.ranks.device.type == "cuda" else "gloo"

    @property
    def _workload(self) -> Workload:
        assert self.context.workload is not None, "the plan of a replay has its workload"
        return self.context.workload

    def _prepare(self, case: ReplayCase) -> Program:
        """Return the program of a step, after that of the setup has run."""
        ranks = self.context.ranks
        workload = self._workload
        messenger = Messenger(communicators(workload), ranks.rank, self._backend)
        self._messenger = messenger
        setup, step = self._programs()
        everything = [*setup, *step]
        capabilities = self.context.capabilities
        first = Program(
            steps=setup,
            messenger=messenger,
            buffers=SharedBuffers(everything, ranks.device),
            computation=Computation(everything, case.compute, ranks.device, capabilities),
            blocking=case.blocking,
            is_paced=case.pace is Pace.ORIGINAL,
        )
        self._engine(first).run()
        return replace(first, steps=step)

    def _engine(self, program: Program) -> Engine:
        device = self.context.ranks.device
        is_gpu = device.type == "cuda"
        return DeviceEngine(program, device) if is_gpu else HostEngine(program)

    def _programs(self) -> tuple[list[Step], list[Step]]:
        """Return what this rank does in the setup, and in a step."""
        rank = self.context.ranks.rank
        workload = self._workload
        return program(workload, rank, setup=True), program(workload, rank)

    def _iterations(self, engine: Engine, count: int) -> tuple[list[float], list[float]]:
        seconds = []
        blocked_s = []
        for _ in range(count):
            begin = time.perf_counter()
            engine.run()
            seconds.append(time.perf_counter() - begin)
            blocked_s.append(engine.blocked_s)
        return seconds, blocked_s

    def _passes(self, engine: Engine, count: int, num_passes: int) -> list[list[Span]]:
        passes = [[UNKNOWN] * count for _ in range(num_passes)]
        for spans in passes:
            engine.run(spans)
        return passes

    def _store(
        self, case: ReplayCase, launch: int, passes: tuple[list[list[Span]], ...]
    ) -> str:
        """Write the spans of operations beside the traces; return the file's name."""
        name = f"replay-{case.case_id[:16]}-launch{launch}.npy"
        folder = self.context.folder
        if self.context.ranks.rank == 0 and folder is not None:
            most = max(len(spans) for by_pass in passes for spans in by_pass)
            table = np.full((len(passes), len(passes[0]), most, len(UNKNOWN)), math.nan)
            for rank, by_pass in enumerate(passes):
                for number, spans in enumerate(by_pass):
                    if spans:
                        table[rank, number, : len(spans)] = spans
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / name, table, allow_pickle=False)
        return name
