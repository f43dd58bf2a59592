"""Supervise ranks: detect hangs and deaths, kill the ranks, and continue with new ones."""

import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from stepmark.ground.errors import EXIT_CODES, worst
from stepmark.ground.signals import catching
from stepmark.ground.units import ranks_text
from stepmark.ground.waiting import wait_until
from stepmark.measuring.heartbeat import SET_UP_S
from stepmark.measuring.leader import JoinInterrupted, LostHostError
from stepmark.measuring.workers import Workers

_POLL_S = 0.05


@dataclass(kw_only=True)
class RankFailure:
    """Failure of the ranks to finish a case."""

    position: int | None  # None: in set-up or between cases
    cause: str  # "timeout" or "lost rank", one of Failed's
    ranks: tuple[int, ...]  # the suspects, or those that died
    message: str  # one line
    stacks: str = ""  # Python stacks of all threads, by rank
    flight: dict[int, str] = field(default_factory=dict)  # rank: flight recorder as JSON
    is_final: bool = False  # new ranks cannot be started
    restart_at: int | None = None  # where the ranks had requested new ones


def _position_of(workers: Workers) -> int | None:
    """Return the present case. It is rank 0's, which records it at its end."""
    working = {r: b.position for r, b in workers.beats.items() if b.position is not None}
    return working.get(0, min(working.values(), default=None))


def _hang_report(workers: Workers, overdue: list[int]) -> RankFailure:
    """Collect stacks and flight recorders of the ranks, and name the ranks that block others.

    It takes up to 3 s where ranks do not answer, and 5 s per host that does not.
    """
    position = _position_of(workers)
    beats = [workers.beats[rank] for rank in overdue]
    limit_s = min((beat.deadline_s or beat.since_s) - beat.since_s for beat in beats)
    activity = {rank: _activity(workers, rank, position) for rank in range(workers.num_ranks)}
    late = {activity[rank] for rank in overdue}  # others may be as late as the first
    silent = (_NOT_UP, *_STUCK.values())
    answering = [rank for rank in workers.working() if activity[rank] not in silent]
    stacks, flight = workers.diagnosis(answering)
    texts = {
        rank: stacks.get(rank) or f"no stack: {state}\n" for rank, state in activity.items()
    }
    words = _describe(workers, activity)
    if suspects := _suspects(activity, position) or not_waiting(stacks):
        words.append(f"the others wait for {ranks_text(suspects)}")
    return RankFailure(
        position=position,
        cause="timeout",
        ranks=tuple(suspects or (r for r in activity if activity[r] in late)),
        message=f"not done within {limit_s:.3g} s: {'; '.join(words)}",
        stacks="\n".join(f"rank {rank}:\n{text}" for rank, text in texts.items()),
        flight=flight,
    )


_HERE = "in this case"
_AHEAD = "ahead of this case"
_ENDED = "ended"
_NOT_UP = "not up"
_STUCK = {  # such ranks cannot answer, and most likely block the others
    psutil.STATUS_STOPPED: "stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "stopped (by a debugger)",
    psutil.STATUS_DISK_SLEEP: "asleep in the kernel (state D)",
}


def _activity(workers: Workers, rank: int, position: int | None) -> str:
    beat = workers.beats.get(rank)
    if beat is None:
        return _NOT_UP
    if workers.return_code(rank) is not None:
        return _ENDED
    if stuck := _STUCK.get(workers.state(rank)):
        return stuck
    if beat.position is None or position is None:
        return "closed" if beat.exit_code is not None else "in set-up or between cases"
    behind = position - beat.position
    if behind > 0:
        return f"{behind} case{'s' if behind > 1 else ''} behind"
    return _HERE if behind == 0 else _AHEAD


def _suspects(activity: dict[int, str], position: int | None) -> list[int]:
    """Return the ranks that block the others: stuck ones, else those not in the case."""
    if stuck := [rank for rank, state in activity.items() if state in _STUCK.values()]:
        return stuck
    if position is None:
        return []
    return [rank for rank, state in activity.items() if state not in (_HERE, _AHEAD)]


# As faulthandler prints it: the function in which a rank waits until all have joined.
_WAITS = re.compile(r'/stepmark/measuring/ranks\.py", line \d+ in _reach$', re.MULTILINE)


def not_waiting(stacks: dict[int, str]) -> list[int]:
    """Return the ranks that do not wait for others, if others do: e.g. those of a stuck GPU."""
    waiting = [rank for rank, text in stacks.items() if _WAITS.search(text)]
    return [rank for rank in stacks if rank not in waiting] if waiting else []


def _describe(workers: Workers, activity: dict[int, str]) -> list[str]:
    """Return a text per activity, with its ranks and the longest of their times."""
    groups: dict[str, list[int]] = {}
    for rank, state in activity.items():
        groups.setdefault(state, []).append(rank)
    now_s = time.monotonic()
    words = []
    for state, ranks in groups.items():
        times_s = [
            now_s - workers.beats[rank].since_s for rank in ranks if rank in workers.beats
        ]
        silent = state == _ENDED or state in _STUCK.values()
        form = ", last heard of {:.1f} s ago" if silent else " for {:.1f} s"
        words.append(
            f"{ranks_text(ranks)} {state}{form.format(max(times_s)) if times_s else ''}"
        )
    return words


_GRACE_S = 3.0  # after a death: rank 0 may be writing its record
_LINGER_S = 10.0  # after rank 0 has reported its exit code
INTERRUPT_S = 10.0  # to store finished cases after Ctrl-C
# After SIGTERM, for the present case. With INTERRUPT_S less than Slurm's usual KillWait, 30 s.
FINISH_S = 15.0
_MAX_IN_ROW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    code: int
    restart_at: int | None


@dataclass(frozen=True, slots=True)
class _Interrupted:
    number: int


def supervise(
    entry: str,
    plan: Path,
    arguments: Sequence[str],
    num_ranks: int,
    *,
    num_cases: int,
    on_failure: Callable[[RankFailure], bool],
    start_s: float = SET_UP_S,
) -> int:
    """Run `python -m MODULE PLAN ARGUMENTS` on num_ranks ranks; return the worst exit code.

    entry: of ENTRIES, which has the module.

    A case that hangs or loses a rank ends these ranks, and new ones begin at the next case.
    When on_failure is called no rank is alive; rank 0 may have recorded the case itself in its
    last seconds. It returns whether anything was lost, which makes the exit code 3. After
    SIGINT every rank gets one SIGINT and 10 s, after SIGTERM only once the present case has had
    15 s to end; a second signal kills. start_s: limit until the first beat of every rank.
    """
    first = 0
    in_row = 0
    codes = [0]
    with catching() as signals:
        while True:
            start = partial(Workers, entry, plan, arguments, num_ranks, first=first)
            match end := _lead(start, signals, start_s, is_first=not first):
                case _Interrupted(number):
                    return 128 + number
                case _Ended():
                    codes.append(end.code)
                    in_row = 0
                    following = end.restart_at
                case RankFailure():
                    codes.append(3 if on_failure(end) else 0)
                    finished_some = end.position is not None and end.position > first
                    in_row = 1 if finished_some else in_row + 1
                    following = end.restart_at if end.position is None else end.position + 1
            if signals:
                return 128 + signals[0]
            if isinstance(end, RankFailure) and end.is_final:
                num_left = num_cases - (first if following is None else following)
                _say_rest(num_left)
                return worst(*codes, 3 if num_left else 0)
            if following is None or following >= num_cases:
                return worst(*codes)
            if in_row == _MAX_IN_ROW:
                _say_rest(num_cases - following, f"{in_row} cases in a row lost: ")
                return worst(*codes, 3)
            first = following


def _lead(
    start: Callable[..., Workers], signals: list[int], start_s: float, *, is_first: bool
) -> _Ended | _Interrupted | RankFailure:
    """Start ranks, watch them to their end, and kill all that remain.

    Raises LostHostError where the first ranks cannot be started.
    """
    try:
        workers = start(signals=signals)
    except JoinInterrupted:
        return _Interrupted(signals[0] if signals else signal.SIGTERM)
    except LostHostError as error:
        if is_first:
            raise
        return RankFailure(
            position=None, cause="lost rank", ranks=(), message=str(error), is_final=True
        )
    try:
        end = _watch(workers, signals, start_s)
    finally:
        survivors = workers.kill()
    if isinstance(end, RankFailure):
        if not workers.working():
            end.restart_at = workers.restart_at
        if survivors:
            end.message += f"; SIGKILL did not end pid {', '.join(map(str, survivors))}"
            end.is_final = True  # for new ranks the device would still be in use
    return end


def _watch(
    workers: Workers, signals: list[int], start_s: float
) -> _Ended | _Interrupted | RankFailure:
    while True:
        workers.poll()
        if workers.interrupted and not signals:
            signals.append(workers.interrupted)
        if signals:
            return _interrupted(workers, signals)
        end = _normal_end(workers) or _cause_of_death(workers) or _hang(workers, start_s)
        if end is not None:
            return end
        time.sleep(_POLL_S)


def _interrupted(workers: Workers, signals: list[int]) -> _Interrupted:
    """Interrupt the ranks and wait for their end, unless none has started.

    SIGTERM announces the end of the job's time: the present case may still be done.
    """
    if workers.beats and signals[0] == signal.SIGTERM:
        workers.stop()
        _wait_for_end(workers, FINISH_S, signals)
    if workers.beats and workers.working():
        workers.send(signal.SIGINT, workers.working())
        _wait_for_end(workers, INTERRUPT_S, signals)
    return _Interrupted(signals[0])


def _normal_end(workers: Workers) -> _Ended | None:
    """Return the end after rank 0 has reported its exit code; other ranks do not change it."""
    code = workers.exit_code
    if code is None:
        return None
    _wait_for_end(workers, _LINGER_S)
    if late := workers.working():
        _warn(f"{ranks_text(late)} still there {_LINGER_S:.0f} s after the end; killed")
    code = code if code in EXIT_CODES else 3
    return _Ended(code=code, restart_at=workers.restart_at if code in (0, 1, 3) else None)


def _cause_of_death(workers: Workers) -> _Ended | RankFailure | None:
    """Return the failure of processes that died. Rank 0 gets 3 s to write its record."""
    died = {
        rank: how
        for rank in range(workers.num_ranks)
        if (how := _how_it_died(workers, rank)) is not None
    }
    if workers.exit_code is not None or not (died or workers.lost_hosts()):
        return None
    words = [f"rank {rank} ({workers.process(rank)}) {how}" for rank, how in died.items()]
    lost = workers.lost_ranks()
    words += [f"host {name} is lost: {why}" for name, why in workers.lost_hosts().items()]
    failure = RankFailure(
        position=_position_of(workers),
        cause="lost rank",
        ranks=tuple(sorted({*died, *lost})),
        message="; ".join(words),
        is_final=bool(lost),
    )
    _wait_for_end(workers, _GRACE_S)
    only_left = not lost and all(how.startswith(_LEFT) for how in died.values())
    # Every rank may be leaving by the same exception, with rank 0 as the last.
    return (_normal_end(workers) if only_left else None) or failure


_LEFT = "left early"


def _how_it_died(workers: Workers, rank: int) -> str | None:
    """Return the cause of a death; None for a rank that lives or has ended normally."""
    code = workers.return_code(rank)
    beat = workers.beats.get(rank)
    if code is None:
        return None
    if beat is not None and beat.exit_code is not None:
        # Its work was done: a crash in the tear-down of torch or a driver loses nothing.
        return f"{_LEFT}, with exit code {beat.exit_code}" if rank and beat.exit_code else None
    if code < 0:
        name = next((s.name for s in signal.Signals if s == -code), "real time")
        return f"was killed by signal {-code} ({name})"
    if code:
        return f"ended with exit code {code}"
    if rank == 0:
        return "ended without an exit code"
    return None if beat is None or beat.position is None else f"{_LEFT}, in a case"


def _hang(workers: Workers, start_s: float) -> RankFailure | None:
    now_s = time.monotonic()
    if now_s > workers.started_s + start_s:
        late = [rank for rank in range(workers.num_ranks) if rank not in workers.beats]
        if late:
            return RankFailure(
                position=None,
                cause="lost rank",
                ranks=tuple(late),
                message=f"{ranks_text(late)} not up within {start_s:.3g} s",
            )
    overdue = [
        beat.rank
        for beat in workers.beats.values()
        if beat.deadline_s is not None
        and now_s > beat.deadline_s
        and workers.return_code(beat.rank) is None
    ]
    return _hang_report(workers, overdue) if overdue else None


def _wait_for_end(workers: Workers, limit_s: float, signals: Sequence[int] = ()) -> None:
    """Wait for the end of the ranks, or a second signal."""

    def has_ended() -> bool:
        workers.poll()
        return not workers.working() or len(signals) > 1

    wait_until(has_ended, limit_s)


def _say_rest(count: int, reason: str = "") -> None:
    if count:
        _warn(f"{reason}{count} case{'s' if count > 1 else ''} left out")


def _warn(text: str) -> None:
    sys.stderr.write(f"stepmark: {text}\n")
    sys.stderr.flush()
