"""Call collectives of the NCCL (or RCCL) that torch has loaded, by ctypes.

The communicator is our own, so that nothing of torch.distributed is in the time, and all types,
reductions and placements of the library can be measured. Numbers and layouts are those of
src/nccl.h.in of NVIDIA/nccl 2.28; RCCL has the same.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepmark.cases.comm_case import CommCase
from stepmark.collectives.bench.data import moves
from stepmark.collectives.bench.values import PREMUL_FACTOR, narrow
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import FACTS, Collective, RedOp, Registration

# Value of rank 0, given to all: rank 0 passes bytes, the others None.
Share = Callable[[bytes | None], bytes]
# A function of the library with its arguments; returns an ncclResult_t.
Step = functools.partial[int]

_SONAMES = ("libnccl.so.2", "librccl.so.1")
# Numbers of ncclDataType_t.
_DTYPE = {
    dtype: number
    for number, dtype in enumerate(
        (
            *(DType.INT8, DType.UINT8, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64),
            *(DType.FP16, DType.FP32, DType.FP64, DType.BF16, DType.FP8_E4M3, DType.FP8_E5M2),
        )
    )
}
_REDOP = {RedOp.SUM: 0, RedOp.PROD: 1, RedOp.MAX: 2, RedOp.MIN: 3, RedOp.AVG: 4}
_WHOLE = {
    Collective.ALL_REDUCE: "ncclAllReduce",
    Collective.REDUCE_SCATTER: "ncclReduceScatter",
    Collective.REDUCE: "ncclReduce",
    Collective.ALL_GATHER: "ncclAllGather",
    Collective.BROADCAST: "ncclBroadcast",
}
# NCCL 2.28 and later; before, and in RCCL, sends and receives in a group do the same.
_WHOLE_SINCE_2_28 = {
    Collective.ALL_TO_ALL: "ncclAlltoAll",
    Collective.GATHER: "ncclGather",
    Collective.SCATTER: "ncclScatter",
}
# What registers, deregisters, allocates and frees: since NCCL 2.19, and windows since 2.27.
_MEMORY = ("ncclMemAlloc", "ncclMemFree")
_REGISTER = {
    Registration.LOCAL: ("ncclCommRegister", "ncclCommDeregister", *_MEMORY),
    Registration.SYMMETRIC: ("ncclCommWindowRegister", "ncclCommWindowDeregister", *_MEMORY),
}
# Versions of NCCL that know each policy: nccl-tests, src/common.cu.
_POLICY_SINCE = ((2, 0), (2, 27), (2, 28))
_WIN_COLL_SYMMETRIC = 1
_SCALAR_ON_HOST = 1
_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)


class NcclError(RuntimeError):
    """Raised where a call of the library fails, with its name, code and the last error."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundCall:
    """A call of a collective: functions of the library, made one after the other.

    fail: raises NcclError for the step with this number and its result. keep: what the
    arguments point to.
    """

    steps: Sequence[Step]
    fail: Callable[[int, int], None]
    keep: object

    def __call__(self) -> None:
        for number, step in enumerate(self.steps):
            if result := step():
                self.fail(number, result)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * 128),)


class _Config(ctypes.Structure):
    """The fields of ncclConfig_t that we need: the library fills those after `size`."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
        ("traffic_class", c_int),
        # Since NCCL 2.27.
        ("comm_name", c_char_p),
        ("collnet_enable", c_int),
        ("cta_policy", c_int),
    )


def find_library(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the path of the library in this process, else a name that the loader finds.

    Raises ConfigError where there is none.
    """
    names = ("libnccl.so", "librccl.so")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        path = line.split(maxsplit=5)[-1]
        if path.rpartition("/")[2].startswith(names):
            return path
    for name in _SONAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    raise ConfigError("api", "nccl", "torch: this torch has no libnccl or librccl loaded")


@functools.lru_cache(maxsize=4)
def load(path: str) -> ctypes.CDLL:
    """Return the library, with argument types of functions whose arguments are not prepared.

    A CDLL releases the interpreter's lock during calls, so that another thread can abort.
    """
    library = ctypes.CDLL(path)
    library.ncclGetErrorString.restype = c_char_p
    library.ncclGetLastError.restype = c_char_p
    library.ncclGetLastError.argtypes = [c_void_p]
    place: list[Any] = [POINTER(c_void_p), c_int, _UniqueId, c_int]
    library.ncclCommInitRank.argtypes = place
    library.ncclCommInitRankConfig.argtypes = [*place, POINTER(_Config)]
    premul: list[Any] = [POINTER(c_int), c_void_p, c_int, c_int, c_void_p]
    library.ncclRedOpCreatePreMulSum.argtypes = premul
    library.ncclRedOpDestroy.argtypes = [c_int, c_void_p]
    library.ncclCommDestroy.argtypes = [c_void_p]
    library.ncclCommAbort.argtypes = [c_void_p]
    return library


def unsupported_here(case: CommCase) -> str | None:
    """Return why the library of this process cannot run the case; None where it can."""
    if case.registration is Registration.NONE and not case.cta_policy:
        return None
    library: Any = load(find_library())
    number = c_int()
    library.ncclGetVersion(byref(number))
    major, minor = version = divmod(number.value // 100, 100)
    since = _POLICY_SINCE[case.cta_policy or 0]
    if version < since:
        return f"-x {case.cta_policy} needs NCCL {since[0]}.{since[1]}, not {major}.{minor}"
    needed = _REGISTER.get(case.registration, ())
    missing = [name for name in needed if not hasattr(library, name)]
    if missing:
        lacks = f"{missing[0]}, which NCCL {major}.{minor} lacks"
        return f"--register {case.registration} needs {lacks}"
    return None


class _DeviceBytes:
    """Memory of the current device, as torch reads it without a copy."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def device_bytes(pointer: int, num_bytes: int) -> torch.Tensor:
    """Return the bytes at a pointer of the current device."""
    return torch.as_tensor(_DeviceBytes(pointer, num_bytes), device="cuda")


class Communicator:
    """This rank in an NCCL communicator. Every member makes it at the same time.

    max_ctas: thread blocks that it may use; None: as many as the library likes. cta_policy: a
    number of NCCL_CTA_POLICY_*; None: not set. The current CUDA device becomes the rank's.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        index: int,
        share: Share,
        max_ctas: int | None = None,
        cta_policy: int | None = None,
        path: str | None = None,
    ) -> None:
        self._library: Any = load(path or find_library())
        self._num_ranks = num_ranks
        self._index = index
        self._comm = c_void_p()
        self._premul: dict[DType, int] = {}
        self._memory: list[c_void_p] = []
        self._handles: list[tuple[str, c_void_p]] = []  # with what deregisters each
        unique = _UniqueId()
        if index == 0:
            self._do("ncclGetUniqueId", byref(unique))
        sent = share(bytes(unique) if index == 0 else None)
        unique = _UniqueId.from_buffer_copy(sent)
        place = (byref(self._comm), num_ranks, unique, index)
        if max_ctas is None and cta_policy is None:
            self._do("ncclCommInitRank", *place)
        else:
            config = self._config(max_ctas, cta_policy)
            self._do("ncclCommInitRankConfig", *place, byref(config))

    def bind(
        self,
        case: CommCase,
        index: int,
        send: torch.Tensor,
        recv: torch.Tensor,
        stream: int | None = None,
    ) -> BoundCall:
        """Return the call, ready to be made on a stream; None: on the one that is current now.

        `index` is as in the case's buffers. The pointers decide whether it is in place. The
        call keeps the tensors. Raises ConfigError for a ping-pong in a group, whose second half
        would not wait for the first.
        """
        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream
        assert (case.num_ranks, index) == (self._num_ranks, self._index)
        if case.calls_per_group > 1 and case.collective is Collective.PING_PONG:
            raise ConfigError("m", case.calls_per_group, "1 for ping_pong")
        token = None
        if case.collective is Collective.BARRIER:
            token = torch.zeros(1, device=send.device)
        steps = self._steps(case, send, recv, token, stream)
        if case.calls_per_group > 1:
            steps = self._group(steps * case.calls_per_group)
        return BoundCall(steps, functools.partial(self._fail, steps), (send, recv, token))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return bytes of the library's own memory, which `unregister` frees."""
        pointer = c_void_p()
        self._do("ncclMemAlloc", byref(pointer), c_size_t(num_bytes))
        self._memory.append(pointer)
        return device_bytes(pointer.value or 0, num_bytes)

    def register(self, memory: torch.Tensor, registration: Registration) -> None:
        """Register memory with the communicator; every member calls it at the same time.

        Raises NcclError where the library returns no handle: its settings forbid registration.
        """
        handle = c_void_p()
        name = _REGISTER[registration][0]
        place = (
            self._comm,
            c_void_p(memory.data_ptr()),
            c_size_t(memory.nbytes),
            byref(handle),
        )
        if registration is Registration.SYMMETRIC:
            self._do(name, *place, c_int(_WIN_COLL_SYMMETRIC))
        else:
            self._do(name, *place)
        if not handle:
            raise NcclError(f"{name}: no handle (NCCL_LOCAL_REGISTER=0 forbids registration)")
        self._handles.append((_REGISTER[registration][1], handle))

    def unregister(self) -> None:
        """Deregister and free all memory of `allocate`; every member calls it when idle."""
        for name, handle in self._handles if self._comm else ():
            self._do(name, self._comm, handle)
        self._handles = []
        for pointer in self._memory:
            self._do("ncclMemFree", pointer)
        self._memory = []

    def abort(self) -> None:
        """End blocked collectives; to be called from another thread."""
        comm = self._comm
        self._comm = c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def close(self) -> None:
        """Close it; every member calls it when idle. Bound calls must not be made again."""
        for op in self._premul.values():
            self._library.ncclRedOpDestroy(op, self._comm)
        self._premul = {}
        self.unregister()
        comm = self._comm
        self._comm = c_void_p()
        if comm:
            self._succeed("ncclCommDestroy", self._library.ncclCommDestroy(comm))

    def _steps(
        self,
        case: CommCase,
        send: torch.Tensor,
        recv: torch.Tensor,
        token: torch.Tensor | None,
        stream: int,
    ) -> list[Step]:
        """Return the calls in their order, with all arguments. token: of a barrier."""
        place = (c_void_p(self._comm.value), c_void_p(stream))

        def call(name: str, *arguments: object) -> Step:
            return functools.partial(getattr(self._library, name), *arguments, *place)

        if token is not None:
            one = c_void_p(token.data_ptr())
            how = (c_size_t(1), c_int(_DTYPE[DType.FP32]), c_int(_REDOP[RedOp.SUM]))
            return [call("ncclAllReduce", one, one, *how)]
        facts = FACTS[case.collective]
        kind = c_int(_DTYPE[case.dtype])
        name = _WHOLE.get(case.collective, "")
        newer = _WHOLE_SINCE_2_28.get(case.collective, "")
        if name or (newer and hasattr(self._library, newer)):
            buffers = (c_void_p(send.data_ptr()), c_void_p(recv.data_ptr()))
            redop = [c_int(self._redop(case.redop, case.dtype))] if facts.reduces else []
            root = [c_int(case.root)] if facts.rooted else []
            count = c_size_t(case.count)
            return [call(name or newer, *buffers, count, kind, *redop, *root)]
        calls = []
        for move in moves(case, self._index):
            buffer = send if move.from_send else recv
            address = c_void_p(buffer.data_ptr() + move.at * case.dtype.itemsize)
            way = "ncclSend" if move.sends else "ncclRecv"
            calls.append(call(way, address, c_size_t(move.count), kind, c_int(move.peer)))
        in_turn = len(calls) == 1 or case.collective is Collective.PING_PONG
        return calls if in_turn else self._group(calls)

    def _group(self, calls: list[Step]) -> list[Step]:
        """Return these calls as one group. Groups may nest."""
        start = self._library.ncclGroupStart
        end = self._library.ncclGroupEnd
        return [functools.partial(start), *calls, functools.partial(end)]

    def _fail(self, steps: list[Step], at: int, result: int) -> None:
        """Leave the groups that are open, then raise."""
        names = [step.func.__name__ for step in steps[: at + 1]]
        try:
            self._succeed(names[-1], result)
        finally:
            opened = names[:-1].count("ncclGroupStart")
            for _ in range(opened - names.count("ncclGroupEnd")):
                self._library.ncclGroupEnd()

    def _redop(self, redop: RedOp, dtype: DType) -> int:
        if redop is not RedOp.MULSUM:
            return _REDOP[redop]
        if dtype not in self._premul:
            factor = narrow(torch.tensor([PREMUL_FACTOR], dtype=torch.float64), dtype)
            op = c_int()
            where = (factor.data_ptr(), _DTYPE[dtype], _SCALAR_ON_HOST, self._comm)
            self._do("ncclRedOpCreatePreMulSum", byref(op), *where)
            self._premul[dtype] = op.value
        return self._premul[dtype]

    def _config(self, max_ctas: int | None, cta_policy: int | None) -> _Config:
        version = c_int()
        self._do("ncclGetVersion", byref(version))
        is_longer = cta_policy is not None
        return _Config(
            size=ctypes.sizeof(_Config) if is_longer else _Config.comm_name.offset,
            magic=_MAGIC,
            version=version.value,
            blocking=_UNDEFINED,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED if max_ctas is None else max_ctas,
            net_name=None,
            split_share=_UNDEFINED,
            traffic_class=_UNDEFINED,
            comm_name=None,
            collnet_enable=_UNDEFINED,
            cta_policy=cta_policy or 0,
        )

    def _do(self, name: str, *arguments: object) -> None:
        self._succeed(name, getattr(self._library, name)(*arguments))

    def _succeed(self, name: str, result: int) -> None:
        """Raise NcclError unless the result is ncclSuccess."""
        if result:
            meaning = self._library.ncclGetErrorString(result) or b"unknown"
            last = self._library.ncclGetLastError(self._comm) or b""
            text = f"{name}: {meaning.decode(errors='replace')} ({result})"
            detail = last.decode(errors="replace").strip()
            raise NcclError(f"{text}: {detail}" if detail else text)
