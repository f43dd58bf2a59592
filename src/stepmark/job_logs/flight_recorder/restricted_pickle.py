"""Load pickles of unknown origin: plain containers and scalars, without running code.

A pickle is a program. Its opcodes are checked before any runs: none may name a class, call or
build an object, and none may make the reader allocate memory for what is not in the file.
"""

import io
import pickle
import pickletools
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NoReturn

from stepmark.ground.errors import ConfigError
from stepmark.ground.json_text import MAX_DEPTH

# Opcodes that make None, bool, int, float, str, bytes, tuple, list, dict and set, and those
# that move such values around.
_PLAIN = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "MEMOIZE", "PUT"),
        *("BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE"),
        *("NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
        *("FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
        *("BINBYTES8", "BYTEARRAY8", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2"),
        *("TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT"),
        *("SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET"),
    )
)
_NAMES_A_CLASS = ("GLOBAL", "INST")
# Values of a dump, counted as often as they are used: entries share the dicts of their frames.
_LEAST_VALUES, _VALUES_PER_BYTE = 500_000, 20
_Level = dict[int, tuple[Collection[object], int]]
_CONTAINERS = (dict, list, tuple, set, frozenset)
MAX_LONG_BYTES = 64  # no field of a dump is a longer integer
# The standard library raises these for a file that is no pickle.
_MALFORMED = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError),
    *(AttributeError, OverflowError, MemoryError, RecursionError),
)


class _PlainUnpickler(pickle.Unpickler):
    """Refuse classes again, in case one passes the check of the opcodes."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _foreign(f"{module_name}.{global_name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise _foreign("a persistent id")


def load(data: bytes, file: str) -> object:
    """Return the value of a pickle of plain values.

    Raises ConfigError that names a foreign class, or says that the pickle is incomplete.
    """
    limit = _LEAST_VALUES + _VALUES_PER_BYTE * len(data)
    try:
        with warnings.catch_warnings():
            # pickletools warns of odd escapes in the file's strings.
            warnings.simplefilter("ignore", DeprecationWarning)
            _check(data, limit)
            value = _PlainUnpickler(io.BytesIO(data)).load()
            _check_tree(value, limit)
    except _MALFORMED as error:
        reason = str(error) or type(error).__name__
        raise ConfigError("file", file, f"a whole pickle ({reason[:120]})") from None
    return value


def _check(data: bytes, limit: int) -> None:
    """Refuse before running. Raises ConfigError, or ValueError for what is no pickle."""
    texts: list[str] = []  # the last two strings: the operands of STACK_GLOBAL
    sizes = _Sizes(limit)
    for num_ops, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name in _NAMES_A_CLASS:
            raise _foreign(str(argument).replace(" ", "."))
        if name == "STACK_GLOBAL":
            raise _foreign(".".join(texts))
        if name not in _PLAIN:
            raise _foreign(f"an object made by {name}")
        if isinstance(argument, str):
            texts = [*texts[-1:], argument]
        elif "PUT" in name and int(argument or 0) > num_ops:
            # The reader's memo is an array: one large index would allocate gigabytes.
            raise ValueError(f"memo index {argument} after {num_ops} opcodes")
        elif isinstance(argument, int) and argument.bit_length() > 8 * MAX_LONG_BYTES:
            raise ValueError("an integer of excessive length")
        sizes.run(opcode, argument)


@dataclass(slots=True)
class _Sizes:
    """Numbers of values in the objects on the stack of a pickle, counted as often as used.

    A tuple of references to tuples takes few bytes, and its hash, as a key, visits each of
    them. Lists and dicts that change after a reference was stored are left to _check_tree.
    """

    limit: int
    stack: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, int] = field(default_factory=dict)

    def run(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        """Follow an opcode. Raises ValueError or IndexError."""
        name, stack = opcode.name, self.stack
        if name == "MARK":
            self.marks.append(len(stack))
        elif name == "MEMOIZE" or "PUT" in name:
            self.memo[len(self.memo) if argument is None else int(str(argument))] = stack[-1]
        elif "GET" in name:
            stack.append(self.memo.get(int(str(argument)), 0))
        else:  # DUP counts as one value more
            popped = opcode.stack_before
            is_marked = pickletools.markobject in popped
            start = self.marks.pop() if is_marked else len(stack)
            start -= popped.index(pickletools.markobject) if is_marked else len(popped)
            size = 1 + sum(stack[start:])
            if size > self.limit:
                raise ValueError("it refers too often to the same values")
            stack[start:] = [size] * len(opcode.stack_after)


def _check_tree(root: object, limit: int) -> None:
    """Refuse values that nest too deep, hold themselves, or are referred to too often."""
    level: _Level = {0: ((root,), 1)}  # containers of one depth, and how often each is used
    num_values = 1
    for _ in range(MAX_DEPTH):
        deeper: _Level = {}
        for container, uses in level.values():
            values = container.values() if isinstance(container, dict) else ()
            for part in (*container, *values):
                num_values += uses
                if isinstance(part, _CONTAINERS):
                    deeper[id(part)] = (part, deeper.get(id(part), (part, 0))[1] + uses)
        if num_values > limit:
            raise ValueError("it refers too often to the same values")
        if not deeper:
            return
        level = deeper
    raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")


def _foreign(name: str) -> ConfigError:
    return ConfigError("pickle", name, "plain values only, no class: nothing was run")
