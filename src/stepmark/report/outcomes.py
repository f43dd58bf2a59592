"""What rows of operators, collectives and training steps derive alike."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from stepmark.core.dtypes import DType
from stepmark.core.ops import Bmm, Copy, Gemm, GroupedGemm
from stepmark.core.record import Failed, Measured, Record, Skipped, Telemetry
from stepmark.core.stats import Summary, slowest_per_sample, summarize

# A figure may exceed a data sheet's rounding, not its hardware.
LIMIT_SLACK = 1.01
MATMULS = (Gemm, Bmm, GroupedGemm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The best rates this run itself reached, by device: what stands in for unknown peaks."""

    flops_per_s: Mapping[tuple[str, DType], float] = field(default_factory=dict)
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)


def measured_ceilings(records: Iterable[Record]) -> Ceilings:
    """Best matmul rate by dtype and best copy bandwidth; wrong results do not count."""
    flops_per_s: dict[tuple[str, DType], float] = {}
    bytes_per_s: dict[str, float] = {}
    for record in records:
        if not isinstance(record, Measured) or record.num_wrong or not record.samples.seconds:
            continue
        op, place = record.operator.op, record.operator.device
        time_s = summarize(slowest_per_sample(record.samples.seconds)).median
        if isinstance(op, MATMULS):
            key = (place, op.dtype)
            flops_per_s[key] = max(flops_per_s.get(key, 0.0), op.flops / time_s)
        elif isinstance(op, Copy):
            rate = op.bytes_moved / time_s
            bytes_per_s[place] = max(bytes_per_s.get(place, 0.0), rate)
    return Ceilings(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)


def status_of(record: Record, num_wrong: int | None) -> str:
    """What came of a case in one word."""
    return "wrong" if num_wrong else record.kind


def message_of(record: Record) -> str:
    """Why a record has no figures."""
    match record:
        case Skipped():
            return record.reason
        case Failed():
            return f"{record.cause}: {record.message}"
        case Measured():
            return f"samples in {record.samples.file or 'no file'}"


def num_wrong(record: Measured, rank: int | None = None) -> int | None:
    """Wrong elements over all ranks, or of one; None where nothing was checked."""
    checks = record.checks if rank is None else record.checks[rank : rank + 1]
    return sum(check.num_wrong for check in checks) if checks else None


def state_of(record: Measured, rank: int) -> Telemetry | None:
    """The state of a rank's device; None where it was not read."""
    return record.telemetry[rank] if rank < len(record.telemetry) else None


def clock_mhz(state: Telemetry | None) -> float | None:
    """The clock while the samples ran."""
    return state.sm_clock_hz / 1e6 if state and state.sm_clock_hz is not None else None


def throttle_reasons(record: Measured, rank: int | None) -> str | None:
    """Why a rank's device was slowed; for None, any rank's."""
    seen = record.telemetry if rank is None else record.telemetry[rank : rank + 1]
    return ", ".join(sorted({reason for one in seen for reason in one.throttle})) or None


def spread_pct(times: Summary) -> float | None:
    """Half the distance from p10 to p90, in percent of the median; None of one sample."""
    return (times.p90 - times.p10) / 2 / times.median * 100 if times.n > 1 else None


def ratio(values: Sequence[float], index: int) -> float | None:
    """One of the values over their median."""
    middle = median(values)
    return values[index] / middle if middle else None


def percent(value: float | None, base: float | None) -> float | None:
    """None where either is unknown."""
    return 100 * value / base if value is not None and base else None
