"""The reference at the end of docs/python.md, from signatures and docstrings.

python tests/python_docs.py     write it
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import stepmark as sm

FILE = Path(__file__).parents[1] / "docs" / "python.md"
HEAD = "## Reference\n"
FUNCTIONS = (
    "workload",
    "read_workload",
    "predict",
    "plan",
    "measure",
    "run",
    "sweep",
    "replay",
    "read_run",
    "compare",
    "read_trace",
    "logs",
    "options",
)
ORDER = (*FUNCTIONS, "Model", "Table", "Workload", "Prediction", "Predictions", "Ledger")
ORDER += ("Plan", "Run", "Step", "Replay", "Comparison", "Sweep", "Trace", "Logs", "CustomOp")


def signature(function: object) -> str:
    """Return a signature without types and self: (file, *, rank=None)."""
    own = inspect.signature(inspect.unwrap(function))  # type: ignore[arg-type]
    bare = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in own.parameters.values()
        if p.name != "self"
    ]
    return str(inspect.Signature(bare))


def reference() -> str:
    return "\n".join([HEAD, *(part for name in ORDER for part in _parts(name))])


def _parts(name: str) -> Iterator[str]:
    thing = getattr(sm, name)
    made_by_us = name in ("Model", "Table", "CustomOp") or not inspect.isclass(thing)
    yield f"### `sm.{name}{signature(thing) if made_by_us else ''}`\n"
    yield f"{inspect.getdoc(thing)}\n"
    if not inspect.isclass(thing):
        return
    lines = [
        f"- `{member}{shown}`: {text}"
        for cls in thing.__mro__
        if cls is thing or cls not in (sm.Table, object)
        for member, value in vars(cls).items()
        if not member.startswith("_") and (text := _summary(value))
        for shown in [signature(value) if inspect.isfunction(value) else ""]
    ]
    if lines:
        yield "\n".join(lines) + "\n"


def _summary(value: object) -> str:
    """Return the first sentence of a docstring, of members that have one of their own."""
    documented = inspect.isfunction(value) or isinstance(value, property)
    text = inspect.getdoc(value) if documented or hasattr(value, "func") else None
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()))[0]


def guide() -> str:
    """Return what stands before the reference, which people write."""
    return FILE.read_text().partition(HEAD)[0]


if __name__ == "__main__":
    FILE.write_text(guide() + reference())
