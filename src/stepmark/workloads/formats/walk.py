"""Walk a stage's program or render it as text, without a copy of each repeated operation."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from stepmark.step.workload import Block, Operation, Run, Workload

T = TypeVar("T")


def remarks(*candidates: tuple[object, str]) -> list[str]:
    """Return the texts whose condition holds."""
    return [text for holds, text in candidates if holds]


# Result of `make` for an operation, with its layer and micro-batch inside its block.
Placed = tuple[T, int | None, int | None]
# Operations in a row, and the layer and micro-batch that are added to theirs.
Segment = tuple[list[Placed[T]], int, int]


def walk(
    workload: Workload, stage: int, make: Callable[[Operation], T]
) -> Iterator[Segment[T]]:
    """Yield `workload.expand(stage)` in segments; `make` runs once per operation of a block."""
    blocks: dict[str, list[Run | list[Placed[T]]]] = {}

    def visit(block: str, layer: int, microbatch: int) -> Iterator[Segment[T]]:
        if block not in blocks:
            blocks[block] = _parts(workload, block, make)
        for part in blocks[block]:
            if isinstance(part, Run):
                for place in part.places(layer, microbatch):
                    yield from visit(part.block, *place)
            else:
                yield part, layer, microbatch

    if block := workload.stages[stage].step:
        yield from visit(block, 0, 0)


def _parts(
    workload: Workload, block: str, make: Callable[[Operation], T]
) -> list[Run | list[Placed[T]]]:
    """Return the block's runs, and lists of the operations between them."""
    parts: list[Run | list[Placed[T]]] = []
    for item in workload.blocks[block]:
        if isinstance(item, Run):
            parts.append(item)
            continue
        if not parts or isinstance(parts[-1], Run):
            parts.append([])
        last = parts[-1]
        assert not isinstance(last, Run)
        last.append((make(item), item.layer, item.microbatch))
    return parts


_BLOCK = 2**20  # characters of a block that is kept as text
_CHUNK = 2**18


class RepeatedText:
    """Text of blocks. line: text of an operation; block_text: of a block, or None for most."""

    def __init__(
        self,
        blocks: Mapping[str, Block],
        line: Callable[[Operation], str],
        block_text: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self._blocks = blocks
        self._line = line
        self._block_text = block_text
        self._texts: dict[str, str | None] = {}

    def chunks(self, name: str) -> Iterator[str]:
        """Yield the block's text in pieces of bounded size."""
        return joined(self._pieces(name))

    def _pieces(self, name: str) -> Iterator[str]:
        text = self._text(name)
        if text is not None:
            yield text
            return
        for item in self._blocks[name]:
            if not isinstance(item, Run):
                yield self._line(item)
            elif (inner := self._text(item.block)) is not None:
                yield from repeated(inner, item.times)
            else:
                for _ in range(item.times):
                    yield from self._pieces(item.block)

    def _text(self, name: str) -> str | None:
        """Return the block's text; None if it is too long to keep."""
        if name not in self._texts:
            text = self._block_text(name)
            self._texts[name] = self._rendered(name) if text is None else text
        return self._texts[name]

    def _rendered(self, name: str) -> str | None:
        parts = []
        length = 0
        for item in self._blocks[name]:
            inner = self._text(item.block) if isinstance(item, Run) else self._line(item)
            times = item.times if isinstance(item, Run) else 1
            if inner is None or length + len(inner) * times > _BLOCK:
                return None
            parts.append(inner * times)
            length += len(parts[-1])
        return "".join(parts)


def with_end(chunks: Iterable[str], end: str) -> Iterator[str]:
    """Yield the chunks, without the newline of the last one where `end` is empty."""
    last = ""
    for chunk in chunks:
        yield last
        last = chunk
    yield last if end else last.removesuffix("\n")


def repeated(text: str, times: int) -> Iterator[str]:
    """Yield the text this many times, in pieces of about one size."""
    at_once = max(1, min(times, _CHUNK // max(1, len(text))))
    several = text * at_once
    for _ in range(times // at_once):
        yield several
    if times % at_once:
        yield text * (times % at_once)


def joined(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the same text in fewer pieces, so that each is worth a write."""
    parts: list[str] = []
    length = 0
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length >= _CHUNK:
            yield "".join(parts)
            parts = []
            length = 0
    if parts:
        yield "".join(parts)
