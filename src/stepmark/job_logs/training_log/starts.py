"""The starts of a job in its log: steps of each, with the facts that were stated for them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.job_logs.training_log.step_lines import Head, LoggedStep

FEWEST_LINES = 8  # of a start that is shown rather than an earlier one
# Of the lines: more are lines of several ranks or jobs without a tag.
_MOST_RESTARTS = 0.1
_FEWEST_RESTARTS = 3
MOST_DIFFERENCE = 0.05  # between the times that ranks of a job log of one step
_COSTS = ("step_s", "tokens_per_s_gpu", "samples_per_s", "tokens_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Steps of a start in the order of their numbers, and the facts stated before them."""

    steps: list[LoggedStep]
    head: Head

    @property
    def timed(self) -> list[LoggedStep]:
        """Steps of which a time, a rate or a clock is stated."""
        return [own for own in self.steps if own.is_timed]


def starts_of(
    path: Path, steps: Sequence[LoggedStep], heads: Sequence[Head]
) -> tuple[Start, ...]:
    """Return the starts in the lines of one rank. Raises ConfigError.

    A job begins anew where facts are stated again, where numbers go back to a checkpoint or
    where a clock goes back. A line of the same step again is of another rank, unless it has
    another time by a clock.
    """
    places = [bisect_left(heads, step.line, key=lambda own: own.line) - 1 for step in steps]
    has_head = [False, *(before != after for before, after in pairwise(places))]
    most = max(_FEWEST_RESTARTS, _MOST_RESTARTS * len(steps))
    _check_order(path, steps, has_head, most)
    has_ranks = _has_ranks(path, steps, has_head, most)
    starts: list[Start] = []
    for place, step in enumerate(steps):
        before = steps[place - 1] if place else None
        if before is None or has_head[place] or _is_behind(before, step):
            is_swapped = before is not None and not has_head[place]
            after = steps[place + 1] if place + 1 < len(steps) else None
            if not (is_swapped and _insert(starts[-1].steps, step, after)):
                starts.append(Start(steps=[step], head=heads[places[place]]))
        elif _is_again(before, step):
            if not has_ranks and _differs(before, step):
                starts.append(Start(steps=[step], head=heads[places[place]]))
        elif step.number > starts[-1].steps[-1].number or step.clock_s is not None:
            starts[-1].steps.append(step)
    return tuple(starts)


def shown_start(starts: Sequence[Start]) -> int:
    """Return the place of the last start with enough lines, or else of the last with any."""
    for fewest in (FEWEST_LINES, 1):
        for place in reversed(range(len(starts))):
            if len(starts[place].timed) >= fewest:
                return place
    return len(starts) - 1


def _is_behind(before: LoggedStep, step: LoggedStep) -> bool:
    is_earlier = (
        step.clock_s is not None
        and before.clock_s is not None
        and step.clock_s < before.clock_s
    )
    return step.number < before.number or is_earlier


def _is_again(before: LoggedStep, step: LoggedStep) -> bool:
    return step.number == before.number and step.clock_s == before.clock_s


def _differs(before: LoggedStep, step: LoggedStep) -> bool:
    """Return whether lines of one step are of two jobs or starts; a bar is drawn again."""
    ratio = ratio_of(before, step)
    return before.line != step.line and ratio is not None and is_other(ratio)


def ratio_of(before: LoggedStep, step: LoggedStep) -> float | None:
    """Return the time of a step over that of another, as logged, or the other way of a rate."""
    for name in _COSTS:
        first, second = getattr(before, name), getattr(step, name)
        if first and second:
            return float(second / first)
    return None


def is_other(ratio: float) -> bool:
    """Return whether times of one step differ more than ranks of a job do."""
    return 1 - min(ratio, 1 / ratio) > MOST_DIFFERENCE


def _insert(steps: list[LoggedStep], step: LoggedStep, after: LoggedStep | None) -> bool:
    """Insert a step whose line only changed places with the one before; False: it did not.

    After a restart, the steps that were done before follow again.
    """
    if step.number >= steps[-1].number or step.clock_s is not None:
        return False
    if after and after.number <= steps[-1].number:
        return False
    if len(steps) > 1 and steps[-2].number >= step.number:
        return False
    steps.insert(-1, step)
    return True


def _check_order(
    path: Path, steps: Sequence[LoggedStep], has_head: Sequence[bool], most: float
) -> None:
    num_back = sum(
        after.number < before.number and not is_head
        for (before, after), is_head in zip(pairwise(steps), has_head[1:], strict=True)
    )
    if num_back > most:
        allowed = (
            "a log of one rank, or with the launcher's prefix of each: step numbers go back in "
            f"{num_back} of {len(steps)} lines"
        )
        raise ConfigError("file", path, allowed)


def _has_ranks(
    path: Path, steps: Sequence[LoggedStep], has_head: Sequence[bool], most: float
) -> bool:
    """Return whether ranks without a tag log the same steps. Raises ConfigError for jobs."""
    again = [
        _differs(before, after)
        for (before, after), is_head in zip(pairwise(steps), has_head[1:], strict=True)
        if not is_head and _is_again(before, after)
    ]
    if len(again) <= most:
        return False
    if sum(again) > max(1, _MOST_RESTARTS * len(again)):
        allowed = (
            f"a log of one job: {sum(again)} of {len(steps)} lines state a time of the step "
            f"before that differs by more than {MOST_DIFFERENCE:.0%}"
        )
        raise ConfigError("file", path, allowed)
    return True
