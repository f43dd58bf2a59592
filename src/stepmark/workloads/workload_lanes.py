"""Simulation of the stages of a workload: each runs until it waits for another.

Time is in units: a forward of a stage's chunk takes one, its backward two, the optimizer one,
transfers none. So it shows the order and waits of a schedule, not its speed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.cases.message import RECV, SEND
from stepmark.step.workload import (
    COMPUTE,
    Block,
    CommOp,
    ComputeOp,
    Operation,
    Run,
    Workload,
    pass_of,
)
from stepmark.step.workload_stages import Transfer, transfer_of
from stepmark.timeline.timeline import Span

UNITS = {"forward": 1, "backward": 2, "optimizer": 1}


@dataclass(frozen=True, slots=True)
class _Work:
    """Computation on one micro-batch without a break, after transfers of these names."""

    kind: str
    microbatch: int | None
    layer: int | None
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Move:
    operation: CommOp


_Piece = _Work | _Move


def spans(workload: Workload) -> tuple[Span, ...]:
    """Return each forward or backward of a stage's chunk, and its optimizer, in units of time.

    The layer is the chunk's first one. () where stages would deadlock.
    """
    moves = _Moves.of(workload)
    cache: dict[str, tuple[_Piece, ...]] = {}
    sent: dict[Transfer, list[int]] = defaultdict(list)
    lanes = [
        _Lane(workload, index, _pieces(workload.blocks, stage.step, moves, cache), sent)
        for index, stage in enumerate(workload.stages)
    ]
    while sum(lane.advance() for lane in lanes):
        pass
    if any(not lane.is_done for lane in lanes):
        return ()
    return tuple(span for lane in lanes for span in lane.spans)


class _Lane:
    """Progress of one stage. `sent` has the times of all transfers, shared by all lanes."""

    def __init__(
        self,
        workload: Workload,
        stage: int,
        pieces: Sequence[_Piece],
        sent: Mapping[Transfer, list[int]],
    ) -> None:
        self.stage, self._workload = stage, workload
        self.spans: list[Span] = []
        self._pieces = pieces
        self._sent = sent
        self._next = 0
        self._now = 0
        self._num_received: dict[Transfer, int] = defaultdict(int)
        self._pass_kinds: set[str] = set()  # of work on a micro-batch
        self._pending: list[tuple[Transfer, int]] = []  # receipts that block the stage
        # By the transfer's name: the pair and number of its receipts, None for what is sent.
        self._receipts: dict[str, list[tuple[Transfer, int] | None]] = defaultdict(list)

    @property
    def is_done(self) -> bool:
        return self._next == len(self._pieces)

    def advance(self) -> bool:
        """Run until the stage must wait. Return whether anything was done."""
        before = self._next
        while not self.is_done:
            piece = self._pieces[self._next]
            is_fused = isinstance(piece, _Move) and piece.operation.fused
            # A call sends all its messages before it waits for one.
            if not is_fused and not self._receive():
                break
            if isinstance(piece, _Move):
                self._move(piece.operation)
            elif not self._work(piece):
                break
            self._next += 1
        return self._next > before

    def _receive(self) -> bool:
        """Return whether all pending messages were sent, and wait for them."""
        for pair, number in self._pending:
            if number >= len(self._sent[pair]):
                return False
            self._now = max(self._now, self._sent[pair][number])
        self._pending.clear()
        return True

    def _work(self, piece: _Work) -> bool:
        """Do a piece of work. Return False where it must wait for a message."""
        ready = self._now
        for name in piece.after:
            base, _, back = name.partition("~")
            receipts = self._receipts[base]
            index = len(receipts) - 1 - int(back or 0)
            receipt = receipts[index] if index >= 0 else None
            if receipt is None:
                continue
            pair, number = receipt
            if number >= len(self._sent[pair]):
                return False
            ready = max(ready, self._sent[pair][number])
        self._now = ready
        # Work on no micro-batch, where other work is on one, is no pass through the chunk: e.g.
        # the reduction of all gradients at the end.
        if piece.microbatch is not None:
            self._pass_kinds.add(piece.kind)
        elif piece.kind in self._pass_kinds:
            return True
        if piece.kind not in UNITS:
            return True
        end = self._now + UNITS[piece.kind]
        self.spans.append(
            Span(
                rank=self.stage,
                stream=COMPUTE,
                kind=piece.kind,
                name=piece.kind,
                start_ns=self._now,
                end_ns=end,
                layer=piece.layer,
                microbatch=piece.microbatch,
            )
        )
        self._now = end
        return True

    def _move(self, operation: CommOp) -> None:
        """Send at once; wait for a receipt at the next piece, or where its name is needed."""
        transfer = transfer_of(self._workload, self.stage, operation)
        if transfer is None:  # inside the stage, unlike others of its group
            return
        if operation.collective == SEND:
            self._sent[transfer].append(self._now)
            self._receipts[operation.name].append(None)
            return
        number = self._num_received[transfer]
        self._num_received[transfer] += 1
        if operation.stream == COMPUTE:
            self._pending.append((transfer, number))
        self._receipts[operation.name].append((transfer, number))


@dataclass(frozen=True, slots=True)
class _Moves:
    """Groups in which stages transfer data, and the names of transfers in them."""

    groups: frozenset[str]
    names: frozenset[str]

    @classmethod
    def of(cls, workload: Workload) -> "_Moves":
        moves = [
            operation
            for block in workload.blocks.values()
            for operation in block
            if isinstance(operation, CommOp) and transfer_of(workload, 0, operation)
        ]
        return cls(
            groups=frozenset(operation.group for operation in moves),
            # The computation waits at once for those on its stream.
            names=frozenset(op.name for op in moves if op.stream != COMPUTE),
        )


def _pieces(
    blocks: Mapping[str, Block],
    block: str,
    moves: _Moves,
    cache: dict[str, tuple[_Piece, ...]],
) -> tuple[_Piece, ...]:
    """Return a block as pieces, relative to its own layer and micro-batch."""
    if block in cache:
        return cache[block]
    pieces: list[_Piece] = []
    for item in blocks[block]:
        if isinstance(item, Run):
            inside = _pieces(blocks, item.block, moves, cache)
            for index in range(item.times):
                layer = item.layer + index * item.layer_step
                microbatch = item.microbatch + index * item.microbatch_step
                for piece in inside:
                    _add(pieces, _shifted(piece, layer, microbatch))
        else:
            for piece in _piece(item, moves):
                _add(pieces, piece)
    cache[block] = tuple(pieces)
    return cache[block]


def _piece(item: Operation, moves: _Moves) -> Iterator[_Piece]:
    awaited = tuple(name for name in item.after if name.partition("~")[0] in moves.names)
    if isinstance(item, CommOp) and item.collective in (SEND, RECV):
        if item.group in moves.groups:
            yield _Move(item)
    elif isinstance(item, ComputeOp) and not item.is_wait:
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


def _add(pieces: list[_Piece], piece: _Piece) -> None:
    """Add a piece, merged with the last one on the same micro-batch in the same direction."""
    last = pieces[-1] if pieces else None
    if isinstance(piece, _Work) and isinstance(last, _Work) and not piece.after:
        microbatches = {last.microbatch, piece.microbatch} - {None}
        if last.kind == piece.kind and len(microbatches) <= 1:
            layers = [layer for layer in (last.layer, piece.layer) if layer is not None]
            microbatch = next(iter(microbatches), None)
            pieces[-1] = replace(last, microbatch=microbatch, layer=min(layers, default=None))
            return
    pieces.append(piece)
