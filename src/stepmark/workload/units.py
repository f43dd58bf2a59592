"""What a model is to rules that spread it over data: units of parameters and operations.

A unit is what is called, and may be sharded, as a whole: an embedding, a block, a head. The
tree of pieces inside it is that of the framework's modules, which DeepSpeed's hooks follow;
PyTorch's rules take a unit's parameters and operations in a row.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from stepmark.core.errors import ConfigError
from stepmark.core.ops import Op, Phase
from stepmark.core.workload import ComputeOp, Kernel, Operation
from stepmark.workload.decoder import Part

Ops = tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One tensor, on one rank of tp and ep. part: whose backward pass makes its gradient."""

    name: str
    shape: tuple[int, ...]
    part: str = ""
    is_norm: bool = False
    is_partial: bool = False  # under tp its gradient is a part of a sum over the ranks
    is_trained: bool = True
    is_expert: bool = False  # held by the ranks of ep
    is_copy: bool = False  # the same tensor as another one that is here

    def __post_init__(self) -> None:
        whole = all(isinstance(size, int) and size > 0 for size in self.shape)
        if not self.shape or not whole:
            raise ConfigError(self.name, self.shape, "a shape of whole numbers from 1")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def padded(self, ranks: int) -> int:
        """Elements of all shards together: rows are divided evenly, the last ones padded.

        torch, _fsdp_param.py: _init_sharded_param; _fsdp_common.py: _get_dim0_padded_size.
        """
        return -(-self.shape[0] // ranks) * ranks * math.prod(self.shape[1:])

    def shard(self, ranks: int) -> int:
        """Elements of the first rank's shard, which no padding is in."""
        return self.padded(ranks) // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A module and those inside it, in the order they run; or computation between modules.

    registered: names of the pieces inside as the module's constructor makes them, where that
    is not the order they run in. uses: names of parameters that other units store.
    """

    name: str = ""
    params: tuple[Param, ...] = ()
    parts: tuple[Part, ...] = ()
    inside: "tuple[Piece, ...]" = ()
    registered: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    is_module: bool = True  # no: hooks do not see it
    is_linear: bool = False
    in_backward: bool = True  # what it returns has a gradient
    has_input_grad: bool = True  # so has what it is given

    def __post_init__(self) -> None:
        if self.registered:
            _registered(self.name, self.inside, self.registered)

    @property
    def all_params(self) -> tuple[Param, ...]:
        """With those inside, in the order of registration."""
        inside = _registered(self.name, self.inside, self.registered)
        return (*self.params, *chain.from_iterable(piece.all_params for piece in inside))

    def walk(self) -> "Iterator[Piece]":
        """This one and those inside, in the order they run."""
        yield self
        for piece in self.inside:
            yield from piece.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """`times` of a layer: as many, one after the other, with parameters of their own each.

    fwd, bwd: in pieces, between which the module of the experts is entered and left: one
    piece, or what comes before the experts, they themselves, and what comes after. within:
    the module that calls this unit and its neighbours of the same word. pieces and registered
    are as a Piece's; a unit that only PyTorch's rules see has none.
    """

    name: str
    params: tuple[Param, ...]
    fwd: tuple[Ops, ...]
    bwd: tuple[Ops, ...]
    times: int = 1
    is_layer: bool = False
    within: str = ""
    pieces: tuple[Piece, ...] = ()
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
        pieces = _registered(self.name, self.pieces, self.registered)
        return tuple(chain.from_iterable(piece.all_params for piece in pieces))

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order they run."""
        return tuple(part for piece in self.walk() for part in piece.parts)

    def walk(self) -> Iterator[Piece]:
        for piece in self.pieces:
            yield from piece.walk()


def unit(
    name: str,
    *pieces: Piece,
    times: int | None = None,
    registered: Iterable[str] = (),
    within: str = "",
) -> Unit:
    """Pieces in the order they run. times: how many of them, as layers; None: no layer.

    registered: names of the pieces in the order of the module's constructor, if another.
    Raises ConfigError.
    """
    if times is not None and (isinstance(times, bool) or not 1 <= times <= 2**20):
        raise ConfigError(f"{name}: times", times, "a whole number from 1 to 1048576")
    order = tuple(registered)
    inside = tuple(piece for one in pieces for piece in one.walk())
    parts = [part for piece in inside for part in piece.parts]
    params = tuple(param for piece in inside for param in piece.params)
    check_names(f"{name}: parameter", [param.name for param in params])
    if order:
        _registered(name, pieces, order)
    return Unit(
        name=name,
        params=params,
        fwd=(tuple(op for part in parts for op in part.fwd),),
        bwd=(tuple(op for part in reversed(parts) for op in weights_first(part.bwd)),),
        times=times or 1,
        is_layer=times is not None,
        within=within,
        pieces=pieces,
        registered=order,
    )


def module(
    name: str, *inside: Piece, registered: Iterable[str] = (), in_backward: bool = True
) -> Piece:
    """A module of others, or of none, such as a dropout that does nothing.

    in_backward: False where what it returns has no gradient, such as a table of angles.
    """
    return Piece(
        name=name, inside=inside, registered=tuple(registered), in_backward=in_backward
    )


def stored(name: str, *shape: int, part: str = "") -> Piece:
    """A parameter whose use another piece shows, which `part` may name."""
    return Piece(name=name, params=(Param(name=name, shape=shape, part=part),))


def part(name: str, *operations: tuple[Phase, Op | Kernel]) -> Part:
    """A piece's operations, in the order they run: forward ones, then backward ones."""
    made = [
        ComputeOp(op=op, phase=phase, module=name, layer=0, microbatch=0)
        for phase, op in operations
    ]
    return Part(
        module=name,
        fwd=tuple(one for one in made if one.phase is Phase.FWD),
        bwd=tuple(one for one in made if one.phase is not Phase.FWD),
    )


def weights_first(ops: Iterable[ComputeOp]) -> tuple[ComputeOp, ...]:
    """Product by product, as autograd's nodes run (torch 2.13, MmBackward0)."""
    listed = tuple(ops)
    weights = [op for op in listed if op.phase is Phase.WGRAD]
    inputs = [op for op in listed if op.phase is Phase.DGRAD]
    if len(weights) != len(inputs):
        return listed
    pairs = [op for pair in zip(weights, inputs, strict=True) for op in pair]
    return (*pairs, *(op for op in listed if op.phase not in (Phase.WGRAD, Phase.DGRAD)))


def _registered(
    name: str, pieces: tuple[Piece, ...], order: tuple[str, ...]
) -> tuple[Piece, ...]:
    """Pieces with parameters by the order of their names. Raises ConfigError."""
    if not order:
        return pieces
    having = {piece.name: piece for piece in pieces if _has_params(piece)}
    if len(set(order)) != len(order) or not set(having) <= set(order):
        allowed = f"each of {', '.join(having)} once"
        raise ConfigError(f"{name}: registered", ", ".join(order), allowed)
    unknown = set(order) - {piece.name for piece in pieces}
    if unknown:
        allowed = f"names of {', '.join(piece.name for piece in pieces if piece.name)}"
        raise ConfigError(f"{name}: registered", min(unknown), allowed)
    return tuple(having[one] for one in order if one in having)


def _has_params(piece: Piece) -> bool:
    return any(one.params for one in piece.walk())


def check_names(what: str, names: list[str]) -> None:
    """Raises ConfigError where one comes twice."""
    twice = next((one for one, count in Counter(names).items() if count > 1), None)
    if twice:
        raise ConfigError(what, twice, "a name that no other one has")
