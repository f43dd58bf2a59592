"""Lines of a debug log, written as NCCL's format strings write them."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from stepmark.findings.log_facts import LogFacts
from stepmark.job_logs.nccl_log import read_log

DATA = Path(__file__).parents[1] / "data" / "nccl-logs"
FSDP8 = sorted((DATA / "fsdp8").glob("*.gz"))
DATATYPES = {"int8": 0, "fp16": 6, "fp32": 7, "fp64": 8, "bf16": 9}
SIZES = {0: 1, 6: 2, 7: 4, 8: 8, 9: 2}


@dataclass(frozen=True)
class Issued:
    """One call as the test means it."""

    name: str = "AllReduce"
    count: int = 1024
    datatype: int = 7
    op: int = 0
    root: int = 0


def pid_of(rank: int) -> int:
    return 1000 + rank


def prefix(rank: int, *, host: str = "node-1.cluster", thread: int = 0) -> str:
    return f"{host}:{pid_of(rank)}:{pid_of(rank) + thread} [{rank}]"


def info(rank: int, message: str, *, host: str = "node-1.cluster") -> str:
    return f"{prefix(rank, host=host)} NCCL INFO {message}"


def warn(rank: int, message: str, *, host: str = "node-1.cluster") -> str:
    return f"\n{prefix(rank, host=host)} transport/net.cc:42 NCCL WARN {message}"


def coll(
    rank: int,
    call: Issued,
    *,
    op_count: int = 0,
    num_ranks: int = 2,
    thread: int = 0,
    rccl: bool = False,
    comm: int = 0,
) -> str:
    acc, task = (" acc (nil)", f" task 0 globalrank {rank}") if rccl else ("", "")
    address = 0x7F0000000000 + 4096 * op_count
    return (
        f"{prefix(rank, thread=thread)} NCCL INFO {call.name}: opCount {op_count:x} sendbuff "
        f"{address:#x} recvbuff {address + 16:#x}{acc} count {call.count} datatype "
        f"{call.datatype} op {call.op} root {call.root} comm {pointer(rank, comm)} "
        f"[nranks={num_ranks}] stream {address + 32:#x}{task}"
    )


def api_call(rank: int, call: Issued, *, thread: int = 0) -> str:
    return (
        f"node-1.cluster:{pid_of(rank)}:{pid_of(rank) + thread} NCCL CALL nccl{call.name}"
        f"(7f00,7f10,{call.count},{call.datatype},{call.op},{call.root},{pointer(rank)},0x55)"
    )


def pointer(rank: int, comm: int = 0) -> str:
    return f"{0x5500000 + 0x1000 * rank + comm:#x}"


def start(
    rank: int,
    *,
    num_ranks: int = 2,
    comm: int = 0,
    num_nodes: int = 1,
    host: str = "node-1.cluster",
    state: Sequence[str] = ("START", "COMPLETE"),
) -> list[str]:
    """The lines of a communicator's start on one rank."""
    at = pointer(rank, comm)
    local = num_ranks // num_nodes
    lines = [
        f"ncclCommInitRank comm {at} rank {rank} nranks {num_ranks} cudaDev {rank} nvmlDev "
        f"{rank} busId {rank:x}0 commId {0xABC0 + comm:#x} - Init {word}"
        for word in state
    ]
    lines.insert(
        1,
        f"comm {at} rank {rank} nRanks {num_ranks} nNodes {num_nodes} localRanks {local} "
        f"localRank {rank % local} MNNVL 0",
    )
    return [info(rank, line, host=host) for line in lines]


def written(folder: Path, lines: Sequence[str], name: str = "nccl.log") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def facts_of(lines: Sequence[str], **more: int) -> LogFacts:
    with TemporaryDirectory() as folder:
        return read_log([written(Path(folder), lines)], **more)


def fsdp8_lines() -> list[list[str]]:
    return [gzip.decompress(path.read_bytes()).decode().splitlines() for path in FSDP8]
