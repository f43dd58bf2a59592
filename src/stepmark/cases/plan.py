"""Plan of a run: its cases in order, and how thoroughly each is measured."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stepmark.cases.case import SAMPLE_S, SOAK_S
from stepmark.cases.record import AnyCase
from stepmark.ground.redaction import redact_words
from stepmark.ground.units import parse_duration

PLAN_SCHEMA = 1
STEP_LAUNCH = 2  # of `run`: its steps are predicted from what was measured before
FORCE = "--force"  # tells ranks to continue a run although the environment differs
ROUND = "STEPMARK_ROUND"  # variable with the round, for the commands of a sweep


class Profile(StrEnum):
    """How steps are profiled after those that are timed."""

    NONE = ""
    PLAIN = "plain"  # back to back
    # The device idles before each phase of a step, so that its kernels run at full clock.
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One case to measure in one launch. The position is its index in the plan.

    Entries of one launch share processes and communicators; a new launch has new ones, the
    processes only where stepmark started them. profile: of a training step, where
    TrainHow.profile asks for none.
    """

    position: int
    launch: int
    case: AnyCase
    profile: Profile = Profile.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class OpHow:
    """How operators are measured. The budget is for all operators of the plan together.

    steps: samples; None: until the median is sure. warmups: calls in place of the soak.
    """

    budget_s: float | None = None
    timeout_s: float = 600.0  # a case that takes longer has failed
    soak_s: float = SOAK_S
    sample_s: float = SAMPLE_S  # wall seconds of sampling at most
    steps: int | None = None
    warmups: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommHow:
    """How collectives are measured. iterations: timed calls; None: until the median is sure.

    In graph mode iterations are captured and the graph is launched `graphs` times. per_call: a
    sample is one call.
    """

    budget_s: float | None = None
    timeout_s: float = 60.0
    iterations: int | None = None
    graphs: int = 0
    warmups: int = 5
    checks: int = 1
    per_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainHow:
    """How training steps are measured. steps: steady samples wanted; None: the default.

    The budget is wall time: building, compiling and warm-up count. soak_s: of GPUs, before the
    steady samples; up to most_soak_s while they get warmer. steady_s: seconds that the steady
    samples last at least.
    """

    budget_s: float | None = None
    timeout_s: float = 600.0
    steps: int | None = None
    soak_s: float = SOAK_S
    most_soak_s: float = 20.0
    steady_s: float = 0.0
    messages: bool = False
    profile: bool = False
    profile_ranks: tuple[int, ...] = (0,)
    find_batch: bool = False  # cases are one model by rising mbs
    compile_fallback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayHow:
    """How a workload is replayed.

    passes: iterations in which every operation is timed. check: every message is verified
    once, before the iterations.
    """

    budget_s: float | None = None
    timeout_s: float = 600.0
    warmups: int = 1
    iterations: int = 10
    passes: int = 3
    check: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How each kind of case is measured."""

    op: OpHow = OpHow()
    comm: CommHow = CommHow()
    train: TrainHow = TrainHow()
    replay: ReplayHow = ReplayHow()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Input of the ranks, which a run directory keeps as plan.jsonl.

    options: the user's options, as plain data by option name.
    """

    command: str  # what shows the run: op, comm, train, run, calibrate, replay, fill
    argv: tuple[str, ...] = ()  # the words after `stepmark`, as typed, without secrets
    device: str  # cuda or cpu
    world_size: int
    entries: tuple[Entry, ...]
    how: How = How()
    options: dict[str, object] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)  # as RunInfo keeps them
    notes: tuple[str, ...] = ()  # what a user should know, e.g. cases that were left out
    workload: str = ""  # of a replay or a fill: its file in our own format
    schema: int = PLAN_SCHEMA

    def __post_init__(self) -> None:
        object.__setattr__(self, "argv", redact_words(self.argv))

    @property
    def budget_s(self) -> float | None:
        """Seconds of --budget, which all kinds of cases share; None without one."""
        text = self.options.get("budget")
        return parse_duration(str(text), "budget") if text else None

    @property
    def command_line(self) -> str:
        """The command line that made this plan."""
        return "stepmark " + shlex.join(self.argv or (self.command,))

    def is_predicted(self, entry: Entry) -> bool:
        """Return whether the entry is a step that is predicted before it is measured."""
        return self.command == "run" and entry.launch >= STEP_LAUNCH


def entries(cases: Sequence[AnyCase], launches: int = 1) -> tuple[Entry, ...]:
    """Return every case in every launch, in the order in which they are measured."""
    return tuple(
        Entry(position=(launch - 1) * len(cases) + index, launch=launch, case=case)
        for launch in range(1, launches + 1)
        for index, case in enumerate(cases)
    )
