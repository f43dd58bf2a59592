"""What one rank of `stepmark comm` does: join, measure its part, tell its guard."""

import dataclasses
import os
import signal
import socket
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.cli import comm_output, session
from stepmark.cli.options import Values
from stepmark.cli.progress import Progress
from stepmark.core.comm_case import CommCase
from stepmark.core.record import Failed
from stepmark.core.units import parse_duration
from stepmark.launch.evidence import ranks_text
from stepmark.launch.heartbeat import Heartbeat
from stepmark.launch.siblings import Siblings
from stepmark.launch.watchdog import Watchdog

if TYPE_CHECKING:
    from stepmark.bench.collectives.runner import Options
    from stepmark.bench.ranks import Ranks
    from stepmark.bench.rig import Rig
    from stepmark.bench.stopping import Effort

Places = list[tuple[int, CommCase]]
# Joining and leaving: interpreters that start at different speeds, communicators that close.
_SETUP_S = 120.0
# So long the parent needs to see which rank died first.
_UNTIL_SEEN_S = 0.5


def work(places: Places, values: Values, device: str) -> int:
    """All positions from the guard's first. The exit code of this rank."""
    from stepmark.bench.ranks import LostPeersError  # noqa: PLC0415

    part = _Part(places, values)
    heartbeat = Heartbeat.from_environment()
    guard = heartbeat or Watchdog(part.on_timeout)
    if heartbeat:
        # A launcher sends it to the peers of a rank that died. The parent, who sees who it
        # was, ends them; to interrupt them it sends SIGINT.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    guard.idle(_SETUP_S)
    try:
        return part.run(session.make_rig(device), guard)
    except LostPeersError as error:
        if heartbeat:  # an exit code left behind would say that all is told
            time.sleep(_UNTIL_SEEN_S)
            os._exit(3)
        if not part.has_run:
            raise
        return part.on_lost(str(error))
    finally:
        guard.close()


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


class _Part:
    """This rank's share of the plan, and what to do when it is cut short."""

    def __init__(self, places: Places, values: Values) -> None:
        self._places, self._values = places, values
        self._sink: Progress | None = None
        self._run_id = ""
        self._path: Path | None = None
        self._siblings: Siblings | None = None
        self.position: int | None = None

    def run(self, rig: "Rig", guard: Heartbeat | Watchdog) -> int:
        planned = {(case.case_id, launch) for launch, case in self._places}
        opened = session.open_run(planned, self._values, rig, going_on=guard.run)
        self._run_id = opened.run_id
        if opened.writer:
            self._path = opened.writer.path
            guard.run_is_at(opened.writer.path)
        todo = [
            (position, launch, case)
            for position, (launch, case) in enumerate(self._places)
            if position >= guard.first and (case.case_id, launch) not in opened.done
        ]
        is_first, total = rig.ranks.rank == 0, len(self._places)
        sink = Progress(total, opened.writer, quiet=not is_first, first=total - len(todo))
        self._sink = sink if is_first else None
        watched = isinstance(guard, Heartbeat)
        if not watched:
            self._siblings = _siblings(rig.ranks)

        def measure() -> None:
            for index, (launch, now) in enumerate(_by_launch(todo)):
                if index and guard.go_on_at(now[0][0]):
                    return  # new ranks take over
                self._measure(now, launch, rig, guard)

        code = session.ended(measure, sink, terminable=not watched)
        code = self._told_apart(code)
        guard.idle(_SETUP_S)
        if not code:
            rig.ranks.close()
        if opened.writer is None:
            return code
        opened.writer.close()
        # Under a parent of ours, that one shows the run.
        return code if watched else comm_output.deliver(opened.writer.path, self._values, code)

    def _measure(
        self,
        now: list[tuple[int, CommCase]],
        launch: int,
        rig: "Rig",
        guard: Heartbeat | Watchdog,
    ) -> None:
        from stepmark.bench.collectives import runner  # noqa: PLC0415
        from stepmark.bench.collectives.communicators import Communicators  # noqa: PLC0415
        from stepmark.bench.collectives.torch_api import dump_flight_recorder  # noqa: PLC0415

        communicators = Communicators(rig.ranks)
        if isinstance(guard, Heartbeat):
            guard.on_abort(dump_flight_recorder, communicators.abort)
        runner.run(
            now,
            rig,
            effort(self._values, len(now) / len(self._places)),
            options(self._values, launch),
            communicators,
            _Noting(self, guard),
            run_id=self._run_id,
            sink=self._sink or (lambda record: None),
        )
        communicators.close()

    def _told_apart(self, code: int) -> int:
        """143 is 3 where SIGTERM was a launcher's answer to the death of another rank."""
        if self._siblings is None:
            return code
        self._siblings.close()
        gone = self._siblings.gone
        if code != 143 or not gone or self.position is None:
            return code
        self._record(self.position, "lost rank", f"{ranks_text(gone)} ended", gone)
        return 3

    def on_timeout(self, position: int | None) -> None:
        """Called by a watchdog's thread while the main thread hangs."""
        if position is None:
            return
        stopped = tuple(self._siblings.stopped) if self._siblings else ()
        message = "took longer than --timeout"
        message += f"; stopped (SIGSTOP): {ranks_text(stopped)}" if stopped else ""
        self._record(position, "timeout", message, stopped)
        if self._sink and self._path:
            self._sink.say(comm_output.resume_hint("", self._path))

    @property
    def has_run(self) -> bool:
        return bool(self._run_id)

    def on_lost(self, message: str) -> int:
        """The last words of a rank whose peers are gone; its exit code."""
        # torchrun's answer to the same death; we leave anyway.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gone = self._siblings.wait_for_end(_UNTIL_SEEN_S) if self._siblings else ()
        message = f"{ranks_text(gone)} ended" if gone else message
        if self.position is not None:
            self._record(self.position, "lost rank", message, gone)
        elif self._sink:
            self._sink.say(f"stepmark: {message}")
        if self._path is None:
            return 3
        comm_output.deliver(self._path, self._values, 3)
        return 3

    def _record(self, position: int, cause: str, message: str, ranks: tuple[int, ...]) -> None:
        launch, case = self._places[position]
        if self._sink is None:
            return
        self._sink(
            Failed(
                run_id=self._run_id,
                case=case,
                cause=cause,
                message=message,
                ranks=ranks,
                launch=launch,
            )
        )


class _Noting:
    """Passes what the runner tells on to the guard, and keeps the position."""

    def __init__(self, part: _Part, guard: Heartbeat | Watchdog) -> None:
        self._part, self._guard = part, guard

    def begin(self, position: int, limit_s: float) -> None:
        self._part.position = position
        self._guard.begin(position, limit_s)

    def idle(self, limit_s: float) -> None:
        self._part.position = None
        self._guard.idle(limit_s)


def _by_launch(
    todo: list[tuple[int, int, CommCase]],
) -> list[tuple[int, list[tuple[int, CommCase]]]]:
    """(position, launch, case) as (launch, [(position, case), ...])."""
    return [
        (launch, [(position, case) for position, _, case in held])
        for launch, held in groupby(todo, key=lambda one: one[1])
    ]


def _siblings(ranks: "Ranks") -> Siblings:
    """Those of the same host name; all ranks call it."""
    mine = (socket.gethostname(), os.getpid())
    everyone = dict(enumerate(ranks.gather(mine)))
    return Siblings(
        {
            rank: pid
            for rank, (host, pid) in everyone.items()
            if host == mine[0] and rank != ranks.rank
        }
    )
