"""stepmark sweep: one measuring command under several settings, in rounds, compared."""

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.cli.options import Flag, Values, as_command
from stepmark.core.errors import ConfigError, StepmarkError

if TYPE_CHECKING:
    from stepmark.core.sweep import Setting, Sweep

# Of these a run is compared; they take --out and --dry-run.
MEASURING = ("comm", "op", "train", "run")

COMMAND = (
    Flag(
        name="words",
        kind=list[str],
        help="-- and a command that measures: -- comm all_reduce -b 1K -e 1G",
        argument=True,
    ),
)
WHAT = (
    Flag(
        name="env",
        kind=list[str],
        help=r"NAME=A,B: values of a variable; none (NAME=,B): unset; \, is a comma",
    ),
    Flag(
        name="flags",
        kind=list[str],
        names=("--set",),
        help="NAME=A,B: values of the command's flag --NAME",
    ),
    Flag(
        name="no_default",
        kind=bool,
        default=False,
        names=("--no-default",),
        help="without the setting in which nothing is set",
    ),
    Flag(name="baseline", kind=str, help="setting to compare with [default, or the first]"),
)
HOW = (
    Flag(name="repeats", kind=int, help="rounds: each measures every setting once [5]"),
    Flag(name="order", kind=str, help="interleaved (a new order each round) or fixed"),
    Flag(name="seed", kind=int, help="of the orders [random; it is kept]"),
    Flag(name="timeout", kind=str, help="a setting that takes longer is left out [10m]"),
    Flag(name="budget", kind=str, help="no further round that would end after this"),
    Flag(name="out", kind=str, default="sweeps", help="folder of sweeps"),
    Flag(name="resume", kind=str, help="go on with this sweep: what is missing, more rounds"),
    Flag(
        name="force",
        kind=bool,
        default=False,
        names=("--force",),
        help="more than 64 settings; overwrite the tuner file",
    ),
    Flag(
        name="dry_run",
        kind=bool,
        default=False,
        names=("--dry-run",),
        help="list the commands, run none",
    ),
)
SHOWN = (
    Flag(name="min_gain", kind=str, default="1%", help="smaller gains are not recommended"),
    Flag(name="emit_tuner", kind=str, help="comm: write this file for NCCL's tuner plugin"),
    Flag(
        name="tuner_plugin",
        kind=str,
        help="plugin to verify the tuner file with [NCCL_TUNER_PLUGIN]",
    ),
    Flag(name="json", kind=str, help="ratios and recommendation as JSON; - = stdout"),
    Flag(name="csv", kind=str, help="ratios as CSV; - = stdout"),
    Flag(name="html", kind=str, help="a page with the curves and ratios"),
)


class CommandError(StepmarkError):
    """The command refuses its own flags."""

    exit_code = 2


def measure(values: dict[str, Any]) -> None:
    """Plan; then try every setting in every round, and compare."""
    import typer  # noqa: PLC0415

    from stepmark.cli import sweep_results, sweep_tuner  # noqa: PLC0415

    refuse_ranks(os.environ)
    sweep_results.check(values)
    base = dict(os.environ)
    plugin = values.get("tuner_plugin") or base.get(sweep_tuner.PLUGIN)
    if values.get("emit_tuner"):
        base.pop(sweep_tuner.PLUGIN, None)  # it would decide in NCCL's place
    path = _to_resume(values)
    sweep = _going_on(path, values) if path else _new(values, base)
    asked = None
    if target := values.get("emit_tuner"):
        asked = sweep_tuner.request(target, plugin, sweep, force=bool(values.get("force")))
    if values.get("dry_run"):
        listed(sweep)
        return
    if asked:
        sweep_tuner.check_device(asked.values)
    if not sweep.is_complete:  # a finished sweep may be looked at on another machine
        _check_command(sweep, base)
    raise typer.Exit(sweep_results.made(sweep, path, asked, values, base))


def refuse_ranks(variables: Mapping[str, str]) -> None:
    """A sweep starts its own processes. Raises ConfigError under a launcher."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in variables:
            where = f"{name}={variables[name]}"
            raise ConfigError("sweep", where, "started once, without torchrun, srun or mpirun")
    if variables.get("SLURM_STEP_NUM_TASKS", "") not in ("", "1"):
        raise ConfigError("sweep", "srun", "started once: it starts its own processes")


def _to_resume(values: Values) -> Path | None:
    from stepmark.store.sweeps import find  # noqa: PLC0415

    return find(Path(values["out"]), values["resume"]) if values.get("resume") else None


def _new(values: Values, base: Mapping[str, str]) -> "Sweep":
    from datetime import UTC, datetime  # noqa: PLC0415

    from stepmark import __version__  # noqa: PLC0415
    from stepmark.cli import sweep_settings  # noqa: PLC0415
    from stepmark.core.sweep import Sweep  # noqa: PLC0415
    from stepmark.store.runs import new_run_id  # noqa: PLC0415

    command = tuple(values.get("words") or ())
    _check_verb(command)
    found = _settings(values)
    sweep_settings.check_flags(command, found)
    now = datetime.now(UTC)
    seed = values.get("seed")
    return Sweep(
        sweep_id=new_run_id(now),
        created_at=now.isoformat(timespec="seconds"),
        stepmark=__version__,
        command=command,
        settings=tuple(found),
        baseline=sweep_settings.named(values.get("baseline"), found),
        repeats=_repeats(values, 5),
        order=_order(values),
        seed=secrets.randbelow(2**31) if seed is None else seed,
        timeout_s=_timeout_s(values, 600.0),
        notes=sweep_settings.notes(found, base),
    )


def _check_verb(command: Sequence[str]) -> None:
    from stepmark.cli import sweep_settings  # noqa: PLC0415
    from stepmark.cli.main import VERBS  # noqa: PLC0415

    verbs = [verb for verb in MEASURING if verb in VERBS]
    sweep_settings.check_command(command, verbs, list(VERBS))


def _settings(values: Values) -> "list[Setting]":
    from stepmark.cli import sweep_settings  # noqa: PLC0415

    return sweep_settings.settings(
        values.get("env") or [],
        values.get("flags") or [],
        default=not values.get("no_default"),
        force=bool(values.get("force")),
    )


def _going_on(path: Path, values: Values) -> "Sweep":
    """The sweep of --resume; its rounds, time limit and baseline may be changed."""
    import dataclasses  # noqa: PLC0415

    from stepmark.cli import sweep_settings  # noqa: PLC0415
    from stepmark.store.sweeps import read  # noqa: PLC0415

    sweep = read(path)
    command = tuple(values.get("words") or ())
    if command and command != sweep.command:
        raise ConfigError(
            "command", shlex.join(command), f"none, or {shlex.join(sweep.command)}"
        )
    if values.get("env") or values.get("flags"):
        asked, known = ({one.name for one in s} for s in (_settings(values), sweep.settings))
        if asked != known:
            shown = ", ".join(sorted(asked ^ known))
            raise ConfigError(
                "env", shown, "left out, or the settings that the sweep began with"
            )
    for name in ("order", "seed"):
        if values.get(name) not in (None, now := getattr(sweep, name)):
            raise ConfigError(name, values[name], f"{now}, with which the sweep began")
    return dataclasses.replace(
        sweep,
        repeats=_repeats(values, sweep.repeats),
        timeout_s=_timeout_s(values, sweep.timeout_s),
        baseline=sweep_settings.named(values.get("baseline") or sweep.baseline, sweep.settings),
    )


def _repeats(values: Values, default: int) -> int:
    asked = values.get("repeats")
    if asked is not None and not 1 <= asked <= 1000:
        raise ConfigError("repeats", asked, "from 1 to 1000")
    return default if asked is None else int(asked)


def _order(values: Values) -> str:
    from stepmark.cli.sweep_run import ORDERS  # noqa: PLC0415

    order = values.get("order") or ORDERS[0]
    if order not in ORDERS:
        raise ConfigError("order", order, f"one of {', '.join(ORDERS)}")
    return str(order)


def _timeout_s(values: Values, default: float) -> float:
    from stepmark.core.units import parse_duration  # noqa: PLC0415

    asked = values.get("timeout")
    return default if asked is None else parse_duration(asked, "timeout")


def _check_command(sweep: "Sweep", base: Mapping[str, str]) -> None:
    """A dry run for each set of flags: what the command refuses is refused once, and first."""
    import subprocess  # noqa: PLC0415

    from stepmark.cli.sweep_run import PROGRAM  # noqa: PLC0415

    for setting in {one.flags: one for one in sweep.settings}.values():
        done = subprocess.run(
            [*PROGRAM, *setting.command(sweep.command), "--dry-run"],
            env=dict(base),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            line = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise CommandError(f"the command: {line.removeprefix('stepmark: ')}")


def listed(sweep: "Sweep") -> None:
    """--dry-run: what would be run, round by round, as shell commands."""
    from stepmark.cli.sweep_run import order_of  # noqa: PLC0415

    for number in range(1, sweep.repeats + 1):
        places = order_of(len(sweep.settings), number, order=sweep.order, seed=sweep.seed)
        for place in places:
            sys.stdout.write(_shell(sweep.settings[place], sweep.command) + "\n")
    count = len(sweep.settings)
    sys.stderr.write(f"{sweep.repeats} x {count} settings, seed {sweep.seed}; none was run\n")


def _shell(setting: "Setting", command: tuple[str, ...]) -> str:
    words = ["env"]
    words += [word for name, value in setting.variables if not value for word in ("-u", name)]
    words += [f"{name}={value}" for name, value in setting.variables if value]
    return shlex.join([*words, "stepmark", *setting.command(command)])


command = as_command(
    measure,
    "Measure the same command under several settings, in interleaved rounds, and compare.",
    COMMAND,
    WHAT,
    HOW,
    SHOWN,
)
