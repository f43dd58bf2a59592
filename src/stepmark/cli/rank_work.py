"""What one rank of a supervised verb does: join, measure its part, tell its guard.

Shared by the verbs whose cases every rank takes part in; a verb says how its cases are
measured and how a run is shown. Over 250 lines because every way in which a rank
can be cut short needs the same few facts: its plan, its position, where records go.
"""

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stepmark.cli import delivery, session
from stepmark.cli.options import Values
from stepmark.cli.progress import Progress
from stepmark.cli.rank_parent import Deliver, Places
from stepmark.cli.train_output import TRACES
from stepmark.core.plan import Entry, How, Plan
from stepmark.core.record import AnyCase, Failed
from stepmark.launch import torchrun
from stepmark.launch.evidence import ranks_text
from stepmark.launch.heartbeat import Heartbeat
from stepmark.launch.siblings import Siblings
from stepmark.launch.watchdog import Watchdog

if TYPE_CHECKING:
    from stepmark.bench.context import MeasureContext
    from stepmark.bench.ranks import Ranks

# Joining and leaving: interpreters that start at different speeds, communicators that close.
_SETUP_S = 120.0
# So long the parent needs to see which rank died first.
_UNTIL_SEEN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """What is of one verb alone. known_as: the case_ids that the record of a case may have."""

    make_context: Callable[[], "MeasureContext"]
    how: How
    deliver: Deliver
    known_as: Callable[[AnyCase], tuple[str, ...]] = lambda case: (case.case_id,)


def work(places: Places, values: Values, verb: Verb) -> int:
    """All positions from the guard's first. The exit code of this rank."""
    from stepmark.bench.ranks import LostPeersError  # noqa: PLC0415

    part = _Part(places, values, verb)
    heartbeat = Heartbeat.from_environment()
    guard = heartbeat or Watchdog(part.on_timeout)
    if heartbeat:
        # A launcher sends it to the peers of a rank that died. The parent, who sees who it
        # was, ends them; to interrupt them it sends SIGINT.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    guard.idle(_SETUP_S)
    try:
        return part.run(verb.make_context(), guard)
    except LostPeersError as error:
        if heartbeat:  # an exit code left behind would say that all is told
            time.sleep(_UNTIL_SEEN_S)
            os._exit(3)
        if not part.has_run:
            raise
        return part.on_lost(str(error))
    finally:
        guard.close()


class _Part:
    """This rank's share of the plan, and what to do when it is cut short."""

    def __init__(self, places: Places, values: Values, verb: Verb) -> None:
        self._places, self._values, self._verb = places, values, verb
        self._sink: Progress | None = None
        self._run_id = ""
        self._path: Path | None = None
        self._siblings: Siblings | None = None
        self.position: int | None = None

    def run(self, context: "MeasureContext", guard: Heartbeat | Watchdog) -> int:
        known_as = self._verb.known_as
        planned = {(name, launch) for launch, case in self._places for name in known_as(case)}
        opened = session.open_run(planned, self._values, context, going_on=guard.run)
        self._run_id = opened.run_id
        if opened.writer:
            self._path = opened.writer.path
            guard.run_is_at(opened.writer.path)
        plan = self._plan(context)
        todo = [
            entry
            for entry in plan.entries
            if entry.position >= guard.first
            and not any((name, entry.launch) in opened.done for name in known_as(entry.case))
        ]
        is_first, total = context.ranks.rank == 0, len(self._places)
        sink = Progress(total, opened.writer, quiet=not is_first, first=total - len(todo))
        self._sink = sink if is_first else None
        watched = isinstance(guard, Heartbeat)
        if not watched:
            self._siblings = _siblings(context.ranks)
        code = session.ended(
            lambda: self._measure(todo, plan, context, guard), sink, terminable=not watched
        )
        code = self._told_apart(code)
        guard.idle(_SETUP_S)
        if not code:
            context.ranks.close()
        if opened.writer is None:
            return code
        opened.writer.close()
        if watched:  # the parent shows the run
            return code
        return self._verb.deliver(opened.writer.path, self._values, code)

    def _plan(self, context: "MeasureContext") -> Plan:
        return Plan(
            command="",
            device=context.ranks.device.type,
            world_size=context.ranks.num_ranks,
            how=self._verb.how,
            entries=tuple(
                Entry(position=position, launch=launch, case=case)
                for position, (launch, case) in enumerate(self._places)
            ),
        )

    def _measure(
        self,
        todo: list[Entry],
        plan: Plan,
        context: "MeasureContext",
        guard: Heartbeat | Watchdog,
    ) -> None:
        from stepmark.bench import run_cases  # noqa: PLC0415
        from stepmark.bench.ranks import dump_flight_recorder  # noqa: PLC0415

        run = self._path.absolute() if self._path else None
        folder, failures = context.ranks.decide(lambda: (run, _failures(run)))
        context = dataclasses.replace(
            context,
            run_id=self._run_id,
            folder=folder / TRACES,
            failures=failures,
            on_blocked=lambda record, position: self._on_stuck(record, position, guard),
        )
        benches = run_cases.make_benches(plan, context)
        if isinstance(guard, Heartbeat):  # under an outer launcher nobody would call them

            def abort() -> None:
                for bench in benches.values():
                    bench.abort()

            guard.on_abort(dump_flight_recorder, abort)
        sink, left = self._sink or (lambda record: None), todo
        while left:
            position = run_cases.run(left, context, benches, Noting(self, guard), sink)
            if position is None or guard.go_on_at(position):
                return  # new ranks take over
            left = [entry for entry in left if entry.position >= position]

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
            self._sink.say(delivery.resume_hint("", self._path))

    def _on_stuck(self, record: Failed, position: int, guard: Heartbeat | Watchdog) -> NoReturn:
        """The last words of rank 0 in a collective that another rank, which failed, left."""
        if self._sink:
            self._sink(record)
            self._sink.close()
        if not guard.go_on_at(position + 1) and self._path:
            self._verb.deliver(self._path, self._values, 3)
        torchrun.leave_exit_code(3)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(3)

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
        self._verb.deliver(self._path, self._values, 3)
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


class Noting:
    """Passes what the runner tells on to the guard, and keeps the position."""

    def __init__(self, part: _Part, guard: Heartbeat | Watchdog) -> None:
        self._part, self._guard = part, guard

    def begin(self, position: int, limit_s: float) -> None:
        self._part.position = position
        self._guard.begin(position, limit_s)

    def idle(self, limit_s: float) -> None:
        self._part.position = None
        self._guard.idle(limit_s)


def _failures(run: Path | None) -> tuple[Failed, ...]:
    """Failed records of ranks before these."""
    from stepmark.store.reader import read_records  # noqa: PLC0415

    records = read_records(run) if run else []
    return tuple(record for record in records if isinstance(record, Failed))


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
