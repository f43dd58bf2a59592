"""Products in FP8, MXFP8 and NVFP4: settings, gathers, casts, maxima of delayed scaling.

TransformerEngine's layers multiply so: those of attention, MLPs and experts. The router, the
head and the embedding are no such layers. Sources: megatron-core 0.16.1, fp8_utils.py
(get_fp8_context, is_first_last_bf16_layer, quantize_param_shard), fp4_utils.py,
transformer/transformer_block.py (one context around all layers with delayed scaling, else one
around each), distributed/param_and_grad_buffer.py (fp8 parameters have buffers of their own),
parallel_state.py (get_amax_reduction_group); TransformerEngine 2.11, pytorch/module/linear.py
and base.py (a tensor is cast before it is gathered), pytorch/quantization.py
(reduce_and_update_fp8_tensors). Read, not compared with a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.ops import GroupedGemm, Phase, Scaling
from stepmark.model.ops.matmul import BLOCK
from stepmark.model.product_precision import ProductPrecision, Recipe, by_recipe
from stepmark.step.layout import cast_kernel, is_cast
from stepmark.step.module import Module
from stepmark.step.workload import CommOp, ComputeOp
from stepmark.workloads.job import refuse_first

if TYPE_CHECKING:
    from stepmark.workloads.rules.megatron.plan import Plan
    from stepmark.workloads.rules.megatron.settings import Megatron


class Fp8Format(StrEnum):
    """Types of FP8 tensors. hybrid: gradients of outputs in e5m2, all others in e4m3."""

    NONE = "none"
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Fp8Recipe(StrEnum):
    """Scaling of FP8 tensors."""

    DELAYED = "delayed"
    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"


class Fp4Format(StrEnum):
    """Types of FP4 tensors."""

    NONE = "none"
    E2M1 = "e2m1"


class Fp4Recipe(StrEnum):
    """Scaling of FP4 tensors."""

    NVFP4 = "nvfp4"


# Settings that --precision stands for. hybrid is the default of TransformerEngine's recipes.
BY_PRECISION: Mapping[str, Mapping[str, str]] = {
    "bf16": {"fp8_format": "none", "fp4_format": "none"},
    "fp8": {"fp8_format": "hybrid", "fp4_format": "none"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp4_format": "none"},
    "nvfp4": {"fp8_format": "none", "fp4_format": "e2m1"},
}


def products_of(settings: "Megatron") -> ProductPrecision | None:
    """Return the products of TransformerEngine's layers; None: they are in bf16.

    Weights are cast in the first micro-batch of a step, whose later ones use them again
    (is_first_microbatch).
    """
    recipe = Recipe(settings.fp8_recipe.value)
    if settings.fp4_format is not Fp4Format.NONE:
        recipe = Recipe.NVFP4
    elif settings.fp8_format is Fp8Format.NONE:
        return None
    return by_recipe(
        recipe,
        is_hybrid=settings.fp8_format is Fp8Format.HYBRID,
        casts_weights=False,
        casts_shards=True,
        attention=recipe if has_fp8_attention(settings) else None,
    )


def has_fp8_attention(settings: "Megatron") -> bool:
    """Return whether attention is in FP8.

    fp8_multi_head_attention makes TransformerEngine's attention do so, too
    (dot_product_attention.py, forward). Only its MultiheadAttention also lets linear layers
    write FP8, and megatron-core has its own.
    """
    return settings.fp8_dot_product_attention or settings.fp8_multi_head_attention


def check(settings: "Megatron") -> None:
    """Raise ConfigError for settings that Megatron-LM refuses, or that have no effect.

    Source: validate_args of megatron/training/arguments.py and
    TransformerConfig.__post_init__ of core_v0.16.1.
    """
    has_fp8 = settings.fp8_format is not Fp8Format.NONE
    has_fp4 = settings.fp4_format is not Fp4Format.NONE
    is_delayed = has_fp8 and settings.fp8_recipe is Fp8Recipe.DELAYED
    is_per_tensor = is_delayed or (has_fp8 and settings.fp8_recipe is Fp8Recipe.TENSORWISE)
    ends = settings.first_last_layers_bf16
    rerun = [word for word in ("moe_act", "layernorm") if word in settings.modules]
    refuse_first(
        (has_fp8 and has_fp4, "fp4_format", settings.fp4_format, "none with fp8_format"),
        (
            settings.fp8_param_gather and not has_fp8,
            "fp8_param_gather",
            True,
            "only with fp8_format",
        ),
        (
            settings.fp8_param_gather and not settings.use_distributed_optimizer,
            "fp8_param_gather",
            True,
            "only with use_distributed_optimizer",
        ),
        # get_fp8_recipe of fp8_utils.py hands them to these recipes only.
        (
            settings.fp8_dot_product_attention and not is_per_tensor,
            "fp8_dot_product_attention",
            True,
            "only with fp8_format and fp8_recipe delayed or tensorwise",
        ),
        (
            settings.fp8_multi_head_attention and not is_delayed,
            "fp8_multi_head_attention",
            True,
            "only with fp8_format and fp8_recipe delayed; tensorwise has"
            " fp8_dot_product_attention",
        ),
        (
            ends and not (has_fp8 or has_fp4),
            "first_last_layers_bf16",
            True,
            "only with fp8_format or fp4_format",
        ),
        (
            ends and is_delayed,
            "first_last_layers_bf16",
            True,
            "only with an fp8_recipe other than delayed",
        ),
        (
            is_delayed and bool(rerun),
            "recompute_modules",
            ",".join(rerun),
            "others with delayed scaling, which cannot recompute it",
        ),
    )


def check_layers(settings: "Megatron", num_layers: int, pp: int) -> None:
    """Raise ConfigError for more layers in bf16 than a pipeline stage has."""
    if not settings.first_last_layers_bf16:
        return
    most = num_layers // pp
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if not 0 <= getattr(settings, name) <= most:
            allowed = f"from 0 to the layers of a stage ({most})"
            raise ConfigError(name, getattr(settings, name), allowed)


def is_bf16_layer(settings: "Megatron", layer: int, num_layers: int) -> bool:
    """Return whether a layer stays in bf16 among narrow ones."""
    first = settings.num_layers_at_start_in_bf16
    last = num_layers - settings.num_layers_at_end_in_bf16
    return settings.first_last_layers_bf16 and (layer < first or layer >= last)


def is_narrow(leaf: Module) -> bool:
    """Return whether a module's products are narrow: its input is cast."""
    return any(map(is_cast, leaf.fwd))


def gathered(
    products: ProductPrecision | None,
    leaf: Module,
    elements: int,
    ranks: int,
    *,
    num_layouts: int = 1,
) -> dict[str, Any]:
    """Return the size and type of a gather over tp of a module's input or output gradient.

    What is cast before is sent as bytes (pytorch/distributed.py, gather_along_first_dim).
    num_layouts: that the next products read. Where factors are per tensor one is sent, of which
    the other is the transpose.
    """
    if products is None or not is_narrow(leaf):
        return {"elements": elements}
    if products.scaling is Scaling.TENSORWISE:
        num_layouts = 1
    num_bytes = num_layouts * ranks * products.gathered_bytes(elements // ranks)
    return {"elements": num_bytes, "dtype": DType.UINT8}


def cast_amax(plan: "Plan", leaf: Module, phase: Phase) -> tuple[CommOp, ...]:
    """Return the maximum over tp of a tensor's magnitudes, before its shards are cast.

    Tensorwise scaling has one number, NVFP4 one per layout, as that along columns is of what
    the Hadamard transform returns (pytorch/module/linear.py,
    _customize_quantizers_float8_current_scaling and _customize_quantizers_nvfp4;
    pytorch/csrc/quantizer.cpp, quantize_impl). MXFP8 and blocks have no number of the tensor.
    """
    products = plan.job.products
    if products is None or not is_narrow(leaf) or not plan.sequence_parallel:
        return ()
    count = 1
    if products.dtype is DType.NVFP4:
        is_trained = any(param.is_trained for param in leaf.params)
        count = 2 if is_trained or phase is not Phase.FWD else 1
    elif plan.settings.fp8_recipe is not Fp8Recipe.TENSORWISE:
        return ()
    return plan.inside(
        Collective.ALL_REDUCE,
        count,
        "tp",
        phase,
        leaf.role,
        DType.FP32,
        redop=RedOp.MAX,
    )


def num_scaled(plan: "Plan", leaves: Iterable[Module]) -> int:
    """Return the products of a layer whose tensors have factors of earlier steps.

    With delayed scaling these are the products of linear layers, and each expert's own.
    TransformerEngine's attention has as many numbers as three of them, in bf16, too: its
    prepare_forward registers them whether they are used or not (dot_product_attention.py,
    forward, num_gemms=3). With tensorwise scaling attention in FP8 has those of one product,
    for its probabilities and their gradients (set_meta_tensor).
    """
    products = plan.job.products
    if products is None or products.dtype.is_block_format:
        return 0
    is_delayed = plan.settings.fp8_recipe is Fp8Recipe.DELAYED
    of_attention = 3 if is_delayed else int(products.attention is not None)
    count = 0
    for leaf in leaves:
        if leaf.role in _ATTENTION:
            count += of_attention
        elif is_delayed and is_narrow(leaf):
            count += sum(
                op.op.num_groups if isinstance(op.op, GroupedGemm) else 1
                for op in leaf.fwd
                if not is_cast(op)
            )
    return count


# The first module of attention, fused or with stored scores.
_ATTENTION = ("attention.core", "attention.scores")


def amax(plan: "Plan", count: int, phase: Phase) -> tuple[CommOp, ...]:
    """Return the maximum over ranks of the magnitudes that delayed scaling has seen.

    count: of the products of a rank, each with 3 tensors forward and 2 backward
    (TransformerEngine, pytorch/module/base.py, set_meta_tensor). All are reduced in fp32 where
    a region of FP8 ends forward, and where the first of its linear layers ends backward: with
    delayed scaling a region is a chunk, with tensorwise scaling a layer.
    """
    if not count:
        return ()
    return plan.comms(
        Collective.ALL_REDUCE,
        count * (3 if phase is Phase.FWD else 2),
        "tp_cp" if plan.settings.tp_only_amax_red else "tp_dp_cp",
        phase,
        "amax",
        DType.FP32,
        microbatch=0,
        redop=RedOp.MAX,
    )


def weight_casts(
    plan: "Plan", counts: Sequence[int], group: str
) -> tuple[ComputeOp | CommOp, ...]:
    """Return the casts of a step's narrow weights. counts: elements of each on this rank.

    With fp8_param_gather a rank of the group casts its shard before the gather, by the largest
    magnitudes of whole weights or of their blocks of 128 x 128, which the group reduces
    (TransformerEngine, pytorch/tensor/utils.py, cast_master_weights_to_fp8). MXFP8 parameters
    are gathered in bf16 and cast whole (param_and_grad_buffer.py, shared_buffer).
    """
    products = plan.job.products
    total = sum(counts)
    if products is None or not total:
        return ()
    num_bytes = products.cast_bytes(total, is_weight=True)
    reduced: tuple[CommOp, ...] = ()
    if gathers_fp8(plan):
        shard = total // plan.size(group)
        num_bytes = products.cast_bytes(shard, gathered=total, is_weight=True)
        by_block = products.scaling is Scaling.BLOCKWISE
        reduced = plan.comms(
            Collective.ALL_REDUCE,
            sum(-(-count // BLOCK**2) for count in counts) if by_block else len(counts),
            group,
            Phase.OPTIM,
            "amax",
            DType.FP32,
            redop=RedOp.MAX,
        )
    cast = ComputeOp(op=cast_kernel(num_bytes), phase=Phase.OPTIM, module="parameters")
    return (*reduced, cast)


def gathers_fp8(plan: "Plan") -> bool:
    """Return whether parameters of narrow products are gathered in FP8."""
    settings = plan.settings
    return settings.fp8_param_gather and settings.fp8_recipe is not Fp8Recipe.MXFP8
