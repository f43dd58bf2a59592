"""stepmark sweep: one measuring command under several settings, in rounds, compared."""

import dataclasses
import itertools
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from stepmark import __version__
from stepmark.cases.sweep import (
    DEFAULT,
    MEASURING,
    MIN_GAIN,
    MOST,
    Setting,
    Sweep,
    flag_of,
    split_values,
)
from stepmark.comparison import sweep_results, tuner_verb
from stepmark.comparison.sweep_options import SweepOptions
from stepmark.comparison.sweep_run import ORDERS, PROGRAM, order_of
from stepmark.ground.errors import ConfigError, StepmarkError, not_one_of
from stepmark.ground.packages import require
from stepmark.ground.redaction import redact_variable, redact_words
from stepmark.measuring.delivery import check_outputs
from stepmark.store import sweeps
from stepmark.store.runs import new_run_id

Swept = list[tuple[str, list[str]]]  # names and their values
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Variables that would make a process a rank of a job that does not exist.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Flags that the sweep sets itself, or with which its tries would overwrite each other's files.
_RESERVED = (
    "--out",
    "--resume",
    "--dry-run",
    "--json",
    "--csv",
    "--html",
    "-J",
    "--output-file",
)
_IMPORT_LIMIT_S = 120.0  # of stepmark, on a slow file system
_VERSION = "import stepmark; print(stepmark.__version__)"


class CommandError(StepmarkError):
    """The command refuses its own flags."""

    exit_code = 2


def run(options: SweepOptions) -> int:
    """Try every setting in every round and compare. Returns the exit code."""
    refuse_ranks(os.environ)
    check_outputs(options, options.out, dry_run=options.dry_run)
    base = dict(os.environ)
    plugin = options.tuner_plugin or base.get(tuner_verb.PLUGIN)
    if options.emit_tuner:
        base.pop(tuner_verb.PLUGIN, None)  # it would override NCCL's choices
    sweep, path = planned(options, base)
    request = None
    if options.emit_tuner:
        request = tuner_verb.request(options.emit_tuner, plugin, sweep, force=options.force)
    if options.dry_run:
        print_commands(sweep)
        return 0
    if request:
        tuner_verb.check_device(request)
    check_tries(sweep, base)
    return sweep_results.run(sweep, path, request, options, base)


def planned(options: SweepOptions, base: Mapping[str, str]) -> tuple[Sweep, Path | None]:
    """Return the sweep of the options, and the folder of one that is resumed.

    base: the environment. Raises ConfigError.
    """
    if options.resume:
        path = sweeps.find(options.out, options.resume)
        return _resumed(path, options), path
    return _new(options, base), None


def check_tries(sweep: Sweep, base: Mapping[str, str]) -> None:
    """Refuse interpreters and flags that cannot be tried. Raises StepmarkError.

    A finished sweep may be looked at on another machine.
    """
    if not sweep.is_complete:
        if not all(setting.executable for setting in sweep.settings):
            require("torch")  # this interpreter measures, too
        check_interpreters(sweep.settings, base)
        _check_command(sweep, base)


def refuse_ranks(variables: Mapping[str, str]) -> None:
    """Refuse to run under a launcher, because a sweep starts processes. Raises ConfigError."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "STEPMARK_HOSTS"):
        if name in variables:
            where = f"{name}={variables[name]}"
            raise ConfigError("sweep", where, "started once, without torchrun, srun or mpirun")
    if variables.get("SLURM_STEP_NUM_TASKS", "") not in ("", "1"):
        raise ConfigError("sweep", "srun", "started once: it starts its own processes")


def _new(options: SweepOptions, base: Mapping[str, str]) -> Sweep:
    check_command(options.words)
    words = (*options.env, *options.flags, *options.words)
    if redact_words(words) != words:  # sweep.json could not be resumed without it
        raise ConfigError(
            "sweep",
            shlex.join(redact_words(words)),
            "without secrets, which a sweep inherits from the environment",
        )
    swept = _settings(options)
    check_flags(options.words, swept)
    now = datetime.now(UTC)
    return Sweep(
        sweep_id=new_run_id(now),
        created_at=now.isoformat(timespec="seconds"),
        stepmark=__version__,
        command=options.words,
        settings=tuple(swept),
        baseline=find_baseline(options.baseline, swept),
        repeats=options.repeats or 5,
        order=options.order or ORDERS[0],
        seed=secrets.randbelow(2**31) if options.seed is None else options.seed,
        timeout_s=options.timeout or 600.0,
        min_gain=MIN_GAIN if options.min_gain is None else options.min_gain,
        notes=notes(swept, base),
    )


def _settings(options: SweepOptions) -> list[Setting]:
    return settings(
        options.env,
        options.flags,
        options.python,
        default=not options.no_default,
        force=options.force,
    )


def _resumed(path: Path, options: SweepOptions) -> Sweep:
    """Return the sweep of --resume, which repeats what failed.

    Rounds, time limit, baseline and gain may be changed.
    """
    sweep = sweeps.read(path)
    if options.words and options.words != sweep.command:
        raise ConfigError(
            "command", shlex.join(options.words), f"none, or {shlex.join(sweep.command)}"
        )
    if options.env or options.flags or options.python is not None:
        names = {setting.name for setting in _settings(options)}
        if changes := names ^ {setting.name for setting in sweep.settings}:
            allowed = "left out, or the settings that the sweep began with"
            raise ConfigError("env", ", ".join(sorted(changes)), allowed)
    for name in ("order", "seed"):
        value = getattr(options, name)
        first = getattr(sweep, name)
        if value not in (None, first):
            raise ConfigError(name, value, f"{first}, with which the sweep began")
    resumed = dataclasses.replace(
        sweep,
        repeats=options.repeats or sweep.repeats,
        timeout_s=options.timeout or sweep.timeout_s,
        baseline=find_baseline(options.baseline or sweep.baseline, sweep.settings),
        min_gain=sweep.min_gain if options.min_gain is None else options.min_gain,
        repeated=len(sweep.tries) if sweep.failed else sweep.repeated,
    )
    return _reopened(sweep, resumed) if sweep.has_race else resumed


def _reopened(sweep: Sweep, resumed: Sweep) -> Sweep:
    """Return a race with changed options. Raises ConfigError after a decision by the old ones.

    Where nothing was selected, it goes on.
    """
    is_selected = bool(sweep.selection and sweep.selection.settings)
    names = ("baseline", "min_gain", "repeats")
    changes = [name for name in names if getattr(sweep, name) != getattr(resumed, name)]
    for name in changes:
        if is_selected or (sweep.dropped and name != "repeats"):
            rule = f"{getattr(sweep, name)}, by which settings were dropped or selected"
            raise ConfigError(name.replace("_", "-"), getattr(resumed, name), rule)
    num_rounds = max((attempt.round for attempt in sweep.tries), default=0)
    if not is_selected and resumed.repeats < num_rounds:
        rule = f"at least {num_rounds}, the rounds so far"
        raise ConfigError("repeats", resumed.repeats, rule)
    return dataclasses.replace(resumed, selection=None) if changes else resumed


def _check_command(sweep: Sweep, base: Mapping[str, str]) -> None:
    """Validate flags by dry runs of the command, in each interpreter. Raises CommandError."""
    distinct = {(setting.flags, setting.executable): setting for setting in sweep.settings}
    for setting in distinct.values():
        command = [*setting.program(PROGRAM), *setting.command(sweep.command), "--dry-run"]
        done = output_of(command, base)
        if done.returncode:
            line = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise CommandError(f"the command: {line.removeprefix('stepmark: ')}")


def print_commands(sweep: Sweep) -> None:
    """Print the shell commands of every round (--dry-run)."""
    for number in range(1, sweep.repeats + 1):
        places = order_of(len(sweep.settings), number, order=sweep.order, seed=sweep.seed)
        for place in places:
            sys.stdout.write(_shell(sweep.settings[place], sweep.command) + "\n")
    count = len(sweep.settings)
    sys.stderr.write(
        f"at most {sweep.repeats} x {count} settings, then fresh rounds of those that are "
        f"selected; seed {sweep.seed}; none was run\n"
    )


def _shell(setting: Setting, command: tuple[str, ...]) -> str:
    words = ["env"]
    words += [word for name, value in setting.variables if not value for word in ("-u", name)]
    words += [f"{name}={value}" for name, value in setting.variables if value]
    program = [setting.executable, "-m", "stepmark"] if setting.python else ["stepmark"]
    return shlex.join([*words, *program, *setting.command(command)])


def settings(
    env: Sequence[str],
    flags: Sequence[str],
    python: str | None = None,
    *,
    default: bool,
    force: bool,
) -> list[Setting]:
    """Return every combination in the order given; with `default` first the one without any.

    Without any is with the first interpreter.
    """
    variables = _parsed(env, "env", _VARIABLE)
    swept = _parsed(flags, "set", _FLAG)
    interpreters = [("", "")] if python is None else parse_interpreters(python)
    if not variables and not swept and python is None:
        allowed = "--env NAME=A,B or --set FLAG=A,B or --python A,B, or several"
        raise ConfigError("env", None, allowed)
    for name, _ in variables:
        if name in _LAUNCHER or name.startswith("STEPMARK_"):
            raise ConfigError("env", name, "a variable that no launcher sets")
    for name, _ in swept:
        if flag_of(name) in _RESERVED:
            raise ConfigError("set", name, "a flag that the sweep does not set itself")
    names = [name for name, _ in (*variables, *swept)]
    combinations = itertools.product(*(values for _, values in (*variables, *swept)))
    each = list(itertools.product(interpreters, combinations))
    if default:
        each.insert(0, (interpreters[0], ("",) * len(names)))
    by_name: dict[str, Setting] = {}
    for (text, executable), values in each:
        pairs = tuple(zip(names, values, strict=True))
        count = len(variables)
        setting = Setting(
            variables=pairs[:count], flags=pairs[count:], python=text, executable=executable
        )
        by_name[setting.name] = setting
    if len(by_name) < 2:
        raise ConfigError("env", next(iter(by_name)), "two settings or more, to be compared")
    if len(by_name) > MOST and not force:
        raise ConfigError("env", f"{len(by_name)} settings", f"at most {MOST}, or --force")
    return list(by_name.values())


def _parsed(texts: Sequence[str], field: str, allowed: "re.Pattern[str]") -> Swept:
    values_by_name: dict[str, list[str]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or not allowed.fullmatch(name):
            raise ConfigError(field, text, "NAME=VALUE,VALUE; an empty value leaves it unset")
        if name in values_by_name:
            raise ConfigError(field, name, "given once: NAME=VALUE,VALUE")
        values = split_values(rest)
        if len(set(values)) < len(values):
            raise ConfigError(field, text, "different values")
        if any(not value.isprintable() for value in values):
            raise ConfigError(field, text, "values in one line of printable characters")
        values_by_name[name] = values
    return list(values_by_name.items())


def find_baseline(name: str | None, settings: Sequence[Setting]) -> str:
    """Return the baseline's name: --baseline, in any order of words, or the default setting."""
    by_words = {frozenset(setting.name.split()): setting.name for setting in settings}
    if name is None:
        return by_words.get(frozenset([DEFAULT]), settings[0].name)
    if (baseline := by_words.get(frozenset(name.split()))) is None:
        raise not_one_of("baseline", name, (setting.name for setting in settings[:8]))
    return baseline


def check_command(command: Sequence[str]) -> None:
    """Refuse a command that a sweep cannot run. Raises ConfigError."""
    verbs = ", ".join(MEASURING)
    if not command:
        raise ConfigError("command", "missing", f"give -- and a measuring verb: {verbs}")
    if command[0] not in MEASURING:
        raise not_one_of("command", command[0], MEASURING, ", a verb that measures")
    for word in command:
        if word.partition("=")[0] in _RESERVED:
            raise ConfigError("command", word, "left out: the sweep sets it itself")


def check_flags(command: Sequence[str], settings: Sequence[Setting]) -> None:
    """Refuse a flag that is both given and swept. Raises ConfigError."""
    words = {word.partition("=")[0] for word in command}
    for name, _ in settings[0].flags:
        if flag_of(name) in words:
            raise ConfigError("set", name, "a flag that the command itself does not give")


def notes(settings: Sequence[Setting], base: Mapping[str, str]) -> tuple[str, ...]:
    """Return remarks on variables that are overridden, constant, or set in a file."""
    swept = [name for name, _ in settings[0].variables]
    remarks = [
        f"{name}={redact_variable(name, base[name])} of your environment is overridden"
        for name in swept
        if name in base
    ]
    constant = {
        name: redact_variable(name, value)
        for name, value in sorted(base.items())
        if name.startswith(("NCCL_", "RCCL_")) and name not in swept
    }
    remarks += [f"{name}={value} is the same for all" for name, value in constant.items()]
    if any(name.startswith("NCCL_") for name in swept):
        files = [Path(base.get("NCCL_CONF_FILE", "~/.nccl.conf")).expanduser()]
        files.append(Path("/etc/nccl.conf"))
        remarks += [f"NCCL also reads {file}" for file in files if os.path.isfile(file)]
    return tuple(remarks)


def parse_interpreters(text: str) -> list[tuple[str, str]]:
    """Return each interpreter as it was typed, with its absolute path; none: this one.

    A virtual environment stands for its bin/python. Links are kept: an environment is found
    by them. Raises ConfigError.
    """
    interpreters = [(word, _executable(word) if word else "") for word in split_values(text)]
    if len({path for _, path in interpreters}) < len(interpreters):
        raise ConfigError("python", text, "different interpreters")
    return interpreters


def _executable(word: str) -> str:
    path = Path(word).expanduser()
    try:
        path = path / "bin" / "python" if path.is_dir() else path
        if not word.isprintable() or not path.is_file():
            raise OSError
    except (OSError, ValueError):
        allowed = (
            "the path of a Python interpreter, or of a virtual environment with bin/python"
        )
        raise ConfigError("python", word, allowed) from None
    return str(path.absolute())


def check_interpreters(settings: Sequence[Setting], base: Mapping[str, str]) -> None:
    """Refuse interpreters that do not import this version of stepmark. Raises ConfigError."""
    words = {setting.executable: setting.python for setting in settings if setting.executable}
    for executable, word in words.items():
        version = _version(executable, word, base)
        if version != __version__:
            allowed = f"an interpreter with stepmark {__version__}, not {version}"
            raise ConfigError("python", word, allowed)


def output_of(
    command: Sequence[str], base: Mapping[str, str], limit_s: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command without input in an environment, and return what it printed."""
    return subprocess.run(
        command,
        env=dict(base),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=limit_s,
    )


def _version(executable: str, word: str, base: Mapping[str, str]) -> str:
    try:
        done = output_of([executable, "-c", _VERSION], base, _IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        reason = f"it took more than {_IMPORT_LIMIT_S:.0f} s"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if done.returncode == 0:
            return (done.stdout.split() or ["none"])[-1]
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    allowed = f"an interpreter that imports stepmark {__version__} ({reason})"
    raise ConfigError("python", word, allowed)
