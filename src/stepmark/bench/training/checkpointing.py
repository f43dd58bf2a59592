"""Activation checkpointing: which blocks compute their activations again, and which of them."""

from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from stepmark.core.train_case import TrainCase
from stepmark.core.training import Recompute

_PRODUCTS = ("mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")


def apply(blocks: nn.ModuleDict, case: TrainCase) -> None:
    """Wrap the blocks that case.is_checkpointed names, in place."""
    for name, block in list(blocks.items()):
        if not case.is_checkpointed[int(name)]:
            continue
        if case.recompute is Recompute.OPS:
            wrapped = checkpoint_wrapper(block, context_fn=_selective, preserve_rng_state=False)
        else:
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        blocks[name] = wrapped


def _selective() -> Any:
    """Attention, communication and every second product are kept, the rest computed again.

    The policy of torchtitan's selective checkpointing: what costs most per byte is kept.
    """
    seen = {False: 0, True: 0}  # products in the forward pass and in its repetition

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name, _, overload = str(op).partition(".")[2].partition(".")
        namespace = str(op).partition(".")[0]
        keep = namespace in ("c10d", "_c10d_functional") or "attention" in name
        if name in _PRODUCTS and overload in ("default", ""):
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
