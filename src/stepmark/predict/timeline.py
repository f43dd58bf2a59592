"""Simulation of one steady training step of a workload.

Steps are simulated one after the other until one repeats the step before. If none does, since
contention lets steps alternate where host and device are equally fast, the median one counts.
Of many micro-batches, a few are simulated until their steady state repeats; each of the others
then adds as much as one more does.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stepmark.core.errors import ConfigError
from stepmark.core.ledger import (
    CONTENTION,
    RECOMPUTED,
    TRANSFER,
    WAITING,
    Event,
    Group,
    Idle,
    Ledger,
    Work,
    ledger,
)
from stepmark.core.prediction import Span, Timeline
from stepmark.core.step_cost import Costs
from stepmark.core.workload import Workload
from stepmark.core.workload_stages import num_steady, shortened, steady_run
from stepmark.predict.free_steps import FreeSteps, is_serial, seconds_of
from stepmark.predict.program import Compiler, Program
from stepmark.predict.spans import spans
from stepmark.predict.step_events import MOST_STEPS, Lane, Simulator, Step
from stepmark.predict.works import Call, Clock

_REPEATS = 4  # of a steady state that are simulated first
_SAME = 1e-9  # of a step: times that differ less are equal
_NS = 1e9


def simulate(workload: Workload, costs: Costs, clock: Clock | None = None) -> Timeline:
    """Return a steady step of all pipeline stages, one rank of each.

    clock: factor on the time of computation by kind of work; missing: 1. Raises ConfigError for
    a workload whose stages wait for each other.
    """
    workload.check()
    total, kept = num_steady(workload), _REPEATS
    while True:
        few = shortened(workload, kept) if kept < total else workload
        less = max(0, total - kept)

        def programs(few: Workload = few, less: int = less, *, merges: bool) -> list[Program]:
            compiler = Compiler(few, costs, clock or {}, merges=merges)
            return [
                compiler.program(stage, steady_run(few, stage) if less else None)
                for stage in range(len(few.stages))
            ]

        free = _steady(few, _ahead(few, costs, programs), less)
        if free:
            host_s = [free.host_s(lane) for lane in free.lanes]
            if max(host_s) <= free.step_s:
                return free.timeline(is_host_bound=False)
            # Faster hosts are ahead of their device.
            slowest = [stage for stage, time in enumerate(host_s) if time >= max(host_s)]
            slow = Simulator(programs(merges=False), costs.comm_slowdown, slowest)
            held = _steady(few, slow, less)
            if held and held.follows_host():
                return held.timeline(is_host_bound=True)
        kept *= 2


def _ahead(
    workload: Workload, costs: Costs, programs: Callable[..., list[Program]]
) -> Simulator | FreeSteps:
    """Return a simulation with hosts that are ahead of their devices."""
    if costs.comm_slowdown == 1 and all(x == 1 for x in costs.compute_slowdown.values()):
        merged = programs(merges=True)
        _check(workload, merged)
        free = FreeSteps(merged)
        if is_serial(merged) and free.run(1):
            return free
    plain = programs(merges=False)
    _check(workload, plain)
    return Simulator(plain, costs.comm_slowdown)


def _check(workload: Workload, programs: Sequence[Program]) -> None:
    for stage, program in enumerate(programs):
        if not program.queues[0]:
            allowed = (
                f'one with operations on the stream "compute" in every stage (not in {stage})'
            )
            raise ConfigError("workload", workload.name, allowed)


def _steady(
    workload: Workload, simulator: Simulator | FreeSteps, less: int
) -> "_Steady | None":
    """Simulate until a step repeats; None: its micro-batches do not yet."""
    lanes = simulator.lanes
    for number in range(MOST_STEPS):
        if not simulator.run(number + 1):
            raise ConfigError("workload", workload.name, _deadlock(lanes))
        is_alone = len(lanes) == 1 and not lanes[0].has_host and not lanes[0].steps[0].num_left
        if (number == 0 and is_alone) or (number and _is_repeated(lanes, number)):
            period_s = _period(lanes, number) if less else 0.0
            return None if period_s is None else _found(simulator, number, less, period_s)
    if less:
        return None
    ends = lanes[0].ends
    later = range(MOST_STEPS // 2, MOST_STEPS)
    durations = [lane.ends[-1] - lane.ends[later[0]] for lane in lanes]
    if max(durations) - min(durations) > min(durations) / len(later):
        allowed = "one whose stages communicate in each step"
        raise ConfigError("workload", workload.name, allowed)
    middle = sorted(later, key=lambda number: ends[number] - ends[number - 1])[len(later) // 2]
    return _found(simulator, middle, 0, 0.0)


def _found(
    simulator: Simulator | FreeSteps, number: int, less: int, period_s: float
) -> "_Steady":
    if isinstance(simulator, FreeSteps):
        simulator.record(number)
    return _Steady(simulator, number, less, period_s)


def _deadlock(lanes: Sequence[Lane]) -> str:
    waiting = []
    for lane in lanes:
        for stream in lane.streams:
            if stream.step is not None and stream.place < len(stream.items):
                work = lane.program.works[stream.items[stream.place]]
                if isinstance(work, Call):
                    op = work.ops[0]
                    waiting.append(f"stage {lane.stage} for {op.collective} ({op.module})")
    return f"one whose stages do not wait for each other: {', '.join(waiting[:3])}"


def _is_repeated(lanes: Sequence[Lane], number: int) -> bool:
    """Return whether a step is the one before, later by the same time in all stages."""
    step_s = lanes[0].ends[number] - lanes[0].ends[number - 1]
    return all(
        lane.unfinished[number] == lane.unfinished[number - 1]
        and abs(lane.ends[number] - lane.ends[number - 1] - step_s) <= _SAME * step_s
        and _is_later(
            lane.steps[number - 1],
            lane.steps[number],
            range(len(lane.program.works)),
            0,
            step_s,
        )
        for lane in lanes
    )


def _is_later(before: Step, after: Step, items: range, distance: int, time_s: float) -> bool:
    """Return whether items are later by this time, as far as they have begun and ended."""
    most = _SAME * time_s
    for old, new in ((before.starts, after.starts), (before.ends, after.ends)):
        for item in items:
            if abs(new[item + distance] - old[item] - time_s) > most:
                return False
    return True


def _period(lanes: Sequence[Lane], number: int) -> float | None:
    """Return the time between the last repetitions of the steady state; None: not steady."""
    periods = [_main_end(lane, number, -1) - _main_end(lane, number, -2) for lane in lanes]
    for lane in lanes:
        bounds, step = lane.program.bounds, lane.steps[number]
        size = bounds[1] - bounds[0]
        items = range(bounds[-4], bounds[-2])
        if not _is_later(step, step, items, size, periods[0]):
            return None
    return periods[0]


def _main_end(lane: Lane, number: int, bound: int) -> float:
    """Return when the computation before a bound of the steady state has ended."""
    queue, step = lane.program.queues[0], lane.steps[number]
    place = bisect_right(queue, lane.program.bounds[bound] - 1)
    return step.ends[queue[place - 1]] if place else lane.ends[number - 1]


@dataclass(frozen=True, slots=True)
class _Steady:
    """A steady step. less: repetitions of its steady state that are left out."""

    simulator: Simulator | FreeSteps
    number: int
    less: int
    period_s: float

    @property
    def lanes(self) -> Sequence[Lane]:
        return self.simulator.lanes

    def start(self, lane: Lane) -> float:
        return lane.ends[self.number - 1] if self.number else 0.0

    @property
    def step_s(self) -> float:
        lane = self.lanes[0]
        return lane.ends[self.number] - self.start(lane) + self.less * self.period_s

    def host_s(self, lane: Lane) -> float:
        """Return the host's time of a whole step."""
        return lane.program.host_s + self.less * _host_period(lane)

    def follows_host(self) -> bool:
        """Return whether a repetition that is left out takes as long on the host."""
        return not self.less or all(
            abs(_host_period(lane) - self.period_s) <= _SAME * self.step_s
            for lane in self.lanes
            if lane.has_host
        )

    def timeline(self, *, is_host_bound: bool) -> Timeline:
        parts = [self._ledger(lane) for lane in self.lanes]
        ledgers = tuple(own for own, _ in parts)
        computing = [own.total(Group.COMPUTE) + own.total(Group.OVERLAPPED) for own in ledgers]
        slowest = computing.index(max(computing))
        own, moving_ns = parts[slowest]
        busy_s = dict.fromkeys(Work, 0.0)
        for (group, name), time_ns in own.lines.items():
            if group in (Group.COMPUTE, Group.OVERLAPPED):
                busy_s[Work(name)] += time_ns / _NS
        return Timeline(
            step_s=self.step_s,
            ledgers=ledgers,
            busy_s=busy_s,
            contention_s=own.within[CONTENTION] / _NS,
            comm_s=moving_ns / _NS,
            exposed_s=own.within[TRANSFER] / _NS,
            bubble_s=own.within[WAITING] / _NS,
            num_kernels=_num_kernels(self.lanes[slowest], self.less),
            is_host_bound=is_host_bound,
            spans=self.spans,
        )

    def _ledger(self, lane: Lane) -> tuple[Ledger, int]:
        """Return the ledger of a step, and in how many ns messages move.

        It is that of what was simulated, and that of the repetitions left out.
        """
        window_ns = round(self.step_s * _NS)
        if isinstance(self.simulator, FreeSteps):
            return self._summed(lane, window_ns)
        more_ns = round(self.less * self.period_s * _NS)
        whole, moving_ns = _ledger_of(lane, lane.ends[self.number], _NS, window_ns - more_ns)
        if not more_ns:
            return whole, moving_ns
        # In units of which the repetitions left out make nanoseconds.
        end = _main_end(lane, self.number, -1)
        more, more_moving_ns = _ledger_of(lane, end, _NS * self.less, more_ns)
        lines = Counter(whole.lines)
        lines.update(more.lines)
        within = Counter(whole.within)
        within.update(more.within)
        return Ledger(window_ns=window_ns, lines=lines, within=within), (
            moving_ns + more_moving_ns
        )

    def _summed(self, lane: Lane, window_ns: int) -> tuple[Ledger, int]:
        """Return the same of a stage without contention."""
        whole_s = self.step_s - self.less * self.period_s
        lines, within, moved_s = seconds_of(lane, self.number, lane.ends[self.number], whole_s)
        if self.less:
            end = _main_end(lane, self.number, -1)
            more, more_within, more_moved_s = seconds_of(lane, self.number, end, self.period_s)
            for line, time_s in more.items():
                lines[line] = lines.get(line, 0.0) + self.less * time_s
            for name, time_s in more_within.items():
                within[name] += self.less * time_s
            moved_s += self.less * more_moved_s
        lines[Group.IDLE, Idle.RANK] = self.step_s - sum(lines.values())
        times_ns = {line: round(time_s * _NS) for line, time_s in lines.items()}
        # The largest line has what rounding leaves.
        times_ns[max(times_ns, key=times_ns.__getitem__)] += window_ns - sum(times_ns.values())
        own = Ledger(window_ns=window_ns, lines={line: t for line, t in times_ns.items() if t})
        exposed_ns = own.total(Group.COMM)
        parts = {name: round(time_s * _NS) for name, time_s in within.items()}
        parts[TRANSFER] = min(parts[TRANSFER], exposed_ns)
        parts[WAITING] = exposed_ns - parts[TRANSFER]
        own = replace(own, within=parts)
        return own, round(moved_s * _NS)

    def spans(self) -> Iterator[Span]:
        """Yield what runs in the step; repetitions that are left out are one span."""
        for lane in self.lanes:
            hole_s = _main_end(lane, self.number, -1) - self.start(lane) if self.less else 0.0
            yield from spans(lane, self.number, self.less, hole_s, self.less * self.period_s)


def _host_period(lane: Lane) -> float:
    """Return the host's time of one repetition of the steady state."""
    program = lane.program
    if not program.bounds:
        return 0.0
    begins = [*program.begins, program.host_s]
    return begins[program.bounds[-1]] - begins[program.bounds[-2]]


def _num_kernels(lane: Lane, less: int) -> float:
    program = lane.program
    counts = [work.num_kernels for work in program.works]
    more = sum(counts[program.bounds[-2] : program.bounds[-1]]) if less else 0.0
    return sum(counts) + less * more


def _ledger_of(lane: Lane, end: float, scale: float, length: int) -> tuple[Ledger, int]:
    """Return the ledger of a stage's window, and how long messages move, in 1 / scale s.

    end: of the window; length: in these units.
    """
    first = end - length / scale

    def unit(time: float) -> int:
        return round((min(max(time, first), end) - first) * scale)

    events: list[Event] = []
    idles: list[tuple[int, int, Idle]] = []
    within = Counter({CONTENTION: 0, TRANSFER: 0, WAITING: 0})
    for busy in lane.busy:
        if busy.end <= first or busy.start >= end:
            continue
        within[CONTENTION] += round(busy.extra_s * scale)
        now, place = busy.start, unit(busy.start)
        for (work, is_recomputed), time_s in busy.times.items():
            now += time_s
            last, place = place, unit(now)
            if isinstance(work, Idle):
                idles.append((last, place, work))
            else:
                group = Group.COPIES if work is Work.COPY else Group.COMPUTE
                events.append(Event(group, work, last, place))
                within[RECOMPUTED] += (place - last) * is_recomputed
    computes, causes = events.copy(), _Causes(idles, Idle.HOST if lane.has_host else Idle.RANK)
    calls = sorted(
        (unit(start), work.ops[0].collective, length if math.isnan(stop) else unit(stop))
        for step in lane.steps
        for work, start, stop in zip(lane.program.works, step.starts, step.ends, strict=True)
        if isinstance(work, Call) and start < end and not stop <= first
    )
    events += (Event(Group.COMM, name, start, stop) for start, name, stop in calls)
    found = ledger(events, 0, length, causes)
    moves = sorted(
        (unit(start), unit(stop))
        for start, stop in lane.transferred
        if start < end and stop > first
    )
    exposed = found.total(Group.COMM)
    if exposed and moves != [(start, stop) for start, _, stop in calls]:
        computes += (Event(Group.COMM, TRANSFER, start, stop) for start, stop in moves)
        exposed = ledger(computes, 0, length, causes).total(Group.COMM)
    within |= {TRANSFER: exposed, WAITING: found.total(Group.COMM) - exposed}
    moving = now = 0
    for start, stop in moves:
        moving += max(0, stop - max(start, now))
        now = max(now, stop)
    return replace(found, within=within), moving


class _Causes:
    """Causes of idle times. other: where none is known.

    Of the stages whose hosts are simulated it is the host: a stage in which nothing runs or is
    communicated waits for the issue of something.
    """

    def __init__(self, idles: list[tuple[int, int, Idle]], other: Idle) -> None:
        self._other = other
        self._idles = sorted(idle for idle in idles if idle[1] > idle[0])
        self._starts = [start for start, _, _ in self._idles]

    def __call__(self, first: int, last: int) -> Iterator[tuple[Idle, int]]:
        place = max(0, bisect_right(self._starts, first) - 1)
        while first < last:
            start, end, cause = last, last, self._other
            if place < len(self._idles):
                start, end, cause = self._idles[place]
            if start > first:
                yield self._other, min(start, last) - first
            known_ns = min(end, last) - max(start, first)
            if known_ns > 0:
                yield cause, known_ns
            first, place = max(first, min(end, last)), place + 1
