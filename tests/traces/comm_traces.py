"""Small traces of jobs with collectives, written as the profiler writes them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE_NS = 1_700_000_000_000_000_000
MAIN, AUTOGRAD = 11, 12

Json = dict[str, Any]


@dataclass
class TraceWriter:
    """Events of one rank; times in microseconds after BASE_NS."""

    rank: int
    world_size: int
    backend: str = "nccl"
    groups: Sequence[tuple[str, str, Sequence[int]]] = ()
    events: list[Json] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=lambda: iter(range(1, 10**6)))

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts}
        self.events.append(event | {"dur": dur, "args": args})

    def step(self, number: int, ts: float, dur: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", ts, dur, MAIN)

    def kernel(
        self, name: str, launched: float, ts: float, dur: float, *, tid: int = MAIN, **args: Any
    ) -> None:
        """Add a kernel and the call that launched it."""
        number = next(self._ids)
        self.add("cuda_runtime", "cudaLaunchKernel", launched, 1, tid, correlation=number)
        where = {"device": 0, "stream": 7 if "nccl" in name else 1, "correlation": number}
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.add(category, name, ts, dur, where["stream"], **(where | args))

    def collective(
        self,
        name: str,
        num_in: int,
        num_out: int,
        issued: float,
        ts: float | None,
        dur: float = 0,
        *,
        tid: int = MAIN,
        dtype: str = "BFloat16",
        group: str = "0",
        desc: str = "default_pg",
        ranks: Sequence[int] = (),
        **args: Any,
    ) -> None:
        """Add a call of 5 us, and its kernel unless ts is None."""
        ranks = ranks or range(self.world_size)
        shown = ", ".join(map(str, ranks[:30])) + (", ..." if len(ranks) > 30 else "")
        own = {
            **{"Collective name": name, "In msg nelems": num_in, "Out msg nelems": num_out},
            **{"dtype": dtype, "Group size": len(ranks), "Process Group Name": group},
            **{"Process Group Description": desc, "Process Group Ranks": f"[{shown}]"},
        } | {key.replace("_", " "): value for key, value in args.items()}
        self.add("cpu_op", "record_param_comms", issued, 5, tid, **own)
        if ts is not None:
            self.kernel(f"ncclDevKernel_{name}", issued + 2, ts, dur, tid=tid)

    def document(self) -> Json:
        groups = self.groups or [("0", "default_pg", range(self.world_size))]
        config = [
            {"pg_name": name, "pg_desc": desc, "pg_size": len(ranks), "ranks": list(ranks)}
            for name, desc, ranks in groups
        ]
        info = {"backend": self.backend, "rank": self.rank, "world_size": self.world_size}
        return {
            "schemaVersion": 1,
            "distributedInfo": info | {"pg_count": len(config), "pg_config": config},
            "baseTimeNanoseconds": BASE_NS,
            "deviceProperties": [{"name": "NVIDIA H200"}],
            "traceEvents": self.events,
        }

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.rank}.json"
        path.write_text(json.dumps(self.document()))
        return path
