"""Write large profiler traces: a real one repeated, with ids and times moved on.

    python tests/traces/big_trace.py OUT_DIR --size 1GB [--ranks 8] [--gzip] [--source TRACE]

The text between numbers stays as Kineto wrote it. Every copy gets its own correlation, External
id, flow id and Ev Idx, and starts when the one before it has ended. Steps are written anew:
--steps of them over the whole trace, since the time of HolisticTraceAnalysis grows with events
times steps. Group sizes and ranks become those of --ranks. Metadata is written once.
"""

import argparse
import gzip
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

# Run as a script, this file has its folder on the path; as a module of tests it has not.
sys.path.insert(0, str(Path(__file__).parent))
from cut_trace import category, split

SOURCE = Path(__file__).parents[1] / "data" / "traces" / "a100-nccl" / "rank0.json.gz"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
NUMBER = re.compile(r'"(ts|correlation|External id|id|Ev Idx)": ([0-9]+(?:\.[0-9]+)?)')
ARRIVAL_NS = 1000  # a rank starts this much after the one before it
LISTED_RANKS = 30  # of a process group, by PyTorch


def size(text: str) -> int:
    """Return bytes of a size such as 97MB."""
    return int(float(text[:-2]) * UNITS[text[-2:].upper()])


def nanoseconds(text: str) -> int:
    return int(Decimal(text) * 1000)


class Block:
    """The events of a trace as pieces of text with the numbers between them that move."""

    def __init__(self, source: Path) -> None:
        raw = source.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
        self.head, events, self.tail = split(text)
        self.fraction = re.search(r'"ts": [0-9]+\.', text) is not None
        once, repeated, step = [], [], None
        for event, event_text in events:
            if str(event.get("name", "")).startswith("ProfilerStep"):
                if category(event) == "user_annotation":
                    step = event_text
            elif event.get("ph") == "M" or category(event) in {"trace", "none"}:
                once.append(event_text)
            else:
                repeated.append((event, event_text))
        if step is None:
            raise SystemExit(f"{source} has no ProfilerStep")
        self.once, self.step, self.count = ",".join(once), step, len(repeated)
        self.start = min(nanoseconds(str(event["ts"])) for event, _ in repeated)
        ends = [
            Decimal(str(event["ts"])) + Decimal(str(event.get("dur", 0)))
            for event, _ in repeated
        ]
        self.period = int(max(ends) * 1000) - self.start + 1_000_000
        joined = "," + ",".join(event_text for _, event_text in repeated)
        self.pieces: list[str] = []
        self.numbers: list[int] = []
        self.are_times: list[bool] = []
        at = 0
        for match in NUMBER.finditer(joined):
            self.pieces.append(joined[at : match.start(2)])
            self.are_times.append(match[1] == "ts")
            self.numbers.append(nanoseconds(match[2]) if match[1] == "ts" else int(match[2]))
            at = match.end()
        self.rest = joined[at:]
        self.ids = 1 + max(
            n for n, time in zip(self.numbers, self.are_times, strict=True) if not time
        )

    def time(self, ns: int) -> str:
        return f"{ns // 1000}.{ns % 1000:03d}" if self.fraction else str(ns // 1000)

    def copy(self, number: int, delay: int) -> str:
        """Return the text of one copy."""
        ids, times = number * self.ids, number * self.period + delay
        texts: list[Any] = [None] * (2 * len(self.pieces))
        texts[::2] = self.pieces
        texts[1::2] = [
            self.time(value + times) if is_time else str(value + ids if value > 0 else value)
            for value, is_time in zip(self.numbers, self.are_times, strict=True)
        ]
        return "".join(texts) + self.rest

    def step_text(self, number: int, first: int, copies: int, delay: int) -> str:
        text = re.sub(r"ProfilerStep#[0-9]+", f"ProfilerStep#{number}", self.step)
        start = self.start + first * self.period + delay - 1000
        text = re.sub(r'"ts": [0-9.]+', f'"ts": {self.time(start)}', text)
        return re.sub(
            r'"dur": [0-9.]+', f'"dur": {self.time(copies * self.period - 1000)}', text
        )

    def of_ranks(self, text: str, ranks: int) -> str:
        """Return a text with the process group of so many ranks."""
        if ranks == 1:
            return text
        listed = ", ".join(map(str, range(min(ranks, LISTED_RANKS))))
        short = listed + (", ..." if ranks > LISTED_RANKS else "")
        text = re.sub(r'("Process Group Ranks": ")[^"]*', rf"\g<1>[{short}]", text)
        text = re.sub(r'("Group size": )[0-9]{1,3}(?=[,\s])', rf"\g<1>{ranks}", text)
        text = re.sub(r'("(?:world_size|pg_size)": )[0-9]+', rf"\g<1>{ranks}", text)
        everyone = ", ".join(map(str, range(ranks)))
        return re.sub(r'("ranks": )\[[^\]]*\]', rf"\g<1>[{everyone}]", text)


def pieces(block: Block, rank: int, copies: int, steps: int) -> Iterator[str]:
    """Yield the text of one rank's trace, for so many copies of the block."""
    delay = rank * ARRIVAL_NS
    yield re.sub(r'("rank": )[0-9]+', rf"\g<1>{rank}", block.head)
    yield block.once
    bounds = [copies * step // steps for step in range(steps + 1)]
    for step, (first, last) in enumerate(pairwise(bounds)):
        if last > first:
            yield "," + block.step_text(step, first, last - first, delay)
        for number in range(first, last):
            yield block.copy(number, delay)
    yield block.tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=size, default=size("97MB"), help="of each rank's JSON")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--source", type=Path, default=SOURCE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    block = Block(options.source)
    block.head = block.of_ranks(block.head, options.ranks)
    block.pieces = [block.of_ranks(piece, options.ranks) for piece in block.pieces]
    copies = max(1, round(options.size / len(block.copy(1, 0).encode())))
    for rank in range(options.ranks):
        path = options.out / f"rank{rank}.json"
        with path.open("wb") if not options.gzip else gzip.open(f"{path}.gz", "wb", 6) as file:
            output: IO[bytes] = file  # type: ignore[assignment]
            for piece in pieces(block, rank, copies, options.steps):
                output.write(piece.encode())
    sys.stdout.write(f"{copies} copies, {copies * block.count} events a rank\n")


if __name__ == "__main__":
    main()
