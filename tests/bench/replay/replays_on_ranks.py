"""What test_replay runs on gloo ranks: a program, and the calls of torch that it makes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepmark.bench.ranks import Ranks
from stepmark.bench.replay import messages
from stepmark.bench.replay.engine import UNKNOWN, HostEngine
from stepmark.bench.replay.messages import Buffers, Messenger
from stepmark.core.rank_program import communicators, program
from stepmark.workload.formats import native

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


def replay(ranks: Ranks, files: list[str]) -> list[tuple[list[Call], list[float]]]:
    """Run each workload once; return its calls, and the times of its operations."""
    recorder = Recorder()
    for name in ("all_reduce", "broadcast", "reduce", "all_to_all_single", "barrier"):
        recorder.patch(dist, name)
    for name in ("all_gather", "reduce_scatter"):
        recorder.patch(messages, name)
    recorder.patch_batches()
    results = []
    for file in files:
        workload = native.read(Path(file))
        messenger = Messenger(communicators(workload), ranks.rank, "gloo")
        steps = program(workload, ranks.rank)
        buffers = Buffers(steps, ranks.device)
        buffers.allocate()
        ranks.barrier()
        recorder.calls = []
        spans = [UNKNOWN] * len(steps)
        for blocking in (False, True):
            engine = HostEngine(steps, messenger, buffers, sleeps=True, blocking=blocking)
            engine.run(spans)
        calls = [call for call in recorder.calls if len(call[1]) > 1]
        ranks.barrier()
        messenger.close()
        results.append((calls, [time_s for _, time_s in spans]))
    return results
