"""The parent of the ranks: sees them hang or die, kills them, goes on with new ones."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepmark.core.errors import EXIT_CODES, worst
from stepmark.launch import failure_report
from stepmark.launch.failure_report import RankFailure, ranks_text
from stepmark.launch.signals import catching
from stepmark.launch.workers import Workers

__all__ = ["RankFailure", "supervise"]

START_S = 120.0  # until the first beat of every rank: python and its imports on a slow disk
_GRACE_S = 3.0  # after a death: rank 0 may be writing
_LINGER_S = 10.0  # after rank 0 has reported its exit code
INTERRUPT_S = 10.0  # to store what is finished after Ctrl-C
_MAX_IN_ROW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    code: int
    restart_at: int | None


@dataclass(frozen=True, slots=True)
class _Interrupted:
    number: int


def supervise(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    *,
    num_cases: int,
    on_failure: Callable[[RankFailure], bool],
    poll_s: float = 0.05,
    start_s: float = START_S,
) -> int:
    """Run `python -m MODULE ARGUMENTS` on num_ranks local ranks; return the worst exit code.

    A case that hangs or loses a rank ends these ranks, and new ones begin at the next case.
    When on_failure is called no rank lives; rank 0 may have recorded the case itself, in its
    last seconds. It returns whether anything was lost, which makes the exit code 3. After
    SIGINT or SIGTERM every rank gets one SIGINT and 10 s; a second signal kills. Call from the
    main thread.
    """
    first, in_row, codes = 0, 0, [0]
    with catching() as signals:
        while True:
            workers = Workers(module, arguments, num_ranks, first=first)
            match end := _lead(workers, signals, poll_s, start_s):
                case _Interrupted(number):
                    return 128 + number
                case _Ended():
                    codes.append(end.code)
                    in_row, following = 0, end.restart_at
                case RankFailure():
                    codes.append(3 if on_failure(end) else 0)
                    finished_some = end.position is not None and end.position > first
                    in_row = 1 if finished_some else in_row + 1
                    following = None if end.position is None else end.position + 1
                    if following is None and not workers.working():
                        following = workers.restart_at  # they were leaving for new ranks
            if signals:
                return 128 + signals[0]
            if following is None or following >= num_cases:
                return worst(*codes)
            if in_row == _MAX_IN_ROW:
                _say(f"{in_row} cases in a row lost: {num_cases - following} left out")
                return worst(*codes)
            first = following


def _lead(
    workers: Workers, signals: list[int], poll_s: float, start_s: float
) -> _Ended | _Interrupted | RankFailure:
    """Watch the ranks to their end, and leave no process of them."""
    try:
        end = _watch(workers, signals, poll_s, start_s)
    finally:
        survivors = workers.kill()
        workers.store.remove()
    if survivors and isinstance(end, RankFailure):
        end.message += f"; SIGKILL did not end pid {', '.join(map(str, survivors))}"
        end.position = None  # new ranks would meet a device that is still held
    return end


def _watch(
    workers: Workers, signals: list[int], poll_s: float, start_s: float
) -> _Ended | _Interrupted | RankFailure:
    while True:
        workers.look()
        if signals:
            return _interrupted(workers, signals, poll_s)
        end = _normal_end(workers, poll_s) or _death(workers, poll_s) or _hang(workers, start_s)
        if end is not None:
            return end
        time.sleep(poll_s)


def _interrupted(workers: Workers, signals: list[int], poll_s: float) -> _Interrupted:
    """Ranks that have not come up have nothing to keep: they are killed at once."""
    if workers.beats:
        workers.send(signal.SIGINT, workers.working())
        end_s = time.monotonic() + INTERRUPT_S
        while len(signals) == 1 and workers.working() and time.monotonic() < end_s:
            time.sleep(poll_s)
            workers.look()
    return _Interrupted(signals[0])


def _normal_end(workers: Workers, poll_s: float) -> _Ended | None:
    """Rank 0 has reported its exit code: what the others do now changes nothing."""
    code = workers.exit_code
    if code is None:
        return None
    _wait_for_end(workers, _LINGER_S, poll_s)
    if late := workers.working():
        _say(f"{ranks_text(late)} still there {_LINGER_S:.0f} s after the end; killed")
    code = code if code in EXIT_CODES else 3
    return _Ended(code=code, restart_at=workers.restart_at if code in (0, 1, 3) else None)


def _death(workers: Workers, poll_s: float) -> _Ended | RankFailure | None:
    """A process ended that should not have. Rank 0 gets 3 s to write what it has."""
    died = {
        rank: how
        for rank in range(workers.num_ranks)
        if (how := _how_it_died(workers, rank)) is not None
    }
    if workers.exit_code is not None or not died:
        return None
    failure = failure_report.death(workers, died)
    _wait_for_end(workers, _GRACE_S, poll_s)
    only_left = all(how.startswith(_LEFT) for how in died.values())
    # Every rank may be leaving by the same exception, and rank 0 be the last.
    return (_normal_end(workers, poll_s) if only_left else None) or failure


_LEFT = "left early"


def _how_it_died(workers: Workers, rank: int) -> str | None:
    """None for a rank that lives, or has ended as it may."""
    code, beat = workers.return_code(rank), workers.beats.get(rank)
    if code is None:
        return None
    if beat is not None and beat.exit_code is not None:
        # Its work was done. A crash in the tear-down of torch or a driver is no loss.
        return f"{_LEFT}, with exit code {beat.exit_code}" if rank and beat.exit_code else None
    if code:
        return failure_report.how_it_ended(code)
    if rank == 0:
        return "ended without an exit code"
    return None if beat is None or beat.position is None else f"{_LEFT}, in a case"


def _hang(workers: Workers, start_s: float) -> RankFailure | None:
    now_s = time.monotonic()
    if now_s > workers.started_s + start_s:
        late = [rank for rank in range(workers.num_ranks) if rank not in workers.beats]
        if late:
            message = f"{ranks_text(late)} not up within {start_s:.3g} s"
            return RankFailure(
                position=None, cause="lost rank", ranks=tuple(late), message=message
            )
    overdue = [
        beat.rank
        for beat in workers.beats.values()
        if beat.deadline_s is not None
        and now_s > beat.deadline_s
        and workers.return_code(beat.rank) is None
    ]
    return failure_report.hang(workers, overdue) if overdue else None


def _wait_for_end(workers: Workers, limit_s: float, poll_s: float) -> None:
    end_s = time.monotonic() + limit_s
    workers.look()
    while workers.working() and time.monotonic() < end_s:
        time.sleep(poll_s)
        workers.look()


def _say(text: str) -> None:
    sys.stderr.write(f"stepmark: {text}\n")
    sys.stderr.flush()
