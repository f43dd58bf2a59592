"""The pipeline of a workload as text: a line per stage, a cell per unit of time."""

from stepmark.core.workload import Workload
from stepmark.report.workload_lanes import Slot
from stepmark.report.workload_pipeline import Timeline, timeline

_MOST_SLOTS = 2000
_WIDEST = 200  # characters


def lines(workload: Workload) -> list[str]:
    """f3 is the forward of micro-batch 3, b3 its backward, o the optimizer.

    One line that says why, where there is none; nothing for one stage.
    """
    if len(workload.stages) == 1:
        return []
    found = timeline(workload, _MOST_SLOTS)
    if isinstance(found, Timeline) and _width(found) > _WIDEST:
        found = timeline(workload, 0)
    if isinstance(found, str):
        return [found]
    if _width(found) > _WIDEST:
        return [f"{found.end} units wide: --html draws it; idle {found.idle_percent:.1f} %"]
    label, width = _label(found), _cell_width(found)
    drawn = []
    for stage in range(found.num_stages):
        cells = ["." * width] * found.end
        for slot in found.slots:
            if slot.stage == stage:
                for unit in range(slot.start, slot.end):
                    cells[unit] = _cell(slot).ljust(width)
        drawn.append(f"{f'stage {stage}'.ljust(label)}  {' '.join(cells)}".rstrip())
    said = "f forward 1 unit, b backward 2, o optimizer; the number is the micro-batch"
    said += f"; {found.left_out} repeats of the steady state left out" if found.left_out else ""
    return [*drawn, f"{said}; idle {found.idle_percent:.1f} %"]


def _width(found: Timeline) -> int:
    return _label(found) + 2 + found.end * (_cell_width(found) + 1)


def _label(found: Timeline) -> int:
    return len(f"stage {found.num_stages - 1}")


def _cell_width(found: Timeline) -> int:
    return max(len(_cell(slot)) for slot in found.slots)


def _cell(slot: Slot) -> str:
    return slot.kind[0] + ("" if slot.microbatch is None else str(slot.microbatch))
