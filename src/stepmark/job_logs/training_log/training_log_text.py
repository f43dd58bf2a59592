"""What a training log shows: the answer, its figures as tables, and findings."""

import math
from collections.abc import Iterator
from dataclasses import asdict, fields
from statistics import median

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.ground.units import comma_list, format_bytes, format_time, plural
from stepmark.job_logs.training_log.starts import FEWEST_LINES
from stepmark.job_logs.training_log.steady_state import SteadyState
from stepmark.job_logs.training_log.step_lines import LoggedStep
from stepmark.job_logs.training_log.training_log import SECONDS, TrainingLog
from stepmark.tables.columns import COUNT, NUMBER, SHARE, Row, given
from stepmark.tables.row_tables import LEAD
from stepmark.tables.table import Table

_MOST_NAMED = 8
_PARTS = (
    given("part"),
    given("lines", COUNT),
    given("steps", COUNT),
    given("median"),
    given("longest"),
    given("share_pct", SHARE, "of the time"),
)
_FIGURES = (
    given("figure"),
    given("first", NUMBER),
    given("median", NUMBER),
    given("last", NUMBER),
    given("lowest", NUMBER),
    given("highest", NUMBER),
)
_NAMES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_s_gpu": "tokens/s/GPU",
    "tflops_gpu": "TFLOP/s/GPU, as logged",
    "memory_bytes": "memory, GiB",
}


def headline(log: TrainingLog, steady: SteadyState) -> str:
    """Return the answer: the time of a step or a rate, its noise, throughput and outliers."""
    what = "of one line" if steady.num_lines == 1 else f"median of {steady.num_lines} lines"
    if steady.num_steps != steady.num_lines:
        what += f" and {steady.num_steps} steps"
    if steady.is_steady and steady.doubt and not steady.speeds:
        what += ", warm-up unknown"
    elif steady.is_steady:
        what += f" after {steady.num_warmup} of warm-up"
    else:
        what += " of the second half: it never becomes steady"
    what += ", not of the last start" if log.num_later else ""
    low, high = (_cost_text(log, cost) for cost in sorted(steady.quartiles, key=log.value_of))
    text = f"{_cost_text(log, steady.median)}{' a step' if log.unit == SECONDS else ''}"
    text += f" ({what}; quartiles {low} to {high}, {_interval(steady)})"
    if steady.speeds:
        groups = (
            f"{lines} lines near {_cost_text(log, cost)}" for lines, cost in steady.speeds
        )
        text += f"; two speeds: {' and '.join(groups)}"
    rates = [rate for rate in _throughput(log, steady) if rate]
    text += f"; {', '.join(rates)}" if rates else ""
    if steady.outliers:
        count = len(steady.outliers)
        lines = "1 outlier costs" if count == 1 else f"{count} outliers cost"
        text += f"; {lines} {steady.outlier_share:.1%} of the time"
    return text


def _interval(steady: SteadyState) -> str:
    if steady.low is None or steady.high is None:
        return "too few lines for an interval"
    half = (steady.high - steady.low) / 2 / steady.median
    return f"median +-{half:.2%}" if half >= 1e-4 else "median within 0.01%"


def _cost_text(log: TrainingLog, cost: float) -> str:
    return format_time(cost) if log.unit == SECONDS else f"{1 / cost:,.5g} {log.unit}"


def _throughput(log: TrainingLog, steady: SteadyState) -> Iterator[str]:
    if log.unit != SECONDS:
        return
    own = log.steps[steady.num_warmup :]
    for name, unit in (("tokens_per_s", "tokens/s"), ("tokens_per_s_gpu", "tokens/s/GPU")):
        values = [value for step in own if (value := getattr(step, name))]
        if len(values) == len(own):
            yield f"{median(values):,.0f} {unit}"


def lines(log: TrainingLog, steady: SteadyState) -> Iterator[str]:
    """Yield what the figures assume, the job, and tables of parts and figures."""
    yield from _facts(log, steady)
    yield ""
    yield from Table(part_rows(log, steady), _PARTS).text()
    yield ""
    yield from Table(figure_rows(log), _FIGURES).text()


def _facts(log: TrainingLog, steady: SteadyState) -> Iterator[str]:
    facts = log.facts
    first, last = log.steps[0], log.steps[-1]
    words = [f"{log.trainer}, steps {first.number} to {last.number}"]
    if log.num_ranks_logged > 1:
        words.append(f"lines of {log.num_ranks_logged} ranks, of which one counts")
    words += [plural(facts.num_ranks, "GPU")] if facts.num_ranks else []
    batch = next((own.batch for own in reversed(log.steps) if own.batch), facts.batch)
    words += [f"global batch {batch:g}"] if batch else []
    words += [f"sequences of {facts.seq_len}"] if facts.seq_len else []
    words += [f"{facts.parameters / 1e9:.4g} B parameters"] if facts.parameters else []
    words += [f"{format_bytes(facts.memory_bytes)} reserved"] if facts.memory_bytes else []
    yield f"{'training':<{LEAD}}{', '.join(words)}"
    times = [f"times {log.time_from}" if log.unit == SECONDS else "rates as printed"]
    times += [span] if (span := span_text(log)) else []
    if steady.num_others:
        number = log.steps[steady.num_others].number
        times.append(f"steps before {number} have another global batch, and count as warm-up")
    times += [f"figures of {log.digits} significant digits"] if log.digits else []
    times += [log.remark] if log.remark else []
    times.append("another launch may differ by more than these steps do")
    yield f"{'assumes':<{LEAD}}{'; '.join(times)}"
    if unknown := _unknown(log):
        yield f"{'unknown':<{LEAD}}{unknown}"
    if steady.outliers:
        yield f"{'outliers':<{LEAD}}{_outliers(log, steady)}"
    if steady.trend is not None:
        yield f"{'trend':<{LEAD}}{trend_text(log, steady.trend, steady.num_warmup)}"


def trend_text(log: TrainingLog, per_1000: float, num_warmup: int) -> str:
    """Return the change over the steps of the log: further ones need not go on so."""
    begin, end = log.steps[num_warmup].number, log.steps[-1].number
    change = per_1000 * (end - begin) / 1000
    word = "longer" if change > 0 else "shorter"
    return f"steps get {abs(change):.2%} {word} from step {begin} to {end}"


def span_text(log: TrainingLog) -> str:
    """Return of how many steps each line is the mean; empty: each is a step."""
    spans = [own.span for own in log.steps]
    low, high = min(spans[1:], default=spans[0]), max(spans)
    if high == 1:
        return ""
    return f"each line the mean of {high if low == high else f'{low} to {high}'} steps"


def _unknown(log: TrainingLog) -> str:
    """Return what the log lacks for the time of a step or for tokens per second."""
    facts = log.facts
    has_batch = bool(facts.batch or log.steps[-1].batch)
    needed = {
        "the global batch": has_batch or facts.tokens is not None,
        "the sequence length": facts.seq_len is not None or facts.tokens is not None,
        "the number of GPUs": facts.num_ranks is not None,
    }
    missing = [name for name, is_known in needed.items() if not is_known]
    if log.unit != SECONDS:
        return f"the time of a step: the log does not state {' and '.join(missing)}"
    if log.steps[-1].tokens_per_s_gpu or not missing:
        return ""
    return f"tokens/s/GPU: the log does not state {' and '.join(missing)}"


def _outliers(log: TrainingLog, steady: SteadyState) -> str:
    costs = log.costs
    return comma_list(
        (
            f"step {log.steps[place].number} ({costs[place] / steady.median:.3g} x)"
            for place in steady.outliers
        ),
        _MOST_NAMED,
    )


def part_rows(log: TrainingLog, steady: SteadyState) -> list[Row]:
    """Return a row per part of the log, with its share of the time."""
    costs = log.costs
    times = [cost * own.span for cost, own in zip(costs, log.steps, strict=True)]
    is_time = log.unit == SECONDS
    total = math.fsum(times) + (log.pause_s if is_time else 0.0)
    outliers = set(steady.outliers)
    first = steady.num_warmup
    parts = {
        "warm-up" if steady.is_steady else "first half": range(first),
        "steady": [p for p in range(first, len(costs)) if p not in outliers],
        "outliers": sorted(outliers),
    }
    rows: list[Row] = [
        {
            "part": name,
            "lines": len(places),
            "steps": sum(log.steps[place].span for place in places),
            "median": _cost_text(log, median(costs[place] for place in places)),
            "longest": _cost_text(log, max(costs[place] for place in places)),
            "median_s": median(costs[place] for place in places) if is_time else None,
            "share_pct": 100 * math.fsum(times[place] for place in places) / total,
        }
        for name, places in parts.items()
        if places
    ]
    if log.pause_s:
        rows.append({"part": "between blocks", "share_pct": 100 * log.pause_s / total})
    return rows


def figure_rows(log: TrainingLog) -> list[Row]:
    """Return a row per figure that the steps state besides their time."""
    rows: list[Row] = []
    for name, heading in _NAMES.items():
        scale = 2**30 if name == "memory_bytes" else 1
        stated = [value for own in log.steps if (value := getattr(own, name)) is not None]
        values = [value / scale for value in stated if math.isfinite(value)]
        if values:
            rows.append(
                {
                    "figure": heading,
                    "first": values[0],
                    "median": median(values),
                    "last": values[-1],
                    "lowest": min(values),
                    "highest": max(values),
                }
            )
    return rows


def step_rows(log: TrainingLog, steady: SteadyState) -> list[Row]:
    """Return a row per line of steps."""
    outliers = set(steady.outliers)
    names = [each.name for each in fields(LoggedStep) if each.name != "number"]
    return [
        {
            "step": own.number,
            "part": "warm-up"
            if place < steady.num_warmup
            else "outlier"
            if place in outliers
            else "steady",
            **{name: getattr(own, name) for name in names},
        }
        for place, own in enumerate(log.steps)
    ]


def summary_row(log: TrainingLog, steady: SteadyState) -> Row:
    """Return the answer and what it rests on as one row, with values in `unit`."""
    quartiles = sorted(map(log.value_of, steady.quartiles))
    ends: list[float] | None = None
    if steady.low is not None and steady.high is not None:
        ends = sorted(map(log.value_of, (steady.low, steady.high)))
    return {
        "file": log.file,
        "trainer": log.trainer,
        **asdict(log.facts),
        "unit": log.unit,
        "median": log.value_of(steady.median),
        "quartile_1": quartiles[0],
        "quartile_3": quartiles[1],
        "low": None if ends is None else ends[0],
        "high": None if ends is None else ends[1],
        "warmup_lines": steady.num_warmup,
        "lines": steady.num_lines,
        "steps": steady.num_steps,
        "is_steady": steady.is_steady,
        "outliers": len(steady.outliers),
        "outlier_share_pct": 100 * steady.outlier_share,
        "trend_pct_per_1000_steps": None if steady.trend is None else 100 * steady.trend,
        "pause_s": log.pause_s or None,
        "time_from": log.time_from if log.unit == SECONDS else None,
    }


def findings(log: TrainingLog) -> Iterator[Finding]:
    """Yield restarts, steps whose loss is no number, and lines that are cut."""
    if log.restarts or log.empty_start:
        yield Finding(
            rule="steps-again",
            severity=Severity.NOTE,
            text=_restarts_text(log),
            evidence=tuple(_evidence(log, own) for own in log.restarts[-1:]),
            count=len(log.restarts) + bool(log.empty_start),
        )
    for trainer, first, last in log.left_out:
        yield Finding(
            # The end of a file is that of these steps where no other job went on beside them.
            rule="several-jobs" if last > log.steps[0].line else "steps-left-out",
            severity=Severity.WARNING,
            text=f"Steps of another job are left out: {trainer}'s in lines {first} to {last}.",
        )
    if log.other_rank:
        tag, ratio = log.other_rank
        yield Finding(
            rule="several-jobs",
            severity=Severity.WARNING,
            text=f"Lines with the prefix {tag} are of another job: their times of the same "
            f"steps differ by a factor of {ratio:.3g}.",
            action="Read the log of each job by itself.",
        )
    bad = log.bad_losses
    if bad:
        is_last = bad[-1].number >= log.steps[-1].number
        end = "and in the last line, too" if is_last else f"last in step {bad[-1].number}"
        yield Finding(
            rule="loss-nan",
            severity=Severity.PROBLEM if is_last else Severity.WARNING,
            text=f"The loss is nan in {plural(len(bad), 'line')}, from step "
            f"{bad[0].number} on, {end}.",
            evidence=(_evidence(log, bad[0]),),
            count=len(bad),
            action="Look at the steps before: learning rate, gradient norm, loss scale, data.",
        )
    if skipped := [own for own in log.steps if own.num_skipped]:
        yield Finding(
            rule="steps-skipped",
            severity=Severity.WARNING,
            text=f"{sum(int(own.num_skipped or 0) for own in skipped)} steps in "
            f"{plural(len(skipped), 'line')} run no update of the optimizer, from step "
            f"{skipped[0].number} on: these steps are shorter than others.",
            evidence=(_evidence(log, skipped[0]),),
            count=len(skipped),
        )
    if log.num_torn:
        count = (
            "1 line of a step is" if log.num_torn == 1 else f"{log.num_torn} lines of steps are"
        )
        yield Finding(
            rule="cut-steps",
            severity=Severity.NOTE,
            text=f"{count} cut or mixed with others, and left out.",
        )


def _restarts_text(log: TrainingLog) -> str:
    """Return where the job began anew, and of which start the figures are."""
    numbers = ", ".join(str(own.number) for own in log.restarts[-_MOST_NAMED:])
    places = [f"at step {numbers}"] if numbers else []
    places += [f"at line {log.empty_start}, without a step since"] if log.empty_start else []
    which = "the last start"
    if log.num_later:
        count = "1 later start" if log.num_later == 1 else f"{log.num_later} later starts"
        which = f"the start before {count} of fewer than {FEWEST_LINES} timed lines"
    elif log.empty_start:
        which = "the last start with steps"
    return f"The job began anew {' and '.join(places)}: figures are of {which}."


def _evidence(log: TrainingLog, own: LoggedStep) -> Evidence:
    loss = "" if own.loss is None else f", loss {own.loss:g}"
    return Evidence(file=log.file, line=own.line, text=f"step {own.number}{loss}")
