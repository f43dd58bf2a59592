"""Bytes that a module keeps of a micro-batch, from its forward to its backward pass.

Sources: those of step_memory/megatron_memory.py, whose activations are the sum over modules.
"""

from typing import TYPE_CHECKING

from stepmark.ground.dtypes import DType
from stepmark.step.fp8_attention import saved_bytes as saved_fp8_bytes
from stepmark.step.module import Module
from stepmark.workloads.rules.megatron import narrow

if TYPE_CHECKING:
    from stepmark.workloads.rules.megatron.plan import Plan

_FP32 = DType.FP32.itemsize
# Their input is a norm's output, whose rows sequence parallelism divides.
_UP_PROJECTIONS = ("attention.q_up", "attention.kv_up")


def saved_bytes(plan: "Plan", leaf: Module) -> int:
    """Return the bytes that a module keeps of a micro-batch.

    A product keeps its input for the gradient of its weight, in its own type; attention keeps
    its output for itself, too. A frozen one without an adapter keeps nothing.
    """
    model = plan.model
    keeps = leaf.keeps
    itemsize = plan.job.dtype.itemsize
    part = plan.tokens / plan.tp
    divided = keeps.divided
    param = next(iter(leaf.params), None)
    is_own = leaf.role in _UP_PROJECTIONS or (param is not None and param.is_partial)
    rows = plan.own_tokens if is_own else part
    if leaf.role == "attention.core":
        # Keys and values of other ranks of cp are not saved; tp ranks share heads they repeat.
        others = plan.job.parallel.cp - 1
        repeated = 0 if model.mla else max(0, plan.tp - model.num_kv_heads)
        divided -= (others * model.num_kv_heads - repeated) * (model.d_qk + model.d_v)
    elif param is not None and param.is_expert and divided:
        assert model.moe is not None
        rows = plan.expert_rows * plan.etp / model.moe.top_k
        divided = model.moe.top_k * model.hidden_size
        if leaf.is_row:
            divided = model.moe.top_k * param.shape[-1]
    elif leaf.role == "mlp.experts_activation":
        assert model.moe is not None
        rows = plan.expert_rows / model.moe.top_k
    statistics = int(_FP32 * keeps.statistics * (plan.own_tokens if is_own else part))
    statistics += keeps.masks * plan.own_tokens + int(keeps.divided_masks * part)
    numel = int(keeps.whole * plan.own_tokens + divided * rows)
    products = plan.job.products
    if leaf.role == "attention.core" and products is not None and products.attention:
        output = int(model.num_heads * model.d_v * part)
        return saved_fp8_bytes(numel, output, products.attention) + statistics
    if not (leaf.is_linear or (param is not None and param.is_expert)):
        return itemsize * numel + statistics
    # Attention in bf16 keeps its output itself, as well as the product its cast.
    is_shared = leaf.role == "attention.out" and not (products and products.attention)
    output = itemsize * numel if is_shared else 0
    if not (leaf.inside or any(each.is_trained for each in leaf.params)):
        return output
    if products is not None and narrow.is_narrow(leaf):
        return output + products.gathered_bytes(numel)
    return itemsize * numel
