"""SimAI's rows to blocks: each distinct row is two, and each repeat of rows two more."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepmark.core.workload import Block, Group, Run
from stepmark.workload.fold import Repeat
from stepmark.workload.formats.simai_row import Row, blocks_of, parse, row_of


def _groups(header: Mapping[str, int]) -> dict[str, Group]:
    """Ranks of a tensor-parallel group are neighbours; then data, then pipeline."""
    tp, ep = header["model_parallel_NPU_group"], header.get("ep", 1)
    dp = header["all_gpus"] // (tp * header.get("pp", 1))
    found = {"tp": Group(digits=((tp, 1),)), "dp": Group(digits=((dp, tp),))}
    if ep and dp % ep == 0:
        found["ep"] = Group(digits=((ep, tp),))
        found["dp_ep"] = Group(digits=((dp // ep, tp * ep),))
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """Micro-batches begun so far, and layers begun in the newest of them."""

    microbatch: int = 0
    layer: int = 0


class Reader:
    """header: of line 1. Rows come by `number`, then `program` makes the blocks."""

    def __init__(self, header: Mapping[str, int]) -> None:
        self.groups = _groups(header)
        self.blocks: dict[str, Block] = {}
        self.raw: dict[str, list[str]] = {}  # of rows that we would write in another way
        self.rows: list[Row] = []
        self.num_microbatches = 0
        self._numbers: dict[str, int] = {}
        self._lines: list[tuple[str, int]] = []
        self._bodies: dict[Repeat[int], tuple[str, _Place]] = {}
        self._num_repeats = 0

    def number(self, text: str, place: int) -> int:
        """Which distinct row this is."""
        found = self._numbers.setdefault(text, len(self.rows))
        if found == len(self.rows):
            self.rows.append(parse(text, f"line {place}"))
            self._lines.append((text, place))
        return found

    def program(self, folded: "tuple[int | Repeat[int], ...]") -> None:
        """Fills blocks; the rows are known."""
        layers = any(row.starts_layer for row in self.rows)
        microbatches = any(row.starts_microbatch for row in self.rows)
        for index, row in enumerate(self.rows):
            text, place = self._lines[index]
            fwd, bwd = blocks_of(
                row, self.groups, f"line {place}", layers=layers, microbatches=microbatches
            )
            self.blocks[f"row {index}.fwd"], self.blocks[f"row {index}.bwd"] = fwd, bwd
            ours = row_of(row.name, fwd, bwd, self.groups).line()
            if ours != text + "\n" or not (fwd or bwd):
                self.raw[str(index)] = [ours, text + "\n"]
        self.num_microbatches = self._body("step", folded).microbatch
        self.blocks["step"] = (Run(block="step.fwd"), Run(block="step.bwd"))

    def _body(self, name: str, body: "tuple[int | Repeat[int], ...]") -> _Place:
        """Two blocks; returns how far they count."""
        place, found = _Place(), []
        for item in body:
            if isinstance(item, int):
                row = self.rows[item]
                if row.starts_microbatch:
                    place = _Place(place.microbatch + 1, 0)
                if row.starts_layer:
                    place = replace(place, layer=place.layer + 1)
                at = {"layer": place.layer - 1, "microbatch": place.microbatch - 1}
                found.append((f"row {item}", 1, at, _Place()))
                continue
            if item not in self._bodies:
                self._num_repeats += 1
                inner = f"rows {self._num_repeats}"
                self._bodies[item] = (inner, self._body(inner, item.body))
            inner, step = self._bodies[item]
            at = {
                "layer": 0 if step.microbatch else place.layer,
                "microbatch": place.microbatch,
            }
            if step.microbatch:
                place = _Place(place.microbatch + item.times * step.microbatch, step.layer)
                step = _Place(step.microbatch, 0)
            else:
                place = replace(place, layer=place.layer + item.times * step.layer)
            found.append((inner, item.times, at, step))
        self.blocks[f"{name}.fwd"] = tuple(_run(*one, backward=False) for one in found)
        self.blocks[f"{name}.bwd"] = tuple(_run(*one, backward=True) for one in found[::-1])
        return place

    def notes(self) -> tuple[str, ...]:
        cells = [cell for row in self.rows for cell in (row.fwd, row.dgrad, row.wgrad)]
        if all(cell.compute_ns <= 1 for cell in cells):
            return ("every compute time is 1 ns: AICB's filler where there is no profile",)
        return ()


def _run(block: str, times: int, at: dict[str, int], step: _Place, *, backward: bool) -> Run:
    if not backward:
        return Run(
            block=f"{block}.fwd",
            times=times,
            layer_step=step.layer,
            microbatch_step=step.microbatch,
            **at,
        )
    return Run(
        block=f"{block}.bwd",
        times=times,
        layer=at["layer"] + step.layer * (times - 1),
        layer_step=-step.layer,
        microbatch=at["microbatch"] + step.microbatch * (times - 1),
        microbatch_step=-step.microbatch,
    )
