"""Run every pair of training techniques in each layout on a tiny model; write a table.

    python recipes/technique_table.py --out techniques.md              # CPU or GPUs
    python recipes/technique_table.py --layouts fsdp,tp --only fp8,head
    python recipes/technique_table.py --layouts fsdp-tp --nproc 4
    python recipes/technique_table.py --jobs 12 --limit 480            # on a large machine
    python recipes/technique_table.py --jobs 12 --resume               # cells not run or failed

technique_cells.py defines V (passed), refused and X (failed). Two techniques of the same kind,
such as two precisions, are not a pair. A technique that requires another one enables it: FP8
head enables FP8 products. On a CPU torchao emulates FP8.

Cells are distributed over sets of ranks; --jobs sets work at the same time. If a set has fewer
ranks than there are GPUs, the sets are spread over the GPUs. Ranks are restarted after a cell
that failed. FILE.json is written next to --out FILE.md; both are updated as cells end.
FILE.logs/ holds the output of each set. The exit code is 1 if a requested cell failed or was
not run. Over 250 lines: rank sets and tables.
"""

import argparse
import collections
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import technique_cells
import torch
from technique_cells import LAYOUTS, TECHNIQUES, Cell, Setting, cell_of, pairs

DEFAULT_LAYOUTS = "single,ddp,fsdp,tp,pp,cp"
POLL_S = 1.0
GOOD, REFUSED, BROKEN, NOT_RUN = "V", "refused", "X", "not run"
Row = dict[str, Any]  # mark and text; for V also losses and command
Outcomes = dict[str, dict[Cell, Row]]  # by layout
PENDING: Row = {"mark": NOT_RUN, "text": NOT_RUN}


def main() -> None:
    asked = arguments()
    about = {"device": asked.device, "model": asked.model, "nproc": asked.nproc}
    results = Results(asked.out, about, resume=asked.resume)
    todo = {name: results.open(name, asked.cells) for name in asked.layouts}
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    ends_at = time.time() + asked.limit
    with ThreadPoolExecutor(asked.jobs) as pool:
        futures = [
            pool.submit(rank_set.work, results, stop, ends_at)
            for rank_set in rank_sets(todo, asked)
        ]
    for future in futures:
        future.result()  # raises the thread's exception
    sys.stdout.write(asked.out.read_text())
    marks = {results.mark(name, cell) for name in todo for cell in asked.cells}
    sys.exit(1 if marks & {BROKEN, NOT_RUN} else 0)


def arguments() -> argparse.Namespace:
    """Parse the command line; layouts become a list, and `cells` is added."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("techniques.md"))
    parser.add_argument("--layouts", default=DEFAULT_LAYOUTS, help=", ".join(LAYOUTS))
    parser.add_argument("--only", default="", help="only cells with one of these techniques")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--nproc", type=int, default=2, help="ranks [2]; single has one")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent sets of ranks [1]")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="no cell starts after these seconds"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep V and refused cells of FILE.json"
    )
    asked = parser.parse_args()
    asked.layouts, asked.only = asked.layouts.split(","), [*filter(None, asked.only.split(","))]
    for words, known in ((asked.layouts, LAYOUTS), (asked.only, TECHNIQUES)):
        if unknown := set(words) - known.keys():
            parser.error(f"{', '.join(unknown)} is unknown; choose from {', '.join(known)}")
    if asked.jobs < 1 or asked.nproc < 1:
        parser.error("--jobs and --nproc must be 1 or more")
    if asked.device == "auto":
        asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    asked.cells = pairs(asked.device, asked.only)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    return asked


# Sets of ranks


def dealt(todo: dict[str, list[Cell]], jobs: int) -> list[tuple[str, list[Cell]]]:
    """Return (layout, cells) slices with each cell once and neighbours in different slices.

    There are at least as many slices as jobs, but no more than needed: ranks start slowly.
    """
    share = -(-jobs // max(1, sum(map(bool, todo.values()))))
    slices = [
        (name, cells[first::share]) for name, cells in todo.items() for first in range(share)
    ]
    return [(name, cells) for name, cells in slices if cells]


def rank_sets(todo: dict[str, list[Cell]], asked: argparse.Namespace) -> Iterator["RankSet"]:
    gpus = visible_gpus() if asked.device == "cuda" else []
    cores = len(os.sched_getaffinity(0))
    for number, (layout, cells) in enumerate(dealt(todo, asked.jobs)):
        ranks = ranks_of(layout, asked.nproc)
        variables = {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores // (asked.jobs * ranks))),
            **os.environ,
        }
        if ranks < len(gpus):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(turn(gpus, ranks, number))
        setting = Setting(
            layout=layout, num_ranks=ranks, device=asked.device, model=asked.model
        )
        log = asked.out.with_suffix(".logs") / f"{layout}-{number}.log"
        yield RankSet(setting=setting, cells=cells, variables=variables, log=log)


def ranks_of(layout: str, nproc: int) -> int:
    return LAYOUTS[layout][1] or nproc


def visible_gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[:count] if given else [str(index) for index in range(count)]


def turn(gpus: Sequence[str], ranks: int, number: int) -> list[str]:
    """Return the GPUs of one set: those that follow the GPUs of the previous set."""
    return [gpus[(number * ranks + index) % len(gpus)] for index in range(ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """Ranks that run some cells of one layout."""

    setting: Setting
    cells: list[Cell]
    variables: dict[str, str]  # environment variables of the ranks
    log: Path

    def work(self, results: "Results", stop: threading.Event, ends_at: float) -> None:
        """Start ranks until no cell is left or the time is over."""
        layout = self.setting.layout
        left = self.cells
        while left and not stop.is_set() and time.time() < ends_at:
            code, lines = self._start(left, results, stop, ends_at)
            left = results.left(layout, self.cells)
            if stop.is_set():
                return
            if lines is None:
                text = f"{layout} does not train at all; see {self.log.parent.name}/"
                results.take(layout, [broken(cell, text) for cell in left])
            elif code and left and not any(line["ended"] for line in lines):
                results.take(
                    layout,
                    [
                        broken(
                            left[0],
                            f"ranks ended with exit code {code}; see {self.log.name}",
                        )
                    ],
                )
            left = results.left(layout, self.cells)
            done = len(self.cells) - len(left)
            sys.stderr.write(f"{self.log.stem}: {done} of {len(self.cells)} cells\n")

    def _start(
        self, cells: list[Cell], results: "Results", stop: threading.Event, ends_at: float
    ) -> tuple[int, list[Row] | None]:
        """Run ranks for these cells; return their exit code and outcomes."""
        setting, file = self.setting, self.log.with_suffix(f".{os.getpid()}.outcomes")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(setting.num_ranks), technique_cells.__file__]
        command += ["--layout", setting.layout, "--device", setting.device]
        command += ["--model", setting.model, "--until", str(ends_at), "--outcomes", str(file)]
        command += ["--cells", ",".join("+".join(cell) for cell in cells)]
        self.log.parent.mkdir(exist_ok=True)
        # In their own session the ranks receive one signal, from this process.
        with (
            self.log.open("a") as log,
            subprocess.Popen(
                command,
                env=self.variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as child,
        ):
            while child.poll() is None and not stop.wait(POLL_S):
                results.take(setting.layout, read_outcomes(file) or [])
            child.terminate()  # if it has not ended
            code = child.wait()
        lines = read_outcomes(file)
        file.unlink(missing_ok=True)
        results.take(setting.layout, lines or [])
        return code, lines


def read_outcomes(file: Path) -> list[Row] | None:
    """Return the complete lines that the ranks wrote; None before they have trained at all."""
    text = file.read_text() if file.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in lines[1:]] if lines else None


def broken(cell: Cell, text: str) -> Row:
    return {"cell": "+".join(cell), "mark": BROKEN, "text": text}


# Results


class Results:
    """Outcomes of the cells, kept in files from the first one on. Thread-safe."""

    def __init__(self, out: Path, about: dict[str, Any], *, resume: bool) -> None:
        """`about` is device, model and nproc. Raise SystemExit if earlier cells used others."""
        self._out, self._about = out, about
        self._lock = threading.Lock()
        self.outcomes: Outcomes = {}
        file = out.with_suffix(".json")
        if not resume or not file.exists():
            return
        earlier = json.loads(file.read_text())
        if earlier.get("about") != about:
            raise SystemExit(f"{file} was made with {earlier.get('about')}, not with {about}")
        for layout, rows in earlier["layouts"].items():
            self.outcomes[layout] = {cell_of(row["cell"]): row for row in rows}

    def open(self, layout: str, cells: Iterable[Cell]) -> list[Cell]:
        """Mark the cells that are neither V nor refused as not run, and return them."""
        rows = self.outcomes.setdefault(layout, {})
        again = [cell for cell in cells if self.mark(layout, cell) not in (GOOD, REFUSED)]
        for cell in again:
            rows[cell] = {"cell": "+".join(cell), **PENDING}
        self._write()
        return again

    def mark(self, layout: str, cell: Cell) -> str:
        return str(self.outcomes[layout].get(cell, PENDING)["mark"])

    def left(self, layout: str, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells without an outcome."""
        return [cell for cell in cells if self.mark(layout, cell) == NOT_RUN]

    def take(self, layout: str, lines: Iterable[Row]) -> None:
        """Store outcomes. A cell's first line counts: the first failing rank has the cause."""
        with self._lock:
            before = len(self.left(layout, self.outcomes[layout]))
            for line in lines:
                cell = cell_of(line["cell"])
                if self.mark(layout, cell) == NOT_RUN:
                    self.outcomes[layout][cell] = line
            if len(self.left(layout, self.outcomes[layout])) < before:
                self._write()

    def _write(self) -> None:
        layouts = {name: list(rows.values()) for name, rows in self.outcomes.items()}
        rows = json.dumps({"about": self._about, "layouts": layouts}, indent=1) + "\n"
        text = markdown(self.outcomes, self._about["nproc"])
        for file, content in ((self._out.with_suffix(".json"), rows), (self._out, text)):
            fresh = file.with_name(f"{file.name}.new")
            fresh.write_text(content)
            fresh.replace(file)  # complete at any time


# The table


def markdown(outcomes: Outcomes, nproc: int) -> str:
    """Return one table of all layouts, the counts of each layout, and the reasons."""
    notes: dict[str, str] = {}
    cells = [cell for cell in pairs("cuda") if any(cell in rows for rows in outcomes.values())]
    letters = ", ".join(f"{LAYOUTS[name][0]} {name}" for name in outcomes)
    lines = [f"Layouts: {letters}. V: passed in all of them.", ""]
    lines += table({cell: joined(outcomes, cell, notes) for cell in cells})
    lines += ["", "| layout | ranks | outcomes |", "|---|---|---|"]
    for layout, rows in outcomes.items():
        counts = collections.Counter(rows.get(cell, PENDING)["mark"] for cell in cells)
        shown = ", ".join(f"{count} {mark}" for mark, count in sorted(counts.items()))
        lines.append(f"| {layout} | {ranks_of(layout, nproc)} | {shown} |")
    lines += ["", *(f"{note}: {text}  " for text, note in notes.items())]
    return "\n".join(lines) + "\n"


def joined(outcomes: Outcomes, cell: Cell, notes: dict[str, str]) -> str:
    """Return the letters of the layouts by outcome: "SF; not run: D; r1: T"."""
    by_outcome: dict[str, str] = {}
    for name, rows in outcomes.items():
        key = outcome(rows.get(cell, PENDING), notes)
        by_outcome[key] = by_outcome.get(key, "") + LAYOUTS[name][0]
    if len(by_outcome) == 1:
        return next(iter(by_outcome))
    passed = by_outcome.pop(GOOD, "")
    others = [f"{key}: {letters}" for key, letters in by_outcome.items()]
    return "; ".join(filter(None, [passed, *others]))


def outcome(row: Row, notes: dict[str, str]) -> str:
    """Return V, not run, the number of the refusal's note, or X with a note on the error."""
    if row["mark"] in (GOOD, NOT_RUN):
        return str(row["mark"])
    note = notes.setdefault(row["text"], f"r{1 + len(notes)}")
    return note if row["mark"] == REFUSED else f"{BROKEN} {note}"


def table(texts: dict[Cell, str]) -> Iterator[str]:
    used = set(itertools.chain(*texts))
    marks = [mark for mark in TECHNIQUES if mark in used]
    yield "| | " + " | ".join(TECHNIQUES[mark][0] for mark in marks) + " |"
    yield "|---|" + "---|" * len(marks)
    for row in marks:
        # The table is symmetric; the lower triangle stays empty.
        line = [texts.get((row, mark), "") for mark in marks]
        yield f"| {TECHNIQUES[row][0]} | " + " | ".join(line) + " |"


if __name__ == "__main__":
    main()
