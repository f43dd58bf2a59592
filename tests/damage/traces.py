"""Profiler traces of two ranks (fsdp8, thinned), and what every command says of them.

Whatever the damage, the commands agree with each other: `_laws`. What is undetectable gives the
trace of another job, whose figures are those of the slow tests/traces/trace_truth.py.
"""

import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.damage.mutators import Effect, Inputs, Lines, Mutator, Output, verdict
from tests.traces import trace_truth

from stepmark.ground.errors import ConfigError
from stepmark.runs import step_ledger
from stepmark.step.workload import CommOp
from stepmark.traces import (
    trace,
    trace_files,
    trace_kernels_verb,
    trace_messages_verb,
    trace_path_verb,
    trace_workload,
)
from stepmark.traces import trace_options as options
from stepmark.traces.kineto.reader import read_trace

DATA = Path(__file__).parents[1] / "data" / "traces" / "fsdp8"
GPU, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
Json = dict[str, Any]
Fact = tuple[object, ...]
_VERBS: dict[str, tuple[Callable[[Any], int], Callable[..., Any]]] = {
    "breakdown": (trace.breakdown, options.BreakdownOptions),
    "ledger": (step_ledger.ledger, options.LedgerOptions),
    "messages": (trace_messages_verb.messages, options.MessagesOptions),
    "kernels": (trace_kernels_verb.kernels, options.KernelsOptions),
    "critical-path": (trace_path_verb.run, options.CriticalPathOptions),
}
_ABSOLUTE = ("start_ns", "end_ns")


@cache
def job() -> tuple[Json, ...]:
    """Return the header and events of ranks 0 and 7 as a job of two ranks.

    Kept are all collectives, every 16th of the other GPU events, and their launches.
    """
    ranks = []
    for rank, name in enumerate(("rank0", "rank7")):
        text = gzip.decompress((DATA / f"{name}.json.gz").read_bytes()).decode()
        text = text.replace('"Group size": 8', '"Group size": 2')
        document = json.loads(text.replace("[0, 1, 2, 3, 4, 5, 6, 7]", "[0, 1]"))
        info = {"rank": rank, "world_size": 2, "backend": "nccl"}
        work = [e for e in document["traceEvents"] if e.get("cat") in GPU]
        others = [e for e in work if "nccl" not in e["name"]][::16]
        kept = {e["args"]["correlation"] for e in work if "nccl" in e["name"]}
        kept |= {e["args"]["correlation"] for e in others}
        document["traceEvents"] = [
            event
            for event in document["traceEvents"]
            if event.get("args", {}).get("correlation") in kept
            or event["name"] == "record_param_comms"
            or event["name"].startswith("ProfilerStep")
        ]
        ranks.append(document | {"distributedInfo": info})
    return tuple(ranks)


def _lines(document: Json) -> list[str]:
    """Return the header, each event, and the end as lines, as Python writes them."""
    header = {key: document[key] for key in document if key != "traceEvents"}
    first = json.dumps(header | {"traceEvents": []})[:-2]
    return [first, *map(json.dumps, document["traceEvents"]), "]}"]


def _data(lines: Lines) -> bytes:
    return "\n".join([lines[0], ",\n".join(lines[1:-1]), lines[-1]]).encode()


def _read(folder: Path) -> tuple[dict[str, Json], list[str]]:
    """Return what each command prints as JSON, and all notes and refusals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_files, "read_trace", cache(read_trace))  # once for all commands
        return _read_by_all(folder)


def _read_by_all(folder: Path) -> tuple[dict[str, Json], list[str]]:
    files, documents = tuple(map(str, sorted(folder.iterdir()))), {}
    notes: list[str] = []
    for name, (run, kind) in _VERBS.items():
        more = {"by": "name"} if name == "kernels" else {}
        try:
            with redirect_stdout(io.StringIO()) as out:
                run(kind(files=files, jobs=1, json="-", **more))
        except ConfigError as error:
            notes.append(f"{name}: {error}")
        else:
            documents[name] = json.loads(out.getvalue())
            notes += (f"{name}: {note}" for note in documents[name].pop("notes"))
            first = filter(None, map(documents[name].get, ("cut", "disjoint", "step_groups")))
            notes += (f"{name}: {sentence}" for sentence in first)
            documents[name].pop("definitions", None)
            for row in documents[name].get("paths", ()):
                if row["maybe_waiting_ns"] or row["ranks_without_clock"]:
                    notes.append(f"{name}: ranks are not followed in all collectives")
    try:
        with redirect_stderr(io.StringIO()) as err:
            inputs = options.ToWorkloadOptions(files=files, jobs=1, out="-")
            workload = trace_workload.read(inputs)
    except ConfigError as error:
        notes.append(f"to-workload: {error}")
    else:
        assert workload is not None
        messages = Counter[str]()
        for stage in range(len(workload.stages)):
            for op in workload.expand(stage):
                if isinstance(op, CommOp):
                    size = op.message_bytes(workload.groups[op.group])
                    ranks = workload.world_size // len(workload.stages)
                    messages[f"{op.collective} {size}"] += ranks
        documents["to-workload"] = {"messages": messages, "step": workload.settings["step"]}
        notes += (f"to-workload: {line}" for line in err.getvalue().splitlines())
    return documents, notes


def _laws(documents: dict[str, Json]) -> None:
    """Compare what the commands say of the same thing."""
    if "breakdown" not in documents:
        return
    times = documents["breakdown"]
    by_rank: dict[int, list[Json]] = {}
    for step in times["steps"]:
        names = ("compute_ns", "exposed_comm_ns", "exposed_copies_ns", "idle_ns")
        total = sum(step[name] or 0 for name in names)
        assert total == step["window_ns"] or (step["idle_ns"] is None and times["cut"])
        by_rank.setdefault(step["rank"], []).append(step)
        own = [
            row["time_ns"]
            for row in documents["ledger"]["rows"]
            if not row["is_part"] and all(row[n] == step[n] for n in ("rank", "device", "step"))
        ]
        assert sum(own) == step["window_ns"]
    for row in documents.get("messages", {"ranks": ()})["ranks"]:
        steps = by_rank.get(row["rank"], [])
        if (
            len({step["device"] for step in steps}) == 1
        ):  # others are rows of the breakdown only
            for name, own in (("exposed_s", "exposed_comm_ns"), ("step_s", "window_ns")):
                total = sum(step[own] for step in steps)
                assert abs(row[name] * row["steps"] * 1e9 - total) < 2, (name, row, total)
    if all(step["step"] is not None and step["clock"] == "gpu" for step in times["steps"]):
        total = sum(row["time_ns"] for row in times["kernels"])
        assert total == sum(row["total_ns"] for row in documents["kernels"]["rows"])
    path = documents.get("critical-path", {"paths": ()})
    for row in path["paths"]:
        own = [s for s in path["segments"] if s["step"] == row["step"]]
        assert sum(s["end_ns"] - s["start_ns"] for s in own) == row["end_ns"] - row["start_ns"]


def _facts(documents: dict[str, Json]) -> Iterator[Fact]:
    for verb, document in documents.items():
        for table, rows in document.items():
            for row in rows if isinstance(rows, list) else [rows]:
                relative = row
                if isinstance(row, dict):
                    relative = {key: row[key] for key in row if key not in _ABSOLUTE}
                yield verb, table, json.dumps(relative, sort_keys=True)


def _parsed(lines: Lines) -> tuple[Json, list[Json]]:
    return json.loads(lines[0] + "]}"), list(map(json.loads, lines[1:-1]))


def _with(change: Callable[[list[Json], Random], object]) -> Callable[[Lines, Random], bytes]:
    """Return a change of the events of a file; the new list is what it returns, if one."""

    def apply(lines: Lines, random: Random) -> bytes:
        header, events = _parsed(lines)
        changed = change(events, random)
        events = changed if isinstance(changed, list) else events
        return _data(_lines(header | {"traceEvents": events}))

    return apply


def _one(events: list[Json], random: Random, *kinds: str) -> Json:
    """Return a GPU event whose launch must be in the trace, or that launch."""
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in CALLS}
    seen: set[object] = set()
    pairs = []
    for event in sorted((e for e in events if e.get("cat") in GPU), key=lambda e: e["ts"]):
        call = calls.get(event["args"]["correlation"])
        if call and event["args"]["stream"] in seen:
            pairs += [each for each in (event, call) if each["cat"] in kinds]
        if call:
            seen.add(event["args"]["stream"])
    return random.choice(pairs)


def _set(*kinds: str, **values: Any) -> Callable[[Lines, Random], bytes]:
    return _with(lambda events, random: _one(events, random, *kinds).update(values))


def _drop(*kinds: str) -> Callable[[Lines, Random], bytes]:
    return _with(lambda events, random: events.remove(_one(events, random, *kinds)))


def _twice(*kinds: str) -> Callable[[Lines, Random], bytes]:
    return _with(lambda events, random: events.append({**_one(events, random, *kinds)}))


def _without(name: str) -> Callable[[Lines, Random], bytes]:
    return _with(
        lambda events, _: [{**e, "args": _less(e.get("args", {}), name)} for e in events]
    )


def _less(values: Json, name: str) -> Json:
    return {key: value for key, value in values.items() if key != name}


def _moved(events: list[Json], by: float, select: Callable[[Json], bool]) -> None:
    for event in filter(select, events):
        if "ts" in event:
            event["ts"] = round(event["ts"] * 1000 + by) / 1000


def _again(events: list[Json], correlations: int) -> list[Json]:
    """Return the events and, half a second later, the same ones as steps 15 and 16."""
    more = json.loads(json.dumps(events).replace("ProfilerStep#", "ProfilerStep#1"))
    _moved(more, 5e8, lambda _: True)
    for event in more:
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] += correlations
    return events + more


def _collective_lost(events: list[Json], random: Random) -> list[Json]:
    """Lose a call of torch.distributed with its launch and kernel."""
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in CALLS}
    kernels = [e["args"]["correlation"] for e in events if "nccl" in e["name"]]
    number = random.choice([number for number in kernels if number in calls])
    thread, time = calls[number]["tid"], calls[number]["ts"]
    return [
        event
        for event in events
        if event.get("args", {}).get("correlation") != number
        and (
            event["name"] != "record_param_comms"
            or event["tid"] != thread
            or not event["ts"] <= time < event["ts"] + event["dur"]
        )
    ]


def _chunk(lines: Lines, random: Random, times: int) -> bytes:
    at = random.randrange(1, len(lines) - 40)
    return _data([*lines[:at], *(list(lines[at : at + 30]) * times), *lines[at + 30 :]])


def _cut(lines: Lines, random: Random) -> bytes:
    data = _data(lines)
    return data[: random.randrange(len(lines[0]), len(data) - 3)]


def _names_as_text(events: list[Json], _: Random) -> None:
    for event in events:
        event.update({key: f"x{event[key]}" for key in ("pid", "tid") if key in event})


def _header(change: Callable[[Json], Json]) -> Callable[[Lines, Random], bytes]:
    def apply(lines: Lines, _: Random) -> bytes:
        header, events = _parsed(lines)
        return _data(_lines(change(header) | {"traceEvents": events}))

    return apply


def _unmarked(events: list[Json], _: Random) -> list[Json]:
    return [e for e in events if not e["name"].startswith("ProfilerStep")]


def _whole(lines: Lines, indent: int | None) -> bytes:
    header, events = _parsed(lines)
    separators = (",", ":") if indent is None else None
    document = header | {"traceEvents": events}
    return json.dumps(document, indent=indent, separators=separators).encode()


_HARMLESS: dict[str, Callable[[Lines, Random], bytes]] = {
    "unchanged": lambda lines, _: _data(lines),
    "gzip": lambda lines, _: gzip.compress(_data(lines), 1),
    "compact": lambda lines, _: _whole(lines, None),
    "indented": lambda lines, _: _whole(lines, 2),
    "other order": _with(lambda events, random: random.shuffle(events)),
    "other time": _with(lambda events, _: _moved(events, 123_457, lambda _: True)),
    "other base": _header(lambda head: head | {"baseTimeNanoseconds": 10**18}),
    "threads as text": _with(_names_as_text),
}
_DETECTABLE: dict[str, Callable[[Lines, Random], bytes]] = {
    "GPU event lost": _drop("kernel", "gpu_memcpy"),
    "launch lost": _drop(*CALLS),
    "launches lost": _with(lambda events, _: [e for e in events if e.get("cat") not in CALLS]),
    "collective lost": _with(_collective_lost),
    "kernel twice": _twice("kernel"),
    "copy twice": _twice("gpu_memcpy"),
    "launch twice": _twice(*CALLS),
    "chunk twice": lambda lines, random: _chunk(lines, random, 2),
    "file twice in one": lambda lines, _: _data([*lines[:-1], *lines[1:]]),
    "negative duration": _set("kernel", dur=-5.0),
    "no number": _set("kernel", dur=math.nan),
    "huge duration": _set("kernel", dur=1e12),
    "microseconds as ns": _with(
        lambda events, _: [{**e, "ts": e.get("ts", 0) * 1000} for e in events]
    ),
    "cut anywhere": _cut,
    "unmarked": _with(_unmarked),
    "no correlation": _without("correlation"),
    "no collective": _without("Collective name"),
    "no elements": _without("In msg nelems"),
    "window twice": _with(lambda events, _: _again(events, 0)),
    "two windows": _with(lambda events, _: _again(events, 10**6)),
    "two ranks in one": _with(lambda events, _: events + job()[1]["traceEvents"]),
    "base of one rank": _header(lambda head: _less(head, "baseTimeNanoseconds")),
}
_UNDETECTABLE: dict[str, Callable[[Lines, Random], bytes]] = {
    "chunk lost": lambda lines, random: _chunk(lines, random, 0),
    "shorter kernel": _set("kernel", dur=0.5),
    "GPU is later": _with(
        lambda events, _: _moved(events, 1e6, lambda event: event.get("cat") in GPU)
    ),
}

# Sums of kernels of each rank: that one has fewer than another is what messages says.
_SUMS = {"collective lost": {"kernels"}}


class Traces(Inputs):
    """Traces of two ranks. Harmless changes happen to both, others to the first."""

    samples, all_samples = 1, 30

    @property
    def mutators(self) -> tuple[Mutator, ...]:
        kinds = zip(Effect, (_HARMLESS, _DETECTABLE, _UNDETECTABLE), strict=True)
        return tuple(
            Mutator(name, effect, apply)
            for effect, changes in kinds
            for name, apply in changes.items()
        )

    def output(self, random: Random) -> Output:
        first, second = map(_lines, job())
        return Output(lines=first, values=Counter(), beside={"job.1.et": _data(second)})

    def verdict(self, output: Output, mutator: Mutator, path: Path) -> str:
        beside = path.with_name("job.1.et")
        if mutator.effect is Effect.HARMLESS:
            beside.write_bytes(mutator.apply(_lines(job()[1]), Random(0)))
        documents, notes = _read(path.parent)
        _laws(documents)
        known, normal = _sound()
        signs = [note for note in notes if note not in normal]
        facts = Counter(_facts(documents))
        is_right = facts == known
        wrong = {fact[0] for fact in (facts - known) + (known - facts)}
        if mutator.effect is Effect.UNDETECTABLE:
            is_right = _times(documents) == dict(_truth([path, beside]))
            assert is_right or signs, mutator.name
        elif (
            wrong - {note.partition(":")[0] for note in signs} - _SUMS.get(mutator.name, set())
        ):
            signs = []  # every command that is wrong says so itself
        return verdict(is_right, signs)

    def reading(self, path: Path) -> tuple[Counter[Fact], list[str]]:
        documents, notes = _read(path.parent)
        return Counter(_facts(documents)), notes


@cache
def _sound() -> tuple[Counter[Fact], list[str]]:
    with TemporaryDirectory() as folder:
        for rank, document in enumerate(job()):
            (Path(folder) / f"job.{rank}.et").write_bytes(_data(_lines(document)))
        return Traces().reading(Path(folder) / "job.0.et")


def _times(documents: dict[str, Json]) -> dict[Fact, Fact]:
    names = ("compute_ns", "exposed_comm_ns", "exposed_copies_ns", "idle_ns")
    return {
        (step["rank"], step["step"]): tuple(step[name] for name in names)
        for step in documents["breakdown"]["steps"]
    }


def _truth(paths: list[Path]) -> Iterator[tuple[Fact, Fact]]:
    names = ("compute", "exposed_communication", "exposed_memory", "idle")
    for rank, path in enumerate(paths):
        document = trace_truth.read(path)
        events = trace_truth.gpu_events(document)
        for name, window in trace_truth.tiled_windows(document).items():
            parts = trace_truth.breakdown(events, window)
            yield (rank, int(name[13:])), tuple(parts[part] for part in names)
