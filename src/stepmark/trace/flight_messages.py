"""Operations of flight-recorder dumps as messages, sized as nccl-tests sizes them."""

from collections import Counter
from collections.abc import Sequence

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import MESSAGE_DTYPES, parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.message import RECV, SEND, Histogram, MessageKind, Tally, sized
from stepmark.trace.flight_operation import Dump, Group, Operation, Shapes

_COLLECTIVES: dict[str, Collective] = {
    **dict.fromkeys(
        # A barrier of NCCL is an all-reduce of one element.
        ("all_reduce", "allreduce_coalesced", "all_reduce_sparse", "all_reduce_barrier"),
        Collective.ALL_REDUCE,
    ),
    **dict.fromkeys(
        (
            *("_all_gather_base", "all_gather", "all_gather_single", "all_gather_v"),
            *("all_gather_into_tensor_coalesced", "ALLGATHER_coalesced"),
        ),
        Collective.ALL_GATHER,
    ),
    **dict.fromkeys(
        (
            *("_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single"),
            *("reduce_scatter_v", "reduce_scatter_tensor_coalesced"),
            "REDUCE_SCATTER_coalesced",
        ),
        Collective.REDUCE_SCATTER,
    ),
    **dict.fromkeys(("broadcast", "_broadcast_oop"), Collective.BROADCAST),
    **dict.fromkeys(("reduce", "_reduce_oop"), Collective.REDUCE),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), Collective.ALL_TO_ALL),
    "all_to_all_v_single": Collective.ALL_TO_ALL_V,
    "gather": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "barrier": Collective.BARRIER,
}
# Bytes of an element of types that NCCL has no name for but torch sends as bytes or pairs.
_OTHER_TYPES = {"bool": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "short": 2, "uint16": 2}
_OTHER_TYPES |= {"complexhalf": 4, "complexfloat": 8, "complexdouble": 16}


def collective_of(kind: str) -> str:
    """Our name of torch's operation, "send", "recv", or "" for what moves no data or is new."""
    if kind in (SEND, RECV):
        return kind
    return _COLLECTIVES[kind].value if kind in _COLLECTIVES else ""


def dtype_of(name: str) -> tuple[str, int] | None:
    """(our name, bytes of an element) of torch's name of a type."""
    plain = name.lower()
    if plain in _OTHER_TYPES:
        return plain, _OTHER_TYPES[plain]
    try:
        found = parse_dtype(plain, allowed=MESSAGE_DTYPES)
    except ConfigError:
        return None
    return found.value, found.itemsize


def num_bytes(shapes: Shapes | None) -> int | None:
    """Of all tensors together; None where a size or type is unknown."""
    if shapes is None:
        return None
    total = 0
    for elements, name in shapes:
        known = dtype_of(name)
        if known is None:
            return None
        total += elements * known[1]
    return total


def histogram_of(dumps: Sequence[Dump]) -> tuple[Histogram, dict[str, int]]:
    """Messages of all dumps, and how many operations are not among them, by reason."""
    found: dict[MessageKind, Tally] = {}
    ranks: dict[MessageKind, set[int]] = {}
    uncounted: Counter[str] = Counter()
    for place, dump in enumerate(dumps):
        for operation in dump.operations:
            if operation.is_marker:
                continue
            kind = message_kind(operation, dump.group_of(operation))
            if isinstance(kind, str):
                uncounted[kind] += 1
                continue
            ranks.setdefault(kind, set()).add(place)
            tally = found.get(kind, Tally(calls=0, ranks=0))
            seconds = operation.duration_s
            found[kind] = Tally(
                calls=tally.calls + 1,
                ranks=len(ranks[kind]),
                timed_calls=tally.timed_calls + (seconds is not None),
                seconds=tally.seconds + (seconds or 0.0),
            )
    bare = _bare_markers(dumps)
    if bare:
        uncounted["coalesced groups whose parts are not in the dump"] += bare
    return found, dict(uncounted)


def _bare_markers(dumps: Sequence[Dump]) -> int:
    """Before version 2.7 collectives inside a coalesced group left no entry."""
    count = 0
    for dump in dumps:
        with_parts = {one.step for one in dump.operations if not one.is_marker}
        count += sum(one.is_marker and one.step not in with_parts for one in dump.operations)
    return count


def message_kind(operation: Operation, group: Group) -> MessageKind | str:
    """How an operation counts, or why it does not."""
    name = collective_of(operation.kind)
    if not name:
        return f"operations of kind {operation.kind or 'unknown'}"
    sent, received = num_bytes(operation.inputs), num_bytes(operation.outputs)
    ranks = len(group.ranks) if group.ranks else None
    if name == Collective.BARRIER:
        sent = received = 0
    if sent is None and received is None:
        return "operations without sizes or types"
    shapes = operation.inputs or operation.outputs or ()
    types = {known[0] for _, word in shapes if (known := dtype_of(word))}
    dtype = types.pop() if len(types) == 1 else ""
    sent, received = sent or 0, received or 0
    if name == Collective.ALL_TO_ALL and _is_uneven(sent, received, ranks):
        name = Collective.ALL_TO_ALL_V.value
    call_bytes, message_bytes = sized(name, sent, received, ranks)
    label = f"{group.name} {group.description}".strip()
    return MessageKind(
        collective=name,
        dtype=dtype,
        group=label,
        num_ranks=ranks,
        phase=operation.phase,
        call_bytes=call_bytes,
        message_bytes=message_bytes,
    )


def _is_uneven(sent: int, received: int, num_ranks: int | None) -> bool:
    """Whether the sizes of an all-to-all tell that its parts differ."""
    return num_ranks is not None and (sent != received or sent % num_ranks != 0)
