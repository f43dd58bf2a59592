"""stepmark launch: its own options, and those of the verb that the job runs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepmark.cli import main
from stepmark.cli.commands import Command, UnknownOptionError, Values
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import build, load
from stepmark.launching.launch_options import CHECK, RESUME

MEASURING = ("run", "comm", "op", "train", "calibrate", "replay")
_FILES = (".json", ".toml", ".yaml", ".yml", ".sh")
_RANKS = "it must be left out: --gpus-per-node or --nproc-per-node sets the ranks"
_OUT = "it must be left out: give --out before the --"
_NEW = "it must be left out: a job measures a new run; -- resume RUN goes on with another"
_REFUSED = {"nproc": _RANKS, "out": _OUT, "resume": _NEW, "dry_run": _NEW}
_LAUNCHED = (*MEASURING, RESUME, CHECK)
_VERDICT = "it must be left out: the job gives a verdict on its own hosts"
_REFUSED_OF_CHECK = {
    **dict.fromkeys(("nproc", "device", "gpus_per_node"), _RANKS),
    **dict.fromkeys(("read_from", "pairs", "expect"), _VERDICT),
    "out": _OUT,
}


class Wrapper(Command):
    """A command whose arguments, behind --, are a verb with its own."""

    def parse(self, name: str, words: list[str]) -> Values:
        try:
            return super().parse(name, words)
        except UnknownOptionError:
            # It may be the verb's. A value of a known one is no verb.
            verbs = (
                word
                for before, word in pairwise(["", *words])
                if word in (*MEASURING, CHECK) and not self.valued(before)
            )
            verb = next(verbs, None)
            if verb is None or "--" in words:
                raise
            rule = f"it must come behind --: {name} OPTIONS -- {verb} ..."
            raise ConfigError("command", verb, rule) from None


class Launch(Wrapper):
    """`stepmark launch`, which refuses what its verb would refuse on the hosts."""

    def check(self, values: Values) -> None:
        if not values["words"]:
            return
        name, *arguments = values["words"]
        if name not in _LAUNCHED:
            raise not_one_of("command", name, _LAUNCHED, ", a verb that measures")
        if name == CHECK and "--nodes" not in arguments:
            raise ConfigError("command", CHECK, "doctor --nodes, which checks hosts for a job")
        refused = {RESUME: {}, CHECK: _REFUSED_OF_CHECK}
        check_arguments(values["words"], refused.get(name, _REFUSED))


def check_arguments(words: Sequence[str], refused: Mapping[str, str]) -> None:
    """Refuse arguments that a verb does not take; refused: rules of fields, by name.

    Raises ConfigError or UnknownOptionError.
    """
    name, *arguments = words
    target = main.command(name, arguments)
    assert isinstance(target, Command), name
    values = target.parse(f"stepmark {name}", arguments)
    try:
        _check_models(build(target.cls, values))
        for field, rule in refused.items():
            if (value := values.get(field)) not in (None, False):
                raise ConfigError(field, value, rule)
    except ConfigError as error:
        raise target.as_typed(error, values, arguments) from None


def _check_models(options: Any) -> None:
    """Raise ConfigError for a name of no model. Files may be on the hosts alone."""
    fields = (getattr(options, name, None) or () for name in ("model", "models"))
    for value in fields:
        for name in (value,) if isinstance(value, str) else value:
            if "/" in name or Path(name).suffix in _FILES:
                continue
            load("stepmark.workloads.models:read_models")(name)
