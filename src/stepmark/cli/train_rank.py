"""What one rank of `stepmark train` measures."""

import dataclasses
import os

from stepmark.cli import rank_work, train_output, train_refusals
from stepmark.cli.options import Values
from stepmark.cli.rank_parent import Places
from stepmark.cli.rank_work import Verb
from stepmark.core.plan import How, TrainHow
from stepmark.core.record import AnyCase
from stepmark.core.train_case import TrainCase
from stepmark.core.training import CompileScope
from stepmark.core.units import parse_duration


def work(places: Places, values: Values, device: str) -> int:
    """All positions from the guard's first. The exit code of this rank."""
    from stepmark.bench.context import make_context  # noqa: PLC0415

    def known_as(case: AnyCase) -> tuple[str, ...]:
        if not values.get("compile_fallback") or not isinstance(case, TrainCase):
            return (case.case_id,)
        eager = dataclasses.replace(case, compile=CompileScope.NONE, compile_mode="default")
        return case.case_id, eager.case_id

    verb = Verb(
        make_context=lambda: make_context(device, for_meshes=True),
        how=How(train=how(values, int(os.environ.get("WORLD_SIZE", "1")))),
        deliver=train_output.deliver,
        known_as=known_as,
    )
    return rank_work.work(places, values, verb)


def how(values: Values, num_ranks: int) -> TrainHow:
    """--steps, --budget and the like."""
    budget = values.get("budget")
    return TrainHow(
        steps=values.get("steps"),
        budget_s=parse_duration(budget, "budget") if budget else None,
        timeout_s=parse_duration(values.get("timeout") or "600s", "timeout"),
        messages=bool(values.get("messages")),
        profile=bool(values.get("profile")),
        profile_ranks=train_refusals.profiled_ranks(values, num_ranks),
        find_batch=bool(values.get("find_batch")),
        compile_fallback=bool(values.get("compile_fallback")),
    )
