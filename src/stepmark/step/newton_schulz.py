"""Newton-Schulz iterations, by which Muon orthogonalizes the momentum of a matrix.

Keller Jordan et al., Muon (kellerjordan.github.io/posts/muon), as torch 2.13
(torch/optim/_muon.py, _zeropower_via_newtonschulz) and Emerging-Optimizers 0.1.0
(orthogonalized_optimizers/muon_utils.py, newton_schulz_step) run them: in bf16, for X of m rows
and n columns, A = X X^T, B = b A + c A A, X = a X + B X, thus 4 m^2 n + 2 m^3 FLOPs. The last
two are torch.addmm, which on a GPU copies the addend first (aten/src/ATen/native/cuda/Blas.cpp,
addmm_out_cuda_impl: a bias of two dimensions). torch does not know that A is symmetric.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepmark.ground.dtypes import DType
from stepmark.model.ops import Gemm, Layout, Op, Phase
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.workload import Block, CommOp, ComputeOp, Item, Kernel, Run

ITEMSIZE = DType.BF16.itemsize
MODULE = "muon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonalization:
    """Iterations over a matrix X [rows, columns] on one rank; A has `rows` rows.

    Callers transpose a matrix with more rows than columns. after_gram: messages after each A.
    """

    rows: int
    columns: int
    steps: int = 5
    after_gram: tuple[CommOp, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of all iterations: a multiply and an add each."""
        return self.steps * (4 * self.rows**2 * self.columns + 2 * self.rows**3)

    @property
    def name(self) -> str:
        """Name of the block of one iteration."""
        sent = ".distributed" if self.after_gram else ""
        return f"newton_schulz.{self.rows}x{self.columns}{sent}"

    def iteration(self) -> Block:
        """Return the operations of one iteration."""
        rows, columns = self.rows, self.columns
        gram = Gemm(m=rows, n=rows, k=columns, layout=Layout.NT)
        square = Gemm(m=rows, n=rows, k=rows, layout=Layout.NN)
        update = Gemm(m=rows, n=columns, k=rows, layout=Layout.NN)
        return (
            computed(gram),
            *self.after_gram,
            computed(memory_kernel("copy", 2 * rows * rows * ITEMSIZE)),
            computed(square),
            computed(memory_kernel("copy", 2 * rows * columns * ITEMSIZE)),
            computed(update),
        )


def orthogonalization(rows: int, columns: int, steps: int = 5) -> Orthogonalization:
    """Return that of a matrix of any shape, whose smaller dimension A has."""
    return Orthogonalization(rows=min(rows, columns), columns=max(rows, columns), steps=steps)


def computed(op: Op | Kernel) -> ComputeOp:
    """Return an operation of the optimizer."""
    return ComputeOp(op=op, phase=Phase.OPTIM, module=MODULE)


def iterations(work: Orthogonalization, blocks: dict[str, Block]) -> Run:
    """Return the iterations over a matrix, whose block is added to `blocks`."""
    blocks[work.name] = work.iteration()
    return Run(block=work.name, times=work.steps)


def repeated(
    bodies: Iterable[Sequence[Item]], blocks: dict[str, Block], prefix: str
) -> tuple[Run, ...]:
    """Return the bodies, each a block; equal ones in a row are one run."""
    names: dict[Block, str] = {}
    runs: list[Run] = []
    for body in map(tuple, bodies):
        if not body:
            continue
        name = names.setdefault(body, f"{prefix}{len(names)}")
        blocks[name] = body
        if runs and runs[-1].block == name:
            runs[-1] = Run(block=name, times=runs[-1].times + 1)
        else:
            runs.append(Run(block=name))
    return tuple(runs)
