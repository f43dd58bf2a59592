"""What one rank of a supervised verb does: join, measure its part, tell its guard.

Shared by the verbs whose cases every rank takes part in; a verb says how the cases of one
launch are measured and how a run is shown. Over 250 lines because every way in which a rank
can be cut short needs the same few facts: its plan, its position, where records go.
"""

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stepmark.cli import delivery, session
from stepmark.cli.options import Values
from stepmark.cli.progress import Progress
from stepmark.cli.rank_parent import Deliver, Places
from stepmark.core.record import AnyCase, Failed, Record
from stepmark.launch import torchrun
from stepmark.launch.evidence import ranks_text
from stepmark.launch.heartbeat import Heartbeat
from stepmark.launch.siblings import Siblings
from stepmark.launch.watchdog import Watchdog

if TYPE_CHECKING:
    from stepmark.bench.ranks import Ranks
    from stepmark.bench.rig import Rig

# Joining and leaving: interpreters that start at different speeds, communicators that close.
_SETUP_S = 120.0
# So long the parent needs to see which rank died first.
_UNTIL_SEEN_S = 0.5

Now = Sequence[tuple[int, AnyCase]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where the cases of one launch are measured."""

    rig: "Rig"
    guard: "Noting"
    run_id: str
    run: Path | None  # rank 0 alone knows where it writes
    sink: Callable[[Record], None]
    stuck: Callable[[Failed, int], NoReturn]
    share: float  # these cases, of all in the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """What is of one verb alone.

    measure: the cases of one launch; the position from which new ranks should go on, or None.
    known_as: the case_ids that the record of a case may have.
    """

    make_rig: Callable[[], "Rig"]
    measure: Callable[[Now, int, Scene], int | None]
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
        return part.run(verb.make_rig(), guard)
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

    def run(self, rig: "Rig", guard: Heartbeat | Watchdog) -> int:
        known_as = self._verb.known_as
        planned = {(name, launch) for launch, case in self._places for name in known_as(case)}
        opened = session.open_run(planned, self._values, rig, going_on=guard.run)
        self._run_id = opened.run_id
        if opened.writer:
            self._path = opened.writer.path
            guard.run_is_at(opened.writer.path)
        todo = [
            (position, launch, case)
            for position, (launch, case) in enumerate(self._places)
            if position >= guard.first
            and not any((name, launch) in opened.done for name in known_as(case))
        ]
        is_first, total = rig.ranks.rank == 0, len(self._places)
        sink = Progress(total, opened.writer, quiet=not is_first, first=total - len(todo))
        self._sink = sink if is_first else None
        watched = isinstance(guard, Heartbeat)
        if not watched:
            self._siblings = _siblings(rig.ranks)
        code = session.ended(
            lambda: self._measure(todo, rig, guard), sink, terminable=not watched
        )
        code = self._told_apart(code)
        guard.idle(_SETUP_S)
        if not code:
            rig.ranks.close()
        if opened.writer is None:
            return code
        opened.writer.close()
        if watched:  # the parent shows the run
            return code
        return self._verb.deliver(opened.writer.path, self._values, code)

    def _measure(
        self, todo: list[tuple[int, int, AnyCase]], rig: "Rig", guard: Heartbeat | Watchdog
    ) -> None:
        for index, (launch, cases) in enumerate(_by_launch(todo)):
            if index and guard.go_on_at(cases[0][0]):
                return  # new ranks take over
            left = cases
            while left:
                position = self._verb.measure(left, launch, self._scene(left, rig, guard))
                if position is None:
                    break
                if guard.go_on_at(position):
                    return
                left = [one for one in left if one[0] >= position]

    def _scene(self, left: Now, rig: "Rig", guard: Heartbeat | Watchdog) -> Scene:
        return Scene(
            rig=rig,
            guard=Noting(self, guard),
            run_id=self._run_id,
            run=self._path,
            sink=self._sink or (lambda record: None),
            stuck=lambda record, position: self._on_stuck(record, position, guard),
            share=len(left) / len(self._places),
        )

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
            self._sink(dataclasses.replace(record, launch=self._places[position][0]))
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

    def on_abort(self, dump: Callable[[], str], abort: Callable[[], None]) -> None:
        """As Heartbeat.on_abort; under an outer launcher nobody would call them."""
        if isinstance(self._guard, Heartbeat):
            self._guard.on_abort(dump, abort)


def _by_launch(todo: list[tuple[int, int, AnyCase]]) -> list[tuple[int, Now]]:
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
