"""What can be learned of a set of ranks that is lost, before it is killed."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stepmark.launch import letters
from stepmark.launch.crew import Crew
from stepmark.launch.letters import Beat

_STACKS_S = 1.0
_FLIGHT_S = 2.0


@dataclass(kw_only=True)
class Lost:
    """The ranks did not finish a case."""

    position: int | None  # None: in set-up or between cases
    cause: str  # "timeout" or "lost rank", as Failed has it
    ranks: tuple[int, ...]  # the suspects, or those that died
    message: str  # one line
    stacks: str = ""  # Python stacks of all threads, by rank
    flight: dict[int, str] = field(default_factory=dict)  # rank: flight recorder as JSON


def position_of(crew: Crew) -> int | None:
    """The case at which a crew is. Rank 0 records, so what it works on is not recorded yet."""
    working = {r: b.position for r, b in crew.beats.items() if b.position is not None}
    return working.get(0, min(working.values(), default=None))


def hang(crew: Crew, overdue: list[int]) -> Lost:
    """Ask the ranks for their stacks and flight recorders; say who waits and who is waited for.

    Takes up to 3 s, where ranks do not answer.
    """
    position = position_of(crew)
    limit_s = min(_limit_s(crew, rank) for rank in overdue)
    doing = {rank: _doing(crew, rank, position) for rank in range(crew.num_ranks)}
    words = _told(crew, doing)
    if suspects := _suspects(doing, position):
        words.append(f"waited for: {ranks_text(suspects)}")
    late = {doing[rank] for rank in overdue}  # the first past its limit is not alone in it
    silent = (_NOT_UP, *_STUCK.values())
    answering = [rank for rank in crew.working() if doing[rank] not in silent]
    return Lost(
        position=position,
        cause="timeout",
        ranks=tuple(suspects or (r for r in doing if doing[r] in late)),
        message=f"not done within {limit_s:.3g} s: {'; '.join(words)}",
        stacks=_stacks(crew, doing, answering),
        flight=_flight(crew, answering),
    )


def death(crew: Crew, died: dict[int, str]) -> Lost:
    """died: rank and how its process ended."""
    words = [f"rank {rank} (pid {crew.ranks[rank].pid}) {how}" for rank, how in died.items()]
    return Lost(
        position=position_of(crew),
        cause="lost rank",
        ranks=tuple(died),
        message="; ".join(words),
    )


def how_it_ended(wait_status: int) -> str:
    """In words, of a process that is not there any more."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        name = next((one.name for one in signal.Signals if one == number), "real time")
        return f"was killed by signal {number} ({name})"
    return f"ended with exit code {os.WEXITSTATUS(wait_status)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """rank 3; ranks 0-2, 5."""
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
    "T": "stopped (SIGSTOP)",
    "t": "stopped (by a debugger)",
    "D": "asleep in the kernel (state D)",
}


def _doing(crew: Crew, rank: int, position: int | None) -> str:
    process, beat = crew.ranks.get(rank), crew.beats.get(rank)
    if process is None or beat is None:
        return _NOT_UP
    if crew.is_over(rank):
        return _ENDED
    return _STUCK.get(process.state) or _where(beat, position)


def _where(beat: Beat, position: int | None) -> str:
    if beat.position is None or position is None:
        return "closed" if beat.closed else "in set-up or between cases"
    behind = position - beat.position
    if behind > 0:
        return f"{behind} case{'s' if behind > 1 else ''} behind"
    return _HERE if behind == 0 else _AHEAD


def _suspects(doing: dict[int, str], position: int | None) -> list[int]:
    """Ranks for which the others wait: those that cannot run, else those not in the case."""
    if stuck := [rank for rank, what in doing.items() if what in _STUCK.values()]:
        return stuck
    if position is None:
        return []
    return [rank for rank, what in doing.items() if what not in (_HERE, _AHEAD)]


def _told(crew: Crew, doing: dict[int, str]) -> list[str]:
    """Ranks that do the same are told of together, with the longest of their times."""
    groups: dict[str, list[int]] = {}
    for rank, what in doing.items():
        groups.setdefault(what, []).append(rank)
    now_s = time.monotonic()
    words = []
    for what, ranks in groups.items():
        times_s = [now_s - crew.beats[rank].since_s for rank in ranks if rank in crew.beats]
        silent = what == _ENDED or what in _STUCK.values()
        form = ", last heard of {:.1f} s ago" if silent else " for {:.1f} s"
        words.append(
            f"{ranks_text(ranks)} {what}{form.format(max(times_s)) if times_s else ''}"
        )
    return words


def _limit_s(crew: Crew, rank: int) -> float:
    beat = crew.beats[rank]
    return (beat.deadline_s or beat.since_s) - beat.since_s


def _stacks(crew: Crew, doing: dict[int, str], answering: list[int]) -> str:
    """faulthandler answers in the signal handler, whatever the main thread waits for in C."""
    names = {rank: f"{letters.STACK}-{rank}" for rank in answering}
    crew.send(signal.SIGUSR1, answering)
    _wait(lambda: all(crew.letters.read(name) for name in names.values()), _STACKS_S)
    time.sleep(0.1)  # what has begun to be written is soon written
    found = {rank: crew.letters.read(name) for rank, name in names.items()}
    missing = {rank: f"no stack: {what}\n" for rank, what in doing.items()}
    texts = [f"rank {rank}:\n{found.get(rank) or missing[rank]}" for rank in doing]
    return "\n".join(texts)


def _flight(crew: Crew, answering: list[int]) -> dict[int, str]:
    """The ranks also end their communicators then, so that no kernel spins on when killed."""
    crew.letters.leave(letters.ABORT, "")
    names = [f"{letters.GAVE_UP}-{rank}" for rank in answering]
    _wait(lambda: all(crew.letters.has(name) for name in names), _FLIGHT_S)
    texts = {r: crew.letters.read(f"{letters.FLIGHT}-{r}.json") for r in range(crew.num_ranks)}
    return {rank: text for rank, text in texts.items() if text}


def _wait(is_done: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not is_done() and time.monotonic() < end_s:
        time.sleep(0.02)
