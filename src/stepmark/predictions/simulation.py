"""Simulation of one steady training step of a workload.

Steps are simulated one after the other until one repeats the step before. If none does, since
contention lets steps alternate where host and device are equally fast, the median one counts.
Of many micro-batches, a few are simulated until their steady state repeats; each of the others
then adds as much as one more does.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain

from stepmark.ground.errors import ConfigError
from stepmark.predictions.compiler import Compiler
from stepmark.predictions.free_steps import FreeSteps, is_serial
from stepmark.predictions.program import Program
from stepmark.predictions.regions import Region, met, with_items
from stepmark.predictions.stage_times import critical_messages, seconds_of, spans
from stepmark.predictions.step_events import MOST_STEPS, Lane, Simulator, Step
from stepmark.predictions.works import Call, Clock, Segment
from stepmark.step.workload import Workload
from stepmark.step.workload_stages import num_steady, shortened, steady_runs
from stepmark.timeline.ledger import (
    TRANSFER,
    WAITING,
    Group,
    Idle,
    Ledger,
    Work,
)
from stepmark.timeline.step_cost import Costs
from stepmark.timeline.timeline import Span, Timeline

_REPEATS = 4  # of a steady state that are simulated first
_MORE = 4  # times as many, as long as it is not steady
_SAME = 1e-9  # of a step: times that differ less are equal
_NS = 1e9


def simulate(workload: Workload, costs: Costs, clock: Clock | None = None) -> "SteadyStep":
    """Return a steady step of all pipeline stages, one rank of each.

    clock: factor on the time of computation by kind of work; missing: 1. Raises ConfigError for
    a workload whose stages wait for each other.
    """
    total = num_steady(workload)
    kept = _REPEATS

    @cache
    def compiler(*, joins: bool) -> Compiler:
        return Compiler(workload, costs, clock or {}, joins=joins)

    while True:
        shorter = shortened(workload, kept) if kept < total else workload
        num_omitted = max(0, total - kept)
        simulated = partial(_simulated, shorter, costs, compiler, num_omitted)
        free = simulated()
        if free:
            host_s = [free.host_s(lane) for lane in free.lanes]
            if max(host_s) <= free.step_s:
                return free
            # Faster hosts are ahead of their device.
            slowest = [stage for stage, time in enumerate(host_s) if time >= max(host_s)]
            bound = simulated(slowest)
            if bound and bound.follows_host():
                return replace(bound, is_host_bound=True)
        kept *= _MORE


def _simulated(
    workload: Workload,
    costs: Costs,
    compiler: Callable[..., Compiler],
    num_omitted: int,
    hosts: Collection[int] = (),
) -> "SteadyStep | None":
    """Simulate until a step repeats; None: its micro-batches do not yet.

    hosts: stages whose hosts are not ahead of their devices.
    """
    programs = partial(_programs, workload, repeats=num_omitted > 0)
    own = compiler(joins=not hosts)
    compiled = programs(own)
    if not is_serial(compiled):
        own = compiler(joins=False)
        compiled = programs(own)
    elif not (hosts and costs.has_contention):
        free = FreeSteps(compiled, hosts)
        if free.run(1) and not _is_slowed(free, costs):
            step = _steady(workload, free, num_omitted)
            if not _is_slowed(free, costs):
                return step
    while True:
        events = Simulator(compiled, costs.comm_slowdown, hosts)
        step = _steady(workload, events, num_omitted)
        # What messages slow has to be simulated item by item.
        if not own.open(chain.from_iterable(met(lane, Region) for lane in events.lanes)):
            return step
        compiled = programs(own)


def _programs(workload: Workload, compiler: Compiler, *, repeats: bool) -> list[Program]:
    """Return the programs of all stages. repeats: with the bounds of the steady state."""
    runs = steady_runs(workload) if repeats else (None,) * len(workload.stages)
    programs = [
        compiler.program(index, workload.blocks[stage.step], run)
        for index, (stage, run) in enumerate(zip(workload.stages, runs, strict=True))
    ]
    for stage, program in enumerate(programs):
        if not program.queues[0]:
            allowed = (
                f'one with operations on the stream "compute" in every stage (not in {stage})'
            )
            raise ConfigError("workload", workload.name, allowed)
    return programs


def _is_slowed(free: FreeSteps, costs: Costs) -> bool:
    """Return whether messages move beside computation, which they slow."""
    met_works = chain.from_iterable(met(lane, Segment) for lane in free.lanes)
    return costs.has_contention and any(True for _ in met_works)


def _steady(
    workload: Workload, simulator: Simulator | FreeSteps, num_omitted: int
) -> "SteadyStep | None":
    """Simulate until a step repeats; None: its micro-batches do not yet."""
    lanes = simulator.lanes
    for number in range(MOST_STEPS):
        if not simulator.run(number + 1):
            raise ConfigError("workload", workload.name, _deadlock(lanes))
        is_alone = len(lanes) == 1 and not lanes[0].has_host and not lanes[0].steps[0].num_left
        if (number == 0 and is_alone) or (number and _is_repeated(lanes, number)):
            period_s = _period(lanes, number) if num_omitted else 0.0
            if period_s is None:
                return None
            return SteadyStep(simulator, number, num_omitted, period_s)
    if num_omitted:
        return None
    ends = lanes[0].ends
    later = range(MOST_STEPS // 2, MOST_STEPS)
    durations = [lane.ends[-1] - lane.ends[later[0]] for lane in lanes]
    if max(durations) - min(durations) > min(durations) / len(later):
        allowed = "one whose stages communicate in each step"
        raise ConfigError("workload", workload.name, allowed)
    middle = sorted(later, key=lambda number: ends[number] - ends[number - 1])[len(later) // 2]
    return SteadyStep(simulator, middle, 0, 0.0)


def _deadlock(lanes: Sequence[Lane]) -> str:
    next_works = (
        (lane, lane.program.works[stream.items[stream.place]])
        for lane in lanes
        for stream in lane.streams
        if stream.step is not None and stream.place < len(stream.items)
    )
    waiting = [
        f"stage {lane.stage} for {work.ops[0].collective} ({work.ops[0].module})"
        for lane, work in next_works
        if isinstance(work, Call)
    ]
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
    later = slice(items.start + distance, items.stop + distance)
    for old, new in ((before.starts, after.starts), (before.ends, after.ends)):
        for first, second in zip(old[items.start : items.stop], new[later], strict=True):
            if abs(second - first - time_s) > most:
                return False
    return True


def _period(lanes: Sequence[Lane], number: int) -> float | None:
    """Return the time between the last repetitions of the steady state; None: not steady."""
    periods = [_main_end(lane, number, -1) - _main_end(lane, number, -2) for lane in lanes]
    for lane in lanes:
        bounds = lane.program.bounds
        step = lane.steps[number]
        size = bounds[1] - bounds[0]
        items = range(bounds[-4], bounds[-2])
        if not _is_later(step, step, items, size, periods[0]):
            return None
    return periods[0]


def _main_end(lane: Lane, number: int, bound: int) -> float:
    """Return when the computation before a bound of the steady state has ended."""
    queue = lane.program.queues[0]
    step = lane.steps[number]
    place = bisect_right(queue, lane.program.bounds[bound] - 1)
    return step.ends[queue[place - 1]] if place else lane.ends[number - 1]


@dataclass(frozen=True)
class SteadyStep:
    """One steady step of all pipeline stages that was simulated. number: of the simulated ones.

    num_omitted: repetitions of its steady state left out, each of period_s.
    """

    simulator: Simulator | FreeSteps
    number: int
    num_omitted: int
    period_s: float
    is_host_bound: bool = False
    _parts: dict[int, tuple[Ledger, int]] = field(default_factory=dict, init=False)

    @property
    def lanes(self) -> Sequence[Lane]:
        """Return the stages."""
        return self.simulator.lanes

    def start(self, lane: Lane) -> float:
        """Return when the step begins on a stage."""
        return lane.ends[self.number - 1] if self.number else 0.0

    @cached_property
    def step_s(self) -> float:
        """Seconds of the step."""
        lane = self.lanes[0]
        return lane.ends[self.number] - self.start(lane) + self.num_omitted * self.period_s

    def host_s(self, lane: Lane) -> float:
        """Return the host's time of a whole step."""
        return lane.program.host_s + self.num_omitted * _host_period(lane)

    def follows_host(self) -> bool:
        """Return whether a repetition that is left out takes as long on the host."""
        return not self.num_omitted or all(
            abs(_host_period(lane) - self.period_s) <= _SAME * self.step_s
            for lane in self.lanes
            if lane.has_host
        )

    @cached_property
    def ledgers(self) -> tuple[Ledger, ...]:
        """Ledgers by stage."""
        return tuple(self._part(lane)[0] for lane in self.lanes)

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the slowest stage."""
        return self._part(self.lanes[self.slowest])[0]

    @cached_property
    def slowest(self) -> int:
        """The stage that computes the longest without contention, of which the figures are."""
        computing = [round(_NS * self._computed_s(lane.program)) for lane in self.lanes]
        return computing.index(max(computing))

    @property
    def busy_s(self) -> dict[Work, float]:
        """Return the compute of the slowest stage by kind of work, contention included."""
        busy_s = dict.fromkeys(Work, 0.0)
        for (group, name), time_ns in self.ledger.lines.items():
            if group in (Group.COMPUTE, Group.OVERLAPPED):
                busy_s[Work(name)] += time_ns / _NS
        return busy_s

    def part_s(self, name: str) -> float:
        """Return the seconds of a part of the slowest stage's lines: see Ledger.within."""
        return self.ledger.within[name] / _NS

    @property
    def comm_s(self) -> float:
        """Return the communication of the slowest stage, exposed or not."""
        return self._part(self.lanes[self.slowest])[1] / _NS

    @property
    def num_kernels(self) -> float:
        """Return the kernels of the slowest stage."""
        program = self.lanes[self.slowest].program
        return self._sum(program, [work.num_kernels for work in program.works])

    def _computed_s(self, program: Program) -> float:
        """Return the seconds that a stage computes alone."""
        times = [
            work.computed_s if isinstance(work, Segment) else 0.0 for work in program.works
        ]
        return self._sum(program, times)

    def _sum(self, program: Program, amounts: Sequence[float]) -> float:
        """Return the sum over a whole step. amounts: of the items."""
        more = (
            sum(amounts[program.bounds[-2] : program.bounds[-1]]) if self.num_omitted else 0.0
        )
        return sum(amounts) + self.num_omitted * more

    def _recorded(self, lane: Lane) -> Lane:
        """Return a stage with what ran on it."""
        if isinstance(self.simulator, FreeSteps):
            self.simulator.record(lane, self.number)
        return with_items(lane)

    def _part(self, lane: Lane) -> tuple[Ledger, int]:
        """Return `_ledger` of a stage, which takes long the first time."""
        if lane.stage not in self._parts:
            self._parts[lane.stage] = self._ledger(lane)
        return self._parts[lane.stage]

    def _ledger(self, lane: Lane) -> tuple[Ledger, int]:
        """Return the ledger of a step, and in how many ns messages move.

        It is that of what was simulated, and that of the repetitions left out. The largest line
        has what rounding leaves.
        """
        whole_s = self.step_s - self.num_omitted * self.period_s
        recorded = self._recorded(lane)
        path = [*critical_messages(lane, self.number, self.start(lane))]
        lines, within, moved_s = seconds_of(recorded, lane.ends[self.number], whole_s, path)
        if self.num_omitted:
            end = _main_end(lane, self.number, -1)
            more, more_within, more_moved_s = seconds_of(recorded, end, self.period_s, path)
            for line, time_s in more.items():
                lines[line] = lines.get(line, 0.0) + self.num_omitted * time_s
            for name, time_s in more_within.items():
                within[name] += self.num_omitted * time_s
            moved_s += self.num_omitted * more_moved_s
        # A stage whose host is simulated waits for the issue of something, others for a stage.
        idle = Group.IDLE, Idle.HOST if lane.has_host else Idle.RANK
        rest_s = self.step_s - sum(lines.values())
        if abs(rest_s) > _SAME * self.step_s:  # less is what sums of floats leave
            lines[idle] = lines.get(idle, 0.0) + rest_s
        window_ns = round(self.step_s * _NS)
        times_ns = {line: round(time_s * _NS) for line, time_s in lines.items()}
        times_ns[max(times_ns, key=times_ns.__getitem__)] += window_ns - sum(times_ns.values())
        own = Ledger(window_ns=window_ns, lines={line: t for line, t in times_ns.items() if t})
        exposed_ns = own.total(Group.COMM)
        parts = {name: round(time_s * _NS) for name, time_s in within.items()}
        # Rounded lines differ by 1 ns each at most; a stage waits for nobody if that is all.
        if exposed_ns - parts[TRANSFER] <= len(lines):
            parts[TRANSFER] = exposed_ns
        parts[WAITING] = exposed_ns - parts[TRANSFER]
        own = replace(own, within=parts)
        return own, round(moved_s * _NS)

    def timeline(self) -> Timeline:
        """Return what runs in the step; repetitions that are left out are one span."""
        return Timeline(self._spans(), (0, round(self.step_s * _NS)))

    def _spans(self) -> Iterator[Span]:
        for lane in self.lanes:
            omitted_s = (
                _main_end(lane, self.number, -1) - self.start(lane) if self.num_omitted else 0.0
            )
            length_s = self.num_omitted * self.period_s
            recorded = self._recorded(lane)
            yield from spans(recorded, self.number, self.num_omitted, omitted_s, length_s)


def _host_period(lane: Lane) -> float:
    """Return the host's time of one repetition of the steady state."""
    program = lane.program
    if not program.bounds:
        return 0.0
    begins = [*program.begins, program.host_s]
    return begins[program.bounds[-1]] - begins[program.bounds[-2]]
