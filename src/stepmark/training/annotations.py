"""Marks in a profiler's trace: the module and the phase in which the host calls an operator.

Names are `stepmark::` and a module's path in the bare model, or a phase. Hooks inside a graph
of torch.compile would not run, and could compile it again: such a module has marks around it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Self

from torch import nn
from torch._dynamo import OptimizedModule
from torch.profiler import record_function

from stepmark.step.trace_ops import MARK, WHOLE
from stepmark.training.transformer import canonical_name


class Annotations:
    """Marks calls of modules inside `with`, and the phase that last began."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = tuple(roots)
        self._handles: list[Any] = []
        self._open: list[Any] = []  # calls of modules are nested
        self._phase: Any = None

    def __enter__(self) -> Self:
        for path, module in (pair for root in self._roots for pair in marked_modules(root)):
            name = MARK + path

            def enter(*_call: object, name: str = name) -> None:
                self._open.append(record_function(name))
                self._open[-1].__enter__()

            self._handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                # always: recomputation in a backward pass ends with an exception.
                module.register_forward_hook(self._leave, always_call=True),
            ]
        return self

    def __exit__(self, *_error: object) -> None:
        self.end_phase()
        for handle in self._handles:
            handle.remove()

    def begin_phase(self, phase: str) -> None:
        self.end_phase()
        self._phase = record_function(MARK + phase)
        self._phase.__enter__()

    def end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _leave(self, *_call: object) -> None:
        self._open.pop().__exit__(None, None, None)


def marked_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules whose hooks run outside of compiled graphs, by their path."""
    if root._compiled_call_impl is not None:
        return
    is_compiled = isinstance(root, OptimizedModule)
    name = canonical_name(path) or is_compiled * WHOLE
    inside = [
        (f"{path}.{child}" if path else child, module)
        for child, module in root.named_children()
        if not is_compiled
    ]
    # Of a wrapper the module inside, which recomputation calls, too.
    if name and all(canonical_name(place) != name for place, _ in inside):
        yield name, root
    for place, module in inside:
        yield from marked_modules(module, place)
