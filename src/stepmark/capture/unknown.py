"""Numbers that are read from tensors without values, and what a job may do with them.

A number may steer a branch, by the rules in POLICY, and may be printed. It is not a number of
Python where that would hide it: an integer refuses to become a size, and a float is NaN.
"""

import ast
import contextlib
import dis
import functools
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Never
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepmark.capture.watch import OWN, package

POLICY = (
    "unknown values are read at {}: a condition on one does not hold, except that numbers are"
    " finite, all() and equal() are true, and assertions hold"
)


# In errors of torch about fake tensors, which have no values, and about UnknownNumber.
_WORDS = (
    *("DynamicOutputShape", "DataDependentOutput", "data is not allocated", "UnknownNumber"),
    *("numpy() is not supported", "cannot convert float NaN"),
)


class UnknownValueError(Exception):
    """A value that is unknown while captured reaches what must be known."""


class ReadPolicy:
    """Decides about values that are unknown, and records where they are read.

    file: the user's, whose lines are named first.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self.places: dict[str, None] = {}
        self.stopped: UnknownValueError | None = None  # also if the job caught it

    def place(self) -> str:
        """Return the line of the user's code that is running."""
        frame = self._frame()
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    def record(self) -> None:
        self.places[self.place()] = None

    def branch(self, holds: bool | None = None) -> bool:
        """Return whether a condition holds. Refuses the condition of a loop.

        holds: what it is where numbers are finite and checks pass, if that follows.
        """
        self.record()
        frame = self._frame()
        statement = _statement(frame.f_code.co_filename, frame.f_lineno)
        if isinstance(statement, ast.While):
            self.refuse("bounds a loop")
        if holds is None and isinstance(statement, ast.Assert):
            test = statement.test
            return not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))
        return bool(holds)

    def refuse(self, what: str) -> Never:
        raise self._refusal(what)

    def _refusal(self, what: str) -> UnknownValueError:
        self.stopped = UnknownValueError(
            f"a value that is unknown while captured {what}: make it from constants, or from"
            " indices of topk, which are taken as evenly spread"
        )
        return self.stopped

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Refuse a value that is unknown where torch or Python name something else."""
        try:
            yield
        except Exception as error:
            if isinstance(error, UnknownValueError) or not self._is_due_to_unknown(error):
                raise
            refusal = self._refusal("is used where a number or a shape must be known")
            raise refusal.with_traceback(error.__traceback__) from error

    def _is_due_to_unknown(self, error: Exception) -> bool:
        """Return whether the expression of the user's that raised an error has such a value."""
        text = f"{type(error).__name__}: {error}"
        if any(words in text for words in _WORDS):
            return True
        trace = error.__traceback__
        steps = zip(traceback.walk_tb(trace), traceback.extract_tb(trace), strict=True)
        own = [(frame, at) for (frame, _), at in steps if at.filename == self._file]
        if not own or not isinstance(error, TypeError | ValueError):
            return False
        frame, at = own[-1]
        file = Path(self._file).name
        lines = range(at.lineno or 0, (at.end_lineno or 0) + 1)
        if any(f"{file}:{line}" in self.places for line in lines):
            return True
        begin = (at.lineno, at.colno)
        end = (at.end_lineno, at.end_colno)
        names = {
            node.id
            for node in ast.walk(_tree(at.filename))
            if isinstance(node, ast.Name) and begin <= (node.lineno, node.col_offset) < end
        }
        visible = {**frame.f_globals, **frame.f_locals}
        numbers = tree_leaves([visible.get(name) for name in names])
        return any(isinstance(number, UnknownNumber | UnknownFloat) for number in numbers)

    def _frame(self) -> Any:
        """Return the innermost frame of the user's file, else the innermost outside torch."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
        own = (frame for frame in frames if frame.f_code.co_filename == self._file)
        outer = (frame for frame in frames if package(frame) not in OWN)
        return next(own, next(outer, frames[-1]))


@functools.cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@functools.cache
def _statement(file: str, line: int) -> ast.While | ast.Assert | None:
    """Return the loop or assertion of whose condition the line is part."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.While | ast.Assert):
            test = node.test
            if test.lineno <= line <= (test.end_lineno or test.lineno):
                return node
    return None


class UnknownNumber:
    """An integer or a bool without a value. holds: as of ReadPolicy.branch."""

    def __init__(self, policy: ReadPolicy, holds: bool | None = None) -> None:
        self._policy = policy
        self._holds = holds

    def __bool__(self) -> bool:
        if package(sys._getframe(1)) == "torch":  # as where a list of ranks is checked
            self._policy.refuse("is compared by torch")
        return self._policy.branch(self._holds)

    def __index__(self) -> int:  # noqa: PLE0305
        self._policy.refuse("is used as a size, an index, or a number of repeats")

    def __int__(self) -> int:
        self._policy.refuse("is converted to an int")

    def __hash__(self) -> int:  # noqa: PLE0309
        self._policy.refuse("is an element of a set or a key")

    def __float__(self) -> float:
        return math.nan

    def __repr__(self) -> str:
        return "unknown"

    def __format__(self, spec: str) -> str:
        return "unknown"

    def _compared(self, *_: object) -> "UnknownNumber":
        _refuse_choice(self._policy, sys._getframe(1))
        return UnknownNumber(self._policy)

    def _computed(self, *others: Any) -> Any:
        if not all(isinstance(other, int | float | UnknownNumber) for other in others):
            return NotImplemented  # as a list, which is repeated
        if any(isinstance(other, float) for other in others):
            return UnknownFloat(self._policy)
        return UnknownNumber(self._policy)

    def __truediv__(self, other: Any) -> Any:
        return math.nan / other if isinstance(other, Tensor) else UnknownFloat(self._policy)

    def __rtruediv__(self, other: Any) -> Any:
        return other / math.nan if isinstance(other, Tensor) else UnknownFloat(self._policy)

    def __mul__(self, other: Any) -> Any:
        is_float = isinstance(other, Tensor) and other.is_floating_point()
        return other * math.nan if is_float else self._computed(other)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared  # type: ignore[assignment]
    __rmul__ = __mul__
    __add__ = __radd__ = __sub__ = __rsub__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _computed
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _computed
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _computed


def _refuse_choice(policy: ReadPolicy, frame: FrameType) -> None:
    """Refuse a comparison by a function, whose result may be the other number: a size."""
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if operation not in ("COMPARE_OP", "CONTAINS_OP"):
        policy.refuse("is compared by min, max, sorted or the like")


class UnknownFloat(float):
    """A finite number without a value; as a float it is NaN, and so is what is made of it."""

    _policy: ReadPolicy

    def __new__(cls, policy: ReadPolicy) -> "UnknownFloat":
        number = super().__new__(cls, math.nan)
        number._policy = policy
        return number

    def __bool__(self) -> bool:
        return self._policy.branch()

    def __int__(self) -> int:
        self._policy.refuse("is converted to an int")

    def _compared(self, other: object) -> Any:
        if isinstance(other, int):
            _refuse_choice(self._policy, sys._getframe(1))
        return self._policy.branch()

    def _computed(self, *others: Any) -> Any:
        if all(isinstance(other, int | float | UnknownNumber) for other in others):
            return UnknownFloat(self._policy)
        return NotImplemented

    def __round__(self, digits: Any = None) -> Any:
        return UnknownNumber(self._policy) if digits is None else UnknownFloat(self._policy)

    __hash__ = float.__hash__
    __trunc__ = __ceil__ = __floor__ = __int__
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _computed
    __mod__ = __rmod__ = __pow__ = __rpow__ = _computed
    __neg__ = __pos__ = __abs__ = _computed


class TensorReads:
    """Makes numbers that are read by Python code unknown where the tensor has no value.

    Code of torch in C++ reads them without these methods: see `read`.
    """

    def __init__(self, policy: ReadPolicy) -> None:
        self._policy = policy
        self._is_running = False
        self._unknown: list[bool | None] = []  # `holds` of unknown values that were read

    def read(self, dtype: torch.dtype, holds: bool | None = None) -> bool | float:
        """Return what C++ takes for a value that is unknown; refuse an integer."""
        if self._is_running:
            self._unknown.append(holds)
        elif dtype is torch.bool:
            return self._policy.branch(holds)
        elif not dtype.is_floating_point and not dtype.is_complex:
            self._policy.refuse("is used by torch as a size or an index")
        else:
            self._policy.record()
        if dtype is torch.bool:
            return bool(holds)
        return math.nan if dtype.is_floating_point or dtype.is_complex else 0

    def patches(self) -> Iterator[tuple[tuple[Any, str], Callable[..., Any]]]:
        """Yield a method of tensors to patch, and its replacement."""
        refuse = self._policy.refuse
        for name, convert in (
            ("item", self._number),
            ("__float__", lambda *values: float(self._number(*values))),
            ("__bool__", lambda _, holds: self._policy.branch(holds)),
            ("__int__", lambda *_: refuse("is converted to an int")),
            ("__index__", lambda *_: refuse("is used as a size or an index")),
        ):
            yield (Tensor, name), self._reading(getattr(Tensor, name), convert)
        yield (Tensor, "__format__"), _formatted
        yield (torch.nn.functional, "one_hot"), _one_hot(torch.nn.functional.one_hot)
        for name, value in (("isfinite", True), ("isnan", False), ("isinf", False)):
            yield (math, name), _of_unknown(getattr(math, name), value)

    def _number(self, value: Any, holds: bool | None) -> Any:
        self._policy.record()
        if isinstance(value, float | complex):
            return UnknownFloat(self._policy)
        return UnknownNumber(self._policy, holds)

    def _reading(self, original: Callable[..., Any], convert: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(tensor: Tensor) -> Any:
            self._unknown.clear()
            with mock.patch.object(self, "_is_running", True):
                value = original(tensor)
            return convert(value, self._unknown.pop()) if self._unknown else value

        return call


def _formatted(tensor: Tensor, spec: str) -> str:
    """Format a tensor of one element by its number, also if it is no plain tensor."""
    return format(tensor.item(), spec) if tensor.dim() == 0 and spec else str(tensor)


def _one_hot(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return one_hot that does not check values where the number of classes is given."""

    def call(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes < 0:
            return original(tensor)
        return (tensor.unsqueeze(-1) == torch.arange(num_classes)).to(torch.int64)

    return call


def _of_unknown(original: Callable[[Any], bool], value: bool) -> Callable[[Any], bool]:
    def call(number: Any) -> bool:
        return value if isinstance(number, UnknownFloat | UnknownNumber) else original(number)

    return call
