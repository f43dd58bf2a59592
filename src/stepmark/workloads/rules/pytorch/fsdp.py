"""FSDP2: fully_shard on every block and on the root, optionally with tp, cp, ep and pp.

Follows torch 2.13.0, torch/distributed/fsdp/_fully_shard. Weights are sharded over dp_shard x
cp, and over dp_shard x cp / ep those of experts (torchtitan, distributed/parallel_dims.py).
"""

from stepmark.cases.training import GradSync
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.step.module import Param
from stepmark.step.workload import Group
from stepmark.workloads.architecture import AnyJob
from stepmark.workloads.job import Comms, refuse_first
from stepmark.workloads.rules.pytorch.fsdp_order import reshard_ranks
from stepmark.workloads.rules.pytorch.fsdp_recorder import Sharding
from stepmark.workloads.rules.pytorch.settings import PyTorch
from stepmark.workloads.rules.pytorch.units import groups_of

SMALLER_MESH = "yes or no, where experts are fewer than their shards: torch cannot gather them"


def sharding_of(job: AnyJob, settings: PyTorch) -> Sharding:
    """Return how weights, gradients and optimizer are sharded. Raises ConfigError."""
    groups = groups_of(job)
    shards = groups["fsdp"].size
    reshard = _reshard(settings.resharding(job.parallel.pp), shards)
    if reshard:
        groups |= _inner(job, groups, reshard)
    layers = -(-job.num_layers // job.parallel.pp)
    syncs_last = settings.grad_sync is GradSync.LAST
    refuse_first(
        (
            settings.blocks_per_group > layers,
            "blocks_per_group",
            settings.blocks_per_group,
            f"at most {layers} layers of a stage",
        ),
        (  # stage.py, backward_maybe_with_nosync and perform_reduce_grad
            syncs_last and job.parallel.pp > 1,
            "grad_sync",
            GradSync.LAST,
            "every with a pipeline, whose schedule reduces once per pass through it",
        ),
    )
    return Sharding(
        comms=Comms(groups=groups, dtype=job.dtype),
        gathered=settings.param_dtype or DType.BF16,
        reduced=settings.reduce_dtype,
        narrow=job.products.dtype if settings.fp8_all_gather and job.products else None,
        reshard=reshard,
        accumulates=(syncs_last and job.num_microbatches > 1) or job.parallel.pp > 1,
    )


def _reshard(text: str, shards: int) -> int | None:
    """Return the ranks to reshard over. Raises ConfigError."""
    smaller = [n for n in range(2, shards) if shards % n == 0]
    if text not in ("yes", "no") and not (text.isdecimal() and int(text) in smaller):
        allowed = ", ".join(map(str, ("yes", "no", *smaller)))
        raise ConfigError(
            "reshard_after_forward", text, f"one of {allowed} for {shards} shards"
        )
    return reshard_ranks(text)


def _inner(job: AnyJob, groups: dict[str, Group], reshard: int) -> dict[str, Group]:
    """Return groups of consecutive ranks from which resharded weights are gathered."""
    axes = job.parallel
    inner = {"fsdp_inner": Group(digits=((reshard, axes.tp),))}
    same = groups["expert_fsdp"].size
    if job.config and divides_experts(job.config, axes.ep, same):
        raise ConfigError("reshard_after_forward", reshard, SMALLER_MESH)
    if axes.ep > 1:
        if same % reshard:
            raise ConfigError(
                "reshard_after_forward", reshard, f"a divisor of {same} shards of experts"
            )
        inner["expert_fsdp_inner"] = Group(digits=((reshard, axes.tp * axes.ep),))
    return inner


def divides_experts(model: ModelConfig, ep: int, shards: int) -> bool:
    """Return whether shards are rows of each expert. Raises ConfigError where torch would."""
    moe = model.moe
    if moe is None:
        return False
    params = (
        Param(name="expert", shape=(moe.num_experts // ep, rows), is_expert=True)
        for rows in (moe.ffn_hidden_size, moe.latent_size or model.hidden_size)
    )
    return max([param.shard_dim(shards) for param in params]) > 0
