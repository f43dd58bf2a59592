"""Record the workload of a user's PyTorch code while it runs without any accelerator.

The code runs on the CPU with fake tensors, which have shapes and no data, as one rank of a fake
process group, whose collectives return at once (torch.testing's "fake" backend): FSDP2, tensor
parallelism by DTensor and DDP issue the same operations as on real ranks. Operators are
recorded at the dispatcher below DTensor.

The contract: a function, by any name, without arguments. It is called when torch.distributed
is up; it makes its mesh (device type "cpu"), model and optimizer and returns a function of no
arguments that does one training step: forward, loss, backward, optimizer.step(). It does not
call init_process_group and does not compile. Values that depend on weights or inputs do not
exist: see values.py and unknown.py. With DDP and pipelines, whose first steps differ, the third
is recorded.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from stepmark.capture.fake import fake_world
from stepmark.capture.modules import closure_modules
from stepmark.capture.record import CaptureRecorder
from stepmark.capture.routing import Router
from stepmark.capture.unknown import POLICY, ReadPolicy
from stepmark.capture.watch import Watch
from stepmark.cases.message import RECV, SEND
from stepmark.ground.errors import ConfigError
from stepmark.step.fold_items import fold
from stepmark.step.workload import (
    Block,
    CommOp,
    ComputeOp,
    Group,
    Operation,
    Stage,
    Workload,
)
from stepmark.workloads.user_function import load, reported

Step = Callable[[], object]
MAX_WORLD_SIZE = 2**20
_NUM_WARM_UPS = 2


def capture_file(
    spec: str,
    world_size: int,
    rank: int = 0,
    *,
    tokens_per_expert: Sequence[int] = (),
    watch: Watch | None = None,
) -> Workload:
    """Capture "FILE.py:function"; the function's name is "build" if left out.

    Options are those of `capture`. Raises ConfigError; for an error in the user's code with the
    place.
    """
    watch = watch or Watch()
    with contextlib.ExitStack() as stack:
        with watch.running(lambda: f"loading {spec}"):
            build, file = stack.enter_context(load(spec))
        return capture(
            build,
            world_size,
            rank,
            spec=spec,
            file=file,
            tokens_per_expert=tokens_per_expert,
            watch=watch,
        )


def capture(
    build: Callable[[], Step],
    world_size: int,
    rank: int = 0,
    *,
    spec: str = "",
    file: str = "",
    tokens_per_expert: Sequence[int] = (),
    watch: Watch | None = None,
) -> Workload:
    """Return the computation and communication of this rank in a step, repeats folded.

    One stage represents all ranks. Code that sends to its neighbours (pipelines) has a stage
    for each rank of the pipeline; the pipeline must be the mesh's slowest axis. `spec` and
    `file` are the user's, for the record and for messages. tokens_per_expert: as of Router.
    watch: limits the time of each rank. Not thread-safe: it patches methods of torch while it
    runs.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ConfigError("world-size", world_size, f"from 1 to {MAX_WORLD_SIZE}")
    if not 0 <= rank < world_size:
        raise ConfigError("rank", rank, f"from 0 to {world_size - 1}")
    name = spec or getattr(build, "__name__", "capture")
    where = file or getattr(getattr(build, "__code__", None), "co_filename", "")
    router = Router(tokens_per_expert)
    watch = watch or Watch()

    def record(rank: int) -> _RankCapture:
        policy = ReadPolicy(where)
        recorder = CaptureRecorder(rank, policy, router, watch.check)

        def status() -> str:
            count = len(recorder.operations)
            return f"capturing rank {rank}: {count} operations, {policy.place()}"

        with reported(name, where), policy.explaining(), watch.running(status):
            return _capture_rank(build, world_size, name, policy, recorder)

    captures = [record(rank)]
    num_stages, stride = _pipeline(captures[0], world_size)
    if num_stages > 1:
        captures = [record(stage * stride + rank % stride) for stage in range(num_stages)]
    router.check()
    return _workload(captures, router, world_size=world_size, rank=rank, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankCapture:
    """One rank's operations of setup and step, with notes."""

    setup: Sequence[CommOp]
    step: Sequence[Operation]
    groups: Mapping[str, Group]
    num_microbatches: int
    notes: Sequence[str]


def _communication(operations: Sequence[Operation]) -> tuple[CommOp, ...]:
    """Return the communication alone, which then waits for no computation."""
    messages = [op for op in operations if isinstance(op, CommOp)]
    names = {op.name for op in messages}
    return tuple(
        replace(op, after=tuple(name for name in op.after if name.partition("~")[0] in names))
        for op in messages
    )


def _capture_rank(
    build: Callable[[], Step],
    world_size: int,
    name: str,
    policy: ReadPolicy,
    recorder: CaptureRecorder,
) -> _RankCapture:
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # from code for other devices
        mesh_sizes = stack.enter_context(
            fake_world(world_size, recorder.rank, recorder.values.value)
        )
        stack.enter_context(recorder.recording())
        recorder.begin_step()
        step = build()
        if not callable(step):
            raise ConfigError(
                name, type(step).__name__, "a function that returns a function: one step"
            )
        for model in closure_modules(step):
            recorder.modules.name(model)
        setup = recorder.operations
        recorder.begin_step()
        step()
        # DDP rebuilds its buckets, pipelines exchange shapes.
        has_warm_ups = recorder.modules.has_ddp or bool(_pair_groups(recorder.operations))
        for _ in range(_NUM_WARM_UPS if has_warm_ups else 0):
            setup = [*setup, *recorder.operations]
            recorder.begin_step()
            step()
        if policy.stopped is not None:
            raise policy.stopped
    if not recorder.operations:
        raise ConfigError(name, "no operation", "a step that computes something")
    groups = recorder.groups.groups
    if mesh_sizes and max(mesh_sizes) != world_size and "world" not in groups:
        raise ConfigError(
            "world-size", world_size, f"{max(mesh_sizes)}, the ranks of the largest mesh made"
        )
    return _RankCapture(
        setup=_communication(setup),
        step=recorder.operations,
        groups=groups,
        num_microbatches=recorder.modules.num_microbatches,
        notes=[*recorder.groups.notes, *_remarks(policy, has_warm_ups=has_warm_ups)],
    )


def _remarks(policy: ReadPolicy, *, has_warm_ups: bool) -> Iterator[str]:
    if policy.places:
        more = f" and {len(policy.places) - 8} more" if len(policy.places) > 8 else ""
        yield POLICY.format(", ".join(list(policy.places)[:8]) + more)
    if has_warm_ups:
        yield (
            f"step {_NUM_WARM_UPS + 1} is recorded,"
            f" the first {_NUM_WARM_UPS} are part of the setup"
        )


def _pair_groups(operations: Sequence[Operation]) -> set[str]:
    """Return the groups in which ranks send to one another."""
    return {
        op.group
        for op in operations
        if isinstance(op, CommOp) and op.collective in (SEND, RECV)
    }


def _pipeline(captured: _RankCapture, world_size: int) -> tuple[int, int]:
    """Return (number of stages, ranks of each) by the groups of sends; 1 without sends.

    Raises ConfigError where stages are not the slowest digit of a rank's number.
    """
    names = _pair_groups(captured.step)
    if not names:
        return 1, world_size
    name = min(names)
    group = captured.groups[name]
    size, stride = group.digits[-1]
    if len(names) > 1 or len(group.digits) > 1 or size * stride != world_size:
        raise ConfigError("mesh", name, "one pipeline, as the mesh's first (slowest) axis")
    return size, stride


def _workload(
    captures: Sequence[_RankCapture], router: Router, *, world_size: int, rank: int, name: str
) -> Workload:
    blocks: dict[str, Block] = {}
    stages: list[Stage] = []
    groups: dict[str, Group] = {}
    for number, captured in enumerate(captures):
        mark = f"{number}" if len(captures) > 1 else ""
        blocks |= fold(captured.step, f"step{mark}")
        if captured.setup:
            blocks |= fold(captured.setup, f"setup{mark}")
        groups |= captured.groups
        computes = [op for op in captured.step if isinstance(op, ComputeOp)]
        kernels = {getattr(op.op, "name", "") for op in computes}
        stage = Stage(
            step=f"step{mark}",
            setup=f"setup{mark}" if captured.setup else "",
            layers=tuple(dict.fromkeys(op.layer for op in computes if op.layer is not None)),
            has_embedding="aten.embedding" in kernels,
            has_head=any(kernel.startswith("aten.nll_loss") for kernel in kernels),
        )
        stages.append(stage)
    notes = dict.fromkeys(note for captured in captures for note in captured.notes)
    workload = Workload(
        name=name,
        rules="capture",
        source=f"torch {torch.__version__}",
        world_size=world_size,
        num_microbatches=max(captured.num_microbatches for captured in captures),
        settings={"function": name, "rank": rank},
        groups=groups,
        blocks=blocks,
        stages=tuple(stages),
        notes=(*notes, *(f"on every rank, {text}" for text in router.used)),
    )
    workload.check()
    return workload
