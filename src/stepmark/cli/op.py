"""stepmark op FAMILY: one operator family, or every operator of a model's layer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from stepmark.cli.flags import Command, verb
from stepmark.ground.errors import not_one_of
from stepmark.ground.options import options
from stepmark.model.ops import FAMILIES
from stepmark.operators.op_options import LAYER, options_class

_DOC = "Measure operators: one family, or all of a model's layer."
_LAYER = "Every operator of one layer of a model, its head, loss and optimizer."
_MODEL = "--model llama-3.1-8b --mbs 1,2"
_OF_MODEL = ("gemm", "attention", "norm", "activation", "rope", "cross-entropy", "optimizer")
_EXAMPLES: dict[str, tuple[str, ...]] = {
    LAYER: (f"op all {_MODEL} --device h200 --dry-run", "op --config configs.json"),
    **{family: (f"op {family} {_MODEL}",) for family in _OF_MODEL},
    "gemm": (
        "op gemm --m 8192 --n 4096,8192 --k 4096",
        f"op gemm {_MODEL} --tp 8 --csv -",
        "op gemm --find-max",
    ),
    "grouped-gemm": ("op grouped-gemm --model deepseek-v3 --ep 8",),
    "bmm": ("op bmm --batch 64 --m 1024 --n 1024 --k 128",),
    "mlp": ("op mlp --dataset A --pass step",),
    "embedding-bag": ("op embedding-bag --dataset A --pass fwd",),
    "copy": ("op copy --num-bytes 268435456,1073741824",),
    "host-copy": ("op host-copy --num-bytes 268435456 --direction d2h",),
}


class _Command(Command):
    """`stepmark op`, whose help lists the families, or `stepmark op FAMILY`.

    Without arguments it is --help.
    """

    family: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.family is not None:
            ctx.info_name = f"{ctx.info_name} {self.family}"
        if not args and not ctx.resilient_parsing:
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        if self.family is None:
            with formatter.section("Families (stepmark op FAMILY --help shows their options)"):
                formatter.write_dl([(name, _about(name)) for name in (*FAMILIES, LAYER)])
        super().format_options(ctx, formatter)


def _about(family: str) -> str:
    if family == LAYER:
        return _LAYER
    return " ".join((FAMILIES[family].__doc__ or "").split("\n\n")[0].split())


def _switches() -> set[str]:
    """Return the spellings of options without a value, of all families."""
    declared = (option for option in options(options_class(None)) if option.is_switch)
    words = {word for option in declared for word in option.words}
    for kind in FAMILIES.values():
        for field in dataclasses.fields(kind):
            if isinstance(field.default, bool):
                name = field.name.replace("_", "-")
                words |= {f"--{name}", f"--no-{name}"}
    return words | {"--find-max", "--help"}


def _family(words: Sequence[str]) -> str | None:
    """Return the first word that is neither an option nor its value. Raises ConfigError."""
    switches, is_value = _switches(), False
    for word in words:
        if is_value:
            is_value = False
        elif word.startswith("-"):
            is_value = "=" not in word and word not in switches and word != "--"
        elif word in (*FAMILIES, LAYER):
            return word
        else:
            raise not_one_of("family", word, (*FAMILIES, LAYER))
    return None


def command(arguments: Sequence[str]) -> Any:
    """Return the verb with the options of the requested family. Raises ConfigError."""
    family = _family(arguments)
    doc = _DOC if family is None else _about(family)
    examples = _EXAMPLES.get(family or LAYER, ())
    kind = type("_Command", (_Command,), {"family": family})
    return verb(
        options_class(family), "stepmark.operators.op:run", doc, *examples, command=kind
    )
