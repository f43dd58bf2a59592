"""Stream the events of a Kineto trace, whatever the layout of its text.

The text is cut at places that look like the border of two events. Whether one is a border,
decoding decides: the text before it is a list of whole events only if the cut is outside every
string and every nested value, as strict JSON has no other reading.
"""

import contextlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import msgspec

from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import check_ratio, open_file, readable
from stepmark.traces.kineto.events import Event, Header

# Pieces of this size stay in the cache of the core that decodes them.
_CHUNK = 1 << 19
_MAX_HEADER = 64 << 20
# Longer is no event of the profiler's; up to the second length, borders may be of its values.
_MAX_EVENT = 64 << 20
_MAX_NESTED = 8 << 20
_FIRST = re.compile(rb'"traceEvents"\s*:\s*\[')
_MARKS = re.compile(rb'"(?:traceEvents|ph|deviceProperties|distributedInfo)"\s*:')
_BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\]\s*(?=[,}]|\Z)")
_TRIES = 8
_BETWEEN = b" \t\r\n,"
_HEADER = msgspec.json.Decoder(Header)
_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def looks_like_trace(head: bytes) -> bool:
    """Return whether a file that begins like this is a profiler's trace."""
    return bool(_MARKS.search(head))


class EventStream:
    """The events of one file, and, once they are read, its header and what was wrong.

    num_bytes: of text that were read. undecodable: number of events left out, with the first
    error. cut: why the file ends early, or "". head, tail: the text before the first event,
    and behind the end of their list.
    """

    def __init__(self, path: Path, kind: Any = Event) -> None:
        """kind: type of the events: Event, or msgspec.Raw for their text."""
        self.path = path
        self.head = self.tail = b""
        self._many = msgspec.json.Decoder(list[kind], strict=False)
        self._one = msgspec.json.Decoder(kind, strict=False)
        self.header = Header()
        self.num_bytes = 0
        self.undecodable = 0
        self.first_error = ""
        self.cut = ""
        self.bad_header = ""
        self._text = b""
        self._source = self._pieces()
        self._at_end = False
        self._is_open = True
        self._is_bare = False
        self._error = ""

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of events in the order of the file. Raises ConfigError for no trace."""
        self._start()
        while True:
            cuts = self._cuts()
            events = None
            self._is_open = True
            for place in cuts:
                events = self._decode(self._text[:place])
                if events is not None:
                    self._text = self._text[place:].lstrip(_BETWEEN)
                    break
            if events is None and (self._at_end or _END.search(self._text)):
                events = self._last()
                if events is not None:
                    yield events
                    return
            if events is None:
                if self._at_end:
                    yield self._recover(is_last=True)
                    return
                if len(self._text) < (_MAX_NESTED if cuts else _MAX_EVENT) and self._is_open:
                    self._more(len(self._text))
                    continue
                if not cuts:
                    self.cut = "it has an event of more than 64 MiB, where reading ends"
                    return
                events = self._recover()
            yield events
            if not self._at_end:
                self._more(_CHUNK)

    def _pieces(self) -> Iterator[bytes]:
        """Yield the text; a compressed file is unpacked by a second thread."""
        with readable(self.path, "trace"), open_file(self.path, "trace") as file:
            is_packed = file.peek(2)[:2] == b"\x1f\x8b"
            while not is_packed and (piece := file.read(_CHUNK)):
                yield piece
        if not is_packed:
            return
        queue: Queue[bytes | str] = Queue(8)
        Thread(target=_unpack, args=(self.path, queue), daemon=True).start()
        while isinstance(unpacked := queue.get(), bytes):
            yield unpacked
        self.cut = unpacked

    def _more(self, at_least: int) -> None:
        """Append text until `at_least` more bytes are there or the file ends."""
        pieces = [self._text]
        missing = max(at_least, _CHUNK)
        while missing > 0 and not self._at_end:
            piece = next(self._source, None)
            self._at_end = piece is None
            piece = piece or b""
            pieces.append(piece)
            missing -= len(piece)
            self.num_bytes += len(piece)
        self._text = b"".join(pieces)

    def _start(self) -> None:
        """Read the header, up to the first event."""
        self._more(_CHUNK)
        self._text = self._text.removeprefix(b"\xef\xbb\xbf").lstrip()
        if self._text[:1] == b"[":
            self.head = b"["
            self._text = self._text[1:]
            self._is_bare = True
            return
        if self._text[:1] != b"{":
            raise ConfigError("trace", self.path, "a profiler's JSON trace")
        while True:
            for match in _FIRST.finditer(self._text):
                head = self._text[: match.end()] + b"]}"
                try:
                    self.header = _HEADER.decode(head)
                except _ERRORS as error:
                    if "truncated" in str(error):
                        continue  # inside a string
                    self.bad_header = str(error)
                self.head = head[:-2]
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

    def _decode(self, text: bytes) -> list[Any] | None:
        try:
            events: list[Any] = self._many.decode(b"[" + text + b"]")
        except _ERRORS as error:
            # After a cut inside a string or a list, the text is not wrong but ends too early.
            self._is_open &= "truncated" in str(error)
            return None
        return events

    def _last(self) -> list[Any] | None:
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
        return None

    def _tail(self, rest: bytes) -> None:
        """Read the keys after the events: on-demand traces have distributedInfo there."""
        self._text = rest
        while not self._at_end and len(self._text) < _MAX_HEADER:
            self._more(_CHUNK)
        rest = self._text.strip()
        if self._is_bare and not rest:
            return
        try:
            tail = _HEADER.decode(b'{"": 0' + rest)
        except _ERRORS as error:
            if "truncated" in str(error):
                self.cut = self.cut or "the file ends after its events, before the object does"
            else:
                self.bad_header = str(error)
            return
        self.tail = rest
        self.header = Header(
            **{
                name: getattr(tail, name) or getattr(self.header, name)
                for name in Header.__struct_fields__
            }
        )

    def _recover(self, *, is_last: bool = False) -> list[Any]:
        """Decode events one by one, and leave out what is none.

        Text after the last event that can be decoded stays for the next turn, as far as it is
        not too long to be one event.
        """
        text = self._text
        events = list[Any]()
        start = 0
        borders = [match.start() + 1 for match in _BORDER.finditer(text)]
        bad: list[int] = []  # starts of pieces that are no event, or the start of a longer one
        number = 0
        while number < len(borders):
            for more in range(min(_TRIES, len(borders) - number)):
                end = borders[number + more]  # a border inside a string joins two pieces
                if event := self._event(text[start:end]):
                    break
            else:
                bad.append(start)
                start = borders[number]
                number += 1
                continue
            events.append(event)
            self.undecodable += len(bad)
            bad = []
            start = end
            number = number + more + 1
        if is_last:
            self._end_of_file(text, [*bad, start], events)
            return events
        place = bad[0] if bad else start
        if len(text) - place > _MAX_NESTED:
            self.undecodable += len(bad)
            place = start
        self._text = text[place:].lstrip(_BETWEEN)
        return events

    def _event(self, text: bytes) -> Any:
        text = text.strip(_BETWEEN)
        try:
            return self._one.decode(text)
        except _ERRORS as error:
            self._error = str(error)
        if "truncated" in self._error:
            return None
        if self._one.type is Event:
            with contextlib.suppress(*_ERRORS, ValueError):
                return self._one.decode(_with_numbers(text))
        self.first_error = self.first_error or self._error
        return None

    def _is_closed(self, rest: bytes) -> bool:
        """Return whether the text behind the list of events is whole."""
        try:
            msgspec.json.decode((b"0" if self._is_bare else b'{"": 0') + rest)
        except _ERRORS:
            return False
        return True

    def _end_of_file(self, text: bytes, starts: list[int], events: list[Any]) -> None:
        """Read the last event, which ends the list or is cut. starts: where it may start."""
        for number, start in enumerate(starts):
            for match in _END.finditer(text, start):
                event = self._event(text[start : match.start() + 1])
                rest = text[text.index(b"]", match.start()) + 1 :]
                is_bad = start == starts[-1] and "truncated" not in self._error
                if event or (is_bad and self._is_closed(rest)):
                    events += [event] if event else []
                    self.undecodable += number + (event is None)
                    self._tail(rest)
                    return
        bad = 0
        for number, start in enumerate(starts):
            if event := self._event(text[start:]):  # cut after a whole event
                events.append(event)
                bad = number
                starts = [len(text)]
                break
        for start, end in itertools.pairwise((*starts, len(text))):
            self._event(text[start:end])
            bad += "truncated" not in self._error and end < len(text)
        self.undecodable += bad
        where = "an event" if text[starts[0] :].strip(_BETWEEN) else "its list of events"
        self.cut = self.cut or f"the file ends inside {where}"


def _with_numbers(text: bytes) -> bytes:
    """Return an event's JSON with null for numbers that are none. Raises ValueError.

    Python writes NaN and Infinity, which are no JSON. Times may be of any type.
    """
    event = json.loads(text, parse_constant=lambda _: None)
    times = event if isinstance(event, dict) else {}
    for name in {"ts", "dur"} & times.keys():
        if type(times[name]) not in (int, float) or math.isinf(times[name]):
            times[name] = None
    return json.dumps(event).encode()


def _unpack(path: Path, queue: "Queue[bytes | str]") -> None:
    """Put the text of a gzip file into the queue, then why it ends early, or "".

    The library's own reader loses what stands before the damage.
    """
    unpacker = zlib.decompressobj(31)
    reason = ""
    unpacked = 0
    try:
        with path.open("rb") as file:
            while (
                packed := unpacker.unconsumed_tail or unpacker.unused_data or file.read(_CHUNK)
            ):
                if unpacker.eof:
                    unpacker = zlib.decompressobj(31)
                text = unpacker.decompress(packed, _CHUNK)
                unpacked += len(text)
                left_bytes = len(unpacker.unconsumed_tail) + len(unpacker.unused_data)
                check_ratio(file.tell() - left_bytes, unpacked)
                queue.put(text)
        reason = "" if unpacker.eof else "the compressed file is cut"
    except (zlib.error, OSError) as error:
        reason = f"the compressed file is damaged ({error})"
    queue.put(reason)
