"""The command line: the verbs, and the exit code and message of each error."""

import errno
import io
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import typer

from stepmark import __version__
from stepmark.cli.flags import group, verb
from stepmark.core.errors import ConfigError, StepmarkError, nearest
from stepmark.core.options import load
from stepmark.launch import outer_launcher, signals

COMPLETE = "_STEPMARK_COMPLETE"  # set by the scripts of shells, see completion.py
_SIGNAL_S = 0.5  # in which a launcher signals all ranks


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb. help: its line in `stepmark --help`; doc: the first line of its own --help.

    options and handler: "module:name". Without options, the handler is a group of commands, or
    makes the command from the arguments. examples: command lines after `stepmark`.
    """

    help: str
    handler: str
    options: str = ""
    doc: str = ""
    examples: tuple[str, ...] = ()


_SHARED, _MEASURE_NOTHING = "stepmark.core.option_groups", "stepmark.core.verb_options"
VERBS = {
    "run": Verb(
        "The main job: predict a training step, measure it, explain it.",
        "stepmark.app.run:run",
        "stepmark.core.run_options:RunOptions",
        "Calibrate, predict a training step, train it, and say where the difference goes.",
        (
            "run",
            "run llama-3.1-8b --nproc 8 --budget 10m",
            "run llama-3.1-8b --scale tiny --device cpu --nproc 2",
        ),
    ),
    "doctor": Verb(
        "Show devices, peaks, health and what would run.",
        "stepmark.app.doctor:run",
        f"{_MEASURE_NOTHING}:DoctorOptions",
        "What this machine is; what would be measured, what not, and why.",
        (
            "doctor",
            "doctor --nodes --out /shared/checks   # on each host, before a big job",
            "doctor --nodes --from /shared/checks  # the verdict on all of them",
        ),
    ),
    "check": Verb(
        "Measure a reference run's cases again; is any slower?",
        "stepmark.app.check:run",
        f"{_MEASURE_NOTHING}:CheckOptions",
        "Measure a reference run's cases again; exit 1 if any is slower beyond noise.",
        (
            "check --baseline latest",
            "check --baseline runs/20260101-120000-abcd --budget 5m",
        ),
    ),
    "compare": Verb(
        "Runs, nccl-tests files, CSVs: ratios and verdicts.",
        "stepmark.app.compare:run",
        f"{_MEASURE_NOTHING}:CompareOptions",
        "Ratio of speeds per size or shape, its 99 % interval over launches, and a verdict.",
        (
            "compare before=RUN1 after=RUN2",
            "compare all_reduce_a.txt all_reduce_b.txt --range 1M-1G",
            "compare RUN1,RUN2,RUN3 RUN4,RUN5,RUN6 --fail-if-slower 5%",
        ),
    ),
    "report": Verb(
        "Write report.html of a run.",
        "stepmark.app.runs:run_report",
        f"{_MEASURE_NOTHING}:ReportOptions",
        "Write report.html of a run: roofline, tables, curves, commands, environment. Of two "
        "runs: the ledgers of their profiled training steps.",
        (
            "report",
            "report RUN1 RUN2",
        ),
    ),
    "comm": Verb(
        "Measure collectives: nccl-tests' flags, no MPI.",
        "stepmark.app.comm:run",
        "stepmark.core.comm_options:CommOptions",
        "Measure collectives: nccl-tests' flags, table and figures; no MPI.",
        (
            "comm all_reduce -b 1K -e 1G",
            "comm all_gather reduce_scatter -d bf16 --nproc 8 --csv -",
            "comm all_reduce --model llama-3.1-70b --mbs 1",
        ),
    ),
    "train": Verb(
        "Measure training steps: single, DDP, FSDP, TP, PP.",
        "stepmark.app.train:run",
        "stepmark.core.train_options:TrainOptions",
        "Train for real: steps of single, DDP, FSDP, TP, PP by phase, MFU by convention.",
        (
            "train llama-3.1-8b --strategy fsdp --mbs 1,2 --compile",
            "train llama-3.1-8b --scale tiny --device cpu --nproc 2",
            "train llama-3.1-70b --nproc 64 --tp 8 --device h200 --dry-run",
        ),
    ),
    "calibrate": Verb(
        "Measure the parts from which a step is predicted.",
        "stepmark.app.calibrate:run",
        "stepmark.core.train_options:CalibrateOptions",
        "Measure the parts of one training step: kernels, host, collectives, power.",
        (
            "calibrate llama-3.1-8b --nproc 8",
            "calibrate llama-3.1-8b --device h200 --dry-run",
        ),
    ),
    "predict": Verb(
        "Step time, memory, power of a configuration.",
        "stepmark.app.predict:run",
        "stepmark.core.predict_options:PredictOptions",
        "Predict a training step from measured parts, or from a device's data sheet.",
        (
            "predict llama-3.1-70b --nproc 1024 --tp 8 --device h200",
            "predict --from-run latest --what-if link=2x",
            "predict workload.json --device h100-sxm",
        ),
    ),
    "replay": Verb(
        "Run the messages of a workload file on real ranks.",
        "stepmark.app.replay:run",
        "stepmark.core.replay_options:ReplayOptions",
        "Run a workload's messages, and the time of its computation, on real ranks.",
        (
            "replay workload.json --nproc 8",
            "replay workload.json --shrink --nproc 2 --device cpu --comm-only",
        ),
    ),
    "resume": Verb(
        "Measure what is left of a run that was cut short.",
        "stepmark.app.measure:resume",
        f"{_SHARED}:ResumeOptions",
        "Measure what is left of a run that was cut short; measured cases are skipped.",
        (
            "resume",
            "resume 20260101-120000-abcd",
        ),
    ),
    "op": Verb(
        "Measure operators: one family, or all of a model's layer.", "stepmark.cli.op:command"
    ),
    "workload": Verb(
        "What a step does: generate, show, convert, fill, capture.", "stepmark.cli.workload:app"
    ),
    "trace": Verb("Profiler traces: where did the step go?", "stepmark.cli.trace:app"),
    "runs": Verb("List, show, export and query earlier runs.", "stepmark.cli.runs:app"),
    "sweep": Verb(
        "The same command under several settings, compared.",
        "stepmark.app.sweep:run",
        f"{_MEASURE_NOTHING}:SweepOptions",
        "Measure the same command under several settings, in interleaved rounds, and compare.",
        (
            "sweep --env NCCL_ALGO=Ring,Tree -- comm all_reduce -b 1M -e 1G",
            "sweep --set ac=none,full -- train llama-3.1-8b",
            "sweep --python .venv-a,.venv-b -- op gemm --model llama-3.1-8b",
        ),
    ),
    "watch": Verb(
        "Your own job, unmodified: its steps, messages, slow rank.",
        "stepmark.app.watch:run",
        f"{_MEASURE_NOTHING}:WatchOptions",
        "Run a job as it is, with NCCL's log and a profile of a few steps; print what it does.",
        (
            "watch -- torchrun --nproc-per-node 8 train.py",
            "watch --warmup 20 --steps 5 -- python train.py",
        ),
    ),
    "launch": Verb(
        "Print or submit a job of several hosts: Slurm, torchrun, mpirun, pssh.",
        "stepmark.cli.launch:command",
    ),
    "logs": Verb(
        "Read NCCL logs, flight-recorder dumps, tables of results.",
        "stepmark.app.logs:run",
        f"{_MEASURE_NOTHING}:LogsOptions",
        "Read a job's logs: transports, mistakes, hangs, and how often each message is sent.",
        (
            "logs nccl-*.log",
            "logs job-folder --histogram --bins pow2",
        ),
    ),
    "completion": Verb(
        "Print a script that completes commands in bash, zsh or fish.",
        "stepmark.cli.completion:run",
        f"{_MEASURE_NOTHING}:CompletionOptions",
        "Print a script that completes verbs, flags, choices, models and runs in a shell.",
        (
            "completion bash > ~/.local/share/bash-completion/completions/stepmark",
            "completion zsh > ~/.zfunc/_stepmark    # a folder of $fpath",
            "completion fish > ~/.config/fish/completions/stepmark.fish",
        ),
    ),
}


TOPICS = {
    "Start": ("run", "doctor"),
    "Measure": ("op", "comm", "train", "calibrate", "replay", "sweep", "resume"),
    "Predict": ("predict", "workload"),
    "Diagnose a job": ("trace", "logs", "watch"),
    "Compare and report": ("compare", "check", "report", "runs"),
    "Clusters and shells": ("launch", "completion"),
}
_DOC = "How fast should this model train, how fast does it, and where does the time go?"
_FIRST_SCREEN = f"""\
stepmark {__version__}: {_DOC[0].lower()}{_DOC[1:]}

Start with:
  stepmark run                              predict a training step, measure it, explain it
  stepmark doctor                           what this machine is, and what would run on it
  stepmark comm all_reduce                  a collective by message size, as nccl-tests does
  stepmark op gemm --model llama-3.1-8b     the matrix products of a model, one by one
  stepmark predict llama-3.1-70b --nproc 1024 --tp 8 --device h200
                                            step time and memory without any GPU

Read more:
  stepmark --help                           all verbs, by topic
  stepmark VERB --help                      the options of a verb, with examples
  stepmark completion bash                  completion for bash, zsh or fish
"""


def command(name: str, arguments: list[str]) -> Any:
    """Return the command of a verb, or its group of commands."""
    entry = VERBS[name]
    if entry.options:
        return verb(load(entry.options), entry.handler, entry.doc, *entry.examples)
    handler = load(entry.handler)
    return handler if isinstance(handler, typer.Typer) else handler(arguments)


def app() -> Any:
    """Return the program with all its verbs."""
    verbs = {name: (entry.help, partial(command, name)) for name, entry in VERBS.items()}
    program = group(_DOC, verbs, TOPICS)
    program.callback()(_options)
    return program


def _version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"stepmark {__version__}")
        raise typer.Exit(0)


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="print the version"
    ),
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run a verb; bad input is one line on stderr and exit code 2, never a traceback."""
    signals.watch()
    checked_stdout()
    if sys.argv[1:2] == ["doctor"]:  # each host by itself
        os.environ.pop(outer_launcher.HOSTS, None)
    code = _job_status() if outer_launcher.is_agent() else status(sys.argv[1:])
    if outer_launcher.is_rank():
        if code in (130, 143):  # other ranks must get the signal before they miss this one
            time.sleep(_SIGNAL_S)
        # The launcher would see a failed rank where a thread of torch aborts the teardown.
        with suppress(OSError, ConfigError):  # already complained about
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _job_status() -> int:
    """Run the command line as the leading agent of a job, or serve its leader."""
    try:
        job = load("stepmark.launch.job:current")()
        if not job.leads:
            code: int = load("stepmark.launch.agent:serve")(job)
            return code
        leader = load("stepmark.launch.leader:leader")()
    except StepmarkError as error:
        return _complain(str(error), error.exit_code)
    code = 1
    try:
        code = status(sys.argv[1:])
    finally:
        if leader is not None:
            leader.end(code)
    return code


class _Stdout(io.FileIO):
    """Standard output whose failure (a full disk, a closed descriptor) is a ConfigError."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # status() handles it
            raise
        except OSError as error:
            # The interpreter flushes at exit: what is left is discarded.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            reason = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise ConfigError(
                "output", "stdout", f"one that can be written ({reason})"
            ) from None


def checked_stdout() -> None:
    """Make a failure to write standard output a ConfigError."""
    stream: TextIO | None = sys.stdout
    if stream is None:  # closed by the caller; no other file may get its number
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
    encoding = stream.encoding if stream else None
    is_utf8 = (encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "w", closefd=False)),
        encoding=encoding,
        # A terminal without a character shows ?, and the table stays in line.
        errors=stream.errors if stream and is_utf8 else "replace",
        line_buffering=bool(stream and stream.line_buffering),
    )


def status(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        code = _code(arguments)
        sys.stdout.flush()
    except StepmarkError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", 130)
    except (BrokenPipeError, SystemExit) as stop:
        # typer turns a broken pipe into SystemExit(1), which would be a failed check.
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        # The reader of our output has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except typer.BadParameter.__mro__[2] as error:  # type: ignore[misc]
        # typer's own usage errors; their class is not public under a stable name.
        return _usage(error)
    return code


def _code(arguments: list[str]) -> int:
    try:
        if COMPLETE in os.environ:
            code: int = load("stepmark.cli.completion:answer")()
            return code
        if not arguments:
            sys.stdout.write(_FIRST_SCREEN)
            return 0
        result: Any = app()(arguments, standalone_mode=False)
    except typer.Exit as stop:
        code = int(stop.exit_code)
        swallowed = isinstance(stop.__context__, KeyboardInterrupt)
        return _complain("interrupted", code) if swallowed else code
    return result if isinstance(result, int) else 0


def _usage(error: Any) -> int:
    """Complain about an option that does not exist, or that lacks its value or has too much."""
    option, context = error.option_name, error.ctx
    if not hasattr(error, "possibilities"):  # the option exists
        values = "without" if "does not take" in error.message else "with"
        return _complain(str(ConfigError(option, "given", f"given {values} a value")), 2)
    parameters = context.command.params
    words = [word for each in parameters for word in (*each.opts, *each.secondary_opts)]
    near = nearest(option, words)
    rule = f"did you mean {near[0]}?" if near else "one of the options of this command"
    page = "--help-all" if "--help-all" in words else "--help"
    text = f"{ConfigError(option, 'given', rule)} See {context.command_path} {page}."
    return _complain(text, 2)


def _complain(text: str, code: int) -> int:
    if outer_launcher.is_first():  # every rank raises the same error
        sys.stderr.write(f"stepmark: {text}\n")
    return code
