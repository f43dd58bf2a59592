"""What one rank of `stepmark train` measures."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

from stepmark.cli import rank_work, session, train_output, train_refusals
from stepmark.cli.options import Values
from stepmark.cli.rank_parent import Places
from stepmark.cli.rank_work import Now, Scene, Verb
from stepmark.cli.train_output import TRACES
from stepmark.core.record import AnyCase, Failed
from stepmark.core.train_case import TrainCase
from stepmark.core.training import CompileScope
from stepmark.core.units import parse_duration

if TYPE_CHECKING:
    from stepmark.bench.training.runner import Options


def work(places: Places, values: Values, device: str) -> int:
    """All positions from the guard's first. The exit code of this rank."""

    def measure(now: Now, launch: int, scene: Scene) -> int | None:
        plan = cast("list[tuple[int, TrainCase]]", now)
        return _measure(plan, launch, values, scene)

    def known_as(case: AnyCase) -> tuple[str, ...]:
        if not values.get("compile_fallback") or not isinstance(case, TrainCase):
            return (case.case_id,)
        eager = dataclasses.replace(case, compile=CompileScope.NONE, compile_mode="default")
        return case.case_id, eager.case_id

    verb = Verb(
        make_rig=lambda: session.make_rig(device, for_meshes=True),
        measure=measure,
        deliver=train_output.deliver,
        known_as=known_as,
    )
    return rank_work.work(places, values, verb)


def options(values: Values, launch: int, share: float, num_ranks: int) -> "Options":
    """--steps, --budget and the like for the runner; share: of the budget."""
    from stepmark.bench.training.runner import Options  # noqa: PLC0415

    budget = values.get("budget")
    return Options(
        steps=values.get("steps"),
        budget_s=parse_duration(budget, "budget") * share if budget else None,
        timeout_s=parse_duration(values.get("timeout") or "600s", "timeout"),
        launch=launch,
        messages=bool(values.get("messages")),
        profile=bool(values.get("profile")),
        profile_ranks=train_refusals.profiled_ranks(values, num_ranks),
        find_batch=bool(values.get("find_batch")),
        compile_fallback=bool(values.get("compile_fallback")),
    )


def _measure(
    plan: list[tuple[int, TrainCase]], launch: int, values: Values, scene: Scene
) -> int | None:
    from stepmark.bench.collectives.torch_api import dump_flight_recorder  # noqa: PLC0415
    from stepmark.bench.training import runner  # noqa: PLC0415

    ranks = scene.rig.ranks
    # Process groups of a mesh cannot be aborted from outside; the parent kills them.
    scene.guard.on_abort(dump_flight_recorder, lambda: None)
    folder: Path = ranks.decide(lambda: scene.run and scene.run.absolute() / TRACES)
    if values.get("profile"):
        folder.mkdir(parents=True, exist_ok=True)
    how = options(values, launch, scene.share, ranks.num_ranks)
    if how.find_batch:
        largest = ranks.decide(lambda: scene.run and _too_large(scene.run, launch))
        how = dataclasses.replace(how, too_large_mbs=largest)
    return runner.run(
        plan,
        scene.rig,
        how,
        scene.guard,
        run_id=scene.run_id,
        sink=scene.sink,
        stuck=scene.stuck,
        folder=folder,
    )


def _too_large(run: Path, launch: int) -> int | None:
    """The smallest micro-batch that ran out of memory on ranks of this launch before these."""
    from stepmark.store.reader import read_records  # noqa: PLC0415

    return min(
        (
            record.train.mbs
            for record in read_records(run)
            if isinstance(record, Failed) and (record.launch, record.cause) == (launch, "oom")
        ),
        default=None,
    )
