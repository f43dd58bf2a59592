"""An entry of PARAM's "basic" trace: its fields, and what they mean in our words."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import MESSAGE_DTYPES, DType, parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.message import RECV, SEND
from stepmark.core.ops import EmbeddingBag, Gemm, Layout, Phase

Count = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
Ranks = Annotated[int, msgspec.Meta(ge=0, le=2**24)]


class Entry(msgspec.Struct, kw_only=True):
    """Fields of an entry. Which are needed depends on `comms` or `compute`."""

    comms: str | None = None
    compute: str | None = None
    req: Any = None
    markers: list[str] | None = None
    world_size: Ranks | None = None
    root: Ranks | None = None
    pg_id: int | None = None
    global_ranks: list[Ranks] | None = None
    in_msg_size: Count | None = None
    out_msg_size: Count | None = None
    dtype: str = "float"
    src_rank: Ranks | None = None
    dst_rank: Ranks | None = None
    use_batch: bool | None = None
    count: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1
    mm_dim: Count | None = None
    mm0_dim0: Count | None = None
    mm0_dim1: Count | None = None
    mm1_dim0: Count | None = None
    mm1_dim1: Count | None = None
    direction: str = "forward"
    emb_dim: Count | None = None
    num_embs: Count | None = None
    batch_size: Count | None = None
    num_emb_tables: Count | None = None
    bag_size: Count | None = None


_GATHERS = ("in", 1)
_SCATTERS = ("out", 1)
_WHOLE = ("in", 1)
_PER_RANK = ("in", 0)

# Letters of a name -> ours, and which size holds the count: of one part, or (0) of all ranks.
NAMES: dict[str, tuple[str, tuple[str, int]]] = {
    "allreduce": (Collective.ALL_REDUCE, _WHOLE),
    "allgather": (Collective.ALL_GATHER, _GATHERS),
    "allgatherbase": (Collective.ALL_GATHER, _GATHERS),
    "reducescatter": (Collective.REDUCE_SCATTER, _SCATTERS),
    "reducescatterbase": (Collective.REDUCE_SCATTER, _SCATTERS),
    "alltoall": (Collective.ALL_TO_ALL, _PER_RANK),
    "alltoallsingle": (Collective.ALL_TO_ALL, _PER_RANK),
    "alltoallv": (Collective.ALL_TO_ALL_V, _PER_RANK),
    "alltoallbase": (Collective.ALL_TO_ALL_V, _PER_RANK),
    "broadcast": (Collective.BROADCAST, _WHOLE),
    "reduce": (Collective.REDUCE, _WHOLE),
    "gather": (Collective.GATHER, _GATHERS),
    "scatter": (Collective.SCATTER, _SCATTERS),
    "send": (SEND, _WHOLE),
    "isend": (SEND, _WHOLE),
    "recv": (RECV, ("out", 1)),
    "irecv": (RECV, ("out", 1)),
    "recvanysource": (RECV, ("out", 1)),
    "barrier": (Collective.BARRIER, _WHOLE),
}
SILENT = ("wait", "init", "batchisendirecv")


def _gemm(entry: Entry, where: str) -> Gemm:
    square = entry.mm_dim
    m, k, inner, n = (
        square if one is None else one
        for one in (entry.mm0_dim0, entry.mm0_dim1, entry.mm1_dim0, entry.mm1_dim1)
    )
    if not (m and n and k) or inner != k:
        raise ConfigError(where, f"{m} x {k}, {inner} x {n}", "mm_dim, or mm0_dim0 to mm1_dim1")
    return Gemm(
        m=m, n=n, k=k, dtype=parse_dtype(entry.dtype, f"{where}: dtype"), layout=Layout.NN
    )


def _lookup(entry: Entry, where: str) -> EmbeddingBag:
    backward = entry.direction.lower() == "backward"
    sizes = (entry.num_embs, entry.emb_dim, entry.bag_size, entry.batch_size)
    rows, dim, pooling, batch = (one or 0 for one in sizes)
    if not all((rows, dim, pooling, batch)):
        raise ConfigError(
            where, "missing", "num_embs, emb_dim, bag_size and batch_size above 0"
        )
    return EmbeddingBag(
        rows=rows,
        dim=dim,
        pooling=pooling,
        batch=batch * (entry.num_emb_tables or 1),
        phase=Phase.BWD if backward else Phase.FWD,
    )


COMPUTATIONS: dict[str, Callable[[Entry, str], Gemm | EmbeddingBag]] = {
    "gemm": _gemm,
    "emb_lookup": _lookup,
}


def letters(name: str) -> str:
    """PARAM compares names by their letters alone."""
    return "".join(one for one in name.lower() if one.isalpha())


def place(entry: Entry) -> tuple[Phase, str]:
    """Markers are free text; ours are phase and module."""
    markers = entry.markers or []
    if len(markers) == 2 and markers[0] in set(Phase):
        return Phase(markers[0]), markers[1]
    return Phase.STEP, " ".join(markers)


def dtype_of(entry: Entry, where: str) -> DType:
    name = "uint8" if entry.dtype.lower() == "bool" else entry.dtype
    return parse_dtype(name, f"{where}: dtype", MESSAGE_DTYPES)


def count_of(
    entry: Entry, counted: tuple[str, int], size: int, collective: str, where: str
) -> int:
    if collective == Collective.BARRIER:
        return 0
    side, parts = counted
    elements = entry.in_msg_size if side == "in" else entry.out_msg_size
    if elements is None:
        raise ConfigError(f"{where}: {side}_msg_size", "missing", "a number of elements")
    divisor = parts or size
    if elements % divisor and collective != Collective.ALL_TO_ALL_V:
        raise ConfigError(
            f"{where}: {side}_msg_size", elements, f"a multiple of {divisor} ranks"
        )
    return -(-elements // divisor)
