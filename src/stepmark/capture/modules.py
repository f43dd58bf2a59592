"""Track the module, layer and micro-batch of each operator, also in the backward pass.

In the forward pass it is the module that is being called. In the backward pass it is the module
in which the operator's autograd node was made: nodes are numbered as they are made, and a list
has the numbers at which modules began.
"""

import bisect
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr

# Wrappers insert these into a module's name.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})
OUTSIDE = "step"  # the module of operators outside of all modules, such as the loss


@dataclass(frozen=True, slots=True)
class ModulePosition:
    """A module's name without the part of its layer, the layer's number, and the micro-batch.

    "model.layers.12.mlp.up" is layer 12 of "model.mlp.up".
    """

    module: str = OUTSIDE
    layer: int | None = None
    microbatch: int | None = None


class ModuleTracker:
    """Follows the calls of all modules inside `with following()`."""

    def __init__(self) -> None:
        self.has_ddp = False
        self._names: dict[nn.Module, tuple[str, int | None]] = {}
        self._above: list[nn.Module] = []
        self._calls: Counter[nn.Module] = Counter()
        self._owner: ModulePosition | None = None
        self._num_again = 0  # calls of modules by the backward pass that are running
        self.begin_step()

    @property
    def inside_module(self) -> bool:
        return bool(self._above)

    @property
    def recomputes(self) -> bool:
        """Whether a backward pass is calling a module, to recompute it."""
        return self._num_again > 0

    @property
    def num_microbatches(self) -> int:
        """Number of calls of the module that is called most often from outside of modules."""
        return max(self._calls.values(), default=1)

    def name(self, root: nn.Module) -> None:
        """Name the modules in a model, by the outermost module that is passed first."""
        inner = root
        if isinstance(root, nn.parallel.DistributedDataParallel):
            self.has_ddp = True
            inner = root.module
        for path, module in inner.named_modules(remove_duplicate=True):
            self._names.setdefault(module, _name_and_layer(path, module))
        self._names.setdefault(root, self._names[inner])

    def begin_step(self) -> None:
        self._calls.clear()
        self._began: list[int] = []
        self._places: list[ModulePosition] = []
        self._enter(ModulePosition())

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        called = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = self._now
            again = in_backward()
            self._enter(self._called(module))
            self._above.append(module)
            self._num_again += again
            try:
                return called(module, *args, **kwargs)
            finally:
                self._above.pop()
                self._num_again -= again
                # Operators after the outermost call, as the loss, are of its micro-batch.
                self._enter(ModulePosition(before.module, before.layer, self._now.microbatch))

        # Hooks belong to the module's call, and run inside this.
        with mock.patch.object(nn.Module, "__call__", call):
            yield

    def owned_by(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Attribute all operators inside to this module.

        Between passes, as a pipeline gathers and reduces, they are of no micro-batch.
        """
        between = not (self.inside_module or in_backward())
        owner = self._place(module, None if between else self.here().microbatch)
        return mock.patch.object(self, "_owner", owner)

    def here(self) -> ModulePosition:
        if self._owner is not None:
            return self._owner
        if in_backward() and not self.recomputes:
            return self._of_node()
        return self._now

    def _called(self, module: nn.Module) -> ModulePosition:
        if module not in self._names:
            self.name(module)
        if self._above:
            return self._place(module, self._now.microbatch)
        if in_backward():
            return self._place(module, self._of_node().microbatch)
        self._calls[module] += 1
        return self._place(module, self._calls[module] - 1)

    def _place(self, module: nn.Module, microbatch: int | None) -> ModulePosition:
        name, layer = self._names.get(module, (type(module).__name__, None))
        return ModulePosition(name, layer, microbatch)

    def _enter(self, place: ModulePosition) -> None:
        self._now = place
        number = _get_sequence_nr()
        if self._began and self._began[-1] == number:
            self._places[-1] = place
        else:
            self._began.append(number)
            self._places.append(place)

    def _of_node(self) -> ModulePosition:
        node = torch._C._current_autograd_node()
        # Sums of gradients have no number of their own, nor have callbacks after all nodes.
        number = node._sequence_nr() if node is not None else -1
        if number < 0 or number > self._began[-1] + 2**40:
            return ModulePosition(microbatch=self._now.microbatch)
        return self._places[max(0, bisect.bisect_right(self._began, number) - 1)]


def closure_modules(step: Callable[[], object]) -> Iterator[nn.Module]:
    """Yield modules that a function closes over or its object has as attributes."""
    values: list[Any] = []
    for cell in getattr(step, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    values += getattr(getattr(step, "__self__", step), "__dict__", {}).values()
    yield from (value for value in values if isinstance(value, nn.Module))


def _name_and_layer(path: str, module: nn.Module) -> tuple[str, int | None]:
    parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
    kind = type(module).__name__.removeprefix("FSDP")
    number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    if number is None:
        return ".".join(parts) or kind, None
    rest = (*parts[: max(0, number - 1)], *parts[number + 1 :])
    return ".".join(rest) or kind, int(parts[number])


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
