"""A user's own operator: a function of a file, and what the function returns of its work."""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.ground.dtypes import DType
from stepmark.model.ops.fields import MULTIPLIED, Operator, choice, number_or_text

CUSTOM = "custom"  # the family's name
# Of MULTIPLIED and 8 bits: torch has no tensor of a block format.
CUSTOM_DTYPES = (*MULTIPLIED, DType.FP8_E4M3, DType.FP8_E5M2)


def digest_of(path: Path) -> str:
    """Return the beginning of the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _fact(default: Any) -> Any:
    """Declare a field that is no part of an operator's identity."""
    return dataclasses.field(default=default, metadata={"is_identity": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom(Operator):
    """Your own function of a Python file, which returns a stepmark.CustomOp.

    digest: of the file, so that an edited kernel is another operator. arguments: of the
    function, as NAME=VALUE with a space between two. defaults: of the other arguments, alike.
    flops, bytes_moved and memory_bytes (of its operands) are what the function returns on a
    rank, and 0 before, as defaults are "".
    """

    file: str = _fact("")
    digest: str
    arguments: str = ""
    dtype: DType = choice("element type", default=DType.BF16, allowed=CUSTOM_DTYPES)
    defaults: str = _fact("")
    flops: int = _fact(0)
    bytes_moved: int = _fact(0)
    memory_bytes: int = _fact(0)

    @property
    def shape_text(self) -> str:
        return self.arguments or "default arguments"

    @property
    def keywords(self) -> dict[str, bool | int | float | str]:
        """Return the arguments by name, numbers and true or false as such."""
        pairs = (word.partition("=") for word in self.arguments.split())
        return {name: _value(text) for name, _, text in pairs}

    @property
    def is_called(self) -> bool:
        """Return whether the function has returned its FLOPs and bytes."""
        return self.bytes_moved > 0


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return number_or_text(text)
