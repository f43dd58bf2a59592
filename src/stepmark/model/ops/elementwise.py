"""Memory-bound operators: norms, activations, rope, loss, optimizer, copy."""

from dataclasses import dataclass

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import format_bytes
from stepmark.model.ops.fields import STORED, Operator, Phase, choice, count, validate

FWD_BWD = ("fwd", "bwd")
# kinds of Activation, of gate and up or of one tensor
GATED = ("swiglu", "geglu", "clamped_swiglu")
UNGATED = ("gelu", "silu", "relu", "relu2", "xielu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Operator):
    """RMSNorm or LayerNorm over the last dimension of x [tokens, hidden], with weight."""

    tokens: int = count("rows")
    hidden: int = count("normalized width")
    kind: str = choice("which norm", default="rmsnorm", allowed=("rmsnorm", "layernorm"))
    dtype: DType = choice("element type", default=DType.BF16, allowed=STORED)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=FWD_BWD)

    @property
    def shape_text(self) -> str:
        return f"{self.kind} {self.tokens}x{self.hidden}"

    @property
    def bytes_moved(self) -> int:
        """Return fwd: x in, y out; bwd: x, dy in, dx out; the weight (and bias) each way."""
        vectors = 1 if self.kind == "rmsnorm" else 2
        if self.phase is Phase.FWD:
            elements = 2 * self.tokens * self.hidden + vectors * self.hidden
        else:
            elements = 3 * self.tokens * self.hidden + (1 + vectors) * self.hidden
        return elements * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        # bwd also holds y, the root of its autograd graph.
        return 4 * self.tokens * self.hidden * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(Operator):
    """A function of gate and up, [tokens, 2 width] -> [tokens, width], or of one such tensor.

    swiglu: silu(gate) * up; geglu: gelu(gate) * up; clamped_swiglu: gpt-oss's, (up + 1) gate
    sigmoid(1.702 gate) of values up to 7 (arXiv:2508.10925). xielu: arXiv:2411.13010, with
    fixed numbers.
    """

    tokens: int = count("rows")
    width: int = count("width of the result")
    kind: str = choice("which activation", default="swiglu", allowed=(*GATED, *UNGATED))
    dtype: DType = choice("element type", default=DType.BF16, allowed=STORED)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=FWD_BWD)

    @property
    def shape_text(self) -> str:
        return f"{self.kind} {self.tokens}x{self.width}"

    @property
    def is_gated(self) -> bool:
        return self.kind in GATED

    @property
    def bytes_moved(self) -> int:
        inputs = 2 if self.is_gated else 1
        planes = inputs + 1 if self.phase is Phase.FWD else 2 * inputs + 1
        return planes * self.tokens * self.width * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        # Eager ones keep results for the backward pass: SwiGLU silu(gate), gpt-oss's four.
        planes = 16 if self.kind == "clamped_swiglu" else 8
        return planes * self.tokens * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Operator):
    """Rotary position embedding of q and k [batch, seq, heads | kv_heads, head_dim]."""

    batch: int = count("sequences")
    seq: int = count("positions per sequence")
    heads: int = count("query heads")
    kv_heads: int = count("key heads")
    head_dim: int = count("rotated width of a head", high=2**16)
    dtype: DType = choice("element type", default=DType.BF16, allowed=STORED)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=FWD_BWD)

    def __post_init__(self) -> None:
        validate(self)
        if self.head_dim % 2:
            raise ConfigError("head-dim", self.head_dim, "an even number")

    @property
    def shape_text(self) -> str:
        return f"b{self.batch} s{self.seq} h{self.heads}/{self.kv_heads} d{self.head_dim}"

    @property
    def bytes_moved(self) -> int:
        """Return q and k in, rotated q and k out, the fp32 cos and sin tables once."""
        elements = 2 * self.batch * self.seq * (self.heads + self.kv_heads) * self.head_dim
        return elements * self.dtype.itemsize + 2 * self.seq * self.head_dim * 4

    @property
    def memory_bytes(self) -> int:
        return 3 * self.bytes_moved


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(Operator):
    """Mean token loss of logits [tokens, vocab], computed in fp32.

    chunks > 1 processes the tokens in that many slices, so that only one slice's fp32 logits
    exist at a time.
    """

    tokens: int = count("rows")
    vocab: int = count("classes")
    chunks: int = count("slices of the tokens; 1 = full", high=2**16, default=1)
    dtype: DType = choice("type of the logits", default=DType.BF16, allowed=STORED)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=FWD_BWD)

    def __post_init__(self) -> None:
        validate(self)
        if self.chunks > self.tokens:
            raise ConfigError("chunks", self.chunks, f"at most tokens ({self.tokens})")

    @property
    def shape_text(self) -> str:
        chunks = f" in {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.tokens}x{self.vocab}{chunks}"

    @property
    def bytes_moved(self) -> int:
        """Return fwd: logits in; bwd: logits in, their gradient out."""
        planes = 1 if self.phase is Phase.FWD else 2
        return planes * self.tokens * self.vocab * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        """Return logits, gradient, and fp32 logits, log-softmax and (bwd) its gradient."""
        fp32_planes = 2 if self.phase is Phase.FWD else 4
        fp32 = fp32_planes * 4 * self.tokens * self.vocab
        if self.phase is Phase.FWD:
            fp32 //= self.chunks
        return 2 * self.tokens * self.vocab * self.dtype.itemsize + fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(Operator):
    """One step of a fused optimizer over one flat parameter vector."""

    num_params: int = count("parameters on this rank")
    kind: str = choice("which optimizer", default="adamw", allowed=("adamw", "adam", "sgd"))
    dtype: DType = choice(
        "type of parameters, gradients and states", default=DType.FP32, allowed=STORED
    )
    phase: Phase = choice("pass", default=Phase.OPTIM, allowed=("optim",))

    @property
    def shape_text(self) -> str:
        return f"{self.kind} {self.num_params} params"

    @property
    def bytes_moved(self) -> int:
        """Return Adam: p, g, m, v in, p, m, v out; SGD without momentum: p, g in, p out."""
        planes = 3 if self.kind == "sgd" else 7
        return planes * self.num_params * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        planes = 2 if self.kind == "sgd" else 4
        return planes * self.num_params * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Operator):
    """Device-to-device copy, which measures the achievable memory bandwidth."""

    num_bytes: int = count("bytes read, and as many written")
    phase: Phase = choice("pass", default=Phase.FWD, allowed=("fwd",))

    @property
    def dtype(self) -> DType:
        """Return fp32, because a copy moves 4-byte words."""
        return DType.FP32

    @property
    def shape_text(self) -> str:
        return format_bytes(self.num_bytes)

    @property
    def bytes_moved(self) -> int:
        return 2 * self.num_bytes

    @property
    def memory_bytes(self) -> int:
        return 2 * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy(Operator):
    """Copy between pinned memory of the host and the device, over PCIe or a host's own link."""

    num_bytes: int = count("bytes copied")
    direction: str = choice(
        "h2d, to the device, or d2h, to the host", default="h2d", allowed=("h2d", "d2h")
    )
    phase: Phase = choice("pass", default=Phase.FWD, allowed=("fwd",))

    @property
    def dtype(self) -> DType:
        """Return fp32, because a copy moves 4-byte words."""
        return DType.FP32

    @property
    def shape_text(self) -> str:
        return f"{self.direction} {format_bytes(self.num_bytes)}"

    @property
    def bytes_moved(self) -> int:
        """Return the bytes that cross the link, and the device's memory once."""
        return self.num_bytes


ElementwiseOp = Norm | Activation | Rope | CrossEntropy | Optimizer | Copy | HostCopy
FAMILIES: dict[str, type[ElementwiseOp]] = {
    "norm": Norm,
    "activation": Activation,
    "rope": Rope,
    "cross-entropy": CrossEntropy,
    "optimizer": Optimizer,
    "copy": Copy,
    "host-copy": HostCopy,
}
