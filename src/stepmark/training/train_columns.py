"""Columns of the rows of training steps: rates in named conventions, phases, memory.

One row per record, or one per rank of it. Times are of the slowest rank of each sample;
phases, clock and power of the rank that is slowest over all samples.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from statistics import median

from stepmark.cases.case import OpCase
from stepmark.cases.flops import TokenFlops, per_token
from stepmark.cases.record import Measured, Record, RunInfo
from stepmark.cases.train_case import TrainCase
from stepmark.cases.train_words import (
    calibrates,
    compile_text,
    fp8_text,
    recompute_text,
    shape_text,
    techniques,
)
from stepmark.cases.training import Training
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.ground.units import GIB
from stepmark.model.device import DeviceSpec
from stepmark.model.model_names import distinct_names
from stepmark.store.commands import command_of
from stepmark.tables.columns import (
    BY_RANK,
    CONSOLE,
    COUNT,
    EVERYWHERE,
    FLAG,
    NUMBER,
    PAGE,
    PERCENT,
    RATIO,
    SECONDS,
    SHOWN,
    TEXT,
    Column,
    Row,
    View,
    case_columns,
    number,
    rows_of,
)
from stepmark.tables.launches import is_often, message_of
from stepmark.tables.outcomes import (
    Ceilings,
    Figures,
    figure,
    measured_ceilings,
    num_wrong,
    rank_words,
    ratio,
    spread_pct,
    spread_words,
    status_words,
    validity,
)
from stepmark.training.training_rates import PeakReference, drift, means_of, phases, rates


@dataclass(frozen=True, kw_only=True)
class TrainFigures(Figures):
    """Figures of a measured training case."""

    against: PeakReference

    @property
    def training(self) -> Training | None:
        return self.record.training

    @property
    def vs_median_rank(self) -> float | None:
        several = len(self.medians) > 1 or self.rank is not None
        return ratio(self.medians, self.shown) if several else None

    @property
    def is_straggler(self) -> bool | None:
        seconds = self.record.samples.seconds
        return _is_often_slowest(seconds, self.shown) if len(seconds) > 1 else None

    @cached_property
    def phases(self) -> Row:
        return phases(self.record, self.shown)

    @cached_property
    def rates(self) -> Row:
        return rates(self.record, self.training, self.against) if self.training else {}

    def gib(self, by_rank: Sequence[int | None]) -> float | None:
        """Return the memory of this rank, or of the rank that uses most."""
        sizes = [value for value in self.own(by_rank) if value is not None]
        return max(sizes) / GIB if sizes else None

    @property
    def device_gib(self) -> float | None:
        """Return the memory of the smallest device, on a CPU that of its host."""
        devices = self.against.run.environment.devices
        sizes = [device.memory_bytes for device in devices if device.memory_bytes]
        return min(sizes) / GIB if sizes else None

    @property
    def memory_gib(self) -> float | None:
        """Return what torch reserves on a GPU, or the process has resident on a CPU."""
        if (training := self.training) is None:
            return None
        return self.gib(training.reserved_bytes) or self.gib(training.resident_bytes)

    @property
    def alloc_retries(self) -> int | None:
        retries = self.own(self.training.alloc_retries) if self.training else ()
        return sum(filter(None, retries)) if retries else None

    @property
    def loss_falls(self) -> bool | None:
        """Return False for a loss on text that does not fall; None where it was not checked."""
        if not self.record.num_wrong or self.record.train.data == "random":
            return None
        is_finite = self.training and all(map(isfinite, self.training.loss))
        return False if is_finite else None

    @property
    def drift_pct(self) -> float | None:
        if self.training is None:
            return None
        change = drift(slowest_per_sample(self.record.samples.seconds), self.training.cycle)
        return None if change is None else 100 * change

    @property
    def validity(self) -> str | None:
        """Return what speaks against the rates. Cycles are compared, not single samples."""
        cycle = self.training.cycle if self.training else 1
        means = means_of(slowest_per_sample(self.record.samples.seconds), cycle)
        return validity(
            [self.record.telemetry],
            spread_pct(summarize(means)) if means else None,
            records=self.records,
            above_limit=bool(self.rates.get("over_limit")),
            pct_ceiling=number(self.rates, "pct_ceiling"),
        )

    @cached_property
    def slow_forward(self) -> tuple[int | None, float | None]:
        """Return the rank with the longest forward pass, and its time over the median rank's.

        None unless it is the slowest of a sample more often than by chance.
        """
        forward = self.training.fwd_s if self.training else ()
        if len(forward) < 2 or not all(forward):
            return None, None
        medians = [median(values) for values in forward]
        slow = medians.index(max(medians))
        if not _is_often_slowest(forward, slow):
            return None, None
        return slow, ratio(medians, slow)


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """A row: a record of training, and its figures if it was measured."""

    record: Record
    run: RunInfo
    figures: TrainFigures | None
    model_name: str  # which tells models of the table apart

    @property
    def case(self) -> TrainCase:
        return self.record.train

    @cached_property
    def per_token(self) -> TokenFlops:
        return per_token(self.case)

    @property
    def num_wrong(self) -> int | None:
        rank = self.figures.rank if self.figures else None
        return num_wrong(self.record, rank) if isinstance(self.record, Measured) else None

    @property
    def status(self) -> str:
        wrong = isinstance(self.record, Measured) and self.record.num_wrong
        return "wrong" if wrong else self.record.kind


def all_ranks(of: Callable[[TrainFigures], object]) -> Callable[[TrainOutcome], object]:
    """Make a column of all ranks together."""
    return figure(lambda f: of(f) if f.rank is None else None)


def step(of: Callable[[Training], object]) -> Callable[[TrainOutcome], object]:
    """Make a column of the data that training records in addition to samples."""
    return all_ranks(lambda f: None if f.training is None else of(f.training))


def _rate(name: str) -> Callable[[TrainOutcome], object]:
    return all_ranks(lambda f: f.rates.get(name))


def _phase(name: str) -> Callable[[TrainOutcome], object]:
    return figure(lambda f: f.phases.get(name))


def _measured(of: Callable[[Measured], object]) -> Callable[[TrainOutcome], object]:
    return lambda o: of(o.record) if isinstance(o.record, Measured) else None


_RANKS = frozenset({View.RANKS})
TRAIN_COLUMNS: tuple[Column[TrainOutcome], ...] = (
    Column("family", lambda o: o.case.family),
    Column("model", lambda o: o.model_name, views=SHOWN),
    Column("shape", lambda o: shape_text(o.case)),
    Column("strategy", lambda o: o.case.strategy, views=SHOWN),
    Column("num_ranks", lambda o: o.case.num_ranks, COUNT, "ranks", SHOWN),
    Column("mbs", lambda o: o.case.mbs, COUNT, "", SHOWN),
    Column("seq_len", lambda o: o.case.model.seq_len, COUNT, "seq", SHOWN, 5),
    Column("schedule", lambda o: o.case.schedule.value, TEXT, "", PAGE),
    Column("techniques", lambda o: techniques(o.case), views=SHOWN),
    Column("fp8", lambda o: fp8_text(o.case)),
    Column("compile", lambda o: compile_text(o.case)),
    Column("recompute", lambda o: recompute_text(o.case)),
    Column("dtype", lambda o: o.case.dtype.value),
    *case_columns(TrainCase, lambda o: o.case),
    Column("calibrates", lambda o: calibrates(o.case) or None, views=SHOWN, leaves=4),
    Column("flops_per_token", lambda o: o.per_token.causal, NUMBER),
    Column("flops_per_token_torchtitan", lambda o: o.per_token.torchtitan, NUMBER),
    Column("flops_per_token_palm_all", lambda o: o.per_token.palm_all, NUMBER),
    Column("flops_per_token_hfu", lambda o: o.per_token.hfu, NUMBER),
    Column("not_modelled", lambda o: "; ".join(o.case.model.unmodelled) or None),
    Column("launch", lambda o: o.record.launch, COUNT),
    Column("case_id", lambda o: o.record.case.case_id),
    Column("run_id", lambda o: o.run.run_id),
    Column("command", lambda o: command_of(o.record.case)),
    Column("rank", figure(lambda f: f.rank), COUNT, "", _RANKS, words=rank_words),
    Column("time_s", figure(lambda f: f.times.median), SECONDS, "sample", EVERYWHERE),
    Column("mean_s", figure(lambda f: f.times.mean), SECONDS),
    Column("p10_s", figure(lambda f: f.times.p10), SECONDS, "p10", PAGE),
    Column("p90_s", figure(lambda f: f.times.p90), SECONDS, "p90", PAGE),
    Column("min_s", figure(lambda f: f.times.min), SECONDS, "min", PAGE),
    Column("max_s", figure(lambda f: f.times.max), SECONDS, "max", PAGE),
    Column(
        "spread_pct",
        figure(lambda f: f.spread_pct),
        PERCENT,
        "+- %",
        CONSOLE,
        3,
        words=spread_words,
    ),
    Column("n", figure(lambda f: f.times.n), COUNT, "", SHOWN, 6),
    Column("tokens_per_s_gpu", _rate("tokens_per_s_gpu"), NUMBER, "tokens/s/GPU", SHOWN),
    Column("tokens_per_s", _rate("tokens_per_s"), NUMBER, "tokens/s", PAGE),
    Column("tokens_per_s_gpu_median", _rate("tokens_per_s_gpu_median"), NUMBER),
    Column("whole_cycles", _rate("whole_cycles"), COUNT),
    Column("cycle", step(lambda t: t.cycle), COUNT),
    Column("tflops", _rate("tflops"), NUMBER, "TFLOP/s causal", SHOWN),
    Column("tflops_torchtitan", _rate("tflops_torchtitan"), NUMBER, "torchtitan", SHOWN, 2),
    Column("tflops_palm_all", _rate("tflops_palm_all"), NUMBER, "palm-all", SHOWN, 1),
    Column("tflops_hfu", _rate("tflops_hfu"), NUMBER, "with recompute", PAGE),
    Column("peak_dtype", _rate("peak_dtype")),
    Column("peak_tflops", _rate("peak_tflops"), NUMBER),
    Column("mfu_pct", _rate("mfu_pct"), PERCENT, "MFU % (causal)", SHOWN),
    Column(
        "mfu_torchtitan_pct", _rate("mfu_torchtitan_pct"), PERCENT, "MFU % (torchtitan)", PAGE
    ),
    Column("mfu_palm_all_pct", _rate("mfu_palm_all_pct"), PERCENT, "MFU % (palm-all)", PAGE),
    Column("hfu_pct", _rate("hfu_pct"), PERCENT, "HFU %", PAGE),
    Column("mfu_fp8_pct", _rate("mfu_fp8_pct"), PERCENT, "% FP8 peak (causal)", SHOWN, 4),
    Column("ceiling_tflops", _rate("ceiling_tflops"), NUMBER),
    Column("pct_ceiling", _rate("pct_ceiling"), PERCENT, "% ceiling", SHOWN, 5),
    Column("fwd_s", _phase("fwd_s"), SECONDS, "fwd", BY_RANK, 2),
    Column("bwd_s", _phase("bwd_s"), SECONDS, "bwd", BY_RANK, 2),
    Column("optim_s", _phase("optim_s"), SECONDS, "optim", BY_RANK, 2),
    Column("other_s", _phase("other_s"), SECONDS, "other", BY_RANK, 3),
    Column("data_s", _phase("data_s"), SECONDS, "data wait", BY_RANK, 3),
    Column("data_max_s", _phase("data_max_s"), SECONDS),
    Column(
        "allocated_gib",
        figure(lambda f: f.training and f.gib(f.training.allocated_bytes)),
        NUMBER,
        "GiB allocated",
        EVERYWHERE,
        2,
    ),
    Column(
        "reserved_gib",
        figure(lambda f: f.training and f.gib(f.training.reserved_bytes)),
        NUMBER,
        "GiB reserved",
        BY_RANK,
        4,
    ),
    Column("memory_gib", figure(lambda f: f.memory_gib), NUMBER),
    Column("device_gib", all_ranks(lambda f: f.device_gib), NUMBER),
    Column("alloc_retries", figure(lambda f: f.alloc_retries), COUNT, "alloc retries", PAGE),
    Column("clock_mhz", figure(lambda f: f.clock_mhz), NUMBER, "MHz", BY_RANK, 1),
    Column("power_w", figure(lambda f: f.state("power_w")), NUMBER, "W", BY_RANK, 1),
    Column("throttle", figure(lambda f: f.throttle), TEXT, "throttled", BY_RANK, 1),
    Column(
        "loss_first", step(lambda t: t.loss[0] if t.loss else None), NUMBER, "first loss", PAGE
    ),
    Column(
        "loss_last",
        step(lambda t: t.loss[-1] if t.loss else None),
        NUMBER,
        "last loss",
        SHOWN,
        3,
    ),
    Column("num_wrong", lambda o: o.num_wrong, COUNT, "#wrong", PAGE),
    Column("loss_falls", all_ranks(lambda f: f.loss_falls), FLAG),
    Column("interrupted", step(lambda t: t.interrupted or None), FLAG),
    Column(
        "warmup_samples",
        step(lambda t: len(t.warmup_s[0]) if t.warmup_s else 0),
        COUNT,
        "warm-up",
        PAGE,
    ),
    Column("drift_pct", all_ranks(lambda f: f.drift_pct), PERCENT, "drift %", PAGE),
    Column("build_s", step(lambda t: t.build_s or None), SECONDS, "build", PAGE),
    Column("first_s", step(lambda t: t.first_s or None), SECONDS, "first sample", PAGE),
    Column("recompiles", step(lambda t: t.recompiles), COUNT, "", PAGE),
    Column("graph_breaks", step(lambda t: t.graph_breaks), COUNT, "graph breaks", PAGE),
    Column(
        "slowest_rank",
        all_ranks(lambda f: f.shown if len(f.medians) > 1 else None),
        COUNT,
        "slowest rank",
        PAGE,
    ),
    Column(
        "vs_median_rank", figure(lambda f: f.vs_median_rank), RATIO, "/ median rank", BY_RANK
    ),
    Column("is_straggler", all_ranks(lambda f: f.is_straggler), FLAG),
    Column("slow_fwd_rank", all_ranks(lambda f: f.slow_forward[0]), COUNT),
    Column("fwd_vs_median_rank", all_ranks(lambda f: f.slow_forward[1]), RATIO),
    Column("num_params", step(lambda t: t.num_params), COUNT),
    Column("attention_run", step(lambda t: t.attention_run or None), TEXT, "attention", PAGE),
    Column("backend_run", _measured(lambda r: r.backend_run or None)),
    Column("data_run", step(lambda t: t.data or None)),
    Column("method", _measured(lambda r: r.samples.method)),
    Column("over_limit", _rate("over_limit"), FLAG),
    Column(
        "message", lambda o: message_of(o.record) if not o.figures or o.record.differs else None
    ),
    Column("status", lambda o: o.status, views=SHOWN, words=status_words),
    Column("validity", all_ranks(lambda f: f.validity), views=SHOWN),
)


def _more(record: Measured, facts: Training) -> Row:
    """Return what only some records have, so that tables of published runs stay as they are."""
    more: Row = {"compile_failed": facts.compile_failed} if facts.compile_failed else {}
    if facts.elapsed_s:
        uncounted = zip(facts.uncounted_s, facts.elapsed_s, strict=True)
        uncounted_s, elapsed_s = max(uncounted, key=lambda pair: abs(pair[0]) / pair[1])
        more |= {"elapsed_s": elapsed_s, "uncounted_s": uncounted_s}
        more |= {"soak_s": record.samples.soak_s}
    return more


def rows(
    records: Sequence[Record], run: RunInfo, device: DeviceSpec | None = None
) -> list[Row]:
    """Return one row per record of training; operators of the run give the measured ceiling."""
    ceilings = measured_ceilings(each for each in records if isinstance(each.case, OpCase))
    against = PeakReference(run=run, device=device, ceilings=ceilings)
    steps = [record for record in records if isinstance(record.case, TrainCase)]
    table = rows_of(TRAIN_COLUMNS, _outcomes([(record, None) for record in steps], against))
    for row, record in zip(table, steps, strict=True):
        if isinstance(record, Measured) and record.training:
            row.update(_more(record, record.training))
    return table


def per_rank_rows(records: Iterable[Record], run: RunInfo) -> list[Row]:
    """Return one row per measured record and rank."""
    against = PeakReference(run=run, device=None, ceilings=Ceilings())
    ranks = [
        (record, rank)
        for record in records
        if isinstance(record.case, TrainCase) and isinstance(record, Measured)
        for rank in range(len(record.samples.seconds))
    ]
    return rows_of(TRAIN_COLUMNS, _outcomes(ranks, against))


def _outcomes(
    ranks: Sequence[tuple[Record, int | None]], against: PeakReference
) -> Iterator[TrainOutcome]:
    """Yield a row of each record and rank; None: all ranks together."""
    names = distinct_names(record.train.model for record, _ in ranks)
    for record, rank in ranks:
        figures = None
        if isinstance(record, Measured) and any(record.samples.seconds):
            figures = TrainFigures(records=(record,), rank=rank, against=against)
        name = names[record.train.model]
        yield TrainOutcome(record=record, run=against.run, figures=figures, model_name=name)


def _is_often_slowest(seconds: Sequence[Sequence[float]], rank: int) -> bool:
    return is_often(max, rank, list(zip(*seconds, strict=True)))
