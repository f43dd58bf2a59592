"""Memory of a workload's ranks, stage by stage, by the framework whose rules it follows."""

import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Any

from stepmark.cases.training import Recompute
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import dashed
from stepmark.ground.units import GIB
from stepmark.step.workload import Workload
from stepmark.step_memory import memory
from stepmark.step_memory.memory import CLOSE, FITS, NO_FIT, Verdict
from stepmark.step_memory.rank_memory import RankMemory
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron.settings import Granularity

Memories = tuple[RankMemory, ...]
Changed = tuple[Job, Any]  # a job and the settings of its framework

# CUDA context, kernels and NCCL's buffers, which no allocator of torch counts: an assumption.
OUTSIDE_BYTES = 2 * GIB
# Above this share of the device the allocator's fragments decide.
_CLOSE = 0.92


def memory_of(workload: Workload) -> Memories:
    """Return the memory of a rank of each stage, the fullest first; none if not derived.

    That is a workload of no decoder, of another tool's file, or of a part of its ranks. Raises
    ConfigError for settings of another version.
    """
    known = known_job(workload)
    return () if known is None else of_job(*known)


def known_job(workload: Workload) -> tuple[str, Job, Any] | None:
    """Return rules, job and settings of a workload; None where its memory is not derived."""
    rule = RULES.get(workload.rules)
    module = rule.module.partition(".")[0] if rule else ""
    if rule is None or module not in _SETTINGS:
        return None
    known = rule.job_of(workload)
    return None if known is None or _is_unknown(module, known[1]) else (module, *known)


def _is_unknown(module: str, settings: Any) -> bool:
    """Return whether tensors of the job are not derived: of adapters, and on the host."""
    if module == "pytorch":
        return settings.lora_rank is not None
    return module == "deepspeed" and (settings.is_offloaded or settings.has_host_weights)


@lru_cache(maxsize=64)  # changes that fit are looked for among few
def of_job(module: str, job: Job, settings: Any) -> Memories:
    """Return the memory of a rank of each stage of a job. Raises ConfigError."""
    rules = importlib.import_module(f"stepmark.step_memory.{module}_memory")
    memories: Sequence[RankMemory] = rules.stage_memories(job, settings)
    return tuple(sorted(memories, key=lambda each: -each.allocated_bytes))


def verdict(workload: Workload, device_bytes: int) -> Verdict:
    """Return whether the fullest rank fits on a device; close: into its last 8 %."""
    known = known_job(workload)
    assert known is not None
    return verdict_of_job(*known, device_bytes)


def verdict_of_job(module: str, job: Job, settings: Any, device_bytes: int) -> Verdict:
    """Return whether the fullest rank of a job fits. Raises ConfigError."""
    fullest = of_job(module, job, settings)[0]
    if module == "pytorch":  # the replay's errors are measured
        from stepmark.step_memory import pytorch_memory  # noqa: PLC0415 - of this framework

        case = pytorch_memory.case_of(job, settings)
        sizes = fullest.allocated_bytes, fullest.reserved_bytes
        return memory.verdict(case, *sizes, device_bytes)
    needed = fullest.reserved_bytes + OUTSIDE_BYTES
    if needed > device_bytes:
        return NO_FIT
    return FITS if needed <= _CLOSE * device_bytes else CLOSE


def what_fits(workload: Workload, device_bytes: int) -> str:
    """Return the smallest change of options with which a job fits; "": none is known.

    In order of cost: settings that cost little time, recomputation, smaller micro-batches,
    more of the ranks for one model.
    """
    known = known_job(workload)
    assert known is not None
    steps = [*_changes(*known)]
    alone = [(each,) for each in steps]
    together = [tuple(steps[:count]) for count in range(2, len(steps) + 1)]
    for chosen in (*alone, *together):
        module, job, settings = known
        try:
            for change in chosen:
                job, settings = change.apply(job, settings)
            outcome = verdict_of_job(module, job, settings, device_bytes)
        except ConfigError:  # the framework refuses it
            continue
        if outcome == FITS:
            words = {change.name: change.words for change in chosen}  # the last of a name
            return " ".join(words.values())
    return ""


_SETTINGS: dict[str, tuple[tuple[str, Any], ...]] = {
    "megatron": (
        ("use_distributed_optimizer", True),
        ("sequence_parallel", True),
        ("recompute_granularity", Granularity.FULL),
    ),
    "deepspeed": (("stage", 1), ("stage", 2), ("stage", 3)),
    "pytorch": (
        ("reshard_after_forward", "yes"),
        ("recompute", Recompute.OPS),
        ("recompute", Recompute.FULL),
    ),
}


class _Change:
    """A change of a setting, of the micro-batch or of an axis."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._value = value

    @property
    def words(self) -> str:
        word = f"--{dashed(self.name)}"
        value = self._value.value if isinstance(self._value, Enum) else self._value
        return word if value is True else f"{word} {value}"

    def apply(self, job: Job, settings: Any) -> Changed:
        """Return job and settings with the change. Raises ConfigError."""
        if self.name == "mbs":
            return replace(job, mbs=self._value, gbs=job.global_batch), settings
        if self.name in ("tp", "pp"):
            axes = job.parallel
            factor = self._value // getattr(axes, self.name)
            if axes.dp_shard % factor:
                raise ConfigError(self.name, self._value, "a part of the data ranks")
            dp_shard = axes.dp_shard // factor
            parallel = replace(axes, **{self.name: self._value}, dp_shard=dp_shard)
            return replace(job, parallel=parallel, gbs=job.global_batch), settings
        return job, replace(settings, **{self.name: self._value})


def _changes(module: str, job: Job, settings: Any) -> Iterator[_Change]:
    for name, value in _SETTINGS[module]:
        if getattr(settings, name) != value:
            yield _Change(name, value)
    for halves in itertools.count(1):
        if job.mbs % 2**halves:
            break
        yield _Change("mbs", job.mbs // 2**halves)
    if module == "megatron":
        axes = job.parallel
        yield from (_Change("tp", tp) for tp in (2, 4, 8) if tp > axes.tp)
        yield from (_Change("pp", pp) for pp in (2, 4, 8, 16) if pp > axes.pp)
