"""Modules as DeepSpeed's hooks meet them: call order, parameters, gradients.

Of an architecture of one's own the model is a module; units are its modules in a row, or those
of the module that they name as `within`; pieces are modules inside a unit. A layer is a module,
too; other units are not, their pieces are called by the one around them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from stepmark.core.module import Module as Leaf
from stepmark.core.ops import Phase
from stepmark.workload.architecture import Architecture, Unit


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


def with_leaves(module: Module) -> Module:
    """With each block of experts as a leaf (zero/leaf_module_config.py)."""
    if any(child.name == "experts" for child in module.children):
        return as_leaf(module)
    return replace(module, children=tuple(with_leaves(child) for child in module.children))


def as_leaf(module: Module) -> Module:
    """Hooks at the top alone: all weights come and go together, gradients go at the end."""
    inside = tuple(_unhooked(child) for child in module.children)
    params = all_params(module)
    return replace(module, params=params, grads=params, children=inside, is_leaf=True)


def _unhooked(module: Module) -> Module:
    children = tuple(_unhooked(child) for child in module.children)
    return replace(module, params=(), grads=(), children=children, hooked=False)


def all_params(module: Module) -> tuple[Param, ...]:
    """Of a module and those inside it, in the order of registration."""
    params = {param.index: param for param in module.params}
    for child in module.children:
        params |= {param.index: param for param in all_params(child)}
    return tuple(params[index] for index in sorted(params))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The modules of a model, its parameters as registered, and what modules compute.

    used: those that a second module has as well.
    """

    root: Module
    params: tuple[Param, ...]
    used: tuple[Param, ...]
    parts: dict[str, Leaf]


def modules_of(architecture: Architecture, *, divided: bool) -> Found:
    """divided: stage 3, where a linear layer's weight has its gradient before the bias."""
    maker = _Maker(divided=divided)
    for unit in architecture.units:
        for at in range(unit.times):
            for param in unit.registered_params:
                maker.register(unit, at, param.name, param.numel)
    blocks = maker.blocks(architecture.units)
    return Found(
        root=Module(name="", children=blocks),
        params=tuple(maker.params.values()),
        used=tuple(maker.stored[name] for name in architecture.uses),
        parts=maker.parts,
    )


@dataclass(slots=True, kw_only=True)
class _Maker:
    divided: bool
    params: dict[tuple[str, int, str], Param] = field(default_factory=dict)
    stored: dict[str, Param] = field(default_factory=dict)  # of no layer, which others may use
    parts: dict[str, Leaf] = field(default_factory=dict)
    layer: int = 0

    def register(self, unit: Unit, at: int, name: str, numel: int) -> None:
        param = Param(index=len(self.params), numel=numel)
        self.params[unit.name, at, name] = param
        if not unit.is_layer:
            self.stored[name] = param

    def blocks(self, units: Iterable[Unit]) -> tuple[Module, ...]:
        modules: list[Module] = []
        for within, group in groupby(units, key=lambda unit: unit.within):
            inside = tuple(module for unit in group for module in self.unit(unit))
            modules += [Module(name=within, children=inside)] if within else inside
        return tuple(modules)

    def unit(self, unit: Unit) -> Iterator[Module]:
        for at in range(unit.times):
            layer = self.layer if unit.is_layer else None
            self.layer += int(unit.is_layer)
            pieces = tuple(self.piece(unit, at, piece, layer) for piece in unit.pieces)
            if unit.is_layer:
                yield Module(name=unit.name, children=pieces, layer=layer)
            else:
                yield from pieces

    def piece(self, unit: Unit, at: int, piece: Leaf, layer: int | None) -> Module:
        own = tuple(self.params[unit.name, at, param.name] for param in piece.params)
        tied = tuple(self.stored[name] for name in piece.uses)
        inside = tuple(self.piece(unit, at, child, layer) for child in piece.inside)
        backwards = piece.is_linear and not self.divided
        backwards |= any(param.is_expert for param in piece.params)
        return Module(
            name=piece.name,
            params=(*own, *tied),
            grads=own[::-1] if backwards else own,
            children=inside,
            parts=(self._kept(unit, piece),) if piece.work else (),
            layer=layer,
            hooked=piece.is_module,
            in_backward=piece.in_backward,
            input_grad=piece.has_input_grad,
        )

    def _kept(self, unit: Unit, leaf: Leaf) -> str:
        """The leaf's name here. Two of a unit may be called the same."""
        key = f"{unit.name}: {leaf.role}"
        layer = 0 if unit.is_layer else None
        part = Leaf(role=leaf.role, work=tuple(replace(op, layer=layer) for op in leaf.work))
        while self.parts.setdefault(key, part) != part:
            key += "'"
        return key
