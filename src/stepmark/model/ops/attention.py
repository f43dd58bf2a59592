"""Attention, softmax(q @ k.T) @ v, in all variants that training uses."""

from dataclasses import dataclass, replace
from typing import Any

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops.fields import MULTIPLIED, Operator, Phase, choice, count, validate
from stepmark.model.packing import Packing

_DTYPES = (*MULTIPLIED, DType.FP8_E4M3, DType.FP8_E5M2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Operator):
    """Scaled dot-product attention on one rank.

    q [batch, seq_q, heads, head_dim_qk], k [batch, seq_kv, kv_heads, head_dim_qk],
    v [batch, seq_kv, kv_heads, head_dim_v]. `varlen` packs sequences of these lengths into
    one row (batch 1, seq_q = seq_kv = their sum) that do not attend to each other.
    `piece_mean`, `piece_max`: rows are packed from such sequences, of which these are the mean
    and the greatest number of queries (model/packing.py has their law); without a causal mask
    each has seq_kv / seq_q times as many keys (a step of a ring). `window` w > 0: a query
    attends to its own key and the w - 1 keys before it. `sinks`: the exponential of a learned
    logit per query head is added to each softmax's denominator (arXiv:2309.17453; gpt-oss).
    `softcap` c > 0: scores become c tanh(scores / c) before the mask (Gemma 2,
    arXiv:2408.00118). Neither counts as FLOPs or bytes: they are no products, and a logit per
    head. Bytes and memory are of a fused kernel; the math backend adds its score matrix.
    fp8: of q, k, v and, backward, o and do, whose type names the pass (e5m2: do in e5m2, the
    others in e4m3); results count as bf16, as those of narrow products.
    """

    batch: int = count("sequences")
    seq_q: int = count("queries per sequence")
    seq_kv: int = count("keys per sequence")
    heads: int = count("query heads")
    kv_heads: int = count("key/value heads")
    head_dim_qk: int = count("width of a query and key head", high=2**16)
    head_dim_v: int = count("width of a value head", high=2**16)
    causal: bool = choice("mask the future", default=True)
    window: int = count("sliding window in keys; 0 = none", low=0, default=0)
    varlen: tuple[int, ...] = count("packed sequence lengths, e.g. 1024+512", default=())
    piece_mean: float = count(
        "mean length of packed sequences; 0 = none", low=0, default=0.0, formerly=0.0
    )
    piece_max: float = count(
        "greatest length of packed sequences", low=0, default=0.0, formerly=0.0
    )
    sinks: bool = choice(
        "a learned logit per head in the denominators", default=False, formerly=False
    )
    softcap: float = count(
        "caps scores: softcap * tanh(scores / softcap)",
        low=0,
        high=10**6,
        default=0.0,
        formerly=0.0,
    )
    dtype: DType = choice("element type", default=DType.BF16, allowed=_DTYPES)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=("fwd", "bwd"))

    def __post_init__(self) -> None:
        validate(self)
        if self.heads % self.kv_heads:
            raise ConfigError("heads", self.heads, f"a multiple of kv-heads ({self.kv_heads})")
        if self.causal and self.seq_q != self.seq_kv:
            # Backends differ in where they place the diagonal in this case.
            raise ConfigError(
                "seq-kv", self.seq_kv, f"equal to --seq-q ({self.seq_q}) with a causal mask"
            )
        if self.window and not self.causal:
            raise ConfigError("window", self.window, "0 without a causal mask")
        if self.varlen and (self.batch != 1 or sum(self.varlen) != self.seq_q):
            raise ConfigError(
                "varlen",
                self.varlen,
                f"it needs --batch 1, and a sum equal to --seq-q ({self.seq_q})",
            )
        if self.varlen and self.seq_q != self.seq_kv:
            raise ConfigError("seq-kv", self.seq_kv, "equal to --seq-q with --varlen")
        self._check_pieces()

    def _check_pieces(self) -> None:
        """Raise ConfigError for lengths of packed sequences that do not go together."""
        longest = self.piece_max
        if self.piece_mean or longest:
            if not 0 < self.piece_mean <= longest:
                allowed = f"above 0 and at most --piece-max ({longest:.15g})"
                raise ConfigError("piece-mean", self.piece_mean, allowed)
            if longest > self.seq_q:
                raise ConfigError("piece-max", longest, f"at most --seq-q ({self.seq_q})")
            if self.varlen:
                raise ConfigError("varlen", self.varlen, "left out with --piece-mean")

    @property
    def packing(self) -> Packing | None:
        """Packed sequences of which the mean and the greatest length are known."""
        if not self.piece_mean:
            return None
        return Packing(mean=self.piece_mean, longest=self.piece_max)

    def with_lengths(self) -> "Attention":
        """Return the operator with one choice of packed sequences, which has no more a law.

        Sequences of the batch are one row. Raises ConfigError without a causal mask.
        """
        if (packing := self.packing) is None:
            return self
        if not self.causal:
            raise ConfigError("piece-mean", self.piece_mean, "0 without a causal mask")
        size = self.batch * self.seq_q
        changes: dict[str, Any] = {"varlen": packing.lengths(size), "piece_mean": 0.0}
        changes |= {"piece_max": 0.0, "batch": 1, "seq_q": size, "seq_kv": size}
        return replace(self, **changes)

    @property
    def pairs(self) -> int:
        """Return the query-key pairs of one head over the batch, as a mask leaves them.

        Of a causal mask this is half of the square, without half of the diagonal (source:
        flash-attention, benchmarks/benchmark_flash_attention.py); of a window, too, without
        half of the diagonal of the first queries, whose windows begin before the sequence.
        Of sequences whose lengths have a law it is the expectation, rounded.
        """
        if (packing := self.packing) is not None:
            # Half of the square where the mask is causal, else all of it.
            keys = packing.pairs_per_token(self.window)
            keys *= 1 if self.causal else 2 * self.seq_kv / self.seq_q
            return round(self.batch * self.seq_q * keys)
        lengths = self.varlen or (self.seq_q,) * self.batch
        if not self.causal:
            return sum(length * (length if self.varlen else self.seq_kv) for length in lengths)
        return sum(masked_pairs(length, self.window) for length in lengths)

    @property
    def shape_text(self) -> str:
        seq = f"s{self.seq_q}" if self.seq_q == self.seq_kv else f"s{self.seq_q}/{self.seq_kv}"
        heads = f"h{self.heads}/{self.kv_heads} d{self.head_dim_qk}/{self.head_dim_v}"
        words = (
            f"b{self.batch} {seq} {heads}",
            "causal" if self.causal else "",
            f"window {self.window}" if self.window else "",
            f"packed {len(self.varlen)}" if self.varlen else "",
            f"packed {self.packing.text}" if self.packing else "",
            "sinks" if self.sinks else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
        )
        return " ".join(filter(None, words))

    @property
    def flops(self) -> int:
        """Return the FLOPs of fwd (q k.T, p v) or bwd (dp, dv, dq, dk: 2 x fwd)."""
        passes = 1 if self.phase is Phase.FWD else 2
        return passes * 2 * self.pairs * self.heads * (self.head_dim_qk + self.head_dim_v)

    @property
    def executed_flops(self) -> int:
        """Return the FLOPs with q k.T again in bwd, as the flash-attention papers count.

        With equal head widths bwd is then 2.5 x fwd.
        """
        again = 0 if self.phase is Phase.FWD else 2 * self.pairs * self.heads * self.head_dim_qk
        return self.flops + again

    @property
    def bytes_moved(self) -> int:
        """Return fwd: q, k, v in, o out; bwd: q, k, v, o, do in, dq, dk, dv out."""
        q_and_out = self.seq_q * self.heads * (self.head_dim_qk + self.head_dim_v)
        k_and_v = self.seq_kv * self.kv_heads * (self.head_dim_qk + self.head_dim_v)
        passes = 1 if self.phase is Phase.FWD else 2
        num_bytes = passes * self.batch * (q_and_out + k_and_v) * self.dtype.itemsize
        if not self.dtype.is_fp8:
            return num_bytes
        out = self.seq_q * self.heads * self.head_dim_v
        results = out if self.phase is Phase.FWD else q_and_out - out + k_and_v
        wider = DType.BF16.itemsize - self.dtype.itemsize
        return num_bytes + self.batch * results * wider


def masked_pairs(seq: int, window: int = 0, chunk: int = 0) -> int:
    """Return the query-key pairs of one causal sequence, of which a full mask counts half.

    window: keys that a query attends to at most; chunk: it attends within its chunk; 0: all.
    """
    if 0 < chunk < seq:
        whole, rest = divmod(seq, chunk)
        return whole * masked_pairs(chunk) + masked_pairs(rest)
    width = min(window or seq, seq)
    return seq * width - width * width // 2 if width < seq else seq**2 // 2
