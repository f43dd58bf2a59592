"""Case of one collective of one size: how it is called and how it is timed."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from stepmark.cases.case import Label, identity_hash
from stepmark.cases.fields import Need, Role, Shown, declared, field_of, identity
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import Reader, between, comma_list
from stepmark.ground.units import format_time, parse_duration
from stepmark.model.collectives import (
    FACTS,
    Api,
    Collective,
    Matrix,
    Mode,
    RedOp,
    Registration,
    busbw_factor,
    groups,
    largest_buffer,
    num_parts,
    spread_counts,
)

_MAX_SKEW_S = 1.0


def _skew(text: str, field: str) -> float:
    skew_s = parse_duration(text, field)
    if skew_s > _MAX_SKEW_S:
        raise ConfigError(field, text, f"at most {_MAX_SKEW_S:g}s")
    return skew_s


def _registration(text: str, field: str) -> Registration:
    """Read a number of nccl-tests or our word."""
    words = tuple(Registration)
    if text in ("0", "1", "2"):
        return words[int(text)]
    if text not in words:
        raise not_one_of(field, text, ("0", "1", "2", *words))
    return Registration(text)


# All digits: the delay is a part of the case's identity.
Skew = Annotated[float, Reader(read=_skew, show=lambda s: f"{s!r}s", metavar="DURATION")]


def default_mode(device: str, backend: str, collective: Collective) -> Mode:
    """Return the mode without --mode: without the host where calls can be enqueued ahead.

    Calls of gloo, and torch's barrier, return when they are complete.
    """
    waits = device != "cuda" or backend == "gloo" or collective is Collective.BARRIER
    return Mode.QUEUED if waits else Mode.AHEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCase:
    """One measurement of communication.

    num_ranks is the size of each measured communicator, world_size the number of started
    ranks. Ranks outside every communicator wait.
    """

    kind: ClassVar[str] = "comm"

    # The unit of count is what model/collectives.py defines.
    collective: Collective = field_of(Role.ELSEWHERE, shown=None)
    count: int = field_of(Role.ELSEWHERE)
    dtype: DType = field_of(Role.STRICT, shown=Shown.TABLES, leaves=3)
    redop: RedOp = field_of(Role.SETTING, RedOp.NONE, shown=Shown.TABLES, leaves=7)
    root: int = field_of(Role.SETTING, -1, shown=Shown.PAGE)
    in_place: bool = field_of(
        Role.STRICT,
        False,
        name="placement",
        cell=lambda in_place: "in-place" if in_place else "out-of-place",
        shown=Shown.TABLES,
        leaves=2,
    )
    num_ranks: int = field_of(Role.STRICT, heading="ranks", shown=Shown.TABLES, leaves=4)
    world_size: int = field_of(Role.STRICT)
    # Several concurrent communicators, e.g. "mod 4".
    split: str = field_of(Role.SETTING, "", shown=Shown.PAGE, words="split {}")
    # Source and destination.
    pair: tuple[int, int] | None = field_of(
        Role.NAME,
        None,
        cell=lambda pair: f"{pair[0]}-{pair[1]}" if pair else None,
        shown=Shown.TABLES,
    )
    mode: Mode = field_of(Role.ELSEWHERE, Mode.QUEUED, shown=Shown.TABLES, leaves=4)
    # Blocking: ranks start each call together.
    aligned: bool = field_of(Role.ELSEWHERE, True, words=lambda aligned: "ranks not aligned")
    api: Api = field_of(Role.SETTING, Api.TORCH, shown=Shown.TABLES, leaves=6)
    backend: str = field_of(Role.SETTING, "nccl", shown=Shown.PAGE)
    device: str = field_of(Role.ELSEWHERE, "cuda")
    calls_per_group: int = field_of(
        Role.SETTING,
        1,
        "operations issued as one [1]",
        *("-m", "--agg-iters", "--agg_iters"),
        reads=Annotated[int, between(1, 1024)],
        group="Calls",
        words="{} calls per group",
    )
    # Of all_to_all_v.
    spread: float | None = field_of(Role.SETTING, None, shown=Shown.PAGE, words="spread {}")
    # Of all_to_all_v, elements; the file is for its command only.
    matrix: Matrix | None = field_of(
        Role.SETTING,
        None,
        cell=lambda matrix: None if matrix is None else str(hash(matrix)),
        shown=None,
    )
    matrix_file: str = field_of(None, "", shown=None)
    skew_s: float = field_of(
        Role.STRICT,
        0.0,
        "the last rank arrives this late, e.g. 50us",
        *("--arrival-skew", "--skew"),
        reads=Skew,
        group="Calls",
        heading="skew",
        shown=Shown.PAGE,
        words=lambda seconds: f"last rank delayed by {format_time(seconds)}",
    )
    max_ctas: int | None = field_of(
        Role.SETTING,
        None,
        "thread blocks per communicator, e.g. 1,4,16",
        reads=Annotated[tuple[int, ...], comma_list(between(1, 64))],
        group="Ranks",
        needs=Need(words="nccl", is_met=lambda case: "nccl" in (case.api, case.backend)),
        heading="CTAs",
        shown=Shown.TABLES,
        words="at most {} CTAs",
    )
    cta_policy: int | None = field_of(
        Role.SETTING,
        None,
        "NCCL's policy of thread blocks: 1 = efficiency, 2 = zero",
        *("-x", "--cta_policy"),
        reads=Annotated[int, between(0, 2)],
        group="Ranks",
        heading="CTA policy",
        shown=Shown.PAGE,
        words="CTA policy {}",
        formerly=None,
    )
    registration: Registration = field_of(
        Role.SETTING,
        Registration.NONE,
        "buffers registered with NCCL: 1 = local, 2 = symmetric",
        *("-R", "--register", "--local_register"),
        reads=Annotated[
            Registration,
            Reader(
                read=_registration,
                show=lambda registration: str(tuple(Registration).index(registration)),
                metavar="0|1|2",
            ),
        ],
        group="Calls",
        heading="registered",
        shown=Shown.PAGE,
        words="buffers registered: {}",
        formerly=Registration.NONE,
    )
    unalign: int = field_of(
        Role.SETTING,
        0,
        "buffers start at this element [0]",
        *("-u", "--unalign"),
        reads=Annotated[int, between(0, 2**20)],
        group="Calls",
        shown=Shown.PAGE,
        words="buffers start at element {}",
        formerly=0,
    )
    # Concurrent compute, e.g. "gemm:8192".
    beside: str = field_of(Role.STRICT, "", shown=Shown.TABLES, leaves=1, words="beside {}")
    # Messages of models with this size.
    labels: tuple[Label, ...] = field_of(None, (), shown=None)

    def __post_init__(self) -> None:
        facts = FACTS[self.collective]
        if facts.reduces == (self.redop is RedOp.NONE):
            raise ConfigError("redop", self.redop, f"one that fits {self.collective}")
        if facts.rooted and not 0 <= self.root < self.num_ranks:
            raise ConfigError("root", self.root, f"a rank from 0 to {self.num_ranks - 1}")
        if facts.pair and (self.pair is None or self.pair[0] == self.pair[1]):
            raise ConfigError("pair", self.pair, "two different ranks")

    @property
    def family(self) -> str:
        return self.collective.value

    @property
    def has_default_mode(self) -> bool:
        return self.mode is default_mode(self.device, self.backend, self.collective)

    @property
    def scale(self) -> str:
        return ""

    @property
    def members(self) -> tuple[int, ...]:
        """Return the participating world ranks, in the order of samples and checks."""
        return self.pair or tuple(range(self.world_size if self.split else self.num_ranks))

    @property
    def communicators(self) -> list[tuple[int, ...]]:
        """Return the world ranks of each communicator."""
        return groups(self.world_size, self.split) if self.split else [self.members]

    @property
    def counts(self) -> Matrix:
        """Return the elements from rank i to rank j of an all_to_all_v."""
        if self.matrix is not None:
            return self.matrix
        return spread_counts(
            self.num_ranks, self.count, self.spread or 0.0, self.dtype.itemsize
        )

    def send_count(self, index: int) -> int:
        """Return the elements in the send buffer of this rank of the communicator."""
        return self._buffers(index)[0]

    def recv_count(self, index: int) -> int:
        """Return the elements in the receive buffer of this rank of the communicator."""
        return self._buffers(index)[1]

    def _buffers(self, index: int) -> tuple[int, int]:  # noqa: PLR0911, a row per collective
        n = self.num_ranks
        c = self.count
        is_root = index == self.root
        match self.collective:
            case Collective.ALL_GATHER:
                return c, n * c
            case Collective.REDUCE_SCATTER:
                return n * c, c
            case Collective.ALL_TO_ALL:
                return n * c, n * c
            case Collective.ALL_TO_ALL_V:
                return sum(self.counts[index]), sum(row[index] for row in self.counts)
            case Collective.GATHER:
                return c, n * c if is_root else 0
            case Collective.SCATTER:
                return n * c if is_root else 0, c
            case Collective.INCAST:
                return (0, (n - 1) * c) if is_root else (c, 0)
            case Collective.MULTICAST:
                return ((n - 1) * c, 0) if is_root else (0, c)
            case Collective.P2P:
                return (c, 0) if index == 0 else (0, c)
            case Collective.BARRIER:
                return 0, 0
            case _:  # every rank has the whole buffer; broadcast and reduce use one side
                return c, c

    @property
    def message_bytes(self) -> int:
        """Return S of algbw = S / time: the largest send or receive buffer of any rank."""
        if self.collective is Collective.BARRIER:
            return 0
        if self.collective is Collective.ALL_TO_ALL_V:
            return largest_buffer(self.counts) * self.dtype.itemsize
        return num_parts(self.collective, self.num_ranks) * self.count * self.dtype.itemsize

    @property
    def busbw_factor(self) -> float:
        return busbw_factor(self.collective, self.num_ranks)

    @property
    def case_id(self) -> str:
        """Return the SHA-256 of the canonical JSON of the identity."""
        return identity_hash(identity(self))


_COALESCED = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
_POINT_TO_POINT = (
    Collective.SENDRECV,
    Collective.P2P,
    Collective.P2P_BOTH,
    Collective.PING_PONG,
    Collective.INCAST,
    Collective.MULTICAST,
)


# Columns of the fields that vary within one table of sizes, and of all others.
VARYING = ("count", "dtype", "redop", "root", "placement", "pair")
SETTINGS = tuple(f.name for f in declared(CommCase) if f.shown and f.name not in VARYING)


def unsupported(case: CommCase) -> str | None:
    """Return why the case's API cannot run it, as far as can be told beforehand."""
    if case.api is Api.NCCL:
        if case.calls_per_group > 1 and case.collective is Collective.PING_PONG:
            return "grouped, the way back of a ping_pong would not wait for the way there"
        return None
    if case.dtype in ("uint32", "uint64"):
        return f"{case.dtype} is no type of torch.distributed; use --api nccl"
    if case.calls_per_group > 1 and case.collective not in _COALESCED:
        return f"torch.distributed groups {', '.join(_COALESCED)} only; use --api nccl"
    return _unsupported_by_gloo(case) if case.backend == "gloo" else None


def _unsupported_by_gloo(case: CommCase) -> str | None:
    if case.dtype.is_fp8 and case.collective not in _POINT_TO_POINT:
        return "gloo has no fp8 collectives"
    if case.redop is RedOp.MULSUM or (case.redop is RedOp.AVG and case.dtype.is_integer):
        return f"gloo has no {case.redop} of {case.dtype}"
    if case.calls_per_group > 1:
        return "gloo does not issue several calls as one"
    return None
