"""User-defined architectures: units of parameters and operations, in the order they run.

Data-parallel rules need only a function from a `Batch` to an `Architecture`:

    def build(batch: Batch) -> Architecture:
        table = unit("embed", batch.embedding("table", 1000, 512))
        block = unit("layers", batch.norm("norm", 512), batch.linear("mlp", 512, 512), times=4)
        head = unit("head", batch.linear("head", 1000, 512), batch.loss("loss", 1000))
        return Architecture(name="mine", units=(table, block, head))

`stepmark workload generate --model FILE.py:build` calls it: docs/howto/custom-models.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Activation, Attention, CrossEntropy, Norm, Phase, Rope
from stepmark.model.product_precision import ProductPrecision
from stepmark.step.layout import Inputs, is_cast, linear_products, table_lookup, tensor_sum
from stepmark.step.module import Module, Param, between, both, in_registered_order, work_of
from stepmark.step.workload import ComputeOp, Operation
from stepmark.workloads.job import Job, Spread, check_single

Ops = tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Modules that run in a row. times: consecutive copies, each with its own parameters.

    fwd, bwd: one piece, or three: before the experts, the experts, after them. within: the
    module that calls this unit and its neighbours of the same name. pieces and registered are
    as a Module's; a unit that only PyTorch's rules see has none.
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
        """Index of the experts' piece in fwd and in bwd; None: they have no piece."""
        return 1 if len(self.fwd) == 3 else None

    @property
    def experts(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.is_expert)

    @property
    def others(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if not param.is_expert)

    @property
    def registered_params(self) -> tuple[Param, ...]:
        """Parameters of one copy, in the order of registration."""
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
    """Return modules, in the order they run, as a unit.

    times: consecutive copies, each a layer; None: no layer. registered: names of the pieces in
    the order of the module's constructor, if another. Raises ConfigError.
    """
    if times is not None and (isinstance(times, bool) or not 1 <= times <= 2**20):
        raise ConfigError(f"{name}: times", times, "a whole number from 1 to 1048576")
    order = tuple(registered)
    leaves = tuple(leaf for piece in pieces for leaf in piece.walk())
    params = tuple(param for leaf in leaves for param in leaf.params)
    check_names(f"{name}: parameter", [param.name for param in params])
    if order:
        in_registered_order(name, pieces, order)
    return Unit(
        name=name,
        params=params,
        fwd=(tuple(op for leaf in leaves for op in leaf.fwd),),
        bwd=(tuple(op for leaf in reversed(leaves) for op in weights_first(leaf.bwd)),),
        times=times or 1,
        is_layer=times is not None,
        within=within,
        pieces=pieces,
        registered=order,
    )


def module(
    name: str, *inside: Module, registered: Iterable[str] = (), in_backward: bool = True
) -> Module:
    """Return a module of others, or of none, such as a dropout that does nothing.

    in_backward: False where its output has no gradient, such as a table of angles.
    """
    return Module(
        name=name, inside=inside, registered=tuple(registered), in_backward=in_backward
    )


def stored(name: str, *shape: int, part: str = "") -> Module:
    """Return a parameter that another module uses; `part` may name that module."""
    return Module(name=name, params=(Param(name=name, shape=shape, part=part),))


def weights_first(ops: Iterable[ComputeOp]) -> tuple[ComputeOp, ...]:
    """Sort gradients product by product, as autograd's nodes run (torch 2.13, MmBackward0).

    The output gradient's cast, which both products need, stays before them.
    """
    ops = tuple(ops)
    casts = [op for op in ops if is_cast(op)]
    ops = tuple(op for op in ops if not is_cast(op))
    weights = [op for op in ops if op.phase is Phase.WGRAD]
    inputs = [op for op in ops if op.phase is Phase.DGRAD]
    if len(weights) != len(inputs):
        return (*casts, *ops)
    pairs = [op for pair in zip(weights, inputs, strict=True) for op in pair]
    products = (Phase.WGRAD, Phase.DGRAD)
    first = next((index for index, op in enumerate(ops) if op.phase in products), 0)
    others = [op for op in ops[first:] if op.phase not in products]
    return (*casts, *ops[:first], *pairs, *others)


def check_names(what: str, names: list[str]) -> None:
    """Raise ConfigError for a name that occurs twice."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice:
        raise ConfigError(what, twice, "a unique name")


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
    """A whole model. Raises ConfigError for names that are not unique."""

    name: str
    units: tuple[Unit, ...]
    source: str = ""  # of its sizes, for the reader

    def __post_init__(self) -> None:
        if not self.units or not self.num_params:
            raise ConfigError("units", len(self.units), "one or more, with parameters")
        names = [
            param.name for unit in self.units if not unit.is_layer for param in unit.params
        ]
        check_names("unit", [unit.name for unit in self.units])
        check_names("parameter", names)
        for name in self.uses:
            if name not in names:
                raise not_one_of("tied", name, names)

    @property
    def num_params(self) -> int:
        return sum(
            unit.times * sum(param.numel for param in unit.params) for unit in self.units
        )

    @property
    def num_layers(self) -> int:
        return sum(unit.times for unit in self.units if unit.is_layer)

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of tied parameters."""
        return tuple(
            name for unit in self.units for piece in unit.walk() for name in piece.uses
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob(Spread):
    """A user-defined architecture over data ranks. Raises ConfigError for any other axis."""

    architecture: Architecture
    seq_len: int

    def __post_init__(self) -> None:
        Spread.__post_init__(self)
        allowed = f"1: {self.name} supports only data-parallel ranks"
        check_single(self.parallel, ("tp", "pp", "cp", "ep"), allowed)

    @property
    def name(self) -> str:
        return self.architecture.name

    @property
    def num_layers(self) -> int:
        return self.architecture.num_layers

    @property
    def config(self) -> ModelConfig | None:
        """None, because it is no decoder."""
        return None


AnyJob = Job | OwnJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch on one rank; its methods return the modules that process it."""

    mbs: int
    seq_len: int
    dtype: DType = DType.BF16
    products: ProductPrecision | None = None  # of linear layers, where it is another

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
        narrow: bool = True,
    ) -> Module:
        """Return y = x W.T (+ b), W [out, width]. rows: of x; None: the tokens.

        tied: another unit's parameter in place of W, e.g. "table.weight". narrow: False for a
        head or a router, whose products --precision leaves in bf16.
        """
        inputs = Inputs(
            mbs=self.mbs,
            seq_len=self.seq_len,
            dtype=self.dtype,
            products=self.products if narrow else None,
        )
        products = linear_products(inputs, rows or self.tokens, out, width)
        params = [] if tied else [Param(name=f"{name}.weight", shape=(out, width), part=name)]
        if bias:
            params.append(Param(name=f"{name}.bias", shape=(out,), part=name))
        return Module(
            name=name,
            params=tuple(params),
            role=name,
            work=work_of(name, *products),
            uses=(tied,) if tied else (),
            is_linear=True,
        )

    def embedding(self, name: str, rows: int, dim: int) -> Module:
        """Return the lookup of each token in a table [rows, dim]."""
        return Module(
            name=name,
            params=(Param(name=f"{name}.weight", shape=(rows, dim), part=name),),
            role=name,
            work=work_of(name, *table_lookup(self.tokens * dim * self.dtype.itemsize)),
            has_input_grad=False,
        )

    def norm(self, name: str, width: int, *, kind: str = "layernorm") -> Module:
        """Return a layernorm (weight and bias) or rmsnorm (weight) over the last dimension."""
        suffixes = ("weight", "bias") if kind == "layernorm" else ("weight",)
        params = [
            Param(name=f"{name}.{suffix}", shape=(width,), part=name, is_norm=True)
            for suffix in suffixes
        ]
        op = Norm(tokens=self.tokens, hidden=width, kind=kind, dtype=self.dtype)
        work = work_of(name, *both(op))
        return Module(name=name, role=name, params=tuple(params), work=work)

    def activation(self, name: str, width: int, *, kind: str = "gelu") -> Module:
        """Return a gelu, or a swiglu of two inputs. width: of the result."""
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
        """Return softmax(q k.T) v. seq_q, seq_kv: queries and keys, if not causal."""
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
        """Return the sum of two tensors."""
        return tensor_sum(name, self.tokens * width * self.dtype.itemsize)

    def loss(self, name: str, vocab: int, *, rows: int | None = None) -> Module:
        """Return the cross-entropy of logits over vocab classes."""
        op = CrossEntropy(tokens=rows or self.tokens, vocab=vocab, dtype=self.dtype)
        return between(name, *both(op))


Build = Callable[[Batch], Architecture]
