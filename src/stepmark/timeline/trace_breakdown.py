"""Where the time of a step went on one rank, in integer nanoseconds."""

from dataclasses import dataclass

from stepmark.timeline.trace_columns import Damage


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTimes:
    """Idle time of a GPU, by what the kernel that ends each gap waited for."""

    host_bound_ns: int  # its launch call had not returned
    launch_call_ns: int  # part of host_bound: that call ran
    kernel_gap_ns: int  # it was launched, and started soon
    unknown_ns: int  # its launch is not in the trace, or it was launched and did not start


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """Number of GPU events that are launched and have not started, over a window."""

    depth_ns: int  # integral over the window
    max: int
    empty_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step on one GPU, or on the host where the trace has no GPU events.

    compute, exposed_comm, exposed_memory and idle add up to the window; idle is None where the
    trace is cut: events are not in the order of time, and any step may lack some. step: None is
    the whole trace, without marks. device: None is the host; copies are then compute.
    other_steps_ns: time in the window in which only work of other steps, or of unknown steps,
    runs. It is part of the times above.
    waiting_ns: communication in which the rank waits for another one, as far as its calls are
    matched over ranks; exposed_waiting_ns: the part of exposed_comm in which it does. None
    where no call is.
    """

    device: int | None
    step: int | None
    start_ns: int
    end_ns: int
    compute_ns: int
    comm_ns: int
    exposed_comm_ns: int
    memory_ns: int = 0
    exposed_memory_ns: int = 0
    idle_ns: int | None
    other_steps_ns: int = 0
    num_events: int
    idle: IdleTimes | None = None
    queue: QueueDepth | None = None
    waiting_ns: int | None = None
    exposed_waiting_ns: int | None = None

    @property
    def window_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def overlap_ns(self) -> int:
        """Return the time in which communication and compute both run."""
        return self.comm_ns - self.exposed_comm_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class CommTimes:
    """Communication of one collective in one group.

    num_events: those of the step; time_ns: time of its window in which any of them runs, also
    of other steps; exposed_ns: the part without compute.
    kernel: its name where no arguments say which collective it is, else "".
    """

    device: int | None
    step: int | None
    collective: str = ""
    kernel: str = ""
    group: str = ""
    group_desc: str = ""
    group_size: int | None = None
    num_events: int
    time_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Kernels, copies and memsets of one group (core.kernel_groups)."""

    device: int | None
    step: int | None
    group: str
    num_events: int
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """Calls of one name that launched work of the selected steps.

    delay: from the start of the call to the start of the first GPU event it launched.
    num_short: calls that take longer than all they launch runs.
    """

    call: str
    num_calls: int
    num_events: int
    total_ns: int
    median_ns: int
    max_ns: int
    median_delay_ns: int
    num_short: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """Copies or memsets of one name. num_bytes: None where one does not state it."""

    name: str
    num_copies: int
    num_bytes: int | None
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How one rank and the others wait for each other, in calls that are matched over ranks.

    waiting_ns: time of its windows in which it waits in any call. num_last, caused_ns: calls in
    which it arrived last, and the time in which another rank waits in any of them, summed over
    ranks. unmatched_ns, early_ns: sums over calls: kernels of other calls, and how long before
    the last rank it arrived; None where clocks of the ranks do not agree.
    """

    num_calls: int
    waiting_ns: int
    unmatched_ns: int
    num_last: int
    caused_ns: int
    early_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Everything about one rank.

    all_steps: numbers of the marks in the trace, () without any; empty_steps: those that
    launched nothing. steps: the selected ones of the others.
    num_outside, outside_ns: GPU events that no window contains, and their union.
    """

    all_steps: tuple[int, ...]
    empty_steps: tuple[int, ...]
    steps: tuple[StepTimes, ...]
    comms: tuple[CommTimes, ...] = ()
    kernels: tuple[KernelTimes, ...] = ()
    launches: tuple[LaunchTimes, ...] = ()
    copies: tuple[CopyTimes, ...] = ()
    num_outside: int = 0
    outside_ns: int = 0
    damage: tuple[Damage, ...] = ()
    arrivals: Arrivals | None = None
