"""A varied log of NCCL: COLL lines of many hosts, communicators, sizes; and its reader's speed.

    python tests/job_logs/varied_log.py FOLDER [MIB]     write logs, read them, print the speed

The speed is in MB per second of CPU time of one process, as `stepmark logs` spends it.
"""

import random
import resource
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

HOSTS, GPUS = 200, 8
_KINDS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast")


def lines(seed: int = 0) -> Iterator[str]:
    """Yield starts of four communicators per rank, then steps that all ranks issue, forever."""
    draw = random.Random(seed)
    ranks = [(host, gpu) for host in range(HOSTS) for gpu in range(GPUS)]
    prefix = [f"node{h:03d}:{4000 + g}:{4000 + g} [{g}] NCCL INFO" for h, g in ranks]
    # The world, the host, the GPUs of one index, and pairs of hosts.
    shapes = [
        [(0, rank, HOSTS * GPUS) for rank in range(len(ranks))],
        [(host, gpu, GPUS) for host, gpu in ranks],
        [(gpu, host, HOSTS) for host, gpu in ranks],
        [(host // 2 * GPUS + gpu, host % 2, 2) for host, gpu in ranks],
    ]
    pointers = [[f"0x{draw.getrandbits(44):x}" for _ in ranks] for _ in shapes]
    for kind, shape in enumerate(shapes):
        for place, (group, rank, size) in enumerate(shape):
            yield (
                f"{prefix[place]} ncclCommInitRank comm {pointers[kind][place]} rank {rank} "
                f"nranks {size} cudaDev {place % GPUS} nvmlDev {place % GPUS} busId 1000 "
                f"commId 0x{kind + 1:x}{group:04x} - Init COMPLETE"
            )
    calls = [
        (draw.choice(_KINDS), draw.randrange(1, 1 << 28), draw.choice((7, 9)))
        for _ in range(400)
    ]
    counts = [0] * len(shapes)
    while True:
        kind = draw.randrange(len(shapes))
        name, count, dtype = draw.choice(calls)
        for place, (_, _, size) in enumerate(shapes[kind]):
            yield (
                f"{prefix[place]} {name}: opCount {counts[kind]:x} "
                f"sendbuff 0x7f{draw.getrandbits(40):010x} "
                f"recvbuff 0x7f{draw.getrandbits(40):010x} "
                f"count {count} datatype {dtype} op 0 root 0 comm {pointers[kind][place]} "
                f"[nranks={size}] stream 0x55{draw.getrandbits(36):09x}"
            )
        counts[kind] += 1


def write(path: Path, num_bytes: int, source: Iterator[str]) -> None:
    """Write at least so many bytes of lines."""
    with path.open("w") as file:
        while file.tell() < num_bytes:
            file.write("\n".join(islice(source, 2000)) + "\n")


def main() -> None:
    from stepmark.job_logs.log_sources import collect, read_sources

    folder, mib = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100
    path = folder / "varied.log"
    if not path.exists():
        write(path, mib << 20, lines())
    start = time.process_time()
    (source,) = read_sources(collect([str(path)]), None)
    seconds = time.process_time() - start
    size = path.stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    calls = sum(tally.calls for tally in source.histogram.values())
    rules = [finding.rule for finding in source.findings]
    sys.stdout.write(
        f"{size / 1e6:.0f} MB, {calls} calls, {size / 1e6 / seconds:.1f} MB per CPU second, "
        f"peak memory {peak:.0f} MiB, findings {rules}\n"
    )


if __name__ == "__main__":
    main()
