"""Loaded by every Python process of a job under `stepmark watch`, whose PYTHONPATH leads here.

Loads the user's own sitecustomize, and stepmark_window.py once torch is imported. It imports
nothing of stepmark, whose environment may be another one, and a process without torch pays for
one entry in sys.meta_path.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all else here
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

PLAN = "STEPMARK_WATCH"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _TorchFinder:
    """Finder of torch alone, which asks the other finders and adds a call after the import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_begin(module: ModuleType) -> None:
                load(module)
                self._begin()

            try:
                spec.loader.exec_module = load_and_begin  # type: ignore[method-assign]
            except (AttributeError, TypeError):  # a loader that takes no attributes
                _warn("no profile, because torch has an unknown loader")
        return spec

    def _begin(self) -> None:
        try:
            sys.meta_path.remove(self)
            sys.path.insert(0, _HERE)
            try:
                window = __import__("stepmark_window")
            finally:
                sys.path.remove(_HERE)
            window.begin(os.environ[PLAN])
        except Exception as error:  # noqa: BLE001, the job goes on whatever happens here
            _warn(f"no profile: {error!r}")


def _warn(text: str) -> None:
    sys.stderr.write(f"stepmark watch: pid {os.getpid()}: {text}\n")


if PLAN in os.environ:
    sys.meta_path.insert(0, _TorchFinder())
# The user's own, which this file hides. Where there is none, the error is the one that Python
# expects and ignores.
sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != _HERE]
del sys.modules["sitecustomize"]
__import__("sitecustomize")
