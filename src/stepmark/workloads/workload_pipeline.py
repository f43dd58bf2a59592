"""Pipeline of a workload over time: the micro-batch of each stage at each time.

Units of time and waits are those of workload_lanes.py. Of a long step, few repeats of its
steady state are drawn; the idle time is still that of the whole step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.step.workload import Run, Workload
from stepmark.step.workload_stages import num_steady, shortened
from stepmark.workloads.workload_lanes import Slot, slots

_KEPT = 4  # repeats of a steady state that are drawn where all are too many
_MOST_PIECES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All stages' work in time. left_out: repeats of the steady state that are left out."""

    slots: tuple[Slot, ...]
    num_stages: int
    idle_percent: float  # of the whole step, until the last forward or backward ends
    left_out: int = 0

    @property
    def end(self) -> int:
        return max(slot.end for slot in self.slots)


def timeline(workload: Workload, most: int) -> Timeline | str:
    """Return all of it, or few repeats of the steady state if it exceeds `most` slots.

    A text is the reason for which there is none.
    """
    num_stages = len(workload.stages)
    cut = workload if num_pieces(workload) <= most else shortened(workload, _KEPT)
    if num_pieces(cut) > _MOST_PIECES:
        return "too many micro-batches and stages to draw"
    drawn = slots(cut)
    if not drawn:
        return "not drawn: by their order of transfers, stages wait for each other"
    less = num_steady(workload) - num_steady(cut)
    busy, end = _sums(drawn)
    if less:  # each repeat adds as much as one more does
        longer, later = _sums(slots(shortened(workload, _KEPT + 1)))
        busy, end = busy + less * (longer - busy), end + less * (later - end)
    return Timeline(
        slots=drawn,
        num_stages=num_stages,
        idle_percent=100 * (1 - busy / (end * num_stages)) if end else 0.0,
        left_out=less,
    )


def _sums(drawn: Sequence[Slot]) -> tuple[int, int]:
    """Return units of forwards and backwards over all stages, and the end of the last."""
    work = [slot for slot in drawn if slot.kind != "optimizer"]
    busy = sum(slot.end - slot.start for slot in work)
    return busy, max((slot.end for slot in work), default=0)


def num_pieces(workload: Workload) -> int:
    """Return about the number of forwards and backwards of chunks of all stages."""
    cache: dict[str, int] = {}

    def count(block: str) -> int:
        if block not in cache:
            runs = (item for item in workload.blocks[block] if isinstance(item, Run))
            cache[block] = 1 + sum(
                (run.times if run.microbatch_step else 1) * count(run.block) for run in runs
            )
        return cache[block]

    return sum(count(stage.step) for stage in workload.stages)


_MOST_SLOTS = 2000
_WIDEST = 200  # characters


def lines(workload: Workload) -> list[str]:
    """Return a line per stage: f3 is the forward of micro-batch 3, b3 its backward.

    Without a pipeline, one line gives the reason; one stage has no lines.
    """
    if len(workload.stages) == 1:
        return []
    chart = timeline(workload, _MOST_SLOTS)
    if isinstance(chart, Timeline) and _width(chart) > _WIDEST:
        chart = timeline(workload, 0)
    if isinstance(chart, str):
        return [chart]
    if _width(chart) > _WIDEST:
        return [f"too wide for text: --html draws it; idle {chart.idle_percent:.1f} %"]
    label, width = _label(chart), _cell_width(chart)
    drawn = []
    for stage in range(chart.num_stages):
        cells = ["." * width] * chart.end
        for slot in chart.slots:
            if slot.stage == stage:
                for unit in range(slot.start, slot.end):
                    cells[unit] = _cell(slot).ljust(width)
        drawn.append(f"{f'stage {stage}'.ljust(label)}  {' '.join(cells)}".rstrip())
    legend = "f forward 1 unit, b backward 2, o optimizer; the number is the micro-batch"
    legend += (
        f"; {chart.left_out} repeats of the steady state left out" if chart.left_out else ""
    )
    return [*drawn, f"{legend}; idle {chart.idle_percent:.1f} %"]


def _width(chart: Timeline) -> int:
    return _label(chart) + 2 + chart.end * (_cell_width(chart) + 1)


def _label(chart: Timeline) -> int:
    return len(f"stage {chart.num_stages - 1}")


def _cell_width(chart: Timeline) -> int:
    return max(len(_cell(slot)) for slot in chart.slots)


def _cell(slot: Slot) -> str:
    return slot.kind[0] + ("" if slot.microbatch is None else str(slot.microbatch))
