"""Whether a table of a collective's results is normal for its hardware, and if not, why.

A table is compared with healthy tables in three figures: the peak bandwidth from 256 MiB on
(95 % of their least is normal, less than 85 % is not), the shortest time up to 64 KiB (twice;
five times where there is one table), and its own shape (table_curve.py). More than the links or
NICs can carry is no verdict.
Between these, two healthy tables of one platform differ by up to 54 %: middle sizes are judged
by the table's shape alone. Unknown is an answer: it says what is missing.
"""

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from stepmark.collectives.reference_ranges import (
    Hardware,
    HealthyCurve,
    Nics,
    Range,
    Span,
    family_of,
    hardware_of,
    has_latency,
    load_healthy,
    possible_shares,
    rate,
    reference_range,
    send_channel_share,
    tuner_latency_s,
)
from stepmark.collectives.table_curve import (
    PAIRS,
    SLOW_ON_A_NETWORK,
    SLOW_ON_ONE_HOST,
    Curve,
    CurveFault,
    curve_faults,
    curves_of,
)
from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.ground.errors import ConfigError
from stepmark.ground.reading import Table
from stepmark.ground.units import GB, format_bytes, format_time
from stepmark.tables.outcomes import LIMIT_SLACK
from stepmark.tables.row_tables import LEAD
from stepmark.text_tables.nccl_notes import OUT_OF_BOUNDS, ROWS_MISSING

BELOW = "below the healthy range"
_NORMAL = 0.95  # of the least of healthy tables; those of one hardware differ by less
_TOLERANCE = 0.85
_LATENCY_TOLERANCE = 2.0  # of the most of several tables of this hardware
_WIDE_TOLERANCE = 5.0  # of one table or those of other hardware; of one link they differ 2.6 x
_FAR = 0.5  # of what other GPUs reach
_RING = (0.7, 0.9)  # of a link's rate: what a ring reaches, and cannot reach
_WIRE = 0.97  # of a NIC's rate that a plateau reaches (400G: 46 to 49 GB/s)
_NICS = re.compile(r"(?P<count>[1-9]\d?)\s?x\s?(?P<gbit>[1-9]\d{0,3})G?", re.IGNORECASE)
_OF_LINKS = (
    "NVLink connections that are down or not used, PCIe instead, or of an all-reduce NVLS that "
    "is off",
    "nvidia-smi nvlink --status, nvidia-smi topo -m, NCCL_DEBUG=INFO (P2P or SHM, NVLS)",
)
_OF_NETWORK = (
    "a part of the NICs in use (NCCL_IB_HCA; one GPU uses the NICs near to it), no GPUDirect "
    "RDMA, PCIe settings of the NICs (MaxReadReq, MAX_ACC_OUT_READ, ACS), or one slow host or "
    "link, which slows all",
    "NCCL_DEBUG=INFO (`NET/IB : Using` names all NICs, connections have GDRDMA), "
    f"ib_write_bw for each NIC, and {PAIRS}",
)
_NO_RANKS = (
    "the hardware is not stated: the table does not name the GPUs and hosts of its ranks "
    "(--device h100-sxm --gpus-per-node 8)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one curve. rows: figures beside their references."""

    value: str  # "normal", BELOW, "not normal", "unknown"
    text: str
    rows: tuple[dict[str, str], ...]
    sources: tuple[str, ...]  # of the references
    findings: tuple[Finding, ...] = ()

    def lines(self, *, with_verdict: bool) -> list[str]:
        """Return the verdict, then the figures, each with its reference."""
        lines = wrapped(f"verdict    {self.value}: {self.text}") if with_verdict else []
        for row in self.rows:
            reference = f"; healthy: {row['reference']}" if row["reference"] else ""
            lines += wrapped(f"    {row['figure']:14} {row['value']}{reference}", 19)
        return lines

    def document(self) -> dict[str, object]:
        """Return it as plain values."""
        return {
            "verdict": self.value,
            "text": self.text,
            "figures": list(self.rows),
            "sources": list(self.sources),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A curve's figures beside the range of its hardware."""

    curve: Curve
    hardware: Hardware
    range: Range
    unit: float  # rate(), bytes/s; 0 is unknown
    peak_span: Span | None  # bytes/s
    latency_span: Span | None  # seconds
    has_peak: bool  # whether the peak can be judged
    is_slow: bool
    is_low: bool  # is_slow or BELOW
    is_late: bool
    max_latency_s: float  # inf where small messages are not judged
    has_latency: bool  # whether a short time is normal: by several tables of this hardware

    @property
    def late_text(self) -> str:
        """Return by how much small messages are late."""
        if not self.curve.smallest or not self.latency_span:
            return ""
        other = "" if self.range.link else " of other GPUs or NICs"
        return (
            f"the shortest time is {format_time(self.curve.smallest.time_s)}, more than "
            f"{self.max_latency_s / self.latency_span[1]:.0f} times that of healthy tables"
            f"{other} ({_span(self.latency_span, format_time)})"
        )


def wrapped(line: str, indent: int = LEAD) -> list[str]:
    return textwrap.wrap(
        line, 80, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def parse_nics(text: str) -> Nics:
    """Parse "8x400G": NICs of a host and the Gbit/s of each. Raises ConfigError."""
    if match := _NICS.fullmatch(text.strip()):
        return int(match["count"]), float(match["gbit"])
    raise ConfigError("nics", text, "NICs of a host and the Gbit/s of each, as in 8x400G")


def judge(
    table: Table,
    *,
    nics: Nics | None = None,
    healthy: Sequence[HealthyCurve] | None = None,
    findings: Sequence[Finding] = (),
) -> tuple[Judgement, ...]:
    """Return a verdict for each data type and column; () for a table of anything else.

    nics: NICs of a host that the ranks use. findings: those of validate.
    """
    hardware = hardware_of(table, nics)
    known = load_healthy() if healthy is None else healthy
    fits = [_fit(table, curve, hardware, known) for curve in curves_of(table)]
    ranks = next((each.text for each in findings if each.rule == "ranks-factor"), "")
    return tuple(_judgement(table, fit, nics, ranks) for fit in fits)


def _judgement(table: Table, fit: _Fit, nics: Nics | None, ranks_doubt: str) -> Judgement:
    doubt = _doubt(table, fit) or ranks_doubt
    curve = fit.curve
    faults = [
        *([] if doubt else _outside(fit, nics)),
        *curve_faults(curve, table.num_ranks or 0, table.num_hosts or 0),
    ]
    severe = [fault for fault in faults if fault.is_severe]
    notes = [each for each in table.notes if each.startswith((ROWS_MISSING, OUT_OF_BOUNDS))]
    is_wrong = any(reading.num_wrong for reading in table.readings) or any(
        each.startswith(OUT_OF_BOUNDS) for each in notes
    )
    in_range = BELOW if fit.is_low else "normal"
    value = "not normal" if severe or is_wrong else "unknown" if doubt else in_range
    rows = _rows(fit, faults)
    name = f"{table.collective} of {table.num_ranks or 'unknown'} ranks {curve.dtype}"
    figures = "; ".join(f"{row['figure']} {row['value']}" for row in rows[:-2])
    sentences = [
        "times of wrong results do not count" if is_wrong else "",
        *notes,
        doubt,
        *(f"{fault.text}. Usual cause: {fault.cause}. Try: {fault.action}" for fault in faults),
        *([] if doubt or is_wrong else _remarks(table, fit)),
        "" if faults or value != "unknown" else "its curve, single rows aside, has no fault",
    ]
    return Judgement(
        value=value,
        text=f"{name} {curve.column}".strip()
        + f": {figures}."
        + "".join(f" {each[0].upper()}{each[1:]}." for each in sentences if each),
        rows=rows,
        sources=fit.range.sources,
        findings=tuple(_finding(table, fault) for fault in severe),
    )


def _fit(
    table: Table, curve: Curve, hardware: Hardware, healthy: Sequence[HealthyCurve]
) -> _Fit:
    family = family_of(table.collective, curve.dtype)
    each = reference_range(healthy, hardware, family, curve.fingerprint)
    gbit = hardware.nic_gbit or each.nic_gbit
    unit = rate(hardware, family, gbit)
    peak_span = latency_span = None
    if unit:
        low, high = each.share or (1.0, 1.0)
        if family == "sendrecv" and hardware.num_hosts > 1:
            low = min(low, send_channel_share(hardware.num_ranks, gbit))
        # NICs that are full are normal, whatever other tables reach by trees and switches.
        peak_span = min(low, 1.0) * unit, high * unit
    if each.latency and has_latency(table):
        estimate = tuner_latency_s(family, hardware)
        latency_span = each.latency[0] * estimate, each.latency[1] * estimate
    part = curve.peak.busbw / peak_span[0] if peak_span else inf
    is_slow = part < _TOLERANCE
    is_low = is_slow or (part < _NORMAL and each.share is not None)
    has_peak = (
        peak_span is not None
        and (curve.is_large or not is_low)
        and (each.share is not None or not is_slow)
    )
    is_exact = bool(latency_span and each.link and latency_span[0] < latency_span[1])
    tolerance = _LATENCY_TOLERANCE if is_exact else _WIDE_TOLERANCE
    late_s = tolerance * latency_span[1] if latency_span else inf
    return _Fit(
        curve=curve,
        hardware=hardware,
        range=each,
        unit=unit,
        peak_span=peak_span,
        latency_span=latency_span,
        has_peak=has_peak,
        is_slow=has_peak and is_slow,
        is_low=has_peak and is_low,
        is_late=bool(curve.smallest and curve.smallest.time_s > late_s),
        max_latency_s=late_s,
        has_latency=is_exact,
    )


def _doubt(table: Table, fit: _Fit) -> str:
    """Return why the figures cannot be judged; "" where they can."""
    hardware = fit.hardware
    each = fit.range
    peak = fit.curve.peak
    span = fit.peak_span
    missing = "" if hardware.is_stated else " without the NICs of a host (--nics 8x400G)"
    is_outside = fit.is_low or fit.is_late
    is_far = span and peak.busbw < _FAR * span[0] and hardware.device
    has_time = not fit.curve.is_large and fit.curve.smallest and fit.has_latency
    end = format_bytes(fit.curve.points[-1].size_bytes)
    reasons = (
        (not table.num_hosts, _NO_RANKS),
        (not hardware.num_hosts, "the hosts have different numbers of ranks"),
        (_excess(fit), _excess(fit)),
        (
            not fit.has_peak
            and not has_time
            and not fit.curve.is_large
            and fit.unit
            and each.share,
            f"the table ends at {end}; the peak is judged from 256 MiB on",
        ),
        (
            not fit.has_peak and not has_time,
            "there is no reference for these sizes of "
            f"{table.device or 'a GPU that is not stated'} on such hosts{missing}",
        ),
        (
            is_outside and not hardware.is_stated,
            f"the NICs of a host are not stated (--nics 8x400G); with {_nics_text(each)} for "
            f"each GPU others reach {_span(span, _rate)}",
        ),
        (fit.is_late and not each.link, fit.late_text),
        (
            fit.is_low and not fit.curve.is_flat,
            f"the table ends at {end}, before the bandwidth is flat; with larger messages "
            f"others reach {_span(span, _rate)}",
        ),
        (
            fit.is_low and not each.link and (hardware.num_hosts == 1 or not is_far),
            f"there are only tables of other GPUs or NICs to compare, which reach "
            f"{_span(span, _rate)}",
        ),
        (
            fit.is_low and each.share and each.share[0] == each.share[1] and not is_far,
            f"the only healthy table to compare reaches {_span(span, _rate)}",
        ),
    )
    return next((text for is_true, text in reasons if is_true), "")


def _excess(fit: _Fit) -> str:
    """Return why a bandwidth is too high to be normal; "" where it is not."""
    unit = fit.unit or inf
    low, high = (s * unit for s in possible_shares(fit.hardware, fit.range.family))
    best = fit.range.share[1] * unit if fit.range.share else inf
    inputs = f"{'--nics' if fit.hardware.num_hosts > 1 else 'the GPU'}, the number of ranks"
    slack = f"(tolerance: {LIMIT_SLACK - 1:.0%})"
    reasons = (
        (
            high,
            f"{_limit(fit)} can carry at most {_rate(high)}: {inputs} or a time is wrong "
            f"{slack}",
        ),
        (
            low if fit.hardware.num_hosts > 1 else inf,
            f"{_limit(fit)} can carry at most {_rate(low)} unless the network's switches add "
            f"(SHARP): without SHARP, {inputs} or a time is wrong {slack}",
        ),
        (
            best / _TOLERANCE,
            f"no healthy table reaches more than {_rate(best)}: check {inputs} and the times",
        ),
    )
    busbw = fit.curve.peak.busbw
    return next((text for limit, text in reasons if busbw > LIMIT_SLACK * limit), "")


def _limit(fit: _Fit) -> str:
    """Return what fit.unit is the rate of."""
    if fit.hardware.num_hosts == 1 and fit.hardware.device:
        return str(fit.hardware.device.link_kind)
    assumed = "" if fit.hardware.is_stated else ", assumed"
    gbit = fit.hardware.nic_gbit or fit.range.nic_gbit
    return f"the NICs ({gbit:.4g}G for each GPU{assumed})"


def _outside(fit: _Fit, nics: Nics | None) -> Iterator[CurveFault]:
    """Yield the figures outside their range, with the usual causes."""
    peak = fit.curve.peak
    smallest = fit.curve.smallest
    each = fit.range
    if fit.is_slow and fit.peak_span:
        part = peak.busbw / fit.peak_span[0]
        count = ""
        if nics and each.family in ("all_reduce", "gather"):
            used = max(round(peak.busbw / fit.unit * nics[0] / _WIRE), 1)
            count = f", about the rate of {used} of {nics[0]} NICs"
        cause, action = _OF_LINKS if fit.hardware.num_hosts == 1 else _OF_NETWORK
        yield CurveFault(
            name="plateau",
            text=f"the peak is {part:.0%} of the least that healthy tables reach "
            f"({_span(fit.peak_span, _rate)}){count}",
            cause=cause,
            action=action,
            points=[peak],
        )
    if fit.is_late and smallest:
        is_local = fit.hardware.num_hosts == 1
        path, action = SLOW_ON_ONE_HOST if is_local else SLOW_ON_A_NETWORK
        yield CurveFault(
            name="latency",
            text=fit.late_text,
            cause=f"{path}, CPUs that save power, or load",
            action=f"{action}, and the CPUs' performance governor",
            points=[smallest],
        )


def _remarks(table: Table, fit: _Fit) -> list[str]:
    """Return what a verdict does not cover, and what explains a figure within its range."""
    peak = fit.curve.peak.busbw
    high = fit.peak_span[1] if fit.peak_span and fit.range.share and fit.has_peak else 0.0
    reasons = (
        (
            table.gpus_per_thread > 1,
            f"one thread launches on {table.gpus_per_thread} GPUs in turn",
        ),
        (not fit.latency_span, "there is no reference"),
        (not fit.range.link, "there are only tables of other GPUs or NICs"),
        (True, "one healthy table is no range"),
    )
    reason = next(text for is_true, text in reasons if is_true)
    low_ring, high_ring = _RING
    is_ring = (
        fit.hardware.num_hosts == 1
        and high > fit.unit
        and fit.curve.is_large
        and low_ring * fit.unit < peak < high_ring * fit.unit
    )
    least = fit.peak_span[0] if fit.peak_span else inf
    remarks = (
        (
            fit.is_low and not fit.is_slow,
            f"the peak is {peak / least:.1%} of the least that healthy tables reach: "
            f"{_NORMAL:.0%} is normal, less than {_TOLERANCE:.0%} not normal",
        ),
        (
            fit.curve.smallest and not fit.has_latency and not fit.is_late,
            "small messages are judged by a wide limit alone "
            f"({format_time(fit.max_latency_s)}): {reason}"
            if fit.max_latency_s < inf
            else f"small messages are not judged: {reason}",
        ),
        (
            fit.has_peak and fit.hardware.num_hosts > 1 and peak < _NORMAL * high,
            f"the fastest healthy table is {high / peak - 1:.0%} faster: a slow host or link "
            "may hide in that range (stepmark doctor --nodes compares the hosts)",
        ),
        (not fit.has_peak, "large messages are not judged: the table ends before 256 MiB"),
        (
            is_ring,
            "a ring reaches this rate; with NVLS, the reduction in the switch, tables reach up "
            f"to {_rate(high)}",
        ),
        (
            high and not fit.hardware.is_stated,
            f"the NICs of a host are not stated: {_nics_text(fit.range)} for each GPU fit",
        ),
    )
    return [text for is_true, text in remarks if is_true]


def _rows(fit: _Fit, faults: Sequence[CurveFault]) -> tuple[dict[str, str], ...]:
    """Return the figures beside their references; a figure that is missing has no row."""
    peak = fit.curve.peak
    small = fit.curve.smallest
    each = fit.range
    share = f" = {peak.busbw / (fit.unit or inf):.0%} of the {_rate(fit.unit)} of {_limit(fit)}"
    end = fit.curve.points[-1]
    loss = 1 - end.busbw / peak.busbw
    sag = (
        f", {loss:.0%} below the peak at {format_bytes(end.size_bytes)}" if loss > 0.05 else ""
    )
    tables = f"{each.num_tables}{'' if each.link else ', of other GPUs or NICs'}"
    least = fit.peak_span[0] if fit.peak_span else 0.0
    is_one = not each.link or (each.share and each.share[0] == each.share[1])
    peak_range = (
        f"{_span(fit.peak_span, _rate)}; normal from {_rate(_NORMAL * least)}, "
        f"{'unknown below, ' if is_one else ''}not normal below "
        f"{_rate((_FAR if is_one else _TOLERANCE) * least)}"
    )
    late = f"; not normal above {format_time(fit.max_latency_s)}"
    figures = (
        (
            "peak busbw",
            f"{_rate(peak.busbw)} at {format_bytes(peak.size_bytes)}"
            f"{share if fit.unit else ''}",
            peak_range if least and each.share and fit.has_peak else "",
        ),
        (
            "shortest time",
            f"{format_time(small.time_s)} at {format_bytes(small.size_bytes)}" if small else "",
            _span(fit.latency_span, format_time) + (late if fit.max_latency_s < inf else ""),
        ),
        ("shape", f"{', '.join(fault.name for fault in faults) or 'no fault'}{sag}", ""),
        (
            "healthy tables",
            tables if fit.unit or fit.latency_span else "none to compare with",
            "",
        ),
    )
    return tuple(
        {"figure": figure, "value": value, "reference": reference}
        for figure, value, reference in figures
        if value
    )


def _nics_text(each: Range) -> str:
    return f"{each.nic_gbit:.4g}G {each.network}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GB:.4g} GB/s"


def _span(span: Span | None, text_of: Callable[[float], str]) -> str:
    return " to ".join(dict.fromkeys(map(text_of, span))) if span else ""


def _finding(table: Table, fault: CurveFault) -> Finding:
    evidence = [
        Evidence(
            file=table.file,
            line=point.line,
            text=f"{format_bytes(point.size_bytes)}: {format_time(point.time_s)}, "
            f"{_rate(point.busbw)}",
        )
        for point in fault.points[:5]
    ]
    return Finding(
        rule=f"not-normal-{fault.name}",
        severity=Severity.WARNING,
        text=fault.text,
        evidence=tuple(evidence),
        count=len(fault.points),
        action=fault.action,
    )
