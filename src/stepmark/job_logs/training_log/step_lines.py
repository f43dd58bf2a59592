"""The steps that a trainer logged, read from lines that may be cut, mixed or of many ranks."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import is_binary, open_binary, read_head, without_colors
from stepmark.job_logs.job_output.lines import split_tag
from stepmark.job_logs.training_log.log_formats import FORMATS, LogFormat, compiled, number_of

_MOST_STEPS = 200_000  # in one file
_CHUNK_BYTES = 2**20
_MAX_LINE_BYTES = 8192
_MAX_LINES = 64  # of one step
_MAX_TAGS = 4096
_LONGEST_S = 1e7
# Plain `in` is faster than one expression of all.
_WORDS = tuple(
    dict.fromkeys(word.encode() for own in FORMATS for word in (*own.marks, *own.fact_marks))
)
_NO_LOSS = -1.0  # torchtitan, of a rank that is not in the last pipeline stage
_INTEGER = re.compile(r"\d+")
_OF_JOB = ("num_ranks", "batch", "seq_len", "tokens")  # facts that no rank has for itself
_POSITIVE = ("step_s", "samples_per_s", "tokens_per_s", "tokens_per_s_gpu", "batches_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """What a log states of a step, or as the mean of `span` steps; None: it does not.

    number: of the step, or of its samples. line: of the file. tokens_per_s, samples_per_s and
    batches_per_s are of all GPUs, batch too, in sequences. clock_s: at the end of the step;
    begin_s and begin_samples: at the begin of a block of steps.
    """

    number: int
    line: int
    span: int = 1
    step_s: float | None = None
    clock_s: float | None = None
    begin_s: float | None = None
    begin_samples: float | None = None
    samples_per_s: float | None = None
    batches_per_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_gpu: float | None = None
    tflops_gpu: float | None = None
    memory_bytes: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    batch: float | None = None
    num_skipped: float | None = None  # steps since the line before without an update
    num_nan: float | None = None
    rounding: float = 0.0  # of the time or rate: unit of its last digit, relative

    @property
    def is_timed(self) -> bool:
        """Whether a time, a rate or a clock is stated; a number alone shows a restart, too."""
        rates = (getattr(self, name) for name in _POSITIVE)
        return self.clock_s is not None or any(rate is not None for rate in rates)

    @property
    def is_nan(self) -> bool:
        has_loss = self.loss is not None
        return bool(self.num_nan) or (has_loss and not math.isfinite(self.loss or 0.0))


@dataclass(slots=True, kw_only=True)
class Head:
    """Facts that are stated of the steps after `line`, by the launcher's tag of their lines.

    late: other values that further ranks state after the first of these steps.
    """

    line: int
    by_tag: dict[str, dict[str, float]] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, float]:
        """The facts of all ranks."""
        return {name: value for own in self.by_tag.values() for name, value in own.items()}

    @property
    def conflict(self) -> tuple[str, list[float]] | None:
        """A fact of the whole job of which ranks state different values."""
        for name in _OF_JOB:
            values = {own[name] for own in (*self.by_tag.values(), self.late) if name in own}
            if len(values) > 1:
                return name, sorted(values)
        return None


@dataclass(slots=True)
class StepLines:
    """Lines of one format in a file: steps by launcher's tag, and facts of each start.

    num_torn: lines of steps of which a needed figure is cut. num_untimed: lines of losses
    without a step. total: the last rate of all steps so far, as printed.
    """

    log_format: LogFormat
    steps: dict[str, list[LoggedStep]] = field(default_factory=dict)
    heads: list[Head] = field(default_factory=lambda: [Head(line=0)])
    num_torn: int = 0
    num_other: int = 0
    num_untimed: int = 0
    total: str = ""
    num_steps: int = 0
    _open: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    _zero_bars: dict[str, set[str]] = field(default_factory=dict)  # lengths since the last step
    _num_before_head: int = 0  # of steps

    @property
    def has_unread(self) -> bool:
        """Whether lines of the trainer are no steps, though a job that trains prints them."""
        return bool(self.num_torn or self.total or self.num_untimed)

    def read(self, text: str, line: int) -> None:
        """Read a line that may be of this format."""
        own = self.log_format
        if any(mark in text for mark in own.fact_marks):
            self._read_facts(text, line)
        if not any(mark in text for mark in own.marks):
            return
        _, tag, body = split_tag(text)
        if own.not_steps and compiled(own.not_steps).search(body):
            self.num_other += 1
            return
        if own.total and (match := compiled(own.total[0]).search(body)):
            self.total = match[1]
            return
        if own.first is None:
            self._add(tag, body, line)
        elif compiled(own.first).search(body):
            self._close(tag)
            self._open[tag] = (line, [body])
            if own.zero and (match := compiled(own.zero).search(body)):
                self._zero_bars.setdefault(tag, set()).add(match[1])
        elif tag in self._open and len(self._open[tag][1]) < _MAX_LINES:
            self._open[tag][1].append(body)
        elif own.untimed and compiled(own.untimed).search(body):
            self.num_untimed += 1

    def close(self) -> None:
        """Add the steps whose last line is that of the file."""
        for tag in list(self._open):
            self._close(tag)

    def _close(self, tag: str) -> None:
        line, texts = self._open.pop(tag, (0, []))
        if len(texts) > 1:
            self._add(tag, "\n".join(texts), line)

    def _add(self, tag: str, text: str, line: int) -> None:
        step = self.step_of(text, line, len(self.steps.get(tag, ())) + 1)
        if step is None:
            self.num_torn += 1
            return
        bars = self._zero_bars.pop(tag, ())
        # Evaluations have bars of their own length.
        if any(f"/{length} [" in text for length in bars):
            self._begin_again(line - 1)
        if tag in self.steps or len(self.steps) < _MAX_TAGS:
            self.steps.setdefault(tag, []).append(step)
            self.num_steps += 1

    def _begin_again(self, line: int) -> None:
        """Begin a start with the facts stated before, unless facts did since the last step."""
        if self.num_steps > self._num_before_head:
            head = self.heads[-1]
            by_tag = {tag: dict(facts) for tag, facts in head.by_tag.items()}
            self.heads.append(Head(line=line, by_tag=by_tag))
            self._num_before_head = self.num_steps

    def step_of(self, text: str, line: int, place: int) -> LoggedStep | None:
        """Return what a text states; None where a needed figure is missing or impossible.

        place: among the steps, which is the number of one without.
        """
        figures: dict[str, float] = {}
        for name, (pattern, unit) in self.log_format.figures.items():
            if match := compiled(pattern).search(text):
                figures[name] = number_of(match[match.lastindex or 0]) * unit
                is_needed = name in self.log_format.required
                if is_needed and compiled(pattern).search(text, match.end()):
                    return None  # the end of one step and the begin of the next are lost
        is_untimed = self.log_format.rate_mark and self.log_format.rate_mark not in text
        required = ("number",) if is_untimed else self.log_format.required
        if not all(name in figures for name in required):
            return None
        if figures.get("loss") == _NO_LOSS:
            del figures["loss"]
        if not all(0 < figures[name] < math.inf for name in _POSITIVE if name in figures):
            return None
        if figures.get("step_s", 1.0) > _LONGEST_S:
            return None
        number = int(figures.pop("number", figures.pop("samples", place)))
        return LoggedStep(number=number, line=line, **figures)  # type: ignore[arg-type]

    def _read_facts(self, text: str, line: int) -> None:
        for name, (pattern, unit) in self.log_format.facts.items():
            if match := compiled(pattern).search(text):
                value = match[match.lastindex or 0]
                # Ranks may be stated as the degrees of their mesh.
                self._state(
                    name,
                    math.prod(map(int, _INTEGER.findall(value)))
                    if name == "num_ranks"
                    else number_of(value) * unit,
                    split_tag(text)[1],
                    line,
                )

    def _state(self, name: str, value: float, tag: str, line: int) -> None:
        """Add a fact to the head, or begin the next: facts after steps are of a new start.

        Memory is stated after the first steps, and another rank may state its facts late.
        """
        head = self.heads[-1]
        num_steps = self.num_steps + sum(len(texts) > 1 for _, texts in self._open.values())
        if name != "memory_bytes" and num_steps > self._num_before_head:
            if tag not in head.by_tag and name in head.facts:
                if value != head.facts[name]:
                    head.late[name] = value
                return
            head = Head(line=line)
            self.heads.append(head)
            self._num_before_head = num_steps
        if tag in head.by_tag or len(head.by_tag) < _MAX_TAGS:
            own = head.by_tag.setdefault(tag, {})
            if name in _OF_JOB and own.get(name, value) != value:
                own.clear()  # facts of a start that ended before its first step
            own[name] = value


def read_step_lines(path: Path) -> list[StepLines]:
    """Return the lines of each format of which the file has a step. Raises ConfigError."""
    if is_binary(read_head(path)):
        return []
    readers = [StepLines(own) for own in FORMATS]
    by_word: dict[bytes, list[StepLines]] = {word: [] for word in _WORDS}
    for reader in readers:
        own = reader.log_format
        for word in (*own.marks, *own.fact_marks):
            by_word[word.encode()].append(reader)
    with open_binary(path) as stream:
        for number, part, words in _candidates(stream):
            text = without_colors(part).decode("utf-8", errors="replace").rstrip()
            for reader in {id(own): own for word in words for own in by_word[word]}.values():
                reader.read(text, number)
                if reader.num_steps > _MOST_STEPS:
                    allowed = f"a log of at most {_MOST_STEPS:,} lines of steps"
                    raise ConfigError("file", path, allowed)
    for reader in readers:
        reader.close()
    return [own for own in readers if own.steps or own.has_unread or own.num_other]


def has_steps(path: Path) -> bool:
    """Return whether a text file has a step of any trainer. Raises ConfigError."""
    return any(own.steps for own in read_step_lines(path))


def _candidates(stream: IO[bytes]) -> Iterator[tuple[int, bytes, list[bytes]]]:
    """Yield lines that may state a step or a fact: number, text, and the words that say so.

    A bar of progress overwrites its line, so that lines end at carriage returns, too.
    """
    number = 1
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        whole, newline, rest = (rest + chunk).rpartition(b"\n")
        if not newline and len(rest) > _CHUNK_BYTES:  # no log has such a line
            whole, rest = rest, b""
        yield from _of_chunk(whole, number)
        number += (whole + newline).count(b"\n")
    # The last figure of a file without a newline at its end may be cut.
    yield from _of_chunk(rest + b"~", number)


def _of_chunk(data: bytes, number: int) -> Iterator[tuple[int, bytes, list[bytes]]]:
    known = [word for word in _WORDS if word in data]
    if not known:
        return
    begin = end = 0
    for match in re.finditer(b"|".join(map(re.escape, known)), data):
        if match.start() < end:
            continue  # in the line of the match before
        number += data.count(b"\n", begin, match.start())
        begin = data.rfind(b"\n", 0, match.start()) + 1
        end = data.find(b"\n", begin)
        end = len(data) if end < 0 else end
        for part in data[begin:end].split(b"\r"):
            words = [word for word in known if word in part]
            if words and len(part) <= _MAX_LINE_BYTES:
                yield number, part, words
