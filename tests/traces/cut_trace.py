"""Cut a profiler trace down to some of its events, byte for byte as they stand in the file.

Header, tail, layout and the text of each event that is kept stay as they are, so that the cut
file has the peculiarities of the profiler that wrote the whole.

    python tests/traces/cut_trace.py IN OUT [--drop CAT,...] [--keep CAT,...] [--steps A,B]
        [--launches] [--names NAME,...]

--drop and --keep name categories ("none": metadata without one). --steps keeps what starts in
the host ranges of these steps, the GPU events that calls there launched, GPU events without a
call, and metadata. --launches drops calls that launched no GPU event and wait for none.
--names keeps cpu_op events of these names alone.
"""

import argparse
import gzip
import json
import re
from pathlib import Path
from typing import Any

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
Slice = tuple[dict[str, Any], str]


def split(text: str) -> tuple[str, list[Slice], str]:
    """Return head, events with their text (and the space before it), and tail."""
    opening = re.search(r'"traceEvents"\s*:\s*\[', text)
    if opening is None:
        raise SystemExit("no traceEvents")
    decoder, events, at = json.JSONDecoder(), [], opening.end()
    while True:
        start = at
        at = re.compile(r"\s*").match(text, at).end()  # type: ignore[union-attr]
        if text[at] == "]":
            return text[: opening.end()], events, text[start:]
        event, at = decoder.raw_decode(text, at)
        events.append((event, text[start:at]))
        at = re.compile(r"\s*,?").match(text, at).end()  # type: ignore[union-attr]


def category(event: dict[str, Any]) -> str:
    return str(event.get("cat", "none")).lower()


def correlation(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def kept(events: list[Slice], options: argparse.Namespace) -> list[str]:
    launched = {correlation(event) for event, _ in events if category(event) in GPU}
    ranges, called = [], set()
    if options.steps:
        for event, _ in events:
            if category(event) == "user_annotation" and event["name"] in options.steps:
                ranges.append((event["ts"], event["ts"] + event["dur"]))
    calls = {correlation(event) for event, _ in events if category(event) in CALLS}

    def within(event: dict[str, Any]) -> bool:
        if event.get("ph") == "M" or not ranges:
            return True
        if category(event) in GPU:
            return correlation(event) in called or correlation(event) not in calls
        if category(event) == "ac2g":
            return event["id"] in called
        if category(event) == "gpu_user_annotation":
            return event["name"] in options.steps or not event["name"].startswith("ProfilerS")
        return any(start <= event["ts"] <= end for start, end in ranges)

    for event, _ in events:
        if category(event) in CALLS and within(event):
            called.add(correlation(event))
    texts = []
    for event, text in events:
        cat = category(event)
        if cat in options.drop or (options.keep and cat not in options.keep):
            continue
        wait = "Synchronize" in event["name"]
        if (
            options.launches
            and cat in CALLS
            and not wait
            and correlation(event) not in launched
        ):
            continue
        if cat == "cpu_op" and options.names and event["name"] not in options.names:
            continue
        if within(event):
            texts.append(text)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    for name in ("--drop", "--keep", "--steps", "--names"):
        parser.add_argument(name, type=lambda value: value.split(","), default=[])
    parser.add_argument("--launches", action="store_true")
    options = parser.parse_args()
    raw = options.source.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    head, events, tail = split(text)
    output = (head + ",".join(kept(events, options)) + tail).encode()
    if options.target.suffix == ".gz":
        output = gzip.compress(output, 9, mtime=0)
    options.target.write_bytes(output)


if __name__ == "__main__":
    main()
