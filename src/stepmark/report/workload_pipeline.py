"""The pipeline of a workload over time: which stage works on which micro-batch when.

Time is in units: a forward of a stage's chunk takes one, its backward two, the optimizer one,
transfers none. So this is of the schedule's order and its waits, not of speed. Over 250 lines:
a program to pieces and pieces to times share their pieces' meaning.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.core.message import RECV, SEND
from stepmark.core.workload import COMPUTE, Block, CommOp, ComputeOp, Operation, Run, Workload
from stepmark.report.workload_tables import is_wait, pass_of

UNITS = {"forward": 1, "backward": 2, "optimizer": 1}
_KEPT = 4  # repeats of a steady state that are drawn where all are too many
_MOST_PIECES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One forward or backward of a stage's chunk; microbatch None: the optimizer."""

    stage: int
    kind: str
    microbatch: int | None
    layer: int | None  # the chunk's first
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All stages' work in time. left_out: repeats of the steady state that are not in it."""

    slots: tuple[Slot, ...]
    num_stages: int
    idle_percent: float  # of the whole step, until the last forward or backward ends
    left_out: int = 0

    @property
    def end(self) -> int:
        return max(slot.end for slot in self.slots)


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


def timeline(workload: Workload, most: int) -> Timeline | str:
    """All of it, or where that is more than so many slots, few repeats of the steady state.

    A text says why there is none.
    """
    num_stages = len(workload.stages)
    cut = workload if num_pieces(workload) <= most else shortened(workload, _KEPT)
    if num_pieces(cut) > _MOST_PIECES:
        return "too many micro-batches and stages to draw"
    found = slots(cut)
    if not found:
        return "not drawn: by their order of transfers, stages wait for each other"
    less = num_steady(workload) - num_steady(cut)
    busy, end = _sums(found)
    if less:  # each repeat adds as much as one more does
        longer, later = _sums(slots(shortened(workload, _KEPT + 1)))
        busy, end = busy + less * (longer - busy), end + less * (later - end)
    return Timeline(
        slots=found,
        num_stages=num_stages,
        idle_percent=100 * (1 - busy / (end * num_stages)) if end else 0.0,
        left_out=less,
    )


def slots(workload: Workload) -> tuple[Slot, ...]:
    """All stages' work in time. () where stages would wait for each other for ever."""
    names = _transfer_names(workload)
    known: dict[str, tuple[_Piece, ...]] = {}
    lanes = [
        _Lane(index, _pieces(workload.blocks, stage.step, names, known))
        for index, stage in enumerate(workload.stages)
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


def shortened(workload: Workload, kept: int) -> Workload:
    """With so many repeats of the steady state in the stage that has the fewest.

    Every other stage has as many less.
    """
    less = num_steady(workload) - kept
    if less <= 0:
        return workload
    found = [_steady(workload.blocks, stage.step) for stage in workload.stages]
    blocks = dict(workload.blocks)
    stages = []
    for index, (stage, run) in enumerate(zip(workload.stages, found, strict=True)):
        assert run is not None
        name = f"{stage.step}, shortened {index}"
        blocks[name] = tuple(
            replace(run, times=run.times - less) if one is run else one
            for one in blocks[stage.step]
        )
        stages.append(replace(stage, step=name))
    return replace(workload, blocks=blocks, stages=tuple(stages))


def num_steady(workload: Workload) -> int:
    """Repeats of the steady state in the stage that has the fewest."""
    found = (_steady(workload.blocks, stage.step) for stage in workload.stages)
    return min(run.times if run else 0 for run in found)


def _steady(blocks: Mapping[str, Block], step: str) -> Run | None:
    """What of a step repeats forwards and backwards together, the longest of it."""
    found = [
        one
        for one in blocks[step]
        if isinstance(one, Run)
        and one.microbatch_step
        and {"forward", "backward"} <= _kinds(blocks, one.block, {})
    ]
    return max(found, key=lambda run: run.times, default=None)


def _kinds(
    blocks: Mapping[str, Block], block: str, known: dict[str, frozenset[str]]
) -> frozenset[str]:
    """Which passes a block computes."""
    if block not in known:
        held: set[str] = set()
        for one in blocks[block]:
            if isinstance(one, Run):
                held |= _kinds(blocks, one.block, known)
            elif isinstance(one, ComputeOp) and not is_wait(one):
                held.add(pass_of(one))
        known[block] = frozenset(held)
    return known[block]


def _sums(found: Sequence[Slot]) -> tuple[int, int]:
    """Units of forwards and backwards over all stages, and when the last one ends."""
    work = [slot for slot in found if slot.kind != "optimizer"]
    return sum(slot.end - slot.start for slot in work), max(
        (one.end for one in work), default=0
    )


def num_pieces(workload: Workload) -> int:
    """How much there is to draw, about: forwards and backwards of chunks, all stages."""
    known: dict[str, int] = {}

    def count(block: str) -> int:
        if block not in known:
            held = [one for one in workload.blocks[block] if isinstance(one, Run)]
            repeats = (run.times if run.microbatch_step else 1 for run in held)
            known[block] = 1 + sum(
                times * count(run.block) for times, run in zip(repeats, held, strict=True)
            )
        return known[block]

    return sum(count(stage.step) for stage in workload.stages)


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
    if isinstance(item, CommOp) and item.collective in (SEND, RECV):
        yield _Move(item)
    elif isinstance(item, ComputeOp) and not is_wait(item):
        yield _Work(pass_of(item), item.microbatch, item.layer, awaited)
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
