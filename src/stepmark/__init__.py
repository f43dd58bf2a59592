"""stepmark: how fast should this model train on this cluster, and how fast does it?

From Python: `replay(file, **options)` replays a workload and returns its log.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["__version__", "replay"]

if TYPE_CHECKING:
    from stepmark.app.replay import replay

_FUNCTIONS = {"replay": "stepmark.app.replay"}  # imported when they are used


def __getattr__(name: str) -> object:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
