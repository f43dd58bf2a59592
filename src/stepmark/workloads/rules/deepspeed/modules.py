"""Modules in the order of DeepSpeed's hooks: calls, parameters, gradients.

The model of a user-defined architecture is a module. Its modules are the layers, the pieces of
other units, and the modules that units name as `within`; pieces are modules inside a layer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from stepmark.model.ops import Phase
from stepmark.step.module import Module as Leaf
from stepmark.workloads.architecture import Architecture, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """index: place in the order of registration."""

    index: int
    numel: int

    def padded(self, ranks: int) -> int:
        """Return the elements, padded to a multiple of the ranks."""
        return -(-self.numel // ranks) * ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module with hooks, or computation between modules (not hooked).

    grads: parameters whose gradient its backward pass completes, in that order. A tied table
    is a parameter of the head as well, but its gradient is complete only after the embedding.
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
    is_leaf: bool = False  # hooks treat it and the modules inside as one


Event = tuple[str, Module, Phase]
ENTER = "enter"
COMPUTE = "compute"
GRADS = "grads"
LEAVE = "leave"


def forward(module: Module) -> Iterator[Event]:
    """Yield the events of a forward pass; hooks run before and after each module."""
    if module.hooked:
        yield ENTER, module, Phase.FWD
    yield COMPUTE, module, Phase.FWD
    for child in module.children:
        yield from forward(child)
    if module.hooked:
        yield LEAVE, module, Phase.FWD


def backward(module: Module) -> Iterator[Event]:
    """Yield the events of a backward pass: a module's hook, then its children, last first."""
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
    """Return the modules with each block of experts as a leaf (zero/leaf_module_config.py).

    A leaf has hooks only at the top, so its weights are gathered together.
    """
    if all(child.name != "experts" for child in module.children):
        return replace(module, children=tuple(map(with_leaves, module.children)))
    children = tuple(map(_unhooked, module.children))
    params = all_params(module)
    return replace(module, params=params, grads=params, children=children, is_leaf=True)


def _unhooked(module: Module) -> Module:
    children = tuple(map(_unhooked, module.children))
    return replace(module, params=(), grads=(), children=children, hooked=False)


def all_params(module: Module) -> tuple[Param, ...]:
    """Return the parameters of a module and those inside it, in the order of registration."""
    params = {param.index: param for param in module.params}
    for child in module.children:
        params |= {param.index: param for param in all_params(child)}
    return tuple(params[index] for index in sorted(params))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTree:
    """The modules of a model, its parameters as registered, and the modules' computation.

    tied: parameters that a second module has as well.
    """

    root: Module
    params: tuple[Param, ...]
    tied: tuple[Param, ...]
    parts: dict[str, Leaf]


def modules_of(architecture: Architecture, *, divided: bool) -> ModuleTree:
    """Return the modules.

    divided: at stage 3, where a linear layer's weight has its gradient before the bias.
    """
    builder = _ModuleBuilder(divided=divided)
    for unit in architecture.units:
        for copy in range(unit.times):
            for param in unit.registered_params:
                builder.register(unit, copy, param.name, param.numel)
    blocks = builder.blocks(architecture.units)
    return ModuleTree(
        root=Module(name="", children=blocks),
        params=tuple(builder.params.values()),
        tied=tuple(builder.stored[name] for name in architecture.uses),
        parts=builder.parts,
    )


@dataclass(slots=True, kw_only=True)
class _ModuleBuilder:
    divided: bool
    params: dict[tuple[str, int, str], Param] = field(default_factory=dict)
    stored: dict[str, Param] = field(default_factory=dict)  # of no layer, may be tied
    parts: dict[str, Leaf] = field(default_factory=dict)
    layer: int = 0

    def register(self, unit: Unit, copy: int, name: str, numel: int) -> None:
        param = Param(index=len(self.params), numel=numel)
        self.params[unit.name, copy, name] = param
        if not unit.is_layer:
            self.stored[name] = param

    def blocks(self, units: Iterable[Unit]) -> tuple[Module, ...]:
        modules: list[Module] = []
        for within, group in groupby(units, key=lambda unit: unit.within):
            inside = tuple(module for unit in group for module in self.unit(unit))
            modules += [Module(name=within, children=inside)] if within else inside
        return tuple(modules)

    def unit(self, unit: Unit) -> Iterator[Module]:
        for copy in range(unit.times):
            layer = self.layer if unit.is_layer else None
            self.layer += int(unit.is_layer)
            pieces = tuple(self.piece(unit, copy, piece, layer) for piece in unit.pieces)
            if unit.is_layer:
                yield Module(name=unit.name, children=pieces, layer=layer)
            else:
                yield from pieces

    def piece(self, unit: Unit, copy: int, piece: Leaf, layer: int | None) -> Module:
        own = tuple(self.params[unit.name, copy, param.name] for param in piece.params)
        tied = tuple(self.stored[name] for name in piece.uses)
        inside = tuple(self.piece(unit, copy, child, layer) for child in piece.inside)
        backwards = piece.is_linear and not self.divided
        backwards |= any(param.is_expert for param in piece.params)
        return Module(
            name=piece.name,
            params=(*own, *tied),
            grads=own[::-1] if backwards else own,
            children=inside,
            parts=(self._add_part(unit, piece),) if piece.work else (),
            layer=layer,
            hooked=piece.is_module,
            in_backward=piece.in_backward,
            input_grad=piece.has_input_grad,
        )

    def _add_part(self, unit: Unit, leaf: Leaf) -> str:
        """Add a leaf's work and return its key. Different leaves of a unit may share a role."""
        key = f"{unit.name}: {leaf.role}"
        layer = 0 if unit.is_layer else None
        part = Leaf(role=leaf.role, work=tuple(replace(op, layer=layer) for op in leaf.work))
        while self.parts.setdefault(key, part) != part:
            key += "'"
        return key
