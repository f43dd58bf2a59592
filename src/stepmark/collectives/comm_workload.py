"""stepmark comm --from-workload and --print.

A workload's collectives become cases, and cases commands of nccl-tests and rccl-tests.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stepmark.cases.case import Label
from stepmark.cases.comm_case import CommCase
from stepmark.collectives import comm_plan
from stepmark.collectives.comm_options import CommOptions
from stepmark.collectives.nccl_tests import test_name, type_name
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, NothingToMeasureError
from stepmark.ground.options import plain
from stepmark.ground.units import format_bytes
from stepmark.model.collectives import (
    ALIGN_BYTES,
    FACTS,
    Api,
    Collective,
    Mode,
    Registration,
    placements,
    sizes,
)
from stepmark.step.workload import Workload
from stepmark.workloads import workload_files, workload_show

# Options that a workload replaces.
_IN_WORKLOAD = (
    *("begin", "end", "step", "factor", "model", "mbs", "seq_len", "message", "dtype", "redop"),
    *("root", "pair", "partners", "bidirectional", "imbalance", "matrix"),
    *("ranks", "group_split", "placement"),
)
_PRINT_RANKS = 8  # of --print without --nproc
_GPUS_PER_PROCESS = 8  # more ranks are started by mpirun
_NO_PROGRAM = (
    *(Collective.P2P_BOTH, Collective.PING_PONG, Collective.INCAST, Collective.MULTICAST),
    Collective.BARRIER,
)


def plan(
    options: CommOptions, device: str, world_size: int
) -> tuple[list[CommCase], list[str]]:
    """Return the distinct collectives of a file, in groups that fit the ranks, and notes.

    Raises ConfigError.
    """
    if world_size < 2:
        allowed = "at least 2 ranks, because a single one sends nothing"
        raise ConfigError("nproc", world_size, allowed)
    originals = list(_cases(options))
    base = comm_plan.shared(options, device, world_size, world_size)
    cases = list[CommCase]()
    notes = list[str]()
    for setting in comm_plan.settings(base, options):
        own_cases, own_notes = placed(originals, setting)
        for operator in comm_plan.concurrent_compute(options, device):
            cases += (replace(case, beside=operator) for case in own_cases)
        notes += own_notes
    return cases, list(dict.fromkeys(notes))


def placed(originals: Iterable[CommCase], base: CommCase) -> tuple[list[CommCase], list[str]]:
    """Return cases on the ranks of `base`, measured as it is, and notes on what differs.

    Raises ConfigError where none is left.
    """
    notes: list[str] = []
    cases: dict[CommCase, CommCase] = {}
    for original in originals:
        case = _placed(original, base, notes)
        if case is None:
            continue
        if reason := comm_plan.impossible(case):
            notes.append(f"left out: {_described(case)}: {reason[2]}")
            continue
        bare = replace(case, labels=())
        labels = cases[bare].labels if bare in cases else ()
        cases[bare] = replace(case, labels=(*labels, *case.labels))
    if not cases:
        raise NothingToMeasureError(notes)
    return list(cases.values()), list(dict.fromkeys(notes))


def _cases(options: CommOptions) -> Iterable[CommCase]:
    """Return the cases of a workload in their original groups."""
    rule = "it cannot be combined with --from-workload"
    comm_plan.refuse(options, _IN_WORKLOAD, rule)
    # A send and its receipt are p2p here; nccl-tests' program for it is sendrecv.
    names = [Collective.P2P if name == Collective.SENDRECV else name for name in options.names]
    workload = workload_files.read(options.from_workload or "")
    cases = labelled(workload, names)
    if not cases:
        allowed = f"a workload that has {' or '.join(names) or 'communication'}"
        raise ConfigError("from-workload", options.from_workload, allowed)
    return cases


def labelled(workload: Workload, names: Iterable[str] = ()) -> list[CommCase]:
    """Return the collectives of these names, or all, with their modules and calls per step."""
    cases = []
    for message in workload_show.messages(workload, names):
        role = ", ".join(message.modules)
        count = max(message.calls.values())
        label = Label(model=workload.name, role=role, count=count)
        cases.append(replace(message.case, labels=(label,)))
    return cases


def _placed(original: CommCase, base: CommCase, notes: list[str]) -> CommCase | None:
    """Return the case on this machine, in the mode of the flags; None where it cannot run."""
    fitted = workload_show.fitted(original, base.world_size)
    text = _described(original)
    if fitted is None:
        notes.append(f"left out: {text}: too small for {base.world_size} ranks")
        return None
    if fitted is not original:
        smaller = "" if fitted.message_bytes == original.message_bytes else " trimmed"
        notes.append(
            f"{text} is of {original.num_ranks} ranks: run{smaller} on {base.world_size}"
        )
    is_barrier = fitted.collective is Collective.BARRIER
    if base.mode is Mode.GRAPH and is_barrier:
        notes.append("left out: a barrier has no graph")
        return None
    if is_barrier:  # without buffers
        base = replace(base, registration=Registration.NONE, unalign=0)
    return replace(
        base,
        collective=fitted.collective,
        mode=Mode.QUEUED if is_barrier and base.mode is Mode.AHEAD else base.mode,
        count=fitted.count,
        dtype=fitted.dtype,
        num_ranks=fitted.num_ranks,
        redop=fitted.redop,
        root=fitted.root,
        in_place=placements(fitted.collective, base.api)[0],
        pair=fitted.pair,
        spread=fitted.spread,
        labels=fitted.labels,
    )


def print_commands(options: CommOptions) -> None:
    """Print a command per distinct message (--print), without a device. Raises ConfigError."""
    values = plain(options)
    if options.print_as != "nccl-tests":
        comm_plan.refuse(options, _ONLY_NCCL_TESTS, "only with --print nccl-tests")
    letters = _LETTERS | _ONLY_NCCL_TESTS
    flags = [(letter, values[name]) for name, letter in letters.items() if name in values]
    if options.timeout:
        flags.append(("-T", str(math.ceil(options.timeout))))
    words = list(itertools.chain(*flags))
    cases = list(_to_print(options))
    sweep = "" if options.from_workload or options.model else _sweep_flags(cases, options)
    for line in commands(cases, str(options.print_as), words, sweep):
        (sys.stderr if line.startswith("# left out") else sys.stdout).write(line + "\n")


def _sweep_flags(cases: Sequence[CommCase], options: CommOptions) -> str:
    """Return -b, -e and -f or -i of a program that walks the same sizes; "" where none does."""
    walked = sorted({case.message_bytes for case in cases})
    factor = options.factor or (0 if options.step else 4)
    if len(walked) < 2 or factor != round(factor) or any(case.pair for case in cases):
        return ""
    step = f"-f {factor:.0f}" if factor else f"-i {options.step}"
    planned = sizes(walked[0], walked[-1], factor=factor, step=options.step or 0)
    return f"-b {walked[0]} -e {walked[-1]} {step}" if walked == planned else ""


# Flags that both tools have under the same letters.
_LETTERS = {
    "iters": "-n",
    "warmup_iters": "-w",
    "check": "-c",
    "agg_iters": "-m",
    "cudagraph": "-G",
    "blocking": "-z",
    "launches": "-N",
    "average": "-a",
    "report_cputime": "-C",
}
# rccl-tests has some of these letters with other meanings.
_ONLY_NCCL_TESTS = {
    "register": "-R",
    "unalign": "-u",
    "cta_policy": "-x",
    "memory": "-M",
    "report_timestamps": "-S",
    "per_iter_timing": "-I",
}


def _to_print(options: CommOptions) -> Iterable[CommCase]:
    if options.from_workload:
        yield from _cases(options)
        return
    nproc = str(options.nproc or _PRINT_RANKS)
    if not nproc.isdecimal() or not 2 <= int(nproc) <= 2**20:
        raise ConfigError("nproc", nproc, "a number of ranks from 2")
    of_nccl = replace(options, api=Api.NCCL, backend=None, placement="both")
    yield from comm_plan.plan(of_nccl, "cuda", int(nproc))[0]


def commands(
    cases: Iterable[CommCase], tool: str, flags: Sequence[str] = (), sweep: str = ""
) -> Iterable[str]:
    """Yield a line per program, size, type and group; both placements are one run there.

    flags: more of the tool's flags, for every line. sweep: those of all sizes at once.
    """
    lines: dict[str, dict[str, None]] = {}
    for case in cases:
        if case.collective in _NO_PROGRAM or case.split or case.matrix:
            yield f"# left out: {_described(case)}: {tool} has no program for it"
            continue
        remarks = [
            " ".join(f"{label.model} {label.role} x {label.count}".split())
            for label in case.labels
        ]
        if workload_show.is_trimmed(case):
            remarks.append(f"parts are trimmed to multiples of {ALIGN_BYTES} bytes")
        line = " ".join([command(case, tool, sweep), *flags])
        lines.setdefault(line, {}).update(dict.fromkeys(remarks))
    for line, by_remark in lines.items():
        yield f"{line}  # {'; '.join(by_remark)}" if by_remark else line


def command(case: CommCase, tool: str, sweep: str = "") -> str:
    """Return the command of a case; -b and -e count the gathered buffer.

    More ranks than a node usually has are started by mpirun, one per process.
    """
    even_parts = case.collective is Collective.ALL_TO_ALL_V
    name = "sendrecv_perf" if FACTS[case.collective].pair else test_name(case.collective)
    ahead = []
    if even_parts and tool == "nccl-tests" and case.spread is not None:
        ahead = [f"NCCL_TESTS_ALLTOALLV_SPREAD={case.spread:g}"]
    if even_parts and tool == "rccl-tests":
        name = "alltoall_perf"  # its alltoallv has uneven parts only
    many = case.num_ranks > _GPUS_PER_PROCESS
    ahead += ["mpirun", "-np", str(case.num_ranks)] if many else []
    words = [*ahead, name, sweep or f"-b {case.message_bytes} -e {case.message_bytes}"]
    rccl_type = _RCCL_TYPES.get(case.dtype) if tool == "rccl-tests" else None
    words += ["-d", rccl_type or type_name(case.dtype)]
    words += ["-o", case.redop.value] if FACTS[case.collective].reduces else []
    words += ["-r", str(case.root)] if FACTS[case.collective].rooted else []
    return " ".join([*words, "-g", "1" if many else str(case.num_ranks)])


# rccl-tests' README; nccl-tests calls them f8e4m3 and f8e5m2.
_RCCL_TYPES = {DType.FP8_E4M3: "fp8_e4m3", DType.FP8_E5M2: "fp8_e5m2"}


def _described(case: CommCase) -> str:
    return f"{case.collective} of {format_bytes(case.message_bytes)} {case.dtype}"
