"""Pipeline of a workload over time: the micro-batch of each stage at each time.

Each stage runs until it waits for another. Time is in units: a forward of a stage's chunk takes
one, its backward two, the optimizer one, transfers none. So it shows the order and waits of a
schedule, not its speed. Of a long step, few repeats of its
steady state are drawn; the idle time is still that of the whole step.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from stepmark.step.workload_stages import Transfer, num_steady, shortened, transfer_of
from stepmark.timeline.timeline import Span, Timeline

UNITS = {"forward": 1, "backward": 2, "optimizer": 1}


@dataclass(frozen=True, slots=True)
class _Work:
    """Computation on one micro-batch without a break, after transfers of these names."""

    kind: str
    microbatch: int | None
    layer: int | None
    after: tuple[str, ...] = ()


_Segment = _Work | CommOp


def spans(workload: Workload) -> tuple[Span, ...]:
    """Return each forward or backward of a stage's chunk, and its optimizer, in units of time.

    The layer is the chunk's first one. () where stages would deadlock.
    """
    moves = _Moves.of(workload)
    cache: dict[str, tuple[_Segment, ...]] = {}
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
        pieces: Sequence[_Segment],
        sent: Mapping[Transfer, list[int]],
    ) -> None:
        self.stage = stage
        self._workload = workload
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
            is_fused = isinstance(piece, CommOp) and piece.fused
            # A call sends all its messages before it waits for one.
            if not is_fused and not self._receive():
                break
            if isinstance(piece, CommOp):
                self._move(piece)
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
    cache: dict[str, tuple[_Segment, ...]],
) -> tuple[_Segment, ...]:
    """Return a block as pieces, relative to its own layer and micro-batch."""
    if block in cache:
        return cache[block]
    pieces: list[_Segment] = []
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


def _piece(item: Operation, moves: _Moves) -> Iterator[_Segment]:
    awaited = tuple(name for name in item.after if name.partition("~")[0] in moves.names)
    if isinstance(item, CommOp) and item.collective in (SEND, RECV):
        if item.group in moves.groups:
            yield item
    elif isinstance(item, ComputeOp) and not item.is_wait:
        yield _Work(pass_of(item), item.microbatch, item.layer, awaited)
    elif awaited:
        yield _Work("", None, None, awaited)


def _shifted(piece: _Segment, layer: int, microbatch: int) -> _Segment:
    if isinstance(piece, CommOp) or not (layer or microbatch):
        return piece
    return replace(
        piece,
        microbatch=None if piece.microbatch is None else piece.microbatch + microbatch,
        layer=None if piece.layer is None else piece.layer + layer,
    )


def _add(pieces: list[_Segment], piece: _Segment) -> None:
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
    num_omitted = num_steady(workload) - num_steady(cut)
    busy, end = _sums(drawn)
    if num_omitted:  # each repeat adds as much as one more does
        longer, later = _sums(spans(shortened(workload, _KEPT + 1)))
        busy = busy + num_omitted * (longer - busy)
        end = end + num_omitted * (later - end)
    return Chart(
        timeline=Timeline(drawn, (0, max(span.end_ns for span in drawn))),
        idle_percent=100 * (1 - busy / (end * num_stages)) if end else 0.0,
        left_out=num_omitted,
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
    label = _label(chart)
    width = _cell_width(chart)
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
