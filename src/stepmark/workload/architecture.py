"""An architecture of one's own: units of parameters and operations, in the order they run.

A function from a `Batch` to an `Architecture` is all that data-parallel rules need:

    def build(batch: Batch) -> Architecture:
        table = unit("embed", batch.embedding("table", 1000, 512))
        block = unit("layers", batch.norm("norm", 512), batch.linear("mlp", 512, 512), times=4)
        head = unit("head", batch.linear("head", 1000, 512), batch.loss("loss", 1000))
        return Architecture(name="mine", units=(table, block, head))

Parameters are named and ordered as the framework registers them: buckets follow that order.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from stepmark.core.dtypes import DType
from stepmark.core.ops import (
    Activation,
    Attention,
    Copy,
    CrossEntropy,
    Gemm,
    Layout,
    Norm,
    Op,
    Phase,
    Rope,
)
from stepmark.core.workload import ComputeOp, Kernel
from stepmark.workload.decoder import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A stored tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A module: its parameters and what it does; either may be empty."""

    params: tuple[Param, ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Pieces that run one after the other, `times` times with parameters of their own.

    What runs several times is a layer: FSDP gathers it as a group of its own.
    """

    name: str
    pieces: tuple[Piece, ...]
    times: int = 1

    @property
    def params(self) -> tuple[Param, ...]:
        """Of one time."""
        return tuple(chain.from_iterable(piece.params for piece in self.pieces))

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(chain.from_iterable(piece.parts for piece in self.pieces))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A whole model."""

    name: str
    units: tuple[Unit, ...]
    source: str = ""

    @property
    def num_params(self) -> int:
        return sum(
            unit.times * sum(param.numel for param in unit.params) for unit in self.units
        )


def unit(name: str, *pieces: Piece, times: int = 1) -> Unit:
    return Unit(name=name, pieces=pieces, times=times)


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
        self, name: str, out: int, width: int, *, bias: bool = False, rows: int | None = None
    ) -> Piece:
        """y = x W.T (+ b), W [out, width]; rows: tokens unless told."""
        m = rows or self.tokens
        products = (
            (Phase.FWD, m, out, width, Layout.NT),
            (Phase.DGRAD, m, width, out, Layout.NN),
            (Phase.WGRAD, out, width, m, Layout.TN),
        )
        operations: list[tuple[Phase, Op | Kernel]] = [
            (phase, Gemm(m=m, n=n, k=k, dtype=self.dtype, layout=layout))
            for phase, m, n, k, layout in products
        ]
        stored = [Param(name=f"{name}.weight", shape=(out, width))]
        if bias:
            stored.append(Param(name=f"{name}.bias", shape=(out,)))
        return Piece(params=tuple(stored), parts=(part(name, *operations),))

    def embedding(self, name: str, rows: int, dim: int, *, tied: bool = False) -> Piece:
        """Lookup of each token; tied: the table is stored elsewhere."""
        moved = self.tokens * dim * self.dtype.itemsize
        stored = () if tied else (Param(name=f"{name}.weight", shape=(rows, dim)),)
        added = Kernel(name="embedding_backward", flops=0, bytes_moved=3 * moved)
        looked_up = part(name, (Phase.FWD, Copy(num_bytes=moved)), (Phase.WGRAD, added))
        return Piece(params=stored, parts=(looked_up,))

    def norm(self, name: str, width: int, *, kind: str = "layernorm") -> Piece:
        """layernorm (weight and bias) or rmsnorm (weight) over the last dimension."""
        stored = [Param(name=f"{name}.weight", shape=(width,))]
        if kind == "layernorm":
            stored.append(Param(name=f"{name}.bias", shape=(width,)))
        op = Norm(tokens=self.tokens, hidden=width, kind=kind, dtype=self.dtype)
        return Piece(params=tuple(stored), parts=(part(name, *_both(op)),))

    def activation(self, name: str, width: int, *, kind: str = "gelu") -> Piece:
        """gelu, or swiglu of a gate beside (width: of the result)."""
        op = Activation(tokens=self.tokens, width=width, kind=kind, dtype=self.dtype)
        return Piece(parts=(part(name, *_both(op)),))

    def rope(self, name: str, heads: int, kv_heads: int, rotated: int) -> Piece:
        op = Rope(
            batch=self.mbs,
            seq=self.seq_len,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=rotated,
            dtype=self.dtype,
        )
        return Piece(parts=(part(name, *_both(op)),))

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
    ) -> Piece:
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
        return Piece(parts=(part(name, *_both(op)),))

    def add(self, name: str, width: int) -> Piece:
        """A sum of two tensors; backward, of two gradients."""
        moved = 3 * self.tokens * width * self.dtype.itemsize
        op = Kernel(name="add", flops=0, bytes_moved=moved)
        return Piece(parts=(part(name, (Phase.FWD, op), (Phase.BWD, op)),))

    def loss(self, name: str, vocab: int, *, rows: int | None = None) -> Piece:
        """Cross-entropy of logits over vocab classes."""
        op = CrossEntropy(tokens=rows or self.tokens, vocab=vocab, dtype=self.dtype)
        return Piece(parts=(part(name, *_both(op)),))


def part(module: str, *operations: tuple[Phase, Op | Kernel]) -> Part:
    """A module's operations, in the order they run: forward ones, then backward ones."""
    made = [
        ComputeOp(op=op, phase=phase, module=module, layer=0, microbatch=0)
        for phase, op in operations
    ]
    return Part(
        module=module,
        fwd=tuple(one for one in made if one.phase is Phase.FWD),
        bwd=tuple(one for one in made if one.phase is not Phase.FWD),
    )


def stored(name: str, *shape: int) -> Piece:
    """A parameter that is only kept, or whose use another piece shows."""
    return Piece(params=(Param(name=name, shape=shape),))


def _both(
    op: Norm | Activation | Rope | Attention | CrossEntropy,
) -> Iterator[tuple[Phase, Op]]:
    yield Phase.FWD, op
    yield Phase.BWD, replace(op, phase=Phase.BWD)


Build = Callable[[Batch], Architecture]
