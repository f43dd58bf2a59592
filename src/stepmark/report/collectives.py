"""Records of collectives to flat rows: rates, spreads and who was waited for.

One row per case, its launches pooled; `per_rank_rows` has one per rank of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import median

from stepmark.core.collectives import Collective
from stepmark.core.comm_case import CommCase
from stepmark.core.device import DeviceSpec
from stepmark.core.record import Record, RunInfo
from stepmark.core.stats import quantile, summarize
from stepmark.core.units import GB, format_bytes
from stepmark.report.launches import Launches, pooled
from stepmark.report.tables import LIMIT_SLACK, Row, number

# NVLS and SHARP reduce or copy in the switch: the busbw of these can pass the link.
_IN_NETWORK = {
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.REDUCE,
    Collective.BROADCAST,
    Collective.ALL_GATHER,
}


def rows(
    records: Iterable[Record], run: RunInfo, device: DeviceSpec | None = None
) -> list[Row]:
    """One flat row per case of communication."""
    cases = pooled(records)
    table = [_row(one, run, device) for one in cases]
    alone = {str(row["case_id"]): number(row, "time_s") for row in table}
    for one, row in zip(cases, table, strict=True):
        base = alone.get(replace(one.case, beside="").case_id) if one.case.beside else None
        time_s = number(row, "time_s")
        row["slowdown"] = time_s / base if base and time_s else None
    return table


def per_rank_rows(records: Iterable[Record], run: RunInfo) -> list[Row]:
    """One row per case and world rank, of the cases that ran."""
    return [
        _identity(one.case, run) | _of_rank(one, index, rank)
        for one in pooled(records)
        if one.measured
        for index, rank in enumerate(one.case.members)
    ]


def shape_text(case: CommCase) -> str:
    """Size, ranks and what is unusual, as one reads it aloud."""
    words = [] if case.collective is Collective.BARRIER else [format_bytes(case.message_bytes)]
    words.append(f"{case.pair[0]}->{case.pair[1]}" if case.pair else f"x{case.num_ranks}")
    words += ["in-place"] if case.in_place else []
    words += [f"root {case.root}"] if case.root > 0 else []
    words += [f"split {case.split}"] if case.split else []
    words += [case.mode.value] if case.mode.value != "queued" else []
    words += [f"beside {case.beside}"] if case.beside else []
    words += [f"at most {case.max_ctas} CTAs"] if case.max_ctas else []
    words += [f"skew {case.skew_s * 1e6:g} us"] if case.skew_s else []
    return " ".join(words)


def _identity(case: CommCase, run: RunInfo) -> Row:
    """What was asked: all that does not depend on the outcome."""
    return {
        "family": case.family,
        "model": _joined(label.model for label in case.labels),
        "role": _joined(
            label.role + (f" mbs {label.mbs}" if label.mbs else "") for label in case.labels
        ),
        "collective": case.collective.value,
        "shape": shape_text(case),
        "size_bytes": case.message_bytes,
        "count": case.count,
        "dtype": case.dtype.value,
        "redop": case.redop.value,
        "root": case.root,
        "placement": "in-place" if case.in_place else "out-of-place",
        "num_ranks": case.num_ranks,
        "world_size": case.world_size,
        "split": case.split or None,
        "pair": f"{case.pair[0]}-{case.pair[1]}" if case.pair else None,
        "mode": case.mode.value,
        "aligned": case.aligned,
        "api": case.api.value,
        "backend": case.backend,
        "device": case.device,
        "calls_per_group": case.calls_per_group,
        "spread": case.spread,
        "skew_s": case.skew_s,
        "max_ctas": case.max_ctas,
        "beside": case.beside or None,
        "case_id": case.case_id,
        "run_id": run.run_id,
        "command": case.command(),
    }


def _joined(words: Iterable[str]) -> str | None:
    return ", ".join(dict.fromkeys(words)) or None


# Columns that only a measurement fills; every row has all of them.
_UNMEASURED: Row = dict.fromkeys(
    (
        *("time_s", "time_min_s", "mean_s", "p10_s", "p50_s", "p90_s", "p99_s", "min_s"),
        *("max_s", "cv_pct", "n", "launches", "launch_spread_pct", "algbw_gb_s"),
        *("busbw_gb_s", "num_wrong", "slowest_rank", "waited_for_rank", "waited_for_s"),
        *("late_s", "issue_s", "pct_link", "over_limit", "beside_alone_s"),
        *("beside_together_s", "slowdown_beside", "slowdown", "method", "calls_per_sample"),
        *("warmup_calls", "power_w", "clock_mhz", "throttle"),
    )
)


def _row(one: Launches, run: RunInfo, device: DeviceSpec | None) -> Row:
    row = _identity(one.case, run) | _UNMEASURED
    row |= {"status": one.status, "message": one.message}
    if not one.measured:
        return row
    row |= _times(one) | _ranks(one) | _beside(one)
    row |= _rates(one.case, median(one.launch_medians_s), run, device)
    samples = [record.samples for record in one.measured]
    arrivals = [record.arrivals for record in one.measured if record.arrivals]
    return row | {
        "num_wrong": one.num_wrong,
        "method": ", ".join(dict.fromkeys(each.method for each in samples)),
        "calls_per_sample": min(each.calls_per_sample for each in samples),
        "warmup_calls": min((each.warmup_calls for each in arrivals), default=None),
    }


def _times(one: Launches) -> Row:
    """Times of the slowest rank: the median of launches, the rest over all samples."""
    samples = [value for values in one.slowest_s for value in values]
    all_of = summarize(samples)
    ordered = sorted(samples)
    squares = sum((value - all_of.mean) ** 2 for value in samples)
    return {
        "time_s": median(one.launch_medians_s),
        "time_min_s": one.time_min_s,
        "mean_s": all_of.mean,
        "p10_s": all_of.p10,
        "p50_s": all_of.median,
        "p90_s": all_of.p90,
        "p99_s": quantile(ordered, 0.99),
        "min_s": all_of.min,
        "max_s": all_of.max,
        "cv_pct": 100 * sqrt(squares / all_of.n) / all_of.mean if all_of.n > 1 else None,
        "n": all_of.n,
        "launches": len(one.measured),
        "launch_spread_pct": one.launch_spread_pct,
    }


def _ranks(one: Launches) -> Row:
    """Who is slow, who is waited for, and the state of the slowest rank's device."""
    medians, members = one.rank_medians_s, one.case.members
    slowest = medians.index(max(medians))
    waited_for = one.waited_for()
    return {
        "slowest_rank": members[slowest] if len(members) > 1 else None,
        "waited_for_rank": waited_for[0] if waited_for else None,
        "waited_for_s": waited_for[1] if waited_for else None,
        "late_s": one.late_s(),
        # A CPU's call returns when it is done: issuing it is the whole of it.
        "issue_s": None if one.case.device == "cpu" else one.issue_s(),
        **_device_state(one, slowest, range(len(members))),
    }


def _device_state(one: Launches, shown: int, seen: Iterable[int]) -> Row:
    """Clock and power of one rank, the median of launches; throttling of all that are seen."""
    states = [r.telemetry for r in one.measured if len(r.telemetry) == len(one.case.members)]
    clocks = [s[shown].sm_clock_hz for s in states]
    powers = [s[shown].power_w for s in states]
    places = list(seen)
    reasons = {reason for s in states for place in places for reason in s[place].throttle}
    clock = _median_of_known(clocks)
    return {
        "clock_mhz": None if clock is None else clock / 1e6,
        "power_w": _median_of_known(powers),
        "throttle": ", ".join(sorted(reasons)) or None,
    }


def _median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _beside(one: Launches) -> Row:
    both = one.beside_s()
    if both is None:
        return {}
    alone, together = both
    return {
        "beside_alone_s": alone,
        "beside_together_s": together,
        "slowdown_beside": together / alone,
    }


def _rates(case: CommCase, time_s: float, run: RunInfo, device: DeviceSpec | None) -> Row:
    """algbw = S / time, busbw = algbw x factor, as nccl-tests; its share of the link."""
    if case.collective is Collective.BARRIER:
        return {}
    algbw = case.message_bytes / time_s
    busbw = algbw * case.busbw_factor
    link = _link_bytes_per_s(case, run, device)
    reduced = run.environment.variables.get("NCCL_NVLS_ENABLE") != "0"
    unbound = case.collective in _IN_NETWORK and reduced
    return {
        "algbw_gb_s": algbw / GB,
        "busbw_gb_s": busbw / GB,
        "pct_link": 100 * busbw / link if link else None,
        "over_limit": None if link is None or unbound else busbw > link * LIMIT_SLACK,
    }


def _link_bytes_per_s(case: CommCase, run: RunInfo, device: DeviceSpec | None) -> float | None:
    """What one device's links carry per direction. None where other wires are in the way."""
    if device is None or case.device == "cpu" or case.num_ranks < 2:
        return None
    found = run.environment.devices
    hosts = {info.host for info in found if info.rank in case.members}
    return device.link_bytes_per_s if len(hosts) <= 1 else None


def _of_rank(one: Launches, index: int, rank: int) -> Row:
    """One rank's share of the outcome; index is its place among the members."""
    medians = one.rank_medians_s
    checks = [r.checks[index] for r in one.measured if index < len(r.checks)]
    middle = median(medians)
    return {
        "rank": rank,
        "status": one.status,
        "time_s": medians[index],
        "vs_median_rank": medians[index] / middle if middle else None,
        "late_s": one.late_s(index),
        "issue_s": one.issue_s(index),
        "n": sum(len(record.samples.seconds[index]) for record in one.measured),
        "launches": len(one.measured),
        "num_wrong": sum(check.num_wrong for check in checks) if checks else None,
        **_device_state(one, index, (index,)),
    }
