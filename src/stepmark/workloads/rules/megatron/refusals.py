"""What Megatron-LM refuses of a plan, and what these rules do not have."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepmark.ground.dtypes import DType
from stepmark.model.model import ModelConfig
from stepmark.workloads.rules.megatron import deepep
from stepmark.workloads.rules.megatron.narrow import Fp8Format, Fp8Recipe
from stepmark.workloads.rules.megatron.settings import (
    STORED_SCORES,
    AttentionBackend,
    CpComm,
    Dispatcher,
    Granularity,
)

if TYPE_CHECKING:
    from stepmark.workloads.rules.megatron.plan import Plan

_Refusal = tuple[object, str, object, str]  # of job.refuse_first


def refusals(plan: "Plan") -> Iterator[_Refusal]:
    """Yield conditions with the field, its value and what it must be, for refuse_first."""
    yield from _layout_refusals(plan)
    yield from _technique_refusals(plan)
    yield from deepep.refusals(plan)
    yield from _imbalance_refusals(plan)


def _layout_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    """Return the refusals of a model and of what does not divide it."""
    settings = plan.settings
    model = plan.model
    parallel = plan.job.parallel
    shared = parallel.cp * parallel.tp
    data_ranks = parallel.data_ranks
    width = model.moe.ffn_hidden_size if model.moe else 0
    kv_width = 0 if model.mla else 2 * model.num_kv_heads * model.head_dim
    return (
        (
            kv_width % parallel.tp,
            "tp",
            parallel.tp,
            f"a divisor of the rows of keys and values ({kv_width})",
        ),
        (
            model.attention_bias and not (model.linear_bias or "experts" in model.biases),
            "attention_bias",
            True,
            "false: Megatron-LM has biases of q, k and v alone, or of all linear layers"
            " (--linear-bias, or with experts also of these)",
        ),
        *_pattern_refusals(plan.model),
        (
            model.moe and parallel.tp > 1 and not settings.sequence_parallel,
            "sequence_parallel",
            False,
            "true for a model with experts and tp > 1",
        ),
        (
            plan.sequence_parallel and model.seq_len % shared,
            "seq-len",
            model.seq_len,
            f"a multiple of cp x tp ({shared})",
        ),
        (
            parallel.dp_replicate > 1 and not settings.use_distributed_optimizer,
            "dp-replicate",
            parallel.dp_replicate,
            f"1 without use_distributed_optimizer: give that, or dp-shard {data_ranks}",
        ),
        (
            width % plan.etp,
            "expert_tensor_parallel_size",
            plan.etp,
            f"a divisor of the experts' width ({width})",
        ),
        *_gradient_refusals(plan),
    )


def _pattern_refusals(model: ModelConfig) -> tuple[_Refusal, ...]:
    """Return the refusals of layers that Megatron-LM does not have."""
    mixers = {layer.mixer for layer in model.pattern}
    some_biases = set(model.biases) not in (set(), {"experts", "router"})
    return tuple(
        (is_there, "model", model.name, f"one without {what}, which megatron does not have")
        for is_there, what in (
            (model.is_parallel, "attention and FFN of one input"),
            (model.norm_placement in ("post", "shared"), "norms only after attention and FFN"),
            ("layernorm_" in model.norm, "a LayerNorm without weight or bias"),
            (model.embedding_norm, "a norm of the embedding"),
            ("lightning" in mixers, "Lightning Attention"),
            ("conv" in mixers, "short convolutions"),
            ("attention+mamba" in mixers, "attention and Mamba in one layer"),
            (
                any(model.of_layer(layer).shares_kv for layer in model.pattern),
                "values that are keys",
            ),
            (model.activation == "xielu", "xIELU"),
            (_has_other_layer_norms(model), "layer norms of queries and keys of another kind"),
            (model.v_norm, "normed values"),
            (model.value_head_dim > 0, "values of another width than keys"),
            (model.value_multiplier != 1, "scaled values"),
            (not all(layer.has_sinks for layer in model.pattern), "sinks in some layers alone"),
            (
                any(layer.rotary_dim for layer in model.pattern),
                "rotated widths of single layers",
            ),
            (model.layer_scale, "scaled layers"),
            (model.per_layer_width > 0, "embeddings per layer"),
            (
                not all(layer.has_kv for layer in model.pattern),
                "layers that share keys and values",
            ),
            (model.moe is not None and model.moe.has_norms, "norms of experts"),
            (model.gate == "head", "a gate per head"),
            (model.residual_multiplier != 1, "scaled residuals"),
            (some_biases, "biases of single kinds of linear layers"),
        )
    )


def _has_other_layer_norms(model: ModelConfig) -> bool:
    """Return whether norms of queries and keys are not of the kind of all norms."""
    is_own = model.qk_norm_kind == "layernorm" and model.norm != "layernorm"
    return model.qk_norm and (is_own or model.qk_norm_kind == "layernorm_each")


def _gradient_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    """Return the refusals of a type of gradients."""
    settings = plan.settings
    dtype = plan.job.dtype
    return (
        (
            settings.grad_reduce_in_bf16 and dtype is not DType.BF16,
            "grad_reduce_in_bf16",
            True,
            "only with bf16",
        ),
        (
            not settings.accumulate_allreduce_grads_in_fp32 and dtype is not DType.FP16,
            "accumulate_allreduce_grads_in_fp32",
            False,
            "true without fp16; with bf16 grad_reduce_in_bf16 is for that",
        ),
    )


def _technique_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    """Return the refusals of recompute, overlaps and adapters."""
    settings = plan.settings
    return (
        (
            "mla_up_proj" in settings.modules and plan.model.mla is None,
            "recompute_modules",
            "mla_up_proj",
            "left out for a model without latent attention",
        ),
        (
            settings.moe_shared_expert_overlap
            and settings.moe_token_dispatcher_type is not Dispatcher.ALLTOALL,
            "moe_shared_expert_overlap",
            True,
            "only with moe_token_dispatcher_type alltoall",
        ),
        (
            settings.moe_shared_expert_overlap
            and plan.has_shared_experts
            and "shared_experts" in settings.modules,
            "moe_shared_expert_overlap",
            True,
            "only without shared_experts in recompute_modules",
        ),
        *_backend_refusals(plan),
        *_userbuffer_refusals(plan),
        *_lora_refusals(plan),
        *_combined_refusals(plan),
        *_mtp_refusals(plan),
        *_exchange_refusals(plan),
    )


def _imbalance_refusals(plan: "Plan") -> Iterator[_Refusal]:
    """Yield an imbalance of experts that all get their capacity."""
    imbalance = plan.job.imbalance
    is_padded = imbalance > 1 and plan.settings.moe_pad_expert_input_to_capacity
    allowed = "1 with moe_pad_expert_input_to_capacity, with which all experts are full"
    yield is_padded, "imbalance", imbalance, allowed


def _exchange_refusals(plan: "Plan") -> Iterator[_Refusal]:
    """Yield what TransformerEngine refuses with cp (attn_forward_func_with_cp)."""
    cp = plan.job.parallel.cp
    kind = plan.settings.cp_comm_type
    if cp == 1 or kind is CpComm.P2P:
        return
    model = plan.model
    if model.d_qk != model.d_v:
        yield True, "cp_comm_type", kind, "p2p where values are narrower than keys"
    heads, kv_heads = model.num_heads // plan.tp, plan.tree.kv_heads
    if kind is CpComm.A2A and (heads % cp or kv_heads % cp):
        rule = f"a divisor of a rank's heads ({heads}) and kv_heads ({kv_heads}) with a2a"
        yield True, "cp", cp, rule


def _mtp_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    """Return what Megatron-LM refuses with multi-token prediction, and what is not modelled."""
    model = plan.model
    settings = plan.settings
    parallel = plan.job.parallel
    if not model.num_mtp_layers:
        return ()
    what = "with multi-token prediction"
    fp8 = settings.fp8_format is not Fp8Format.NONE
    is_delayed = fp8 and settings.fp8_recipe is Fp8Recipe.DELAYED
    is_full = settings.recompute_granularity is Granularity.FULL
    count = settings.recompute_num_layers
    # An assertion of _checkpointed_forward.
    is_several = is_full and settings.recompute_method == "uniform" and count > 1
    combined = "overlap_moe_expert_parallel_comm"
    return (
        (model.max_positions, "max_positions", model.max_positions, f"0 (rotary) {what}"),
        (
            model.tied_embeddings and parallel.pp > 1,
            "pp",
            parallel.pp,
            f"1 {what} and tied embeddings (megatron-core keeps an unused head there)",
        ),
        (is_several, "recompute_num_layers", count, f"1 {what} and uniform recompute"),
        (parallel.cp > 1, "cp", parallel.cp, f"1 {what} (its messages are not modelled)"),
        (plan.lora is not None, "lora_rank", settings.lora_rank, f"left out {what}"),
        (
            is_delayed,
            "fp8_recipe",
            settings.fp8_recipe,
            f"tensorwise, blockwise or mxfp8 {what} (other reductions are not modelled)",
        ),
        (settings.tp_comm_overlap, "tp_comm_overlap", True, f"false {what} (not modelled)"),
        (
            settings.overlap_moe_expert_parallel_comm,
            combined,
            True,
            f"false {what} (not modelled)",
        ),
    )


def _backend_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    """Return what attention with stored scores, and layers without TransformerEngine, lack."""
    settings = plan.settings
    backend = settings.attention_backend
    if backend not in STORED_SCORES:
        return ()
    is_local = backend is AttentionBackend.LOCAL
    name = "attention_backend"
    return (
        (plan.job.parallel.cp > 1, name, backend, "auto, flash or fused with cp > 1"),
        (
            is_local and (settings.tp_comm_overlap or plan.job.products is not None),
            name,
            backend,
            "auto, flash, fused or unfused with narrow products or tp_comm_overlap, which"
            " are TransformerEngine's",
        ),
    )


def _userbuffer_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    settings = plan.settings
    if not settings.tp_comm_overlap:
        return ()
    hidden = plan.model.hidden_size
    name = "tp_comm_overlap"
    return (
        (not plan.sequence_parallel, name, True, "only with sequence_parallel and tp > 1"),
        (
            plan.model.mla,
            name,
            True,
            "false with latent attention, whose products TransformerEngine has no buffers for",
        ),
        (hidden % 4, name, True, f"only with a hidden size that 4 divides, not {hidden}"),
    )


def _lora_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    lora = plan.lora
    if lora is None:
        return ()
    return (
        (lora.rank % plan.tp, "lora_rank", lora.rank, f"a multiple of tp ({plan.tp})"),
        (plan.model.moe, "lora_rank", lora.rank, "left out for a model with experts"),
        (plan.model.mla, "lora_rank", lora.rank, "left out for latent attention"),
        (
            plan.settings.tp_comm_overlap,
            "tp_comm_overlap",
            True,
            "false with lora_rank: adapters need the gathered input",
        ),
    )


def _combined_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    """Return what TransformerConfig refuses with overlap_moe_expert_parallel_comm."""
    name = "overlap_moe_expert_parallel_comm"
    settings = plan.settings
    parallel = plan.job.parallel
    if not settings.overlap_moe_expert_parallel_comm:
        delays = settings.delay_wgrad_compute
        return ((delays, "delay_wgrad_compute", True, f"only with {name}"),)
    one_chunk = settings.virtual_pipeline_model_parallel_size == 1
    is_full = settings.recompute_granularity is Granularity.FULL
    has_other = settings.moe_token_dispatcher_type is Dispatcher.ALLGATHER
    return (
        (parallel.ep == 1, name, True, "only with ep > 1"),
        (parallel.pp > 1 and one_chunk, name, True, "only with vpp > 1 where pp > 1"),
        (has_other, name, True, "only with moe_token_dispatcher_type alltoall or flex"),
        (is_full, name, True, "only without full recompute"),
        # The pieces do not call MoELayer.forward, which would recompute.
        ("moe" in settings.modules, name, True, "only without moe in recompute_modules"),
        (plan.job.dtype is DType.FP32, name, True, "only with bf16 or fp16"),
        (
            settings.moe_shared_expert_overlap,
            name,
            True,
            "only without moe_shared_expert_overlap",
        ),
    )
