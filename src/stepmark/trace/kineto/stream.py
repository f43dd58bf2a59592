"""Stream the events of a Kineto trace, whatever the layout of its text.

The text is cut at places that look like the border of two events. Whether one is a border,
decoding decides: the text before it is a list of whole events only if the cut is outside every
string and every nested value, as strict JSON has no other reading.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import IO

import msgspec

from stepmark.core.errors import ConfigError
from stepmark.trace.kineto.events import Event, Header

# Pieces of this size stay in the cache of the core that decodes them.
_CHUNK = 1 << 19
_MAX_HEADER = 64 << 20
# Longer is no event of the profiler's.
_MAX_EVENT = 64 << 20
_FIRST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\]\s*(?=[,}])")
_TRIES = 8
_HEADER = msgspec.json.Decoder(Header)
_EVENTS = msgspec.json.Decoder(list[Event], strict=False)
_EVENT = msgspec.json.Decoder(Event, strict=False)
_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class EventStream:
    """The events of one file, and, once they are read, its header and what was wrong.

    num_bytes: of text that were read. undecodable: number of events left out, with the first
    error. cut: why the file ends early, or "".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = Header()
        self.num_bytes = 0
        self.undecodable = 0
        self.first_error = ""
        self.cut = ""
        self.bad_header = ""
        self._text = b""
        self._source = self._pieces()
        self._at_end = False

    def __iter__(self) -> Iterator[list[Event]]:
        """Yield lists of events in the order of the file. Raises ConfigError for no trace."""
        self._start()
        while True:
            cuts = self._cuts()
            events = None
            for place in cuts:
                events = self._decode(self._text[:place])
                if events is not None:
                    self._text = self._text[place:].lstrip(b" \t\r\n,")
                    break
            if events is None and self._ends():
                events = self._last()
                if events is not None:
                    yield events
                    return
            if events is None:
                if self._at_end:
                    yield self._one_by_one(self._text, is_last=True)
                    return
                if len(self._text) < 4 * _CHUNK or (not cuts and len(self._text) < _MAX_EVENT):
                    self._more(len(self._text))
                    continue
                events = self._recover(cuts)
            yield events
            if not self._at_end:
                self._more(_CHUNK - len(self._text))

    def _pieces(self) -> Iterator[bytes]:
        """Yield the text; a compressed file is unpacked by a second thread."""
        with self.path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        if not is_packed:
            with self.path.open("rb") as file:
                while piece := file.read(_CHUNK):
                    yield piece
            return
        queue: Queue[bytes | str] = Queue(8)
        with gzip.open(self.path) as packed:
            Thread(target=_unpack, args=(packed, queue), daemon=True).start()
            while isinstance(unpacked := queue.get(), bytes):
                yield unpacked
            self.cut = unpacked

    def _more(self, at_least: int) -> None:
        """Append text until `at_least` more bytes are there or the file ends."""
        pieces = [self._text]
        missing = max(at_least, _CHUNK)
        while missing > 0 and not self._at_end:
            piece = next(self._source, b"")
            self._at_end = not piece
            pieces.append(piece)
            missing -= len(piece)
            self.num_bytes += len(piece)
        self._text = b"".join(pieces)

    def _start(self) -> None:
        """Read the header, up to the first event."""
        self._more(_CHUNK)
        self._text = self._text.removeprefix(b"\xef\xbb\xbf").lstrip()
        if self._text[:1] == b"[":
            self._text = self._text[1:]
            return
        if self._text[:1] != b"{":
            raise ConfigError("trace", self.path, "a profiler's JSON trace")
        while True:
            for match in _FIRST.finditer(self._text):
                head = self._text[: match.end()] + b"]}"
                try:
                    self.header = _HEADER.decode(head)
                except msgspec.ValidationError as error:
                    self.bad_header = str(error)
                except _ERRORS:
                    continue  # inside a string
                self._text = self._text[match.end() :].lstrip()
                return
            if self._at_end or len(self._text) > _MAX_HEADER:
                allowed = "a profiler's JSON trace: there is no list of traceEvents"
                raise ConfigError("trace", self.path, allowed)
            self._more(len(self._text))

    def _cuts(self) -> list[int]:
        """Return places after which an event may end, the last first."""
        places: list[int] = []
        place = len(self._text)
        while len(places) < _TRIES:
            place = self._text.rfind(b"}", 0, place)
            if place < 0:
                break
            if _BORDER.match(self._text, place):
                places.append(place + 1)
        return places

    def _decode(self, text: bytes) -> list[Event] | None:
        try:
            return _EVENTS.decode(b"[" + text + b"]")
        except _ERRORS:
            return None

    def _ends(self) -> bool:
        return bool(self._at_end or _END.search(self._text))

    def _last(self) -> list[Event] | None:
        """Return the events before the end of the list, or None where it does not end here."""
        stripped = self._text.lstrip(b" \t\r\n")
        if stripped[:1] == b"]":
            self._tail(stripped[1:])
            return []
        for match in _END.finditer(self._text):
            events = self._decode(self._text[: match.start() + 1])
            if events is not None:
                place = self._text.index(b"]", match.start()) + 1
                self._tail(self._text[place:])
                return events
        if self._at_end and (text := self._text.rstrip()).endswith(b"]"):
            return self._decode(text[:-1])  # a bare list
        return None

    def _tail(self, rest: bytes) -> None:
        """Read the keys after the events: on-demand traces have distributedInfo there."""
        self._text = rest
        while not self._at_end and len(self._text) < _MAX_HEADER:
            self._more(_CHUNK)
        rest = self._text.strip()
        if not rest:
            return
        try:
            tail = _HEADER.decode(b'{"": 0' + rest)
        except msgspec.ValidationError as error:
            self.bad_header = str(error)
            return
        except _ERRORS:
            self.cut = self.cut or "the file ends after its events, before the object does"
            return
        self.header = Header(
            **{
                name: getattr(tail, name) or getattr(self.header, name)
                for name in Header.__struct_fields__
            }
        )

    def _recover(self, cuts: list[int]) -> list[Event]:
        """Decode events one by one up to the last border, and leave out what is no event."""
        if not cuts:
            self.cut = "it has an event of more than 64 MiB, after which nothing is read"
            self._text, self._at_end = b"", True
            return []
        text, self._text = self._text[: cuts[0]], self._text[cuts[0] :].lstrip(b" \t\r\n,")
        return self._one_by_one(text)

    def _one_by_one(self, text: bytes, *, is_last: bool = False) -> list[Event]:
        events: list[Event] = []
        ends = [match.start() + 1 for match in _BORDER.finditer(text)] + [len(text)]
        start, number = 0, 0
        while number < len(ends):
            # A border inside a string joins two pieces.
            for more in range(min(_TRIES, len(ends) - number)):
                piece = text[start : ends[number + more]].lstrip(b" \t\r\n,")
                try:
                    events.append(_EVENT.decode(piece))
                except _ERRORS as error:
                    self.first_error = self.first_error or str(error)
                    continue
                number += more
                break
            else:
                if is_last and number == len(ends) - 1:
                    self._cut_event(text[start:], events)
                    break
                self.undecodable += 1
            start = ends[number]
            number += 1
        return events

    def _cut_event(self, piece: bytes, events: list[Event]) -> None:
        """Read the end of a file whose last event, or whose end, is damaged."""
        for match in _END.finditer(piece):
            try:
                events.append(_EVENT.decode(piece[: match.start() + 1].lstrip(b" \t\r\n,")))
            except _ERRORS:
                continue
            self._tail(piece[piece.index(b"]", match.start()) + 1 :])
            return
        where = "an event" if piece.strip(b" \t\r\n,") else "its list of events"
        self.cut = self.cut or f"the file ends inside {where}"


def _unpack(packed: IO[bytes], queue: "Queue[bytes | str]") -> None:
    """Put the text into the queue, then why it ends early, or ""."""
    reason = ""
    try:
        while piece := packed.read(_CHUNK):
            queue.put(piece)
    except (EOFError, zlib.error, OSError) as error:
        reason = f"the compressed file is cut or damaged ({error})"
    queue.put(reason)
