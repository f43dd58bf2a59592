"""The parent of measuring ranks: starts them, records what they could not, shows the run.

Shared by the verbs whose cases every rank takes part in.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.cli.options import Values
from stepmark.core.record import AnyCase

if TYPE_CHECKING:
    from stepmark.launch.evidence import Lost

# (launch, case) by position: what parent and ranks call a case by.
Places = Sequence[tuple[int, AnyCase]]
# Shows a run and writes its files; from an exit code to that of it all.
Deliver = Callable[[Path, Values, int], int]


def positions(cases: Sequence[AnyCase], launches: int) -> Places:
    return [(launch, case) for launch in range(1, launches + 1) for case in cases]


def as_parent(
    arguments: list[str], places: Places, values: Values, world_size: int, deliver: Deliver
) -> int:
    """Start ranks on this host, watch them from outside, show what they measured."""
    code, run = watched(arguments, places, world_size)
    return deliver(run, values, code) if run else code


def watched(
    arguments: list[str],
    places: Places,
    world_size: int,
    *,
    going_on: Path | None = None,
) -> tuple[int, Path | None]:
    """Start ranks, record what they could not; the exit code and the run."""
    from stepmark.launch.supervise import supervise  # noqa: PLC0415

    runs: list[Path] = [going_on] if going_on else []

    def on_lost(lost: "Lost", run: Path | None) -> None:
        record_lost(lost, run, places)

    code = supervise(
        arguments,
        world_size,
        num_cases=len(places),
        on_lost=on_lost,
        on_run=runs.append,
        going_on=going_on,
    )
    return code, runs[-1] if runs else None


def record_lost(lost: "Lost", run: Path | None, places: Places) -> None:
    """A case whose ranks hang or died is a record like any other, written for them."""
    from stepmark.cli.progress import named  # noqa: PLC0415
    from stepmark.core.record import Failed  # noqa: PLC0415
    from stepmark.store.runs import RunWriter  # noqa: PLC0415

    if lost.position is None:
        sys.stderr.write(f"stepmark: {lost.message}\n")
        return
    launch, case = places[lost.position]
    sys.stderr.write(
        f"[{lost.position + 1}/{len(places)}] {named(case)}: "
        f"failed ({lost.cause}): {lost.message}\n"
    )
    if run is None:
        return
    writer, _ = RunWriter.go_on(run)
    with writer:
        writer.append(
            Failed(
                run_id=run.name,
                case=case,
                cause=lost.cause,
                message=lost.message,
                ranks=lost.ranks,
                traceback=lost.stacks,
                launch=launch,
            )
        )
    if lost.flight:
        folder = run / "traces"
        folder.mkdir(exist_ok=True)
        for rank, text in lost.flight.items():
            (folder / f"flight-{lost.position}-rank{rank}.json").write_text(text)
