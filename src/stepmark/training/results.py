"""The record of a training step, from the samples and counts of its ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters

from stepmark.cases.record import METHOD_VERSIONS, Check, Samples
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Training
from stepmark.measuring.environment import peak_resident_bytes, reset_peak_resident
from stepmark.training.loop import StepSamples

VERSION = METHOD_VERSIONS["train"][0]
# On text the mean loss must fall by this share from the first to the last fifth of samples.
_MUST_FALL = 0.01
_FEWEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one rank, between the first sample and the last."""

    build_s: float
    first_s: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    resting_bytes: int | None
    outside_bytes: int | None
    resident_bytes: int | None
    alloc_retries: int
    recompiles: int
    graph_breaks: int


class Counter:
    """Counts peaks, retries and new graphs from its creation on; graph breaks of the case."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs, self._retries = counters["stats"]["unique_graphs"], self._num_retries()
        self._resting_bytes = None
        if device.type == "cuda":
            self._resting_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            reset_peak_resident()

    def since(self, build_s: float, first_s: float) -> Counts:
        on_gpu = self._device.type == "cuda"
        device = self._device
        return Counts(
            build_s=build_s,
            first_s=first_s,
            allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
            reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
            resting_bytes=self._resting_bytes,
            outside_bytes=_outside_bytes(device) if on_gpu else None,
            resident_bytes=None if on_gpu else peak_resident_bytes(),
            alloc_retries=self._num_retries() - self._retries,
            recompiles=counters["stats"]["unique_graphs"] - self._graphs,
            graph_breaks=sum(counters["graph_break"].values()),
        )

    def _num_retries(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def _outside_bytes(device: torch.device) -> int:
    """Return the bytes in use on the device that torch has not reserved."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def steady_results(
    case: TrainCase,
    by_rank: Sequence[StepSamples],
    counts: Sequence[Counts],
    loss: tuple[float, ...],
) -> tuple[Samples, Training]:
    """Return steady samples and the training record; arguments are by rank."""
    start = by_rank[0].steady
    count = (min(len(rank.seconds) for rank in by_rank) - start) // case.cycle * case.cycle
    end = start + count

    def steady(name: str) -> tuple[tuple[float, ...], ...]:
        seconds = tuple(tuple(getattr(rank, name)[start:end]) for rank in by_rank)
        return seconds if any(any(values) for values in seconds) else ()

    clock = f"train-{case.schedule}-{'events' if case.device == 'cuda' else 'host'}"
    samples = Samples(
        seconds=steady("seconds"), method=f"{clock}/{VERSION}", soak_s=by_rank[0].soak_s
    )
    return samples, Training(
        tokens_per_sample=case.tokens_per_step * case.micro_steps,
        cycle=case.cycle,
        num_params=case.model.num_params,
        warmup_s=tuple(tuple(rank.seconds[:start]) for rank in by_rank),
        loss=loss,
        fwd_s=steady("fwd_s"),
        bwd_s=steady("bwd_s"),
        optim_s=steady("optim_s"),
        data_s=steady("data_s"),
        elapsed_s=tuple(rank.elapsed_s for rank in by_rank),
        uncounted_s=tuple(rank.uncounted_s for rank in by_rank),
        build_s=max(rank.build_s for rank in counts),
        first_s=max(rank.first_s for rank in counts),
        allocated_bytes=tuple(rank.allocated_bytes for rank in counts),
        reserved_bytes=tuple(rank.reserved_bytes for rank in counts),
        resting_bytes=tuple(rank.resting_bytes for rank in counts),
        outside_bytes=tuple(rank.outside_bytes for rank in counts),
        resident_bytes=tuple(rank.resident_bytes for rank in counts),
        alloc_retries=tuple(rank.alloc_retries for rank in counts),
        recompiles=max(rank.recompiles for rank in counts),
        graph_breaks=max(rank.graph_breaks for rank in counts),
    )


def check_losses(loss: Sequence[float], case: TrainCase) -> Check:
    """Check that every loss is finite and falls on text; num_wrong counts those that do not."""
    wrong = sum(not math.isfinite(value) for value in loss)
    falls = case.data != "random" and len(loss) >= _FEWEST
    ratio = 0.0
    if falls and not wrong:
        part = len(loss) // 5
        # A loss that diverged at once and then returned has not fallen.
        ratio = sum(loss[-part:]) / min(sum(loss[:part]), part * loss[0])
        wrong = part if ratio > 1 - _MUST_FALL else 0
    return Check(
        max_rel_err=ratio,
        tolerance=1 - _MUST_FALL if falls else 0.0,
        num_wrong=wrong,
        num_compared=len(loss),
        reference="finite; last fifth under the first, and under the start"
        if falls
        else "finite",
    )
