"""ZeRO-Offload: optimizer, and at stage 3 weights, in the host's memory.

DeepSpeed 0.19.6 (edaa722), deepspeed/runtime/zero: stage_1_and_2.py
(async_accumulate_grad_in_cpu_via_gpu, async_inplace_copy_grad_to_fp32_buffer_from_gpu, step),
stage3.py (partition_grads, _offload_grad_partition_at_boundary,
_reassign_or_swap_out_partitioned_parameters), partition_parameters.py (all_gather_coalesced).
Only read. A copy that changes the type sends the type of its destination when that is the
host's fp32, because it is cast on the device before, and the weights' when it goes to the
device, because it is cast on the host. A copy that its host waits for is cast on the host: new
weights go there in the optimizer's fp32 (torch 2.13, aten/src/ATen/native/cuda/Copy.cu:
copy_kernel_cuda).
"""

from collections.abc import Iterator

from stepmark.ground.dtypes import DType
from stepmark.model.ops import Phase
from stepmark.step.host_memory import host_adam, host_copy
from stepmark.step.workload import ComputeOp

NOTE = (
    "offload_optimizer: a step's copies of gradients are shown together, before the update;"
    " DeepSpeed begins them as gradients are reduced"
)


def gradient_copies(
    numel: int, *, num_microbatches: int, stage: int, dtype: DType, accumulated: DType
) -> Iterator[ComputeOp]:
    """Yield a step's copies of a rank's gradients between device and host.

    Sums of several micro-batches are kept on the host and added up on the device: in the
    gradients' type at stages 1 and 2, in that of accumulation at stage 3. Stage 3 reads its
    buffer back after the first micro-batch, too. Of a boundary parameter at stages 1 and 2 only
    this rank's part counts, though DeepSpeed copies all of it.
    """
    kept = accumulated if stage == 3 else dtype
    is_summed = num_microbatches > 1
    down = numel * DType.FP32.itemsize  # to the optimizer's fp32 buffer
    up = 0
    if is_summed or stage == 3:
        down += num_microbatches * numel * kept.itemsize
        up = (num_microbatches if stage == 3 else num_microbatches - 1) * numel * kept.itemsize
    yield host_copy(down, "d2h", Phase.BWD, "gradients")
    if up:
        yield host_copy(up, "h2d", Phase.BWD, "gradients")


def host_update(numel: int, *, dtype: DType, has_weights: bool) -> Iterator[ComputeOp]:
    """Yield AdamW on the host's cores, whose time nobody knows, and the copy of new weights.

    has_weights: the device stores them.
    """
    yield host_adam()
    if has_weights:
        yield host_copy(numel * dtype.itemsize, "h2d", Phase.OPTIM, "optimizer")


def weights_to_host(numel: int) -> ComputeOp:
    """Return the copy of weights that the device updates and the host stores."""
    return host_copy(numel * DType.FP32.itemsize, "d2h", Phase.OPTIM, "optimizer")
