"""The context of a measurement: ranks, device capabilities, cache size and free memory."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from stepmark.cases.record import Failed, Levels
from stepmark.ground import garbage
from stepmark.ground.units import format_time
from stepmark.measuring import host
from stepmark.measuring.environment import capabilities
from stepmark.measuring.ranks import CaseFailedError, Ranks, join
from stepmark.model.ops.backends import Capabilities
from stepmark.step.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureContext:
    """This rank's context in a run.

    folder: run directory for traces, the same on every rank; None where none is written.
    failures: failed records of the run from before these processes started.
    on_blocked(record, position): called on rank 0, in a thread, when another rank failed and
    this one is blocked in a collective that the failed rank abandoned; it must not return
    where it can record the failure.
    workload: that is replayed.
    levels: of what is measured now.
    end_s: of --budget, on rank 0's monotonic clock.
    """

    ranks: Ranks
    capabilities: Capabilities
    cache_bytes: int
    free_bytes: Callable[[], int]
    device_index: int | None  # for telemetry; None on CPU
    run_id: str = ""
    folder: Path | None = None
    failures: tuple[Failed, ...] = ()
    on_blocked: Callable[[Failed, int], None] = lambda _record, _position: None
    workload: Workload | None = None
    levels: Levels | None = None
    end_s: float = math.inf

    def left_s(self) -> float:
        """Return the seconds that --budget leaves, the same on every rank."""
        return float(self.ranks.decide(lambda: self.end_s - time.monotonic()))

    def check_budget(self, needed_s: float) -> None:
        """Raise CaseFailedError where a case needs more seconds than --budget leaves.

        Every rank calls it, with the same seconds; 0 where they are not known.
        """
        left_s = self.left_s()
        if left_s <= max(needed_s, 0.0):
            times = f"{format_time(left_s)}, and it takes at least {format_time(needed_s)}"
            reason = f"--budget leaves {times if left_s > 0 else 'nothing'}"
            raise CaseFailedError("budget", reason, (), "")


def make_context(device_type: str, *, for_meshes: bool = False) -> MeasureContext:
    """Join the other ranks and describe this rank's device; arguments as of `ranks.join`."""
    ranks = join(device_type, for_meshes=for_meshes)
    device = ranks.device

    def free_bytes() -> int:
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0]
        return int(psutil.virtual_memory().available) // ranks.num_ranks

    return MeasureContext(
        ranks=ranks,
        capabilities=capabilities(device),
        cache_bytes=torch.cuda.get_device_properties(device).L2_cache_size
        if device.type == "cuda"
        else host.cache_bytes(),
        free_bytes=free_bytes,
        device_index=device.index,
    )


@contextlib.contextmanager
def own_stream(context: MeasureContext) -> Iterator[None]:
    """Run everything of a case on one side stream.

    Autograd runs a backward pass on the stream of its forward pass, and a graph cannot be
    captured from the default stream.
    """
    device = context.ranks.device
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    torch.cuda.synchronize(device)


@contextlib.contextmanager
def quick_release() -> Iterator[None]:
    """Exempt all present objects from the garbage collection of `release`.

    Torch's modules alone take it a tenth of a second, longer than many a case.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage, then suspend it: samples begin with an empty heap of cycles."""
    gc.collect()
    with garbage.no_collection():
        yield


def collect(context: MeasureContext) -> None:
    """Return the memory of garbage, and of products' workspaces, to torch's allocator."""
    gc.collect()
    if context.ranks.device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # is_broken reports it
            # A workspace per stream, 32 MiB, keeps a segment that the next case would count.
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def release(context: MeasureContext, *, exempts_rest: bool = False) -> None:
    """Free the memory of a finished case.

    exempts_rest: later garbage collections leave out what has survived, as in `quick_release`.
    After one compilation these are 300,000 objects of the compiler.
    """
    collect(context)
    if exempts_rest:
        gc.freeze()
    if context.ranks.device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def is_broken(context: MeasureContext) -> bool:
    """Return whether an error has left a CUDA context in which every further call fails."""
    device = context.ranks.device
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
