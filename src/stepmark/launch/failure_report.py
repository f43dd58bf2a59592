"""The report on ranks that hang or died: what can be learned of them before they are killed."""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

from stepmark.launch import heartbeat_store
from stepmark.launch.heartbeat_store import Beat
from stepmark.launch.workers import Workers

_STACKS_S = 1.0
_FLIGHT_S = 2.0


@dataclass(kw_only=True)
class RankFailure:
    """The ranks did not finish a case."""

    position: int | None  # None: in set-up or between cases
    cause: str  # "timeout" or "lost rank", as Failed has it
    ranks: tuple[int, ...]  # the suspects, or those that died
    message: str  # one line
    stacks: str = ""  # Python stacks of all threads, by rank
    flight: dict[int, str] = field(default_factory=dict)  # rank: flight recorder as JSON


def position_of(workers: Workers) -> int | None:
    """Return the case that is worked on. Rank 0 records, so its case is not recorded yet."""
    working = {r: b.position for r, b in workers.beats.items() if b.position is not None}
    return working.get(0, min(working.values(), default=None))


def hang(workers: Workers, overdue: list[int]) -> RankFailure:
    """Ask the ranks for their stacks and flight recorders; say which ranks the others wait for.

    Takes up to 3 s, where ranks do not answer.
    """
    position = position_of(workers)
    limit_s = min(_limit_s(workers.beats[rank]) for rank in overdue)
    activity = {rank: _activity(workers, rank, position) for rank in range(workers.num_ranks)}
    words = _described(workers, activity)
    if suspects := _suspects(activity, position):
        words.append(f"the others wait for {ranks_text(suspects)}")
    late = {activity[rank] for rank in overdue}  # the first past its limit is not alone in it
    silent = (_NOT_UP, *_STUCK.values())
    answering = [rank for rank in workers.working() if activity[rank] not in silent]
    return RankFailure(
        position=position,
        cause="timeout",
        ranks=tuple(suspects or (r for r in activity if activity[r] in late)),
        message=f"not done within {limit_s:.3g} s: {'; '.join(words)}",
        stacks=_stacks(workers, activity, answering),
        flight=_flight(workers, answering),
    )


def death(workers: Workers, died: dict[int, str]) -> RankFailure:
    """died: rank and how its process ended."""
    words = [f"rank {rank} (pid {workers.pid(rank)}) {how}" for rank, how in died.items()]
    return RankFailure(
        position=position_of(workers),
        cause="lost rank",
        ranks=tuple(died),
        message="; ".join(words),
    )


def how_it_ended(return_code: int) -> str:
    """Return in words what Popen.returncode says."""
    if return_code < 0:
        name = next((one.name for one in signal.Signals if one == -return_code), "real time")
        return f"was killed by signal {-return_code} ({name})"
    return f"ended with exit code {return_code}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return e.g. "rank 3" or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    one = len(spans) == 1 and len(spans[0]) == 1
    return f"rank{'' if one else 's'} {', '.join(texts)}"


_HERE, _AHEAD, _ENDED, _NOT_UP = "in this case", "ahead of this case", "ended", "not up"
_STUCK = {  # they cannot answer, and most likely the others wait for them
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
    return _STUCK.get(workers.state(rank)) or _where(beat, position)


def _where(beat: Beat, position: int | None) -> str:
    if beat.position is None or position is None:
        return "closed" if beat.exit_code is not None else "in set-up or between cases"
    behind = position - beat.position
    if behind > 0:
        return f"{behind} case{'s' if behind > 1 else ''} behind"
    return _HERE if behind == 0 else _AHEAD


def _suspects(activity: dict[int, str], position: int | None) -> list[int]:
    """Return the ranks for which the others wait: stuck ones, else those not in the case."""
    if stuck := [rank for rank, what in activity.items() if what in _STUCK.values()]:
        return stuck
    if position is None:
        return []
    return [rank for rank, what in activity.items() if what not in (_HERE, _AHEAD)]


def _described(workers: Workers, activity: dict[int, str]) -> list[str]:
    """Name ranks that do the same together, with the longest of their times."""
    groups: dict[str, list[int]] = {}
    for rank, what in activity.items():
        groups.setdefault(what, []).append(rank)
    now_s = time.monotonic()
    words = []
    for what, ranks in groups.items():
        times_s = [
            now_s - workers.beats[rank].since_s for rank in ranks if rank in workers.beats
        ]
        silent = what == _ENDED or what in _STUCK.values()
        form = ", last heard of {:.1f} s ago" if silent else " for {:.1f} s"
        words.append(
            f"{ranks_text(ranks)} {what}{form.format(max(times_s)) if times_s else ''}"
        )
    return words


def _limit_s(beat: Beat) -> float:
    return (beat.deadline_s or beat.since_s) - beat.since_s


def _stacks(workers: Workers, activity: dict[int, str], answering: list[int]) -> str:
    """faulthandler answers in the signal handler, whatever the main thread waits for in C."""
    store = workers.store
    names = {rank: f"{heartbeat_store.STACK}-{rank}" for rank in answering}
    workers.send(signal.SIGUSR1, answering)
    _wait(lambda: all(store.read(name) for name in names.values()), _STACKS_S)
    time.sleep(0.1)  # what has begun to be written is soon written
    stacks = {rank: store.read(name) for rank, name in names.items()}
    missing = {rank: f"no stack: {what}\n" for rank, what in activity.items()}
    texts = [f"rank {rank}:\n{stacks.get(rank) or missing[rank]}" for rank in activity]
    return "\n".join(texts)


def _flight(workers: Workers, answering: list[int]) -> dict[int, str]:
    """The ranks also end their communicators then, so that no kernel spins on when killed."""
    store = workers.store
    store.write(heartbeat_store.ABORT, "")
    names = [f"{heartbeat_store.GAVE_UP}-{rank}" for rank in answering]
    _wait(lambda: all(store.has(name) for name in names), _FLIGHT_S)
    texts = {
        rank: store.read(f"{heartbeat_store.FLIGHT}-{rank}.json")
        for rank in range(workers.num_ranks)
    }
    return {rank: text for rank, text in texts.items() if text}


def _wait(is_done: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not is_done() and time.monotonic() < end_s:
        time.sleep(0.02)
