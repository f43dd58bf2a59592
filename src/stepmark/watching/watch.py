"""stepmark watch: one's own job, unmodified, with NCCL's log, flight recorder and a profile."""

import contextlib
import glob
import io
import json
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import stepmark
from stepmark.findings.finding import Severity
from stepmark.ground import json_text, outer_launcher
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.ground.read_text import read_whole
from stepmark.ground.redaction import redact_words
from stepmark.ground.units import ranks_text
from stepmark.job_logs import log_sources, logs
from stepmark.job_logs.log_options import LogsOptions
from stepmark.measuring import child
from stepmark.measuring.delivery import make_folder, write_files
from stepmark.store.reader import WATCHED
from stepmark.store.runs import TRACES, new_run_id
from stepmark.store.view import print_text
from stepmark.tables.export import write_json
from stepmark.traces import trace, trace_messages_verb
from stepmark.traces.trace_messages_text import slow_rank_line
from stepmark.traces.trace_options import BreakdownOptions, MessagesOptions
from stepmark.watching.output_copy import OutputFile, copied_output
from stepmark.watching.watch_cost import WatchedRank, cost_lines, job_lines
from stepmark.watching.watch_options import WatchOptions

SITE = Path(stepmark.__file__).parent / "watching" / "watch_site"
_UNPROFILED = 5  # steps that are timed before the profile, and after it
_RANKS = "ranks"
_NCCL = log_sources.NCCL_FOLDER
_FLIGHT = log_sources.FLIGHT_FOLDER
_NCCL_FILE = "NCCL_DEBUG_FILE"
# New and old names of the flight recorder's settings; torch knows both and warns of the old.
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is added to the job's environment, and settings of the user that stay."""

    variables: Mapping[str, str]
    kept: tuple[str, ...]  # NAME=value
    notes: tuple[str, ...]


def run(options: WatchOptions) -> int:
    """Run the job, print what was seen of it, and return the job's exit code."""
    _check(options)
    folder = options.out.absolute() / new_run_id(datetime.now(UTC))
    make_folder("out", folder)
    for name in (TRACES, _RANKS, _NCCL, _FLIGHT):
        (folder / name).mkdir()
    setup = setup_of(options, folder, os.environ)
    started_at = time.time()
    code = _run_job(options, folder / log_sources.WATCHED_OUTPUT, setup)
    ranks, damaged = read_ranks(folder)
    stepped = {rank.rank for rank in ranks if rank.world_size is not None}
    absent = set(options.ranks or ()) - stepped
    unseen = f"--ranks selects {ranks_text(absent)}, of which no step was seen: no profile"
    notes = (*setup.notes, *damaged, *([unseen] if absent else []))
    end = f"; it ended with exit code {code}" if code else ""
    command = redact_words(options.words)
    print_text((f"# watched: {shlex.join(command)}{end}", f"run {folder}"))
    print_text(f"kept as you set it: {setting}" for setting in setup.kept)
    cost = cost_lines(ranks)
    print_text((*job_lines(ranks, code), *cost, *(f"note: {note}" for note in notes)))
    files = list(_written(folder, setup, started_at))
    of_traces = _of_traces(folder, files) if any(rank.trace for rank in ranks) else {}
    output = [str(folder / log_sources.WATCHED_OUTPUT)] if code else []
    report = _logs([*output, *files])
    if report and code:
        others = [file for file in files if not Path(file).is_relative_to(folder)]
        words = ("stepmark", "logs", str(options.out / folder.name), *others)
        # The first line of `stepmark logs`, or that nothing states why the job ended.
        problems = [one.text for one in report.findings if one.severity is Severity.PROBLEM]
        cause = problems[0] if problems else "unknown: no output or log states it"
        print_text(("", f"cause      {cause}", f"more       {shlex.join(words)}"))
    elif report:
        print_text(("", *report.text()))
    document = {
        "command": command,
        "exit_code": code,
        "run": str(folder),
        "set": {k: v for k, v in setup.variables.items() if k != "PYTHONPATH"},
        "kept": setup.kept,
        "notes": notes,
        "ranks": [msgspec.to_builtins(rank) | {"cost": rank.row} for rank in ranks],
        **of_traces,
        "logs": report.document() if report else None,
    }
    write_json(document, folder / WATCHED)
    write_files(options, "watch", document, [rank.row for rank in ranks])
    return code


def _run_job(options: WatchOptions, path: Path, setup: Setup) -> int:
    """Run the job, keep its output in the file, and return its exit code."""
    output = OutputFile(path)
    try:
        with copied_output(output) as (stdout, stderr):
            code = child.run_in_foreground(
                options.words,
                {**os.environ, **setup.variables},
                stdout=stdout,
                stderr=stderr,
            )
    except OSError as error:
        raise ConfigError("command", options.words[0], f"a program ({error})") from None
    output.close(f"stepmark watch: the command ended with exit code {code}")
    return code


def _check(options: WatchOptions) -> None:
    """Refuse what cannot be watched. Raises ConfigError."""
    options.check_stdout()
    if options.to_stdout:
        field = "json" if options.json == "-" else "csv"
        raise ConfigError(field, "-", "a path: the job writes to stdout")
    if not options.words:
        raise ConfigError("command", None, "give -- and the job's command")
    if shutil.which(options.words[0]) is None:
        raise ConfigError("command", options.words[0], "a program that exists")
    if outer_launcher.is_rank():
        allowed = "started once, and the launcher in it: stepmark watch -- srun python train.py"
        raise ConfigError("watch", "a rank of a launcher", allowed)


def setup_of(options: WatchOptions, folder: Path, user: Mapping[str, str]) -> Setup:
    """Return what to add to the environment. Settings that the user has are never changed."""
    plan = {
        "folder": str(folder),
        "warmup": options.warmup,
        "unprofiled": _UNPROFILED,
        "steps": options.steps,
        "ranks": options.ranks,
        "shapes": not options.no_shapes,
    }
    path = [str(SITE), *([user["PYTHONPATH"]] if user.get("PYTHONPATH") else [])]
    wanted = {
        # Kineto's lines about stages; the errors among them are in the ranks' reports.
        "KINETO_LOG_LEVEL": "6",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        _BUFFER[0]: "2000",
        _DUMP_FILE[0]: str(folder / _FLIGHT / "rank_"),
    }
    notes = []
    config = _nccl_config(user)
    if debug := user.get("NCCL_DEBUG") or config.get("NCCL_DEBUG"):
        notes.append(
            f"NCCL_DEBUG={debug} is yours, so NCCL logs as before; without it, watch has NCCL "
            "write a log of its own"
        )
    else:
        wanted |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": options.nccl_subsys,
            _NCCL_FILE: str(folder / _NCCL / "nccl.%h.%p.log"),
        }
    users = config | dict(user)
    old_names = dict((_BUFFER, _DUMP_FILE))
    kept = {  # by our name: the user's
        name: own
        for name in wanted
        for own in (name if name in users else old_names.get(name, name),)
        if own in users
    }
    return Setup(
        variables={name: value for name, value in wanted.items() if name not in kept}
        | {"PYTHONPATH": os.pathsep.join(path), "STEPMARK_WATCH": json.dumps(plan)},
        kept=tuple(f"{name}={users[name]}" for name in kept.values()),
        notes=tuple(notes),
    )


def _nccl_config(user: Mapping[str, str]) -> dict[str, str]:
    """Return settings of NCCL's own files, which a variable would override."""
    own = Path(user.get("NCCL_CONF_FILE", "~/.nccl.conf")).expanduser()
    settings: dict[str, str] = {}
    for file in (Path("/etc/nccl.conf"), own):
        try:
            lines = read_whole(file, "file").decode(errors="replace").splitlines()
        except ConfigError:
            continue
        pairs = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
        settings |= {name.strip(): value.strip() for name, sign, value in pairs if sign}
    return settings


def read_ranks(folder: Path) -> tuple[list[WatchedRank], list[str]]:
    """Return the reports of processes by rank, and what cannot be read.

    A process without steps is left out where others of its rank made some.
    """
    ranks = []
    damaged = []
    for path in sorted((folder / _RANKS).glob("rank*.json")):
        try:
            ranks.append(json_text.decode(read_whole(path, "rank"), WatchedRank))
        except (ConfigError, ValueError):
            damaged.append(f"{path.name} was not written to its end: its process was killed")
    stepped = {rank.rank for rank in ranks if rank.world_size is not None}
    kept = [rank for rank in ranks if rank.world_size is not None or rank.rank not in stepped]
    return sorted(kept, key=lambda rank: (rank.rank, rank.pid)), damaged


def _of_traces(folder: Path, files: Sequence[str]) -> dict[str, Any]:
    """Print what the traces show, beside NCCL's logs; return it as documents by verb."""
    paths = (str(folder / TRACES),)
    verbs: dict[str, tuple[Callable[[Any], int], Any]] = {
        "breakdown": (trace.breakdown, BreakdownOptions(files=paths)),
        "messages": (trace_messages_verb.messages, MessagesOptions(files=(*paths, *files))),
    }
    documents: dict[str, Any] = {}
    printed = []
    for name, (print_and_write, options) in verbs.items():
        path = folder / f"{name}.json"
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                print_and_write(replace(options, json=str(path)))
            documents[name] = json.loads(path.read_bytes())
        except StepmarkError as error:
            sys.stderr.write(f"stepmark: {error}\n")
        except Exception:  # noqa: BLE001, the exit code is the job's all the same
            traceback.print_exc()
        printed += ["", f"## {name} of the profiled steps", *text.getvalue().splitlines()]
    rows = documents["messages"]["ranks"] if "messages" in documents else ()
    print_text((*(["", slow_rank_line(rows)] * (len(rows) > 1)), *printed))
    return documents


def _logs(files: Sequence[str]) -> logs.LogReport | None:
    """Read NCCL's logs and the flight recorder's dumps, where there are any."""
    try:
        options = LogsOptions(files=tuple(files))
        return logs.read_report(log_sources.collect(files), options) if files else None
    except ConfigError as error:
        sys.stderr.write(f"stepmark: {error}\n")
        return None


def _written(folder: Path, setup: Setup, started_at: float) -> Iterator[str]:
    """Yield the files that NCCL and torch have written since the start."""
    users = dict(text.split("=", 1) for text in setup.kept)
    patterns = [str(folder / _NCCL / "*"), str(folder / _FLIGHT / "*")]
    if _NCCL_FILE in users:
        patterns.append(users[_NCCL_FILE].replace("%h", "*").replace("%p", "*"))
    patterns += [f"{users[name]}[0-9]*" for name in _DUMP_FILE if name in users]
    for path in (path for pattern in patterns for path in sorted(glob.glob(pattern))):
        status = os.stat(path)
        if status.st_size and status.st_mtime >= started_at:
            yield path
