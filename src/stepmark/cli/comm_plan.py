"""From the flags of `stepmark comm` to its cases."""

import dataclasses
import itertools
from collections.abc import Iterator

from stepmark.cli import comm_sizes, comm_values
from stepmark.cli.comm_values import MATRIX_OF_PAIRS
from stepmark.cli.options import Values
from stepmark.core.collectives import (
    ALIGN_BYTES,
    FACTS,
    Api,
    Collective,
    Mode,
    Parts,
    RedOp,
    num_parts,
    trimmed_count,
)
from stepmark.core.comm_case import CommCase, unsupported
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError

_LATENCY_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cases in the order in which they run, and what a user should know of them."""

    cases: list[CommCase]
    notes: list[str]


def plan(names: list[str], values: Values, device: str, world_size: int) -> Plan:
    """Every combination that the flags name. Raises ConfigError."""
    if world_size < 2:
        allowed = "at least 2 ranks; one has nobody to talk to"
        allowed += " (to try it out: --device cpu)" if device == "cuda" else ""
        raise ConfigError("nproc", values.get("nproc") or world_size, allowed)
    wanted = list(dict.fromkeys(map(comm_values.collective_name, names)))
    comm_values.check_meant_for(wanted, values)
    # Like nccl-tests, every collective takes these; only some heed them.
    comm_values.redops(values)
    comm_values.roots(values, world_size)
    found: list[CommCase] = []
    notes: list[str] = []
    for n in comm_values.ranks(values, world_size):
        for name in wanted:
            found += _of_name(name, values, device, n, world_size, notes)
    if not found:
        raise ConfigError(
            "dtype",
            values.get("dtype") or "fp32",
            "it leaves nothing to measure; " + "; ".join(dict.fromkeys(notes)),
        )
    return Plan(cases=list(dict.fromkeys(found)), notes=list(dict.fromkeys(notes)))


def _of_name(
    name: str, values: Values, device: str, n: int, world_size: int, notes: list[str]
) -> Iterator[CommCase]:
    base = shared(values, device, n, world_size)
    collective = Collective.P2P if name == MATRIX_OF_PAIRS else Collective(name)
    if collective is Collective.P2P and values.get("bidirectional"):
        collective = Collective.P2P_BOTH
    if FACTS[collective].pair and base.split:
        raise ConfigError("group-split", base.split, f"none with {name.replace('_', '-')}")
    if name == MATRIX_OF_PAIRS:
        yield from _matrix_of_pairs(collective, values, base, notes)
        return
    if FACTS[collective].pair:
        two = comm_values.pair(values, world_size)
        base = dataclasses.replace(base, num_ranks=2, pair=two)
    yield from _of_collective(collective, values, base, notes)


def shared(values: Values, device: str, n: int, world_size: int) -> CommCase:
    """What all cases of one communicator share; a barrier stands in for the collective."""
    split, n = comm_values.split(values, n, world_size)
    mode, aligned = comm_values.mode(values, device)
    return CommCase(
        collective=Collective.BARRIER,
        count=0,
        dtype=DType.UINT8,
        num_ranks=n,
        world_size=world_size,
        mode=mode,
        aligned=aligned,
        api=comm_values.api(values, device),
        backend=comm_values.backend(values, device),
        device=device,
        calls_per_group=comm_values.calls_per_group(values),
        split=split,
        skew_s=comm_values.skew_s(values),
    )


def _of_collective(
    collective: Collective, values: Values, base: CommCase, notes: list[str]
) -> Iterator[CommCase]:
    """Every size in every form, size by size as nccl-tests prints them."""
    guests = ("", *comm_values.guests(values, base.device))
    if collective is Collective.BARRIER:
        if base.mode is Mode.GRAPH:
            raise ConfigError("mode", base.mode, "queued or blocking for a barrier")
        yield from (dataclasses.replace(base, beside=guest) for guest in guests)
        return
    for one in _forms(collective, values, base):
        if reason := impossible(one):
            if comm_values.asked_by_name(values):
                raise ConfigError(reason[0], reason[1], f"it cannot run: {reason[2]}")
            notes.append(f"left out: {reason[2]}")
            continue
        for sized in _sized(one, values, notes):
            for in_place in comm_values.placement(collective, values, base.api):
                for guest in guests:
                    yield dataclasses.replace(sized, in_place=in_place, beside=guest)


def _forms(collective: Collective, values: Values, base: CommCase) -> Iterator[CommCase]:
    """The case without a size: every type, reduction, root and limit of thread blocks."""
    facts = FACTS[collective]
    for dtype, redop, root, ctas in itertools.product(
        comm_values.dtypes(values),
        comm_values.redops(values) if facts.reduces else [RedOp.NONE],
        comm_values.roots(values, base.num_ranks) if facts.rooted else [-1],
        comm_values.max_ctas(values, base.api, base.backend),
    ):
        yield dataclasses.replace(
            base, collective=collective, dtype=dtype, redop=redop, root=root, max_ctas=ctas
        )


def impossible(case: CommCase) -> tuple[str, object, str] | None:
    """field, value and why, for what no size will change."""
    if case.api is Api.NCCL or not (reason := unsupported(case)):
        return None
    # The flag without which it would be possible is to blame.
    if not unsupported(dataclasses.replace(case, calls_per_group=1)):
        return "agg-iters", case.calls_per_group, reason
    if case.redop is not RedOp.NONE and not unsupported(
        dataclasses.replace(case, redop=RedOp.SUM)
    ):
        return "redop", case.redop, reason
    return "dtype", case.dtype, reason


def _sized(case: CommCase, values: Values, notes: list[str]) -> Iterator[CommCase]:
    """The case at each size, trimmed as nccl-tests trims; nothing is not measured."""
    if case.collective is Collective.ALL_TO_ALL_V:
        if values.get("matrix"):
            yield comm_values.with_matrix(case, values["matrix"])
            return
        case = dataclasses.replace(case, spread=comm_values.spread(values))
    found, trimmed = dict[int, CommCase](), 0
    for label, size in comm_sizes.sizes_of(case, values):
        count = trimmed_count(case.collective, size, case.dtype.itemsize, case.num_ranks)
        one = dataclasses.replace(case, count=count)
        trimmed += one.message_bytes != size
        if count and one.message_bytes:
            labels = found[count].labels if count in found else ()
            labels += (label,) if label else ()
            found[count] = dataclasses.replace(one, labels=labels)
    if not found:
        raise ConfigError("end", values.get("end") or values.get("begin"), _least(case))
    if trimmed and FACTS[case.collective].parts is not Parts.WHOLE:
        notes.append(
            f"{case.collective}: {trimmed} size{'s'[: trimmed > 1]} trimmed so that each of "
            f"{case.num_ranks} parts is a multiple of {ALIGN_BYTES} bytes; those left with "
            "nothing are not run"
        )
    yield from found.values()


def _least(case: CommCase) -> str:
    whole = FACTS[case.collective].parts is Parts.WHOLE
    part = case.dtype.itemsize if whole else ALIGN_BYTES
    least = part * num_parts(case.collective, case.num_ranks)
    return f"at least {least} bytes for {case.collective} of {case.dtype}"


def _matrix_of_pairs(
    collective: Collective, values: Values, base: CommCase, notes: list[str]
) -> Iterator[CommCase]:
    """Bandwidth and latency of every ordered pair, one pair at a time."""
    default = "64M" if base.device == "cuda" else "1M"
    big = values.get("begin") or values.get("end") or default
    asked = {**values, "begin": big, "end": values.get("end") or big}
    tiny = str(_LATENCY_BYTES)
    # Issued one by one, so small a message takes its host's time.
    asked_for = values.get("mode") or values.get("blocking")
    mode = Mode.GRAPH if base.device == "cuda" and not asked_for else base.mode
    for source, target in itertools.permutations(range(base.num_ranks), 2):
        pair = dataclasses.replace(base, num_ranks=2, pair=(source, target))
        yield from _of_collective(collective, asked, pair, notes)
        sizes_of = {**values, "begin": tiny, "end": tiny}
        latency = dataclasses.replace(pair, mode=mode)
        yield from _of_collective(Collective.PING_PONG, sizes_of, latency, notes)
