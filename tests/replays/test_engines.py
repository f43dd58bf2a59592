"""Order of operations on the engine of a CPU and of a GPU, with a made-up clock and streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.measuring.fakes import context

from stepmark.cases.plan import ReplayHow
from stepmark.cases.replay_case import Compute
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import RedOp
from stepmark.model.ops import Phase
from stepmark.replays.bench import device_engine
from stepmark.replays.bench.bench import ReplayBench
from stepmark.replays.bench.computation import Computation
from stepmark.replays.bench.device_engine import DeviceEngine
from stepmark.replays.bench.engine import UNKNOWN, HostEngine, Program, Span
from stepmark.step.rank_program import Step
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Kernel


class Clock:
    """A clock that moves when somebody waits; calls what is due on the way."""

    def __init__(self) -> None:
        self.now, self._due = 0.0, list[tuple[float, Callable[[], None]]]()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        for at, call in sorted(self._due, key=lambda item: item[0]):
            if at <= end:
                self.now = max(self.now, at)
                self._due.remove((at, call))
                call()
        self.now = max(self.now, end)

    def at(self, moment: float, call: Callable[[], None]) -> None:
        self._due.append((moment, call))


class Work:
    """A message that ends by itself after some seconds, as gloo's do."""

    def __init__(self, name: str, clock: Clock, time_s: float, log: list[str]) -> None:
        self._name, self._clock, self._log = name, clock, log
        self._end_s = clock.now + time_s

    def get_future(self) -> "Work":
        return self

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        self._clock.at(self._end_s, lambda: call(self))

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")
        self._clock.sleep(max(0.0, self._end_s - self._clock.now))


class Messages:
    """Issues messages whose module is their name and whose count is their time in seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.log = clock, list[str]()

    def issue(self, steps: list[Step], _buffers: object) -> list[Work]:
        op = steps[0].op
        assert isinstance(op, CommOp)
        self.log.append(f"issue {op.module}")
        return [Work(op.module, self.clock, op.count, self.log)]


def message(name: str, time_s: int, *deps: int, stream: str = "side", **more: Any) -> Step:
    op = CommOp(
        **{
            "collective": "all_reduce",
            "redop": RedOp.SUM,
            "dtype": DType.BF16,
            "count": time_s,
            "group": "g",
            "phase": Phase.FWD,
            "module": name,
            "stream": stream,
            **more,
        }
    )
    return Step(op, deps, (0, 1))


def computation(name: str, time_s: float, *deps: int) -> Step:
    op = ComputeOp(op=Kernel(name=name), phase=Phase.FWD, module=name, time_s=float(time_s))
    return Step(op, deps)


def program(steps: list[Step], messages: Messages, **more: bool) -> Program:
    here = context().capabilities
    none: Any = None  # messages of this file have no data
    messenger: Any = messages
    return Program(
        steps=steps,
        messenger=messenger,
        buffers=none,
        computation=Computation(steps, Compute.SLEEP, torch.device("cpu"), here),
        **more,
    )


def run(
    steps: list[Step], monkeypatch: pytest.MonkeyPatch, **more: bool
) -> tuple[list[str], list[Span], float]:
    """Run on the engine of a CPU; return what it did, the spans and how long it took."""
    clock = Clock()
    messages = Messages(clock)
    for name in ("engine", "computation"):
        monkeypatch.setattr(f"stepmark.replays.bench.{name}.time", clock)
    engine = HostEngine(program(steps, messages, **more))
    spans = [UNKNOWN] * len(steps)
    engine.run(spans)
    return messages.log, spans, clock.now


def test_a_message_on_the_compute_stream_is_waited_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [message("a", 3, stream=COMPUTE), computation("c", 2), message("b", 1)]
    log, spans, end_s = run(steps, monkeypatch)
    assert log == ["issue a", "wait a", "issue b", "wait b"]
    assert spans == [(0, 3), (3, 2), (5, 1)]
    assert end_s == 6


def test_others_are_waited_for_by_what_depends_on_them_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [message("a", 3), message("b", 9), computation("c", 2), computation("d", 1, 0)]
    log, spans, end_s = run(steps, monkeypatch)
    assert log == ["issue a", "issue b", "wait a", "wait b"]
    assert spans[2:] == [(0, 2), (3, 1)]
    assert end_s == 9
    log, *_ = run(steps, monkeypatch, blocking=True)
    assert log == ["issue a", "wait a", "issue b", "wait b"]


def test_a_send_is_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pair: dict[str, Any] = {"redop": RedOp.NONE, "peer": 1, "stream": COMPUTE}
    steps = [
        message("a", 3, collective="send", **pair),
        message("b", 1, collective="recv", **pair),
    ]
    log, *_ = run(steps, monkeypatch)
    assert log == ["issue a", "issue b", "wait b", "wait a"]


@pytest.mark.parametrize(("first_s", "second_s"), [(9, 2), (4, 9), (3, 1), (2, 2)])
def test_messages_of_a_stream_are_in_a_row_and_none_ends_before_it_begins(
    first_s: int, second_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo runs both at once; one that ends inside of the other keeps its own times."""
    steps = [message("a", first_s), computation("c", 1), message("b", second_s)]
    _, spans, end_s = run(steps, monkeypatch)
    assert spans[0] == (0, first_s)
    start, time_s = spans[2]
    assert time_s > 0
    assert start + time_s == 1 + second_s
    assert start == (1 if 1 + second_s <= first_s else max(1, first_s))
    assert end_s == max(first_s, 1 + second_s)


@pytest.mark.parametrize("time_s", [0.0, -1.0])
def test_a_computation_of_no_time_runs_nothing(
    time_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may have differences of rounded times, which a host cannot sleep for."""
    steps = [computation("c", time_s)]
    calls = program(steps, Messages(Clock())).computation
    assert calls.action(steps[0]) is None
    assert calls.busy_s(steps[0]) is None
    _, spans, end_s = run(steps, monkeypatch)
    assert spans[0] is UNKNOWN
    assert end_s == 0


class Device:
    """CUDA's streams and events: what each stream was given, in order."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def stream(self, _device: object) -> "Stream":
        self.streams.append(Stream())
        return self.streams[-1]


class Event:
    """Notes the place in its stream where it was recorded."""

    recorded: "tuple[Stream, int] | None" = None

    def record(self, stream: "Stream") -> None:
        self.recorded = stream, len(stream.items)


class Stream:
    """Items are names of operations, and (stream, number) for what must be over before."""

    def __init__(self) -> None:
        self.items: list[str | tuple[Stream, int]] = []

    def wait_event(self, event: Event) -> None:
        assert event.recorded is not None, "waited for before it was recorded"
        self.items.append(event.recorded)

    def synchronize(self) -> None:
        self.items.append("host")


def before(stream: Stream, number: int) -> set[str]:
    """Return the operations that are over before the item of a stream begins."""
    done = set[str]()
    for item in stream.items[:number]:
        done |= {item} if isinstance(item, str) else before(*item)
    return done


def issued(steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Run on the engine of a GPU; return what is over before each operation begins."""
    device, current = Device(), list[Stream]()

    @contextmanager
    def stream_context(stream: Stream) -> Iterator[None]:
        current[:] = [stream]
        yield

    monkeypatch.setattr(torch.cuda, "Stream", device.stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_options: Event())
    issued_at_waits: list[int] = []  # operations that were issued when the host waited

    def synchronize(_device: torch.device) -> None:
        names = [item for each in device.streams for item in each.items if item in modules]
        issued_at_waits.append(len(names))

    modules = {step.op.module for step in steps}
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "stream", stream_context)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(device_engine, "spin", lambda _seconds: None)

    def note(name: str) -> None:
        current[0].items.append(name)

    class OnDevice(Messages):
        def issue(self, steps: list[Step], _buffers: object) -> list[Work]:
            note(steps[0].op.module)
            return []

    own = program(steps, OnDevice(Clock()))
    names = {step.op.time_s: step.op.module for step in steps if isinstance(step.op, ComputeOp)}
    monkeypatch.setattr(own.computation, "busy", lambda s: lambda: note(names[s]))
    DeviceEngine(own, torch.device("cuda", 0)).run()
    # What ran before does not reach into the pass, and the pass is over when it is timed.
    assert issued_at_waits == [0, len(steps)]
    return {
        item: before(stream, number)
        for stream in device.streams
        for number, item in enumerate(stream.items)
        if isinstance(item, str)
    }


def test_streams_of_a_gpu_wait_for_what_their_operations_depend_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [
        computation("c", 1.0),
        message("a", 1, 0),  # for the compute stream
        computation("d", 2.0),
        message("b", 1, 1, stream="other"),  # for another message
        computation("e", 3.0, 3),
        message("f", 1),
    ]
    assert issued(steps, monkeypatch) == {
        "c": set(),
        "a": {"c"},
        "d": {"c"},
        "b": {"c", "a"},
        "e": {"c", "d", "a", "b"},
        "f": {"c", "a"},
    }


def test_a_replay_that_is_given_up_aborts_its_messages() -> None:
    """A rank that waits for a lost one is blocked until its process groups are aborted."""
    aborted: list[bool] = []
    bench = ReplayBench(context=context(), how=ReplayHow())
    bench.abort()  # before any messages there are none to abort
    bench._messenger = SimpleNamespace(abort=lambda: aborted.append(True))  # type: ignore[assignment]
    bench.abort()
    assert aborted == [True]
