"""stepmark workload: generate, show, convert and capture what a training step does."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import typer
import typer.main

from stepmark.cli.flags import Command, Group, group, verb
from stepmark.core.errors import ConfigError
from stepmark.core.options import options
from stepmark.core.workload_options import (
    CaptureOptions,
    ConvertOptions,
    GenerateOptions,
    ShowOptions,
)

_HANDLERS = "stepmark.app.workload"
_KNOWN = {one.name: one.spellings for one in options(GenerateOptions)}
_FRAMEWORK, _FORMAT = _KNOWN["framework"], _KNOWN["to"]
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "none")


def _generate(args: list[str]) -> Any:
    """The command with the options of the framework that the arguments name."""
    from stepmark.app.workload_flags import options_class  # noqa: PLC0415
    from stepmark.workload.rules import RULES, find_rule  # noqa: PLC0415

    framework = find_rule(framework_of(args) or "megatron")
    listed = "; ".join(f"{name} ({rule.help})" for name, rule in RULES.items())
    doc = (
        "Generate what one training step computes and communicates. Flags may be written with "
        f"- or with _. Frameworks: {listed}. --framework NAME --help shows a framework's "
        f"settings; these are {framework}'s."
    )
    return verb(options_class(framework), f"{_HANDLERS}:run_generate", doc)


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
            args = with_bare_recompute(args)
        elif with_bare_recompute(args) != args:
            refuse_bare_recompute(args)
        words = [spelled(word, switches) for word in args]
        refuse_two_formats(words)
        try:
            return super().parse_args(ctx, [word for word in words if word])
        except Exception as error:
            option = getattr(error, "option_name", "")
            if option and not any(
                option in (*one.opts, *one.secondary_opts) for one in self.params
            ):
                refuse_of_others(option)
            raise


def refuse_of_others(option: str) -> None:
    """Raises ConfigError where an unknown option is a setting of another framework."""
    from stepmark.workload.rules import RULES  # noqa: PLC0415

    name = option.lstrip("-").removeprefix("no-").replace("-", "_")
    owners = [framework for framework, rule in RULES.items() if name in rule.fields()]
    if owners:
        raise ConfigError(name, "given", f"only with --framework {' or '.join(owners)}")


def refuse_bare_recompute(args: list[str]) -> None:
    """AICB's has no value, this framework's has one: which is not guessed."""
    from stepmark.app.workload_flags import kind_of  # noqa: PLC0415
    from stepmark.workload.rules import RULES, find_rule  # noqa: PLC0415

    framework = find_rule(framework_of(args))
    recompute = kind_of(RULES[framework].fields()["recompute"])
    kinds = ", ".join(one for one in recompute if one != "none")
    raise ConfigError("--recompute", "given", f"it needs a value with {framework}: {kinds}")


def _is_switch(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def spelled(word: str, switches: Container[str]) -> str:
    """An option as it is declared: --seq_len=4 is --seq-len=4. Other words stay.

    switches: options without a value, and their opposites; --aiob_enable=True is --aiob-enable,
    =False the opposite, and "" where there is none.
    """
    if not word.startswith("--"):
        return word
    name, is_, value = word.partition("=")
    name = name.replace("_", "-")
    if is_ and name in switches and value.lower() in _YES:
        return name
    if is_ and name in switches and value.lower() in _NO:
        opposite = "--no-" + name.removeprefix("--")
        return opposite if opposite in switches else ""
    return name + is_ + value


def framework_of(args: Sequence[str]) -> str:
    """What the command line says of --framework, before it is parsed; "" for nothing."""
    found = ""
    for word, after in zip(args, [*args[1:], ""], strict=False):
        name, is_, value = spelled(word, ()).partition("=")
        if name in _FRAMEWORK:
            found = value if is_ else after
    return found


def with_bare_recompute(args: list[str]) -> list[str]:
    """AICB's --recompute has no value and means --recompute-activations."""
    return [
        "--recompute-activations" if word == "--recompute" and after.startswith("-") else word
        for word, after in zip(args, [*args[1:], "-"], strict=False)
    ]


def refuse_two_formats(args: Sequence[str]) -> None:
    """--to and --format that differ: ConfigError. The last one of other flags wins."""
    formats: dict[str, str] = {}
    for word, after in zip(args, [*args[1:], ""], strict=False):
        name, is_, value = word.partition("=")
        if name in _FORMAT:
            formats[name] = value if is_ else after
    if len(set(formats.values())) > 1:
        raise ConfigError("format", " and ".join(formats.values()), "one format")


_COMMANDS: dict[str, tuple[str, Callable[[list[str]], Any]]] = {
    "generate": (
        "What a step of any model x parallelism does; AICB's parameters are accepted.",
        _generate,
    ),
    "show": (
        "What is in a workload: messages, shapes, layers, pipeline.",
        lambda _: verb(ShowOptions, f"{_HANDLERS}:show", "Show what is in a workload file."),
    ),
    "convert": (
        "Between stepmark's, AICB's, SimAI's and others' files.",
        lambda _: verb(
            ConvertOptions, f"{_HANDLERS}:convert", "Write a workload in another format."
        ),
    ),
    "capture": (
        "From your own PyTorch code, run on fake tensors and fake ranks.",
        lambda _: verb(
            CaptureOptions,
            f"{_HANDLERS}:capture",
            "Record what PyTorch code does: fake tensors, fake ranks.",
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


app = group(
    "What one training step computes and communicates: generate, show, convert, capture.",
    _Verbs,
)
for _name, (_help, _) in _COMMANDS.items():
    app.command(_name, help=_help)(_unread)
