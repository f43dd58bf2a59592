"""Modules as DeepSpeed's hooks meet them: call order, parameters, gradients."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepmark.core.ops import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """index: place in the order of registration."""

    index: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module that hooks see, or computation between modules (not hooked).

    grads: parameters whose gradient its backward pass completes, in that order. A tied table
    is a parameter of the head as well, but complete only when the embedding is done.
    """

    name: str
    params: tuple[Param, ...] = ()
    grads: tuple[Param, ...] = ()
    children: "tuple[Module, ...]" = ()
    parts: tuple[str, ...] = ()  # roles of leaves, in forward order
    layer: int | None = None
    hooked: bool = True
    in_backward: bool = True  # its output has a gradient
    input_grad: bool = True  # so has its input: else no hook runs after its backward pass
    is_leaf: bool = False  # hooks treat all inside it as one


Event = tuple[str, Module, Phase]
ENTER, COMPUTE, GRADS, LEAVE = "enter", "compute", "grads", "leave"


def forward(module: Module) -> Iterator[Event]:
    """What happens in a forward pass; hooks before and after each module."""
    if module.hooked:
        yield ENTER, module, Phase.FWD
    yield COMPUTE, module, Phase.FWD
    for child in module.children:
        yield from forward(child)
    if module.hooked:
        yield LEAVE, module, Phase.FWD


def backward(module: Module) -> Iterator[Event]:
    """The same for a backward pass: a module's hook first, then its children's, last first."""
    if not module.in_backward:
        return
    if module.hooked:
        yield ENTER, module, Phase.BWD
    for child in reversed(module.children):
        yield from backward(child)
    yield COMPUTE, module, Phase.BWD
    if module.grads:
        yield GRADS, module, Phase.BWD
    if module.hooked and module.input_grad:
        yield LEAVE, module, Phase.BWD


def as_leaf(module: Module) -> Module:
    """Hooks at the top alone: all weights come and go together, gradients go at the end."""
    inside = tuple(_unhooked(child) for child in module.children)
    held = all_params(module)
    return replace(module, params=held, grads=held, children=inside, is_leaf=True)


def _unhooked(module: Module) -> Module:
    children = tuple(_unhooked(child) for child in module.children)
    return replace(module, params=(), grads=(), children=children, hooked=False)


def all_params(module: Module) -> tuple[Param, ...]:
    """Of a module and those inside it, in the order of registration."""
    found = {param.index: param for param in module.params}
    for child in module.children:
        found |= {param.index: param for param in all_params(child)}
    return tuple(found[index] for index in sorted(found))
