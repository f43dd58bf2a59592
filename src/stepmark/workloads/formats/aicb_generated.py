"""AICB's CSV of a generated workload: one stage's program, and what it cannot express."""

from collections.abc import Iterable, Iterator

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.ops import Gemm
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Workload
from stepmark.workloads.formats.aicb_line import EPOCH_END, HEADER, Lines, no_setup
from stepmark.workloads.formats.loss import present, tallied
from stepmark.workloads.formats.walk import RepeatedText, remarks


def write(workload: Workload, stage: int, *, computation: bool) -> Iterator[str]:
    """Yield the text of a stage in pieces. computation: with lines of matrix products."""
    program = workload.stages[stage]
    yield HEADER + "\n"
    init = Lines(workload, computation=computation, setup=True)
    before = RepeatedText(workload.blocks, init)
    setup = "".join(before.chunks(program.setup)) if program.setup else ""
    yield setup or no_setup(workload.world_size)
    yield EPOCH_END + "\n"
    line = Lines(workload, computation=computation)
    yield from RepeatedText(workload.blocks, line).chunks(program.step)
    yield EPOCH_END + "\n"


def omissions(workload: Workload, stages: Iterable[int] | None) -> list[str]:
    """Return what the CSV cannot express of these stages besides messages, a line each."""
    stages = list(range(len(workload.stages)) if stages is None else stages)
    ops = tallied(workload, stages)
    for stage in stages:
        ops.update(workload.tally(stage, setup=True))
    uneven = any(getattr(op, "collective", "") == Collective.ALL_TO_ALL_V for op in ops)
    typed = any(isinstance(op, CommOp) and op.dtype is not DType.UINT8 for op in ops)
    lines = present(workload, "layers", "micro-batches", "times", "start times")
    lines += present(workload, "model", "settings", "notes")
    lines += remarks(
        (
            any(op.stream != COMPUTE for op in ops),
            "overlap: every line waits for the one before",
        ),
        (typed, "element types: sizes are bytes"),
        (uneven, "uneven parts of all_to_all_v: written as all_to_all of the average"),
    )
    modules: dict[str, dict[str, int]] = {}
    for op, times in ops.items():
        if isinstance(op, ComputeOp) and not isinstance(op.op, Gemm):
            counts = modules.setdefault(type(op.op).__name__.lower(), {})
            counts[op.module] = counts.get(op.module, 0) + times
    for kind, counts in sorted(modules.items()):
        lines.append(
            f"{kind}: {sum(counts.values())} computations ({', '.join(counts)}): only matrix"
            " products have lines"
        )
    return lines
