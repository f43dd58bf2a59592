"""From the options of `stepmark comm` to its cases."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from stepmark.cases.case import Label
from stepmark.cases.comm_case import CommCase, default_mode, unsupported
from stepmark.cases.fields import check_needs, given_values
from stepmark.collectives.comm_options import MATRIX_OF_PAIRS, REDOPS, CommOptions
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType
from stepmark.ground.errors import ConfigError, NothingToMeasureError, not_one_of
from stepmark.ground.options import dashed, plain
from stepmark.ground.read_text import read_whole
from stepmark.ground.units import GIB, KIB, MIB, format_bytes
from stepmark.model.collectives import (
    ALIGN_BYTES,
    FACTS,
    Api,
    Collective,
    Matrix,
    Mode,
    Parts,
    RedOp,
    Registration,
    groups,
    num_parts,
    ordered_pairs,
    parse_split,
    placements,
    sizes,
    trimmed_count,
)
from stepmark.model.ops import from_shorthand
from stepmark.workloads.messages import ROLES, messages
from stepmark.workloads.models import read_models

_LATENCY_BYTES = 8
_MANY_PAIRS = 1000  # from about 33 ranks on
# Flags without effect on other collectives. nccl-tests' own, as -r and -o, fit all of them.
_ONLY_OF: dict[str, tuple[str, ...]] = {
    "pair": (Collective.P2P, Collective.P2P_BOTH, Collective.PING_PONG),
    "partners": (MATRIX_OF_PAIRS,),
    "bidirectional": (Collective.P2P, Collective.P2P_BOTH, MATRIX_OF_PAIRS),
    "imbalance": (Collective.ALL_TO_ALL_V,),
    "matrix": (Collective.ALL_TO_ALL_V,),
}


def plan(
    options: CommOptions, device: str, world_size: int
) -> tuple[list[CommCase], list[str]]:
    """Return a case per combination of the options, and notes. Raises ConfigError."""
    if world_size < 2:
        allowed = "at least 2 ranks, because a single one sends nothing"
        allowed += " (to try it out: --device cpu)" if device == "cuda" else ""
        raise ConfigError("nproc", options.nproc or world_size, allowed)
    names = list(dict.fromkeys(options.names))
    for flag, collectives in _ONLY_OF.items():
        if not set(names) & set(collectives):
            refuse(options, [flag], f"only with {', '.join(collectives)}")
    if names == [Collective.BARRIER]:
        rule = "it has no effect on barrier, which has no buffers"
        refuse(options, _given(options, "register", "unalign"), rule)
    # As in nccl-tests, every collective accepts a root; only some use it.
    _roots(options, world_size)
    cases: list[CommCase] = []
    notes: list[str] = []
    for n in _ranks(options, world_size):
        for name in names:
            for base in settings(shared(options, device, n, world_size), options):
                cases += _cases_of(name, options, base, notes)
    if not cases:
        raise NothingToMeasureError(notes)
    return list(dict.fromkeys(cases)), list(dict.fromkeys(notes))


def _cases_of(
    name: str, options: CommOptions, base: CommCase, notes: list[str]
) -> Iterator[CommCase]:
    collective = Collective.P2P if name == MATRIX_OF_PAIRS else Collective(name)
    if collective is Collective.P2P and options.bidirectional:
        collective = Collective.P2P_BOTH
    if FACTS[collective].pair and base.split:
        raise ConfigError("group-split", base.split, f"none with {name.replace('_', '-')}")
    if name == MATRIX_OF_PAIRS:
        yield from _matrix_of_pairs(collective, options, base, notes)
        return
    if FACTS[collective].pair:
        pair = options.pair or (0, 1)
        if max(pair) >= base.world_size:
            allowed = f"two ranks under {base.world_size}: 0,1"
            raise ConfigError("pair", f"{pair[0]},{pair[1]}", allowed)
        base = replace(base, num_ranks=2, pair=pair)
    yield from _collective_cases(collective, options, base, notes)


def shared(options: CommOptions, device: str, n: int, world_size: int) -> CommCase:
    """Return the fields that all cases of a communicator share, as the case of a barrier."""
    split, n = _split(options, n, world_size)
    backend = _backend(options, device)
    mode, aligned = _mode(options, device, backend)
    if options.api is Api.NCCL and device != "cuda":
        raise ConfigError("api", options.api, "it needs a GPU; on a CPU use --api torch")
    if device != "cuda":
        refuse(options, ("memory", "report_cputime"), "only on GPUs")
    if options.api is not Api.NCCL:
        refuse(options, _given(options, "register", "cta_policy"), "only with --api nccl")
    return CommCase(
        collective=Collective.BARRIER,
        count=0,
        dtype=DType.UINT8,
        num_ranks=n,
        world_size=world_size,
        mode=mode,
        aligned=aligned,
        api=options.api,
        backend=backend,
        device=device,
        split=split,
    )


def settings(base: CommCase, options: CommOptions) -> Iterator[CommCase]:
    """Yield the case with every combination of the fields that are options themselves."""
    check_needs(base, options)
    for values in given_values(CommCase, options):
        yield replace(base, **values)


def _collective_cases(
    collective: Collective, options: CommOptions, base: CommCase, notes: list[str]
) -> Iterator[CommCase]:
    """Yield every size in every form, size by size as nccl-tests prints them."""
    operators = concurrent_compute(options, base.device)
    if collective is Collective.BARRIER:
        if base.mode is Mode.GRAPH or options.mode is Mode.AHEAD:
            raise ConfigError("mode", base.mode, "queued or blocking for a barrier")
        mode = Mode.QUEUED if base.mode is Mode.AHEAD else base.mode
        base = replace(base, mode=mode, registration=Registration.NONE, unalign=0)
        yield from (replace(base, beside=operator) for operator in operators)
        return
    for form in _forms(collective, options, base):
        if reason := impossible(form):
            if options.dtype != MESSAGE_DTYPES and options.redop != REDOPS:
                raise ConfigError(reason[0], reason[1], f"it cannot run: {reason[2]}")
            notes.append(f"left out: {reason[2]}")
            continue
        for case in _sized(form, options, notes):
            for in_place in _placement(collective, options, base.api):
                for operator in operators:
                    yield replace(case, in_place=in_place, beside=operator)


def _forms(collective: Collective, options: CommOptions, base: CommCase) -> Iterator[CommCase]:
    """Yield cases without a size: every type, reduction and root."""
    facts = FACTS[collective]
    for dtype, redop, root in itertools.product(
        options.dtype or (DType.FP32,),
        (options.redop or (RedOp.SUM,)) if facts.reduces else (RedOp.NONE,),
        _roots(options, base.num_ranks) if facts.rooted else (-1,),
    ):
        yield replace(base, collective=collective, dtype=dtype, redop=redop, root=root)


def impossible(case: CommCase) -> tuple[str, object, str] | None:
    """Return (field, value, reason) where the case runs at no size."""
    if case.api is Api.NCCL or not (reason := unsupported(case)):
        return None
    # The flag without which it would be possible is to blame.
    if not unsupported(replace(case, calls_per_group=1)):
        return "agg-iters", case.calls_per_group, reason
    if case.redop is not RedOp.NONE and not unsupported(replace(case, redop=RedOp.SUM)):
        return "redop", case.redop, reason
    return "dtype", case.dtype, reason


def _sized(case: CommCase, options: CommOptions, notes: list[str]) -> Iterator[CommCase]:
    """Yield the case at each size, trimmed as in nccl-tests; empty messages are left out."""
    if case.collective is Collective.ALL_TO_ALL_V:
        if options.matrix:
            yield _with_matrix(case, options.matrix)
            return
        imbalance = 1.0 if options.imbalance is None else options.imbalance
        case = replace(case, spread=imbalance)
    by_count = dict[int, CommCase]()
    trimmed = 0
    for label, size in _sizes_of(case, options):
        count = trimmed_count(case.collective, size, case.dtype.itemsize, case.num_ranks)
        sized = replace(case, count=count)
        trimmed += sized.message_bytes != size
        if count and sized.message_bytes:
            labels = by_count[count].labels if count in by_count else ()
            labels += (label,) if label else ()
            by_count[count] = replace(sized, labels=labels)
    if not by_count:
        values = plain(options)
        raise ConfigError("end", values.get("end", values.get("begin")), _least(case))
    if trimmed and FACTS[case.collective].parts is not Parts.WHOLE:
        notes.append(
            f"{case.collective}: {trimmed} size{'s'[: trimmed > 1]} trimmed so that each of "
            f"{case.num_ranks} parts is a multiple of {ALIGN_BYTES} bytes; those left with "
            "nothing are not run"
        )
    yield from by_count.values()


def _least(case: CommCase) -> str:
    is_whole = FACTS[case.collective].parts is Parts.WHOLE
    part = case.dtype.itemsize if is_whole else ALIGN_BYTES
    least = part * num_parts(case.collective, case.num_ranks)
    return f"at least {least} bytes for {case.collective} of {case.dtype}"


def _matrix_of_pairs(
    collective: Collective, options: CommOptions, base: CommCase, notes: list[str]
) -> Iterator[CommCase]:
    """Yield bandwidth and latency of ordered pairs, one pair at a time."""
    default = 64 * MIB if base.device == "cuda" else MIB
    big = options.begin or options.end or default
    bandwidth = replace(options, begin=big, end=options.end or big)
    tiny = replace(options, begin=_LATENCY_BYTES, end=_LATENCY_BYTES)
    num_pairs = base.num_ranks * (base.num_ranks - 1)
    if options.partners is None and num_pairs > _MANY_PAIRS:
        notes.append(
            f"{base.num_ranks} ranks have {num_pairs} ordered pairs, measured one after the "
            f"other: --partners 2 measures {2 * base.num_ranks} of them"
        )
    for ends in ordered_pairs(base.num_ranks, options.partners):
        pair = replace(base, num_ranks=2, pair=ends)
        yield from _collective_cases(collective, bandwidth, pair, notes)
        yield from _collective_cases(Collective.PING_PONG, tiny, pair, notes)


def _sizes_of(case: CommCase, options: CommOptions) -> list[tuple[Label | None, int]]:
    """Return sizes in bytes, labelled where a model has them. Raises ConfigError."""
    if not options.model:
        refuse(options, ("message", "seq_len"), "a --model beside it")
        return [(None, size) for size in _sweep(options, case.device)]
    rule = "it cannot be combined with --model, which has sizes"
    refuse(options, ("begin", "end", "step", "factor"), rule)
    return _messages(case, options)


def refuse(options: CommOptions, names: Iterable[str], rule: str) -> None:
    """Refuse options that are given although nothing uses them. Raises ConfigError."""
    values = plain(options)
    for name in names:
        if name in values:
            raise ConfigError(dashed(name), values[name], rule)


def _given(options: CommOptions, *names: str) -> list[str]:
    """Return those of these options of nccl-tests that are given, and not as 0."""
    values = plain(options)
    return [name for name in names if values.get(name, "0") != "0"]


def _sweep(options: CommOptions, device: str) -> list[int]:
    """Return the sizes from -b to -e by -f or -i."""
    values = plain(options)
    low = options.begin
    high = options.end
    if low is None:
        low = min(KIB, high or KIB)
    if high is None:
        high = max(GIB if device == "cuda" else 4 * MIB, low)
    if low == 0 or high == 0:
        name = "begin" if low == 0 else "end"
        raise ConfigError(name, values[name], "at least 1 byte")
    if low > high:
        raise ConfigError("begin", values["begin"], f"at most the end, {format_bytes(high)}")
    factor = options.factor or (0.0 if options.step else 4.0)
    if not math.isfinite(factor):
        raise ConfigError("factor", factor, "a number above 1, such as 2")
    if options.step == 0 and not options.factor:
        raise ConfigError("step", values["step"], "at least 1 byte")
    return sizes(low, high, factor=factor, step=options.step or 0)


def _messages(case: CommCase, options: CommOptions) -> list[tuple[Label | None, int]]:
    """Return the messages of --model by this collective, per micro-batch."""
    roles = options.message or ()
    for role in roles:
        if role not in ROLES:
            raise not_one_of("message", role, ROLES)
    labelled: dict[tuple[Label | None, int], None] = {}
    for model, mbs in itertools.product(read_models(options.model), options.mbs or (1,)):
        sent = messages(
            model,
            case.collective,
            mbs=mbs,
            seq_len=options.seq_len or model.seq_len,
            itemsize=case.dtype.itemsize,
            num_ranks=case.num_ranks,
        )
        for role, num_bytes in sent.items():
            if not roles or role in roles:
                depends = "layer" not in role
                label = Label(model=model.name, role=role, mbs=mbs if depends else None)
                labelled[label, num_bytes] = None
    if not labelled:
        allowed = f"a message that {case.collective} carries in this model"
        raise ConfigError("message", plain(options).get("message"), allowed)
    return list(labelled)


def _ranks(options: CommOptions, world_size: int) -> tuple[int, ...]:
    """Return --ranks, the sizes of communicators over the first ranks of the world."""
    if options.group_split:
        refuse(options, ["ranks"], "it cannot be combined with --group-split")
    for n in options.ranks or ():
        if not 2 <= n <= world_size:
            allowed = f"from 2 to {world_size}" if world_size > 2 else "2, as there are no more"
            raise ConfigError("ranks", n, allowed)
    return options.ranks or (world_size,)


def _split(options: CommOptions, n: int, world_size: int) -> tuple[str, int]:
    """Return --group-split and the ranks of each communicator, which without it are n."""
    text = (options.group_split or "").strip().lower()
    if not text:
        return "", n
    counts = {len(ranks) for ranks in groups(world_size, text)}
    if len(counts) > 1 or counts == {1}:
        allowed = f"groups of {world_size} ranks that are of equal size, 2 ranks or more"
        raise ConfigError("group-split", text, allowed)
    return " ".join(map(str, parse_split(text))), counts.pop()


def _mode(options: CommOptions, device: str, backend: str) -> tuple[Mode, bool]:
    """Return the mode of --mode, -z or -G, and whether ranks start calls together."""
    blocking = options.blocking
    graph = options.cudagraph
    flags = [f"-z {blocking}"] if blocking else []
    flags += [f"-G {graph}"] if graph else []
    flags += [f"--mode {options.mode}"] if options.mode else []
    if len(flags) > 1:
        raise ConfigError("mode", " ".join(flags), "given by only one of --mode, -z and -G")
    default = default_mode(device, backend, Collective.ALL_REDUCE)
    mode = options.mode or (Mode.BLOCKING if blocking else default)
    mode = Mode.GRAPH if graph else mode
    if mode is Mode.GRAPH and device != "cuda":
        flag, value = ("-G", graph) if graph else ("mode", "graph")
        raise ConfigError(flag, value, "queued or blocking calls on a CPU, which has no graphs")
    if mode is Mode.AHEAD and default is not Mode.AHEAD:
        where = f"{backend}, whose calls return when they are complete"
        raise ConfigError("mode", mode, f"queued or blocking with {where}")
    if mode is Mode.GRAPH:
        refuse(options, ["per_iter_timing"], "it cannot time the calls of a graph")
    free = blocking == 2 or (options.no_align and mode is Mode.BLOCKING)
    return mode, not free


def _backend(options: CommOptions, device: str) -> str:
    """Return the backend of torch.distributed: nccl or gloo."""
    backends = ("nccl", "gloo") if device == "cuda" else ("gloo",)
    backend = (options.backend or backends[0]).lower()
    if backend not in backends:
        raise ConfigError("backend", backend, f"{' or '.join(backends)} with --device {device}")
    return backend


def _with_matrix(case: CommCase, file: str) -> CommCase:
    """Add nccl-tests' matrix file, cut to the ranks: bytes from row to column, by 16 bytes."""
    n = case.num_ranks
    itemsize = case.dtype.itemsize
    try:
        lines = read_whole(Path(file), "matrix").decode().split("\n")
        table = [[float(word) for word in line.split()] for line in lines if line.split()]
    except ValueError as error:
        raise ConfigError("matrix", file, f"a file of numbers ({error})") from None
    if len({len(row) for row in table} | {len(table)}) != 1 or len(table) < n:
        raise ConfigError("matrix", file, f"a square of numbers, {n} rows or more")
    if not all(0 <= value <= 2**50 for row in table for value in row):
        raise ConfigError("matrix", file, "bytes from 0 to 2^50")
    matrix: Matrix = tuple(
        tuple(int(value) // 16 * 16 // itemsize for value in row[:n]) for row in table[:n]
    )
    with_matrix = replace(case, matrix=matrix, matrix_file=file)
    if not with_matrix.message_bytes:
        raise ConfigError("matrix", file, "at least one part of 16 bytes")
    return with_matrix


def _roots(options: CommOptions, n: int) -> tuple[int, ...]:
    """Return the roots of -r; -1 stands for every rank in turn."""
    root = options.root or 0
    if root >= n:
        raise ConfigError("root", root, f"a rank from 0 to {n - 1}, or -1 for all in turn")
    return tuple(range(n)) if root < 0 else (root,)


def _placement(collective: Collective, options: CommOptions, api: Api) -> list[bool]:
    placement = options.placement
    possible = placements(collective, api)
    if placement == "both":
        return list(possible)
    in_place = placement == "in"
    if in_place not in possible:
        only = "in" if possible == (True,) else "out"
        raise ConfigError("placement", placement, f"{only} for {collective} with --api {api}")
    return [in_place]


def concurrent_compute(options: CommOptions, device: str) -> list[str]:
    """Return "", alone, and the operators of --overlap-with, spelled as cases have them."""
    operators = [word.lower() for word in options.overlap_with or ()]
    for word in operators:
        from_shorthand(word, DType.BF16 if device == "cuda" else DType.FP32, "overlap-with")
    return ["", *operators]
