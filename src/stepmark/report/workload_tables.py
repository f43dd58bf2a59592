"""A workload to rows: its stages, what it communicates, what it computes, layer by layer.

Counted through Workload.tally and its blocks, never by walking a step. All of it is of one
rank and one optimizer step. Bytes of communication are messages as nccl-tests counts them.
Over 250 lines: the tables share their sums.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from stepmark.core.columns import Row
from stepmark.core.message import Histogram, MessageKind, Tally
from stepmark.core.ops import FAMILY_OF, Op, Phase
from stepmark.core.workload import CommOp, ComputeOp, Kernel, Operation, Run, Workload
from stepmark.report.histogram import size_of

SETUP = "setup"  # what runs once, before the first step
_PASS = {
    Phase.FWD: "forward",
    Phase.DGRAD: "backward",
    Phase.WGRAD: "backward",
    Phase.BWD: "backward",
    Phase.OPTIM: "optimizer",
    Phase.STEP: "step",
}
PASSES = (SETUP, "forward", "backward", "optimizer", "step")
_Kind = tuple[int, str, str, int, str, str, str]
Sums = Counter[tuple[str, str]]  # (pass, what is summed)


def pass_of(operation: Operation) -> str:
    """forward, backward (a recomputed forward is of it), optimizer, step."""
    return "backward" if operation.recompute else _PASS[operation.phase]


def stage_rows(workload: Workload) -> list[Row]:
    """One row per pipeline stage."""
    rows: list[Row] = []
    for index, stage in enumerate(workload.stages):
        counted = workload.tally(index)
        sums = _sums(counted, workload)
        row: Row = {
            "stage": index,
            "layers": len(stage.layers),
            "which": ranges(stage.layers),
            "has": " ".join(
                word
                for word, there in (
                    ("embedding", stage.has_embedding),
                    ("head", stage.has_head),
                )
                if there
            ),
            "operations": sum(counted.values()),
            "collectives": sum(n for one, n in counted.items() if isinstance(one, CommOp)),
            "forward_flops": sums["forward", "flops"],
            "backward_flops": sums["backward", "flops"],
            "comm_bytes": _over_passes(sums, "comm_bytes"),
            "bus_bytes": _over_passes(sums, "bus_bytes"),
            "time_s": _known_time(counted),
        }
        rows.append(row)
    return rows


def collective_rows(workload: Workload, stage: int) -> list[Row]:
    """One row per pass, collective, type, group and size."""
    found: dict[_Kind, Row] = {}
    modules: dict[_Kind, dict[str, None]] = defaultdict(dict)
    for when, operation, calls in _communication(workload, stage):
        group = workload.groups[operation.group]
        size = operation.message_bytes(group)
        key = (
            *(PASSES.index(when), operation.collective, operation.group, size),
            *(operation.dtype.value, operation.redop.value, operation.stream),
        )
        row = found.setdefault(
            key,
            {
                "pass": when,
                "collective": operation.collective,
                "dtype": operation.dtype.value,
                "group": operation.group,
                "num_ranks": group.size,
                "count": operation.count,
                "size_bytes": size,
                "calls": 0,
                "bytes": 0,
                "bus_bytes": 0.0,
                "stream": operation.stream,
                "modules": "",
            },
        )
        row["calls"] = _int(row["calls"]) + calls
        row["bytes"] = _int(row["bytes"]) + calls * size
        row["bus_bytes"] = _float(row["bus_bytes"]) + calls * operation.bus_bytes(group)
        modules[key][operation.module] = None
    for key, row in found.items():
        row["modules"] = ", ".join(modules[key])
    return [found[key] for key in sorted(found)]


def histogram(workload: Workload, stage: int) -> Histogram:
    """Messages of a step of one rank, for report.histogram. Setup is left out."""
    found: dict[MessageKind, Tally] = {}
    for when, operation, calls in _communication(workload, stage):
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
        before = found[kind].calls if kind in found else 0
        found[kind] = Tally(calls=before + calls, ranks=1)
    return found


def size_rows(workload: Workload, stage: int) -> list[Row]:
    """One row per collective and size, whatever its pass and group."""
    found: dict[tuple[str, int], Row] = {}
    for kind, tally in histogram(workload, stage).items():
        key = kind.collective, size_of(kind)[0]
        row = found.setdefault(
            key, {"collective": key[0], "size_bytes": key[1], "calls": 0, "bytes": 0}
        )
        row["calls"] = _int(row["calls"]) + tally.calls
        row["bytes"] = _int(row["bytes"]) + tally.calls * key[1]
    return [found[key] for key in sorted(found)]


def is_wait(operation: ComputeOp) -> bool:
    """Whether it only stands for waiting: it computes and moves nothing."""
    return isinstance(operation.op, Kernel) and operation.op.is_wait


def compute_rows(workload: Workload, stage: int) -> list[Row]:
    """One row per distinct operator and pass, most FLOPs first."""
    found: dict[tuple[Op | Kernel, Phase, bool], int] = Counter()
    modules: dict[tuple[Op | Kernel, Phase, bool], dict[str, None]] = defaultdict(dict)
    times: dict[tuple[Op | Kernel, Phase, bool], float | None] = {}
    for operation, calls in workload.tally(stage).items():
        if isinstance(operation, ComputeOp) and not is_wait(operation):
            key = (operation.op, operation.phase, operation.recompute)
            found[key] += calls
            modules[key][operation.module] = None
            times[key] = operation.time_s
    total = sum(n * (op.flops or 0) for (op, _, _), n in found.items())
    rows: list[Row] = []
    for (op, phase, recompute), calls in found.items():
        flops = None if op.flops is None else calls * op.flops
        moved = None if op.bytes_moved is None else calls * op.bytes_moved
        row: Row = {
            "family": "kernel" if isinstance(op, Kernel) else FAMILY_OF[type(op)],
            "pass": f"{phase.value} again" if recompute else phase.value,
            "shape": op.name if isinstance(op, Kernel) else op.shape_text,
            "dtype": "" if isinstance(op, Kernel) else op.dtype.value,
            "calls": calls,
            "flops_each": op.flops,
            "flops": flops,
            "pct_flops": 100 * flops / total if flops and total else None,
            "bytes_moved": moved,
            "time_s": times[op, phase, recompute],
            "modules": ", ".join(modules[op, phase, recompute]),
        }
        rows.append(row)
    return sorted(rows, key=lambda row: -(_int(row["flops"] or 0)))


def layer_rows(workload: Workload, stage: int) -> list[Row]:
    """One row per layer; layers that are alike share one.

    The row without layers is of what belongs to none: embedding, head, optimizer.
    """
    rows: list[Row] = []
    for layers, held in alike_layers(workload, stage):
        known = [layer for layer in layers if layer is not None]
        row: Row = {
            "layers": ranges(known) if known else "none",
            "number": len(known) or None,
            "forward_flops": held["forward", "flops"],
            "backward_flops": held["backward", "flops"],
            "forward_comm_bytes": held["forward", "comm_bytes"],
            "backward_comm_bytes": held["backward", "comm_bytes"],
            "forward_bytes_moved": held["forward", "bytes_moved"],
            "backward_bytes_moved": held["backward", "bytes_moved"],
            "optimizer_comm_bytes": held["optimizer", "comm_bytes"]
            + held["step", "comm_bytes"],
        }
        rows.append(row)
    return rows


def alike_layers(workload: Workload, stage: int) -> list[tuple[list[int | None], Sums]]:
    """Layers that do the same, and the sums of one of them; None is what belongs to none."""
    sums = _by_layer(workload, workload.stages[stage].step, {})
    merged: list[tuple[list[int | None], Sums]] = []
    for layer in sorted(sums, key=lambda layer: (layer is None, layer or 0)):
        alike = [held for held, other in merged if layer is not None and other == sums[layer]]
        if alike:
            alike[0].append(layer)
        else:
            merged.append(([layer], sums[layer]))
    return merged


def ranges(numbers: Sequence[int]) -> str:
    """0-3,7 of 0,1,2,3,7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _communication(workload: Workload, stage: int) -> Iterable[tuple[str, CommOp, int]]:
    for operation, calls in workload.tally(stage, setup=True).items():
        if isinstance(operation, CommOp):
            yield SETUP, operation, calls
    for operation, calls in workload.tally(stage).items():
        if isinstance(operation, CommOp):
            yield pass_of(operation), operation, calls


def _sums(counted: Mapping[Operation, int], workload: Workload) -> Sums:
    found: Sums = Counter()
    for operation, calls in counted.items():
        when = pass_of(operation)
        if isinstance(operation, CommOp):
            group = workload.groups[operation.group]
            found[when, "comm_bytes"] += calls * operation.message_bytes(group)
            found[when, "bus_bytes"] += round(calls * operation.bus_bytes(group))
        else:
            found[when, "flops"] += calls * (operation.op.flops or 0)
            found[when, "bytes_moved"] += calls * (operation.op.bytes_moved or 0)
    return found


def _over_passes(sums: Sums, what: str) -> int:
    return sum(number for (_, name), number in sums.items() if name == what)


def _known_time(counted: Mapping[Operation, int]) -> float | None:
    """Of all computation; None where one operator's is not known."""
    total = 0.0
    for operation, calls in counted.items():
        if isinstance(operation, ComputeOp):
            if operation.time_s is None:
                return None
            total += calls * operation.time_s
    return total


def _by_layer(
    workload: Workload, block: str, known: dict[str, dict[int | None, Sums]]
) -> dict[int | None, Sums]:
    """Sums by layer of one pass through a block, each block looked at once."""
    if block in known:
        return known[block]
    found: dict[int | None, Sums] = defaultdict(Counter)
    plain: dict[int | None, Counter[Operation]] = defaultdict(Counter)
    for item in workload.blocks[block]:
        if not isinstance(item, Run):
            plain[item.layer][item] += 1
            continue
        inside = _by_layer(workload, item.block, known)
        # Runs that stay on a layer are many (micro-batches); runs that go on are layers.
        times, copies = (1, item.times) if item.layer_step else (item.times, 1)
        for copy in range(copies):
            for layer, sums in inside.items():
                place = None if layer is None else layer + item.layer + copy * item.layer_step
                held = found[place]
                for key, number in sums.items():
                    held[key] += number * times
    for layer, operations in plain.items():
        found[layer].update(_sums(operations, workload))
    known[block] = dict(found)
    return known[block]


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _float(value: object) -> float:
    assert isinstance(value, float)
    return value
