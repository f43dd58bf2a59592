"""One row of SimAI's text: a layer's compute times and messages, by pass.

Source: aliyun/SimAI (astra-sim-alibabacloud, Workload.cc) reads twelve fields; aliyun/aicb
(SimAI_training_workload_generator.py) writes them. Sizes are bytes of the full tensor; times
are nanoseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import FACTS, Collective, RedOp, num_parts
from stepmark.model.ops import Phase
from stepmark.step.workload import Block, CommOp, ComputeOp, Group, Kernel, Operation

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
    parts, reduces = num_parts(collective, groups[group].size), FACTS[collective].reduces
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
