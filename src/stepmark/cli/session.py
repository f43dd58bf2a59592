"""From cases to a run on disk: start ranks, measure, store, show. Shared by measuring verbs."""

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stepmark.cli import interrupts
from stepmark.cli.options import Values
from stepmark.core.case import Case
from stepmark.core.collectives import RedOp
from stepmark.core.comm_case import CommCase
from stepmark.core.errors import ConfigError
from stepmark.core.record import AnyCase, Failed, Measured, Record, RunInfo, Skipped
from stepmark.core.units import format_bytes, format_time, parse_duration

if TYPE_CHECKING:
    from rich.progress import Progress

    from stepmark.bench.runner import Rig
    from stepmark.bench.stopping import Effort
    from stepmark.cli.view import View
    from stepmark.store.runs import Done, RunWriter


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, no ordinary handler may swallow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished run: where it lies, what it holds, how the process should end."""

    path: Path
    view: "View"
    exit_code: int


def device_type(values: Values) -> str:
    """cuda or cpu; the accelerator where there is one."""
    import torch  # noqa: PLC0415

    asked = values.get("device")
    if asked not in (None, "cuda", "cpu"):
        raise ConfigError("device", asked, "cuda or cpu")
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ConfigError("device", "cuda", "cpu, since torch finds no accelerator here")
    return asked or ("cuda" if available else "cpu")


def num_ranks(values: Values, device: str) -> int:
    """--nproc; under a launcher the world it started."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    text = values.get("nproc") or "1"
    import torch  # noqa: PLC0415

    most = torch.cuda.device_count() if device == "cuda" else 1024
    if text == "all":
        return most if device == "cuda" else 1
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError("nproc", text, f"all, or from 1 to {most}")
    return int(text)


def effort(values: Values) -> "Effort":
    from stepmark.bench.stopping import Effort  # noqa: PLC0415

    budget = values.get("budget")
    return Effort(total_s=None if budget is None else parse_duration(budget, "budget"))


def make_rig(device: str) -> "Rig":
    """This rank's device, ready to measure."""
    import psutil  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from stepmark.bench.environment import capabilities  # noqa: PLC0415
    from stepmark.bench.ranks import join  # noqa: PLC0415
    from stepmark.bench.runner import Rig  # noqa: PLC0415

    ranks = join(device)
    if device == "cuda":
        cache = torch.cuda.get_device_properties(ranks.device).L2_cache_size
        return Rig(
            ranks=ranks,
            capabilities=capabilities(ranks.device),
            cache_bytes=cache,
            free_bytes=lambda: torch.cuda.mem_get_info(ranks.device)[0],
            device_index=ranks.device.index,
        )
    return Rig(
        ranks=ranks,
        capabilities=capabilities(ranks.device),
        cache_bytes=_cpu_cache_bytes(),
        free_bytes=lambda: psutil.virtual_memory().available // ranks.num_ranks,
        device_index=None,
    )


def _cpu_cache_bytes() -> int:
    """The largest cache Linux tells of; 32 MiB where it tells none."""
    sizes = [32 * 2**10]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]))
    return max(sizes) * 2**10


def measure(
    cases: Sequence[Case],
    values: Values,
    rig: "Rig",
    *,
    settings: dict[str, str] | None = None,
    how: "Effort | None" = None,
) -> Outcome | None:
    """Run the cases and store each record as it comes. None on ranks other than 0.

    Ctrl-C and SIGTERM keep every finished case; the exit code says what happened.
    """
    from stepmark.bench import runner  # noqa: PLC0415
    from stepmark.bench.environment import capture, local_device  # noqa: PLC0415
    from stepmark.store.runs import new_run_id  # noqa: PLC0415

    ranks = rig.ranks
    devices = ranks.gather(local_device(ranks.device, ranks.rank))
    run_id = ranks.decide(lambda: new_run_id(datetime.now(UTC)))
    writer, done, info = None, _nothing_done(), None
    problem: Exception | None = None
    if ranks.rank == 0:
        info = RunInfo(
            run_id=run_id,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            command="stepmark " + " ".join(sys.argv[1:]),
            environment=capture(devices),
            num_cases=len(cases),
            settings=settings or {},
        )
        try:
            writer, done = _open(values, info, {(case.case_id, 1) for case in cases})
        except ConfigError as error:
            problem = error
    problem, done = ranks.decide(lambda: (problem, done))
    if problem is not None:
        raise problem
    todo = [case for case in cases if (case.case_id, 1) not in done]
    sink = _Progress(len(todo), writer, quiet=ranks.rank != 0)
    code = 0
    with _terminable():
        try:
            interrupts.raise_if_seen()
            runner.run(
                todo, rig, how or effort(values), run_id=_name(writer, run_id), sink=sink
            )
        except KeyboardInterrupt:
            code = 130
        except Terminated:
            code = 143
        finally:
            sink.close()
    if writer is None:
        return None
    return _finish(writer, code, sink)


def _nothing_done() -> "set[Done]":
    return set()


def _open(values: Values, info: RunInfo, planned: "set[Done]") -> "tuple[RunWriter, set[Done]]":
    """A new run, or the one to resume with its measured cases. One run is one plan."""
    from stepmark.store.runs import RunWriter, find_run, read_run  # noqa: PLC0415

    root = Path(values.get("out") or "runs")
    if not (name := values.get("resume")):
        return RunWriter.create(root, info), set()
    path = find_run(root, name)
    force = bool(values.get("force"))
    writer, done = RunWriter.resume(path, info.environment, force=force)
    if not done <= planned and not force:
        writer.close()
        raise ConfigError("resume", path, f"the flags it began with: {read_run(path).command}")
    return writer, done


def _name(writer: "RunWriter | None", run_id: str) -> str:
    return writer.path.name if writer else run_id


def _finish(writer: "RunWriter", code: int, sink: "_Progress") -> Outcome:
    from stepmark.cli.view import view  # noqa: PLC0415

    writer.close()
    seen = view(writer.path)
    if code:
        sink.say(
            f"{'interrupted' if code == 130 else 'terminated'}; finished cases are in "
            f"{writer.path}; go on with: {seen.run.command} --resume {writer.path}"
        )
    return Outcome(path=writer.path, view=seen, exit_code=code or exit_code(seen))


def exit_code(seen: "View") -> int:
    """1 for wrong results or figures above a binding limit, 3 for failed cases, else 0."""
    if any(isinstance(r, Measured) and r.num_wrong for r in seen.records):
        return 1
    if any(row.get("over_limit") for row in seen.rows):
        return 1
    return 3 if any(isinstance(r, Failed) for r in seen.records) else 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Progress:
    """The sink of a run: stores a record, then says so. A bar on a terminal, else lines."""

    def __init__(self, total: int, writer: "RunWriter | None", *, quiet: bool) -> None:
        self._total, self._writer, self._quiet = total, writer, quiet
        self._count = 0
        self._bar = _bar(total) if not quiet and sys.stderr.isatty() else None

    def __call__(self, record: Record) -> None:
        if self._writer is not None:
            self._writer.append(record)
        self._count += 1
        if not self._quiet:
            self._show(record)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        self.close()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _show(self, record: Record) -> None:
        text = f"{_named(record.case)}: {_outcome(record)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, description=text)
        else:
            self.say(f"[{self._count}/{self._total}] {text}")


def _named(case: AnyCase) -> str:
    """What a line of progress calls a case."""
    from stepmark.report.tables import shape_text  # noqa: PLC0415

    if isinstance(case, CommCase):
        words = [case.family, format_bytes(case.message_bytes), case.dtype]
        words += [str(case.redop)] if case.redop is not RedOp.NONE else []
        words += [f"{case.pair[0]} to {case.pair[1]}"] if case.pair else []
        words += ["in place"] if case.in_place else []
        words += [f"beside {case.beside}"] if case.beside else []
        return " ".join((*words, case.mode))
    return f"{case.family} {_pass(case)}{shape_text(case.op)} {case.dtype} {case.backend}"


def _pass(case: Case) -> str:
    label = case.labels[0] if case.labels else None
    phase = getattr(case.op, "phase", None) or (label.phase if label else None)
    role = f"{label.role} " if label and label.role else ""
    return f"{role}{phase} " if phase else role


def _bar(total: int) -> "Progress":
    """Started: what was measured last, how far, and how long it may still take."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
    )
    bar.add_task("", total=total)
    bar.start()
    return bar


def _outcome(record: Record) -> str:
    from stepmark.core.stats import slowest_per_sample, summarize  # noqa: PLC0415

    match record:
        case Measured():
            time_s = summarize(slowest_per_sample(record.samples.seconds)).median
            return format_time(time_s) + (" WRONG" if record.num_wrong else "")
        case Skipped():
            return f"skipped: {record.reason}"
        case Failed():
            return f"failed ({record.cause}): {record.message}"


def deliver(outcome: Outcome, values: Values) -> None:
    """The rows: as a table, in another tool's style, as CSV and JSON."""
    from stepmark.cli.view import console  # noqa: PLC0415
    from stepmark.report import printing, styles  # noqa: PLC0415
    from stepmark.store.export import write_tables  # noqa: PLC0415

    seen = outcome.view
    json, csv = values.get("json"), values.get("csv")
    by_model = _by_model(seen.rows)
    if style := values.get("style"):
        made = styles.STYLES[style](seen.records, seen.run)
        sys.stdout.write(styles.as_text(made))
    if json:
        write_tables(by_model if _is_folder(json) else {"rows": seen.rows}, json, "json")
    if csv:
        write_tables(by_model if _is_folder(csv) else {"rows": seen.rows}, csv, "csv")
    if not style and "-" not in (json, csv):
        printing.print_rows(seen.rows, console())
    sys.stderr.write(f"run {outcome.path}\n")


def check_outputs(values: Values) -> None:
    """What can be refused before an hour of measuring is refused before."""
    from stepmark.report import styles  # noqa: PLC0415

    effort(values)
    if values.get("dry_run"):
        return
    style = values.get("style")
    if style and style not in styles.STYLES:
        raise ConfigError("style", style, f"one of {', '.join(styles.STYLES)}")
    for name in ("json", "csv"):
        target = values.get(name)
        if not target or target == "-":
            continue
        _make_folder(name, Path(target) if _is_folder(target) else Path(target).parent)
    if out := values.get("out"):
        _make_folder("out", Path(out))


def _make_folder(name: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(name, folder, f"a folder that can be written ({reason})") from None
    try:
        # Permissions do not tell of a read-only or a made-up file system.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(name, folder, f"a folder that can be written ({reason})") from None


def _is_folder(target: str) -> bool:
    return target.endswith("/") or Path(target).is_dir()


def _by_model(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = str(row.get("model") or row.get("family"))
        groups.setdefault(
            "".join(c if c.isalnum() or c in "._-" else "_" for c in name), []
        ).append(row)
    return groups
