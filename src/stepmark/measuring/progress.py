"""The sink of a run: stores each record and prints it, as a bar on a terminal, else lines."""

import sys
from typing import TYPE_CHECKING

from stepmark.cases.case import OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.record import AnyCase, Failed, Measured, Record, Skipped
from stepmark.cases.replay_case import ReplayCase
from stepmark.cases.train_case import TrainCase
from stepmark.cases.train_words import name_of
from stepmark.cases.training import CompileScope
from stepmark.ground.units import format_bytes, format_time
from stepmark.ground.waiting import Waiting
from stepmark.model.collectives import RedOp
from stepmark.store.view import median_s

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from stepmark.store.runs import RunWriter


class Progress:
    """The sink of a runner's records. `first` of `total` cases were measured before."""

    def __init__(
        self, total: int, writer: "RunWriter | None", *, quiet: bool, first: int = 0
    ) -> None:
        self._total = total
        self._writer = writer
        self._quiet = quiet
        self._count = first
        self._bar = _bar(total, first) if not quiet and sys.stderr.isatty() else None
        self._waiting: Waiting | None = None

    def begin(self, case: AnyCase) -> None:
        """Name the case that is measured now."""
        compiles = isinstance(case, TrainCase) and case.compile is not CompileScope.NONE
        text = f"{'compiling and ' * compiles}measuring {case_text(case)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=text)
        elif not self._quiet:
            self._stop_waiting()
            self._waiting = Waiting(f"[{self._count + 1}/{self._total}] {text}")

    def __call__(self, record: Record) -> None:
        if self._writer is not None:
            self._writer.append(record)
        self._stop_waiting()
        self._count += 1
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, description=line(record))
        else:
            self.print_line(f"[{self._count}/{self._total}] {line(record)}")

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def close(self) -> None:
        self._stop_waiting()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def print_line(self, text: str) -> None:
        self.close()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def line(record: Record) -> str:
    """Return a case and its outcome in a line."""
    match record:
        case Measured():
            outcome = format_time(median_s(record)) + (" WRONG" if record.num_wrong else "")
        case Skipped():
            outcome = f"skipped: {record.reason}"
        case Failed():
            outcome = f"failed ({record.cause}): {record.message}"
    return f"{case_text(record.case)}: {outcome}"


def case_text(case: AnyCase) -> str:
    """Return the name of a case in a line of progress."""
    if isinstance(case, TrainCase):
        return f"{case.family} {name_of(case)}"
    if isinstance(case, CommCase):
        words = (
            case.family,
            format_bytes(case.message_bytes),
            case.dtype,
            "" if case.redop is RedOp.NONE else case.redop,
            f"{case.pair[0]} to {case.pair[1]}" if case.pair else "",
            "in place" if case.in_place else "",
            f"beside {case.beside}" if case.beside else "",
            case.mode,
        )
        return " ".join(filter(None, words))
    if isinstance(case, ReplayCase):
        return f"replay {case.file} on {case.num_ranks} ranks, compute {case.compute}"
    return f"{case.family} {_pass(case)}{case.op.shape_text} {case.dtype} {case.backend}"


def _pass(case: OpCase) -> str:
    label = case.labels[0] if case.labels else None
    phase = getattr(case.op, "phase", None) or (label.phase if label else None)
    role = f"{label.role} " if label and label.role else ""
    return f"{role}{phase} " if phase else role


def _bar(total: int, first: int) -> "Bar":
    """Start a bar of the last case, the number of cases and the time left."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar  # noqa: PLC0415

    bar = Bar(
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
    )
    bar.add_task("", total=total, completed=first)
    bar.start()
    return bar
