"""stepmark workload: generate, show, convert and capture what a training step does.

Over 250 lines: four commands and what is particular about reading their flags.
"""

import sys
from typing import Any

import typer
import typer.core
import typer.main

from stepmark.cli import workload_flags
from stepmark.cli.flags import Command, Group
from stepmark.cli.options import Flag, Values, as_command
from stepmark.cli.workload_flags import (
    COMPUTE_FROM,
    DISTINCT,
    LEFT_OUT,
    OUT,
    RANK,
    STAGE,
    TABLES,
)

_FILE = Flag(name="file", kind=str, help="workload, in any format; - = stdin", argument=True)
_SHOW = (
    _FILE,
    STAGE,
    DISTINCT,
    Flag(
        name="html",
        kind=str,
        help="page with the figures; needs no network; - = stdout",
    ),
    *TABLES,
    *LEFT_OUT,
)
_CONVERT = (
    _FILE,
    Flag(name="to", kind=str, names=("--to", "--format"), help="of the new file [native]"),
    OUT,
    COMPUTE_FROM,
    Flag(name="stage", kind=int, help="pipeline stage, for formats of one stage [0]"),
    RANK,
    *LEFT_OUT,
)
_CAPTURE = (
    Flag(name="file", kind=str, help="FILE.py:FUNCTION that builds the job", argument=True),
    Flag(name="world_size", kind=int, help="ranks of the job"),
    Flag(name="rank", kind=int, help="the rank that is recorded [0]"),
    OUT,
)


def generate(values: Values) -> None:
    """From flags to a file, or to what show prints."""
    from stepmark.cli import workload_files, workload_job, workload_output  # noqa: PLC0415
    from stepmark.core.errors import ConfigError  # noqa: PLC0415

    workload_job.say_no_effect(values)
    made = workload_job.generate(values)
    notes = made.notes
    if values.get("comp_filepath") and not values.get("compute_from"):
        made = workload_files.timed_as_aicb(made, values["comp_filepath"])
    else:
        made = workload_files.timed(made, values.get("compute_from"))
    if not (values.get("out") or values.get("to")):
        _show(made, values)
        return
    tables_on_stdout = values.get("distinct") or "-" in (values.get("json"), values.get("csv"))
    if tables_on_stdout and (values.get("out") or "-") == "-":
        raise ConfigError("out", "-", "a file, as the tables go to stdout")
    for note in notes:
        sys.stderr.write(f"# {note}\n")
    workload_output.deliver(made, values)
    if values.get("distinct"):
        _show(made, values)
    elif values.get("json") or values.get("csv"):
        from stepmark.cli import workload_show  # noqa: PLC0415

        workload_show.write_tables(made, values)


def show(values: Values) -> None:
    """What a file says."""
    from stepmark.cli import workload_files  # noqa: PLC0415

    _show(workload_files.read(_file(values), values), values)


def convert(values: Values) -> None:
    """From one format to another."""
    from stepmark.cli import workload_files, workload_output  # noqa: PLC0415

    read = workload_files.read(_file(values), values)
    workload_output.deliver(workload_files.timed(read, values.get("compute_from")), values)


def capture(values: Values) -> None:
    """Run code on fake tensors and fake ranks; the only command here that loads torch."""
    from stepmark.cli import workload_capture  # noqa: PLC0415

    workload_capture.capture(_file(values), values)


def _show(workload: Any, values: Values) -> None:
    from stepmark.cli import workload_show  # noqa: PLC0415

    workload_show.show(workload, values)


def _file(values: Values) -> str:
    from stepmark.core.errors import ConfigError  # noqa: PLC0415

    if not values.get("file"):
        raise ConfigError("workload", "missing", "a file")
    return str(values["file"])


def _generate_command(args: list[str]) -> Any:
    """Its flags are those of the framework that the arguments name: no other's are read."""
    from stepmark.cli import workload_aicb  # noqa: PLC0415
    from stepmark.workload.rules import RULES, find_rule  # noqa: PLC0415

    framework = find_rule(workload_flags.framework_of(args) or "megatron")
    groups: list[tuple[Flag, ...]] = [
        workload_flags.WHAT,
        workload_flags.MODEL,
        workload_flags.EXPERTS,
        workload_flags.SPREAD,
        workload_flags.WRITE,
        workload_flags.of_settings(RULES[framework].fields()),
    ]
    if "stage" not in RULES[framework].fields():
        groups.append((workload_flags.PIPELINE_STAGE,))
    taken = {name for group in groups for flag in group for name in workload_flags.words(flag)}
    groups.append(workload_aicb.flags(taken))
    listed = "; ".join(f"{name} ({rule.help})" for name, rule in RULES.items())
    doc = (
        "Generate what one training step computes and communicates. Flags may be written with "
        f"- or with _. Frameworks: {listed}. --framework NAME --help shows a framework's "
        f"settings; these are {framework}'s."
    )
    return as_command(generate, doc, *groups)


class _Command(Command):
    """AICB writes --seq_len where we write --seq-len, and --aiob_enable=True."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switches = {
            name
            for one in self.params
            if _is_switch(one)
            for name in (*one.opts, *one.secondary_opts)
        }
        valued = {name for one in self.params if not _is_switch(one) for name in one.opts}
        if "--recompute" not in valued:
            args = workload_flags.with_bare_recompute(args)
        elif workload_flags.with_bare_recompute(args) != args:
            refuse_bare_recompute(args)
        spelled = [workload_flags.spelled(word, switches) for word in args]
        workload_flags.refuse_two_formats(spelled)
        try:
            return super().parse_args(ctx, [word for word in spelled if word])
        except Exception as error:
            option = getattr(error, "option_name", "")
            if option and not any(
                option in (*one.opts, *one.secondary_opts) for one in self.params
            ):
                refuse_of_others(option)
            raise


def refuse_of_others(option: str) -> None:
    """Raises ConfigError where an unknown option is a setting of another framework."""
    from stepmark.core.errors import ConfigError  # noqa: PLC0415
    from stepmark.workload.rules import RULES  # noqa: PLC0415

    name = option.lstrip("-").removeprefix("no-").replace("-", "_")
    owners = [framework for framework, rule in RULES.items() if name in rule.fields()]
    if owners:
        raise ConfigError(name, "given", f"only with --framework {' or '.join(owners)}")


def refuse_bare_recompute(args: list[str]) -> None:
    """AICB's has no value, this framework's has one: which is not guessed."""
    from stepmark.core.errors import ConfigError  # noqa: PLC0415
    from stepmark.workload.rules import RULES, find_rule  # noqa: PLC0415

    framework = find_rule(workload_flags.framework_of(args))
    allowed = f"with {framework} one of {workload_flags.kinds(RULES[framework].fields())}"
    raise ConfigError("recompute", "no value", allowed)


def _is_switch(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


_COMMANDS: dict[str, tuple[str, Any]] = {
    "generate": (
        "What a step of any model x parallelism does; AICB's parameters are accepted.",
        _generate_command,
    ),
    "show": (
        "What is in a workload: messages, shapes, layers, pipeline.",
        lambda args: as_command(show, "Show what is in a workload file.", _SHOW),
    ),
    "convert": (
        "Between stepmark's, AICB's, SimAI's and others' files.",
        lambda args: as_command(convert, "Write a workload in another format.", _CONVERT),
    ),
    "capture": (
        "From your own PyTorch code, run on fake tensors and fake ranks.",
        lambda args: as_command(
            capture, "Record what PyTorch code does: fake tensors, fake ranks.", _CAPTURE
        ),
    ),
}


class _Verbs(Group):
    """Builds the flags of the command that is asked for, and of no other."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        if name in _COMMANDS:
            made = typer.Typer(rich_markup_mode=None, add_completion=False)
            made.command(name, cls=_Command)(_COMMANDS[name][1](rest))
            found = typer.main.get_command(made)
        return name, found, rest


def _unread() -> None:
    raise AssertionError("a command that is asked for is built")


app = typer.Typer(
    cls=_Verbs,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="What one training step computes and communicates: generate, show, convert, capture.",
)
for _name, (_help, _) in _COMMANDS.items():
    app.command(_name, help=_help)(_unread)
