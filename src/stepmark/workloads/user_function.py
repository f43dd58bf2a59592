"""Load a function from a user's file, by "FILE.py:function"."""

import contextlib
import importlib.util
import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.units import plural

_MODULE = "stepmark_captured"
_MAX_MESSAGE = 300  # characters of an error's message
_NO_GPU = "capturing needs no GPU and sees none: use the device type cpu"
_HINTS = {  # of captured jobs, by a part of an error's message, in lower case
    "default process group twice": "it is there already: leave init_process_group out",
    "support for cuda": _NO_GPU,
    "not compiled with cuda": _NO_GPU,
    "no nvidia driver": _NO_GPU,
    "_cuda_setdevice": _NO_GPU,
    "pipelining/stage.py": "no shapes are sent here: give the stage input_args, output_args",
    "bigger than default world size": "see --world-size",
}


class CaptureTimeoutError(BaseException):
    """The job ran longer than allowed. Not an Exception, which a job's loop may catch."""


@contextlib.contextmanager
def load(spec: str, *, arguments: int = 0) -> Iterator[tuple[Callable[..., Any], str]]:
    """Yield the function and its file's path. The file's folder is importable inside.

    arguments: the number of its arguments. Raises ConfigError, also for errors in the file's
    own code.
    """
    path, name = parse(spec)
    sys.path.insert(0, str(path.parent))
    try:
        yield (
            find_function(load_module(path, f"{path.name}:{name}"), path, name, arguments),
            str(path),
        )
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.pop(_MODULE, None)


def parse(spec: str) -> tuple[Path, str]:
    """Return the file and the function of FILE.py:function. Raises ConfigError."""
    text, colon, name = spec.rpartition(":")
    if not colon or name.endswith(".py"):
        text = spec
        name = "build"
    path = Path(text).resolve()
    if not path.is_file():
        raise ConfigError("file", text, "a Python file that exists, as FILE.py:function")
    if path.suffix != ".py":
        raise ConfigError("file", text, "a file that ends in .py, as FILE.py:function")
    if not name.isidentifier():
        raise ConfigError("function", name, "a function's name, as FILE.py:function")
    return path, name


def load_module(path: Path, name: str, hints: Mapping[str, str] = _HINTS) -> ModuleType:
    """Run the user's file. name, hints: as of `reported`. Raises ConfigError."""
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError("file", path, "a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    with reported(name, str(path), hints):
        spec.loader.exec_module(module)
    return module


def find_function(
    module: ModuleType, path: Path, name: str, arguments: int, keywords: Collection[str] = ()
) -> Callable[..., Any]:
    """Return the function of the user's module. Raises ConfigError.

    arguments, keywords: number and names of those that it is called with.
    """
    value = getattr(module, name, None)
    if not callable(value):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value)
            and getattr(value, "__module__", "") == _MODULE
            and not key.startswith("_")
        ]
        examples = f", e.g. {', '.join(own[-8:])}" if own else ""
        raise ConfigError("function", name, f"a function of {path.name}{examples}")
    try:
        inspect.signature(value).bind(*range(arguments), **dict.fromkeys(keywords))
    except TypeError:
        count = plural(arguments, "argument") if arguments else "no argument"
        named = f", and by name with {', '.join(keywords)}" if keywords else ""
        names = ", ".join(inspect.signature(value).parameters) or "none"
        allowed = f"a function that is called with {count}{named}; its own are {names}"
        raise ConfigError("function", name, allowed) from None
    function: Callable[..., Any] = value
    return function


@contextlib.contextmanager
def reported(name: str, file: str, hints: Mapping[str, str] = _HINTS) -> Iterator[None]:
    """Raise errors of the user's code as one line, with the innermost line in its file.

    hints: on the cause, by a part of the error's message in lower case.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit, CaptureTimeoutError) as error:
        text = f"it raised {_text_of(error, hints)}"
        raise ConfigError(name, _place(error, file), text) from error


def _place(error: BaseException, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"


def _text_of(error: BaseException, hints: Mapping[str, str]) -> str:
    """Return the kind and the beginning of an error's message, with a hint on its cause."""
    kind = type(error).__name__
    message = " ".join(str(error).split())
    shortened = textwrap.shorten(message, _MAX_MESSAGE, placeholder=" ...")
    text = f"{kind}: {shortened}" if message else kind
    files = " ".join(frame.filename for frame in traceback.extract_tb(error.__traceback__))
    where = f"{kind} {message} {files}".lower()
    hint = next((hint for part, hint in hints.items() if part in where), "")
    return f"{text} ({hint})" if hint else text
