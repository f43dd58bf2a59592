"""One rank of a run: `python -m stepmark.measuring.rank PLAN RUN`, or one of an outer launcher.

It reads the plan, joins the other ranks, opens the run and measures what is left of the plan.
"""

import dataclasses
import importlib
import itertools
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stepmark.cases.kind import PLAN_VERBS
from stepmark.cases.plan import FORCE, Entry, Plan
from stepmark.cases.record import Environment, Failed, RunInfo
from stepmark.ground import outer_launcher, signals, streams
from stepmark.ground.errors import StepmarkError, sentence_of
from stepmark.ground.options import load
from stepmark.ground.processes import LocalPeers
from stepmark.ground.units import ranks_text
from stepmark.ground.waiting import Waiting
from stepmark.measuring.delivery import resume_hint
from stepmark.measuring.heartbeat import HeartbeatWriter, Watchdog, set_up_limit_s
from stepmark.measuring.measure import BEGAN, show_run
from stepmark.measuring.progress import Progress
from stepmark.store import plans
from stepmark.store.commands import command_of
from stepmark.store.reader import read_records
from stepmark.store.runs import TRACES, Done, RunWriter

if TYPE_CHECKING:
    from stepmark.measuring.context import MeasureContext
    from stepmark.measuring.ranks import Ranks
    from stepmark.measuring.run_cases import Bench

# Names a module that is imported before a rank begins, with which tests inject faults.
TEST_HOOK = "STEPMARK_TEST_HOOK"

_JOIN_S = 300.0  # under a launcher: ranks of many hosts join, and rank 0 plans
_DETECTION_S = 0.5  # the parent needs this long to detect which rank died first
_OVERRUN = 1.5  # multiple of --budget: a case begins only if it can end before


def main(arguments: Sequence[str]) -> int:
    """Measure as a rank that our own parent supervises. Returns the exit code."""
    if hook := os.environ.get(TEST_HOOK):
        importlib.import_module(hook)
    heartbeat = HeartbeatWriter.from_environment()
    if heartbeat is None:
        sys.stderr.write("stepmark: ranks are started by `stepmark`, not by hand\n")
        return 2
    # The parent sends SIGINT to interrupt; SIGTERM goes to whole jobs, and to the parent too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    plan_file = Path(arguments[0])
    run = Path(arguments[1])
    try:
        plan = plans.read_file(plan_file)
        heartbeat.idle(set_up_limit_s(plan.options.get("timeout"), plan.world_size))
        if plan.device == "cpu":  # without CUPTI, Kineto only logs its stages
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        rank = Rank(plan, run, heartbeat, force=FORCE in arguments)
        for_meshes = any(entry.case.kind == "train" for entry in plan.entries)
        code = rank.measure(_context(plan.device, plan.world_size, for_meshes=for_meshes))
    except StepmarkError as error:
        if type(error).__name__ == "LostPeersError":
            # Do not report an exit code, which would mean that every case is recorded.
            time.sleep(_DETECTION_S)
            _leave(3)
        if outer_launcher.is_first():  # every rank raises the same error
            sys.stderr.write(f"stepmark: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    heartbeat.close(code)
    return code


def measure_under_launcher(
    device: str, make_plan: Callable[[], tuple[Plan, Path]], *, force: bool = False
) -> tuple[int, Path | None]:
    """Measure as one rank of a job that torchrun, srun or mpirun started.

    Rank 0 alone plans and makes the run directory; the others get the text of the plan, or the
    error. Returns the exit code, and on rank 0 the run to show.
    """
    outer_launcher.as_torchrun()
    from stepmark.measuring.ranks import LostPeersError  # noqa: PLC0415

    watchdog = Watchdog(lambda position: None)
    watchdog.idle(_JOIN_S)
    context = _context(device, outer_launcher.num_ranks(), for_meshes=True)
    ranks = context.ranks
    text, run, problem = ranks.decide(lambda: _try_plan(make_plan))
    watchdog.close(0)
    if problem is not None:
        ranks.close()  # the threads of an open process group can abort the interpreter's exit
        raise problem
    rank = Rank(plans.decode(text), run if ranks.rank == 0 else None, None, force=force)
    try:
        code = rank.measure(context)
    except LostPeersError as error:
        if not rank.has_begun:
            raise
        code = rank.lost_peers(str(error))
    return code, run if ranks.rank == 0 else None


def _try_plan(
    make_plan: Callable[[], tuple[Plan, Path]],
) -> tuple[bytes, Path | None, StepmarkError | None]:
    try:
        plan, run = make_plan()
    except StepmarkError as error:
        return b"", None, error
    return plans.encode(plan), run, None


def _context(device: str, num_ranks: int, *, for_meshes: bool) -> "MeasureContext":
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    with Waiting(f"starting {ranks}: importing torch, joining"):
        from stepmark.measuring.context import make_context  # noqa: PLC0415

        return make_context(device, for_meshes=for_meshes)


class Rank:
    """A rank that measures its part of the plan, and records how it was cut short.

    run: the run directory; under an outer launcher only rank 0 has it.
    """

    def __init__(
        self, plan: Plan, run: Path | None, heartbeat: HeartbeatWriter | None, *, force: bool
    ) -> None:
        self._plan = plan
        self._run = run
        self._heartbeat = heartbeat
        self._force = force
        self._set_up_s = set_up_limit_s(plan.options.get("timeout"), plan.world_size)
        self._guard: HeartbeatWriter | Watchdog = heartbeat or Watchdog(self._on_timeout)
        self._progress: Progress | None = None  # of rank 0
        self._peers: LocalPeers | None = None
        self._position: int | None = None
        self._run_id = ""
        self._restarts = False  # these ranks end, perhaps in no known state

    def measure(self, context: "MeasureContext") -> int:
        """Measure what is left of the plan. Returns the exit code of this rank."""
        self._guard.idle(self._set_up_s)
        ranks = context.ranks
        writer, done, failures = self._open(ranks)
        todo = [
            entry
            for entry in self._plan.entries
            if entry.position >= self._guard.first
            and (entry.case.case_id, entry.launch) not in done
        ]
        is_first = ranks.rank == 0
        total = len(self._plan.entries)
        progress = Progress(total, writer, quiet=not is_first, first=total - len(todo))
        self._progress = progress if is_first else None
        if self._heartbeat is None:
            self._peers = _local_peers(ranks)
        workload = None
        if self._plan.workload:
            from stepmark.step.native import decode  # noqa: PLC0415 - for replays alone

            workload = decode(self._plan.workload.encode())
        context = dataclasses.replace(
            context,
            run_id=self._run_id,
            folder=ranks.decide(lambda: self._run and self._run.absolute() / TRACES),
            failures=failures,
            on_blocked=self._on_blocked,
            workload=workload,
        )
        code = self._exit_code(lambda: self._run_cases(todo, context), progress)
        code = self._unless_peers_died(code)
        self._guard.idle(self._set_up_s)
        if not code and not self._restarts:  # after a failure closing may hang
            ranks.close()
        if writer is not None:
            writer.close()
        if self._heartbeat is None:
            self._guard.close(code)
        return code

    def _run_cases(self, todo: Sequence[Entry], context: "MeasureContext") -> None:
        from stepmark.measuring import environment, ranks, run_cases  # noqa: PLC0415

        if not todo:
            return
        first = environment.levels(context.ranks)
        benches = run_cases.make_benches(self._plan, context)
        try:
            todo = [benches[entry.case.kind].completed(entry) for entry in todo]
        except StepmarkError:
            context.ranks.close()
            raise
        age_s = environment.process_age_s()
        end_s = self._end_s(age_s)
        # A launcher's processes go on, and rank 0 has planned in them.
        start_s = restart_s = age_s if self._heartbeat else 0.0
        if self._heartbeat is not None:
            self._heartbeat.on_abort(ranks.dump_flight_recorder, lambda: _abort(benches))
        sink = self._progress or (lambda record: None)
        for communicator in itertools.count(1):
            levels = dataclasses.replace(first, communicator=communicator)
            is_predicted = self._plan.is_predicted(todo[0])
            context = dataclasses.replace(
                context, levels=levels, end_s=math.inf if is_predicted else end_s
            )
            if is_predicted and context.ranks.rank == 0:
                self._guard.idle(self._set_up_s)
                load(PLAN_VERBS[self._plan.command].commit)(self._run, self._plan)
            position = run_cases.run(todo, context, benches, self, sink, start_s=start_s)
            start_s = 0.0
            if position is None:
                return
            todo = [entry for entry in todo if entry.position >= position]
            if not self._plan.is_predicted(todo[0]) and context.left_s() <= restart_s:
                # These ranks skip the rest, for which others would begin too late.
                self._restarts = True
                end_s = -math.inf
            elif self._guard.restart_at(position):
                self._restarts = True
                return

    def _end_s(self, age_s: float) -> float:
        """Return when --budget ends, on the monotonic clock; infinity where none is given.

        A budget shorter than the start of these ranks counts as that long, so that a case
        begins. Of a `run` the step is still to come, which always is.
        """
        if self._plan.budget_s is None:
            return math.inf
        now_s = time.monotonic()
        began_s = now_s - age_s
        if self._heartbeat is not None:  # ranks of other hosts do not know it, nor decide
            began_s = float(os.environ.get(BEGAN, began_s))
        # The first ranks of a command have waited for their own start, too.
        start_s = age_s if self._guard.first else now_s - began_s
        has_step = any(map(self._plan.is_predicted, self._plan.entries))
        overrun = 1.0 if has_step else _OVERRUN
        return began_s + max(overrun * self._plan.budget_s, _OVERRUN * start_s)

    def _open(self, ranks: "Ranks") -> tuple[RunWriter | None, set[Done], tuple[Failed, ...]]:
        """Begin or continue the run on all ranks. Only rank 0 gets a writer."""
        from stepmark.measuring.environment import capture, local_device  # noqa: PLC0415

        devices = ranks.gather(local_device(ranks.device, ranks.rank))
        writer: RunWriter | None = None
        problem: StepmarkError | None = None
        opened: tuple[set[Done], tuple[Failed, ...]] = (set(), ())
        if ranks.rank == 0:
            assert self._run is not None
            try:
                writer, done = self._open_run(self._run, lambda: capture(devices))
                records = read_records(self._run)
                opened = (done, tuple(r for r in records if isinstance(r, Failed)))
            except StepmarkError as error:
                problem = error
        name = self._run.name if self._run else ""
        problem, (done, failures), self._run_id = ranks.decide(lambda: (problem, opened, name))
        if problem is not None:
            ranks.close()
            raise problem
        return writer, done, failures

    def _open_run(
        self, run: Path, capture: Callable[[], Environment]
    ) -> tuple[RunWriter, set[Done]]:
        # Records contain commands; import what these need before the first case is timed.
        for case in {entry.case.kind: entry.case for entry in self._plan.entries}.values():
            command_of(case)
        is_restart = self._guard.first > 0  # earlier ranks of the same parent began the run
        if is_restart or (run / "run.json").is_file():
            # What changed since they began is recorded; it ends no run.
            force = self._force or is_restart
            writer, done = RunWriter.resume(run, capture(), force=force)
            if not is_restart:
                plans.replace(run, self._plan)  # only now has the run accepted the plan
            return writer, done
        info = RunInfo(
            run_id=run.name,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self._plan.command_line,
            environment=capture(),
            num_cases=len(self._plan.entries),
            settings=self._plan.settings,
        )
        return RunWriter.begin(run, info), set()

    def _exit_code(self, work: Callable[[], object], progress: Progress) -> int:
        """Do the work; return 0, or 130 and 143 for an interrupted and a terminated one."""
        with nullcontext() if self._heartbeat else signals.terminable():
            try:
                signals.raise_if_seen()
                work()
            except KeyboardInterrupt:
                return 130
            except signals.Terminated:
                return 143
            finally:
                progress.close()
        return 0

    # The guard of a case: stores the position and passes it on.

    def begin(self, position: int, limit_s: float) -> None:
        if self._progress and position != self._position:
            self._progress.begin(self._plan.entries[position].case)
        self._position = position
        self._guard.begin(position, limit_s)

    def idle(self, limit_s: float) -> None:
        self._position = None
        self._guard.idle(limit_s)

    def is_stopping(self) -> bool:
        return self._guard.is_stopping()

    # How a rank is cut short.

    def _on_blocked(self, record: Failed, position: int) -> NoReturn:
        """Record a failure while the main thread is blocked in what the failed rank left."""
        if self._progress:
            entry = self._plan.entries[position]
            self._progress(dataclasses.replace(record, launch=entry.launch))
            self._progress.close()
        if self._heartbeat is not None:
            if position + 1 < len(self._plan.entries):
                self._heartbeat.restart_at(position + 1)
            self._heartbeat.close(3)
        elif self._run is not None:
            # This rank must end even if showing the run fails.
            with suppress(Exception):
                show_run(self._run, 3)
        _leave(3)

    def _unless_peers_died(self, code: int) -> int:
        """Turn 143 into 3 where a launcher sent SIGTERM because another rank died."""
        if self._peers is None:
            return code
        self._peers.close()
        lost = self._peers.gone
        if code != 143 or not lost or self._position is None:
            return code
        self._record(self._position, "lost rank", f"{ranks_text(lost)} ended", lost)
        return 3

    def _on_timeout(self, position: int | None) -> None:
        """Record a timeout; the watchdog's thread calls this while the main thread hangs."""
        if position is None:
            return
        gone, stopped = (self._peers.gone, self._peers.stopped) if self._peers else ((), [])
        if gone:
            # The launcher has said so by SIGTERM, which this rank, blocked in C, cannot take.
            self._record(position, "lost rank", f"{ranks_text(gone)} ended", gone)
        else:
            message = "took longer than --timeout"
            message += f"; stopped (SIGSTOP): {ranks_text(stopped)}" if stopped else ""
            self._record(position, "timeout", message, tuple(stopped))
        if self._progress and self._run:
            self._progress.print_line(resume_hint(self._run))

    @property
    def has_begun(self) -> bool:
        return bool(self._run_id)

    def lost_peers(self, message: str) -> int:
        """Record that peers are gone; return the exit code."""
        # torchrun sends SIGTERM after the same failure; this rank ends anyway.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lost = self._peers.wait_for_end(_DETECTION_S) if self._peers else ()
        message = f"{ranks_text(lost)} ended" if lost else message
        if self._position is not None:
            self._record(self._position, "lost rank", message, lost)
        elif self._progress:
            self._progress.print_line(f"stepmark: {message}")
        self._guard.close(3)
        return 3

    def _record(self, position: int, cause: str, message: str, ranks: tuple[int, ...]) -> None:
        if self._progress is None:
            return
        entry = self._plan.entries[position]
        self._progress(
            Failed(
                run_id=self._run_id,
                case=entry.case,
                cause=cause,
                message=message,
                ranks=ranks,
                launch=entry.launch,
            )
        )


def _local_peers(ranks: "Ranks") -> LocalPeers:
    """Watch the ranks of the same host name; all ranks call it."""
    own_host = socket.gethostname()
    processes = enumerate(ranks.gather((own_host, os.getpid())))
    peers = {rank: pid for rank, (host, pid) in processes if host == own_host}
    del peers[ranks.rank]
    return LocalPeers(peers)


def _abort(benches: "dict[str, Bench]") -> None:
    for bench in benches.values():
        bench.abort()


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signals.watch()
    streams.check()
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:
        if not (text := sentence_of(error)):
            raise
        sys.stderr.write(f"stepmark: rank {os.environ['RANK']}: {text}\n")
        _leave(3)
