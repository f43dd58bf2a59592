"""nccl-tests -J, versions 1 to 3, and stepmark's own file of that schema.

The file has neither the collective nor the number of ranks: args[0] names the program, and
`devices` lists one GPU of each process. Read as well: keys misspelt before 2.17.9, infinities
(not JSON), a file left open after an error (before 2.18.5): the complete results are kept.
The environment, which holds secrets, is never carried on.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import msgspec

from stepmark.core.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table
from stepmark.core.units import GB
from stepmark.trace import infer, nccl_facts

Plain = Mapping[str, object]
_PLACEMENTS = (("out_of_place", OUT_OF_PLACE), ("in_place", IN_PLACE))
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]')
_NOT_JSON = re.compile(r"(?<=[:,\[])\s*-?(?:inf(?:inity)?|nan)\s*(?=[,}\]])", re.IGNORECASE)
_CLOSING = {"{": "}", "[": "]"}
_MOST_PARTS = 1000
_CUT = "the file was never closed: an error ended the program; complete results were kept"


def read(text: str, file: str) -> list[Table]:
    """The tables of one document, or of several, one after the other; [] for other JSON."""
    tables: list[Table] = []
    for document, line, note in _documents(text):
        if isinstance(document, dict) and isinstance(document.get("results"), list):
            tables += _tables(document, file, line, note)
    return tables


def _documents(text: str) -> Iterator[tuple[object, int, str]]:
    """(document, first line, note) of each object of the text."""
    if '"results"' not in text:
        return
    whole = _decoded(text)
    if whole is not None:
        yield whole, 1, ""
        return
    for start, end in _objects(text):
        line = text.count("\n", 0, start) + 1
        part = text[start:end]
        document = _decoded(part)
        if document is not None:
            yield document, line, ""
        elif (document := _decoded(_closed(part))) is not None:
            yield document, line, _CUT


def _decoded(text: str) -> object:
    """A document, or None. The decoder's message may hold the file's text: it is dropped."""
    for candidate in (text, _NOT_JSON.sub("null", text)):
        try:
            return msgspec.json.decode(candidate.encode())
        except (msgspec.DecodeError, RecursionError):
            continue
    return None


def _objects(text: str) -> Iterator[tuple[int, int]]:
    """Where top-level objects begin and end; the last may have no end."""
    depth = start = found = 0
    for token in _TOKEN.finditer(text):
        if token[0] in ("{", "["):
            start = token.start() if depth == 0 else start
            depth += 1
        elif token[0] in ("}", "]") and depth:
            depth -= 1
            if depth == 0 and found < _MOST_PARTS:
                found += 1
                yield start, token.end()
    if depth:
        yield start, len(text)


def _closed(text: str) -> str:
    """The text up to its last complete value, with what is open closed."""
    stack: list[str] = []
    end, open_then = 0, ""
    for token in _TOKEN.finditer(text):
        if token[0] in _CLOSING:
            stack.append(token[0])
        elif token[0] in ("}", "]"):
            if not stack or _CLOSING[stack.pop()] != token[0]:
                break
            end = token.end()
            open_then = "".join(_CLOSING[one] for one in reversed(stack))
    return text[:end] + open_then


def _tables(document: Plain, file: str, line: int, note: str) -> list[Table]:
    """One table per collective: ours names it in each result, nccl-tests in none."""
    results = [one for one in _list(document.get("results")) if isinstance(one, dict)]
    held: dict[str, list[Plain]] = {}
    for result in results:
        name = str(result.get("experiment_name") or "")
        held.setdefault(name if name.endswith("_perf") else "", []).append(result)
    return [
        table
        for name, same in held.items()
        if (table := _table(document, same, name, file, line, note)).readings
    ]


def _table(
    document: Plain, results: Sequence[Plain], name: str, file: str, line: int, note: str
) -> Table:
    config = _object(document.get("config"))
    args = [str(one) for one in _list(document.get("args"))]
    readings = tuple(_readings(results, line))
    collective, collective_from = _collective(args, name, file, readings)
    num_ranks, num_ranks_from = _num_ranks(config)
    if num_ranks is None:
        num_ranks, num_ranks_from = infer.num_ranks_of(readings, collective)
    ours = _object(document.get("stepmark"))
    tool = (
        "stepmark" if ours else "rccl-tests" if "rccl" in " ".join(args[:1]) else "nccl-tests"
    )
    enqueue = any("cpu_time" in _object(one.get("out_of_place")) for one in results)
    notes = [note] if note else []
    notes += [] if collective else ["the collective is not known (compare --collective NAME)"]
    notes += [] if num_ranks else ["the number of ranks is not known (compare --ranks N)"]
    notes += ["times are those to enqueue (-C): they say nothing of busbw"] if enqueue else []
    return Table(
        file=file,
        index=0,
        first_line=line,
        last_line=line,
        title=nccl_facts.command_from(" ".join(args)) or name,
        tool=tool,
        version=str(ours.get("version") or ""),
        unit="busbw" if any(one.rate is not None for one in readings) else "",
        collective=collective,
        collective_from=collective_from,
        num_ranks=num_ranks,
        num_ranks_from=num_ranks_from if num_ranks else "",
        method=_method(config, args, tool) + (", time to enqueue" if enqueue else ""),
        readings=readings,
        notes=tuple(notes),
    )


def _collective(
    args: Sequence[str], name: str, file: str, readings: Sequence[Reading]
) -> tuple[str, str]:
    if name:
        return nccl_facts.collective_named(name), "the results' experiment_name"
    if args and (found := nccl_facts.collective_in_command(PurePath(args[0]).name)):
        return found, "the first of its args"
    if found := nccl_facts.collective_in_text(PurePath(file).name):
        return found, f"the file's name, {PurePath(file).name}"
    return infer.collective_of(readings)


def _num_ranks(config: Plain) -> tuple[int | None, str]:
    """Processes x threads x GPUs of a thread, of rank 0's group."""
    devices = [_object(one) for one in _list(config.get("devices"))]
    each = (_int(config.get("nthreads")) or 1) * (_int(config.get("ngpus")) or 1)
    if not devices:
        return None, ""
    group = next((one.get("group") for one in devices if one.get("rank") == 0), 0)
    same = sum(one.get("group") == group for one in devices)
    of_all = f" of group {group}, of {len(devices)} in all" if same < len(devices) else ""
    reason = f"{same} devices{of_all}" + (f", {each} GPUs each" if each > 1 else "")
    return (same * each, reason) if 0 < same * each < infer.MOST_RANKS else (None, "")


def _method(config: Plain, args: Sequence[str], tool: str) -> str:
    """As the configuration says it. The level of -z stands in the arguments alone."""
    if "graph" not in config:
        return ""
    words = ["graph" if _int(config.get("graph")) else ""]
    if config.get("blocking_collectives") in ("true", True):
        level = re.search(r"(?:^|\s)(?:-z|--blocking)[ =]?(\d)\b", " ".join(args))
        words.append(f"blocking {level[1]}" if level else "blocking")
    aggregated = _int(config.get("aggregated_iterations")) or 1
    how = ", ".join(filter(None, words)) or "queued"
    return f"{tool} {how}" + (f", {aggregated} per group" if aggregated > 1 else "")


def _readings(results: Sequence[Plain], line: int) -> Iterator[Reading]:
    seen: dict[tuple[object, ...], int] = {}
    for result in results:
        size = _int(result.get("size"))
        kind = tuple(str(result.get(key)) for key in ("size", "count", "type", "redop", "root"))
        cycle = seen.get(kind, 0) if size else 0
        seen[kind] = cycle + 1
        for key, placement in _PLACEMENTS:
            half = _object(result.get(key))
            time, algbw, busbw = (_float(half.get(k)) for k in ("time", "alg_bw", "bus_bw"))
            enqueue = "cpu_time" in half
            if time is None and algbw is None and busbw is None:
                continue
            yield Reading(
                line=line,
                size_bytes=size,
                count=_int(result.get("count")),
                dtype=nccl_facts.dtype_named(str(result.get("type") or "")),
                redop=str(result.get("redop") or "").strip(),
                root=_int(result.get("root")),
                placement=placement,
                time_s=time * 1e-6 if time and time > 0 else None,
                algbw_bytes_per_s=None if algbw is None else algbw * GB,
                busbw_bytes_per_s=None if busbw is None else busbw * GB,
                rate=busbw * GB if enqueue and busbw is not None else None,
                num_wrong=_int(half.get("nwrong")),
                cycle=cycle,
                samples_s=_samples(_object(result.get(f"{key}_per_iter"))),
            )


def _samples(per_iter: Plain) -> tuple[float, ...]:
    """Seconds of single iterations, without those that the summary skips."""
    times = [_float(one) for one in _list(per_iter.get("times_us"))]
    skipped = max(0, _int(per_iter.get("skipped_iterations")) or 0)
    return tuple(time * 1e-6 for time in times[skipped:] if time is not None and time > 0)


def _object(value: object) -> Plain:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _int(value: object) -> int | None:
    """A whole number; a root is a padded text."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**62:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: object) -> float | None:
    """A finite number; "nan" is a text there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value)
