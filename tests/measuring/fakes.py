"""A backend and a clock without hardware: the bench sees what a test scripts."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from stepmark.cases.case import OpCase
from stepmark.cases.plan import Entry
from stepmark.cases.record import AnyCase, Check
from stepmark.measuring import clock
from stepmark.measuring.context import MeasureContext
from stepmark.measuring.ranks import Ranks
from stepmark.model.ops import Gemm
from stepmark.model.ops.backends import Capabilities
from stepmark.operators.bench import IMPLS
from stepmark.operators.bench.call import Call, Impl

GOOD = Check(max_rel_err=1e-7, tolerance=1e-3, num_wrong=0, num_compared=10, reference="fake")
WRONG = Check(max_rel_err=9.0, tolerance=1e-3, num_wrong=4, num_compared=10, reference="fake")


class FakeTimer:
    """Hands out scripted times; the last repeats."""

    method = "fake/1"
    calls_per_sample = 1

    def __init__(self, times: Iterator[float]) -> None:
        self._times = times
        self.given: list[float] = []

    def sample(self, count: int) -> list[float]:
        batch = [next(self._times) for _ in range(count)]
        self.given += batch
        return batch


def nothing() -> None:
    """A call that takes no time."""


def impl(
    *,
    make: Callable[..., Call] | None = None,
    run: Callable[[], object] = nothing,
    verify: Callable[[], Check] = lambda: GOOD,
    **more: Any,
) -> Impl:
    def default(op: object, device: torch.device) -> Call:
        return Call(run=run, verify=verify, backend_run="fake")

    return Impl(make=make or default, **more)


class NoGuard:
    """Nobody ends a case that hangs."""

    def begin(self, position: int, limit_s: float) -> None: ...

    def idle(self, limit_s: float) -> None: ...

    def is_stopping(self) -> bool:
        return False


def entries(cases: Iterable[AnyCase], *, launch: int = 1, first: int = 0) -> list[Entry]:
    return [
        Entry(position=position, launch=launch, case=case)
        for position, case in enumerate(cases, first)
    ]


def context(
    ranks: Ranks | None = None, *, free_bytes: int = 2**30, cache_bytes: int = 0
) -> MeasureContext:
    alone = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cpu"))
    return MeasureContext(
        ranks=ranks or alone,
        capabilities=Capabilities(
            device_type="cpu",
            capability=(0, 0),
            is_rocm=False,
            has_compiler=False,
            modules=frozenset(),
        ),
        cache_bytes=cache_bytes,
        free_bytes=lambda: free_bytes,
        device_index=None,
        run_id="r",
    )


def install(
    monkeypatch: pytest.MonkeyPatch,
    backends: dict[str, Impl],
    times: Callable[[], Iterator[float]],
    call_s: float = 1e-3,
) -> list[FakeTimer]:
    """These are the gemm backends; the timers that were made come back."""
    made: list[FakeTimer] = []

    def choose(*_: object, **__: object) -> FakeTimer:
        made.append(FakeTimer(times()))
        return made[-1]

    monkeypatch.setitem(IMPLS, "gemm", backends)
    monkeypatch.setattr(clock, "choose", choose)
    monkeypatch.setattr(clock, "estimate", lambda calls, device: (call_s, 0.0))
    return made


def gemm(backend: str = "good", size: int = 16, **more: Any) -> OpCase:
    return OpCase(op=Gemm(m=size, n=size, k=size), backend=backend, device="cpu", **more)
