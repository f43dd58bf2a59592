"""Where cases run: the ranks, what their device can do, its cache and its free memory."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from stepmark.bench.operators.call import Capabilities
from stepmark.bench.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """This rank's place."""

    ranks: Ranks
    capabilities: Capabilities
    cache_bytes: int
    free_bytes: Callable[[], int]
    device_index: int | None  # for telemetry; None on CPU


@contextlib.contextmanager
def own_stream(rig: Rig) -> Iterator[None]:
    """Everything of a case on one side stream.

    Autograd runs a backward pass on the stream of its forward pass, and a graph cannot be
    captured from the default stream.
    """
    if rig.ranks.device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(rig.ranks.device)):
        yield
    torch.cuda.synchronize(rig.ranks.device)


@contextlib.contextmanager
def quick_release() -> Iterator[None]:
    """Between these, `release` does not search what is alive already.

    Torch's modules alone take a search of a tenth of a second, longer than many a case.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release(rig: Rig) -> None:
    """Give back what a finished case held."""
    gc.collect()
    if rig.ranks.device.type == "cuda":
        torch.cuda.empty_cache()
