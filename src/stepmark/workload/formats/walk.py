"""A stage's program without a copy of each operation, for long files: walked, or as text."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from stepmark.core.workload import Block, Operation, Run, Workload

T = TypeVar("T")


def remarks(*listed: tuple[object, str]) -> list[str]:
    """Those that hold."""
    return [text for holds, text in listed if holds]


def setup_remark(workload: Workload) -> tuple[bool, str]:
    """Of formats that have a step alone."""
    has_setup = any(stage.setup for stage in workload.stages)
    return has_setup, "what runs once before the first step"


class Placed(NamedTuple, Generic[T]):
    """What was made of an operation; its layer and micro-batch before those of its place."""

    made: T
    layer: int | None
    microbatch: int | None


class Segment(NamedTuple, Generic[T]):
    """Operations in a row, and the layer and micro-batch that are added to theirs."""

    operations: list[Placed[T]]
    layer: int
    microbatch: int


def walk(
    workload: Workload, stage: int, make: Callable[[Operation], T], *, setup: bool = False
) -> Iterator[Segment[T]]:
    """As `workload.expand(stage)`; `make` is called once for each operation of a block."""
    chosen = workload.stages[stage]
    block = chosen.setup if setup else chosen.step
    if block:
        yield from _visit(workload, block, 0, 0, make, {})


def _visit(
    workload: Workload,
    block: str,
    layer: int,
    microbatch: int,
    make: Callable[[Operation], T],
    known: dict[str, list[Run | list[Placed[T]]]],
) -> Iterator[Segment[T]]:
    if block not in known:
        known[block] = _parts(workload, block, make)
    for part in known[block]:
        if not isinstance(part, Run):
            yield Segment(part, layer, microbatch)
            continue
        for index in range(part.times):
            yield from _visit(
                workload,
                part.block,
                layer + part.layer + index * part.layer_step,
                microbatch + part.microbatch + index * part.microbatch_step,
                make,
                known,
            )


def _parts(
    workload: Workload, block: str, make: Callable[[Operation], T]
) -> list[Run | list[Placed[T]]]:
    """Runs as they are; operations between them together."""
    parts: list[Run | list[Placed[T]]] = []
    for item in workload.blocks[block]:
        if isinstance(item, Run):
            parts.append(item)
            continue
        if not parts or isinstance(parts[-1], Run):
            parts.append([])
        last = parts[-1]
        assert not isinstance(last, Run)
        last.append(Placed(make(item), item.layer, item.microbatch))
    return parts


_BLOCK = 2**20  # characters of a block that is kept as text
_CHUNK = 2**18


class RepeatedText:
    """line: what an operation says. whole: what a block says in one, None for most."""

    def __init__(
        self,
        blocks: Mapping[str, Block],
        line: Callable[[Operation], str],
        whole: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self._blocks = blocks
        self._line = line
        self._whole = whole
        self._texts: dict[str, str | None] = {}

    def chunks(self, name: str) -> Iterator[str]:
        """The block's text, in pieces of bounded size."""
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
        """None: too long to keep."""
        if name not in self._texts:
            whole = self._whole(name)
            self._texts[name] = self._rendered(name) if whole is None else whole
        return self._texts[name]

    def _rendered(self, name: str) -> str | None:
        parts, length = [], 0
        for item in self._blocks[name]:
            inner = self._text(item.block) if isinstance(item, Run) else self._line(item)
            times = item.times if isinstance(item, Run) else 1
            if inner is None or length + len(inner) * times > _BLOCK:
                return None
            parts.append(inner * times)
            length += len(parts[-1])
        return "".join(parts)


def repeated(text: str, times: int) -> Iterator[str]:
    """text, so many times, in pieces of about one size."""
    at_once = max(1, min(times, _CHUNK // max(1, len(text))))
    several = text * at_once
    for _ in range(times // at_once):
        yield several
    if times % at_once:
        yield text * (times % at_once)


def joined(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in fewer pieces, so that each is worth a write."""
    held: list[str] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length >= _CHUNK:
            yield "".join(held)
            held, length = [], 0
    if held:
        yield "".join(held)
