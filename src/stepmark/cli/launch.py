"""stepmark launch: its own options, and those of the verb that the job runs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import typer

from stepmark.cli import main
from stepmark.cli.flags import Command, as_typed, click_command, verb
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import build, load
from stepmark.launching.launch_options import RESUME, LaunchOptions

MEASURING = ("run", "comm", "op", "train", "calibrate", "replay")
_RANKS = "it must be left out: --gpus-per-node or --nproc-per-node sets the ranks"
_OUT = "it must be left out: give --out before the --"
_NEW = "it must be left out: a job measures a new run; -- resume RUN goes on with another"
_REFUSED = {"nproc": _RANKS, "out": _OUT, "resume": _NEW, "dry_run": _NEW}


class Wrapper(Command):
    """A command whose arguments, behind --, are a verb with its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [*args]
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter.__mro__[2]:  # type: ignore[misc]
            # An unknown option: it may be the verb's. A value of a known one is no verb.
            options = (each for each in self.params if not getattr(each, "is_flag", True))
            valued = {word for option in options for word in option.opts}
            name = next(
                (
                    word
                    for before, word in pairwise(["", *words])
                    if word in MEASURING and before not in valued
                ),
                None,
            )
            if name is None or "--" in words:
                raise
            rule = f"it must come behind --: stepmark {ctx.info_name} OPTIONS -- {name} ..."
            raise ConfigError("command", name, rule) from None


class _Command(Wrapper):
    def invoke(self, ctx: Any) -> Any:
        if ctx.params["words"]:
            check(ctx.params["words"])
        return super().invoke(ctx)


def command(arguments: Sequence[str]) -> Any:
    """Return the verb."""
    doc = "Print, or submit and follow, what starts a measuring verb on the hosts of a cluster."
    examples = (
        "launch --slurm --nodes 4 --gpus-per-node 8 -- comm all_reduce -b 1K -e 1G",
        "launch --torchrun --hosts a,b --gpus-per-node 8 -- train llama-3.1-8b",
        "launch --follow 123456",
    )
    return verb(
        LaunchOptions, "stepmark.launching.launch:run", doc, *examples, command=_Command
    )


def check(words: Sequence[str]) -> None:
    """Refuse a verb that measures nothing, and arguments that it does not take.

    Raises ConfigError, or typer's error of usage.
    """
    name = words[0]
    if name not in (*MEASURING, RESUME):
        raise not_one_of("command", name, (*MEASURING, RESUME), ", a verb that measures")
    check_arguments(words, {} if name == RESUME else _REFUSED)


def check_arguments(words: Sequence[str], refused: Mapping[str, str]) -> None:
    """Refuse arguments that a verb does not take; refused: rules of fields, by name.

    Raises ConfigError, or typer's error of usage.
    """
    name, *arguments = words
    target = click_command(name, main.command(name, arguments))
    context = target.make_context(f"stepmark {name}", [*arguments])  # it empties the list
    try:
        _check_models(build(target.callback.options_class, context.params))
        for field, rule in refused.items():
            value = context.params.get(field)
            if value not in (None, False):
                raise ConfigError(field, value, rule)
    except ConfigError as error:
        raise as_typed(error, context, arguments) from None


def _check_models(options: Any) -> None:
    """Raise ConfigError for a name of no model. Files may be on the hosts alone."""
    fields = (getattr(options, name, None) or () for name in ("model", "models"))
    for value in fields:
        for name in (value,) if isinstance(value, str) else value:
            if "/" in name or name.endswith(".json"):
                continue
            load("stepmark.workloads.models:read_models")(name)
