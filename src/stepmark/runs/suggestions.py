"""What is worth doing after a step was measured: what its ledger shows, and the command."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from shlex import join

from stepmark.cases.record import Environment
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, Fp8
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import argv
from stepmark.predictions.predicted_steps import Suggestion
from stepmark.store.commands import command_of
from stepmark.tables.columns import Row, digits, number, text
from stepmark.timeline.ledger import RECOMPUTED, WAITING, Group, Idle, Ledger, Work
from stepmark.timeline.ledger_text import doubt, largest_difference, lines_of, words_of
from stepmark.training import train_refusals
from stepmark.training.train_options import options_of

MOST = 3
_NOTABLE = 0.01  # of the step
_FREE = 0.6  # of the memory: a larger batch may fit below it
_FP8_CAPABILITY = (8, 9)
# The table of a trace that shows what a line consists of.
_TRACE_OF = {
    Group.COMPUTE: "kernels",
    Group.OVERLAPPED: "kernels",
    Group.COMM: "messages",
    Group.COPIES: "kernels",
    Group.IDLE: "breakdown",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A measured step and where it is from.

    run: as a command takes it; step: options that tell it from other steps of the run;
    has_trace: its traces are kept; row: its figures.
    """

    case: TrainCase
    predicted: Ledger | None
    measured: Ledger
    run: str
    step: tuple[str, ...] = ()
    has_trace: bool
    row: Row
    environment: Environment


def suggestions(step: Measurement) -> tuple[Suggestion, ...]:
    """Return at most three: a doubt, the largest difference, then the largest gains.

    No two gains are of the same time, so that they never add up to more than the step. Each
    text is one line of a terminal.
    """
    parts = (_communication, _idle, _recomputation, _products)
    gains = sorted(
        chain.from_iterable(part(step) for part in parts),
        key=lambda each: -(each.gain_ns or 0),
    )
    left_ns = step.measured.window_ns
    notable = []
    for each in gains:
        gain_ns = each.gain_ns or 0
        if _share(step, _NOTABLE) <= gain_ns <= left_ns:
            left_ns -= gain_ns
            notable.append(each)
    of_lines = () if doubt(step.measured) else (*_difference(step), *notable)
    return tuple([*_doubt(step), *of_lines, *_batch(step)][:MOST])


def _share(step: Measurement, share: float) -> float:
    return share * step.measured.window_ns


def _doubt(step: Measurement) -> Iterator[Suggestion]:
    """Yield the repetition of a measurement, or of a profile, that something speaks against."""
    if validity := text(step.row, "validity"):
        command = f"{command_of(step.case)} --launches 3"
        yield Suggestion(
            text=f"The step is doubtful ({validity}): measure it again", command=command
        )
    if doubt(step.measured):
        command = f"{command_of(step.case)} --profile"
        yield Suggestion(
            text="The profile leaves the step unexplained: profile it again", command=command
        )


def _difference(step: Measurement) -> Iterator[Suggestion]:
    """Yield the line that explains most of the difference from the prediction.

    It is no gain beside the others: what avoids the time of the line is one of them.
    """
    if step.predicted is None or not step.has_trace:
        return
    apart_ns = abs(step.measured.window_ns - step.predicted.window_ns)
    if apart_ns < _share(step, _NOTABLE):
        return
    largest = largest_difference(step.predicted, step.measured)
    group, name = largest.line
    verb = _TRACE_OF[group]
    if name in (Idle.HOST, Idle.LAUNCH_GAP, Idle.RANK) and step.case.device == "cuda":
        verb = "critical-path"
    side = "above" if largest.ns > 0 else "below"
    # Other lines differ in the other direction where one explains more than all.
    part = "All" if abs(largest.ns) >= apart_ns else _ms(abs(largest.ns))
    yield Suggestion(
        text=f"{part} of the {_ms(apart_ns)} {side} the prediction is {words_of(largest.line)}",
        command=join(["stepmark", "trace", verb, step.run]),
    )


def _communication(step: Measurement) -> Iterator[Suggestion]:
    own = step.measured
    exposed_ns = own.total(Group.COMM)
    waiting_ns = own.within.get(WAITING, 0)
    if 2 * waiting_ns > exposed_ns:
        if step.has_trace:
            yield Suggestion(
                text=f"Ranks wait {_ms(waiting_ns)} for others: find the slow one",
                command=join(["stepmark", "trace", "critical-path", step.run]),
                gain_ns=waiting_ns,
            )
    elif exposed_ns:
        gain_ns = (exposed_ns - waiting_ns) // 2
        yield Suggestion(
            text=f"Exposed communication, mostly {lines_of([own], Group.COMM)[0][1]}: links "
            f"twice as fast save at most {_gain(step, gain_ns)}",
            command=_prediction(step, "--what-if", "link=2x"),
            gain_ns=gain_ns,
        )


def _idle(step: Measurement) -> Iterator[Suggestion]:
    lines = step.measured.lines
    case = step.case
    data_ns = lines.get((Group.IDLE, Idle.DATA), 0)
    if data_ns and not case.workers:
        yield from _changed(
            step,
            replace(case, workers=2),
            "Waiting for batches takes {}: load them in two processes",
            data_ns,
        )
    host_ns = sum(lines.get((Group.IDLE, cause), 0) for cause in (Idle.HOST, Idle.LAUNCH_GAP))
    what = "The GPU idles between kernels, at most {} to gain: "
    if case.device != "cuda":
        return
    if case.compile is CompileScope.NONE:
        changed = replace(case, compile=CompileScope.BLOCK)
        how = "compile the model"
    else:
        changed = replace(case, cuda_graph=True)
        how = "capture the step as a graph"
    if not case.cuda_graph:
        yield from _changed(step, changed, what + how, host_ns)


def _recomputation(step: Measurement) -> Iterator[Suggestion]:
    recomputed_ns = step.measured.within.get(RECOMPUTED, 0)
    if recomputed_ns:
        yield Suggestion(
            text=f"Activation checkpointing computes again for {_gain(step, recomputed_ns)}: "
            "see whether the step fits without",
            command=_prediction(step, "--ac", "none"),
            gain_ns=recomputed_ns,
        )


def _products(step: Measurement) -> Iterator[Suggestion]:
    groups = (Group.COMPUTE, Group.OVERLAPPED)
    gain_ns = sum(step.measured.lines.get((group, Work.MATMUL), 0) for group in groups) // 2
    has_fp8 = "torchao" in step.environment.versions and all(
        _capability(device.capability) >= _FP8_CAPABILITY for device in step.environment.devices
    )
    # Without a narrower type no flag makes products faster.
    if step.case.device == "cuda" and has_fp8 and step.case.fp8 is Fp8.NONE:
        what = "Matrix products have twice the peak in FP8, at most {} to gain: measure it"
        yield from _changed(step, replace(step.case, fp8=Fp8.TENSORWISE), what, gain_ns)


def _prediction(step: Measurement, *changes: str) -> str:
    return join(["stepmark", "predict", *step.step, "--from-run", step.run, *changes])


def _capability(words: str) -> tuple[int, ...]:
    parts = words.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _changed(
    step: Measurement, case: TrainCase, what: str, gain_ns: int
) -> Iterator[Suggestion]:
    """Yield the measurement of a changed case, where this can run and there is a gain."""
    try:
        train_refusals.check(case, options_of(case))
    except ConfigError:
        return
    if gain_ns:
        text = what.format(_gain(step, gain_ns))
        yield Suggestion(text=text, command=command_of(case), gain_ns=gain_ns)


def _batch(step: Measurement) -> Iterator[Suggestion]:
    """Yield a search of the batch where a larger one may fit."""
    reserved = number(step.row, "reserved_gib")
    total = number(step.row, "device_gib")
    if step.case.device != "cuda" or not reserved or not total or reserved > _FREE * total:
        return
    options = replace(options_of(step.case), mbs=None, find_batch=True)
    yield Suggestion(
        text=f"{digits(reserved, 3)} of {digits(total, 3)} GiB of memory are used: search the "
        "batch with the most tokens/s",
        command=join(["stepmark", "train", *argv(options)]),
    )


def _gain(step: Measurement, time_ns: int) -> str:
    return f"{_ms(time_ns)} ({100 * time_ns / step.measured.window_ns:.1f} %)"


def _ms(time_ns: int) -> str:
    return f"{digits(time_ns / 1e6, 3)} ms"
