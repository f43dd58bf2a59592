"""What follows the last backward pass: gradients, their norm, the optimizer, the loss.

Source: megatron-core 0.16.1, distributed/finalize_model_grads.py, optimizer/optimizer.py,
clip_grads.py, distrib_optimizer.py, transformer/moe/moe_utils.py (get_updated_expert_bias);
train_step and training_log of megatron/training/training.py and utils.py of core_v0.16.1.
Compared with a run of Megatron-LM (tests/data/megatron), the learning rate's reduction as
training_log begins with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepmark.core.collectives import Collective, RedOp
from stepmark.core.dtypes import DType
from stepmark.core.ops import Optimizer, Phase
from stepmark.core.workload import CommOp, ComputeOp, Kernel, Operation
from stepmark.workload.rules.megatron.gradients import (
    Bucket,
    Param,
    gather,
    reduce,
)
from stepmark.workload.rules.megatron.settings import Plan
from stepmark.workload.rules.megatron.steps import PASSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What a stage holds, by model chunk. moe_layers: how many layers have experts."""

    params: tuple[tuple[Param, ...], ...]
    buckets: tuple[tuple[Bucket, ...], ...]
    is_first: bool
    is_last: bool
    moe_layers: int = 0

    @property
    def all_buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for chunk in self.buckets for bucket in chunk)


def wait(after: Sequence[str], phase: Phase, module: str) -> ComputeOp:
    """The computation goes on when these are done; it takes no time itself."""
    kernel = Kernel(name="wait", flops=0, bytes_moved=0)
    return ComputeOp(
        op=kernel, phase=phase, module=module, name=PASSED, after=tuple(after), time_s=0.0
    )


def names_of(plan: Plan, listed: Iterable[Bucket]) -> tuple[str, ...]:
    """By which overlapped reductions of these buckets are waited for."""
    sent = (op.name for bucket in listed for op in reduce(plan, bucket, overlapped=True))
    return tuple(sorted(set(sent)))


def finish(plan: Plan, owned: Owned) -> tuple[Operation, ...]:
    """From the end of the last backward pass to that of the step."""
    return (*_gradients(plan, owned), *_update(plan, owned), *_reports(plan, owned))


def _small(
    plan: Plan,
    group: str,
    module: str,
    redop: RedOp,
    *,
    count: int = 1,
    dtype: DType = DType.FP32,
    phase: Phase = Phase.OPTIM,
) -> tuple[CommOp, ...]:
    return plan.comms(
        Collective.ALL_REDUCE,
        count,
        group,
        phase=phase,
        module=module,
        dtype=dtype,
        redop=redop,
    )


def _gradients(plan: Plan, owned: Owned) -> list[Operation]:
    """finalize_model_grads."""
    settings, found = plan.settings, list[Operation]()
    if settings.overlap_grad_reduce:
        if names := names_of(plan, owned.all_buckets):
            found.append(wait(names, Phase.BWD, "gradients"))
    else:
        for bucket in owned.all_buckets:
            found += reduce(plan, bucket, overlapped=False)
    kind, phase = plan.gradient_dtype, Phase.BWD
    whole = sum(one.count for chunk in owned.params for one in chunk if one.whole)
    if whole:
        found += _small(
            plan, "tp", "gradients.norms", RedOp.SUM, count=whole, dtype=kind, phase=phase
        )
    if plan.model.tied_embeddings and (owned.is_first or owned.is_last):
        table = plan.model.vocab_size // plan.tp * plan.model.hidden_size
        found += _small(
            plan, "embd", "gradients.embedding", RedOp.SUM, count=table, dtype=kind, phase=phase
        )
    moe = plan.model.moe
    if moe is not None and moe.router_bias and owned.moe_layers:
        loads = owned.moe_layers * moe.num_experts
        # The count is a buffer of the model, which is turned to 16 bits with its weights.
        found += _small(
            plan,
            "tp_dp_cp",
            "expert_bias",
            RedOp.SUM,
            count=loads,
            dtype=plan.job.dtype,
            phase=phase,
        )
    if settings.calculate_per_token_loss:
        found += plan.comms(
            Collective.BROADCAST, 1, "pp", phase=phase, module="tokens", dtype=DType.INT32
        )
        found += _small(plan, "dp_cp", "tokens", RedOp.SUM, dtype=DType.INT32, phase=phase)
    return found


def _update(plan: Plan, owned: Owned) -> list[Operation]:
    """ChainedOptimizer.step: one optimizer of dense parameters, one of experts' with ep."""
    sharded = plan.settings.use_distributed_optimizer
    kinds = sorted({bucket.expert for bucket in owned.all_buckets})
    norm_groups = ["expt_tp_pp" if expert else "mp" for expert in kinds]
    if sharded:
        norm_groups = ["intra_dist_opt" for _ in kinds]
    found: list[Operation] = []
    if plan.job.dtype is DType.FP16:
        for group in norm_groups:
            found += _small(plan, group, "overflow", RedOp.MAX)
    for group in dict.fromkeys(norm_groups):
        found += _small(plan, group, "gradient_norm", RedOp.SUM)
    gathers = sharded and not plan.settings.overlap_param_gather
    for expert in kinds:
        found.append(_adam(plan, owned, expert))
        # Each optimizer gathers all buckets of the chunks, those of the other one too.
        for bucket in owned.all_buckets if gathers else ():
            found += gather(plan, bucket)
    return found


def _adam(plan: Plan, owned: Owned, expert: bool) -> ComputeOp:
    """Over this rank's share of parameters, in fp32."""
    held = [bucket for bucket in owned.all_buckets if bucket.expert is expert]
    count = sum(bucket.count for bucket in held)
    if plan.settings.use_distributed_optimizer:
        ranks = plan.size("intra_expt_dp" if expert else "intra_dp_cp")
        count = sum(bucket.padded for bucket in held) // ranks
    return ComputeOp(
        op=Optimizer(num_params=max(1, count), kind="adamw", dtype=DType.FP32),
        phase=Phase.OPTIM,
        module="optimizer.experts" if expert else "optimizer",
    )


def _reports(plan: Plan, owned: Owned) -> list[Operation]:
    """train_step and training_log: success, gradient norm, loss, learning rate."""
    found: list[Operation] = []
    found += _small(plan, "mp", "success", RedOp.MIN, dtype=DType.INT32)
    found += _small(plan, "mp", "gradient_norm", RedOp.MAX)
    if owned.is_last:
        found += _small(plan, "dp_cp", "loss", RedOp.SUM, count=2)
    found += _small(plan, "mp", "learning_rate", RedOp.MAX)
    return found
