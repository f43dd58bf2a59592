"""The pipeline of a workload over time: which stage works on which micro-batch when.

Time is in units: a forward of a stage's chunk takes one, its backward two, the optimizer one,
transfers none. So the figure is of the schedule's order and its waits, not of speed. Where
micro-batches repeat many times, a few of them are drawn. Over 250 lines: a program to pieces,
pieces to times, times to text share their pieces' meaning.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.core.message import RECV, SEND
from stepmark.core.workload import COMPUTE, Block, CommOp, ComputeOp, Operation, Run, Workload
from stepmark.report.workload_tables import pass_of

UNITS = {"forward": 1, "backward": 2, "optimizer": 1}
_KEPT = 4  # repeats of a steady state that are drawn
MOST_PIECES = 200_000
_WIDEST = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One forward or backward of a stage's chunk; microbatch None: the optimizer."""

    stage: int
    kind: str
    microbatch: int | None
    layer: int | None  # the chunk's first
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Work:
    """Computation on one micro-batch in one go, after transfers of these names."""

    kind: str
    microbatch: int | None
    layer: int | None
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Move:
    operation: CommOp


_Piece = _Work | _Move


def slots(workload: Workload) -> tuple[Slot, ...]:
    """All stages' work in time. () where stages would wait for each other for ever."""
    cut = shortened(workload)
    names = _transfer_names(cut)
    known: dict[str, tuple[_Piece, ...]] = {}
    lanes = [
        _Lane(index, _pieces(cut.blocks, stage.step, names, known))
        for index, stage in enumerate(cut.stages)
    ]
    sent: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for lane in lanes:
            moved |= lane.advance(sent, len(lanes))
    if any(not lane.is_done for lane in lanes):
        return ()
    return tuple(slot for lane in lanes for slot in lane.slots)


def shortened(workload: Workload) -> Workload:
    """With fewer repeats of its steady state: as many less in every stage."""
    longest = []
    for stage in workload.stages:
        runs = [one for one in workload.blocks[stage.step] if isinstance(one, Run)]
        repeats = [run.times for run in runs if run.microbatch_step]
        longest.append(max(repeats, default=1))
    less = min(longest) - _KEPT
    if less <= 0:
        return workload
    blocks = dict(workload.blocks)
    stages = []
    for index, stage in enumerate(workload.stages):
        items = list(blocks[stage.step])
        place = next(
            place
            for place, one in enumerate(items)
            if isinstance(one, Run) and one.microbatch_step and one.times == longest[index]
        )
        run = items[place]
        assert isinstance(run, Run)
        items[place] = replace(run, times=run.times - less)
        name = f"{stage.step}, shortened {index}"
        blocks[name] = tuple(items)
        stages.append(replace(stage, step=name))
    return replace(workload, blocks=blocks, stages=tuple(stages))


def text(workload: Workload) -> list[str]:
    """A line per stage, a cell per unit: f3 forward of micro-batch 3, b3 backward, o optimizer.

    One line that says why, where there is none; nothing for one stage.
    """
    if len(workload.stages) == 1:
        return []
    if num_pieces(workload) > MOST_PIECES:
        return ["too many micro-batches and stages to draw"]
    found = slots(workload)
    if not found:
        return ["not drawn: by their order of transfers, stages wait for each other"]
    end = max(slot.end for slot in found)
    width = max(len(_cell(slot)) for slot in found)
    label = len(f"stage {len(workload.stages) - 1}")
    if label + 2 + end * (width + 1) > _WIDEST:
        shown = f"{end} units wide: --html draws it"
        return [f"{shown}; idle {idle_percent(found, len(workload.stages)):.1f} %"]
    lines = []
    for stage in range(len(workload.stages)):
        cells = ["." * width] * end
        for slot in found:
            if slot.stage == stage:
                for unit in range(slot.start, slot.end):
                    cells[unit] = _cell(slot).ljust(width)
        lines.append(f"{f'stage {stage}'.ljust(label)}  {' '.join(cells)}".rstrip())
    cut = shortened(workload) is not workload
    said = "f forward 1 unit, b backward 2, o optimizer; the number is the micro-batch"
    said += "; repeats of the steady state left out" if cut else ""
    return [*lines, f"{said}; idle {idle_percent(found, len(workload.stages)):.1f} %"]


def idle_percent(found: Sequence[Slot], num_stages: int) -> float:
    """Of all stages' time until the last forward or backward ends, in these units."""
    work = [slot for slot in found if slot.kind != "optimizer"]
    end = max((slot.end for slot in work), default=0)
    busy = sum(slot.end - slot.start for slot in work)
    return 100 * (1 - busy / (end * num_stages)) if end else 0.0


def num_pieces(workload: Workload) -> int:
    """How much there is to draw, about: forwards and backwards of chunks, all stages."""
    cut = shortened(workload)
    known: dict[str, int] = {}

    def count(block: str) -> int:
        if block not in known:
            held = [one for one in cut.blocks[block] if isinstance(one, Run)]
            repeats = (run.times if run.microbatch_step else 1 for run in held)
            known[block] = 1 + sum(
                times * count(run.block) for times, run in zip(repeats, held, strict=True)
            )
        return known[block]

    return sum(count(stage.step) for stage in cut.stages)


def _cell(slot: Slot) -> str:
    return slot.kind[0] + ("" if slot.microbatch is None else str(slot.microbatch))


class _Lane:
    """A stage at work: as far as it comes until it waits for another."""

    def __init__(self, stage: int, pieces: Sequence[_Piece]) -> None:
        self.stage = stage
        self.slots: list[Slot] = []
        self._pieces = pieces
        self._next = 0
        self._now = 0
        self._taken: dict[tuple[int, int, str], int] = defaultdict(int)
        self._pending: list[tuple[tuple[int, int, str], int]] = []  # receipts waited for
        # By the transfer's name: the (pair and phase, number) that its receipt waits for.
        self._receipts: dict[str, list[tuple[tuple[int, int, str], int] | None]] = defaultdict(
            list
        )

    @property
    def is_done(self) -> bool:
        return self._next == len(self._pieces)

    def advance(self, sent: dict[tuple[int, int, str], list[int]], num_stages: int) -> bool:
        """Whether anything was done."""
        before = self._next
        while not self.is_done:
            piece = self._pieces[self._next]
            if not self._waited(piece, sent):
                break
            done = (
                self._work(piece, sent)
                if isinstance(piece, _Work)
                else self._move(piece, sent, num_stages)
            )
            if not done:
                break
            self._next += 1
        return self._next > before

    def _waited(self, piece: _Piece, sent: dict[tuple[int, int, str], list[int]]) -> bool:
        """Whether all is there that is waited for; what one call sends goes out first."""
        if isinstance(piece, _Move) and piece.operation.fused:
            return True
        for pair, number in self._pending:
            if number >= len(sent[pair]):
                return False
            self._now = max(self._now, sent[pair][number])
        self._pending.clear()
        return True

    def _work(self, piece: _Work, sent: dict[tuple[int, int, str], list[int]]) -> bool:
        ready = self._now
        for name in piece.after:
            base, _, back = name.partition("~")
            held = self._receipts[base]
            index = len(held) - 1 - int(back or 0)
            receipt = held[index] if index >= 0 else None
            if receipt is None:
                continue
            pair, number = receipt
            if number >= len(sent[pair]):
                return False
            ready = max(ready, sent[pair][number])
        self._now = ready
        if piece.kind not in UNITS:
            return True
        end = self._now + UNITS[piece.kind]
        self.slots.append(
            Slot(
                stage=self.stage,
                kind=piece.kind,
                microbatch=piece.microbatch,
                layer=piece.layer,
                start=self._now,
                end=end,
            )
        )
        self._now = end
        return True

    def _move(
        self, piece: _Move, sent: dict[tuple[int, int, str], list[int]], num_stages: int
    ) -> bool:
        """What is sent is there at once; a receipt is waited for now, or by its name."""
        one = piece.operation
        assert one.peer is not None
        other = (self.stage + one.peer) % num_stages
        if one.collective == SEND:
            sent[self.stage, other, one.phase].append(self._now)
            self._receipts[one.name].append(None)
            return True
        pair = (other, self.stage, one.phase)
        number = self._taken[pair]
        self._taken[pair] += 1
        if one.stream == COMPUTE:
            self._pending.append((pair, number))
        self._receipts[one.name].append((pair, number))
        return True


def _transfer_names(workload: Workload) -> frozenset[str]:
    return frozenset(
        one.name
        for block in workload.blocks.values()
        for one in block
        if isinstance(one, CommOp) and one.collective in (SEND, RECV)
    )


def _pieces(
    blocks: Mapping[str, Block],
    block: str,
    names: frozenset[str],
    known: dict[str, tuple[_Piece, ...]],
) -> tuple[_Piece, ...]:
    """A block as pieces, relative to its own layer and micro-batch."""
    if block in known:
        return known[block]
    found: list[_Piece] = []
    for item in blocks[block]:
        if isinstance(item, Run):
            inside = _pieces(blocks, item.block, names, known)
            for index in range(item.times):
                layer = item.layer + index * item.layer_step
                microbatch = item.microbatch + index * item.microbatch_step
                for piece in inside:
                    _add(found, _shifted(piece, layer, microbatch))
        else:
            for piece in _piece(item, names):
                _add(found, piece)
    known[block] = tuple(found)
    return known[block]


def _piece(item: Operation, names: frozenset[str]) -> Iterator[_Piece]:
    awaited = tuple(name for name in item.after if name.partition("~")[0] in names)
    if isinstance(item, ComputeOp):
        yield _Work(pass_of(item), item.microbatch, item.layer, awaited)
    elif item.collective in (SEND, RECV):
        yield _Move(item)
    elif awaited:
        yield _Work("", None, None, awaited)


def _shifted(piece: _Piece, layer: int, microbatch: int) -> _Piece:
    if isinstance(piece, _Move) or not (layer or microbatch):
        return piece
    return replace(
        piece,
        microbatch=None if piece.microbatch is None else piece.microbatch + microbatch,
        layer=None if piece.layer is None else piece.layer + layer,
    )


def _add(found: list[_Piece], piece: _Piece) -> None:
    """Work that goes on with the same micro-batch in the same direction is one piece."""
    last = found[-1] if found else None
    if isinstance(piece, _Work) and isinstance(last, _Work) and not piece.after:
        same = last.kind == piece.kind and (
            piece.microbatch is None or last.microbatch in (None, piece.microbatch)
        )
        if same:
            layers = [one for one in (last.layer, piece.layer) if one is not None]
            microbatch = piece.microbatch if last.microbatch is None else last.microbatch
            found[-1] = replace(last, microbatch=microbatch, layer=min(layers, default=None))
            return
    found.append(piece)
