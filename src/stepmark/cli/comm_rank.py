"""What one rank of `stepmark comm` measures."""

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from stepmark.cli import comm_output, rank_work, session
from stepmark.cli.options import Values
from stepmark.cli.rank_parent import Places
from stepmark.cli.rank_work import Now, Scene, Verb
from stepmark.core.comm_case import CommCase
from stepmark.core.units import parse_duration

if TYPE_CHECKING:
    from stepmark.bench.collectives.runner import Options
    from stepmark.bench.stopping import Effort


def work(places: Places, values: Values, device: str) -> int:
    """All positions from the guard's first. The exit code of this rank."""

    def measure(now: Now, launch: int, scene: Scene) -> None:
        _measure(cast("list[tuple[int, CommCase]]", now), launch, values, scene)

    verb = Verb(
        make_rig=lambda: session.make_rig(device), measure=measure, deliver=comm_output.deliver
    )
    return rank_work.work(places, values, verb)


def options(values: Values, launch: int) -> "Options":
    """-n, -w, -c and --timeout for the runner."""
    from stepmark.bench.collectives.runner import Options  # noqa: PLC0415

    given: dict[str, Any] = {
        "iterations": values.get("iters"),
        "graphs": values.get("cudagraph"),
        "warmups": values.get("warmup_iters"),
        "checks": values.get("check"),
        "timeout_s": parse_duration(values["timeout"], "timeout")
        if values.get("timeout")
        else None,
    }
    return Options(launch=launch, **{k: v for k, v in given.items() if v is not None})


def effort(values: Values, share: float) -> "Effort":
    """share: the part of --budget that the cases of one launch get."""
    from stepmark.bench.collectives.runner import DEFAULT  # noqa: PLC0415

    budget = values.get("budget")
    total_s = parse_duration(budget, "budget") * share if budget else None
    return dataclasses.replace(DEFAULT, total_s=total_s)


def _measure(
    now: list[tuple[int, CommCase]], launch: int, values: Values, scene: Scene
) -> None:
    from stepmark.bench.collectives import runner  # noqa: PLC0415
    from stepmark.bench.collectives.communicators import Communicators  # noqa: PLC0415
    from stepmark.bench.collectives.torch_api import dump_flight_recorder  # noqa: PLC0415

    communicators = Communicators(scene.rig.ranks)
    scene.guard.on_abort(dump_flight_recorder, communicators.abort)
    runner.run(
        now,
        scene.rig,
        effort(values, scene.share),
        options(values, launch),
        communicators,
        scene.guard,
        run_id=scene.run_id,
        sink=scene.sink,
    )
    communicators.close()
