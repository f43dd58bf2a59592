"""Load a function from a user's file, by "FILE.py:function"."""

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError

_MODULE = "stepmark_captured"
_MAX_MESSAGE = 300  # characters of an error's message
_NO_GPU = "capturing needs no GPU and sees none: use the device type cpu"
_HINTS = {  # by a part of an error's message, in lower case
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
    path, name = _parse(spec)
    sys.path.insert(0, str(path.parent))
    try:
        yield _function(path, name, arguments), str(path)
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.pop(_MODULE, None)


def _parse(spec: str) -> tuple[Path, str]:
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


def _function(path: Path, name: str, arguments: int) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError("file", path, "a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    with reported(f"{path.name}:{name}", str(path)):
        spec.loader.exec_module(module)
    value = getattr(module, name, None)
    if not callable(value):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == _MODULE
        ]
        examples = f", e.g. {', '.join(own[-5:])}" if own else ""
        raise ConfigError("function", name, f"a function of {path.name}{examples}")
    try:
        inspect.signature(value).bind(*range(arguments))
    except TypeError:
        count = f"{arguments} argument" if arguments else "no argument"
        allowed = f"a function that is called with {count}"
        raise ConfigError("function", name, allowed) from None
    function: Callable[..., Any] = value
    return function


@contextlib.contextmanager
def reported(name: str, file: str) -> Iterator[None]:
    """Raise errors of the user's code as one line, with the innermost line in its file."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit, CaptureTimeoutError) as error:
        text = f"it raised {_text_of(error)}"
        raise ConfigError(name, _place(error, file), text) from error


def _place(error: BaseException, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"


def _text_of(error: BaseException) -> str:
    """Return the kind and the beginning of an error's message, with a hint on its cause."""
    kind = type(error).__name__
    message = " ".join(str(error).split())
    text = f"{kind}: {message[:_MAX_MESSAGE]}" if message else kind
    files = " ".join(frame.filename for frame in traceback.extract_tb(error.__traceback__))
    hints = (
        hint for part, hint in _HINTS.items() if part in f"{kind} {message} {files}".lower()
    )
    hint = next(hints, "")
    return f"{text} ({hint})" if hint else text
