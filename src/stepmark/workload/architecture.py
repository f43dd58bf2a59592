"""An architecture of one's own: units of parameters and operations, in the order they run.

A function from a `Batch` to an `Architecture` is all that data-parallel rules need:

    def build(batch: Batch) -> Architecture:
        table = unit("embed", batch.embedding("table", 1000, 512))
        block = unit("layers", batch.norm("norm", 512), batch.linear("mlp", 512, 512), times=4)
        head = unit("head", batch.linear("head", 1000, 512), batch.loss("loss", 1000))
        return Architecture(name="mine", units=(table, block, head))

`stepmark workload generate --model FILE.py:build` reads it: docs/howto/custom-models.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.model import ModelConfig
from stepmark.core.module import Module, Param, between, both, in_registered_order, work_of
from stepmark.core.ops import Activation, Attention, Copy, CrossEntropy, Norm, Phase, Rope
from stepmark.core.workload import ComputeOp, Kernel, Operation
from stepmark.workload.job import Job, Spread
from stepmark.workload.layout import Inputs, linear_products

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


__all__ = [
    "Architecture",
    "Batch",
    "Build",
    "Module",
    "OwnJob",
    "Param",
    "Unit",
    "module",
    "stored",
    "unit",
    "work_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A whole model. Raises ConfigError for what rules could not tell apart."""

    name: str
    units: tuple[Unit, ...]
    source: str = ""  # where its sizes are from, for the reader

    def __post_init__(self) -> None:
        if not self.units or not self.num_params:
            raise ConfigError("units", len(self.units), "one or more, with parameters")
        once = [param.name for one in self.units if not one.is_layer for param in one.params]
        check_names("unit", [one.name for one in self.units])
        check_names("parameter", once)
        for used in self.uses:
            if used not in once:
                raise ConfigError("tied", used, f"one of {', '.join(once)}")

    @property
    def num_params(self) -> int:
        return sum(one.times * sum(param.numel for param in one.params) for one in self.units)

    @property
    def num_layers(self) -> int:
        return sum(one.times for one in self.units if one.is_layer)

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of tied parameters."""
        return tuple(name for one in self.units for piece in one.walk() for name in piece.uses)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob(Spread):
    """An architecture spread over data ranks. Raises ConfigError for any other axis."""

    architecture: Architecture
    seq_len: int

    def __post_init__(self) -> None:
        Spread.__post_init__(self)
        for axis in ("tp", "pp", "cp", "ep"):
            if getattr(self.parallel, axis) > 1:
                allowed = f"1: {self.name} is spread over data ranks alone"
                raise ConfigError(axis, getattr(self.parallel, axis), allowed)

    @property
    def name(self) -> str:
        return self.architecture.name

    @property
    def num_layers(self) -> int:
        return self.architecture.num_layers

    @property
    def config(self) -> ModelConfig | None:
        """Of no decoder that widths describe."""
        return None


AnyJob = Job | OwnJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch on one rank, and what can be done with it."""

    mbs: int
    seq_len: int
    dtype: DType = DType.BF16

    @property
    def tokens(self) -> int:
        return self.mbs * self.seq_len

    def linear(
        self,
        name: str,
        out: int,
        width: int,
        *,
        bias: bool = False,
        rows: int | None = None,
        tied: str = "",
    ) -> Module:
        """y = x W.T (+ b), W [out, width]; rows: tokens unless told.

        tied: name of the parameter of another unit that W is, e.g. "table.weight".
        """
        inputs = Inputs(mbs=self.mbs, seq_len=self.seq_len, dtype=self.dtype)
        products = linear_products(inputs, rows or self.tokens, out, width)
        kept = [] if tied else [Param(name=f"{name}.weight", shape=(out, width), part=name)]
        if bias:
            kept.append(Param(name=f"{name}.bias", shape=(out,), part=name))
        return Module(
            name=name,
            params=tuple(kept),
            role=name,
            work=work_of(name, *products),
            uses=(tied,) if tied else (),
            is_linear=True,
        )

    def embedding(self, name: str, rows: int, dim: int) -> Module:
        """Lookup of each token in a table [rows, dim]."""
        moved = self.tokens * dim * self.dtype.itemsize
        added = Kernel(name="embedding_backward", flops=0, bytes_moved=3 * moved)
        return Module(
            name=name,
            params=(Param(name=f"{name}.weight", shape=(rows, dim), part=name),),
            role=name,
            work=work_of(name, (Phase.FWD, Copy(num_bytes=moved)), (Phase.WGRAD, added)),
            has_input_grad=False,
        )

    def norm(self, name: str, width: int, *, kind: str = "layernorm") -> Module:
        """layernorm (weight and bias) or rmsnorm (weight) over the last dimension."""
        names = ("weight", "bias") if kind == "layernorm" else ("weight",)
        kept = [
            Param(name=f"{name}.{one}", shape=(width,), part=name, is_norm=True)
            for one in names
        ]
        op = Norm(tokens=self.tokens, hidden=width, kind=kind, dtype=self.dtype)
        work = work_of(name, *both(op))
        return Module(name=name, role=name, params=tuple(kept), work=work)

    def activation(self, name: str, width: int, *, kind: str = "gelu") -> Module:
        """gelu, or swiglu of a gate beside (width: of the result)."""
        op = Activation(tokens=self.tokens, width=width, kind=kind, dtype=self.dtype)
        return between(name, *both(op))

    def rope(self, name: str, heads: int, kv_heads: int, rotated: int) -> Module:
        op = Rope(
            batch=self.mbs,
            seq=self.seq_len,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=rotated,
            dtype=self.dtype,
        )
        return between(name, *both(op))

    def attention(
        self,
        name: str,
        heads: int,
        head_dim: int,
        *,
        kv_heads: int | None = None,
        causal: bool = True,
        seq_q: int | None = None,
        seq_kv: int | None = None,
    ) -> Module:
        """softmax(q k.T) v; seq_q queries against seq_kv keys each where it is not causal."""
        op = Attention(
            batch=self.mbs,
            seq_q=seq_q or self.seq_len,
            seq_kv=seq_kv or self.seq_len,
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim_qk=head_dim,
            head_dim_v=head_dim,
            causal=causal,
            dtype=self.dtype,
        )
        return between(name, *both(op))

    def add(self, name: str, width: int) -> Module:
        """A sum of two tensors; backward, of two gradients."""
        moved = 3 * self.tokens * width * self.dtype.itemsize
        op = Kernel(name="add", flops=0, bytes_moved=moved)
        return between(name, (Phase.FWD, op), (Phase.BWD, op))

    def loss(self, name: str, vocab: int, *, rows: int | None = None) -> Module:
        """Cross-entropy of logits over vocab classes."""
        op = CrossEntropy(tokens=rows or self.tokens, vocab=vocab, dtype=self.dtype)
        return between(name, *both(op))


Build = Callable[[Batch], Architecture]
