"""An architecture made of a trace: units of modules, in the order they ran."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Attention, Bmm, Copy, Gemm, GroupedGemm, Layout, Norm, Op, Phase
from stepmark.model.product_precision import ProductPrecision
from stepmark.step.layout import Inputs, grouped_products, linear_products, table_lookup
from stepmark.step.module import both
from stepmark.step.native import operation
from stepmark.step.workload import ComputeOp, Kernel
from stepmark.workloads.architecture import (
    Architecture,
    Batch,
    Module,
    Param,
    Unit,
    unit,
    work_of,
)
from stepmark.workloads.formats.huggingface.trace import (
    ELEMENTWISE,
    Trace,
    TracedCall,
    TracedParam,
)

Pass = tuple[Phase, Op | Kernel]


@dataclass(slots=True, kw_only=True)
class _Segment:
    """Calls in a row: of one layer, or outside of layers if place is empty."""

    place: str
    calls: list[TracedCall]
    params: list[TracedParam] = field(default_factory=list)

    @property
    def modules(self) -> set[str]:
        return {call.op.module for call in self.calls}

    def role(self, module: str) -> str:
        return self.relative(module) or ("layer" if self.place else "model")

    def relative(self, path: str) -> str:
        """Return a path without the layer's, which equal layers share."""
        return path.removeprefix(self.place).removeprefix(".") if self.place else path


def architecture_of(trace: Trace, name: str, batch: Batch, source: str) -> Architecture:
    """Return the units of a trace of this batch. Raises ConfigError."""
    segments = _segments(trace)
    _assign(trace, segments)
    units: list[Unit] = []
    for number, segment in enumerate(segments):
        is_last = number == len(segments) - 1
        pieces = list(_pieces(trace, segment, batch))
        if is_last:
            pieces.append(batch.loss("loss", trace.vocab_size))
        order = tuple(dict.fromkeys(segment.role(param.module) for param in segment.params))
        last = units[-1] if units else None
        if segment.place and last and last.pieces == tuple(pieces):
            units[-1] = replace(last, times=last.times + 1)
            continue
        title = segment.place or _title(number, is_last=is_last)
        times = 1 if segment.place else None
        units.append(unit(title, *pieces, times=times, registered=order))
    return Architecture(name=name, units=tuple(units), source=source)


def _title(number: int, *, is_last: bool) -> str:
    if number == 0:
        return "embedding"
    return "head" if is_last else f"between.{number}"


def _segments(trace: Trace) -> list[_Segment]:
    """Return the calls by layer, with a segment before the layers and one after them.

    Kernels between two layers that have no parameters are counted with the layer before.
    """
    owners = {param.module for param in trace.params}

    by_layer = groupby(trace.calls, lambda call: _layer_of(call.op.module, trace.layers))
    runs = [_Segment(place=place, calls=list(calls)) for place, calls in by_layer]
    if not runs or runs[0].place:
        runs.insert(0, _Segment(place="", calls=[]))
    if runs[-1].place or len(runs) == 1:
        runs.append(_Segment(place="", calls=[]))
    segments = [runs[0]]
    for run in runs[1:-1]:
        if run.place or run.modules & owners:
            segments.append(run)
        else:
            segments[-1].calls += run.calls
    segments.append(runs[-1])
    places = [segment.place for segment in segments if segment.place]
    if len(set(places)) < len(places):
        rule = "a class that calls each of its layers once"
        raise ConfigError("model_type", trace.name, rule)
    return segments


def _layer_of(path: str, layers: str) -> str:
    """Return the path of the layer that a module belongs to; empty: it is outside."""
    if not layers or not path.startswith(f"{layers}."):
        return ""
    number = path.removeprefix(f"{layers}.").partition(".")[0]
    return f"{layers}.{number}" if number.isdecimal() else ""


def _assign(trace: Trace, segments: list[_Segment]) -> None:
    """Give each parameter to one segment: its layer's, or the first that uses its module.

    A layer's parameter that another module has, too, goes before the layers; one that the pass
    does not use, behind them.
    """
    outside = [segment for segment in segments if not segment.place]
    layers = {segment.place: segment for segment in segments if segment.place}
    shared = {param.tied for param in trace.params if param.tied}
    for param in trace.params:
        if param.tied:
            continue
        place = _layer_of(param.module, trace.layers)
        users = (segment for segment in outside if param.module in segment.modules)
        if place and param.name in shared:
            segment = outside[0]
        elif place in layers:
            segment = layers[place]
        else:
            segment = next(users, outside[-1])
        segment.params.append(param)


def _pieces(trace: Trace, segment: _Segment, batch: Batch) -> Iterator[Module]:
    """Yield the modules of a segment in the order they run, then those that do not."""
    params: dict[str, tuple[Param, ...]] = {}
    for param in segment.params:
        params[param.module] = (*params.get(param.module, ()), _param(param, segment))
    uses = _uses(trace, segment)
    for path, group in groupby(segment.calls, key=lambda call: call.op.module):
        calls = list(group)
        role = segment.role(path)
        is_module = path in params or path in uses
        if not is_module and all(_is_elementwise(call) for call in calls):
            role = ELEMENTWISE
        yield Module(
            name=segment.role(path),
            role=role,
            work=work_of(role, *_passes(calls, trace, batch)),
            params=params.pop(path, ()),
            uses=uses.pop(path, ()),
            is_linear=calls[0].is_linear,
            is_module=is_module,
            has_input_grad=not _is_lookup(calls[0]),
        )
    for path, own in params.items():
        yield Module(name=segment.role(path), params=own)


def _param(param: TracedParam, segment: _Segment) -> Param:
    return Param(
        name=segment.relative(param.name),
        shape=param.shape,
        part=segment.role(param.module),
        is_norm=param.is_norm,
        is_trained=param.is_trained,
    )


def _uses(trace: Trace, segment: _Segment) -> dict[str, tuple[str, ...]]:
    """Return by module the parameters that it calls by another segment's name."""
    own = {param.name for param in segment.params}
    uses: dict[str, tuple[str, ...]] = {}
    for param in trace.params:
        name = param.tied or param.name
        if param.module in segment.modules and (param.tied or name not in own):
            uses[param.module] = (*uses.get(param.module, ()), name)
    return uses


def _is_elementwise(call: TracedCall) -> bool:
    return (call.op.compute or {}).get("kernel") == ELEMENTWISE


def _is_lookup(call: TracedCall) -> bool:
    return (call.op.compute or {}).get("family") == "copy"


def _passes(calls: Iterable[TracedCall], trace: Trace, batch: Batch) -> Iterator[Pass]:
    """Yield a module's forward pass and, the last operation first, its backward pass."""
    passes = [_passes_of(call, trace, batch) for call in calls]
    for own in passes:
        yield from (each for each in own if each[0] is Phase.FWD)
    for own in reversed(passes):
        yield from (each for each in own if each[0] is not Phase.FWD)


def _passes_of(call: TracedCall, trace: Trace, batch: Batch) -> list[Pass]:
    compute = operation(call.op, call.op.module)
    if not isinstance(compute, ComputeOp):
        raise TypeError(call.op.module)
    op = compute.op
    if batch.dtype is DType.TF32 and isinstance(op, Gemm | Bmm | GroupedGemm | Attention):
        op = replace(op, dtype=DType.TF32)
    passes = list(_both_passes(op, call, trace, batch))
    return passes if call.has_grad else [each for each in passes if each[0] is Phase.FWD]


def _both_passes(
    op: Op | Kernel, call: TracedCall, trace: Trace, batch: Batch
) -> Iterator[Pass]:
    if isinstance(op, Gemm):
        is_head = op.n == trace.vocab_size
        products = batch.products if call.is_linear and not is_head else None
        yield from linear_products(_inputs(batch, op.dtype, products), op.m, op.n, op.k)
    elif isinstance(op, GroupedGemm):
        yield from grouped_products(_inputs(batch, op.dtype, batch.products), op)
    elif isinstance(op, Bmm):
        yield Phase.FWD, op
        yield Phase.BWD, replace(op, n=op.k, k=op.n, layout=Layout.NT)
        yield Phase.BWD, replace(op, m=op.k, k=op.m, layout=Layout.TN)
    elif isinstance(op, Copy):
        yield from table_lookup(op.num_bytes)
    elif isinstance(op, Norm | Attention):
        yield from both(op)
    elif isinstance(op, Kernel):
        yield Phase.FWD, op
        yield Phase.BWD, _backward(op)
    else:
        raise TypeError(type(op).__name__)


def _inputs(batch: Batch, dtype: DType, products: ProductPrecision | None) -> Inputs:
    return Inputs(mbs=batch.mbs, seq_len=batch.seq_len, dtype=dtype, products=products)


def _backward(kernel: Kernel) -> Kernel:
    """Return the gradients of a kernel: of its input and weight; of elements, 1.5 x the bytes.

    1.4 to 1.8 x by autograd's own operators in torch 2.13, of Llama, LFM2 and Apertus.
    """
    flops = kernel.flops or 0
    num_bytes = kernel.bytes_moved or 0
    if flops:
        return replace(kernel, flops=2 * flops, bytes_moved=2 * num_bytes)
    return replace(kernel, bytes_moved=num_bytes * 3 // 2)
