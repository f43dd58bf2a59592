"""Operations of a training step as a profiler measured them, by the names of the workload."""

from dataclasses import dataclass
from typing import NamedTuple

MARK = "stepmark::"  # prefix of our own annotations: a module's path, or a phase
WHOLE = "model"  # path of a model that is compiled as a whole
COARSE = ("", "block", "output", WHOLE)  # roles of compiled modules, and none
# kinds
COMPUTE = "compute"
COMM = "comm"
MEMORY = "memory"
# torch's products of matrices; each is one Gemm or GroupedGemm of a workload.
PRODUCTS = frozenset(
    f"aten::{name}mm"
    for name in ("", "add", "b", "baddb", "_scaled_", "_grouped_", "_scaled_grouped_")
)


class OpKey(NamedTuple):
    """What an operation is. "" and None are what the trace does not tell.

    role, layer, phase and is_recomputed are module, layer, phase and recompute of the
    ComputeOp or CommOp of a workload (step/workload.py) that the operation carries out; in a
    trace the phase of a gradient that is not known exactly is "bwd". A role may be several,
    joined by " | ", where shapes do not tell which. Work of torch.compile has the role of the
    module that is compiled: "block", "output", or "model".
    """

    role: str
    module: str  # path in the model, e.g. "blocks.3.ffn.down"
    layer: int | None
    phase: str
    is_recomputed: bool
    kind: str
    op: str  # innermost operation of torch around the launch
    name: str  # of the kernel or copy; of the operation in a trace without a GPU


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """All work of one kind in one step of one rank.

    time_ns is the sum over kernels, which may overlap one another. calls counts operations of
    torch that launched it, kernels what they launched; an operation counts where its first
    kernel does. overlapped_ns: the part of the time in which communication ran; of
    communication, that in which computation did; 0 without a GPU. comm: of computation on
    another stream than all other, the collective of its stream, or "all_gather" where it has
    none: FSDP2's copies into the buffers of gathers, and those of what was reduced.
    """

    step: int
    key: OpKey
    time_ns: int
    calls: int
    kernels: int
    shortest_ns: int
    longest_ns: int
    overlapped_ns: int = 0
    comm: str = ""

    @property
    def by_step_ns(self) -> dict[int, int]:
        return {self.step: self.time_ns}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Steps of one rank whose work is measured.

    is_host: there is no work of a GPU in the trace, and times are those of operations on the
    host without the operations inside them. outside_ns: work that no marked step launched.
    step_ns: of each step, from the end of the work of the step before to that of its own (on
    a host: as it was marked).
    """

    steps: tuple[int, ...]
    step_ns: tuple[int, ...]
    is_marked: bool
    is_host: bool
    outside_ns: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable(MeasuredSteps):
    """Measured operations of one rank."""

    ops: tuple[MeasuredOp, ...]
