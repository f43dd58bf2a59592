"""A function in a user's file, by "FILE.py:function"."""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepmark.core.errors import ConfigError

_MODULE = "stepmark_captured"


@contextlib.contextmanager
def load(spec: str) -> Iterator[tuple[Callable[[], Any], str]]:
    """The function and its file's path. The file's folder is importable inside.

    Raises ConfigError, also for what the file's own code raises.
    """
    path, name = _parsed(spec)
    sys.path.insert(0, str(path.parent))
    try:
        yield _function(path, name), str(path)
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.pop(_MODULE, None)


def _parsed(spec: str) -> tuple[Path, str]:
    text, colon, name = spec.rpartition(":")
    if not colon or name.endswith(".py"):
        text, name = spec, "build"
    path = Path(text).resolve()
    if not path.is_file():
        raise ConfigError("file", text, "a Python file that exists, as FILE.py:function")
    if path.suffix != ".py":
        raise ConfigError("file", text, "a file that ends in .py, as FILE.py:function")
    if not name.isidentifier():
        raise ConfigError("function", name, "a function's name, as FILE.py:function")
    return path, name


def _function(path: Path, name: str) -> Callable[[], Any]:
    made = importlib.util.spec_from_file_location(_MODULE, path)
    if made is None or made.loader is None:
        raise ConfigError("file", path, "a Python file")
    module = importlib.util.module_from_spec(made)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    with told(f"{path.name}:{name}", str(path)):
        made.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == _MODULE
        ]
        offered = f"a function of {path.name}" + (
            f", e.g. {', '.join(own[-5:])}" if own else ""
        )
        raise ConfigError("function", name, offered)
    function: Callable[[], Any] = found
    return function


@contextlib.contextmanager
def told(name: str, file: str) -> Iterator[None]:
    """An error in the user's code as one line, with the innermost place in the user's file."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            name, _place(error, file), f"code that runs: {_said(error)}"
        ) from error


def _place(error: BaseException, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"


def _said(error: BaseException) -> str:
    """Its kind and first words."""
    kind = type(error).__name__
    if kind == "DataDependentOutputException":
        return f"{kind}: {error}: values of tensors do not exist here"
    words = " ".join(str(error).split())
    return f"{kind}: {words[:300]}" if words else kind
