"""A measured step and its prediction: the gap, and what alone would explain it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from stepmark.cases.flops import TokenFlops
from stepmark.findings.finding import Severity
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import Reader, exact
from stepmark.ground.units import format_time, parse_duration
from stepmark.tables.columns import FLOPS, PERCENT, given
from stepmark.tables.table import Table

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6}
_RATE = re.compile(r"([\d.]+)\s*([km]?)\s*tok(?:ens?)?/s(/gpu)?", re.IGNORECASE)
_MOST = 1024.0  # times as slow or as fast: more explains nothing
CLOSE = 2e-3  # of the measured step
_MOST_ROUNDS = 20
HOST = "host"
# What has a factor: those of --what-if, and the host.
_PARTS = {
    "flops": "matrix products and attention",
    "hbm": "memory bandwidth",
    "link": "links between GPUs",
    HOST: "the host",
}
_COLUMNS = (
    given("convention", heading="MFU by convention"),
    given("flops_per_token", FLOPS, "FLOPs a token"),
    given("predicted_mfu_pct", PERCENT, "predicted %"),
    given("measured_mfu_pct", PERCENT, "measured %"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a measured step: its seconds, or tokens per second, of all GPUs or of one.

    file: the training log of which it is the steady step; tokens, num_ranks, batch (sequences)
    and seq_len: those of a step there, None where it does not state them. notes: on the log;
    warnings: on what may make its steps shorter or longer.
    """

    value: float
    unit: str  # s, tokens/s, tokens/s/GPU
    file: str = ""
    tokens: int | None = None
    num_ranks: int | None = None
    batch: int | None = None
    seq_len: int | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.file or f"{exact(self.value)}{self.unit}"

    def step_s(
        self,
        tokens: int | None,
        num_ranks: int,
        seq_len: int | None = None,
        field: str = "measured",
    ) -> float:
        """Return the seconds of a step. Raises ConfigError for a rate of unknown tokens.

        And for a log of a step of other tokens, ranks or sequences.
        """
        batch = tokens // seq_len if tokens and seq_len and tokens % seq_len == 0 else None
        for name, own, value in (
            ("tokens", self.tokens, tokens),
            ("GPUs", self.num_ranks, num_ranks),
            ("sequences", self.batch, batch),
            ("tokens a sequence", self.seq_len, seq_len),
        ):
            if own and value and own != value:
                allowed = f"a log of a step of {value:,} {name}; this one states {own:,}"
                raise ConfigError(field, str(self), allowed)
        if self.unit == "s":
            return self.value
        if not tokens:
            allowed = "the time of a step: the file does not tell the tokens of a step"
            raise ConfigError(field, str(self), allowed)
        return tokens / (self.value * (num_ranks if self.unit.endswith("GPU") else 1))


def figure_of_log(path: Path, field: str) -> Figure:
    """Return the steady step of a training log.

    Raises ConfigError for a log without one, or whose loss is no number at its end.
    """
    # Its expressions take longer to compile than a prediction without a log.
    from stepmark.job_logs.training_log.steady_state import steady_state  # noqa: PLC0415
    from stepmark.job_logs.training_log.training_log import (  # noqa: PLC0415
        SAMPLES,
        SECONDS,
        read_training_log,
    )
    from stepmark.job_logs.training_log.training_log_text import findings  # noqa: PLC0415

    try:
        log = read_training_log(path)
    except ConfigError as error:
        raise ConfigError(field, path, error.allowed) from None
    if log.unit == SAMPLES:
        raise ConfigError(field, path, "a log that states its global batch, or a step's time")
    steady = steady_state(log)
    if steady.doubt:
        raise ConfigError(field, path, f"a log with a steady state: {steady.doubt}")
    notes: list[str] = []
    warnings: list[str] = []
    for finding in findings(log):
        if finding.severity is Severity.PROBLEM:
            raise ConfigError(field, path, f"a log of steps that train: {finding.text}")
        (warnings if finding.severity is Severity.WARNING else notes).append(finding.text)
    is_time = log.unit == SECONDS
    batch = log.steps[-1].batch or log.facts.batch
    stated = {
        "the number of GPUs": log.facts.num_ranks,
        "the tokens of a step": log.tokens,
        "the global batch": batch or log.tokens,
        "the sequence length": log.facts.seq_len or log.tokens,
    }
    if unknown := [name for name, value in stated.items() if value is None]:
        notes.append(f"The log does not state {', '.join(unknown)}: taken as predicted.")
    return Figure(
        steady.median if is_time else 1 / steady.median,
        log.unit,
        file=str(path),
        tokens=log.tokens,
        num_ranks=log.facts.num_ranks,
        batch=round(batch) if batch else None,
        seq_len=log.facts.seq_len,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _read_figure(text: str, field: str) -> Figure:
    if Path(text).is_file():
        return figure_of_log(Path(text), field)
    match = _RATE.fullmatch(text.strip())
    try:
        if not match:
            return Figure(parse_duration(text, field), "s")
        rate = float(match[1]) * _SCALES[match[2].lower()]
    except (ConfigError, ValueError):
        rate = 0.0
    if not match or not 0 < rate < 1e15:
        allowed = (
            "a step's time such as 14.7s, a rate: 9800tokens/s, 9800tokens/s/GPU, or a "
            "training log that exists"
        )
        raise ConfigError(field, text, allowed) from None
    return Figure(rate, "tokens/s/GPU" if match[3] else "tokens/s")


MeasuredFigure = Annotated[Figure, Reader(read=_read_figure, metavar="14.7s|LOG")]


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A measured step. factors: of a part's speed, each alone makes the prediction as long.

    None: none does. interval_s: of the prediction. notes: on the log.
    """

    step_s: float
    predicted_s: float
    factors: Mapping[str, float | None]
    interval_s: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.step_s / self.predicted_s

    def document(
        self, flops: TokenFlops | None, tokens: int | None, num_ranks: int, peak: float | None
    ) -> dict[str, Any]:
        """Return the measured step as plain data; peak: FLOP/s of a rank."""
        rate = tokens / num_ranks if tokens else None
        rows = []
        for name, per_token in (flops.by_convention() if flops else {}).items():
            of_peak = peak and rate and 100 * rate * per_token / peak
            rows.append(
                {
                    "convention": name,
                    "flops_per_token": per_token,
                    "predicted_mfu_pct": of_peak and of_peak / self.predicted_s,
                    "measured_mfu_pct": of_peak and of_peak / self.step_s,
                }
            )
        return {
            "step_s": self.step_s,
            "gap_s": self.step_s - self.predicted_s,
            "ratio": self.ratio,
            "tokens_per_s": tokens and tokens / self.step_s,
            "tokens_per_s_gpu": rate and rate / self.step_s,
            "conventions": rows,
            "factors": {**self.factors},
            "interval_s": self.interval_s,
            "notes": list(self.notes),
        }


def factor_for(step_s: Callable[[float], float], measured_s: float) -> float | None:
    """Return the factor of a rate with which a step takes as long as measured.

    step_s: of the factor; it never rises with it. None: no factor does.
    """

    def gap_s(slowdown: float) -> float:
        return step_s(1 / slowdown) - measured_s

    first, gap = 1.0, gap_s(1.0)
    # A step is no longer than in proportion to the slowdown of one part, so this is a bound.
    second = measured_s / (measured_s + gap)
    while (next_gap := gap_s(second)) * gap > 0 and abs(next_gap) > CLOSE * measured_s:
        if not 1 / _MOST <= second <= _MOST:
            return None
        first, gap = second, next_gap
        second = second * 4 if gap < 0 else second / 4
    if next_gap > 0:
        # So is this, and the root itself where this part alone bounds the step.
        second *= measured_s / (measured_s + next_gap)
        next_gap = gap_s(second)
    slowdown = _root(gap_s, (first, gap), (second, next_gap), CLOSE * measured_s)
    return None if slowdown is None else 1 / slowdown


def _root(
    gap_s: Callable[[float], float],
    first: tuple[float, float],
    second: tuple[float, float],
    close_s: float,
) -> float | None:
    """Return where the gap between these two points is 0, by false position (Illinois).

    A step is almost linear in the slowdown of a part. None where it jumps over 0.
    """
    (x0, y0), (x1, y1) = first, second
    for _ in range(_MOST_ROUNDS):
        if abs(y1) <= close_s:
            return x1
        x = x1 - y1 * (x1 - x0) / (y1 - y0)
        y = gap_s(x)
        if y * y1 < 0:
            x0, y0 = x1, y1
        else:
            y0 /= 2  # else one end would stay
        x1, y1 = x, y
    return None


def headline(measured: Mapping[str, Any]) -> str:
    """Return what follows the predicted step. measured: of MeasuredStep."""
    return f"measured {format_time(measured['step_s'])} ({measured['ratio']:.3g} x as long)"


def lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the gap is, and what would explain it. measured: of MeasuredStep."""
    gap_s = measured["gap_s"]
    ratio = measured["ratio"]
    text = format_time(measured["step_s"])
    if measured["tokens_per_s"]:
        text += f", {measured['tokens_per_s']:,.0f} tokens/s"
        text += f", {measured['tokens_per_s_gpu']:,.0f} tokens/s/GPU"
    yield f"  measured: {text}"
    yield from (f"    {note}" for note in measured["notes"])
    longer = "longer" if gap_s >= 0 else "shorter"
    gap = f"{format_time(abs(gap_s))} {longer} than predicted ({ratio - 1:+.1%}, {ratio:.3g} x)"
    if measured["interval_s"]:
        low_s, high_s = measured["interval_s"]
        where = "inside" if low_s <= measured["step_s"] <= high_s else "outside"
        ends = f"{format_time(low_s)} to {format_time(high_s)}"
        gap += f", {where} the interval of such predictions ({ends})"
    causes = list(_causes(measured))
    yield f"  gap: {gap}{'; any one of these would explain it:' if causes else ''}"
    yield from (f"    {cause}" for cause in causes)
    if names := [_PARTS[name] for name, factor in measured["factors"].items() if not factor]:
        yield f"    no speed of {' or of '.join(names)} alone explains it"
    if is_above_peak(measured):
        yield "    the products would be faster than the device's peak: check the figure"
    yield ""
    yield from Table(measured["conventions"], _COLUMNS).text()


def _causes(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield what explains the gap by itself."""
    for name, factor in measured["factors"].items():
        if factor is None:
            continue
        text = f"{_PARTS[name]} at {factor:.3g} x the predicted speed"
        if name == "flops" and factor < 1:
            text += f", as at a clock {100 * (1 - factor):.0f} % lower"
        yield text if name == HOST else f"{text} (--what-if {name}={factor:.3g}x)"


def is_above_peak(measured: Mapping[str, Any]) -> bool:
    """Return whether the products that run are faster than the device's peak."""
    return any(
        row["convention"] == "hfu" and (row["measured_mfu_pct"] or 0.0) > 100
        for row in measured["conventions"]
    )
