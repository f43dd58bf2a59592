"""nccl-tests -J, versions 1 to 3, and stepmark's own file of that schema.

The file has neither the collective nor the number of ranks: args[0] names the program, and
`devices` lists one GPU of each process. Keys misspelt before 2.17.9, infinities (not JSON) and
files left open after an error (before 2.18.5) are read as well; of the latter the complete
results are kept. The environment, which holds secrets, is never copied.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from stepmark.ground import json_text
from stepmark.ground.json_text import as_object
from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table
from stepmark.ground.units import GB
from stepmark.model.collectives import collective_named
from stepmark.text_tables import nccl_lines, printed_figures
from stepmark.text_tables.nccl_lines import Sweep
from stepmark.text_tables.stopped_outputs import StoppedOutput

JsonObject = Mapping[str, object]
_PLACEMENTS = (("out_of_place", OUT_OF_PLACE), ("in_place", IN_PLACE))
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]')
_NOT_JSON = re.compile(r"(?<=[:,\[])\s*-?(?:inf(?:inity)?|nan)\s*(?=[,}\]])", re.IGNORECASE)
_CLOSING = {"{": "}", "[": "]"}
_MAX_DOCUMENTS = 1000
_UNCLOSED = "the file was never closed: an error ended the program; complete results were kept"


def read(text: str, file: str) -> tuple[list[Table], list[StoppedOutput]]:
    """Return the tables of one document, or of several in a row, and those that stop.

    Both are [] for other JSON.
    """
    tables: list[Table] = []
    stops: list[StoppedOutput] = []
    for document, line, note in _documents(text):
        if not isinstance(document, dict) or not (
            document.keys() & {"results", "nccl_version"}
        ):
            continue
        tables_here = _tables(document, file, line, note)
        tables += tables_here
        if note or not tables_here:
            stops.append(_stop(document, tables_here, line))
    return tables, stops


def _stop(document: JsonObject, tables: Sequence[Table], line: int) -> StoppedOutput:
    """Return the stop of a document that was never closed, or has no result."""
    config = as_object(document.get("config"))
    keys = ("minimum_bytes", "maximum_bytes", "step_factor", "step_bytes")
    first, last, factor, step_bytes = (_int(config.get(key)) for key in keys)
    step = factor or step_bytes
    sweep = None
    if first is not None and last is not None and step:
        sweep = Sweep(min_bytes=first, max_bytes=last, step=step, is_factor=bool(factor))
    rows = dict.fromkeys(
        (reading.size_bytes, reading.dtype, reading.redop, reading.root, reading.cycle)
        for table in tables
        for reading in table.readings
    )
    return StoppedOutput(
        tool="nccl-tests",
        first_line=line,
        header_line=line,
        last_line=line,
        num_rows=len(rows),
        num_sizes=sweep.num_sizes if sweep else None,
        last_size_bytes=list(rows)[-1][0] if rows else None,
    )


def decode(text: str) -> object:
    """Return a JSON document, or None. A decoder's message may hold the text: it is dropped."""
    for candidate in (text, _NOT_JSON.sub("null", text)):
        try:
            return json_text.decode(candidate)
        except ValueError:
            continue
    return None


def _documents(text: str) -> Iterator[tuple[object, int, str]]:
    """Yield (document, first line, note) of each object of the text."""
    if '"results"' not in text and '"nccl_version"' not in text:
        return
    if (document := decode(text)) is not None:
        yield document, 1, ""
        return
    for part, start, note in _objects(text):
        if (document := decode(part)) is not None:
            yield document, text.count("\n", 0, start) + 1, note


def _objects(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield (text, start, note) of top-level objects; the last may never have been closed.

    That one is cut after its last complete value, and its open brackets are closed.
    """
    stack: list[str] = []
    start = end = count = 0
    closing = ""
    for token in _TOKEN.finditer(text):
        if token[0] in _CLOSING:
            start = start if stack else token.start()
            stack.append(token[0])
        elif token[0] in ("}", "]") and stack:
            if _CLOSING[stack.pop()] != token[0]:
                return
            end = token.end()
            closing = "".join(_CLOSING[sign] for sign in reversed(stack))
            if not stack and count < _MAX_DOCUMENTS:
                count += 1
                yield text[start:end], start, ""
    if stack and end > start:
        yield text[start:end] + closing, start, _UNCLOSED


def _tables(document: JsonObject, file: str, line: int, note: str) -> list[Table]:
    """Return a table per collective: stepmark names it in each result, nccl-tests in none."""
    by_name: dict[str, list[JsonObject]] = {}
    for result in _list(document.get("results")):
        if isinstance(result, dict):
            name = str(result.get("experiment_name") or "")
            by_name.setdefault(name if name.endswith("_perf") else "", []).append(result)
    tables = [
        _table(document, results, name, file, line, note) for name, results in by_name.items()
    ]
    return [table for table in tables if table.readings]


def _table(
    document: JsonObject,
    results: Sequence[JsonObject],
    name: str,
    file: str,
    line: int,
    note: str,
) -> Table:
    config = as_object(document.get("config"))
    args = [str(arg) for arg in _list(document.get("args"))]
    readings = tuple(_readings(results, line))
    collective, collective_from = _collective(args, name, file, readings)
    num_ranks, num_ranks_from = _num_ranks(config)
    if num_ranks is None:
        num_ranks, num_ranks_from = printed_figures.num_ranks_of(readings, collective)
    is_split = " of group " in num_ranks_from
    num_hosts, device = nccl_lines.hosts_and_device([] if is_split else _gpus(config))
    stepmark = as_object(document.get("stepmark"))
    tool = "rccl-tests" if args and "rccl" in args[0] else "nccl-tests"
    tool = "stepmark" if stepmark else tool
    is_enqueue_time = any(
        "cpu_time" in as_object(result.get("out_of_place")) for result in results
    )
    notes = [note] if note else []
    if not collective:
        notes.append(nccl_lines.UNKNOWN_COLLECTIVE)
    if not num_ranks:
        notes.append(nccl_lines.UNKNOWN_RANKS)
    if is_enqueue_time:
        notes.append("times are those to enqueue (-C): they say nothing of busbw")
    return Table(
        file=file,
        first_line=line,
        last_line=line,
        title=nccl_lines.command_from(" ".join(args)) or name,
        tool=tool,
        version=str(stepmark.get("version") or ""),
        unit="busbw" if any(reading.rate is not None for reading in readings) else "",
        collective=collective,
        collective_from=collective_from,
        num_ranks=num_ranks,
        num_ranks_from=num_ranks_from if num_ranks else "",
        num_hosts=num_hosts,
        device=device,
        gpus_per_thread=_int(config.get("ngpus")) or 1,
        method=_method(config, args, tool, is_enqueue_time=is_enqueue_time),
        readings=readings,
        notes=tuple(notes),
    )


def _collective(
    args: Sequence[str], name: str, file: str, readings: Sequence[Reading]
) -> tuple[str, str]:
    """Return (collective, how it is known)."""
    if name:
        return collective_named(name), "the results' experiment_name"
    program = PurePath(args[0]).name if args else ""
    if collective := nccl_lines.collective_in_command(program):
        return collective, "the first of its args"
    return nccl_lines.inferred_collective(file, readings)


def _gpus(config: JsonObject) -> list[tuple[str, str, str]]:
    """Return (host, PCI address, name) of the first GPU of each process."""
    return [
        (
            str(device.get("hostname")),
            str(device.get("device_hex") or device.get("device")),
            str(device.get("device_info") or ""),
        )
        for device in map(as_object, _list(config.get("devices")))
        if device.get("hostname")
    ]


def _num_ranks(config: JsonObject) -> tuple[int | None, str]:
    """Return processes x threads x GPUs of a thread, of rank 0's group, and how it is known."""
    devices = [as_object(device) for device in _list(config.get("devices"))]
    each = (_int(config.get("nthreads")) or 1) * (_int(config.get("ngpus")) or 1)
    if not devices:
        return None, ""
    group = next((device.get("group") for device in devices if device.get("rank") == 0), 0)
    same = sum(device.get("group") == group for device in devices)
    of_all = f" of group {group}, of {len(devices)} in all" if same < len(devices) else ""
    reason = f"{same} devices{of_all}" + (f", {each} GPUs each" if each > 1 else "")
    return (same * each, reason) if 0 < same * each < printed_figures.MAX_RANKS else (None, "")


def _method(
    config: JsonObject, args: Sequence[str], tool: str, *, is_enqueue_time: bool
) -> str:
    """Return how it was timed. Only the arguments hold the level of -z."""
    if "graph" not in config:
        return ", time to enqueue" if is_enqueue_time else ""
    words = ["graph"] if _int(config.get("graph")) else []
    if config.get("blocking_collectives") in ("true", True):
        level = re.search(r"(?:^|\s)(?:-z|--blocking)[ =]?(\d)\b", " ".join(args))
        words.append(f"blocking {level[1]}" if level else "blocking")
    per_group = _int(config.get("aggregated_iterations")) or 1
    return nccl_lines.method_text(tool, words, per_group, is_enqueue_time=is_enqueue_time)


def _readings(results: Sequence[JsonObject], line: int) -> Iterator[Reading]:
    counts: dict[tuple[object, ...], int] = {}
    for result in results:
        size = _int(result.get("size"))
        kind = tuple(str(result.get(key)) for key in ("size", "count", "type", "redop", "root"))
        cycle = counts.get(kind, 0) if size else 0
        counts[kind] = cycle + 1
        for key, placement in _PLACEMENTS:
            figures = as_object(result.get(key))
            names = ("time", "alg_bw", "bus_bw")
            time, algbw, busbw = (_float(figures.get(name)) for name in names)
            if time is algbw is busbw is None:
                continue
            busbw_si = None if busbw is None else busbw * GB
            yield Reading(
                line=line,
                size_bytes=size,
                count=_int(result.get("count")),
                dtype=nccl_lines.dtype_named(str(result.get("type") or "")),
                redop=str(result.get("redop") or "").strip(),
                root=_int(result.get("root")),
                placement=placement,
                time_s=time * 1e-6 if time and time > 0 else None,
                algbw_bytes_per_s=None if algbw is None else algbw * GB,
                busbw_bytes_per_s=busbw_si,
                rate=busbw_si if "cpu_time" in figures else None,
                num_wrong=_int(figures.get("nwrong")),
                cycle=cycle,
                samples_s=_samples(as_object(result.get(f"{key}_per_iter"))),
            )


def _samples(per_iteration: JsonObject) -> tuple[float, ...]:
    """Return seconds of single iterations, without those that the summary skips."""
    times = [_float(time) for time in _list(per_iteration.get("times_us"))]
    skipped = max(0, _int(per_iteration.get("skipped_iterations")) or 0)
    return tuple(time * 1e-6 for time in times[skipped:] if time is not None and time > 0)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _int(value: object) -> int | None:
    """Return a whole number; a root is a padded text."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**62:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: object) -> float | None:
    """Return a finite number; "nan" is a text there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value)
