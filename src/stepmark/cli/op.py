"""stepmark op FAMILY: one operator family, or every operator of a model's layer."""

from collections.abc import Sequence
from typing import Any

from stepmark.cli.flags import Command, verb
from stepmark.core.errors import ConfigError
from stepmark.core.op_options import LAYER, options_class
from stepmark.core.ops import FAMILIES

_DOC = "Measure operators: one family, or all of a model's layer."
_LAYER = "Every operator of one layer of a model, its head, loss and optimizer."


class _Command(Command):
    """Lists the families; without words it is --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        if self.help == _DOC:
            with formatter.section("Families (stepmark op FAMILY --help shows their options)"):
                formatter.write_dl([(name, _about(name)) for name in (*FAMILIES, LAYER)])
        super().format_options(ctx, formatter)


def _about(family: str) -> str:
    if family == LAYER:
        return _LAYER
    return " ".join((FAMILIES[family].__doc__ or "").split("\n\n")[0].split())


def command(arguments: Sequence[str]) -> Any:
    """The verb with the options of the family that is asked for. Raises ConfigError."""
    after = list(arguments[arguments.index("op") + 1 :])
    if after and not after[0].startswith("-") and after[0] not in (*FAMILIES, LAYER):
        raise ConfigError("family", after[0], f"one of {', '.join(FAMILIES)}, or {LAYER}")
    family = next((word for word in after if word in (*FAMILIES, LAYER)), None)
    doc = _DOC if family is None else _about(family)
    return verb(options_class(family), "stepmark.app.op:run", doc, _Command)
