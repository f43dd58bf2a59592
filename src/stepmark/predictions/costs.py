"""Costs of a step's operations: measured in a profiled step, by themselves, or by roofline.

A profiled step of the same model with few layers has the kernels of every operation, by its
role and phase. What torch.compile fuses has the role of the module that is compiled; its time
is divided among the operations inside. All measured time goes to some operation.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import NamedTuple

from stepmark.cases.training import CompileScope
from stepmark.efficiency.kernel_times import AttentionKernel, Basis, Style, kernel_times
from stepmark.ground.dtypes import DType
from stepmark.model.device import DeviceSpec
from stepmark.model.ops import Attention, Gemm, GroupedGemm, Op, Phase
from stepmark.step.trace_ops import COMM, COMPUTE, MEMORY, OpTable
from stepmark.step.workload import ComputeOp, Kernel, Workload
from stepmark.timeline.ledger import Work, work_in_trace, work_of_key, work_of_op
from stepmark.timeline.step_cost import OpCost, Source, known_time
from stepmark.workloads.file_times import FileTimes

_PASS = {Phase.FWD: "fwd", Phase.OPTIM: "optim"}
_CASTS = (DType.BF16, DType.FP16)
_CAST_BYTES = 4 + 2  # of an element, read and written
_SHORT_NS = 3000  # a kernel of the optimizer that combines norms takes less
_END = ("head", "head.norm", "loss", "output")
_UPDATE = ("clip", "update")


def pass_of(phase: str) -> str:
    """Return fwd, bwd or optim; all gradients are bwd."""
    return _PASS.get(Phase(phase), "bwd") if phase else ""


class _Key(NamedTuple):
    """What operations of all layers and micro-batches have in common."""

    module: str
    phase: Phase
    is_recomputed: bool
    work: Work
    section: str


def _key(op: ComputeOp) -> _Key:
    section = _section(op.module, op.layer)
    return _Key(op.module, op.phase, op.recompute, work_of_op(op), section)


def _section(role: str, layer: int | None) -> str:
    if layer is not None:
        return "block"
    return next((part[-1] for part in (_END, _UPDATE) if role in part), role)


def _amount(op: ComputeOp, work: Work) -> float:
    """Return the measure by which time of this kind is divided among operations."""
    flops = op.op.executed_flops
    num_bytes = op.op.bytes_moved
    if work in (Work.MATMUL, Work.ATTENTION) and flops:
        return float(flops)
    return float(num_bytes or 1)


@dataclass(slots=True)
class _Rate:
    """Measured time and kernels of a key, per amount of its operations."""

    time_per_amount: dict[Work, float]
    num_kernels: float  # of one operation
    num_short: float  # those of them whose number does not depend on the amount
    kernels_per_amount: float  # the others
    shapes: set[Op | Kernel]


class ProfiledCosts:
    """Costs of operations as a profiled step had them.

    workload: of the profiled case; table: its kernels at full clock, of a rank of `stage`.
    """

    def __init__(self, workload: Workload, table: OpTable, stage: int = 0) -> None:
        ops = [
            op for op in workload.expand(stage) if isinstance(op, ComputeOp) and not op.is_wait
        ]
        counts = Counter(_key(op) for op in ops)
        self._rates = {
            key: _Rate({}, num_kernels=0.0, num_short=0.0, kernels_per_amount=0.0, shapes=set())
            for key in counts
        }
        amounts: dict[tuple[_Key, Work], float] = defaultdict(float)
        for op in ops:
            self._rates[_key(op)].shapes.add(op.op)
            for work in Work:
                amounts[_key(op), work] += _amount(op, work)
        rows = _rows(table)
        self._named = {
            key
            for row in rows
            for key in self._rates
            if key.module in row.role.split(" | ")
            and pass_of(key.phase) == pass_of(row.phase)
            and key.work is row.work
        }
        for row in rows:
            keys = self._targets(row)
            total = sum(amounts[key, row.work] for key in keys)
            for key in keys:
                rate = self._rates[key]
                share = amounts[key, row.work] / total
                times = rate.time_per_amount
                times[row.work] = times.get(row.work, 0.0) + row.time_s / total
                num_kernels = row.num_kernels * share / counts[key]
                rate.num_kernels += num_kernels
                if row.is_short:
                    rate.num_short += num_kernels
                else:
                    rate.kernels_per_amount += row.num_kernels / total

    def _targets(self, row: "_Row") -> list[_Key]:
        """Return the keys of the operations that the measured work is a part of."""
        section = _section(row.role, row.layer)
        roles = row.role.split(" | ")
        tests: tuple[Callable[[_Key], bool], ...] = (
            lambda key: key.module in roles and key.phase == row.phase,
            lambda key: key.module in roles,
            # What other rows name is no part of work that has only the name of its block.
            lambda key: (
                key.section == section and key.work is row.work and key not in self._named
            ),
            lambda key: key.section == section and key.work is row.work,
            lambda key: key.section == section and key.work is Work.ELEMENTWISE,
            lambda key: key.section == section,
            lambda key: key.work is row.work,
            lambda key: True,
        )
        keys = list(self._rates)
        same_pass = [key for key in keys if pass_of(key.phase) == pass_of(row.phase)]
        pool = [key for key in same_pass if key.is_recomputed is row.is_recomputed]
        for candidates in (pool, same_pass, keys):
            for test in tests:
                if chosen := [key for key in candidates if test(key)]:
                    return chosen
        raise AssertionError("a step has operations")

    def __call__(self, op: ComputeOp) -> OpCost | None:
        """Return the cost; None for an operation that the profiled step has not."""
        rate = self._rates.get(_key(op))
        if rate is None:
            return None
        # The optimizer's kernels go through all parameters, 320 chunks each
        # (aten/src/ATen/native/cuda/MultiTensorApply.cuh): time and number are proportional,
        # but for those that combine norms.
        is_optim = op.phase is Phase.OPTIM
        kernels = rate.num_short + rate.kernels_per_amount * _amount(op, Work.OPTIMIZER)
        return OpCost(
            time_s={
                work: per_amount * _amount(op, work)
                for work, per_amount in rate.time_per_amount.items()
            },
            num_kernels=kernels if is_optim else rate.num_kernels,
            source=Source.MEASURED if is_optim or op.op in rate.shapes else Source.SCALED,
        )


class _Row(NamedTuple):
    """Work of one kind in a place; median over the profiled steps."""

    role: str
    layer: int | None  # 0 for every layer
    phase: str
    is_recomputed: bool
    work: Work
    is_short: bool  # of the optimizer
    time_s: float
    num_kernels: float


def _rows(table: OpTable) -> list[_Row]:
    sums: dict[tuple[str, int | None, str, bool, Work, bool], dict[int, list[int]]] = {}
    for op in table.ops:
        key = op.key
        if key.kind == COMM:
            continue
        is_copy = key.kind == MEMORY
        work = Work.COPY if is_copy else work_of_key(key)
        is_short = work is Work.OPTIMIZER and op.time_ns < _SHORT_NS * op.kernels
        place = (
            *(key.role, None if key.layer is None else 0),
            *(key.phase, key.is_recomputed, work, is_short),
        )
        total = sums.setdefault(place, {}).setdefault(op.step, [0, 0])
        total[0] += op.time_ns
        total[1] += op.kernels
    num_steps = len(table.steps)
    rows = []
    for place, by_step in sums.items():
        missing = [[0, 0]] * (num_steps - len(by_step))
        times, kernels = zip(*by_step.values(), *missing, strict=True)
        rows.append(_Row(*place, median(times) * 1e-9, median(kernels)))
    return rows


# Rows of SimAI's text. AICB gives attention_column and attention_row half of the attention
# block each, with its norm and its core, so that such a row has no single kind of work.
_ROW_WORKS = (
    (("grad_param_compute", "optimizer"), Work.OPTIMIZER),
    (("cross_entropy", "loss"), Work.LOSS),
    (("embedding", "layernorm", "norm", "head_norm"), Work.ELEMENTWISE),
)


def times_by_work(table: OpTable, *, in_blocks: bool = False) -> dict[Work, float]:
    """Return the time of a step's kernels by kind of work; of those in transformer blocks."""
    times: dict[Work, float] = {}
    for op in table.ops:
        if op.key.kind == COMPUTE and not (in_blocks and op.key.layer is None):
            work = work_of_key(op.key)
            times[work] = times.get(work, 0.0) + op.time_ns * 1e-9 / len(table.steps)
    return times


def file_cost(op: ComputeOp, *, has_rows: bool = False) -> OpCost | None:
    """Return the cost by the time that a workload file has of the operation.

    has_rows: operations are rows of SimAI's text.
    """
    time_s = known_time(op)
    work = work_in_trace(op)
    if has_rows:
        works = (own for starts, own in _ROW_WORKS if op.module.startswith(starts))
        work = next(works, Work.FILE)
    return None if time_s is None else OpCost(time_s={work: time_s}, source=Source.FILE)


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    """Costs of operators that were measured by themselves, in seconds."""

    times_s: Mapping[Op, float]

    def __call__(self, op: ComputeOp) -> OpCost | None:
        time_s = None if isinstance(op.op, Kernel) else self.times_s.get(op.op)
        if time_s is None:
            return None
        return OpCost(time_s={work_of_op(op): time_s}, source=Source.OPERATOR)


def needs_flex(op: Attention) -> bool:
    """Return whether attention has a mask or scores that torch's other kernels lack.

    A window of latent attention stands for the keys that an indexer chooses.
    """
    is_latent = op.heads == op.kv_heads and op.head_dim_qk != op.head_dim_v
    return bool((op.window and not is_latent) or op.sinks or op.softcap or op.piece_mean)


@dataclass(frozen=True, slots=True)
class SheetCosts:
    """Costs by data sheet: of operators that were measured on the device, or on its like.

    settings: of the workload, which say what torch.compile compiles and which kernel attention
    runs; frameworks that say nothing have fused kernels.
    """

    device: DeviceSpec
    settings: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, op: ComputeOp) -> OpCost | None:
        backend = self.settings.get("attention_backend")
        kernel = next((own for own in AttentionKernel if own == backend), AttentionKernel.AUTO)
        is_attention = isinstance(op.op, Attention) and needs_flex(op.op)
        # As `stepmark train` computes it. FlashAttention-2 has packed sequences (varlen_attn).
        if "compile" in self.settings and is_attention and kernel is not AttentionKernel.FLASH:
            kernel = AttentionKernel.FLEX
        times = kernel_times(self.device)
        time = times.time_of(op.op, self._style_of(op), kernel)
        if time is None:
            return None
        source = Source.SHEET if time.basis is Basis.MEASURED else Source.RULE
        time_s = {work_of_op(op): time.time_s}
        cast = Kernel(name="cast", flops=0, bytes_moved=self._cast_bytes(op))
        if cast.bytes_moved and (own := times.time_of(cast, self._style_of(op))):
            time_s[Work.ELEMENTWISE] = own.time_s
        return OpCost(time_s=time_s, source=source)

    def _cast_bytes(self, op: ComputeOp) -> int:
        """Return the bytes by which autocast makes a weight of 16 bits, or its gradient of 32.

        It casts in each forward pass, of a repetition, too. FSDP casts what it communicates.
        """
        own = op.op
        is_cast = self.settings.get("autocast") and self.settings.get("param_dtype") == "fp32"
        if not is_cast or not isinstance(own, Gemm | GroupedGemm) or own.dtype not in _CASTS:
            return 0
        if isinstance(own, GroupedGemm):
            size = own.num_groups * own.n * own.k
        else:
            size = own.m * own.n if op.phase is Phase.WGRAD else own.n * own.k
        return _CAST_BYTES * size if op.phase in (Phase.FWD, Phase.WGRAD) else 0

    def _style_of(self, op: ComputeOp) -> Style:
        scope = self.settings.get("compile")
        if scope is None:
            return Style.FUSED
        compiled = CompileScope(str(scope))
        is_fused = compiled.has_head if op.layer is None else compiled.has_blocks
        return Style.FUSED if is_fused else Style.EAGER


CostOf = Callable[[ComputeOp], OpCost | None]


def sources(
    device: DeviceSpec | None,
    measured: Iterable[CostOf] = (),
    file: FileTimes | None = None,
    *,
    settings: Mapping[str, object] | None = None,
    of_file: bool = False,
) -> tuple[CostOf, ...]:
    """Return the sources of costs, the best first.

    settings: of the workload. of_file: the file's times go before all.
    """
    of_sheet = [] if device is None else [SheetCosts(device, settings or {})]
    own = [] if file is None else [partial(file_cost, has_rows=file.has_rows)]
    return (*(own if of_file else ()), *measured, *of_sheet, *own)


def first_of(known: Iterable[CostOf]) -> CostOf:
    """Return the cost of the first source that has one."""
    known = tuple(known)

    def cost(op: ComputeOp) -> OpCost | None:
        return next(filter(None, (source(op) for source in known)), None)

    return cost
