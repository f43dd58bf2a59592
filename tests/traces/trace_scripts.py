"""Profiler traces that a test writes event by event. Times are microseconds."""

import json
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD = 9, 10


class Script:
    """Events of one rank, in microseconds by a clock that is `ahead`."""

    def __init__(self, rank: int = 0, world: int = 1, ahead: float = 0) -> None:
        self.rank, self.world, self.ahead = rank, world, ahead
        self.events: list[dict[str, Any]] = []
        self.number = 0

    def add(
        self,
        cat: str,
        name: str,
        place: tuple[int, int],
        span: tuple[float, float],
        **args: Any,
    ) -> None:
        self.events.append(
            {
                **{"ph": "X", "cat": cat, "name": name, "pid": place[0], "tid": place[1]},
                **{"ts": span[0] + self.ahead, "dur": span[1] - span[0], "args": args},
            }
        )

    def step(self, start: float, end: float) -> None:
        self.add("user_annotation", "ProfilerStep#1", (9, MAIN), (start, end))

    def op(self, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> None:
        self.add("cpu_op", name, (9, thread), (start, end), **args)

    def call(self, name: str, start: float, end: float, thread: int = MAIN) -> int:
        self.number += 1
        self.add("cuda_runtime", name, (9, thread), (start, end), correlation=self.number)
        return self.number

    def kernel(
        self,
        name: str,
        launch: float,
        span: tuple[float, float],
        stream: int = 7,
        thread: int = MAIN,
    ) -> None:
        """A kernel whose launch call starts at `launch` and takes 1 us."""
        number = self.call("cudaLaunchKernel", launch, launch + 1, thread)
        self.add("kernel", name, (0, stream), span, correlation=number, device=0, stream=stream)

    def all_reduce(self, launch: float, span: tuple[float, float]) -> None:
        self.message("allreduce", launch, span, tuple(range(self.world)))

    def message(
        self,
        name: str,
        launch: float,
        span: tuple[float, float],
        members: tuple[int, ...],
        stream: int = 20,
        **more: object,
    ) -> None:
        """A call of torch.distributed with 8 floats, and its kernel."""
        args = {
            **{"Collective name": name, "dtype": "Float", "In msg nelems": 8},
            **{"Out msg nelems": 8, "Group size": len(members), "Process Group Name": "0"},
            "Process Group Ranks": str(list(members)),
        }
        self.op("record_param_comms", launch - 0.5, launch + 1.5, **args | more)
        self.kernel(f"ncclDevKernel_{name}", launch, span, stream)

    def write(self, folder: Path) -> Path:
        file = folder / f"rank{self.rank}.json"
        distributed = {"rank": self.rank, "world_size": self.world, "backend": "nccl"}
        trace = {"distributedInfo": distributed, "traceEvents": self.events}
        file.write_text(json.dumps(trace))
        return file
