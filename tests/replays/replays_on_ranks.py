"""What test_replay runs on gloo ranks: a program, and the calls of torch that it makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepmark.cases.record import Check
from stepmark.cases.replay_case import Compute
from stepmark.measuring.environment import capabilities
from stepmark.measuring.ranks import Ranks
from stepmark.replays.bench import messages
from stepmark.replays.bench.computation import Computation
from stepmark.replays.bench.engine import UNKNOWN, HostEngine, Program, Span
from stepmark.replays.bench.messages import Messenger, SharedBuffers
from stepmark.replays.bench.verification import verify
from stepmark.step import native
from stepmark.step.rank_program import communicators, program
from stepmark.step.workload import Workload

Call = tuple[str, tuple[int, ...], str, int]  # collective, ranks, torch type, largest buffer
_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Recorder:
    """Notes the calls of torch.distributed that pass through it, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def patch(self, module: Any, name: str) -> None:
        original = getattr(module, name)
        kind = _NAMES.get(original.__name__, original.__name__)

        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            self.note(kind, options["group"], tensors)
            return original(*arguments, **options)

        setattr(module, name, call)

    def note(self, kind: str, group: Any, tensors: list[torch.Tensor]) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        size = max((each.numel() * each.element_size() for each in tensors), default=0)
        self.calls.append((kind, ranks, str(tensors[0].dtype) if tensors else "", size))

    def patch_batches(self) -> None:
        original = dist.batch_isend_irecv

        def call(operations: list[Any]) -> Any:
            for each in operations:
                kind = "send" if each.op is dist.isend else "recv"
                self.note(kind, each.group, [each.tensor])
            return original(operations)

        dist.batch_isend_irecv = call


Result = tuple[list[Call], list[Span], Check]


def replay(ranks: Ranks, workloads: list[Workload]) -> list[Result]:
    """Run each workload; return its calls, the times of its operations, and what is wrong."""
    recorder = Recorder()
    for name in ("all_reduce", "broadcast", "reduce", "all_to_all_single", "barrier"):
        recorder.patch(dist, name)
    for name in ("all_gather", "reduce_scatter"):
        recorder.patch(messages, name)
    recorder.patch_batches()
    results = []
    here = capabilities(ranks.device)
    for workload in workloads:
        messenger = Messenger(communicators(workload), ranks.rank, "gloo")
        steps = program(workload, ranks.rank)
        buffers = SharedBuffers(steps, ranks.device)
        computation = Computation(steps, Compute.SLEEP, ranks.device, here)
        made = Program(
            steps=steps, messenger=messenger, buffers=buffers, computation=computation
        )
        check = verify(made, ranks.rank, "gloo", ranks.device)
        ranks.barrier()
        recorder.calls = []
        spans = [UNKNOWN] * len(steps)
        for blocking in (False, True):
            HostEngine(replace(made, blocking=blocking)).run(spans)
        calls = [call for call in recorder.calls if len(call[1]) > 1]
        ranks.barrier()
        messenger.close()
        results.append((calls, spans, check))
    return results


def verify_wrong_messages(ranks: Ranks, file: str) -> dict[str, tuple[int, int]]:
    """Return the wrong and all compared elements of a workload, by what goes wrong."""
    workload = native.read(Path(file))
    messenger = Messenger(communicators(workload), ranks.rank, "gloo")
    steps = program(workload, ranks.rank)
    here = capabilities(ranks.device)
    made = Program(
        steps=steps,
        messenger=messenger,
        buffers=SharedBuffers(steps, ranks.device),
        computation=Computation(steps, Compute.NONE, ranks.device, here),
    )
    original, batches = dist.all_reduce, dist.batch_isend_irecv
    counts = {}

    def one_element(tensor: torch.Tensor, **options: Any) -> Any:
        work = original(tensor, **options)
        work.wait()
        if ranks.rank == 1:
            tensor.view(torch.uint8)[0] ^= 1
        return original(torch.zeros(1), group=options["group"], async_op=True)

    def stale(operations: list[Any]) -> Any:
        for each in operations:
            if each.op is dist.isend:
                each.tensor.zero_()
        return batches(operations)

    for name, changed in (
        ("nothing", {}),
        ("element", {"all_reduce": one_element}),
        ("sends", {"batch_isend_irecv": stale}),
    ):
        for attribute, call in changed.items():
            setattr(dist, attribute, call)
        check = verify(made, ranks.rank, "gloo", ranks.device)
        dist.all_reduce, dist.batch_isend_irecv = original, batches
        ranks.barrier()
        counts[name] = check.num_wrong, check.num_compared
    messenger.close()
    return counts
