"""Load pickles of unknown origin: plain containers and scalars, without running code.

A pickle is a program. Its opcodes are checked before any runs: none may name a class, call or
build an object, and none may make the reader allocate memory for what is not in the file.
"""

import io
import pickle
import pickletools
import warnings
from typing import NoReturn

from stepmark.ground.errors import ConfigError

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
    try:
        with warnings.catch_warnings():
            # pickletools warns of odd escapes in the file's strings.
            warnings.simplefilter("ignore", DeprecationWarning)
            _check(data)
            return _PlainUnpickler(io.BytesIO(data)).load()
    except _MALFORMED as error:
        reason = str(error) or type(error).__name__
        raise ConfigError("file", file, f"a whole pickle ({reason[:120]})") from None


def _check(data: bytes) -> None:
    """Refuse before running. Raises ConfigError, or ValueError for what is no pickle."""
    texts: list[str] = []  # the last two strings: the operands of STACK_GLOBAL
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


def _foreign(name: str) -> ConfigError:
    return ConfigError("pickle", name, "plain values only, no class: nothing was run")
