"""Modules of mixers that carry a state from token to token: Mamba-2, DeltaNet, Lightning, LFM2.

Kernels are those of mamba_ssm (causal_conv1d, mamba_chunk_scan_combined) and of
flash-linear-attention (chunk_gated_delta_rule): a convolution and a scan, each one per pass,
which read their inputs and write their result. Backward a scan multiplies twice as often, reads
inputs and the result's gradient, and writes gradients of its inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Norm, Phase
from stepmark.model.scans import scan_flops, scan_width
from stepmark.step.layout import Inputs
from stepmark.step.module import Module, Param, SavedTensors, both, work_of
from stepmark.step.workload import ComputeOp, Kernel

_SCAN = "_scan"
_CONVOLUTION = "causal_conv1d"
GATE = "gate"  # product with a sigmoid


def is_scan(op: ComputeOp) -> bool:
    """Return whether the operation is a forward kernel of a scan or of its convolution."""
    return isinstance(op.op, Kernel) and op.op.name.endswith((_SCAN, _CONVOLUTION))


def is_gate(op: ComputeOp) -> bool:
    """Return whether the operation is a forward product with a sigmoid."""
    return isinstance(op.op, Kernel) and op.op.name == GATE


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanModules:
    """Factory of the modules between a mixer's projections, on one rank of tp.

    model: with the widths of the layer. tokens: of the rank, all tp ranks have the same.
    """

    model: ModelConfig
    layer: Layer
    inputs: Inputs
    tokens: int
    tp: int

    def modules(self) -> Iterator[Module]:
        """Yield convolution, scan and gated norm, as far as the mixer has them."""
        model = self.model
        if self.layer.scan == "mamba":
            assert model.mamba is not None
            mamba = model.mamba
            yield self._conv("attention.ssm_conv", mamba.conv_channels)
            yield self._scan("attention.ssm_scan", ("dt_bias", "A_log", "D"))
            if mamba.has_norm:
                yield self._gated_norm("attention.ssm_norm", mamba.inner, 1)
        elif self.layer.scan == "delta":
            assert model.delta is not None
            delta = model.delta
            yield self._conv("attention.conv", 2 * delta.keys + delta.values)
            yield self._scan("attention.scan", ("dt_bias", "A_log"))
            heads = delta.num_value_heads
            yield self._gated_norm("attention.gate_norm", delta.value_dim, heads)
        elif self.layer.scan == "conv":  # c * conv(b * x)
            yield self._product("attention.conv_gate", model.hidden_size)
            yield self._conv("attention.conv", model.hidden_size)
            yield self._product("attention.conv_out_gate", model.hidden_size)
        else:
            yield self._scan("attention.scan", ())
            width = model.num_heads * model.head_dim
            yield self._gated_norm("attention.gate_norm", width, 1)

    def _params(self, *names: str) -> tuple[Param, ...]:
        vectors = {vector.name: vector for vector in self.model.vectors(self.layer)}
        params = []
        for name in names:
            if name not in vectors:
                continue
            vector = vectors[name]
            rows, *rest = vector.shape
            shape = (rows // self.tp if vector.is_divided else rows, *rest)
            params.append(Param(name=name, shape=shape, is_partial=not vector.is_divided))
        return tuple(params)

    def _module(
        self, name: str, fwd: Kernel, bwd: Kernel, params: tuple[Param, ...], kept: int
    ) -> Module:
        return Module(
            name=name,
            role=name,
            work=work_of(name, (Phase.FWD, fwd), (Phase.BWD, bwd)),
            params=tuple(replace(param, part=name) for param in params),
            keeps=SavedTensors(divided=kept),
        )

    def _product(self, name: str, width: int) -> Module:
        """Return the product of two tensors, element by element, which keeps both."""
        size = self.tokens * width // self.tp * self.inputs.plain_dtype.itemsize
        fwd = Kernel(name="multiply", flops=0, bytes_moved=3 * size)
        bwd = Kernel(name="multiply_backward", flops=0, bytes_moved=5 * size)
        return replace(self._module(name, fwd, bwd, (), 2 * width), is_module=False)

    def _conv(self, name: str, channels: int) -> Module:
        size = self.tokens * channels // self.tp * self.inputs.plain_dtype.itemsize
        return self._module(
            name,
            Kernel(name=_CONVOLUTION, flops=0, bytes_moved=2 * size),
            Kernel(name=f"{_CONVOLUTION}_backward", flops=0, bytes_moved=3 * size),
            self._params(f"{name}.weight", f"{name}.bias"),
            channels,
        )

    def _scan(self, name: str, vectors: tuple[str, ...]) -> Module:
        model = self.model
        kind = self.layer.scan
        width = scan_width(model, self.layer)
        size = self.tokens * width // self.tp * self.inputs.plain_dtype.itemsize
        flops = self.tokens * scan_flops(model, self.layer) // self.tp
        scan = self._module(
            name,
            Kernel(name=kind + _SCAN, flops=flops, bytes_moved=size),
            Kernel(name=f"{kind}{_SCAN}_backward", flops=2 * flops, bytes_moved=2 * size),
            self._params(*(f"attention.{vector}" for vector in vectors)),
            width,
        )
        return replace(scan, is_module=False)

    def _gated_norm(self, name: str, width: int, num_heads: int) -> Module:
        """Return norm(x) * silu(z), as a norm that reads z, too; backward its gradient."""
        dtype = self.inputs.plain_dtype
        weight = self._params(f"{name}.weight")
        is_divided = not weight[0].is_partial
        rows = self.tokens * (1 if is_divided else num_heads // self.tp)
        own_width = width // self.tp if is_divided else width
        norm = Norm(tokens=rows, hidden=own_width, kind="rmsnorm", dtype=dtype)
        size = rows * own_width * dtype.itemsize
        gate = Kernel(name=GATE, flops=0, bytes_moved=size)
        forward, backward = both(norm)
        gates = (Phase.FWD, gate), (Phase.BWD, replace(gate, bytes_moved=2 * size))
        return Module(
            name=name,
            role=name,
            work=work_of(name, forward, gates[0], gates[1], backward),
            params=tuple(replace(param, part=name) for param in weight),
            keeps=SavedTensors(divided=2 * width * num_heads, statistics=num_heads),
        )
