"""Products of a checkpointed block that its backward pass runs again.

This is the one statement of it: the workload's operations
(workloads/rules/pytorch/technique.py) and the executed FLOPs (cases/flops.py) follow from it.
Source: torch 2.13,
torch/utils/checkpoint.py. Without reentrance, as training/parallelize.py asks for,
recomputation stops (_StopRecomputationError) as soon as it has the last tensor that the forward
pass saved. A linear layer saves its input before it multiplies. Of a block that ends with one
(mlp.down, and a sum that saves nothing) the last product is therefore not run again. It is
where a later operation saves its result: experts' rows are weighted, a norm may follow.
Megatron-LM's own checkpoints (tensor_parallel/random.py, CheckpointFunction) are reentrant and
run everything again: workloads/rules/megatron.
"""

from stepmark.cases.training import Recompute


def rerun_products(count: int, recompute: Recompute, *, saves_last: bool) -> range:
    """Return which of a checkpointed block's products run again, by place in its forward pass.

    saves_last: whether the result of the last product is saved for the backward pass. OPS keeps
    the results of the first, third, fifth ... product.
    """
    end = count if saves_last else count - 1
    match recompute:
        case Recompute.NONE:
            return range(0)
        case Recompute.OPS:
            return range(1, end, 2)
        case _:
            return range(end)
