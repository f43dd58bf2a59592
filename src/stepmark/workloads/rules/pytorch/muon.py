"""Muon of the blocks' matrices: torch 2.13, torch/optim/_muon.py (_single_tensor_muon).

Embedding, head, norms and biases have AdamW, as the documentation of torch.optim.Muon demands.
The momentum has the type of the weights, and products are in bf16 whatever that is.
"""

from collections.abc import Iterator, Sequence

from stepmark.cases.training import DataParallel
from stepmark.ground.dtypes import DType
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import ParallelConfig
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.module import Param
from stepmark.step.newton_schulz import (
    ITEMSIZE,
    computed,
    iterations,
    orthogonalization,
    repeated,
)
from stepmark.step.workload import Item, Run
from stepmark.workloads.rules.pytorch.chunk import Blocks, Chunk

# Kernels before and after the iterations, with the planes that each reads and writes: those of
# weights, momentum and gradients, and those in bf16.
_BEFORE = (("lerp", 3, 0), ("lerp", 3, 0), ("cast", 1, 1), ("norm", 0, 1), ("div", 0, 2))
_AFTER = (("mul", 2, 0), ("add", 2, 1))


def refusal(
    model: ModelConfig | None, parallel: ParallelConfig, data_parallel: DataParallel | None
) -> str:
    """Return why a job has no Muon; "" if it may have it."""
    if data_parallel is DataParallel.FSDP or parallel.tp > 1:
        # DTensor gathers or sums X or A in each product of each iteration.
        return (
            "it runs on whole matrices; messages of its products over divided ones, with fsdp"
            " or tp, are not modelled"
        )
    if model is not None and model.moe is not None:  # Muon.__init__
        return "torch.optim.Muon refuses the three dimensions of experts' weights"
    return ""


def is_matrix(param: Param) -> bool:
    """Return whether Muon updates a parameter of a block."""
    return param.is_trained and len(param.shape) == 2


def matrices_of(chunks: Sequence[Chunk]) -> list[list[Param]]:
    """Return the matrices of each block, in order."""
    layers = [layer for chunk in chunks for layer in chunk.layers]
    return [[param for param in layer.unit.params if is_matrix(param)] for layer in layers]


def updates(
    matrices: Sequence[Sequence[Param]], weights: DType, blocks: Blocks
) -> tuple[Run, ...]:
    """Return Muon's step over the matrices of each block. weights: their type."""
    bodies = [
        [item for param in layer for item in _update(param, weights, blocks)]
        for layer in matrices
    ]
    return repeated(bodies, blocks, "muon.")


def _update(param: Param, weights: DType, blocks: Blocks) -> Iterator[Item]:
    rows, columns = param.shape

    def kernels(table: tuple[tuple[str, int, int], ...]) -> Iterator[Item]:
        for name, planes, narrow_planes in table:
            if name == "cast" and weights is DType.BF16:
                continue  # it is the same tensor
            size = planes * weights.itemsize + narrow_planes * ITEMSIZE
            yield computed(memory_kernel(name, size * param.numel))

    yield from kernels(_BEFORE)
    yield iterations(orthogonalization(rows, columns), blocks)
    yield from kernels(_AFTER)
