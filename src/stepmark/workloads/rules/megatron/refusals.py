"""What Megatron-LM refuses of a plan, and what these rules do not have."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepmark.ground.dtypes import DType
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Scaling
from stepmark.workloads.rules.megatron import activation_offload, deepep
from stepmark.workloads.rules.megatron.narrow import Fp8Format, Fp8Recipe, has_fp8_attention
from stepmark.workloads.rules.megatron.settings import (
    STORED_SCORES,
    AttentionBackend,
    CpComm,
    Dispatcher,
    Granularity,
    MuonTpMode,
)

if TYPE_CHECKING:
    from stepmark.workloads.rules.megatron.plan import Plan

_Refusal = tuple[object, str, object, str]  # of job.refuse_first


def refusals(plan: "Plan") -> Iterator[_Refusal]:
    """Yield conditions with the field, its value and what it must be, for refuse_first."""
    yield from _layout_refusals(plan)
    yield from _technique_refusals(plan)
    yield from deepep.refusals(plan)
    yield from activation_offload.refusals(plan)
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
        *_fp8_attention_refusals(plan),
        *_userbuffer_refusals(plan),
        *_lora_refusals(plan),
        *_combined_refusals(plan),
        *_mtp_refusals(plan),
        *_exchange_refusals(plan),
        *_muon_refusals(plan),
        *_packing_refusals(plan),
    )


def _muon_refusals(plan: "Plan") -> Iterator[_Refusal]:
    """Yield what Megatron-LM's Muon does not take, and what is not modelled with it."""
    settings = plan.settings
    if not settings.optimizer.is_muon:
        return
    model = plan.model
    words = (
        (plan.job.dtype is DType.FP16, "without fp16"),  # get_megatron_muon_optimizer
        (plan.lora is not None, "without lora_rank: adapters are not modelled with it"),
        (
            any(layer.mixer != "attention" for layer in model.pattern),
            "for a model of attention layers: parameters of others are not modelled with it",
        ),
    )
    for is_there, allowed in words:
        yield is_there, "optimizer", settings.optimizer, f"only {allowed}"
    mode = settings.muon_tp_mode
    if mode is not MuonTpMode.BLOCKWISE:
        # TransformerEngine marks weights that tp does not divide as divided.
        yield model.mla, "muon_tp_mode", mode, "blockwise with latent attention"
        is_apart = model.moe and (plan.etp > 1 or mode is MuonTpMode.DISTRIBUTED)
        yield is_apart, "muon_tp_mode", mode, "blockwise with experts whose weights tp divides"
    splits = settings.muon_split_qkv and not model.mla
    unsplit = splits and (model.num_kv_heads % plan.tp or model.gate or model.d_v != model.d_qk)
    yield (
        unsplit,
        "muon_split_qkv",
        True,
        "false where tp does not divide the heads of keys, or with gates of attention",
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
    model = plan.model
    if cp == 1:
        return
    has_windows = any(0 < layer.window < model.seq_len for layer in model.pattern)
    in_ring = kind in (CpComm.P2P, CpComm.A2A_P2P)
    if has_windows and in_ring:
        yield True, "cp_comm_type", kind, "a2a or all_gather with sliding windows"
    if model.has_sinks and kind is not CpComm.A2A:
        yield True, "cp_comm_type", kind, "a2a with attention sinks"
    backend = plan.settings.attention_backend
    if model.has_sinks and backend is AttentionBackend.FLASH:
        yield True, "attention_backend", backend, "auto or fused with attention sinks and cp"
    if model.packing is not None and kind is not CpComm.P2P:
        yield True, "cp_comm_type", kind, "p2p with packing"
    if kind is CpComm.P2P:
        return
    name, parts = "cp", cp
    if kind is CpComm.A2A_P2P:
        name, parts = "hierarchical_context_parallel_sizes", plan.size("cp_a2a")
    for own in map(model.of_layer, model.pattern):
        if own.d_qk != own.d_v and not in_ring:
            yield True, "cp_comm_type", kind, "p2p where values are narrower than keys"
        heads, kv_heads = own.num_heads // plan.tp, max(1, own.num_kv_heads // plan.tp)
        if kind is not CpComm.ALL_GATHER and (heads % parts or kv_heads % parts):
            rule = f"a divisor of a rank's heads ({heads}) and kv_heads ({kv_heads}) with a2a"
            yield True, name, parts, rule


def _packing_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    """Return what packed sequences (thd) cannot be with.

    Sources: an assertion of get_batch_on_this_tp_rank (training/utils.py), and of SFTDataset
    (training/datasets/sft_dataset.py), which pads pieces to a multiple of 2 x cp;
    dot_product_attention.py; TransformerEngine 2.9, get_attention_backend.
    """
    model = plan.model
    packing = model.packing
    if packing is None:
        return ()
    mbs = plan.job.mbs
    backend = plan.settings.attention_backend
    parts = 2 * plan.job.parallel.cp
    has_mask = plan.settings.create_attention_mask_in_dataloader
    what = "with packing"
    rule = f"with cp > 1, a greatest length that is a multiple of 2 x cp ({parts})"
    return (
        (mbs > 1, "mbs", mbs, f"1 {what}"),
        (has_mask, "create_attention_mask_in_dataloader", True, f"false {what}"),
        (
            backend in STORED_SCORES,
            "attention_backend",
            backend,
            f"auto, flash or fused {what}",
        ),
        (model.has_sinks, "packing", packing.text, "left out with attention sinks"),
        (parts > 2 and packing.longest % parts, "packing", packing.text, rule),
    )


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


def _fp8_attention_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    """Return what TransformerEngine has no FP8 attention for, and what is not modelled.

    TransformerEngine 2.11, pytorch/attention/dot_product_attention/utils.py
    (get_attention_backend); common/fused_attn/fused_attn.cpp (nvte_get_fused_attn_backend).
    """
    settings = plan.settings
    model = plan.model
    if not has_fp8_attention(settings):
        return ()
    backend = settings.attention_backend
    is_fused = backend in (AttentionBackend.AUTO, AttentionBackend.FUSED)
    is_delayed = settings.fp8_recipe is Fp8Recipe.DELAYED
    is_full = settings.recompute_granularity is Granularity.FULL
    widths = {model.d_qk, model.d_v}
    fits = len(widths) == 1 and model.d_qk <= _WIDEST_FP8 and not model.d_qk % 16
    masked = any(layer.window or layer.chunk for layer in model.layers)
    name = "fp8_multi_head_attention"
    if settings.fp8_dot_product_attention:
        name = "fp8_dot_product_attention"
    lacks = (
        (not fits, f"heads of one width, a multiple of 16 up to {_WIDEST_FP8}"),
        (masked, "a model without windows, which FP8 attention lacks"),
        (model.has_sinks, "a model without sinks, which FP8 attention lacks"),
        (model.softcap, "a model without capped scores, which FP8 attention lacks"),
        (plan.job.parallel.cp > 1, "cp 1: its messages in FP8 are not modelled"),
        (plan.lora is not None, "lora_rank left out: its reductions are not modelled"),
        (model.num_mtp_layers, "no multi-token prediction, with which it is not modelled"),
        (
            settings.overlap_moe_expert_parallel_comm,
            "overlap_moe_expert_parallel_comm left out: its reductions are not modelled",
        ),
        (
            is_full and not is_delayed,
            "fp8_recipe delayed with full recompute: other reductions are not modelled",
        ),
    )
    return (
        (not is_fused, "attention_backend", backend, "auto or fused with FP8 attention"),
        *((is_there, name, True, f"only with {what}") for is_there, what in lacks),
    )


_WIDEST_FP8 = 128  # width of heads of FP8 attention


def _userbuffer_refusals(plan: "Plan") -> tuple[_Refusal, ...]:
    settings = plan.settings
    if not settings.tp_comm_overlap:
        return ()
    hidden = plan.model.hidden_size
    name = "tp_comm_overlap"
    products = plan.job.products
    # fill_userbuffers_buffer_for_all_gather of TransformerEngine's module/base.py
    has_other_scales = products is not None and (
        products.dtype is DType.NVFP4 or products.scaling is Scaling.BLOCKWISE
    )
    return (
        (not plan.sequence_parallel, name, True, "only with sequence_parallel and tp > 1"),
        (
            plan.model.mla,
            name,
            True,
            "false with latent attention, whose products TransformerEngine has no buffers for",
        ),
        (hidden % 4, name, True, f"only with a hidden size that 4 divides, not {hidden}"),
        (
            has_other_scales,
            name,
            True,
            "false with NVFP4 or blockwise FP8, which TransformerEngine has no buffers for",
        ),
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
