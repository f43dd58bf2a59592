"""Outputs of nccl-tests and rccl-tests as their releases print them, from known times.

The layouts are those of the sources, by release; the times are made up: 10 us and 100 GB/s.
"""

from collections.abc import Callable, Iterable

SIZES = tuple(2**power for power in range(10, 31, 2))
NUM_RANKS = 8
FACTOR = 2 * 7 / 8


def time_s(size: int, in_place: bool = False) -> float:
    """What the made-up machine takes."""
    return 10e-6 + size / 100e9 + (1e-7 if in_place else 0.0)


def old_time(us: float) -> str:
    """Up to 2.17.2."""
    return f"{us:.0f}" if us >= 10000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def half(size: int, in_place: bool, wrong: str = "0", factor: float = FACTOR) -> list[str]:
    seconds = time_s(size, in_place)
    algbw = size / seconds / 1e9
    return [old_time(seconds * 1e6), f"{algbw:.2f}", f"{algbw * factor:.2f}", wrong]


def row(size: int, *lead: str, wrong: str = "0", parts: int = 1, factor: float = FACTOR) -> str:
    """A row with both placements. lead: what stands between type and figures."""
    words = [str(size), str(size // 4 // parts), "float", *lead]
    words += half(size, False, wrong, factor) + half(size, True, wrong, factor)
    return "  ".join(f"{word:>8}" for word in words)


def rank_lines(count: int, template: str) -> list[str]:
    return [template.format(rank=rank) for rank in range(count)]


MODERN_RANK = (
    "#  Rank {rank:2} Group  0 Pid   2567 on         vm device {rank:2} [0000:00:06] "
    "NVIDIA H200"
)
PARAMETERS = (
    "# nThread 1 nGpus 8 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5 "
    "iters: 20 agg iters: 1 validation: 1 graph: 0"
)
_HALF = "     time   algbw   busbw #wrong"
_HALF_UNITS = "     (us)  (GB/s)  (GB/s)       "
HEAD = "\n".join(
    (
        "#",
        f"#{'out-of-place':>74}{'in-place':>35}          ",
        "#       size         count      type   redop    root" + 2 * _HALF,
        "#        (B)    (elements)                          " + 2 * _HALF_UNITS,
    )
)
FOOT = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : {average:g} \n#\n"


def average(sizes: Iterable[int], factor: float = FACTOR) -> float:
    values = [
        factor * size / time_s(size, one) / 1e9 for size in sizes for one in (False, True)
    ]
    return sum(values) / len(values)


def modern(
    body: Iterable[str] | None = None,
    *,
    parameters: str = PARAMETERS,
    name: str = "all_reduce_perf",
    ranks: int = NUM_RANKS,
    head: str = HEAD,
) -> str:
    """2.17.4 and later, without its footer's average."""
    rows = list(body) if body is not None else [row(size, "sum", "-1") for size in SIZES]
    lines = [
        "# nccl-tests version 2.17.6 nccl-headers=22803 nccl-library=22803",
        f"# Collective test starting: {name}",
        parameters,
        "#",
        "# Using devices",
        *rank_lines(ranks, MODERN_RANK),
        head,
        *rows,
        f"# Out of bounds values : 0 OK\n# Collective test concluded: {name}",
    ]
    return "\n".join(lines) + "\n"


def version_1() -> str:
    """Milliseconds, res; parameters and footer without #; ranks after the header."""
    lines = [
        "nThread 1 nGpus 8 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5 "
        "iters: 20 validation: 1 ",
        "# NCCL Tests compiled with NCCL 2.4",
        "# Using devices",
        "#   Rank  0 on       host device  0 [0x04] Tesla V100",
        f"#{'out-of-place':>61}{'in-place':>28}",
        "#      bytes             N    type      op" + 2 * "     time  algbw  busbw      res",
    ]
    for size in SIZES:
        cells = [
            word
            for in_place in (False, True)
            for word in (
                f"{time_s(size, in_place) * 1e3:.3f}",
                *half(size, in_place)[1:3],
                "0e+00" if in_place else "N/A",
            )
        ]
        lines.append("  ".join([f"{size:12}", f"{size // 4:12}", " float", "   sum", *cells]))
    return "\n".join([*lines, " Out of bounds values : 0 OK", ""])


def version_2_9(redop: bool = True, root: bool = False) -> str:
    """An error column; redop and root only where the collective has them."""
    lead = (["sum"] if redop else []) + (["0"] if root else [])
    words = "size count type" + (" redop" if redop else "") + (" root" if root else "")
    figures = " time algbw busbw error" * 2
    lines = [
        "# nThread 1 nGpus 8 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5 "
        "iters: 20 validation: 1 ",
        "#",
        "# Using devices",
        *rank_lines(
            8, "#   Rank {rank:2} Pid   2567 on         vm device {rank:2} [0x4e] A100"
        ),
        "#",
        "#        out-of-place       in-place ",
        f"#  {words}{figures}",
        "#   (B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s)",
        *(row(size, *lead, wrong="4e-07") for size in SIZES),
        FOOT.format(average=average(SIZES)),
    ]
    return "\n".join(lines)


def with_stamps() -> str:
    head = HEAD.replace("#wrong\n", "#wrong           timestamp\n")
    stamped = (row(size, "sum", "-1") + "  2025-11-21 03:04:05" for size in SIZES)
    return modern(stamped, head=head)


def per_iteration() -> str:
    lead = "#  size  count  type  redop  root"
    half_head = "  time  algbw  busbw  #wrong  i_min  i_max  i_p99  i_cv%"
    body = []
    for size in SIZES:
        words = [str(size), str(size // 4), "float", "sum", "-1"]
        for in_place in (False, True):
            words += [*half(size, in_place), "9.10", "99.90", "99.90", "3.14"]
        body.append("  ".join(words))
    return modern(body, head=lead + 2 * half_head)


def cputime() -> str:
    head = HEAD.replace(" time ", " cputime ")
    return modern(head=head)


def rccl_colons() -> str:
    text = version_2_9()
    start = text.index("#\n")
    parameters = (
        "# nThreads: 1 nGpus: 8 nRanks: 1 minBytes: 1024 maxBytes: 1073741824 step: 4(factor) "
        "warmupIters: 5 iters: 20 validation: 1 \n"
    )
    return parameters + text[start:]


def rccl_2024() -> str:
    """One placement only, a version line without #, rank lines without a group."""
    lines = [
        PARAMETERS,
        "#",
        "rccl-tests: Version develop:ae3e635",
        "# Using devices",
        *rank_lines(8, "#   Rank {rank:2} Pid 11 on vm device {rank:2} [0000:c1:00] MI300X"),
        "#",
        "#                                                   in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       ",
        *(
            "  ".join([str(size), str(size // 4), "float", "sum", "-1", *half(size, True)])
            for size in SIZES
        ),
    ]
    return "\n".join(lines) + "\n"


def rccl_algorithms() -> str:
    head = HEAD.replace("#wrong\n", "#wrong  algo  proto  nchannels\n")
    return modern((row(size, "sum", "-1") + "  RING  LL128  32" for size in SIZES), head=head)


def rccl_device_time() -> str:
    body = []
    for size in SIZES:
        words = [str(size), str(size // 4), "float", "sum", "-1"]
        for in_place in (False, True):
            time, *rest = half(size, in_place)
            words += [time, "9.99", *rest]
        body.append("  ".join(words))
    return modern(body, head=HEAD.replace(" time ", " time hipevt "))


def markdown() -> str:
    cells = [
        "size",
        "count",
        "type",
        "redop",
        "root",
        *("time", "algbw", "busbw", "#wrong") * 2,
    ]
    lines = ["## 8 GPUs, all_reduce", "", "./build/all_reduce_perf -g 8", ""]
    lines += ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    lines += ["| " + " | ".join(row(size, "sum", "-1").split()) + " |" for size in SIZES]
    return "\n".join(lines) + "\n"


def shuffled_header() -> str:
    head = "size\tcount\ttime (us)\ttype\tout-of-place\tredop\troot\tin-place\t\t#wrong\talgbw"
    lines = ["all_reduce_perf -g 8", head]
    lines += ["\t".join(row(size, "sum", "-1").split()) for size in SIZES]
    return "\n".join(lines) + "\n"


# name -> (text, placements, tool)
FAMILIES: dict[str, tuple[Callable[[], str], int, str]] = {
    "1.x": (version_1, 2, "nccl-tests"),
    "2.9 all_reduce": (version_2_9, 2, "nccl-tests"),
    "2.9 reduce": (lambda: version_2_9(root=True), 2, "nccl-tests"),
    "2.9 all_gather": (lambda: version_2_9(redop=False), 2, "nccl-tests"),
    "2.9 broadcast": (lambda: version_2_9(redop=False, root=True), 2, "nccl-tests"),
    "2.17": (modern, 2, "nccl-tests"),
    "-S": (with_stamps, 2, "nccl-tests"),
    "-I": (per_iteration, 2, "nccl-tests"),
    "rccl 2022": (rccl_colons, 2, "rccl-tests"),
    "rccl 2024": (rccl_2024, 1, "rccl-tests"),
    "rccl -A": (rccl_algorithms, 2, "nccl-tests"),
    "rccl hipevt": (rccl_device_time, 2, "nccl-tests"),
    "markdown": (markdown, 2, "nccl-tests"),
    "shuffled header": (shuffled_header, 2, "nccl-tests"),
}
