"""A training log: the steps of its last start, with their times, and the facts of the job."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from stepmark.ground.errors import ConfigError
from stepmark.job_logs.training_log.log_formats import BRIDGE, LogFormat
from stepmark.job_logs.training_log.starts import (
    FEWEST_LINES,
    Start,
    is_other,
    ratio_of,
    shown_start,
    starts_of,
)
from stepmark.job_logs.training_log.step_lines import LoggedStep, StepLines, read_step_lines

# A time between two readings of a clock counts where it is so many times the clock's unit.
_CLOCK_UNITS = 50
_NAMES = {
    "num_ranks": "GPUs:",
    "batch": "a global batch of",
    "seq_len": "sequences of",
    "tokens": "tokens of a step:",
    "parameters": "parameters:",
}
_RATES = {
    "samples_per_s": "throughput and the batch",
    "tokens_per_s": "throughput and the tokens of a step",
    "tokens_per_s_gpu": "throughput and the tokens of a step",
    "batches_per_s": "steps per second",
}
SECONDS = "s"
SAMPLES = "samples/s"
# The figure of a step by the unit of a log, the first that every step has.
_FIGURES = {
    SECONDS: "step_s",
    "tokens/s/GPU": "tokens_per_s_gpu",
    SAMPLES: "samples_per_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """What a log states of its job; None: it does not.

    batch: sequences of a step. memory_bytes: reserved at most, of the rank that states it.
    """

    num_ranks: int | None = None
    batch: int | None = None
    seq_len: int | None = None
    tokens: int | None = None  # of a step
    parameters: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """Steps of one rank in the last start with enough lines, in the order of their numbers.

    unit: of `costs`. time_from: how the times of steps are known. pause_s: time between
    blocks of steps, where a clock tells it. num_ranks_logged: ranks with lines of these steps.
    restarts: first steps of all starts but the first; num_later: those after the steps.
    empty_start: the line of facts after all steps. left_out: other trainers, with their first
    and last lines. other_starts: steps of each start but that one, timed by its own facts.
    other_rank: tag of a rank that logs other times of these steps, and the ratio of the longer
    to the shorter. bad_losses: lines of any rank whose loss is no number. num_torn: lines of
    steps that are cut.
    """

    file: str
    trainer: str
    facts: LogFacts
    steps: tuple[LoggedStep, ...]
    unit: str
    time_from: str
    pause_s: float = 0.0
    num_ranks_logged: int = 1
    other_rank: tuple[str, float] | None = None
    restarts: tuple[LoggedStep, ...] = ()
    num_later: int = 0
    other_starts: tuple[tuple[LoggedStep, ...], ...] = ()
    empty_start: int | None = None
    left_out: tuple[tuple[str, int, int], ...] = ()
    bad_losses: tuple[LoggedStep, ...] = ()
    num_torn: int = 0
    digits: int | None = None
    remark: str = ""

    @property
    def tokens(self) -> int | None:
        """Tokens of a step, those of the last one; None where the log does not state them."""
        return tokens_of(self.facts, self.steps[-1].batch)

    @property
    def costs(self) -> list[float]:
        """Seconds of each step; where they are unknown, of one token of a GPU or a sample."""
        return [cost for own in self.steps if (cost := self.cost_of(own))]

    def cost_of(self, step: LoggedStep) -> float | None:
        """Return the cost of a step of any start; None where it does not state that."""
        figure: float | None = getattr(step, _FIGURES[self.unit])
        return self.value_of(figure) if figure else None

    def value_of(self, cost: float) -> float:
        """Return a cost as a time or rate in `unit`, or the cost of one: rates are inverse."""
        return cost if self.unit == SECONDS else 1 / cost


def read_training_log(path: Path) -> TrainingLog:
    """Return the steps of a file. Raises ConfigError where it has none, or no rate of them."""
    return log_of(path, read_step_lines(path))


def log_of(path: Path, readers: Sequence[StepLines]) -> TrainingLog:
    """Return the steps in these lines of a file. Raises ConfigError as read_training_log."""
    with_steps = [own for own in readers if own.steps]
    if not with_steps:
        raise ConfigError("file", path, f"a log of a trainer{_refusal(readers)}")
    # The end of the file is that of its last job; lines of two trainers may be of one job.
    last = max(_with_most(with_steps), key=lambda own: _lines(own)[1])
    of_job = [own for own in with_steps if _is_of_job(own, last)]
    others = [own for own in with_steps if not _is_of_job(own, last)]
    for own in others:
        if {*own.log_format.fact_marks} & {*last.log_format.fact_marks}:
            trainers = f"{own.log_format.trainer} and {last.log_format.trainer}"
            allowed = f"a log of one job: it has steps of {trainers}, which state facts alike"
            raise ConfigError("file", path, allowed)
    # Megatron-Bridge's first rank prints a time without a number, its last rank the whole line.
    best = max(of_job, key=lambda own: (own.log_format.has_numbers, _most(own)))
    log = _log(path, best)
    is_bridge = any(own.log_format.trainer == BRIDGE for own in of_job)
    left_out = tuple((own.log_format.trainer, *_lines(own)) for own in others)
    return replace(log, trainer=BRIDGE if is_bridge else log.trainer, left_out=left_out)


def _with_most(readers: Sequence[StepLines]) -> Sequence[StepLines]:
    return [own for own in readers if _most(own) >= FEWEST_LINES] or readers


def _lines(lines: StepLines) -> tuple[int, int]:
    """Return the first and the last line of the file with a step."""
    return (
        min(steps[0].line for steps in lines.steps.values()),
        max(steps[-1].line for steps in lines.steps.values()),
    )


def _is_of_job(own: StepLines, last: StepLines) -> bool:
    """Return whether one job prints both: at the same time, and its trainer runs the other."""
    first, end = _lines(last)
    formats = own.log_format, last.log_format
    is_one = (
        formats[0].trainer == formats[1].trainer
        or formats[0].trainer in formats[1].within
        or formats[1].trainer in formats[0].within
    )
    return own is last or (is_one and _lines(own)[0] <= end and first <= _lines(own)[1])


def _refusal(readers: Sequence[StepLines]) -> str:
    if any(own.num_torn for own in readers):
        return ": none of its lines of steps is whole"
    for own in readers:
        if own.total and own.log_format.total:
            _, unit, meaning = own.log_format.total
            words = f"{own.log_format.trainer}'s {own.total} {unit} is {meaning}"
            return f" with the time or the rate of single steps: {words}"
    if any(own.num_untimed for own in readers):
        return " with times: its lines state losses, and no progress bar or rate is in it"
    if any(own.num_other for own in readers):
        return ": its lines are evaluations or other bars, and no step"
    return ", with steps"


def _most(lines: StepLines) -> int:
    return max(map(len, lines.steps.values()), default=0)


def _log(path: Path, lines: StepLines) -> TrainingLog:
    # Of ranks with as many lines, one that knows the loss counts.
    tag = max(
        lines.steps,
        key=lambda own: (len(lines.steps[own]), lines.steps[own][-1].loss is not None),
    )
    starts = starts_of(path, lines.steps[tag], lines.heads)
    shown = shown_start(starts)
    own = lines.log_format
    if conflict := starts[shown].head.conflict:
        name, values = conflict
        words = " and ".join(f"{value:,.0f}" for value in values)
        raise ConfigError("file", path, f"a log of one job: ranks state {_NAMES[name]} {words}")
    facts = _facts(starts[shown])
    steps, pause_s = _timed(path, own, starts[shown])
    time_from = "as printed"
    if "samples" in own.figures:
        time_from = "by the clock of its blocks"
    elif own.resolution_s:
        time_from = "by the clock of its bar, in whole seconds"
    elif "step_s" not in own.figures:
        time_from = f"by its {_RATES[_cost_name(starts[shown].timed[-1], facts)]}"
    return TrainingLog(
        file=str(path),
        trainer=own.trainer,
        facts=facts,
        steps=tuple(steps),
        unit=_unit(path, steps),
        time_from=time_from,
        pause_s=pause_s,
        num_ranks_logged=len(lines.steps),
        other_rank=_other_rank(lines, starts[shown].steps),
        restarts=tuple(start.steps[0] for start in starts[1:]),
        num_later=len(starts) - 1 - shown,
        other_starts=tuple(_other_starts(path, own, starts, shown)),
        empty_start=_empty_start(lines),
        bad_losses=_bad_losses(lines, starts[shown].steps[0]),
        num_torn=lines.num_torn,
        digits=own.digits,
        remark=own.remark,
    )


def _facts(start: Start) -> LogFacts:
    return LogFacts(**{name: int(value) for name, value in start.head.facts.items()})


def _timed(path: Path, own: LogFormat, start: Start) -> tuple[list[LoggedStep], float]:
    """Return the steps of a start with their times or rates, and the time between blocks."""
    steps, pause_s = start.timed, 0.0
    facts = _facts(start)
    if not steps:
        raise ConfigError("file", path, "a log that states the time or the rate of its steps")
    if "samples" in own.figures:
        steps, pause_s = _of_blocks(path, steps, facts.batch, own.resolution_s)
    elif own.resolution_s:
        steps = _by_clock(path, steps, own.resolution_s)
    else:
        steps = _spans(steps, is_mean=own.is_mean)
    return [_completed(step, facts, own) for step in steps], pause_s


def _other_starts(
    path: Path, own: LogFormat, starts: Sequence[Start], shown: int
) -> Iterator[tuple[LoggedStep, ...]]:
    """Yield the steps of each start but the shown one; none where they have no time."""
    for place, start in enumerate(starts):
        if place == shown:
            continue
        try:
            yield tuple(_timed(path, own, start)[0])
        except ConfigError:
            yield ()


def _other_rank(lines: StepLines, steps: Sequence[LoggedStep]) -> tuple[str, float] | None:
    """Return the tag that logs other times of these steps, and how many times as long."""
    by_number = {own.number: own for own in steps}
    for tag, others in lines.steps.items():
        pairs = [
            (by_number[own.number], own)
            for own in others
            if own.number in by_number and own.line >= steps[0].line
        ]
        ratios = [ratio for pair in pairs if (ratio := ratio_of(*pair))]
        middle = median(ratios) if len(ratios) >= FEWEST_LINES else 1.0
        if is_other(middle):
            return tag, max(middle, 1 / middle)
    return None


def _empty_start(lines: StepLines) -> int | None:
    """Return the line of facts that are stated again after all steps."""
    head = lines.heads[-1]
    is_again = any(own.facts for own in lines.heads[:-1])
    return head.line if is_again and head.line > _lines(lines)[1] else None


def _bad_losses(lines: StepLines, first: LoggedStep) -> tuple[LoggedStep, ...]:
    """Return a line per step, of any rank since this one, whose loss is no number."""
    bad = {
        own.number: own
        for steps in lines.steps.values()
        for own in steps
        if own.line >= first.line and own.is_nan
    }
    return tuple(sorted(bad.values(), key=lambda own: own.line))


def _spans(steps: Sequence[LoggedStep], *, is_mean: bool) -> list[LoggedStep]:
    """Return the steps with the number of those that each line is the mean of."""
    gaps = [after.number - before.number for before, after in pairwise(steps)]
    interval = round(median(gaps)) if gaps and is_mean else 1
    first = replace(steps[0], span=1 if steps[0].number <= 1 else interval)
    return [
        first,
        *(
            replace(own, span=min(gap, interval))
            for own, gap in zip(steps[1:], gaps, strict=True)
        ),
    ]


def _by_clock(
    path: Path, points: Sequence[LoggedStep], resolution_s: float
) -> list[LoggedStep]:
    """Return steps by differences of a clock that counts in such units."""
    least_s = _CLOCK_UNITS * resolution_s
    steps = []
    first = points[0]
    for point in points[1:]:
        assert first.clock_s is not None
        assert point.clock_s is not None
        elapsed_s = point.clock_s - first.clock_s
        span = point.number - first.number
        if elapsed_s >= least_s and span:
            # Both readings are cut to whole units.
            own = replace(point, span=span, step_s=elapsed_s / span)
            steps.append(replace(own, rounding=2 * resolution_s / elapsed_s))
            first = point
    if not steps:
        allowed = f"a log of at least {least_s:g} s of steps: its clock counts whole seconds"
        raise ConfigError("file", path, allowed)
    return steps


def _of_blocks(
    path: Path, blocks: Sequence[LoggedStep], batch: int | None, resolution_s: float
) -> tuple[list[LoggedStep], float]:
    """Return the mean step of each block, and the time between blocks."""
    if not batch:
        raise ConfigError("file", path, "a log that states its global_batch_size, too")
    steps = []
    for own in blocks:
        assert own.clock_s is not None
        assert own.begin_s is not None
        assert own.begin_samples is not None
        span = round((own.number - own.begin_samples) / batch)
        elapsed_s = own.clock_s - own.begin_s
        if span > 0 and elapsed_s > 0:
            number = own.number // batch
            step = replace(own, number=number, span=span, step_s=elapsed_s / span)
            steps.append(replace(step, rounding=resolution_s / elapsed_s))
    if not steps:
        raise ConfigError("file", path, "a log with blocks of samples that were trained on")
    pauses = ((b.begin_s or 0.0) - (a.clock_s or 0.0) for a, b in pairwise(steps))
    return steps, sum(max(0.0, pause_s) for pause_s in pauses)


def _completed(step: LoggedStep, facts: LogFacts, log_format: LogFormat) -> LoggedStep:
    """Return the step with what follows from its figures and the facts without rounding."""
    tokens = tokens_of(facts, step.batch)
    ranks = facts.num_ranks
    tokens_per_s = step.tokens_per_s
    if tokens_per_s is None and step.tokens_per_s_gpu and ranks:
        tokens_per_s = step.tokens_per_s_gpu * ranks
    name = _cost_name(step, facts)
    rounding = step.rounding
    if log_format.digits:
        rounding = 10.0 ** (1 - log_format.digits)
    elif unit := log_format.last_digits.get(name):
        rounding = unit / getattr(step, name)
    step_s = step.step_s
    if step_s is None:
        # The rate with most digits counts.
        amounts = (
            (step.batch or facts.batch, step.samples_per_s),
            (tokens, tokens_per_s),
            (1, step.batches_per_s),
        )
        step_s = next((amount / rate for amount, rate in amounts if amount and rate), None)
    if tokens_per_s is None and step_s and tokens:
        tokens_per_s = tokens / step_s
    of_gpu = step.tokens_per_s_gpu
    if of_gpu is None and tokens_per_s and ranks:
        of_gpu = tokens_per_s / ranks
    return replace(
        step,
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_gpu=of_gpu,
        rounding=rounding,
    )


def tokens_of(facts: LogFacts, batch: float | None) -> int | None:
    """Return the tokens of a step. batch: as its line states it."""
    batch = batch or facts.batch
    if facts.tokens or not batch or not facts.seq_len:
        return facts.tokens
    return round(batch) * facts.seq_len


def _cost_name(step: LoggedStep, facts: LogFacts) -> str:
    """Return the figure of the line that its cost is of."""
    if step.step_s is not None:
        return "step_s"
    has_batch = bool(step.batch or facts.batch)
    has_tokens = tokens_of(facts, step.batch) is not None
    if step.samples_per_s and has_batch:
        return "samples_per_s"
    if step.tokens_per_s and has_tokens:
        return "tokens_per_s"
    if step.tokens_per_s_gpu and has_tokens:
        return "tokens_per_s_gpu"
    if step.batches_per_s:
        return "batches_per_s"
    return "tokens_per_s_gpu" if step.tokens_per_s_gpu else "samples_per_s"


def _unit(path: Path, steps: Sequence[LoggedStep]) -> str:
    """Return what every step has: its time, or else a rate."""
    for unit, name in _FIGURES.items():
        if all(getattr(own, name) for own in steps):
            return unit
    raise ConfigError("file", path, "a log that states the time or the rate of every step")


def difference_of(own: TrainingLog, other: TrainingLog) -> str:
    """Return how two logs differ that cannot be of one job's ranks or starts, or nothing."""
    if own.trainer != other.trainer and BRIDGE not in {own.trainer, other.trainer}:
        return f"{own.trainer} and {other.trainer}"
    for name, words in _NAMES.items():
        first, second = getattr(own.facts, name), getattr(other.facts, name)
        if first and second and first != second:
            return f"{words} {first:,} and {second:,}"
    times = [
        {step.number: cost for step, cost in zip(log.steps, log.costs, strict=True)}
        for log in (own, other)
    ]
    both = times[0].keys() & times[1].keys()
    if own.unit != other.unit or not both:
        return ""
    ratio = median(times[0][number] / times[1][number] for number in both)
    if not is_other(ratio):
        return ""
    return f"the same steps take {ratio:.3g} times as long"
