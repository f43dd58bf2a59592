"""An architecture of one's own as the modules that DeepSpeed's hooks meet.

The model is a module; units are its modules in a row, or those of the module that they name
as `within`; pieces are modules inside a unit. A layer is a module, too; other units are not,
their pieces are called by the one around them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from stepmark.core.module import Module as Leaf
from stepmark.workload.architecture import Architecture, Unit
from stepmark.workload.rules.deepspeed.modules import Module, Param


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The modules of a model, its parameters as registered, and what modules compute.

    used: those that a second module has as well.
    """

    root: Module
    params: tuple[Param, ...]
    used: tuple[Param, ...]
    parts: dict[str, Leaf]


def modules_of(made: Architecture, *, divided: bool) -> Found:
    """divided: stage 3, where a linear layer's weight has its gradient before the bias."""
    maker = _Maker(divided=divided)
    for one in made.units:
        for at in range(one.times):
            for param in one.registered_params:
                maker.register(one, at, param.name, param.numel)
    blocks = maker.blocks(made.units)
    return Found(
        root=Module(name="", children=blocks),
        params=tuple(maker.params.values()),
        used=tuple(maker.stored[name] for name in made.uses),
        parts=maker.parts,
    )


@dataclass(slots=True, kw_only=True)
class _Maker:
    divided: bool
    params: dict[tuple[str, int, str], Param] = field(default_factory=dict)
    stored: dict[str, Param] = field(default_factory=dict)  # of no layer, which others may use
    parts: dict[str, Leaf] = field(default_factory=dict)
    layer: int = 0

    def register(self, one: Unit, at: int, name: str, numel: int) -> None:
        param = Param(index=len(self.params), numel=numel)
        self.params[one.name, at, name] = param
        if not one.is_layer:
            self.stored[name] = param

    def blocks(self, units: Iterable[Unit]) -> tuple[Module, ...]:
        found: list[Module] = []
        for within, group in groupby(units, key=lambda one: one.within):
            inside = tuple(module for one in group for module in self.unit(one))
            found += [Module(name=within, children=inside)] if within else inside
        return tuple(found)

    def unit(self, one: Unit) -> Iterator[Module]:
        for at in range(one.times):
            layer = self.layer if one.is_layer else None
            self.layer += int(one.is_layer)
            pieces = tuple(self.piece(one, at, piece, layer) for piece in one.pieces)
            if one.is_layer:
                yield Module(name=one.name, children=pieces, layer=layer)
            else:
                yield from pieces

    def piece(self, one: Unit, at: int, piece: Leaf, layer: int | None) -> Module:
        own = tuple(self.params[one.name, at, param.name] for param in piece.params)
        used = tuple(self.stored[name] for name in piece.uses)
        inside = tuple(self.piece(one, at, child, layer) for child in piece.inside)
        backwards = piece.is_linear and not self.divided
        return Module(
            name=piece.name,
            params=(*own, *used),
            grads=own[::-1] if backwards else own,
            children=inside,
            parts=(self._kept(one, piece),) if piece.work else (),
            layer=layer,
            hooked=piece.is_module,
            in_backward=piece.in_backward,
            input_grad=piece.has_input_grad,
        )

    def _kept(self, one: Unit, leaf: Leaf) -> str:
        """The leaf's name here. Two of a unit may be called the same."""
        key = f"{one.name}: {leaf.role}"
        layer = 0 if one.is_layer else None
        made = Leaf(role=leaf.role, work=tuple(replace(op, layer=layer) for op in leaf.work))
        while self.parts.setdefault(key, made) != made:
            key += "'"
        return key
