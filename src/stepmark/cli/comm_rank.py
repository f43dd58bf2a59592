"""What one rank of `stepmark comm` does: join, measure its part, tell its guard."""

import dataclasses
import os
import signal
import time
from typing import TYPE_CHECKING

from stepmark.cli import comm_output, session
from stepmark.cli.options import Values
from stepmark.cli.progress import Progress
from stepmark.core.comm_case import CommCase
from stepmark.core.record import Failed
from stepmark.launch.heartbeat import Heartbeat
from stepmark.launch.watchdog import Watchdog

if TYPE_CHECKING:
    from stepmark.bench.collectives.communicators import Communicators
    from stepmark.bench.collectives.runner import Options
    from stepmark.bench.rig import Rig
    from stepmark.bench.stopping import Effort

Places = list[tuple[int, CommCase]]
# Joining and leaving: interpreters that start at different speeds, communicators that close.
_SETUP_S = 120.0
# So long the parent needs to see which rank died first.
_UNTIL_SEEN_S = 0.5


def work(
    places: Places, values: Values, device: str, *, effort: "Effort", options: "Options"
) -> int:
    """All positions from the guard's first; new ranks take over at the next launch."""
    from stepmark.bench.ranks import LostPeersError  # noqa: PLC0415

    part = _Part(places, values, effort, options)
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
        part.on_lost(str(error))
        raise
    finally:
        guard.close()


class _Part:
    """This rank's share of the plan, and what to do when it is cut short."""

    def __init__(
        self, places: Places, values: Values, effort: "Effort", options: "Options"
    ) -> None:
        self._places, self._values = places, values
        self._effort, self._options = effort, options
        self._sink: Progress | None = None
        self._run_id = ""
        self.position: int | None = None

    def run(self, rig: "Rig", guard: Heartbeat | Watchdog) -> int:
        from stepmark.bench.collectives.communicators import Communicators  # noqa: PLC0415
        from stepmark.bench.collectives.torch_api import dump_flight_recorder  # noqa: PLC0415

        planned = {(case.case_id, launch) for launch, case in self._places}
        opened = session.open_run(planned, self._values, rig, going_on=guard.run)
        self._run_id = opened.run_id
        if opened.writer:
            guard.run_is_at(opened.writer.path)
        todo = [
            (position, launch, case)
            for position, (launch, case) in enumerate(self._places)
            if position >= guard.first and (case.case_id, launch) not in opened.done
        ]
        first = len(self._places) - len(todo)
        sink = Progress(
            len(self._places), opened.writer, quiet=rig.ranks.rank != 0, first=first
        )
        self._sink = sink if rig.ranks.rank == 0 else None

        def measure() -> None:
            while todo:
                launch = todo[0][1]
                now = [(position, case) for position, one, case in todo if one == launch]
                del todo[: len(now)]
                communicators = Communicators(rig.ranks)
                if isinstance(guard, Heartbeat):
                    guard.on_abort(dump_flight_recorder, communicators.abort)
                self._measure(now, launch, rig, guard, communicators)
                communicators.close()
                if todo and guard.go_on_at(todo[0][0]):
                    return

        code = session.ended(measure, sink, terminable=not isinstance(guard, Heartbeat))
        guard.idle(_SETUP_S)
        if not code:
            rig.ranks.close()
        if opened.writer is None:
            return code
        if isinstance(guard, Heartbeat):  # the parent shows the run
            opened.writer.close()
            return code
        outcome = session.finish(opened.writer, code, sink)
        return comm_output.deliver(outcome.path, self._values, outcome.exit_code)

    def _measure(
        self,
        now: list[tuple[int, CommCase]],
        launch: int,
        rig: "Rig",
        guard: Heartbeat | Watchdog,
        communicators: "Communicators",
    ) -> None:
        from stepmark.bench.collectives import runner  # noqa: PLC0415

        runner.run(
            now,
            rig,
            self._effort,
            dataclasses.replace(self._options, launch=launch),
            communicators,
            _Noting(self, guard),
            run_id=self._run_id,
            sink=self._sink or (lambda record: None),
        )

    def on_timeout(self, position: int | None) -> None:
        """Called by a watchdog's thread while the main thread hangs."""
        if position is not None:
            self._record(position, "timeout", "took longer than --timeout")

    def on_lost(self, message: str) -> None:
        if self.position is not None:
            self._record(self.position, "lost rank", message)

    def _record(self, position: int, cause: str, message: str) -> None:
        launch, case = self._places[position]
        if self._sink is None:
            return
        self._sink(
            Failed(
                run_id=self._run_id,
                case=case,
                cause=cause,
                message=message,
                ranks=(),
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
