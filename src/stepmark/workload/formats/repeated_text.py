"""The text of a program whose operations are lines: a block is rendered once and repeated."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from stepmark.core.workload import Block, Operation, Run

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
