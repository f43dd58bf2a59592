"""SimAI's rows: a layer's compute times and messages, by pass.

A generated workload is its first micro-batch as rows, written M times. Rows have AICB's names.
Each carries one message per pass, so a layer with more takes more rows:
both sides of an expert layer's exchange, or the gather that sequence parallelism repeats in the
backward pass. Gradient traffic of the whole step stands in rows of its own at the start, as
there; the pipeline is a number in the header.

Source of a row: aliyun/SimAI (astra-sim-alibabacloud, Workload.cc) reads twelve fields;
aliyun/aicb (SimAI_training_workload_generator.py) writes them. Sizes are bytes of the full
tensor; times are nanoseconds.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import FACTS, Collective, RedOp, num_parts
from stepmark.model.ops import Phase
from stepmark.model.parallel import PipelineSchedule
from stepmark.step.workload import (
    COMPUTE,
    Block,
    CommOp,
    ComputeOp,
    Group,
    Kernel,
    Operation,
    Run,
    Workload,
    shifted,
)
from stepmark.step.workload_stages import transfer_of
from stepmark.workloads.formats.aicb_line import group_names, ranks_of
from stepmark.workloads.formats.loss import present
from stepmark.workloads.formats.walk import joined, remarks, repeated

NONE = "NONE"
TYPES = {
    "ALLREDUCE": Collective.ALL_REDUCE,
    "ALLGATHER": Collective.ALL_GATHER,
    "REDUCESCATTER": Collective.REDUCE_SCATTER,
    "ALLTOALL": Collective.ALL_TO_ALL,
    "BROADCAST": Collective.BROADCAST,
}
TYPE_OF = {str(collective): name for name, collective in TYPES.items()} | {
    "all_to_all_v": "ALLTOALL"
}
SUFFIXES = {"": "tp", "_EP": "ep", "_DP_EP": "dp_ep"}  # in a wgrad column "" is dp
FIELDS = 12
_UPDATE = "100"
_PHASES = (Phase.FWD, Phase.DGRAD, Phase.WGRAD)  # fields of a row
_LAYER_ROWS = ("attention", "mlp")
_STARTS = ("attention_column", "attention_layer")
_MICROBATCH_ROWS = ("embedding_layer", "final_column", "embedding_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pass: compute, then a message. comm is a type with its suffix, or NONE."""

    compute_ns: int = 0
    comm: str = NONE
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Work of one layer in one micro-batch."""

    name: str
    fwd: Cell = Cell()
    dgrad: Cell = Cell()
    wgrad: Cell = Cell()

    @property
    def cells(self) -> tuple[Cell, Cell, Cell]:
        return self.fwd, self.dgrad, self.wgrad

    @property
    def starts_layer(self) -> bool:
        """Whether a layer starts; a row that only adds a backward message starts none."""
        return self.name in _STARTS and self.fwd != Cell()

    @property
    def starts_microbatch(self) -> bool:
        return self.name == "embedding_layer"

    def line(self) -> str:
        """Return the twelve fields as AICB writes them."""
        fields = [self.name, "-1"]
        for cell in self.cells:
            fields += [str(cell.compute_ns), cell.comm, str(cell.num_bytes)]
        return "\t".join([*fields, _UPDATE]) + "\n"


def parse(text: str, where: str) -> Row:
    """Parse a row. Raise ConfigError that starts with `where`."""
    fields = text.split()
    if len(fields) != FIELDS:
        raise ConfigError(where, f"{len(fields)} fields", f"{FIELDS} fields, tab separated")
    for index in (1, 11):
        _whole(fields[index], f"{where}, field {index + 1}", low=-1)
    cells = {}
    for index, phase in enumerate(_PHASES):
        first = 2 + 3 * index
        comm = fields[first + 1]
        base, suffix = _split(comm)
        if comm != NONE and (base not in TYPES or suffix not in SUFFIXES):
            allowed = f"NONE or one of {', '.join(TYPES)}, with nothing, _EP or _DP_EP behind"
            raise ConfigError(f"{where}, field {first + 2}", comm, allowed)
        cells[phase.value] = Cell(
            compute_ns=_whole(fields[first], f"{where}, field {first + 1}"),
            comm=comm,
            num_bytes=_whole(fields[first + 2], f"{where}, field {first + 3}"),
        )
    return Row(name=fields[0], **cells)


def _split(comm: str) -> tuple[str, str]:
    base, mark, rest = comm.partition("_")
    return base, mark + rest


def _whole(text: str, where: str, low: int = 0) -> int:
    """Parse a whole number; AICB writes some as 33554432.0."""
    digits = text.removesuffix(".0")
    sign = digits.removeprefix("-")
    if not (sign.isascii() and sign.isdecimal() and len(sign) < 19) or int(digits) < low:
        raise ConfigError(where, text, f"a whole number, {low} or more")
    return int(digits)


def blocks_of(
    row: Row, groups: Mapping[str, Group], where: str, *, layers: bool, microbatches: bool
) -> tuple[Block, Block]:
    """Return the row's forward and backward blocks, without compute of 0 ns.

    SimAI waits for messages of the first two passes; those of the third one overlap.
    """
    in_layer = layers and row.name.startswith(_LAYER_ROWS)
    in_microbatch = microbatches and (
        row.name.startswith(_LAYER_ROWS) or row.name in _MICROBATCH_ROWS
    )
    passes: list[list[Operation]] = []
    for phase in _PHASES:
        cell: Cell = getattr(row, phase)
        place = {
            "phase": phase,
            "module": row.name,
            "layer": 0 if in_layer else None,
            "microbatch": 0 if in_microbatch else None,
        }
        ops: list[Operation] = []
        if cell.compute_ns:
            ops.append(
                ComputeOp(
                    op=Kernel(name=row.name),
                    time_s=cell.compute_ns / 1e9,
                    name="wgrad" if phase is Phase.WGRAD and cell.comm != NONE else "",
                    **place,  # type: ignore[arg-type]
                )
            )
        if cell.comm != NONE:
            ops.append(_message(cell, groups, where, bool(cell.compute_ns), place))
        passes.append(ops)
    return tuple(passes[0]), (*passes[1], *passes[2])


def _message(
    cell: Cell,
    groups: Mapping[str, Group],
    where: str,
    has_compute: bool,
    place: Mapping[str, object],
) -> CommOp:
    base, suffix = _split(cell.comm)
    is_wgrad = place["phase"] is Phase.WGRAD
    group = "dp" if is_wgrad and not suffix else SUFFIXES[suffix]
    if group not in groups:
        raise ConfigError(where, cell.comm, "a group that the header's sizes make possible")
    collective = TYPES[base]
    parts = num_parts(collective, groups[group].size)
    reduces = FACTS[collective].reduces
    return CommOp(
        collective=str(collective),
        dtype=DType.UINT8,
        count=-(-cell.num_bytes // parts),
        group=group,
        redop=RedOp.SUM if reduces else RedOp.NONE,
        root=0 if collective is Collective.BROADCAST else None,
        stream=group if is_wgrad else "compute",
        after=("wgrad",) if is_wgrad and has_compute else (),
        **place,  # type: ignore[arg-type]
    )


def row_of(name: str, fwd: Block, bwd: Block, groups: Mapping[str, Group]) -> Row:
    """Return the row of two blocks from blocks_of. Raise ConfigError for an unknown time."""
    cells: dict[Phase, Cell] = {}
    for item in (*fwd, *bwd):
        if isinstance(item, ComputeOp):
            if item.time_s is None:
                raise ConfigError("time_s", f"{item.module} {item.phase}", "a known time")
            cell = cells.get(item.phase, Cell())
            compute_ns = cell.compute_ns + round(item.time_s * 1e9)
            cells[item.phase] = replace(cell, compute_ns=compute_ns)
        elif isinstance(item, CommOp):
            cells[item.phase] = replace(
                cells.get(item.phase, Cell()),
                comm=TYPE_OF[item.collective] + _SUFFIX_OF.get(item.group, ""),
                num_bytes=item.message_bytes(groups[item.group]),
            )
    return Row(name=name, **{phase.value: cells.get(phase, Cell()) for phase in _PHASES})


_SUFFIX_OF = {group: suffix for suffix, group in SUFFIXES.items()}


# AICB's groups by SimAI's suffix: of messages within a pass, and of those of the whole step.
_PASS_GROUPS = {"tp_group": "", "ep_group": "_EP"}
_GRADIENTS = {"dp_group": "", "ep_dp_group": "_DP_EP"}
_CARRIED = {**_PASS_GROUPS, **_GRADIENTS}
_LABELS = {"tp_group": "tp", "ep_group": "ep", "dp_group": "dp", "ep_dp_group": "dp_ep"}


class Messages:
    """SimAI's types of a workload's messages; None: it has none."""

    def __init__(self, workload: Workload) -> None:
        self._groups = workload.groups
        names = group_names(workload)
        same = {
            ranks_of(self._groups[name]): label
            for name, label in names.items()
            if label in _CARRIED
        }
        self._names = names | {
            name: same[ranks]
            for name, group in self._groups.items()
            if names.get(name) not in _CARRIED and (ranks := ranks_of(group)) in same
        }

    def in_pass(self, op: CommOp) -> str | None:
        return self._type(op, _PASS_GROUPS)

    def of_step(self, op: CommOp) -> str | None:
        return self._type(op, _GRADIENTS)

    def label(self, op: CommOp) -> str:
        """Return SimAI's group of a message, else our own."""
        is_typed = (self.in_pass(op) or self.of_step(op)) is not None
        return _LABELS[self._names[op.group]] if is_typed else op.group

    def num_bytes(self, op: CommOp) -> int:
        return op.message_bytes(self._groups[op.group])

    def _type(self, op: CommOp, suffixes: Mapping[str, str]) -> str | None:
        """Return a message's type; broadcasts have none, as SimAI 1.6 and 1.7 ignore them."""
        suffix = suffixes.get(self._names.get(op.group, ""))
        is_supported = op.collective in TYPE_OF and op.collective != Collective.BROADCAST
        return TYPE_OF[op.collective] + suffix if is_supported and suffix is not None else None


_LAYERS = ("attention_layer", "mlp_layer")
_NUMBERED = ("cross_entropy", "optimizer")
_ROW_OUT = ("out", "down", "residual")  # roles behind the inner width: Megatron's row linears


@dataclass(slots=True, kw_only=True)
class Slot:
    """Computation up to a message. All but weight gradients counts as dgrad."""

    dgrad_s: float = 0.0
    wgrad_s: float = 0.0
    comm: str = NONE
    num_bytes: int = 0

    def cell(self, seconds: float) -> Cell:
        time_ns = nanoseconds(seconds)
        return Cell(compute_ns=time_ns, comm=self.comm, num_bytes=self.num_bytes)


def microbatch_rows(messages: Messages, ops: Sequence[Operation]) -> Iterator[Row]:
    gathers = {str(Collective.ALL_GATHER), str(Collective.REDUCE_SCATTER)}
    split = any(
        isinstance(op, CommOp) and op.group == "tp" and op.collective in gathers for op in ops
    )
    moe = {op.layer for op in ops if op.module.startswith(("mlp.router", "mlp.experts"))}
    parts: dict[tuple[int | None, str], tuple[list[Operation], list[Operation]]] = {}
    for op in ops:
        key = (op.layer, row_name(op.module, split=split, moe=op.layer in moe))
        fwd, bwd = parts.setdefault(key, ([], []))
        (fwd if op.phase is Phase.FWD and not op.recompute else bwd).append(op)
    for (_, name), (fwd, bwd) in parts.items():
        yield from _rows(name, slots_of(messages, fwd), slots_of(messages, bwd))


def row_name(module: str, *, split: bool, moe: bool) -> str:
    """Return AICB's name of a module's row. split: sequence parallelism."""
    part, _, role = module.partition(".")
    if part == "mlp" and moe:
        return "mlp_moelayer"
    if part in ("attention", "mlp"):
        if not split:
            return f"{part}_layer"
        return f"{part}_row" if role in _ROW_OUT else f"{part}_column"
    names = {"embedding": "embedding_layer", "head": "final_column", "loss": "cross_entropy"}
    return names.get(part, "_".join(module.replace(".", " ").split()) or "unnamed")


def _rows(name: str, fwd: list[Slot], bwd: list[Slot]) -> Iterator[Row]:
    """Yield a layer's rows; backward messages are placed from the last row, where it starts."""
    number = max(len(fwd), len(bwd))
    fwd += [Slot()] * (number - len(fwd))
    bwd = bwd[::-1] + [Slot()] * (number - len(bwd))
    for index, (there, back) in enumerate(zip(fwd, bwd, strict=True), start=1):
        yield Row(
            name=f"{name}{index}" if name in _NUMBERED else name,
            fwd=there.cell(there.dgrad_s),
            dgrad=back.cell(back.dgrad_s),
            wgrad=Cell(compute_ns=nanoseconds(back.wgrad_s)),
        )


def slots_of(messages: Messages, ops: Sequence[Operation]) -> list[Slot]:
    """Yield slots, each with a message that SimAI has; the last includes what follows it."""
    slots: list[Slot] = []
    slot = Slot()
    for op in ops:
        if isinstance(op, ComputeOp):
            if op.phase is Phase.WGRAD:
                slot.wgrad_s += op.time_s or 0.0
            else:
                slot.dgrad_s += op.time_s or 0.0
        elif (comm := messages.in_pass(op)) is not None:
            slot.comm = comm
            slot.num_bytes = messages.num_bytes(op)
            slots.append(slot)
            slot = Slot()
    if slots:
        slots[-1].dgrad_s += slot.dgrad_s
        slots[-1].wgrad_s += slot.wgrad_s
    elif slot.dgrad_s or slot.wgrad_s:
        slots.append(slot)
    return slots


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


_GRADIENT_ROWS = {
    "ALLGATHER": "grad_gather",
    "REDUCESCATTER": "grad_param_comm",
    "ALLREDUCE": "grad_param_comm",
    "ALLGATHER_DP_EP": "moe_grad_norm1",
    "REDUCESCATTER_DP_EP": "moe_grad_norm2",
    "ALLREDUCE_DP_EP": "moe_grad_norm2",
}
# Modules whose sums over data-parallel ranks are no gradients.
_SMALL = ("loss", "tokens", "norm", "clip", "gradient_norm", "overflow")
_VPP = ("virtual_pipeline_model_parallel_size", "vpp")
_MOST_PP_COMM = 2**31 - 1  # Workload.cc: std::stoi
_HEADER = (
    "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: {tp} ep: {ep} pp: {pp} "
    "vpp: {vpp} ga: {ga} all_gpus: {world} checkpoints: 0 checkpoint_initiates: 0 "
    "pp_comm: {pp_comm}\n"
)


def write(workload: Workload, stage: int = 0) -> Iterator[str]:
    """Yield the text in pieces. Raise ConfigError if compute times are unknown."""
    compute = (op for op in first_microbatch(workload, stage) if isinstance(op, ComputeOp))
    missing = sorted({f"{op.module} {op.phase}" for op in compute if op.time_s is None})
    if missing:
        text = f"{len(missing)} unknown, e.g. {', '.join(missing[:3])}"
        raise ConfigError("time_s", text, "known times of all computation (--compute-from)")
    before, inside, after = rows(workload, stage)
    times = workload.num_microbatches
    yield header(workload) + f"{len(before) + len(inside) * times + len(after)}\n"
    first, text, last = (
        "".join(row.line() for row in part) for part in (before, inside, after)
    )
    yield from joined([first, *repeated(text, times), last])


def rows(workload: Workload, stage: int) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the rows before the micro-batches, of one micro-batch, and after them."""
    ops = list(first_microbatch(workload, stage))
    messages = Messages(workload)
    numbered = [op for op in ops if op.microbatch is not None]
    others = [op for op in ops if op.microbatch is None]
    # Where none has a number, as in AICB's CSV, the passes are among the others.
    backward = frozenset() if numbered else frozenset((Phase.DGRAD, Phase.WGRAD, Phase.BWD))
    inside = microbatch_rows(messages, numbered)
    after = _step_rows(messages, others, backward)
    return list(_gradient_rows(workload, stage)), list(inside), list(after)


def omissions(workload: Workload) -> list[str]:
    """Return what the text cannot express of this workload besides messages, a line each."""
    ops = [op for stage in range(len(workload.stages)) for op in workload.tally(stage)]
    comms = [op for op in ops if isinstance(op, CommOp)]
    return present(workload, "model", "settings", "notes", "start times") + remarks(
        (
            any(op.stream != COMPUTE for op in comms),
            "overlap: messages within a pass are waited for; streams go",
        ),
        (
            any(op.dtype is not DType.UINT8 for op in comms),
            "element types: sizes are bytes",
        ),
        (
            any(isinstance(op, ComputeOp) and not isinstance(op.op, Kernel) for op in ops),
            "operators: a row has a time per pass, not shapes",
        ),
        (len(workload.stages) > 1, "the pipeline's order: it is pp, vpp, pp_comm in line 1"),
        (pipeline_bytes(workload) > _MOST_PP_COMM, "pp_comm: SimAI reads at most 2147483647"),
        (workload.rules == "aicb", "the order of layers, which the file does not number"),
        (
            "etp:" in header(workload),
            "etp in line 1: SimAI ignores it and takes DP_EP as dp / ep ranks",
        ),
    )


def first_microbatch(workload: Workload, stage: int) -> Iterator[Operation]:
    """Yield operations of micro-batch 0 and of none in issue order, without walking others."""
    spans: dict[str, tuple[int, int, bool]] = {}

    def span(name: str) -> tuple[int, int, bool]:
        """Return the least and largest micro-batch inside, and whether some op has none."""
        if name not in spans:
            lows = []
            highs = []
            loose = False
            for item in workload.blocks[name]:
                if isinstance(item, Run):
                    low, high, inner = span(item.block)
                    bounds = (
                        item.microbatch,
                        item.microbatch + item.microbatch_step * (item.times - 1),
                    )
                    if low <= high:
                        lows.append(low + min(bounds))
                        highs.append(high + max(bounds))
                    loose = loose or inner
                elif item.microbatch is None:
                    loose = True
                else:
                    lows.append(item.microbatch)
                    highs.append(item.microbatch)
            spans[name] = (min(lows, default=1), max(highs, default=0), loose)
        return spans[name]

    def walk(name: str, layer: int, microbatch: int) -> Iterator[Operation]:
        for item in workload.blocks[name]:
            if isinstance(item, Run):
                low, high, loose = span(item.block)
                for at, base in item.places(layer, microbatch):
                    if loose or low + base <= 0 <= high + base:
                        yield from walk(item.block, at, base)
            elif item.microbatch is None or item.microbatch + microbatch == 0:
                yield shifted(item, layer, microbatch)

    yield from walk(workload.stages[stage].step, 0, 0)


def header(workload: Workload) -> str:
    """Return line 1, with etp, which SimAI does not know, if experts have another tp."""
    sizes = {name: group.size for name, group in workload.groups.items()}
    settings = workload.settings
    chunks = [settings.get(name) for name in _VPP]
    if "pp_schedule" in settings:
        schedule = PipelineSchedule(str(settings["pp_schedule"]))
        chunks.append(schedule.num_chunks(int(settings.get("pp_stages") or 2)))
    tp = sizes.get("tp", 1)
    ep = sizes.get("ep", 1)
    etp = sizes.get("etp", tp) if ep > 1 else tp
    return _HEADER.format(
        tp=tp,
        ep=f"{ep} etp: {etp}" if etp != tp else ep,
        pp=len(workload.stages),
        vpp=next((chunk for chunk in chunks if isinstance(chunk, int) and chunk), 1),
        ga=workload.num_microbatches,
        world=workload.world_size,
        pp_comm=pipeline_bytes(workload),
    )


def pipeline_bytes(workload: Workload) -> int:
    """Return the largest message between stages; each stage's file has the same."""
    return max(
        (
            op.call_bytes()
            for stage in range(len(workload.stages))
            for op in workload.tally(stage)
            if isinstance(op, CommOp) and transfer_of(workload, stage, op)
        ),
        default=0,
    )


def _gradient_rows(workload: Workload, stage: int) -> Iterator[Row]:
    messages = Messages(workload)
    sums: dict[tuple[str, str], int] = {}
    for op, count in workload.tally(stage).items():
        comm = messages.of_step(op) if isinstance(op, CommOp) else None
        if comm is not None and isinstance(op, CommOp):
            small = op.module in _SMALL
            name = op.module if small else _GRADIENT_ROWS.get(comm, "grad_comm")
            sums[comm, name] = sums.get((comm, name), 0) + count * messages.num_bytes(op)
    for (comm, name), num_bytes in sorted(sums.items()):
        yield Row(name=name, wgrad=Cell(comm=comm, num_bytes=num_bytes))


def _step_rows(
    messages: Messages, ops: Sequence[Operation], backward: Collection[Phase]
) -> Iterator[Row]:
    """Yield rows of operations without a micro-batch, such as the optimizer, by module.

    backward: phases of the backward pass; other operations stand in the forward columns.
    """
    parts: dict[str, list[Operation]] = {}
    for op in ops:
        name = row_name(op.module, split=False, moe=False)
        # What a layer's or the embedding's gradients have beside a pass begins none.
        if name in _LAYERS or (not backward and name in _MICROBATCH_ROWS):
            name = f"grad_{name}"
        parts.setdefault("optimizer" if op.phase is Phase.OPTIM else name, []).append(op)
    for name, part in parts.items():
        fwd = [op for op in part if op.phase not in backward]
        bwd = [op for op in part if op.phase in backward]
        yield from _rows(name, slots_of(messages, fwd), slots_of(messages, bwd))
