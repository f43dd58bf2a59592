"""The options of `stepmark comm`: nccl-tests' flags and more; and those that measure a case."""

from dataclasses import dataclass
from typing import Annotated

from stepmark.cases.comm_case import CommCase
from stepmark.cases.fields import option_values, with_fields
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType, parse_dtype
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.option_groups import (
    MBS,
    MICRO_BATCH,
    MeasureOptions,
    Ranks,
    RunFolder,
)
from stepmark.ground.options import (
    Reader,
    Size,
    WholeNumbers,
    Words,
    between,
    comma_list,
    flag,
    group,
    words_of,
)
from stepmark.model.collectives import (
    FACTS,
    Api,
    Collective,
    Mode,
    RedOp,
    collective_named,
    num_parts,
)

MATRIX_OF_PAIRS = "p2p_matrix"
COLLECTIVES = (*Collective, "p2p-matrix")
REDOPS = tuple(redop for redop in RedOp if redop is not RedOp.NONE)


def collective_name(text: str, _field: str = "") -> str:
    """Return our name of a collective as nccl-tests, PARAM or torch spells it."""
    name = collective_named(text).replace("-", "_").removesuffix("_base")  # all_gather_base
    if name not in set(Collective) and name != MATRIX_OF_PAIRS:
        raise not_one_of("collective", text, COLLECTIVES)
    return name


def _redop(text: str, field: str) -> RedOp:
    if text.lower() not in REDOPS:
        raise not_one_of(field, text, REDOPS, " or all")
    return RedOp(text.lower())


def _root(text: str, field: str) -> int:
    word = text.strip().lower()
    if word not in ("-1", "all") and not word.isdecimal():
        raise ConfigError(field, text, "a rank, or -1 for all in turn")
    return int(word) if word.isdecimal() else -1


def _pair(text: str, field: str) -> tuple[int, int]:
    ranks = [word.strip() for word in text.split(",")]
    if len(ranks) != 2 or not all(word.isdecimal() for word in ranks):
        raise ConfigError(field, text, "two ranks such as 0,1")
    if int(ranks[0]) == int(ranks[1]):
        raise ConfigError(field, text, "two different ranks")
    return int(ranks[0]), int(ranks[1])


_Dtype = Reader(
    read=lambda text, field: parse_dtype(text, field, MESSAGE_DTYPES), choices=MESSAGE_DTYPES
)
Dtypes = Annotated[tuple[DType, ...], comma_list(_Dtype, MESSAGE_DTYPES)]
RedOps = Annotated[tuple[RedOp, ...], comma_list(Reader(read=_redop, choices=REDOPS), REDOPS)]
Root = Annotated[int, Reader(read=_root, metavar="RANK")]
Pair = Annotated[
    tuple[int, int],
    Reader(read=_pair, show=lambda pair: ",".join(map(str, pair)), metavar="RANK,RANK"),
]
OverRanks = Annotated[int, between(0, 3)]
Name = Annotated[str, Reader(read=collective_name, choices=COLLECTIVES)]


@group
class Sweep:
    """Sizes."""

    begin: Size | None = flag("smallest size [1K]", "-b", "--begin", "--minbytes")
    end: Size | None = flag(
        "largest size [1G on accelerators, 4M on a CPU]", "-e", "--end", "--maxbytes"
    )
    step: Size | None = flag(
        "add this many bytes per size", "-i", "--step", "--stepbytes", rare=True
    )
    factor: float | None = flag("multiply the size by [4]", "-f", "--factor", "--stepfactor")


@group
class ModelMessages:
    """Sizes of a model or workload, instead of a sweep."""

    model: str | None = flag("message sizes of training these models", names="model")
    mbs: WholeNumbers | None = flag(f"{MBS} [1]", *MICRO_BATCH)
    seq_len: Annotated[int, between(1, 2**30)] | None = flag(
        "sequence length instead of the model's", rare=True
    )
    message: Words | None = flag(
        "only these of a model: activation, layer, moe_layer, dispatch", rare=True
    )
    from_workload: str | None = flag(
        "the distinct collectives of a workload file", metavar="FILE", rare=True
    )


@group
class Operation:
    """Operation."""

    dtype: Dtypes | None = flag(
        f"type(s), or all: {', '.join(MESSAGE_DTYPES)} [fp32]", "--dtype", "-d", "--datatype"
    )
    redop: RedOps | None = flag("reduction(s), or all [sum]", "--redop", "-o", "--op")
    root: Root | None = flag("root rank; -1 = each in turn [0]", "--root", "-r", rare=True)
    placement: Annotated[str, words_of("both", "in", "out")] = flag(
        "in place, out of place, or both", default="both"
    )
    pair: Pair | None = flag("p2p, ping_pong: source and destination [0,1]", rare=True)
    partners: Annotated[int, between(1, 2**20)] | None = flag(
        "p2p-matrix: each rank sends to this many others [all]", rare=True
    )
    bidirectional: bool = flag("p2p: both directions at once", default=False, rare=True)
    imbalance: Annotated[float, between(0.0, 1.0)] | None = flag(
        "all_to_all_v: 0 = even, 1 = by distance [1]", "--imbalance", "--spread", rare=True
    )
    matrix: str | None = flag(
        "all_to_all_v: file of bytes from row to column", metavar="PATH", rare=True
    )


def only(value: int, reason: str) -> Reader:
    """Return a reader of a flag of nccl-tests that can have but this value here."""

    def read(text: str, field: str) -> int:
        if text != str(value):
            raise ConfigError(field, text, f"it must be {value}, since {reason}")
        return value

    return Reader(read=read, metavar=str(value))


@group
@with_fields(CommCase)
class Communicators:
    """Ranks."""

    nproc: str | None = flag(
        "ranks [all accelerators; 2 on a CPU]", "--nproc", "-g", "--ngpus", metavar="N|all"
    )
    threads: Annotated[int, only(1, "each GPU has a process; --nproc sets how many")] = flag(
        "threads per process: 1, since each GPU has a process",
        "-t",
        "--nthreads",
        default=1,
        rare=True,
    )
    parallel_init: Annotated[int, only(1, "ranks are processes, which join at once")] = flag(
        "1: ranks make a communicator in parallel, as they always do",
        *("-p", "--parallel_init"),
        default=1,
        rare=True,
    )
    ranks: Ranks | None = flag("communicators over the first 2,4,8 ranks", rare=True)
    group_split: str | None = flag(
        "communicators side by side: mod 4, div 8, and 0x7 (NCCL_TESTS_SPLIT)", rare=True
    )
    api: Api = flag("torch.distributed, or libnccl itself", default=Api.TORCH)
    backend: str | None = flag("of torch.distributed [nccl; gloo on a CPU]", rare=True)


@group
@with_fields(CommCase)
class Calls:
    """Calls."""

    mode: Mode | None = flag("how calls follow each other [queued-ahead; queued on a CPU]")
    cudagraph: Annotated[int, between(0, 10**6)] = flag(
        "above 0: as --mode graph", "-G", "--cudagraph", default=0, rare=True
    )
    blocking: Annotated[int, between(0, 3)] = flag(
        "1 and 3: as --mode blocking; 2: without a common start",
        "-z",
        "--blocking",
        default=0,
        rare=True,
    )
    no_align: bool = flag("blocking: no common start of each call", default=False, rare=True)
    iters: Annotated[int, between(1, 10**6)] | None = flag(
        "timed calls [until the median is within 0.5 %, at most 1 s]", "-n", "--iters"
    )
    warmup_iters: Annotated[int, between(0, 10**4)] | None = flag(
        "calls before [5]", "-w", "--warmup-iters", "--warmup_iters", rare=True
    )
    per_iter_timing: Annotated[int, between(0, 1)] = flag(
        "1: each sample is one call; min, max, p99, cv in the table",
        *("-I", "--per_iter_timing"),
        default=0,
        rare=True,
    )
    check: Annotated[int, between(0, 1000)] | None = flag(
        "checked calls; 0 = none [1]", "-c", "--check"
    )
    launches: Annotated[int, between(1, 100)] = flag(
        "repetitions with new communicators",
        *("--launches", "-N", "--run_cycles"),
        default=1,
    )
    overlap_with: Words | None = flag(
        "concurrent compute: gemm:8192, copy:256M, attention:BxSxHxD",
        "--overlap-with",
        "--with",
        metavar="OP,...",
        rare=True,
    )


@group
class Tables:
    """Tables."""

    wide: bool = flag("p50, p99, min, max, spread, slowest rank, % of link", default=False)
    output_file: str | None = flag(
        "nccl-tests' JSON; never overwrites",
        *("-J", "--output-file", "--output_file"),
        metavar="PATH",
        rare=True,
    )
    average: OverRanks | None = flag(
        "time in the table: of rank 0 (0), mean (1), fastest (2) or slowest rank (3) [3]",
        *("-a", "--average"),
        rare=True,
    )
    report_cputime: Annotated[int, between(0, 1)] = flag(
        "1: the host's time to issue a call in place of the time",
        *("-C", "--report_cputime"),
        default=0,
        rare=True,
    )
    report_timestamps: Annotated[int, between(0, 1)] = flag(
        "1: when each line was measured", "-S", "--report_timestamps", default=0, rare=True
    )
    memory: Annotated[int, between(0, 1)] = flag(
        "1: device memory of NCCL and of the buffers", "-M", "--memory", default=0, rare=True
    )
    style: Annotated[str, words_of("param")] | None = flag("that tool's columns", rare=True)
    print_as: Annotated[str, words_of("nccl-tests", "rccl-tests")] | None = flag(
        "their commands for the same, run nothing",
        "--print",
        rare=True,
    )
    list_all: bool = flag("what there is to measure", "--list", default=False)


_DEVICE_API = "stepmark calls NCCL from the host; nccl-tests has kernels of its own"


@group
class NotMeasured:
    """Flags of nccl-tests without a counterpart."""

    per_iter_skip: Annotated[int, only(0, "every sample counts; -w has calls before")] = flag(
        "0: no sample is left out", "-K", "--per_iter_skip", default=0, rare=True
    )
    stream_null: Annotated[int, only(0, "calls have a stream of their own")] = flag(
        "0: calls have a stream of their own", "-y", "--stream_null", default=0, rare=True
    )
    device_implementation: Annotated[int, only(0, _DEVICE_API)] = flag(
        "0: NCCL's kernels", "-D", "--device_implementation", default=0, rare=True
    )
    device_cta_count: Annotated[int, only(16, _DEVICE_API)] = flag(
        "16, without effect on NCCL's kernels",
        *("-V", "--device_cta_count"),
        default=16,
        rare=True,
    )


@group
class CommFolder(RunFolder):
    """Run."""

    out: str | None = flag("folder for runs [runs]; -o is nccl-tests'", "--out", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class CommOptions(
    Sweep,
    ModelMessages,
    Operation,
    Communicators,
    Calls,
    Tables,
    NotMeasured,
    CommFolder,
    MeasureOptions,
):
    """stepmark comm."""

    names: tuple[Name, ...] = flag(
        ", ".join(COLLECTIVES), default=(), argument=True, metavar="NAME"
    )


def options_of(case: CommCase) -> CommOptions:
    """Return the options that measure this case, with concurrent compute also without it."""
    facts = FACTS[case.collective]
    size = None
    if case.message_bytes and case.matrix is None:
        parts = num_parts(case.collective, case.num_ranks)
        size = case.count * parts * case.dtype.itemsize
    # A split or a pair determines the number of ranks of a communicator.
    is_smaller = case.num_ranks != case.world_size and not (case.split or case.pair)
    is_default = case.backend == ("nccl" if case.device == "cuda" else "gloo")
    return CommOptions(
        names=(case.family,),
        begin=size,
        end=size,
        dtype=(case.dtype,),
        redop=None if case.redop in (RedOp.NONE, RedOp.SUM) else (case.redop,),
        root=(case.root or None) if facts.rooted else None,
        placement="in" if case.in_place else "out",
        pair=case.pair,
        imbalance=None if case.matrix or case.spread == 1.0 else case.spread,
        matrix=case.matrix_file or None,
        device=case.device,
        nproc=str(case.world_size),
        ranks=(case.num_ranks,) if is_smaller else None,
        group_split=case.split or None,
        api=case.api,
        backend=None if is_default else case.backend,
        mode=None if case.has_default_mode else case.mode,
        no_align=not case.aligned,
        overlap_with=(case.beside,) if case.beside else None,
        **option_values(case),
    )
