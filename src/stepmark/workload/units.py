"""What a model is to rules that spread it over data: units of parameters and operations.

A unit is what is called, and may be sharded, as a whole: an embedding, a block, a head. The
tree inside it is that of the framework's modules, which DeepSpeed's hooks follow; PyTorch's
rules take a unit's parameters and operations in a row.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from stepmark.core.errors import ConfigError
from stepmark.core.module import Module, Param, in_registered_order
from stepmark.core.ops import Phase
from stepmark.core.workload import ComputeOp, Operation

Ops = tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """`times` of a layer: as many, one after the other, with parameters of their own each.

    fwd, bwd: in pieces, between which the module of the experts is entered and left: one
    piece, or what comes before the experts, they themselves, and what comes after. within:
    the module that calls this unit and its neighbours of the same word. pieces and registered
    are as a Module's; a unit that only PyTorch's rules see has none.
    """

    name: str
    params: tuple[Param, ...]
    fwd: tuple[Ops, ...]
    bwd: tuple[Ops, ...]
    times: int = 1
    is_layer: bool = False
    within: str = ""
    pieces: tuple[Module, ...] = ()
    registered: tuple[str, ...] = ()

    @property
    def experts_at(self) -> int | None:
        """Which piece of fwd, and of bwd, the module of the experts is; None: not apart."""
        return 1 if len(self.fwd) == 3 else None

    @property
    def experts(self) -> tuple[Param, ...]:
        return tuple(one for one in self.params if one.is_expert)

    @property
    def others(self) -> tuple[Param, ...]:
        return tuple(one for one in self.params if not one.is_expert)

    @property
    def registered_params(self) -> tuple[Param, ...]:
        """Of one time, in the order of registration."""
        pieces = in_registered_order(self.name, self.pieces, self.registered)
        return tuple(chain.from_iterable(piece.all_params for piece in pieces))

    def walk(self) -> Iterator[Module]:
        for piece in self.pieces:
            yield from piece.walk()


def unit(
    name: str,
    *pieces: Module,
    times: int | None = None,
    registered: Iterable[str] = (),
    within: str = "",
) -> Unit:
    """Modules in the order they run. times: how many of them, as layers; None: no layer.

    registered: names of the pieces in the order of the module's constructor, if another.
    Raises ConfigError.
    """
    if times is not None and (isinstance(times, bool) or not 1 <= times <= 2**20):
        raise ConfigError(f"{name}: times", times, "a whole number from 1 to 1048576")
    order = tuple(registered)
    inside = tuple(one for each in pieces for one in each.walk())
    params = tuple(param for one in inside for param in one.params)
    check_names(f"{name}: parameter", [param.name for param in params])
    if order:
        in_registered_order(name, pieces, order)
    return Unit(
        name=name,
        params=params,
        fwd=(tuple(op for one in inside for op in one.fwd),),
        bwd=(tuple(op for one in reversed(inside) for op in weights_first(one.bwd)),),
        times=times or 1,
        is_layer=times is not None,
        within=within,
        pieces=pieces,
        registered=order,
    )


def module(
    name: str, *inside: Module, registered: Iterable[str] = (), in_backward: bool = True
) -> Module:
    """A module of others, or of none, such as a dropout that does nothing.

    in_backward: False where what it returns has no gradient, such as a table of angles.
    """
    return Module(
        name=name, inside=inside, registered=tuple(registered), in_backward=in_backward
    )


def stored(name: str, *shape: int, part: str = "") -> Module:
    """A parameter whose use another module shows, which `part` may name."""
    return Module(name=name, params=(Param(name=name, shape=shape, part=part),))


def weights_first(ops: Iterable[ComputeOp]) -> tuple[ComputeOp, ...]:
    """Product by product, as autograd's nodes run (torch 2.13, MmBackward0)."""
    listed = tuple(ops)
    weights = [op for op in listed if op.phase is Phase.WGRAD]
    inputs = [op for op in listed if op.phase is Phase.DGRAD]
    if len(weights) != len(inputs):
        return listed
    pairs = [op for pair in zip(weights, inputs, strict=True) for op in pair]
    return (*pairs, *(op for op in listed if op.phase not in (Phase.WGRAD, Phase.DGRAD)))


def check_names(what: str, names: list[str]) -> None:
    """Raises ConfigError where one comes twice."""
    twice = next((one for one, count in Counter(names).items() if count > 1), None)
    if twice:
        raise ConfigError(what, twice, "a name that no other one has")
