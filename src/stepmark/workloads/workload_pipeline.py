"""Pipeline of a workload over time: the micro-batch of each stage at each time.

Units of time and waits are those of workload_lanes.py. Of a long step, few repeats of its
steady state are drawn; the idle time is still that of the whole step.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stepmark.step.workload import Run, Workload
from stepmark.step.workload_stages import num_steady, shortened
from stepmark.timeline.timeline import Span, Timeline
from stepmark.workloads.workload_lanes import spans

_KEPT = 4  # repeats of a steady state that are drawn where all are too many
_MOST_PIECES = 200_000


class Chart(NamedTuple):
    """All stages' work in time. left_out: repeats of the steady state that are left out."""

    timeline: Timeline
    idle_percent: float  # of the whole step, until the last forward or backward ends
    left_out: int

    @property
    def num_stages(self) -> int:
        """Return the number of stages, all of which work."""
        return 1 + max(self.timeline.columns["rank"])

    @property
    def end(self) -> int:
        """Return when the last work ends."""
        return self.timeline.window[1]


def chart_of(workload: Workload, most: int) -> Chart | str:
    """Return all of it, or few repeats of the steady state if it exceeds `most` spans.

    A text is the reason for which there is none.
    """
    num_stages = len(workload.stages)
    cut = workload if num_pieces(workload) <= most else shortened(workload, _KEPT)
    if num_pieces(cut) > _MOST_PIECES:
        return "too many micro-batches and stages to draw"
    drawn = spans(cut)
    if not drawn:
        return "not drawn: by their order of transfers, stages wait for each other"
    less = num_steady(workload) - num_steady(cut)
    busy, end = _sums(drawn)
    if less:  # each repeat adds as much as one more does
        longer, later = _sums(spans(shortened(workload, _KEPT + 1)))
        busy, end = busy + less * (longer - busy), end + less * (later - end)
    return Chart(
        timeline=Timeline(drawn, (0, max(span.end_ns for span in drawn))),
        idle_percent=100 * (1 - busy / (end * num_stages)) if end else 0.0,
        left_out=less,
    )


def _sums(drawn: Sequence[Span]) -> tuple[int, int]:
    """Return units of forwards and backwards over all stages, and the end of the last."""
    work = [span for span in drawn if span.kind != "optimizer"]
    busy = sum(span.time_ns for span in work)
    return busy, max((span.end_ns for span in work), default=0)


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


_MOST_SPANS = 2000
_WIDEST = 200  # characters


def lines(workload: Workload) -> list[str]:
    """Return a line per stage: f3 is the forward of micro-batch 3, b3 its backward.

    Without a pipeline, one line gives the reason; one stage has no lines.
    """
    if len(workload.stages) == 1:
        return []
    chart = chart_of(workload, _MOST_SPANS)
    if isinstance(chart, Chart) and _width(chart) > _WIDEST:
        chart = chart_of(workload, 0)
    if isinstance(chart, str):
        return [chart]
    if _width(chart) > _WIDEST:
        return [f"too wide for text: --html draws it; idle {chart.idle_percent:.1f} %"]
    label, width = _label(chart), _cell_width(chart)
    drawn = []
    for stage in range(chart.num_stages):
        cells = ["." * width] * chart.end
        for span in chart.timeline:
            if span.rank == stage:
                for unit in range(span.start_ns, span.end_ns):
                    cells[unit] = _cell(span).ljust(width)
        drawn.append(f"{f'stage {stage}'.ljust(label)}  {' '.join(cells)}".rstrip())
    legend = "f forward 1 unit, b backward 2, o optimizer; the number is the micro-batch"
    legend += (
        f"; {chart.left_out} repeats of the steady state left out" if chart.left_out else ""
    )
    return [*drawn, f"{legend}; idle {chart.idle_percent:.1f} %"]


def _width(chart: Chart) -> int:
    return _label(chart) + 2 + chart.end * (_cell_width(chart) + 1)


def _label(chart: Chart) -> int:
    return len(f"stage {chart.num_stages - 1}")


def _cell_width(chart: Chart) -> int:
    return max(len(_cell(span)) for span in chart.timeline)


def _cell(span: Span) -> str:
    return span.kind[0] + ("" if span.microbatch is None else str(span.microbatch))
