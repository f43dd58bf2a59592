"""A step that all ranks take, or none: where one breaks, every rank learns which and why."""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from stepmark.bench.ranks import LostPeersError, Ranks
from stepmark.core.record import AnyCase, Failed

T = TypeVar("T")


class CaseFailedError(Exception):
    """Some rank broke; every rank knows which and why."""

    def __init__(self, cause: str, message: str, ranks: tuple[int, ...], trace: str) -> None:
        super().__init__(message)
        self.cause, self.message, self.ranks, self.trace = cause, message, ranks, trace

    def record(self, run_id: str, case: AnyCase, launch: int = 1) -> Failed:
        return Failed(
            run_id=run_id,
            case=case,
            cause=self.cause,
            message=self.message,
            ranks=self.ranks,
            traceback=self.trace,
            launch=launch,
        )


def agreed(ranks: Ranks, step: Callable[[], T]) -> T:
    """Run a step on every rank; if it breaks on any, all raise CaseFailedError together."""
    result: T | None = None
    problem: tuple[str, str, str] | None = None
    try:
        result = step()
    except LostPeersError:
        raise
    except Exception as error:  # noqa: BLE001  a broken case is a record, not the end
        problem = cause_of(error)
    problems = ranks.gather(problem)
    broken = tuple(rank for rank, other in enumerate(problems) if other)
    if broken:
        cause, message, trace = problems[broken[0]]
        raise CaseFailedError(cause, message, broken, trace)
    return result  # type: ignore[return-value]


def measured_by(world: Ranks, members: Ranks | None, measure: Callable[[Ranks], T]) -> T:
    """Let some ranks measure while the others wait; all get rank 0's result.

    members: these ranks among themselves, rank 0 always one of them; None on the others.
    Raises CaseFailedError on all ranks of the world together.
    """
    if members is world:
        return measure(world)
    result: T | None = None
    problem: tuple[str, str, tuple[int, ...], str] | None = None
    if members is not None:
        try:
            result = measure(members)
        except CaseFailedError as error:
            problem = error.cause, error.message, error.ranks, error.trace
    result, problem = world.decide(lambda: (result, problem))
    if problem:
        raise CaseFailedError(*problem)
    return result


def cause_of(error: Exception) -> tuple[str, str, str]:
    """Cause as Failed has it, the first line of the message, and a traceback where it helps."""
    text = str(error).strip()
    first = text.split("\n", maxsplit=1)[0] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return "oom", first, ""
    memory = isinstance(error, MemoryError) or "out of memory" in text.lower()
    memory = memory or "can't allocate memory" in text.lower()
    trace = "".join(traceback.format_exception(error))
    return "oom" if memory else "error", first, trace
