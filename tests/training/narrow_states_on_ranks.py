"""What test_narrow_states runs on two gloo ranks."""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torchao.optim.subclass_8bit import OptimState8bit

from stepmark.cases.train_case import TrainCase
from stepmark.measuring.ranks import Ranks
from stepmark.training import parallelize
from stepmark.training.model_parallel import Meshes
from stepmark.training.optimizer import build_optimizers


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of all state tensors on this rank but the counts of steps."""
    return sum(
        bytes_of(state)
        for optimizer in optimizers
        for states in optimizer.state.values()
        for state in states.values()
        if state.ndim
    )


def bytes_of(state: torch.Tensor) -> int:
    own = state.to_local() if isinstance(state, DTensor) else state
    if isinstance(own, OptimState8bit):
        return own.codes.nbytes + own.scale.nbytes + own.qmap.nbytes
    return own.nbytes


def state_bytes_of_shards(ranks: Ranks, cases: Sequence[TrainCase]) -> list[int]:
    sizes = []
    for of in cases:
        model = parallelize.parallelize(of, Meshes(of), ranks.device).model
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizers = build_optimizers(of, list(model.named_parameters()))
        for optimizer in optimizers:
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        sizes.append(states_of(optimizers))
    return sizes
