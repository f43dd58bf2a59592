"""What the reader of a Megatron-LM workload should know.

Source: megatron-core 0.16.1, optimizer/optimizer.py (ChainedOptimizer.step_with_ready_grads)
and optimizer/distrib_optimizer.py (step_with_ready_grads: start_param_sync of each model chunk,
whose bucket groups are those of dense parameters and of experts).
"""

from collections.abc import Iterator

from stepmark.workload.job import Job
from stepmark.workload.rules.megatron.settings import Plan

_LARGE_MASK_BYTES = 2**30


def notes_of(job: Job, plan: Plan) -> Iterator[str]:
    """What of the job has no effect, was changed, or is easily overlooked."""
    settings = plan.settings
    if settings.sequence_parallel and plan.tp == 1:
        yield "sequence_parallel has no effect with tp 1"
    if plan.model.vocab_size != job.model.vocab_size:
        yield f"vocabulary padded from {job.model.vocab_size} to {plan.model.vocab_size}"
    masks = settings.create_attention_mask_in_dataloader and plan.tp > 1
    size = job.mbs * job.model.seq_len**2  # a byte per pair of tokens
    if masks and size >= _LARGE_MASK_BYTES:
        yield (
            f"each micro-batch's attention mask, {size / 2**30:.4g} GiB, is broadcast over tp;"
            " --no-create-attention-mask-in-dataloader leaves it out"
        )
    if _gathers_twice(plan):
        yield (
            "parameters are gathered twice per step: the optimizer of the dense ones and that"
            " of the experts each gather all (ChainedOptimizer); with overlap_param_gather once"
        )


def _gathers_twice(plan: Plan) -> bool:
    settings = plan.settings
    return (
        settings.use_distributed_optimizer
        and not settings.overlap_param_gather
        and plan.job.parallel.ep > 1
        and max(plan.size("intra_dp_cp"), plan.size("intra_expt_dp")) > 1
    )
