"""Collectives in the table of PARAM's train/comms/pt/comms.py.

Its percentiles are over ranks, of each rank's mean; rates are from the median rank. Column
widths from facebookresearch/param, reportBenchTimeColl.
"""

from collections.abc import Iterable
from statistics import fmean

from stepmark.core.collectives import FACTS, Collective
from stepmark.core.comm_case import CommCase
from stepmark.core.dtypes import DType
from stepmark.core.record import Record, RunInfo
from stepmark.core.stats import quantile
from stepmark.core.units import GB
from stepmark.report.launches import Launches, pooled

# What torch calls them, as PARAM's --data-types.
_DTYPES = {
    DType.FP64: "float64",
    DType.FP32: "float32",
    DType.BF16: "bfloat16",
    DType.FP16: "float16",
    DType.FP8_E4M3: "float8_e4m3fn",
    DType.FP8_E5M2: "float8_e5m2",
}
_NAMES = {Collective.ALL_TO_ALL_V: "all_to_allv"}
_WIDTHS = (18, 18, 18, 12, 12, 12, 12, 15, 12)
_HEADINGS = (
    *("total-size (B)", "nElementsPerRank", "Time(us):p50", "p75", "p95", "Min", "Max"),
    *("AlgBW(GB/s)", "BusBW(GB/s)"),
)


def param_comms(records: Iterable[Record], run: RunInfo) -> dict[str, str]:
    """One block per collective and dtype. PARAM prints nothing about wrong data: left out.

    Its table for pairs has other columns, and a barrier no rate, so neither is here.
    """
    blocks: dict[str, list[Launches]] = {}
    for one in pooled(records):
        held = one.case.collective
        if one.status != "measured" or FACTS[held].pair or held is Collective.BARRIER:
            continue
        blocks.setdefault(_name(one.case), []).append(one)
    return {name: _block(name, held, run) for name, held in blocks.items()}


def _name(case: CommCase) -> str:
    dtype = _DTYPES.get(case.dtype, case.dtype.value)
    return f"{_NAMES.get(case.collective, case.collective.value)}-{dtype}{_tag(case)}"


def _tag(case: CommCase) -> str:
    """PARAM's --tag: what tells apart tables that it would print alike."""
    words = ["in-place"] if case.in_place else []
    words += [case.mode.value] if case.mode.value != "queued" else []
    words += [f"{case.num_ranks}of{case.world_size}"] * (case.num_ranks != case.world_size)
    words += [f"beside-{case.beside}"] if case.beside else []
    return "".join(f"-{word}" for word in words)


def _block(name: str, held: list[Launches], run: RunInfo) -> str:
    heads = "".join(f"{head:>{w}}" for head, w in zip(_HEADINGS, _WIDTHS, strict=True))
    lines = [
        f"# run {run.run_id}; percentiles are over ranks, of each rank's mean; "
        "TotalTime is not measured there: PARAM prints 0.0",
        f"\tCOMMS-RES-{name}{heads}  TotalTime(us):p50",
        *(f"\tCOMMS-RES-{name}{_cells(one)}" for one in held),
    ]
    return "\n".join(lines) + "\n"


def _cells(one: Launches) -> str:
    """One line: microseconds with one decimal, GB/s with three."""
    means = sorted(
        fmean(value for record in one.measured for value in record.samples.seconds[index])
        for index in range(len(one.case.members))
    )
    p50, p75, p95 = (quantile(means, q) for q in (0.5, 0.75, 0.95))
    algbw = one.case.message_bytes / p50 / GB
    times = (f"{value * 1e6:.1f}" for value in (p50, p75, p95, means[0], means[-1]))
    rates = (f"{algbw:.3f}", f"{algbw * one.case.busbw_factor:.3f}")
    cells = (str(one.case.message_bytes), str(one.case.count), *times, *rates)
    shown = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    return "".join(shown) + f"{'0.0':>19}"
