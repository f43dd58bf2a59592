"""stepmark op FAMILY: one operator family, or every operator of a model's layer."""

import dataclasses
import re
from collections.abc import Sequence

from stepmark.cli.commands import Command, Values
from stepmark.cli.help_page import Page
from stepmark.ground.errors import not_one_of
from stepmark.ground.options import options
from stepmark.model.ops import ALL_FAMILIES, CUSTOM, FAMILIES
from stepmark.operators.op_options import FAMILY_WORDS, LAYER, options_class

_DOC = "Measure operators: one family, or all of a model's layer."
_LAYER = "Every operator of one layer of a model, its head, loss and optimizer."
_MODEL = "--model llama-3.1-8b --mbs 1,2"
_OF_MODEL = ("gemm", "attention", "norm", "activation", "rope", "cross-entropy", "optimizer")
_EXAMPLES: dict[str, tuple[str, ...]] = {
    LAYER: ("op all llama-3.1-8b --device h200 --dry-run", "op --config configs.json"),
    CUSTOM: (
        "op custom examples/custom_op.py:compiled_norm,eager_norm --arg tokens=4096,8192",
    ),
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

    Without words it is --help.
    """

    family: str | None = None

    def run(self, name: str, words: list[str]) -> int:
        return super().run(name, words or ["--help"])

    def parse(self, name: str, words: list[str]) -> Values:
        return super().parse(name if self.family is None else f"{name} {self.family}", words)

    def write_options(self, page: Page, name: str, *, everything: bool) -> None:
        if self.family is None:
            title = "Families (stepmark op FAMILY --help shows their options)"
            abouts = {family: _about(family) for family in FAMILY_WORDS}
            if not everything:
                abouts = {family: _clause(text) for family, text in abouts.items()}
            page.section(title, list(abouts.items()))
        super().write_options(page, name, everything=everything)


def _about(family: str) -> str:
    if family == LAYER:
        return _LAYER
    return " ".join((ALL_FAMILIES[family].__doc__ or "").split("\n\n")[0].split())


def _clause(text: str) -> str:
    """Return the first clause of a sentence, as far as what stands in brackets."""
    return re.split(r"[,:;.]| \[", text)[0]


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
    switches = _switches()
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word.startswith("-"):
            is_value = "=" not in word and word not in switches and word != "--"
        elif word in FAMILY_WORDS:
            return word
        else:
            raise not_one_of("family", word, FAMILY_WORDS)
    return None


def command(words: Sequence[str]) -> Command:
    """Return the verb with the options of the requested family. Raises ConfigError."""
    family = _family(words)
    doc = _DOC if family is None else _about(family)
    examples = _EXAMPLES.get(family or LAYER, ())
    command = _Command(options_class(family), "stepmark.operators.op:run", doc, *examples)
    command.family = family
    return command
