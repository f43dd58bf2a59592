"""From the flags of `stepmark comm` to its cases."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from stepmark.cli.options import Values, words
from stepmark.core.collectives import (
    FACTS,
    Api,
    Collective,
    Matrix,
    Mode,
    Parts,
    RedOp,
    groups,
    placements,
    sizes,
    trimmed_count,
)
from stepmark.core.comm_case import CommCase
from stepmark.core.dtypes import MESSAGE_DTYPES, DType, parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.ops.shorthand import from_shorthand
from stepmark.core.units import GIB, KIB, MIB, format_bytes, parse_bytes, parse_duration

E = TypeVar("E", Api, Mode)

MATRIX_OF_PAIRS = "p2p_matrix"
_LATENCY_BYTES = 8
_ALIASES = {
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all_v",
    "all_to_allv": "all_to_all_v",
    "all_to_all_single": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather_base": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "send_recv": "sendrecv",
    "pingpong": "ping_pong",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cases in the order in which they run, and what a user should know of them."""

    cases: list[CommCase]
    notes: list[str]


def plan(names: list[str], values: Values, device: str, world_size: int) -> Plan:
    """Every combination that the flags name. Raises ConfigError."""
    if world_size < 2:
        raise ConfigError("nproc", world_size, "at least 2 ranks; one has nobody to talk to")
    found: list[CommCase] = []
    notes: list[str] = []
    for n in _ranks(values, world_size):
        for name in dict.fromkeys(map(collective_name, names)):
            made = list(_of_name(name, values, device, n, world_size, notes))
            if not made:
                raise ConfigError("end", values.get("end"), f"a size that {n} ranks can share")
            found += made
    return Plan(cases=list(dict.fromkeys(found)), notes=list(dict.fromkeys(notes)))


def collective_name(text: str) -> str:
    """Ours of nccl-tests', PARAM's and torch's spellings. Raises ConfigError."""
    name = text.strip().lower().replace("-", "_").removesuffix("_perf")
    name = _ALIASES.get(name, name)
    if name not in set(Collective) and name != MATRIX_OF_PAIRS:
        known = ", ".join((*Collective, "p2p-matrix"))
        raise ConfigError("collective", text, f"one of {known}")
    return name


def _ranks(values: Values, world_size: int) -> list[int]:
    """--ranks: sizes of communicators over the first ranks of the world."""
    asked = words(values.get("ranks"))
    if asked and values.get("group_split"):
        raise ConfigError("ranks", values["ranks"], "no --group-split beside it")
    for word in asked:
        if not word.isdecimal() or not 2 <= int(word) <= world_size:
            raise ConfigError("ranks", word, f"from 2 to {world_size}")
    return [int(word) for word in asked] or [world_size]


def _of_name(
    name: str, values: Values, device: str, n: int, world_size: int, notes: list[str]
) -> Iterator[CommCase]:
    base = _common(values, device, n, world_size)
    if name == MATRIX_OF_PAIRS:
        yield from _matrix_of_pairs(values, base, notes)
        return
    collective = Collective(name)
    if collective is Collective.P2P and values.get("bidirectional"):
        collective = Collective.P2P_BOTH
    if FACTS[collective].pair:
        if base.split:
            raise ConfigError("group-split", base.split, f"none with {collective}")
        base = dataclasses.replace(base, num_ranks=2, pair=_pair(values, world_size))
    yield from _of_collective(collective, values, base, notes)


def _common(values: Values, device: str, n: int, world_size: int) -> CommCase:
    """What all cases of one communicator share; a barrier stands in for the collective."""
    split = (values.get("group_split") or "").strip().lower()
    if split:
        sides = {len(one) for one in groups(world_size, split)}
        if len(sides) > 1 or sides == {1}:
            raise ConfigError("group-split", split, "groups of equal size, of 2 ranks or more")
        n = sides.pop()
    mode, aligned = _mode(values, device)
    api = _member(Api, values.get("api") or "torch", "api")
    if api is Api.NCCL and device != "cuda":
        raise ConfigError("api", api, "torch on a CPU")
    skew = values.get("skew")
    calls = _whole(values, "agg_iters", 1, 1024, 1)
    return CommCase(
        collective=Collective.BARRIER,
        count=0,
        dtype=DType.UINT8,
        num_ranks=n,
        world_size=world_size,
        mode=mode,
        aligned=aligned,
        api=api,
        backend=values.get("backend") or ("nccl" if device == "cuda" else "gloo"),
        device=device,
        calls_per_group=calls,
        split=split,
        skew_s=parse_duration(skew, "skew") if skew else 0.0,
    )


def _mode(values: Values, device: str) -> tuple[Mode, bool]:
    """--mode, or -z and -G as nccl-tests has them; and whether ranks start calls together."""
    blocking, graph = (values.get(name) for name in ("blocking", "cudagraph"))
    asked = [f"-z {blocking}"] if blocking else []
    asked += [f"-G {graph}"] if graph else []
    asked += [f"--mode {values['mode']}"] if values.get("mode") else []
    if len(asked) > 1:
        raise ConfigError("mode", " ".join(asked), "one of --mode, -z and -G")
    if blocking not in (None, 0, 1, 2, 3):
        raise ConfigError("-z", blocking, "0, 1, 2 or 3")
    mode = _member(Mode, values.get("mode") or "queued", "mode")
    if blocking:
        mode = Mode.BLOCKING
    if graph:
        mode = Mode.GRAPH
    if mode is Mode.GRAPH and device != "cuda":
        raise ConfigError("mode", mode, "queued or blocking on a CPU")
    return mode, not (blocking == 2 or values.get("no_align"))


def _of_collective(
    collective: Collective, values: Values, base: CommCase, notes: list[str]
) -> Iterator[CommCase]:
    """Every size in every form, size by size as nccl-tests prints them."""
    if collective is Collective.BARRIER:
        if base.mode is Mode.GRAPH:
            raise ConfigError("mode", base.mode, "queued or blocking for a barrier")
        yield base
        return
    facts = FACTS[collective]
    limits: list[int | None] = [int(word) for word in _counts(values, "max_ctas")]
    guests = _guests(values, base.device)
    for dtype, redop, root, ctas in itertools.product(
        _dtypes(values),
        _redops(values) if facts.reduces else [RedOp.NONE],
        _roots(values, base.num_ranks) if facts.rooted else [-1],
        limits or [None],
    ):
        form: dict[str, Any] = {
            "collective": collective,
            "dtype": dtype,
            "redop": redop,
            "root": root,
        }
        one = dataclasses.replace(base, max_ctas=ctas, **form)
        if reason := impossible(one):
            if _by_name(values):
                raise ConfigError(*reason)
            notes.append(f"{dtype} {redop}: {reason[2]}")
            continue
        for sized in _sized(one, values, notes):
            for in_place in _placements(collective, values, base.api):
                for guest in ("", *guests):
                    yield dataclasses.replace(sized, in_place=in_place, beside=guest)


def impossible(case: CommCase) -> tuple[str, str, str] | None:
    """field, value and why, for what no size will change."""
    from stepmark.bench.collectives.torch_api import unsupported  # noqa: PLC0415

    if case.api is Api.NCCL:
        return None
    reason = unsupported(case)
    return ("dtype", case.dtype, reason) if reason else None


def _by_name(values: Values) -> bool:
    """Whether types and reductions were asked for by name and not by 'all'."""
    return "all" not in (words(values.get("dtype")) + words(values.get("redop")))


def _sized(case: CommCase, values: Values, notes: list[str]) -> Iterator[CommCase]:
    """The case at each size, trimmed as nccl-tests trims; nothing is not measured."""
    if case.collective is Collective.ALL_TO_ALL_V:
        if values.get("matrix"):
            yield _with_matrix(case, values)
            return
        spread = 1.0 if values.get("spread") is None else float(values["spread"])
        if not 0 <= spread <= 1:
            raise ConfigError("spread", spread, "from 0 (even) to 1 (by distance)")
        case = dataclasses.replace(case, spread=spread)
    seen, trimmed = set[int](), 0
    for size in _sweep(values, case):
        count = trimmed_count(case.collective, size, case.dtype.itemsize, case.num_ranks)
        one = dataclasses.replace(case, count=count)
        trimmed += one.message_bytes != size
        if count and one.message_bytes and count not in seen:
            seen.add(count)
            yield one
    if trimmed and FACTS[case.collective].parts is not Parts.WHOLE:
        notes.append(
            f"{case.collective}: {trimmed} sizes trimmed so that each of {case.num_ranks} "
            "parts is a multiple of 16 bytes; those left with nothing are not run"
        )


def _sweep(values: Values, case: CommCase) -> list[int]:
    """-b to -e by -f or -i."""
    lowest, highest = (KIB, GIB) if case.device == "cuda" else (KIB, 4 * MIB)
    begin, end = values.get("begin"), values.get("end")
    first = parse_bytes(begin, "begin") if begin else None
    last = parse_bytes(end, "end") if end else None
    low = first if first is not None else min(lowest, last or lowest)
    high = last if last is not None else max(highest, low)
    if low > high:
        raise ConfigError("begin", begin, f"at most the end, {format_bytes(high)}")
    if low == 0:
        raise ConfigError("begin", begin, "at least 1 byte")
    step = parse_bytes(values["step"], "step") if values.get("step") else 0
    factor = values.get("factor") or 0.0
    if not step and not factor:
        factor = 4.0
    return sizes(low, high, factor=float(factor), step=step)


def _with_matrix(case: CommCase, values: Values) -> CommCase:
    """The first ranks of nccl-tests' matrix file: bytes from row to column, 16-byte parts."""
    file = values["matrix"]
    n, itemsize = case.num_ranks, case.dtype.itemsize
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
        table = [[float(word) for word in line.split()] for line in lines if line.split()]
    except (OSError, ValueError) as error:
        raise ConfigError("matrix", file, f"a file of numbers ({error})") from None
    if len({len(row) for row in table} | {len(table)}) != 1 or len(table) < n:
        raise ConfigError("matrix", file, f"a square of numbers, {n} rows or more")
    if not all(0 <= value <= 2**50 for row in table for value in row):
        raise ConfigError("matrix", file, "bytes from 0 to 2^50")
    matrix: Matrix = tuple(
        tuple(int(value) // 16 * 16 // itemsize for value in row[:n]) for row in table[:n]
    )
    made = dataclasses.replace(case, matrix=matrix, matrix_file=str(file))
    if not made.message_bytes:
        raise ConfigError("matrix", file, "at least one part of 16 bytes")
    return made


def _matrix_of_pairs(values: Values, base: CommCase, notes: list[str]) -> Iterator[CommCase]:
    """Bandwidth and latency of every ordered pair, one pair at a time."""
    default = "64M" if base.device == "cuda" else "1M"
    big = values.get("begin") or values.get("end") or default
    asked = {**values, "begin": big, "end": values.get("end") or big}
    tiny = str(_LATENCY_BYTES)
    for source, target in itertools.permutations(range(base.num_ranks), 2):
        pair = dataclasses.replace(base, num_ranks=2, pair=(source, target))
        yield from _of_collective(Collective.P2P, asked, pair, notes)
        sizes_of = {**values, "begin": tiny, "end": tiny}
        yield from _of_collective(Collective.PING_PONG, sizes_of, pair, notes)


def _pair(values: Values, world_size: int) -> tuple[int, int]:
    asked = words(values.get("pair") or "0,1")
    if len(asked) != 2 or not all(w.isdecimal() and int(w) < world_size for w in asked):
        raise ConfigError("pair", values.get("pair"), f"two ranks under {world_size}: 0,1")
    if asked[0] == asked[1]:
        raise ConfigError("pair", values.get("pair"), "two different ranks")
    return int(asked[0]), int(asked[1])


def _dtypes(values: Values) -> list[DType]:
    """-d; fp32 as nccl-tests."""
    asked = words(values.get("dtype")) or ["fp32"]
    if asked == ["all"]:
        return list(MESSAGE_DTYPES)
    return [parse_dtype(word, "dtype", MESSAGE_DTYPES) for word in asked]


def _redops(values: Values) -> list[RedOp]:
    known: list[RedOp] = [redop for redop in RedOp if redop is not RedOp.NONE]
    asked = words(values.get("redop")) or ["sum"]
    if asked == ["all"]:
        return known
    for word in asked:
        if word.lower() not in known:
            raise ConfigError("redop", word, f"all or one of {', '.join(known)}")
    return [RedOp(word.lower()) for word in asked]


def _roots(values: Values, n: int) -> list[int]:
    """-r; -1 and all: every rank in turn."""
    text = str(values.get("root") or "0").strip().lower()
    if text in ("-1", "all"):
        return list(range(n))
    if not text.isdecimal() or int(text) >= n:
        raise ConfigError("root", text, f"a rank from 0 to {n - 1}, or -1 for all in turn")
    return [int(text)]


def _placements(collective: Collective, values: Values, api: Api) -> list[bool]:
    asked = values.get("placement") or "both"
    if asked not in ("both", "in", "out"):
        raise ConfigError("placement", asked, "both, in or out")
    offered = placements(collective, api)
    wanted = [one for one in offered if asked == "both" or one is (asked == "in")]
    if not wanted:
        only = "in" if offered == (True,) else "out"
        raise ConfigError("placement", asked, f"{only} for {collective} with --api {api}")
    return wanted


def _guests(values: Values, device: str) -> list[str]:
    """--with: compute beside, spelled as the case keeps it."""
    found = []
    for word in words(values.get("beside")):
        from_shorthand(word, DType.BF16 if device == "cuda" else DType.FP32)
        found.append(word.lower())
    return found


def _counts(values: Values, name: str) -> list[str]:
    asked = words(values.get(name))
    for word in asked:
        if not word.isdecimal() or not 1 <= int(word) <= 64:
            raise ConfigError(name.replace("_", "-"), word, "thread blocks from 1 to 64")
    return asked


def _whole(values: Values, name: str, low: int, high: int, default: int) -> int:
    value = values.get(name)
    if value is None:
        return default
    if not low <= value <= high:
        raise ConfigError(name.replace("_", "-"), value, f"from {low} to {high}")
    return int(value)


def _member(kind: type[E], text: str, field: str) -> E:
    try:
        return kind(text.lower())
    except ValueError:
        raise ConfigError(field, text, f"one of {', '.join(kind)}") from None
