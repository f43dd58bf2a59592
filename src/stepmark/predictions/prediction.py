"""A predicted step, and all that is derived from it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from stepmark.cases.train_words import techniques
from stepmark.ground.units import TFLOP
from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.predictions.factors import Anchored
from stepmark.predictions.inputs import Inputs
from stepmark.predictions.interval import Interval
from stepmark.predictions.measured_step import MeasuredStep
from stepmark.predictions.note import Note, Topic
from stepmark.predictions.simulation import SteadyStep
from stepmark.predictions.step import Clock
from stepmark.predictions.training_run import RUN_FIGURES, TrainingRun
from stepmark.step.workload_stages import missing_pipeline
from stepmark.step_memory import memory, workload_memory
from stepmark.tables.columns import Row
from stepmark.timeline.ledger import (
    CONTENTION,
    CRITICAL,
    TRANSFER,
    WAITING,
    Group,
    Idle,
    Ledger,
)
from stepmark.timeline.step_cost import Source

HOST = "the host"
DEVICE = "the device"
_CLOSE_MEMORY = Note.of(  # docs/prediction.md
    Topic.MEMORY,
    "memory may run out, and torch's allocator then frees its cache in every step: "
    "one such step took 2.4 times its predicted time",
)
_ORDER = {group: index for index, group in enumerate(Group)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Predicted memory of the fullest rank.

    verdict: fits, close, does not fit, or unknown for a device of unknown size. fitting:
    options with which a step fits that may not, "" where none is known. stages: bytes by
    purpose of a rank of each pipeline stage, the fullest first.
    """

    allocated_bytes: int
    reserved_bytes: int | None  # None: not estimated
    device_bytes: int | None
    verdict: str = "unknown"
    fitting: str = ""
    stages: tuple[Mapping[str, int], ...] = ()

    @property
    def fits(self) -> bool | None:
        """Return whether the step fits; None where it is close or unknown."""
        if self.verdict == memory.FITS:
            return True
        return False if self.verdict == memory.NO_FIT else None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted step of every pipeline stage.

    clock: and power; None where none was measured. sources, comm_sources: seconds of compute by
    origin, and that of messages by collective. unknown: as of Total.
    offload_share: of copies to the host in forward passes. spans_hosts: ranks of several hosts
    communicate by the costs of one. interval: None where no errors of
    predictions like it are known. anchored: of anchors. notes: how far it is to be trusted.
    run, measured: what --tokens and --measured ask for.
    """

    inputs: Inputs
    step: SteadyStep
    clock: Clock | None = None
    sources: Mapping[Source, float] = field(default_factory=dict)
    comm_sources: Mapping[str, Source] = field(default_factory=dict)
    unknown: Mapping[str, bool] = field(default_factory=dict)
    offload_share: float = 0.0
    spans_hosts: bool = False
    interval: Interval | None = None
    anchored: Anchored | None = None
    notes: tuple[str, ...] = ()
    run: TrainingRun | None = None
    measured: MeasuredStep | None = None

    @property
    def step_s(self) -> float:
        """Return the seconds of an optimizer step."""
        return self.step.step_s

    @property
    def is_lower_bound(self) -> bool:
        """Return whether some operations or links have no known cost."""
        file = self.inputs.file
        if file and file.has_excess:
            return False
        return bool(self.unknown or self.spans_hosts or (file and file.gaps))

    @property
    def device_bytes(self) -> int | None:
        """Return the memory of the device; None where it is unknown."""
        of_sheet = self.inputs.device.hbm_bytes if self.inputs.device else None
        return self.inputs.memory_bytes or of_sheet

    @cached_property
    def memory(self) -> StepMemory | None:
        """The memory of a rank, with what fits; None where it is not derived, as on a CPU."""
        estimated = self.estimated_memory
        if estimated is None or not self.device_bytes:
            return estimated
        if estimated.verdict not in (memory.NO_FIT, memory.CLOSE):
            return estimated
        if self.inputs.case is None:
            fitting = workload_memory.what_fits(self.inputs.workload, self.device_bytes)
        else:
            from stepmark.training import remedies  # noqa: PLC0415 - 20 ms

            fitting = remedies.what_fits(
                self.inputs.case, self.device_bytes, self.inputs.memory
            )
        return replace(estimated, fitting=fitting)

    @cached_property
    def estimated_memory(self) -> StepMemory | None:
        """The memory without what fits, which takes longer to find."""
        case = self.inputs.case
        if case is None:
            stages = workload_memory.memory_of(self.inputs.workload)
        else:
            stages = memory.stage_estimates(case) if case.device == "cuda" else ()
        if not stages:
            return None
        allocated, reserved = stages[0].allocated_bytes, stages[0].reserved_bytes
        if case is not None:
            allocated, reserved = memory.calibrated(case, self.inputs.memory)
        fullest_first = sorted(stages, key=lambda each: -each.allocated_bytes)
        return StepMemory(
            allocated_bytes=allocated,
            reserved_bytes=reserved or None,
            device_bytes=self.device_bytes,
            verdict=self._verdict(allocated, reserved),
            stages=tuple({"stage": each.stage, **each.kinds} for each in fullest_first),
        )

    def _verdict(self, allocated: int, reserved: int) -> str:
        """Return whether the step fits into the device."""
        if self.device_bytes is None:
            return "unknown"
        if self.inputs.case is not None:
            return memory.verdict(self.inputs.case, allocated, reserved, self.device_bytes)
        verdict = workload_memory.verdict(self.inputs.workload, self.device_bytes)
        # More is needed than is estimated where copies to the host take longer than passes.
        is_more = verdict == memory.FITS and self.offload_share > 1
        return memory.CLOSE if is_more else verdict

    @cached_property
    def ledgers(self) -> tuple[Ledger, ...]:
        """The ledger of each pipeline stage, with waiting as a line of its own."""
        return tuple(map(with_waiting, self.step.ledgers))

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return the notes, with one on memory that is close."""
        is_close = self.estimated_memory and self.estimated_memory.verdict == memory.CLOSE
        return (*self.notes, _CLOSE_MEMORY) if is_close else self.notes

    def _bounds(self) -> dict[str, Any]:
        """Return how far the step may be from its prediction, as plain data."""
        return {
            "is_lower_bound": self.is_lower_bound,
            "interval": self.interval and asdict(self.interval),
            "anchors": self.anchored and self.anchored.document(),
        }

    def document(self) -> dict[str, Any]:
        """Return everything as plain data. Times are of one optimizer step."""
        own = self.inputs
        step = own.token_flops, own.tokens, own.num_ranks, own.peak_flops_per_s
        return {
            **self.figures(),
            "memory": self.memory and asdict(self.memory),
            "measured": self.measured and self.measured.document(*step),
            "sources_s": {str(source): time_s for source, time_s in self.sources.items()},
            "ledger": ledger_rows(self.ledgers),
            "ledger_parts": part_rows(self.ledgers),
            "notes": [*self.all_notes],
        }

    def figures(self) -> dict[str, Any]:
        """Return the document without ledgers, notes, and what takes long to find."""
        inputs = self.inputs
        step = self.step
        step_s = self.step_s
        case = inputs.case
        peak = inputs.peak_flops_per_s
        workload = inputs.workload
        num_ranks = inputs.num_ranks
        tokens = inputs.tokens
        flops = inputs.token_flops
        tokens_per_s = tokens / step_s if tokens else None
        power_w = self.clock and self.clock.power_w
        energy_j = power_w and power_w * step_s

        def rate(flops_per_token: float, unit: float, scale: float = 1.0) -> float | None:
            """Return the FLOP/s of each rank in this unit."""
            return tokens_per_s and scale * tokens_per_s * flops_per_token / num_ranks / unit

        pipeline_is_known = case is not None or not missing_pipeline(inputs.workload)
        return {
            "name": inputs.name,
            "device": " with ".join(filter(None, (inputs.device_name, inputs.what_if))),
            "network": inputs.network.about if inputs.network and self.comm_sources else "",
            "num_ranks": num_ranks,
            "tokens": tokens,
            "num_params": workload.model and workload.model.num_params,
            "num_active_params": workload.model and workload.model.num_active_params,
            "flops_per_token": flops and flops.causal,
            "executed_per_token": flops and flops.hfu,
            "peak_flops_per_s": peak,
            "mbs": case.mbs if case else workload.micro_batch,
            "seq_len": workload.model and workload.model.seq_len,
            "techniques": techniques(case) if case else "",
            "host_is_known": inputs.host_is_known,
            "pipeline_is_known": pipeline_is_known,
            "calibration": inputs.calibration if case else "",
            "memory": self.estimated_memory and asdict(self.estimated_memory),
            "step_s": step_s,
            **self._bounds(),
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_gpu": tokens_per_s and tokens_per_s / num_ranks,
            "mfu_pct": flops and peak and rate(flops.causal, peak, 100),
            "hfu_pct": flops and peak and rate(flops.hfu, peak, 100),
            "tflops": flops and rate(flops.causal, TFLOP),
            "bound": "host" if step.is_host_bound else "device",
            "shares_pct": shares_pct(step.ledger),
            "bubble_s": step.part_s(WAITING) if pipeline_is_known else None,
            "comm_s": step.comm_s,
            "exposed_comm_s": step.part_s(TRANSFER),
            "contention_s": step.part_s(CONTENTION),
            "num_kernels": round(step.num_kernels),
            "clock_hz": self.clock and self.clock.clock_hz,
            "power_w": power_w,
            "energy_j": energy_j,
            "energy_per_token_j": energy_j and tokens and energy_j * num_ranks / tokens,
            "run_tokens": self.run and self.run.tokens,
            "gpu_hour_price": self.run and self.run.gpu_hour_price,
            **self._run_figures(tokens_per_s),
        }

    def _run_figures(self, tokens_per_s: float | None) -> Mapping[str, float | None]:
        if self.run is None or not tokens_per_s:
            return dict.fromkeys(RUN_FIGURES)
        return self.run.figures(tokens_per_s, self.inputs.num_ranks)


def shares_pct(ledger: Ledger) -> dict[str, float]:
    """Return what the step waits for with its share, the largest first; they add up to 100.

    Compute under communication counts for what is on the critical path of the step.
    """
    waiting_ns = ledger.within.get(WAITING, 0)
    hidden_ns = ledger.within.get(CRITICAL, 0)
    causes = {
        "computation": ledger.total(Group.COMPUTE) + ledger.total(Group.OVERLAPPED) - hidden_ns,
        COMMUNICATION: ledger.total(Group.COMM) - waiting_ns + hidden_ns,
        "the pipeline bubble": waiting_ns + ledger.lines.get((Group.IDLE, Idle.RANK), 0),
        HOST: ledger.lines.get((Group.IDLE, Idle.HOST), 0),
        "launch gaps": ledger.lines.get((Group.IDLE, Idle.LAUNCH_GAP), 0),
        "copies": ledger.total(Group.COPIES),
    }
    ordered = sorted(causes.items(), key=lambda cause: -cause[1])
    return {name: 100 * time_ns / ledger.window_ns for name, time_ns in ordered if time_ns}


def ledger_rows(ledgers: Iterable[Ledger]) -> list[Row]:
    """Return the lines, which add up to the step of each stage, by group, the largest first."""
    return [
        {
            "stage": stage,
            "group": str(group),
            "line": str(name),
            "time_ns": time_ns,
            "share_pct": 100 * time_ns / ledger.window_ns if ledger.window_ns else None,
        }
        for stage, ledger in enumerate(ledgers)
        for (group, name), time_ns in sorted(
            ledger.lines.items(), key=lambda line: (_ORDER[line[0][0]], -line[1])
        )
    ]


def part_rows(ledgers: Iterable[Ledger]) -> list[Row]:
    """Return parts of lines by stage, such as the contention in compute."""
    return [
        {"stage": stage, "part": name, "time_ns": time_ns}
        for stage, ledger in enumerate(ledgers)
        for name, time_ns in ledger.within.items()
        if time_ns
    ]


def with_waiting(own: Ledger) -> Ledger:
    """Return a ledger with waiting as a line of its own, as the answer has the bubble.

    Messages of a pipeline contain it, and would look slow.
    """
    waiting_ns = own.within.get(WAITING, 0)
    if not waiting_ns:
        return own
    lines = {line: time_ns for line, time_ns in own.lines.items() if line[0] is not Group.COMM}
    lines[Group.COMM, COMMUNICATION] = own.total(Group.COMM) - waiting_ns
    lines[Group.IDLE, WAITING] = waiting_ns
    within = {name: time_ns for name, time_ns in own.within.items() if name != WAITING}
    return Ledger(window_ns=own.window_ns, lines=lines, within=within)


def ledgers_of(document: Mapping[str, Any]) -> tuple[Ledger, ...]:
    """Return the ledgers of a prediction's document, by pipeline stage."""
    lines: dict[int, dict[tuple[Group, str], int]] = {}
    for row in document["ledger"]:
        key = Group(row["group"]), str(row["line"])
        lines.setdefault(row["stage"], {})[key] = row["time_ns"]
    parts = {stage: dict[str, int]() for stage in lines}
    for row in document.get("ledger_parts", ()):
        parts[row["stage"]][str(row["part"])] = row["time_ns"]
    return tuple(
        Ledger(window_ns=sum(own.values()), lines=own, within=parts[stage])
        for stage, own in lines.items()
    )
