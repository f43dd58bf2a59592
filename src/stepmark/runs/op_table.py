"""The plan of `stepmark op` as tables of 80 columns: a model's step in all, then its operators.

The least time of an operator is that of its FLOPs at the device's peak or of its bytes at the
memory's bandwidth, whichever is longer; a step's is the sum, without communication. Shares are
of the times that `stepmark predict` gives the same operators.
"""

import math
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stepmark.cases.case import Label, OpCase
from stepmark.cases.training import CompileScope
from stepmark.efficiency.kernel_times import AttentionKernel
from stepmark.ground.grouping import group_by
from stepmark.ground.options import build
from stepmark.ground.units import format_time
from stepmark.measuring.machine import Machine
from stepmark.model.device import DeviceSpec, find_device
from stepmark.model.ops import (
    CUSTOM,
    FAMILY_OF,
    Copy,
    Custom,
    EmbeddingBag,
    HostCopy,
    Mlp,
    Op,
    Optimizer,
    Phase,
)
from stepmark.model.ops.backends import BACKENDS, usual
from stepmark.operators.op_options import FamilyOptions, LayerOptions, options_class
from stepmark.operators.op_plan import capabilities, model_shapes
from stepmark.predictions.costs import SheetCosts
from stepmark.step.roofline import roofline_time
from stepmark.step.workload import ComputeOp, Kernel
from stepmark.tables.columns import (
    BYTES,
    COUNT,
    FLOPS,
    SECONDS,
    SHARE,
    Column,
    Row,
    number,
    text,
)
from stepmark.tables.row_tables import fitting
from stepmark.tables.table import Table
from stepmark.timeline.step_cost import OpCost
from stepmark.workloads.operators import ModelShape, StepPart, step_parts

_WIDTH = 80
_MAX_OPERATOR = 22  # characters of the places of an operator
_SHARE_TEXT = (
    "Of time: of the step's predicted time, each operator by its fastest backend, without the "
    "communication, gradient clipping, casts and idle time that stepmark predict has."
)
_FAR = 1.3  # from the fastest backend to one that its row's time does not stand for
_UNPREDICTED = (Copy, Custom, EmbeddingBag, HostCopy, Mlp)  # prediction has no law of these
_PASSES = {"optim": ""}  # an optimizer's role says it


@dataclass(frozen=True, kw_only=True)
class Step:
    """One micro-batch of a model on one rank. device: None where it has no data sheet."""

    shape: ModelShape
    parts: tuple[StepPart, ...]
    device: DeviceSpec | None
    backends_of: Callable[[Op], Sequence[str]]

    @cached_property
    def work(self) -> Counter[Op | Kernel]:
        """Return how often a step has each operator."""
        work = Counter[Op | Kernel]()
        for part in self.parts:
            for op, count in part.work.items():
                work[op] += part.times * count
        return work

    @property
    def least_s(self) -> float | None:
        """Return the least time; None where some cost, or the device's peak, is unknown."""
        return self.least_s_of(self.work)

    def least_s_of(self, work: Mapping[Op | Kernel, int]) -> float | None:
        return _sum((least_s(op, self.device), count) for op, count in work.items())

    @cached_property
    def time_s(self) -> float | None:
        """Return the sum of predicted and least times; None where some time is unknown."""
        return self.time_s_of(self.work)

    def time_s_of(self, work: Mapping[Op | Kernel, int]) -> float | None:
        return _sum((self.time_s_of_op(op), count) for op, count in work.items())

    def time_s_of_op(self, op: Op | Kernel) -> float | None:
        """Return the predicted time by the fastest backend, else the least time."""
        backends = ("",) if isinstance(op, Kernel) else self.backends_of(op)
        costs = (predicted(op, backend, self.device) for backend in backends)
        times = [cost.total_s for cost in costs if cost]
        return min(times) if times else least_s(op, self.device)

    def share_pct(self, work: Mapping[Op | Kernel, int], times: int = 1) -> float | None:
        """Return the share of the step's time; where it is unknown, of its FLOPs."""
        if self.time_s is None:
            flops = times * _flops_of(work)
            total = _flops_of(self.work)
            return 100 * flops / total if total else None
        time_s = self.time_s_of(work)
        return None if time_s is None else 100 * times * time_s / self.time_s


def least_s(op: Op | Kernel, device: DeviceSpec | None) -> float | None:
    """Return the least time of an operation; None where the device's peak is unknown."""
    return None if device is None else roofline_time(op, device)


def predicted(op: Op | Kernel, backend: str, device: DeviceSpec | None) -> OpCost | None:
    """Return the time that `stepmark predict` gives the operator; None without a law."""
    # Attention by products of all pairs ("math") is timed by no law of fused kernels.
    if device is None or backend == "math" or isinstance(op, _UNPREDICTED):
        return None
    kernel = {"varlen": AttentionKernel.FLASH}.get(backend, backend)
    settings: dict[str, object] = {"attention_backend": kernel}
    if backend == "torch":
        settings["compile"] = CompileScope.NONE
    return SheetCosts(device, settings)(ComputeOp(op=op, phase=Phase.FWD, module=""))


def _flops_of(work: Mapping[Op | Kernel, int]) -> int:
    return sum((op.flops or 0) * count for op, count in work.items())


def _sum(terms: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the sum of values, each so often; None where one is unknown."""
    products = [None if value is None else value * count for value, count in terms]
    return None if None in products else math.fsum(value for value in products if value)


def steps_of(options: Mapping[str, object], here: Machine) -> list[Step]:
    """Return the steps of the models that the options of a plan name, one per micro-batch."""
    own = build(options_class(str(options.get("family"))), options)
    if not isinstance(own, LayerOptions | FamilyOptions) or not own.model:
        return []
    device = find_device(here.name)
    limits = capabilities(here)
    chosen = own.field("backend")

    def backends_of(op: Op) -> Sequence[str]:
        family = FAMILY_OF[type(op)]
        named = [backend for backend in chosen if backend in BACKENDS[family]]
        return named or usual(family, op, limits)

    return [
        Step(
            shape=shape,
            parts=tuple(step_parts(shape)),
            device=device,
            backends_of=backends_of,
        )
        for shape in model_shapes(own, here.device)
    ]


def lines(planned: Sequence[tuple[OpCase, Row]], steps: Sequence[Step]) -> Iterator[str]:
    """Yield the text of a plan's operators. planned: a case for each row of the files."""
    for step in steps:
        yield from _step_lines(step)
        yield ""
    rows = _merged(planned, steps)
    yield from _table(rows, _columns(rows, steps))
    if any(step.time_s is not None for step in steps):
        yield ""
        yield from textwrap.wrap(_SHARE_TEXT, _WIDTH)
    if (
        notes
        := f"{_backend_text([case for case, _ in planned])} {_fastest_text(planned)}".strip()
    ):
        yield ""
        yield from textwrap.wrap(notes, _WIDTH)


def _step_lines(step: Step) -> Iterator[str]:
    """Yield the answer, then the table of its parts."""
    inputs = step.shape.inputs
    dtype = inputs.products.dtype if inputs.products else inputs.dtype
    what = f"{step.shape.model.name}, {inputs.mbs} x {inputs.seq_len} tokens, {dtype}"
    if step.device is None or step.least_s is None:
        flops = FLOPS.show(_flops_of(step.work))
        answer = f"has {flops}FLOP; no data sheet here gives its least time"
    else:
        time = format_time(step.least_s)
        answer = f"takes at least {time} on {step.device.key}, without communication"
    yield from textwrap.wrap(f"{what}: a step of one rank {answer}. {_owned(step)}", _WIDTH)
    yield ""
    several = len(step.parts) > 2
    parts = [(f"layer ({p.name})" if several else "layer", p) for p in step.parts if p.name]
    parts += [("outside of layers", part) for part in step.parts if not part.name]
    rows = [_part_row(name, part.times, part.work, step) for name, part in parts]
    rows.append(_part_row("step", 1, step.work, step))
    yield from _table(rows, [Column("part"), *_work_columns([step])])


def _owned(step: Step) -> str:
    """Return how many parameters the step's optimizer updates, which the sharding decides."""
    updates = (op.num_params * n for op, n in step.work.items() if isinstance(op, Optimizer))
    axes = step.shape.layout.axes
    return (
        f"Its AdamW updates {sum(updates) / 1e9:.4g} B parameters "
        f"(--tp {axes.tp} --ep {axes.ep} --dp-shard {axes.dp_shard})."
    )


def _part_row(name: str, times: int, work: Mapping[Op | Kernel, int], step: Step) -> Row:
    return {
        "part": name,
        "calls_per_step": times,
        **_costs_of(work, step),
        "share_of_step_pct": step.share_pct(work, times),
    }


def _costs_of(work: Mapping[Op | Kernel, int], step: Step) -> Row:
    return {
        "flops": _flops_of(work),
        "bytes_moved": sum((op.bytes_moved or 0) * count for op, count in work.items()),
        "least_s": step.least_s_of(work),
        "predicted_s": step.time_s_of(work),
    }


def _merged(planned: Sequence[tuple[OpCase, Row]], steps: Sequence[Step]) -> list[Row]:
    """Return a row per operator, for all its places and backends; the fastest is predicted."""
    merged = []
    # A function of yours is an operator of its own, and no backend.
    for same in group_by(
        planned,
        lambda item: (
            item[0].op,
            item[0].rate,
            isinstance(item[0].op, Custom) and item[0].backend,
        ),
    ).values():
        op = same[0][0].op
        rows = [row for _, row in same]
        times = [time_s for row in rows if isinstance(time_s := row["predicted_s"], float)]
        joined = {
            name: ", ".join(dict.fromkeys(str(row[name]) for row in rows if row[name]))
            for name in ("model", "mbs")
        }
        places = [(label.model, label.mbs) for case, _ in same for label in case.labels]
        work = _in_steps(op, _steps_at(places, steps))
        own_columns = {"operator": _operator(rows), "predicted_s": min(times, default=None)}
        merged.append(rows[0] | joined | work | own_columns)
    return [*merged, *(row for step in steps for row in _other_rows(planned, step))]


def _steps_at(places: Collection[tuple[str, int | None]], steps: Iterable[Step]) -> list[Step]:
    return [s for s in steps if (s.shape.model.name, s.shape.inputs.mbs) in places]


def _other_rows(planned: Sequence[tuple[OpCase, Row]], step: Step) -> Iterator[Row]:
    """Yield one row of all that a step has and the plan has not, such as residual adds."""
    ops: set[Op | Kernel] = {
        case.op
        for case, _ in planned
        if any(_steps_at([(label.model, label.mbs)], [step]) for label in case.labels)
    }
    work = {op: count for op, count in step.work.items() if op not in ops}
    if not work:
        return
    inputs = step.shape.inputs
    yield dict.fromkeys(planned[0][1]) | {
        "model": step.shape.model.name,
        "mbs": inputs.mbs,
        "dtype": str(inputs.products.dtype if inputs.products else inputs.dtype),
        "operator": "other operators",
        "calls_per_step": 1,
        **_costs_of(work, step),
        "share_of_step_pct": step.share_pct(work),
    }


def in_place(op: Op, label: Label, steps: Sequence[Step]) -> Row:
    """Return how often a step has the operator at this place, and its share there."""
    return _in_steps(op, _steps_at([(label.model, label.mbs)], steps), label.per_step or 0)


def _in_steps(op: Op, steps: Iterable[Step], calls: int | None = None) -> Row:
    """Return how often a step has the operator, and its share in the step.

    Unknown is None: of an operator that no step has, or several steps differently.
    calls: at one place; by default at all places.
    """
    pairs: set[tuple[int, float | None]] = set()
    for step in steps:
        if count := step.work[op] if calls is None else min(calls, step.work[op]):
            pairs.add((count, step.share_pct({op: count})))
    calls, share = pairs.pop() if len(pairs) == 1 else (None, None)
    return {"calls_per_step": calls, "share_of_step_pct": share}


def _columns(rows: Sequence[Row], steps: Sequence[Step]) -> list[Column[Any]]:
    """Return the columns of operators; some of words only where rows differ in them."""
    apart: list[Column[Any]] = [
        Column(name, leaves=6)
        for name in ("model", "mbs", "dtype", "rate")
        if len({row[name] for row in rows} - {"", None}) > 1
    ]
    return [*apart, Column("operator"), Column("shape", words=_shape), *_work_columns(steps)]


def _shape(row: Row) -> str:
    """Return the shape; equal sizes of an attention's heads are one, for 80 columns."""
    unknown = " (unknown without a device)" if row["flops"] is None else ""
    return re.sub(r"\bd(\d+)/\1\b", r"d\1", text(row, "shape")) + unknown


def _operator(rows: Iterable[Row]) -> str:
    """Return the places of an operator, e.g. "gate, up fwd", or the first and how many more."""
    places = dict.fromkeys(
        (
            f"{row['role']}:{row['backend']}"
            if row["family"] == CUSTOM
            else str(row["role"] or row["family"]),
            str(row["pass"]),
        )
        for row in rows
    )
    by_pass = group_by(places, lambda place: place[1])
    text = ", ".join(
        " ".join((", ".join(role for role, _ in own), _PASSES.get(name, name))).strip()
        for name, own in by_pass.items()
    )
    if len(text) <= _MAX_OPERATOR:
        return text
    (role, name), *others = places
    more = f" + {len(others)}" if others else ""
    return f"{role} {_PASSES.get(name, name)}".strip() + more


def _work_columns(steps: Sequence[Step]) -> list[Column[Any]]:
    of_time = any(step.time_s is not None for step in steps)
    return [
        Column("calls_per_step", unit=COUNT, heading="x", leaves=2),
        Column("flops", unit=FLOPS, heading="FLOPs", leaves=5),
        Column("bytes_moved", unit=BYTES, heading="moved", leaves=4),
        Column("least_s", unit=SECONDS, heading="at least", leaves=3),
        Column("predicted_s", unit=SECONDS, heading="predicted", leaves=1),
        Column("share_of_step_pct", unit=SHARE, heading="of time" if of_time else "of FLOPs"),
    ]


def _table(rows: list[Row], columns: Sequence[Column[Any]]) -> Iterator[str]:
    """Yield a table without empty columns, and without the least important that do not fit."""
    table = Table(rows)
    filled = [column for column in columns if any(column.shown(row) for row in rows)]
    width = max(_WIDTH, shutil.get_terminal_size((_WIDTH, 1)).columns)
    yield from table.text(fitting(table, width, filled))


def _backend_text(cases: Sequence[OpCase]) -> str:
    """Return the backends of each family; empty where all are torch's only ones."""
    backends: dict[str, dict[str, None]] = {}
    for case in cases:
        backends.setdefault(case.family, {})[case.backend] = None
    families = group_by(backends, lambda family: tuple(backends[family]))
    if families.keys() == {("torch",)}:
        return ""
    texts = (f"{', '.join(names)} by {', '.join(own)}" for own, names in families.items())
    return f"Backends: {'; '.join(texts)}."


def _fastest_text(planned: Sequence[tuple[OpCase, Row]]) -> str:
    """Return by which backend operators are predicted, where another one takes far longer."""
    families: dict[str, dict[str, None]] = {}
    for same in group_by(planned, lambda item: item[0].op).values():
        times = sorted((number(row, "predicted_s") or 0.0, c.backend) for c, row in same)
        if times[-1][0] > _FAR * times[0][0] > 0:
            families.setdefault(times[0][1], {})[same[0][0].family] = None
    where = "; ".join(f"{', '.join(own)} by {name}" for name, own in families.items())
    return f"Predicted: {where}; another takes over {_FAR:g} times as long." if where else ""
