"""The parent of the ranks: sees them hang or die, kills them, goes on with new ones."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.core.errors import EXIT_CODES, worst
from stepmark.launch import evidence
from stepmark.launch.crew import Crew
from stepmark.launch.evidence import Lost
from stepmark.launch.signals import catching

__all__ = ["Lost", "supervise"]

START_S = 120.0  # until the first beat of every rank: python and its imports on a slow disk
_GRACE_S = 3.0  # after a death: rank 0 may be writing
_LINGER_S = 10.0  # after rank 0 has left its exit code
_INTERRUPT_S = 10.0  # to store what is finished after Ctrl-C
_MAX_IN_ROW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    code: int
    goes_on_at: int | None


@dataclass(frozen=True, slots=True)
class _Interrupted:
    number: int


def supervise(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    num_cases: int,
    on_lost: Callable[[Lost, Path | None], None],
    on_run: Callable[[Path], None] | None = None,
    module: str = "stepmark",
    poll_s: float = 0.1,
    start_s: float = START_S,
    going_on: Path | None = None,
) -> int:
    """Run `python -m MODULE ARGUMENTS` on num_ranks local ranks; the worst exit code of all.

    A case that hangs or loses a rank ends these ranks; on_lost gets it with the run directory,
    if rank 0 told of one, and new ranks begin at the next case. When on_lost is called no rank
    lives; rank 0 may have recorded the case itself, in its last seconds. on_run gets the run
    directory once, when the ranks that wrote it have ended; going_on is one that there is.
    After SIGINT or SIGTERM every rank gets one SIGINT and 10 s; a second one kills. Call from
    the main thread.
    """
    first, in_row, codes = 0, 0, [0]
    run = going_on
    with catching() as signals:
        while True:
            crew = Crew(arguments, num_ranks, module=module, first=first, run=run)
            end, found = _lead(crew, signals, poll_s, start_s)
            if on_run and found and found != run:
                on_run(found)
            run = found
            match end:
                case _Interrupted(number):
                    return 128 + number
                case _Ended():
                    codes.append(end.code)
                    in_row, following = 0, end.goes_on_at
                case Lost():
                    on_lost(end, run)
                    codes.append(3)
                    finished_some = end.position is not None and end.position > first
                    in_row = 1 if finished_some else in_row + 1
                    following = None if end.position is None else end.position + 1
            if signals:
                return 128 + signals[0]
            if following is None or following >= num_cases:
                return worst(*codes)
            if in_row == _MAX_IN_ROW:
                _say(f"{in_row} cases in a row lost: {num_cases - following} left out")
                return worst(*codes)
            first = following


def _lead(
    crew: Crew, signals: list[int], poll_s: float, start_s: float
) -> tuple[_Ended | _Interrupted | Lost, Path | None]:
    """Watch a crew to its end, and leave no process of it. The second: its run directory."""
    try:
        end = _watch(crew, signals, poll_s, start_s)
    finally:
        survivors = crew.kill()
        run = crew.run
        crew.letters.remove()
    if survivors and isinstance(end, Lost):
        pids = ", ".join(str(process.pid) for process in survivors)
        end.message += f"; SIGKILL did not end pid {pids}"
        end.position = None  # new ranks would meet a device that is still held
    return end, run


def _watch(
    crew: Crew, signals: list[int], poll_s: float, start_s: float
) -> _Ended | _Interrupted | Lost:
    while True:
        crew.look()
        if signals:
            return _interrupted(crew, signals, poll_s)
        end = _normal_end(crew, poll_s) or _death(crew, poll_s) or _hang(crew, start_s)
        if end is not None:
            return end
        time.sleep(poll_s)


def _interrupted(crew: Crew, signals: list[int], poll_s: float) -> _Interrupted:
    """Ranks that have not come up have nothing to keep: they are killed at once."""
    if crew.beats:
        crew.send(signal.SIGINT, crew.working())
        end_s = time.monotonic() + _INTERRUPT_S
        while len(signals) == 1 and crew.working() and time.monotonic() < end_s:
            time.sleep(poll_s)
            crew.look()
    return _Interrupted(signals[0])


def _normal_end(crew: Crew, poll_s: float) -> _Ended | None:
    """Rank 0 has left its exit code: what the others do now changes nothing."""
    code = crew.exit_code
    if code is None:
        return None
    _wait_for_end(crew, _LINGER_S, poll_s)
    if late := crew.working():
        _say(f"{evidence.ranks_text(late)} still there {_LINGER_S:.0f} s after the end; killed")
    code = code if code in EXIT_CODES else 3
    return _Ended(code=code, goes_on_at=crew.goes_on_at if code in (0, 1, 3) else None)


def _death(crew: Crew, poll_s: float) -> _Ended | Lost | None:
    """A process ended that should not have. Rank 0 gets 3 s to write what it has."""
    died = {rank: how for rank in crew.ranks if (how := _how_it_died(crew, rank))}
    if crew.exit_code is not None:
        return None  # they ended after that; the next look sees so
    if crew.agent.poll() is not None or not died:
        return _without_rank(crew)  # without a launcher, the ranks' deaths follow from its own
    lost = evidence.death(crew, died)
    _wait_for_end(crew, _GRACE_S, poll_s)
    only_left = all(how == _LEFT for how in died.values())
    # Every rank may be leaving by the same exception, and rank 0 be the last.
    return (_normal_end(crew, poll_s) if only_left else None) or lost


_LEFT = "ended in the middle of a case"


def _how_it_died(crew: Crew, rank: int) -> str | None:
    """None for a rank that lives, or has ended as it may."""
    if not crew.is_over(rank):
        return None
    if rank in crew.gone:
        return "died"  # the launcher is gone too, so nobody knows how
    beat, status = crew.beats.get(rank), crew.ranks[rank].wait_status
    at_rest = beat is None or beat.position is None
    if status:
        # A crash in the tear-down of torch or a driver, after all work, is no loss.
        crashed_at_exit = rank and at_rest and beat and beat.closed and status < 0x100
        return None if crashed_at_exit else evidence.how_it_ended(status)
    if rank == 0:
        return "ended without an exit code"
    return None if at_rest else _LEFT


def _without_rank(crew: Crew) -> Lost | None:
    """A launcher that ended, or a rank that failed before it could say which one it is."""
    if (code := crew.agent.poll()) is not None:
        message = f"the launcher (torch.distributed.run) ended with code {code}"
    elif failed := crew.stillborn():
        how = {evidence.how_it_ended(process.wait_status) for process in failed}
        message = f"a rank did not come up: it {', '.join(sorted(how))}"
    else:
        return None
    return Lost(
        position=evidence.position_of(crew), cause="lost rank", ranks=(), message=message
    )


def _hang(crew: Crew, start_s: float) -> Lost | None:
    now_s = time.monotonic()
    if now_s > crew.started_s + start_s:
        late = [rank for rank in range(crew.num_ranks) if rank not in crew.beats]
        if late:
            message = f"{evidence.ranks_text(late)} not up within {start_s:.3g} s"
            return Lost(position=None, cause="lost rank", ranks=tuple(late), message=message)
    overdue = [
        beat.rank
        for beat in crew.beats.values()
        if beat.deadline_s is not None
        and now_s > beat.deadline_s
        and beat.rank in crew.ranks
        and not crew.is_over(beat.rank)
    ]
    return evidence.hang(crew, overdue) if overdue else None


def _wait_for_end(crew: Crew, limit_s: float, poll_s: float) -> None:
    end_s = time.monotonic() + limit_s
    crew.look()
    while crew.working() and time.monotonic() < end_s:
        time.sleep(poll_s)
        crew.look()


def _say(text: str) -> None:
    sys.stderr.write(f"stepmark: {text}\n")
    sys.stderr.flush()
