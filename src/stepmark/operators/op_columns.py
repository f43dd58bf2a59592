"""Columns of the rows of operators, and the figures in them.

One row per (case, label), its launches pooled; a case without labels gives one. `rank` is None
in the row of all ranks (the slowest of them in each sample). With several ranks, one row per
rank follows it, so that a slow device stands out in `vs_median_rank`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stepmark.cases.case import SOAK_S, Label, OpCase, Rate
from stepmark.cases.record import Check, Measured, Record, RunInfo
from stepmark.ground.grouping import group_by
from stepmark.ground.units import GB, TFLOP
from stepmark.model.device import DeviceSpec
from stepmark.model.ops import EmbeddingBag, Phase
from stepmark.step.roofline import limit_of
from stepmark.store.commands import command_of
from stepmark.tables.columns import (
    CONSOLE,
    COUNT,
    ERROR,
    FLAG,
    NUMBER,
    PAGE,
    PERCENT,
    RATIO,
    SECONDS,
    SHARE,
    SHOWN,
    TEXT,
    Column,
    Row,
    rows_of,
    text,
)
from stepmark.tables.launches import OpLaunches, pooled
from stepmark.tables.outcomes import (
    CACHES,
    DEFEATED_CACHES,
    LIMIT_SLACK,
    Ceilings,
    Figures,
    figure,
    measured_ceilings,
    percent,
    rank_words,
    ratio,
    spread_words,
    status_words,
    validity,
)


@dataclass(frozen=True, kw_only=True)
class OpFigures(Figures):
    """Figures of a measured operator, compared with its device, run and reference."""

    run: RunInfo
    device: DeviceSpec | None
    ceilings: Ceilings
    reference: Mapping[str, float]

    @property
    def vs_median_rank(self) -> float | None:
        return None if self.rank is None else ratio(self.medians, self.rank)

    @cached_property
    def _checks(self) -> list[Check]:
        return [check for record in self.records for check in self.own(record.checks)]

    @property
    def num_wrong(self) -> int | None:
        return sum(check.num_wrong for check in self._checks) if self._checks else None

    def error(self, name: str) -> float | None:
        """Return the largest error of a kind, or its limit, over ranks and launches."""
        values = (getattr(check, name) for check in self._checks)
        return max((value for value in values if value is not None), default=None)

    @property
    def remarks(self) -> str:
        """Return what checks say of a user's operator besides its errors."""
        return _joined(remark for check in self._checks for remark in check.remarks)

    @property
    def rate(self) -> str:
        soak_s = min(record.samples.soak_s for record in self.records)
        rate = self.record.operator.rate
        if rate is Rate.SUSTAINED and soak_s < SOAK_S:
            # Not called sustained: the device may be cooler than a long job would have it.
            return f"short soak {soak_s:.1f} s" if soak_s >= 0.05 else "soak below 0.1 s"
        return rate.value

    @property
    def pct_reference(self) -> float | None:
        known_s = self.reference.get(self.record.case.case_id)
        return None if known_s is None else percent(known_s, self.times.median)

    @property
    def flops_per_s(self) -> float:
        return self.record.operator.op.flops / self.times.median

    @property
    def executed_flops_per_s(self) -> float:
        return self.record.operator.op.executed_flops / self.times.median

    @property
    def bytes_per_s(self) -> float:
        return self.record.operator.op.bytes_moved / self.times.median

    @property
    def pct_peak(self) -> float | None:
        return percent(self.flops_per_s, self._peak) if self.flops_per_s else None

    @property
    def pct_hbm(self) -> float | None:
        return percent(self.bytes_per_s, self._hbm)

    @property
    def _peak(self) -> float | None:
        return self.device.peak(self.record.operator.op.dtype) if self.device else None

    @property
    def _hbm(self) -> float | None:
        return self.device.hbm_bytes_per_s if self.device else None

    @property
    def _best_flops(self) -> float | None:
        case = self.record.operator
        return self.ceilings.flops_per_s.get((case.device, case.op.dtype))

    @property
    def _best_bytes(self) -> float | None:
        return self.ceilings.bytes_per_s.get(self.record.operator.device)

    @cached_property
    def bound(self) -> str | None:
        return limit_of(
            self.record.operator.op,
            self._peak or self._best_flops,
            self._hbm or self._best_bytes,
        )

    @cached_property
    def ceiling(self) -> tuple[float, str] | None:
        """Return the measured ceiling of what bounds the operator, with its unit."""
        if self.bound == "memory":
            return (best / GB, "GB/s") if (best := self._best_bytes) else None
        return (best / TFLOP, "TFLOP/s") if (best := self._best_flops) else None

    @property
    def pct_ceiling(self) -> float | None:
        """Return the share of the measured ceiling.

        None where this case is the ceiling, or is bound by memory and fits in caches.
        """
        case = self.record.operator
        is_memory = self.bound == "memory"
        key = case.device if is_memory else (case.device, case.op.dtype)
        if self.ceilings.cases.get(key) == case.case_id:
            return None
        if is_memory:
            if self._fits_caches(DEFEATED_CACHES):
                return None
            return percent(self.bytes_per_s, self._best_bytes)
        return percent(self.flops_per_s, self._best_flops)

    @property
    def over_limit(self) -> bool | None:
        """Return whether a rate exceeds the hardware's; None where no limit is known."""
        device = self.device
        op = self.record.operator.op
        if device is None:
            return None
        verdicts: list[bool] = []
        clocks = [
            info.max_sm_clock_hz
            for info in self.run.environment.devices
            if info.max_sm_clock_hz and self.rank in (None, info.rank)
        ]
        limit = device.max_flops_per_s(op.dtype, max(clocks)) if clocks else None
        if limit:
            verdicts.append(self.executed_flops_per_s > limit * LIMIT_SLACK)
        if (hbm := device.hbm_bytes_per_s) and self._fits_caches(CACHES) is not None:
            verdicts.append(
                self.bytes_per_s > hbm * LIMIT_SLACK and not self._fits_caches(CACHES)
            )
        return any(verdicts) if verdicts else None

    def _fits_caches(self, number: float) -> bool | None:
        """Return whether all operand sets fit in so many last-level caches; None if unknown.

        Caches serve indices from a Zipf distribution, whatever the size of the table.
        """
        op = self.record.operator.op
        by_rank = (device.l2_bytes for device in self.run.environment.devices)
        sheet = self.device
        cache_bytes = sheet.last_level_cache_bytes if sheet else next(by_rank, None)
        if not cache_bytes or (isinstance(op, EmbeddingBag) and op.alpha > 0):
            return None
        return min(op.memory_bytes, op.bytes_moved) * self.num_sets <= number * cache_bytes

    @property
    def num_sets(self) -> int:
        return min(record.samples.num_sets for record in self.records)

    @property
    def calls_per_sample(self) -> int:
        return min(record.samples.calls_per_sample for record in self.records)

    @property
    def method(self) -> str:
        return _joined(record.samples.method for record in self.records)

    @property
    def backend_run(self) -> str:
        return _joined(record.backend_run for record in self.records)

    @property
    def validity(self) -> str | None:
        needs_no_sets = self.record.samples.method.startswith(("event-flush", "event-hot"))
        reasons = validity(
            [record.telemetry for record in self.records],
            self.spread_pct,
            self.launch_spread_pct,
            records=self.records,
            above_limit=self.over_limit,
            pct_ceiling=self.pct_ceiling if self.rank is None else None,
            in_cache=bool(self.device and self._fits_caches(DEFEATED_CACHES))
            and not needs_no_sets,
        )
        return ", ".join(filter(None, (reasons, self.remarks))) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOutcome:
    """A row: a case under one label, and its figures if it was measured."""

    launches: OpLaunches
    label: Label
    run: RunInfo
    figures: OpFigures | None
    # Of the operators of a step that the run measured; None but for the fastest of a place.
    share_pct: float | None = None

    @property
    def case(self) -> OpCase:
        return self.launches.case

    @property
    def status(self) -> str:
        """Return the outcome in one word; a rank with right results is not wrong."""
        is_right = self.figures and not self.figures.num_wrong
        return "measured" if is_right else self.launches.status

    @property
    def phase(self) -> str | None:
        phase: Phase | None = getattr(self.case.op, "phase", None) or self.label.phase
        return phase.value if phase else None

    @property
    def layout(self) -> str | None:
        layout = getattr(self.case.op, "layout", None)
        return layout.value if layout else None

    @property
    def time_per_step_s(self) -> float | None:
        calls = self.label.per_step
        if calls is None or self.figures is None:
            return None
        return calls * self.figures.times.median

    @property
    def step(self) -> tuple[object, ...]:
        """Return what the rows of one step have in common."""
        case = self.case
        return self.label.model, self.label.mbs, case.scale, case.rate, case.num_ranks

    @property
    def place(self) -> tuple[object, ...]:
        """Return the operator in the step, whatever its backend and element type."""
        return *self.step, self.label.role, self.phase, self.case.op.shape_text

    @property
    def intensity(self) -> float | None:
        op = self.case.op
        return op.flops / op.bytes_moved or None if op.bytes_moved else None


def _with_shares(outcomes: Sequence[OpOutcome]) -> Iterator[OpOutcome]:
    """Yield the rows, the fastest right one of each place in a step with its share of all."""
    fastest: dict[object, OpOutcome] = {}
    for row in outcomes:
        is_of_all_ranks = row.figures is not None and row.figures.rank is None
        if is_of_all_ranks and row.status == "measured" and row.time_per_step_s is not None:
            first = fastest.setdefault(row.place, row)
            fastest[row.place] = min(first, row, key=lambda each: each.time_per_step_s or 0.0)
    totals = {
        step: math.fsum(row.time_per_step_s or 0.0 for row in rows)
        for step, rows in group_by(fastest.values(), lambda row: row.step).items()
    }
    chosen = {id(row) for row in fastest.values()}
    for row in outcomes:
        is_part = id(row) in chosen
        yield (
            replace(row, share_pct=percent(row.time_per_step_s, totals[row.step]))
            if is_part
            else row
        )


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


OP_COLUMNS: tuple[Column[OpOutcome], ...] = (
    Column("family", lambda o: o.case.family, TEXT, "operator", PAGE),
    Column("model", lambda o: o.label.model or None, views=SHOWN),
    Column(
        "role",
        lambda o: o.label.role or None,
        views=SHOWN,
        words=lambda row: text(row, "role") or text(row, "family"),
    ),
    Column("pass", lambda o: o.phase, views=SHOWN),
    Column("shape", lambda o: o.case.op.shape_text, views=SHOWN),
    Column("layout", lambda o: o.layout, views=PAGE),
    Column("dtype", lambda o: o.case.dtype.value, views=SHOWN, leaves=3),
    Column("backend", lambda o: o.case.backend, views=SHOWN, leaves=2),
    Column("device", lambda o: o.case.device),
    Column("num_ranks", lambda o: o.case.num_ranks, COUNT),
    Column("count", lambda o: o.label.count, COUNT),
    Column("calls_per_step", lambda o: o.label.per_step, COUNT, "x", SHOWN, 2),
    Column("mbs", lambda o: o.label.mbs, COUNT),
    Column("scale", lambda o: o.case.scale or None, views=SHOWN, leaves=2),
    Column("flops", lambda o: o.case.op.flops, COUNT),
    Column("executed_flops", lambda o: o.case.op.executed_flops, COUNT),
    Column("bytes_moved", lambda o: o.case.op.bytes_moved, COUNT),
    Column("arithmetic_intensity", lambda o: o.intensity, NUMBER, "FLOP/byte", PAGE),
    Column("case_id", lambda o: o.case.case_id),
    Column("run_id", lambda o: o.run.run_id),
    Column("command", lambda o: command_of(o.case)),
    Column("backend_run", figure(lambda f: f.backend_run or None), TEXT, "ran as", PAGE),
    Column("rank", figure(lambda f: f.rank), COUNT, "", SHOWN, words=rank_words),
    Column("time_s", figure(lambda f: f.times.median), SECONDS, "time", SHOWN),
    Column("time_per_step_s", lambda o: o.time_per_step_s, SECONDS, "in step", SHOWN, 4),
    Column("share_of_total_pct", lambda o: o.share_pct, SHARE, "of total", SHOWN, 1),
    Column("mean_s", figure(lambda f: f.times.mean), SECONDS, "mean", PAGE),
    Column("p10_s", figure(lambda f: f.times.p10), SECONDS, "p10", PAGE),
    Column("p90_s", figure(lambda f: f.times.p90), SECONDS, "p90", PAGE),
    Column(
        "spread_pct",
        figure(lambda f: f.spread_pct),
        PERCENT,
        "+- %",
        CONSOLE,
        3,
        words=spread_words,
    ),
    Column("n", figure(lambda f: f.times.n), COUNT, "", PAGE),
    Column("calls_per_sample", figure(lambda f: f.calls_per_sample), COUNT),
    Column("warmup_calls", figure(lambda f: f.record.samples.warmup_calls or None), COUNT),
    Column("launches", figure(lambda f: len(f.records)), COUNT, "", SHOWN, 6),
    Column(
        "launch_spread_pct",
        figure(lambda f: f.launch_spread_pct),
        PERCENT,
        "spread of launches %",
        SHOWN,
        2,
    ),
    Column("vs_median_rank", figure(lambda f: f.vs_median_rank), RATIO, "/ median rank", SHOWN),
    Column("tflops", figure(lambda f: f.flops_per_s / TFLOP or None), NUMBER, "TFLOP/s", SHOWN),
    Column("executed_tflops", figure(lambda f: f.executed_flops_per_s / TFLOP or None), NUMBER),
    Column("gb_per_s", figure(lambda f: f.bytes_per_s / GB), NUMBER, "GB/s", SHOWN, 1),
    Column("pct_peak", figure(lambda f: f.pct_peak), PERCENT, "% peak", SHOWN, 1),
    Column(
        "pct_hbm",
        figure(lambda f: f.pct_hbm),
        PERCENT,
        "% HBM",
        SHOWN,
        5,
        words=lambda row: PERCENT.show(row["pct_hbm"]) if row["bound"] == "memory" else "",
    ),
    Column("ceiling", figure(lambda f: f.ceiling and f.ceiling[0]), NUMBER),
    Column("ceiling_unit", figure(lambda f: f.ceiling and f.ceiling[1])),
    Column("pct_ceiling", figure(lambda f: f.pct_ceiling), PERCENT, "% ceiling", SHOWN, 4),
    Column("bound", figure(lambda f: f.bound), views=SHOWN, leaves=6),
    Column(
        "max_rel_err", figure(lambda f: f.error("max_rel_err")), ERROR, "rel. err", SHOWN, 5
    ),
    Column("tolerance", figure(lambda f: f.error("tolerance")), ERROR),
    Column("rms_err", figure(lambda f: f.error("rms_err")), ERROR),
    Column("rms_tolerance", figure(lambda f: f.error("rms_tolerance")), ERROR),
    Column("check_remarks", figure(lambda f: f.remarks or None)),
    Column("num_wrong", figure(lambda f: f.num_wrong), COUNT, "#wrong", PAGE),
    Column("clock_mhz", figure(lambda f: f.clock_mhz), NUMBER, "MHz", PAGE),
    Column("power_w", figure(lambda f: f.state("power_w")), NUMBER, "W", PAGE),
    Column("throttle", figure(lambda f: f.throttle), TEXT, "throttled", PAGE),
    Column("method", figure(lambda f: f.method)),
    Column("pct_reference", figure(lambda f: f.pct_reference), PERCENT, "% ref", SHOWN, 1),
    Column("over_limit", figure(lambda f: f.over_limit), FLAG),
    Column("message", lambda o: o.launches.message),
    Column("status", lambda o: o.status, views=SHOWN, words=status_words),
    Column(
        "rate",
        lambda o: o.figures.rate if o.figures else o.case.rate.value,
        views=SHOWN,
        leaves=7,
    ),
    Column("validity", figure(lambda f: f.validity), views=SHOWN),
    Column("sets", figure(lambda f: f.num_sets), COUNT, views=CONSOLE, leaves=8),
)


def rows(
    records: Iterable[Record],
    run: RunInfo,
    *,
    device: DeviceSpec | None = None,
    reference: Mapping[str, float] | None = None,
) -> list[Row]:
    """Return one flat row per (case, label), and per rank where there are several."""
    operators = [record for record in records if isinstance(record.case, OpCase)]
    ceilings = measured_ceilings(operators)

    def outcomes() -> Iterator[OpOutcome]:
        for launches in pooled(operators, OpLaunches):
            for figures in figures_of(launches.measured):
                for label in launches.case.labels or (Label(),):
                    yield OpOutcome(launches=launches, label=label, run=run, figures=figures)

    def figures_of(measured: tuple[Measured, ...]) -> Iterator[OpFigures | None]:
        """Yield figures of all ranks together, then of each; None without samples."""
        if not measured:
            yield None
            return
        num_ranks = len(measured[0].samples.seconds)
        for rank in (None, *range(num_ranks)) if num_ranks > 1 else (None,):
            yield OpFigures(
                records=measured,
                rank=rank,
                run=run,
                device=device if measured[0].operator.device != "cpu" else None,
                ceilings=ceilings,
                reference=reference or {},
            )

    return rows_of(OP_COLUMNS, _with_shares([*outcomes()]))
