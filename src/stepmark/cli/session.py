"""From cases to a run on disk: start ranks, measure, store, show. Shared by measuring verbs."""

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stepmark.cli import interrupts
from stepmark.cli.options import Values
from stepmark.cli.progress import Progress
from stepmark.core.case import OpCase
from stepmark.core.errors import ConfigError
from stepmark.core.plan import Entry, How, OpHow, Plan
from stepmark.core.record import Failed, Measured, RunInfo
from stepmark.core.units import parse_duration

if TYPE_CHECKING:
    from stepmark.app.view import View
    from stepmark.bench.context import MeasureContext
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
    asked = values.get("device")
    if asked not in (None, "cuda", "cpu"):
        raise ConfigError("device", asked, "cuda or cpu")
    if asked == "cpu" or (asked is None and not _has_driver()):
        return "cpu"  # known without torch, which takes seconds to import
    import torch  # noqa: PLC0415

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ConfigError("device", "cuda", "cpu, since torch finds no accelerator here")
    return asked or ("cuda" if available else "cpu")


def _has_driver() -> bool:
    """False only where no accelerator can be: Linux without the device file of any driver."""
    if sys.platform != "linux":
        return True
    # Of NVIDIA, of AMD, of Tegra, of Windows' Linux. torch decides where there is one.
    names = ("nvidia*", "kfd", "nvhost*", "nvmap", "dxg")
    return any(next(Path("/dev").glob(name), None) for name in names)


def num_ranks(values: Values, device: str) -> int:
    """--nproc; under a launcher the world it started."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    text = values.get("nproc") or "1"
    most = _num_accelerators() if device == "cuda" else 1024
    if text == "all":
        return most if device == "cuda" else 1
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError("nproc", text, f"all, or from 1 to {most}")
    return int(text)


def _num_accelerators() -> int:
    import torch  # noqa: PLC0415

    return torch.cuda.device_count()


def op_how(values: Values) -> OpHow:
    budget = values.get("budget")
    return OpHow(budget_s=None if budget is None else parse_duration(budget, "budget"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A run to write to (rank 0) and what of the plan is measured already (all ranks)."""

    run_id: str
    writer: "RunWriter | None"
    done: "set[Done]"


def open_run(
    planned: "set[Done]",
    values: Values,
    context: "MeasureContext",
    *,
    settings: dict[str, str] | None = None,
    going_on: Path | None = None,
) -> Opened:
    """A new run, the one of --resume, or the one that earlier ranks began. For all ranks."""
    from stepmark.bench.environment import capture, local_device  # noqa: PLC0415
    from stepmark.store.runs import new_run_id  # noqa: PLC0415

    ranks = context.ranks
    devices = ranks.gather(local_device(ranks.device, ranks.rank))
    run_id = ranks.decide(lambda: new_run_id(datetime.now(UTC)))
    writer: RunWriter | None = None
    done: set[Done] = set()
    problem: Exception | None = None
    if ranks.rank == 0:
        info = RunInfo(
            run_id=run_id,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            command="stepmark " + " ".join(sys.argv[1:]),
            environment=capture(devices),
            num_cases=len(planned),
            settings=settings or {},
        )
        try:
            writer, done = _open(values, info, planned, going_on)
        except ConfigError as error:
            problem = error
        if writer:
            run_id = writer.path.name
    problem, done, run_id = ranks.decide(lambda: (problem, done, run_id))
    if problem is not None:
        raise problem
    return Opened(run_id=run_id, writer=writer, done=done)


def run_to_resume(values: Values, name: str) -> Path:
    """The folder that --resume names. Raises ConfigError."""
    from stepmark.store.reader import find_run  # noqa: PLC0415

    return find_run(Path(values.get("out") or "runs"), name)


def _open(
    values: Values, info: RunInfo, planned: "set[Done]", going_on: Path | None
) -> "tuple[RunWriter, set[Done]]":
    """One run is one plan."""
    from stepmark.store.reader import read_info  # noqa: PLC0415
    from stepmark.store.runs import RunWriter  # noqa: PLC0415

    if going_on is not None:
        return RunWriter.go_on(going_on)
    root = Path(values.get("out") or "runs")
    if not (name := values.get("resume")):
        return RunWriter.create(root, info), set()
    path = run_to_resume(values, name)
    force = bool(values.get("force"))
    writer, done = RunWriter.resume(path, info.environment, force=force)
    if not done <= planned and not force:
        writer.close()
        raise ConfigError("resume", path, f"the flags it began with: {read_info(path).command}")
    return writer, done


def measure(
    cases: Sequence[OpCase],
    values: Values,
    context: "MeasureContext",
    *,
    settings: dict[str, str] | None = None,
    how: OpHow | None = None,
) -> Outcome | None:
    """Run operators and store each record as it comes. None on ranks other than 0.

    Ctrl-C and SIGTERM keep every finished case; the exit code says what happened.
    """
    from stepmark.bench import run_cases  # noqa: PLC0415

    planned = {(case.case_id, 1) for case in cases}
    opened = open_run(planned, values, context, settings=settings)
    entries = tuple(Entry(position=i, launch=1, case=case) for i, case in enumerate(cases))
    plan = Plan(
        command="op",
        device=context.ranks.device.type,
        world_size=context.ranks.num_ranks,
        entries=entries,
        how=How(op=how or op_how(values)),
    )
    todo = [entry for entry in entries if (entry.case.case_id, 1) not in opened.done]
    sink = Progress(len(todo), opened.writer, quiet=context.ranks.rank != 0)
    here = dataclasses.replace(context, run_id=opened.run_id)
    benches = run_cases.make_benches(plan, here)
    code = ended(lambda: run_cases.run(todo, here, benches, _Unwatched(), sink), sink)
    return None if opened.writer is None else finish(opened.writer, code, sink)


class _Unwatched:
    """The guard of a process that nobody watches."""

    def begin(self, position: int, limit_s: float) -> None: ...

    def idle(self, limit_s: float) -> None: ...


def ended(work: Callable[[], object], sink: Progress, *, terminable: bool = True) -> int:
    """Do the work; 0, or 130 and 143 for an interrupted and a terminated one.

    Without `terminable`, what SIGTERM does stays as it is.
    """
    with _terminable() if terminable else contextlib.nullcontext():
        try:
            interrupts.raise_if_seen()
            work()
        except KeyboardInterrupt:
            return 130
        except Terminated:
            return 143
        finally:
            sink.close()
    return 0


def finish(writer: "RunWriter", code: int, sink: Progress) -> Outcome:
    """Close the run; `code` other than 0 says that it was cut short."""
    from stepmark.app.view import view  # noqa: PLC0415

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
    if any(row.get("over_limit") for row in (*seen.rows, *seen.comm_rows, *seen.train_rows)):
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


def deliver(outcome: Outcome, values: Values) -> None:
    """The rows: as a table, in another tool's style, as CSV and JSON."""
    from stepmark.app.view import console  # noqa: PLC0415
    from stepmark.report import styles  # noqa: PLC0415
    from stepmark.report.op_columns import OP_COLUMNS  # noqa: PLC0415
    from stepmark.report.row_tables import print_rows  # noqa: PLC0415
    from stepmark.store.export import write_tables  # noqa: PLC0415

    seen = outcome.view
    json, csv = values.get("json"), values.get("csv")
    grouped = by_model(seen.rows)
    if style := values.get("style"):
        made = styles.STYLES[style](seen.records, seen.run)
        sys.stdout.write(styles.as_text(made))
    if json:
        write_tables(grouped if _is_folder(json) else {"rows": seen.rows}, json, "json")
    if csv:
        write_tables(grouped if _is_folder(csv) else {"rows": seen.rows}, csv, "csv")
    if not style and "-" not in (json, csv):
        print_rows(seen.rows, console(), OP_COLUMNS)
    sys.stderr.write(f"run {outcome.path}\n")


def check_outputs(values: Values) -> None:
    """What can be refused before an hour of measuring is refused before."""
    from stepmark.report import styles  # noqa: PLC0415

    op_how(values)
    if values.get("dry_run"):
        return
    style = values.get("style")
    if style and style not in styles.STYLES:
        raise ConfigError("style", style, f"one of {', '.join(styles.STYLES)}")
    if values.get("json") == values.get("csv") == "-":
        raise ConfigError("csv", "-", "a path: stdout is already taken by --json")
    for name in ("json", "csv"):
        target = values.get(name)
        if not target or target == "-":
            continue
        make_folder(name, Path(target) if _is_folder(target) else Path(target).parent)
    if out := values.get("out"):
        make_folder("out", Path(out))


def make_folder(name: str, folder: Path) -> None:
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


def by_model(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By a name that a file can have: of the model, or of the family."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = str(row.get("model") or row.get("family"))
        groups.setdefault(
            "".join(c if c.isalnum() or c in "._-" else "_" for c in name), []
        ).append(row)
    return groups
