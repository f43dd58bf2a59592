"""A workload as rows: stages, communication, computation and layers.

They are counted by Workload.tally and over blocks, never by walking a step. All figures are of
one rank and one optimizer step. Bytes of communication are messages as nccl-tests counts them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from stepmark.cases.message import Histogram, MessageKind, Tally
from stepmark.findings.histogram import size_of
from stepmark.model.ops import Op
from stepmark.step.workload import (
    CommOp,
    ComputeOp,
    Group,
    Kernel,
    Operation,
    Run,
    Stage,
    Workload,
    pass_of,
)
from stepmark.step.workload_stages import missing_pipeline
from stepmark.tables.columns import (
    BYTES,
    COUNT,
    FLOPS,
    PERCENT,
    SECONDS,
    SHOWN,
    TEXT,
    Column,
    Row,
    Unit,
    given,
    rows_of,
)
from stepmark.tables.outcomes import percent
from stepmark.tables.table import Table
from stepmark.workloads.durations import family

T = TypeVar("T")
SETUP = "setup"  # runs once, before the first step
PASSES = (SETUP, "forward", "backward", "optimizer", "step")
Sums = Counter[tuple[str, str]]  # by (pass, quantity)


@dataclass(frozen=True, slots=True)
class _StageSums:
    """A pipeline stage with its operations and their sums."""

    index: int
    stage: Stage
    num_layers: int | None  # None: the file does not say
    operations: Mapping[Operation, int]
    sums: Sums

    @property
    def has(self) -> str:
        ends = {"embedding": self.stage.has_embedding, "head": self.stage.has_head}
        return " ".join(name for name, is_there in ends.items() if is_there)

    @property
    def num_operations(self) -> int:
        return sum(self.operations.values())

    @property
    def num_collectives(self) -> int:
        return sum(
            n for operation, n in self.operations.items() if isinstance(operation, CommOp)
        )

    @property
    def flops(self) -> int | None:
        """Return those of all computation; None where one operator's are unknown."""
        ops = (o for o in self.operations if isinstance(o, ComputeOp))
        if any(operation.op.flops is None for operation in ops):
            return None
        return self.over_passes("flops")

    def over_passes(self, what: str) -> int:
        return sum(number for (_, name), number in self.sums.items() if name == what)

    @property
    def time_s(self) -> float | None:
        """Return the time of all computation; None where one operator's is unknown."""
        times = [
            None if operation.time_s is None else calls * operation.time_s
            for operation, calls in self.operations.items()
            if isinstance(operation, ComputeOp)
        ]
        return None if None in times else sum(filter(None, times))


@dataclass(frozen=True, slots=True)
class _Total:
    """Sums over pipeline stages. None: of stages that the workload does not have."""

    of: str  # "stages": one rank of each; "job": all ranks
    stages: Sequence[_StageSums] | None
    num_ranks: int
    ranks_per_stage: int

    def over(self, quantity: Callable[[_StageSums], int | None]) -> int | None:
        """Return the sum over these ranks; None where a stage's is unknown."""
        values = [None] if self.stages is None else [quantity(stage) for stage in self.stages]
        return None if None in values else self.ranks_per_stage * sum(filter(None, values))


@dataclass(slots=True)
class _Messages:
    """Calls alike in pass, collective, group, size, type and stream."""

    when: str
    operation: CommOp
    group: Group
    calls: int = 0
    bus_bytes: float = 0.0
    modules: dict[str, None] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return self.operation.message_bytes(self.group)


@dataclass(slots=True)
class _Computed:
    """Calls of one operator in one pass."""

    op: Op | Kernel
    phase: str
    calls: int = 0
    time_s: float | None = None
    modules: dict[str, None] = field(default_factory=dict)
    all_flops: int = 0  # of the stage

    @property
    def flops(self) -> int | None:
        return None if self.op.flops is None else self.calls * self.op.flops

    @property
    def bytes_moved(self) -> int | None:
        return None if self.op.bytes_moved is None else self.calls * self.op.bytes_moved


AlikeLayers = tuple[list[int | None], Sums]

_MOST_CHARACTERS = 48


def _show_column(
    name: str, of: Callable[[T], object], unit: Unit = TEXT, heading: str = ""
) -> Column[T]:
    """Return a column in which a zero with a unit is empty, and long texts are cut."""

    def words(row: Row) -> str:
        value = row[name]
        shown = unit.show(value) if value or unit in (TEXT, COUNT) else ""
        is_long = len(shown) > _MOST_CHARACTERS
        return f"{shown[: _MOST_CHARACTERS - 3]}..." if is_long else shown

    return Column(name, of, unit, heading, SHOWN, words=words)


STAGE_COLUMNS: tuple[Column[_StageSums], ...] = (
    _show_column("stage", lambda o: o.index),
    _show_column("layers", lambda o: o.num_layers, COUNT),
    _show_column("which", lambda o: ranges(o.stage.layers)),
    _show_column("has", lambda o: o.has, TEXT, "and"),
    _show_column("operations", lambda o: o.num_operations, COUNT),
    _show_column("collectives", lambda o: o.num_collectives, COUNT),
    _show_column("forward_flops", lambda o: o.sums["forward", "flops"], FLOPS, "fwd FLOP"),
    _show_column("backward_flops", lambda o: o.sums["backward", "flops"], FLOPS, "bwd FLOP"),
    _show_column("comm_bytes", lambda o: o.over_passes("comm_bytes"), BYTES, "messages"),
    _show_column("bus_bytes", lambda o: o.over_passes("bus_bytes"), BYTES, "on the bus"),
    _show_column("time_s", lambda o: o.time_s, SECONDS, "compute"),
)
TOTAL_COLUMNS: tuple[Column[_Total], ...] = (
    _show_column("of", lambda o: o.of),
    _show_column("num_ranks", lambda o: o.num_ranks, COUNT, "ranks"),
    _show_column("operations", lambda o: o.over(lambda s: s.num_operations), COUNT),
    _show_column("collectives", lambda o: o.over(lambda s: s.num_collectives), COUNT),
    _show_column("flops", lambda o: o.over(lambda s: s.flops), FLOPS, "FLOP"),
    _show_column(
        "comm_bytes", lambda o: o.over(lambda s: s.over_passes("comm_bytes")), BYTES, "messages"
    ),
    _show_column(
        "bus_bytes", lambda o: o.over(lambda s: s.over_passes("bus_bytes")), BYTES, "on the bus"
    ),
)
COLLECTIVE_COLUMNS: tuple[Column[_Messages], ...] = (
    _show_column("pass", lambda o: o.when),
    _show_column("collective", lambda o: o.operation.collective),
    _show_column("dtype", lambda o: o.operation.dtype.value),
    _show_column("group", lambda o: o.operation.group),
    _show_column("num_ranks", lambda o: o.group.size, COUNT, "ranks"),
    _show_column("count", lambda o: o.operation.count, COUNT),
    _show_column("size_bytes", lambda o: o.size_bytes, BYTES, "size"),
    _show_column("calls", lambda o: o.calls, COUNT),
    _show_column("bytes", lambda o: o.calls * o.size_bytes, BYTES),
    _show_column("bus_bytes", lambda o: o.bus_bytes, BYTES, "on the bus"),
    _show_column("stream", lambda o: o.operation.stream),
    _show_column("modules", lambda o: ", ".join(o.modules), TEXT, "of"),
)
COMPUTE_COLUMNS: tuple[Column[_Computed], ...] = (
    _show_column("family", lambda o: family(o.op), TEXT, "operator"),
    _show_column("pass", lambda o: o.phase),
    _show_column("shape", lambda o: o.op.name if isinstance(o.op, Kernel) else o.op.shape_text),
    _show_column("dtype", lambda o: "" if isinstance(o.op, Kernel) else o.op.dtype.value),
    _show_column("calls", lambda o: o.calls, COUNT),
    Column("flops_each", lambda o: o.op.flops, FLOPS),
    _show_column("flops", lambda o: o.flops, FLOPS, "FLOP"),
    _show_column("pct_flops", lambda o: percent(o.flops or None, o.all_flops), PERCENT, "%"),
    _show_column("bytes_moved", lambda o: o.bytes_moved, BYTES, "memory"),
    _show_column("time_s", lambda o: o.time_s, SECONDS, "time each"),
    _show_column("modules", lambda o: ", ".join(o.modules), TEXT, "of"),
)
LAYER_COLUMNS: tuple[Column[AlikeLayers], ...] = (
    _show_column("layers", lambda o: ranges(_known(o)) or "none"),
    _show_column("number", lambda o: len(_known(o)) or None, COUNT),
    _show_column("forward_flops", lambda o: o[1]["forward", "flops"], FLOPS, "fwd FLOP"),
    _show_column("backward_flops", lambda o: o[1]["backward", "flops"], FLOPS, "bwd FLOP"),
    _show_column(
        "forward_comm_bytes", lambda o: o[1]["forward", "comm_bytes"], BYTES, "fwd bytes"
    ),
    _show_column(
        "backward_comm_bytes", lambda o: o[1]["backward", "comm_bytes"], BYTES, "bwd bytes"
    ),
    Column("forward_bytes_moved", lambda o: o[1]["forward", "bytes_moved"], BYTES),
    Column("backward_bytes_moved", lambda o: o[1]["backward", "bytes_moved"], BYTES),
    _show_column(
        "optimizer_comm_bytes",
        lambda o: o[1]["optimizer", "comm_bytes"] + o[1]["step", "comm_bytes"],
        BYTES,
        "optimizer bytes",
    ),
)
SIZE_COLUMNS = (
    given("collective"),
    given("size_bytes", BYTES, "size"),
    given("calls", COUNT),
    given("bytes", BYTES),
)
NOTE_COLUMNS = (given("note"),)


def tables(workload: Workload, stage: int) -> dict[str, Table]:
    """Return the tables that --json writes, by name."""
    return {
        "stages": Table(stage_rows(workload), STAGE_COLUMNS),
        "totals": Table(total_rows(workload), TOTAL_COLUMNS),
        "communication": Table(collective_rows(workload, stage), COLLECTIVE_COLUMNS),
        "sizes": Table(size_rows(workload, stage), SIZE_COLUMNS),
        "computation": Table(compute_rows(workload, stage), COMPUTE_COLUMNS),
        "layers": Table(layer_rows(workload, stage), LAYER_COLUMNS),
        "notes": Table([{"note": note} for note in workload.all_notes], NOTE_COLUMNS),
    }


def stage_rows(workload: Workload) -> list[Row]:
    """Return one row per pipeline stage."""
    return rows_of(STAGE_COLUMNS, _stage_sums(workload))


def total_rows(workload: Workload) -> list[Row]:
    """Return sums over one rank of each stage, and over all ranks of the job.

    A collective counts for each of its ranks. The job's sums are unknown where the workload is
    one of several stages.
    """
    stages = _stage_sums(workload)
    has_all = not missing_pipeline(workload)
    world_size = workload.world_size
    totals = (
        _Total("stages", stages, len(stages), ranks_per_stage=1),
        _Total("job", stages if has_all else None, world_size, world_size // len(stages)),
    )
    return rows_of(TOTAL_COLUMNS, totals)


def _stage_sums(workload: Workload) -> list[_StageSums]:
    has_layers = workload.numbers("layer")
    sums = []
    for index, stage in enumerate(workload.stages):
        tally = workload.tally(index)
        number = len(stage.layers) if has_layers else None
        sums.append(_StageSums(index, stage, number, tally, _sums(tally, workload)))
    return sums


def collective_rows(workload: Workload, stage: int) -> list[Row]:
    """Return one row per pass, collective, type, group and size."""
    groups: dict[tuple[int, str, str, int, str, str, str], _Messages] = {}
    for when, operation, calls in communication(workload, stage):
        group = workload.groups[operation.group]
        key = (
            *(PASSES.index(when), operation.collective, operation.group),
            *(operation.message_bytes(group), operation.dtype.value, operation.redop.value),
            operation.stream,
        )
        messages = groups.setdefault(key, _Messages(when, operation, group))
        messages.calls += calls
        messages.bus_bytes += calls * operation.bus_bytes(group)
        messages.modules[operation.module] = None
    return rows_of(COLLECTIVE_COLUMNS, (groups[key] for key in sorted(groups)))


def histogram(workload: Workload, stage: int) -> Histogram:
    """Return the messages of a step of one rank, without setup."""
    tallies: dict[MessageKind, Tally] = {}
    for when, operation, calls in communication(workload, stage):
        if when == SETUP:
            continue
        group = workload.groups[operation.group]
        kind = MessageKind(
            collective=operation.collective,
            dtype=operation.dtype.value,
            group=operation.group,
            num_ranks=group.size,
            phase=when,
            call_bytes=operation.call_bytes(),
            message_bytes=operation.message_bytes(group),
        )
        before = tallies[kind].calls if kind in tallies else 0
        tallies[kind] = Tally(calls=before + calls, ranks=1)
    return tallies


def size_rows(workload: Workload, stage: int) -> list[Row]:
    """Return one row per collective and size, over all passes and groups."""
    calls: Counter[tuple[str, int]] = Counter()
    for kind, tally in histogram(workload, stage).items():
        calls[kind.collective, size_of(kind)[0]] += tally.calls
    return [
        {"collective": name, "size_bytes": size, "calls": n, "bytes": n * size}
        for (name, size), n in sorted(calls.items())
    ]


def compute_rows(workload: Workload, stage: int) -> list[Row]:
    """Return one row per distinct operator and pass, most FLOPs first."""
    by_key: dict[tuple[Op | Kernel, str], _Computed] = {}
    for operation, calls in workload.tally(stage).items():
        if isinstance(operation, ComputeOp) and not operation.is_wait:
            phase = operation.phase.value + (" again" if operation.recompute else "")
            key = (operation.op, phase)
            computed = by_key.setdefault(key, _Computed(operation.op, phase))
            computed.calls += calls
            computed.time_s = operation.time_s
            computed.modules[operation.module] = None
    rows = sorted(by_key.values(), key=lambda computed: -(computed.flops or 0))
    total = sum(computed.flops or 0 for computed in rows)
    for computed in rows:
        computed.all_flops = total
    return rows_of(COMPUTE_COLUMNS, rows)


def layer_rows(workload: Workload, stage: int) -> list[Row]:
    """Return one row per layer; layers that are alike share one.

    The row without layers has the embedding, head and optimizer.
    """
    return rows_of(LAYER_COLUMNS, alike_layers(workload, stage))


def alike_layers(workload: Workload, stage: int) -> list[AlikeLayers]:
    """Return layers that are alike with the sums of one; layer None is outside of layers."""
    sums = _by_layer(workload, workload.stages[stage].step, {})
    merged: list[AlikeLayers] = []
    for layer in sorted(sums, key=lambda layer: (layer is None, layer or 0)):
        alike = [
            layers for layers, other in merged if layer is not None and other == sums[layer]
        ]
        if alike:
            alike[0].append(layer)
        else:
            merged.append(([layer], sums[layer]))
    return merged


def ranges(numbers: Sequence[int]) -> str:
    """Return e.g. 0-3,7 for 0,1,2,3,7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def communication(workload: Workload, stage: int) -> Iterable[tuple[str, CommOp, int]]:
    """Yield (pass, collective, calls) of the setup and the step of a stage."""
    for operation, calls in workload.tally(stage, setup=True).items():
        if isinstance(operation, CommOp):
            yield SETUP, operation, calls
    for operation, calls in workload.tally(stage).items():
        if isinstance(operation, CommOp):
            yield pass_of(operation), operation, calls


def _sums(counted: Mapping[Operation, int], workload: Workload) -> Sums:
    sums: Sums = Counter()
    for operation, calls in counted.items():
        when = pass_of(operation)
        if isinstance(operation, CommOp):
            group = workload.groups[operation.group]
            sums[when, "comm_bytes"] += calls * operation.message_bytes(group)
            sums[when, "bus_bytes"] += round(calls * operation.bus_bytes(group))
        else:
            sums[when, "flops"] += calls * (operation.op.flops or 0)
            sums[when, "bytes_moved"] += calls * (operation.op.bytes_moved or 0)
    return sums


def _known(alike: AlikeLayers) -> list[int]:
    return [layer for layer in alike[0] if layer is not None]


def _by_layer(
    workload: Workload, block: str, cache: dict[str, dict[int | None, Sums]]
) -> dict[int | None, Sums]:
    """Return sums by layer of one run of a block; each block is visited once."""
    if block in cache:
        return cache[block]
    by_layer: dict[int | None, Sums] = defaultdict(Counter)
    plain: dict[int | None, Counter[Operation]] = defaultdict(Counter)
    for item in workload.blocks[block]:
        if not isinstance(item, Run):
            plain[item.layer][item] += 1
            continue
        inside = _by_layer(workload, item.block, cache)
        # Runs that stay on a layer repeat micro-batches; others go from layer to layer.
        times, copies = (1, item.times) if item.layer_step else (item.times, 1)
        for copy in range(copies):
            for layer, sums in inside.items():
                place = None if layer is None else layer + item.layer + copy * item.layer_step
                total = by_layer[place]
                for key, number in sums.items():
                    total[key] += number * times
    for layer, operations in plain.items():
        by_layer[layer].update(_sums(operations, workload))
    cache[block] = dict(by_layer)
    return cache[block]
