"""Megatron-LM's parameters that affect a step, and the plan of a job under them.

Names and defaults are those of megatron/training/arguments.py of core_v0.16.1.
"""

import itertools
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.model import ModelConfig
from stepmark.step.kernel_choice import KernelChoice, Loss, Softmax
from stepmark.step.layout import model_as
from stepmark.step.lora import Lora
from stepmark.step.tree import TreeBuilder
from stepmark.step.workload import CommOp, Group
from stepmark.workloads.job import (
    AXES,
    Comms,
    Job,
    check_at_least,
    check_trained,
    mesh_groups,
    refuse_first,
    setting,
)
from stepmark.workloads.pipeline import Pipeline
from stepmark.workloads.rules.megatron import narrow
from stepmark.workloads.rules.megatron.narrow import Fp4Format, Fp4Recipe, Fp8Format, Fp8Recipe
from stepmark.workloads.rules.megatron.pipeline_layout import num_chunks


class Dispatcher(StrEnum):
    """Exchange of tokens with experts (megatron/core/transformer/moe/token_dispatcher.py)."""

    ALLTOALL = "alltoall"
    ALLGATHER = "allgather"


class CpComm(StrEnum):
    """Exchange of keys and values among context-parallel ranks."""

    P2P = "p2p"
    ALL_GATHER = "all_gather"


class Granularity(StrEnum):
    """Recomputation in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Balancing(StrEnum):
    """Tokens over which the auxiliary loss of a router counts."""

    AUX_LOSS = "aux_loss"
    SEQ_AUX_LOSS = "seq_aux_loss"
    GLOBAL_AUX_LOSS = "global_aux_loss"
    NONE = "none"


class RouterDtype(StrEnum):
    """Type of router and probabilities. model: as the activations."""

    MODEL = "model"
    FP32 = "fp32"
    FP64 = "fp64"


class AttentionBackend(StrEnum):
    """Kernels of attention: fused ones by flash-attn or cuDNN, or stored scores.

    auto: TransformerEngine chooses a fused one. unfused: its batched products. local:
    megatron-core's own layers, without TransformerEngine (--spec local).
    """

    AUTO = "auto"
    FLASH = "flash"
    FUSED = "fused"
    UNFUSED = "unfused"
    LOCAL = "local"


STORED_SCORES = (AttentionBackend.UNFUSED, AttentionBackend.LOCAL)
_STORED = {"attention_backend": STORED_SCORES}
RECOMPUTE_MODULES = (
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
)
# Linear layers by Megatron-Bridge's names, and what step/lora.py calls them.
LORA_TARGETS = {
    "linear_qkv": ("q", "k", "v"),
    "linear_proj": ("out",),
    "linear_fc1": ("gate", "up"),
    "linear_fc2": ("down",),
}
_Refusal = tuple[object, str, object, str]  # of job.refuse_first
_UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """Parameters of Megatron-LM except the model, the mesh and the batches."""

    sequence_parallel: bool = setting(
        False, "norms and residuals on 1/tp of each sequence", common=True
    )
    tp_comm_overlap: bool = setting(
        False, "overlap collectives of tp with products, piece by piece (userbuffers)"
    )
    tp_comm_overlap_ag: bool = setting(True, "with tp-comm-overlap: gathers")
    tp_comm_overlap_rs: bool = setting(True, "with tp-comm-overlap: scatters of outputs")
    tp_comm_overlap_disable_qkv: bool = setting(False, "not the gather before q, k and v")
    tp_comm_overlap_disable_fc1: bool = setting(False, "not the gather before an MLP")
    use_distributed_optimizer: bool = setting(
        False, "shard optimizer states over data ranks", common=True
    )
    overlap_grad_reduce: bool = setting(
        False, "reduce gradients during the backward pass", common=True
    )
    overlap_param_gather: bool = setting(False, "gather parameters during the forward pass")
    align_grad_reduce: bool = setting(True, "stages reduce a chunk's gradients together")
    align_param_gather: bool = setting(True, "interleaved stages gather parameters together")
    ddp_bucket_size: int | None = setting(
        None, "elements per overlapped gradient bucket [max(40M, 1M x dp x cp)]"
    )
    ddp_pad_buckets_for_high_nccl_busbw: bool = setting(False, "pad buckets to 65536 elements")
    ddp_average_in_collective: bool = setting(False, "average gradients in the collective")
    grad_reduce_in_bf16: bool = setting(False, "reduce gradients in bf16 instead of fp32")
    accumulate_allreduce_grads_in_fp32: bool = setting(
        True, "sum and reduce gradients in fp32; with fp16 Megatron-LM's default is no"
    )
    virtual_pipeline_model_parallel_size: int = setting(
        1, "model chunks per pipeline stage", common=True
    )
    microbatch_group_size_per_vp_stage: int | None = setting(
        None, "with vpp: micro-batches that a chunk runs in a row [pp]"
    )
    overlap_p2p_comm: bool = setting(True, "interleaved stages overlap transfers with compute")
    decoder_first_pipeline_num_layers: int | None = setting(None, "layers of the first stage")
    decoder_last_pipeline_num_layers: int | None = setting(None, "layers of the last stage")
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "embedding counts as a layer"
    )
    account_for_loss_in_pipeline_split: bool = setting(False, "head counts as a layer")
    pipeline_model_parallel_layout: str = setting(
        "", "layers of each chunk, such as 'Et*4|(t*4|)*14,tL'; gives vpp, too"
    )
    cp_comm_type: CpComm = setting(CpComm.P2P, "keys and values: p2p (ring) or all_gather")
    expert_tensor_parallel_size: int | None = setting(
        None, "tensor parallelism of experts [tp]"
    )
    moe_token_dispatcher_type: Dispatcher = setting(
        Dispatcher.ALLTOALL, "token dispatcher: alltoall or allgather"
    )
    moe_expert_capacity_factor: float | None = setting(
        None, "tokens per expert / its even share; below 0: all [dropless]"
    )
    moe_pad_expert_input_to_capacity: bool = setting(False, "pad experts' inputs to capacity")
    overlap_moe_expert_parallel_comm: bool = setting(
        False, "run a forward and a backward pass in turns, exchanges of one beside the other"
    )
    delay_wgrad_compute: bool = setting(
        False, "with it: weight gradients after what exchanges need"
    )
    moe_shared_expert_overlap: bool = setting(
        False, "shared experts run beside the exchanges of the routed ones"
    )
    moe_router_dtype: RouterDtype = setting(RouterDtype.MODEL, "router's: model, fp32 or fp64")
    moe_router_load_balancing_type: Balancing = setting(Balancing.AUX_LOSS, "auxiliary loss")
    moe_aux_loss_coeff: float = setting(0.0, "weight of the auxiliary loss; 0: none")
    recompute_granularity: Granularity = setting(
        Granularity.NONE, "activation checkpointing", common=True
    )
    recompute_modules: str = setting(
        "core_attn", f"with selective, several by comma: {', '.join(RECOMPUTE_MODULES)}"
    )
    recompute_method: str = setting("uniform", "with full: uniform or block")
    recompute_num_layers: int = setting(
        1, "with full: layers per checkpoint (uniform), or recomputed per chunk (block)"
    )
    attention_backend: AttentionBackend = setting(
        AttentionBackend.AUTO, "kernels of attention; unfused and local store its scores"
    )
    attention_dropout: float = setting(
        0.0, "dropout of attention's probabilities (Megatron-LM: 0.1)", only=_STORED
    )
    hidden_dropout: float = setting(0.0, "dropout before residuals (Megatron-LM: 0.1)")
    masked_softmax_fusion: bool = setting(
        True,
        "scale, mask and softmax are one kernel",
        only={"attention_backend": (AttentionBackend.LOCAL,)},
    )
    bias_swiglu_fusion: bool = setting(True, "SwiGLU is one kernel per pass")
    gradient_accumulation_fusion: bool = setting(
        True, "products add weight gradients to their fp32 sums"
    )
    cross_entropy_loss_fusion: bool = setting(
        False, "fuse kernels and two all-reduces of the loss"
    )
    calculate_per_token_loss: bool = setting(False, "divide gradients by the number of tokens")
    create_attention_mask_in_dataloader: bool = setting(
        True, "broadcast each attention mask over tp"
    )
    lora_rank: int | None = setting(
        None, "train adapters of this rank and freeze the model (Megatron-Bridge's dim)"
    )
    lora_targets: str = setting(
        ",".join(LORA_TARGETS), "layers with adapters (Megatron-Bridge's target_modules)"
    )
    make_vocab_size_divisible_by: int = setting(128, "pad the vocabulary to this x tp")
    fp8_format: Fp8Format = setting(
        Fp8Format.NONE, "products in FP8: e4m3, or hybrid with gradients in e5m2"
    )
    fp8_recipe: Fp8Recipe = setting(Fp8Recipe.DELAYED, "scaling of FP8")
    fp8_param_gather: bool = setting(False, "gather parameters in FP8 (mxfp8: in bf16)")
    fp4_format: Fp4Format = setting(Fp4Format.NONE, "products in FP4: e2m1")
    fp4_recipe: Fp4Recipe = setting(Fp4Recipe.NVFP4, "scaling of FP4")
    tp_only_amax_red: bool = setting(
        False, "delayed scaling: maxima over tp and cp, not over data ranks, too"
    )
    first_last_layers_bf16: bool = setting(False, "first and last layers stay in bf16")
    num_layers_at_start_in_bf16: int = setting(1, "with first_last_layers_bf16: first layers")
    num_layers_at_end_in_bf16: int = setting(1, "with first_last_layers_bf16: last layers")

    def __post_init__(self) -> None:
        sizes = ("expert_tensor_parallel_size", "recompute_num_layers", "ddp_bucket_size")
        check_at_least(self, 1, "microbatch_group_size_per_vp_stage")
        splits = ("virtual_pipeline_model_parallel_size", *_UNEVEN)
        check_at_least(self, 1, *sizes, *splits, "make_vocab_size_divisible_by")
        factor = self.moe_expert_capacity_factor
        if factor is not None and factor < 0:  # as TransformerConfig.__post_init__
            object.__setattr__(self, "moe_expert_capacity_factor", None)
        elif factor is not None and not 0 < factor < math.inf:
            allowed = "above 0; or below 0: all tokens"
            raise ConfigError("moe_expert_capacity_factor", factor, allowed)
        loss = self.moe_aux_loss_coeff
        method = self.recompute_method
        pads = self.moe_pad_expert_input_to_capacity
        reduces = self.use_distributed_optimizer and self.overlap_grad_reduce
        refuse_first(
            (not 0 <= loss < math.inf, "moe_aux_loss_coeff", loss, "0 or more"),
            (
                method not in ("uniform", "block"),
                "recompute_method",
                method,
                "uniform or block",
            ),
            # Pairs of parameters that validate_args refuses.
            (
                self.overlap_param_gather and not reduces,
                "overlap_param_gather",
                True,
                "only with use_distributed_optimizer and overlap_grad_reduce",
            ),
            (
                pads and self.moe_expert_capacity_factor is None,
                "moe_pad_expert_input_to_capacity",
                True,
                "only with moe_expert_capacity_factor",
            ),
            (
                self.calculate_per_token_loss and self.ddp_average_in_collective,
                "ddp_average_in_collective",
                True,
                "only without calculate_per_token_loss",
            ),
        )
        _check_dropout(self)
        for word in self.modules:
            if word not in RECOMPUTE_MODULES:
                raise not_one_of("recompute_modules", word, RECOMPUTE_MODULES)
        for word in self.adapted_layers:
            if word not in LORA_TARGETS:
                raise not_one_of("lora_targets", word, tuple(LORA_TARGETS))
        narrow.check(self)
        uneven = [name for name in _UNEVEN if getattr(self, name) is not None]
        accounts = [name for name in _ACCOUNTS if getattr(self, name)]
        if uneven and accounts:
            raise ConfigError(accounts[0], True, f"only without {uneven[0]}")
        if (layout := self.pipeline_model_parallel_layout) and (uneven or accounts):
            rule = f"only without {(*uneven, *accounts)[0]}"
            raise ConfigError("pipeline_model_parallel_layout", layout, rule)

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that selective recompute names."""
        if self.recompute_granularity is not Granularity.SELECTIVE:
            return ()
        return tuple(word.strip() for word in self.recompute_modules.split(",") if word.strip())

    @property
    def adapted_layers(self) -> tuple[str, ...]:
        """Linear layers that lora_targets names."""
        return tuple(word.strip() for word in self.lora_targets.split(",") if word.strip())


def _check_dropout(settings: Megatron) -> None:
    for name in ("attention_dropout", "hidden_dropout"):
        probability = getattr(settings, name)
        if not 0 <= probability < 1:
            raise ConfigError(name, probability, "from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job, its settings, and the groups in which its ranks communicate."""

    job: Job
    settings: Megatron
    comms: Comms

    @property
    def model(self) -> ModelConfig:
        return self.job.model

    @property
    def tp(self) -> int:
        return self.job.parallel.tp

    @property
    def etp(self) -> int:
        """Tensor parallelism of experts."""
        return self.settings.expert_tensor_parallel_size or self.tp

    @property
    def sequence_parallel(self) -> bool:
        return self.settings.sequence_parallel and self.tp > 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before sequence parallelism divides them."""
        return self.job.tokens

    @property
    def own_tokens(self) -> int:
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def expert_rows(self) -> int:
        """Rows that this rank's own tokens send to experts."""
        if (moe := self.model.moe) is None:
            return 0
        sent = self.own_tokens * moe.top_k
        factor = self.settings.moe_expert_capacity_factor
        if factor is None:
            return sent
        # get_capacity of moe_utils.py
        capacity = math.ceil(sent / moe.num_experts * factor) * moe.num_experts
        return (
            capacity if self.settings.moe_pad_expert_input_to_capacity else min(sent, capacity)
        )

    @property
    def tree(self) -> TreeBuilder:
        """Factory of this rank's modules."""
        sequence = self.sequence_parallel
        etp = self.etp
        tree = self.job.tree("megatron", sequence_parallel=sequence, etp=etp, lora=self.lora)
        inputs = replace(tree.inputs, expert_rows=self.expert_rows * etp)
        return replace(tree, inputs=inputs, kernels=self.kernels)

    @property
    def kernels(self) -> KernelChoice:
        """Kernels of a layer.

        Biases of all linear layers but the first are added in other modules, which sum their
        gradients; that of q, k and v is a part of TransformerEngine's products.
        """
        settings = self.settings
        backend = settings.attention_backend
        is_local = backend is AttentionBackend.LOCAL
        qkv = frozenset({"attention.qkv"}) if is_local else frozenset()
        loss = Loss.VOCAB_PARALLEL
        if settings.cross_entropy_loss_fusion:
            loss = Loss.VOCAB_PARALLEL_FUSED
        return KernelChoice(
            stores_scores=backend in STORED_SCORES,
            batch_first=backend is AttentionBackend.FLASH,
            softmax=self._softmax,
            dropout_of_attention=settings.attention_dropout > 0,
            dropout_of_rows=settings.hidden_dropout > 0,
            added_biases=qkv,
            summed_biases=qkv | {"attention.out", "mlp.up", "mlp.gate_up", "mlp.down"},
            fused_swiglu=settings.bias_swiglu_fusion,
            adds_gradients=not settings.gradient_accumulation_fusion,
            adds_table_gradient=self.lora is None,
            sum_bytes=self.gradient_dtype.itemsize,
            loss=loss,
        )

    @property
    def _softmax(self) -> Softmax:
        """Softmax of stored scores.

        fused_softmax.py and TransformerEngine's softmax.py (is_kernel_available); the latter's
        causal kernel is disabled.
        """
        seq = self.model.seq_len
        num_rows = self.job.mbs * self.model.num_heads // self.tp
        fits = self.job.dtype is not DType.FP32 and not num_rows % 4
        if self.settings.attention_backend is AttentionBackend.UNFUSED:
            fits = fits and 16 < seq < 16384 and not seq % 8
            return Softmax.MASKED if fits else Softmax.UNFUSED
        fits = fits and 16 < seq <= 4096 and not seq % 4
        is_fused = fits and self.settings.masked_softmax_fusion
        return Softmax.CAUSAL if is_fused else Softmax.UNFUSED

    @property
    def lora(self) -> Lora | None:
        """Adapters, which are trained in place of the model; None: the model is."""
        settings = self.settings
        if settings.lora_rank is None:
            return None
        names = (LORA_TARGETS[word] for word in settings.adapted_layers)
        return Lora(rank=settings.lora_rank, targets=frozenset(itertools.chain(*names)))

    @property
    def pipeline(self) -> Pipeline:
        """Stages, micro-batches, and how the schedule runs them."""
        settings = self.settings
        return Pipeline(
            num_stages=self.job.parallel.pp,
            num_microbatches=self.job.num_microbatches,
            num_chunks=settings.virtual_pipeline_model_parallel_size,
            overlap=settings.overlap_p2p_comm,
            group_size=settings.microbatch_group_size_per_vp_stage,
            combines=settings.overlap_moe_expert_parallel_comm,
        )

    @property
    def inside(self) -> "partial[tuple[CommOp, ...]]":
        """Communication inside a layer."""
        return partial(self.comms, layer=0, microbatch=0)

    @property
    def in_bf16(self) -> "Plan":
        """The plan of layers that stay in bf16 among narrow ones."""
        return replace(self, job=replace(self.job, products=None))

    def size(self, group: str) -> int:
        return self.comms.groups[group].size

    @property
    def has_shared_experts(self) -> bool:
        return self.model.moe is not None and self.model.moe.num_shared_experts > 0

    @property
    def gradient_dtype(self) -> DType:
        in_fp32 = self.settings.accumulate_allreduce_grads_in_fp32
        if self.settings.grad_reduce_in_bf16 or not in_fp32:
            return self.job.dtype
        return DType.FP32

    @property
    def probs_dtype(self) -> DType:
        kind = self.settings.moe_router_dtype
        return self.job.dtype if kind is RouterDtype.MODEL else DType(kind.value)


def make_plan(job: Job, settings: Megatron) -> Plan:
    """Return the plan. Raises ConfigError for a type or job that Megatron-LM refuses."""
    check_trained("dtype", job.dtype)
    settings = _with_chunks(settings, job.parallel.pp)
    multiple = settings.make_vocab_size_divisible_by
    model = model_as("megatron", job.model, job.parallel.tp, multiple)
    narrow.check_layers(settings, model.num_layers, job.parallel.pp)
    job = replace(job, model=model, products=narrow.products_of(settings))
    plan = Plan(
        job=job, settings=settings, comms=Comms(groups=groups(job, settings), dtype=job.dtype)
    )
    refuse_first(*_layout_refusals(plan), *_technique_refusals(plan))
    return plan


def _layout_refusals(plan: Plan) -> tuple[_Refusal, ...]:
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
            " (--linear-bias, or with experts theirs, too)",
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
            ("attention+mamba" in mixers, "attention beside Mamba in one layer"),
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


def _gradient_refusals(plan: Plan) -> tuple[_Refusal, ...]:
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


def _technique_refusals(plan: Plan) -> tuple[_Refusal, ...]:
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
    )


def _mtp_refusals(plan: Plan) -> tuple[_Refusal, ...]:
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


def _backend_refusals(plan: Plan) -> tuple[_Refusal, ...]:
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


def _userbuffer_refusals(plan: Plan) -> tuple[_Refusal, ...]:
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


def _lora_refusals(plan: Plan) -> tuple[_Refusal, ...]:
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


def _combined_refusals(plan: Plan) -> tuple[_Refusal, ...]:
    """Return what TransformerConfig refuses with overlap_moe_expert_parallel_comm."""
    name = "overlap_moe_expert_parallel_comm"
    settings = plan.settings
    parallel = plan.job.parallel
    if not settings.overlap_moe_expert_parallel_comm:
        delays = settings.delay_wgrad_compute
        return ((delays, "delay_wgrad_compute", True, f"only with {name}"),)
    one_chunk = settings.virtual_pipeline_model_parallel_size == 1
    is_full = settings.recompute_granularity is Granularity.FULL
    has_other = settings.moe_token_dispatcher_type is not Dispatcher.ALLTOALL
    return (
        (parallel.ep == 1, name, True, "only with ep > 1"),
        (parallel.pp > 1 and one_chunk, name, True, "only with vpp > 1 where pp > 1"),
        (has_other, name, True, "only with moe_token_dispatcher_type alltoall"),
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


def _with_chunks(settings: Megatron, pp: int) -> Megatron:
    """Return the settings with the vpp of the layout, as arguments.py derives it."""
    layout = settings.pipeline_model_parallel_layout
    if not layout:
        return settings
    name = "virtual_pipeline_model_parallel_size"
    chunks = num_chunks(layout, pp)
    given = settings.virtual_pipeline_model_parallel_size
    if given not in (1, chunks):
        raise ConfigError(name, given, f"left out, or the layout's ({chunks})")
    return replace(settings, virtual_pipeline_model_parallel_size=chunks)


def groups(job: Job, settings: Megatron) -> dict[str, Group]:
    """Return groups by Megatron's names (megatron/core/parallel_state.py, tp-cp-ep-dp-pp).

    dp_replicate: num_distributed_optimizer_instances. Experts have their own mesh: their tp, ep
    and dp divide the ranks of a stage.
    """
    parallel = job.parallel
    by_name = mesh_groups(
        parallel,
        {
            "tp": ("tp",),
            "cp": ("cp",),
            "tp_cp": ("tp", "cp"),
            "pp": ("pp",),
            "mp": ("tp", "pp"),
            "dp_cp": ("cp", "dp_shard", "dp_replicate"),
            "intra_dp_cp": ("cp", "dp_shard"),
            "instances": ("dp_replicate",),
            "tp_dp_cp": ("tp", "cp", "dp_shard", "dp_replicate"),
            "intra_dist_opt": ("tp", "cp", "dp_shard", "pp"),
            "world": AXES,
        },
    )
    per_stage = parallel.world_size // parallel.pp
    last = max(1, parallel.pp - 1) * per_stage
    by_name["embd"] = Group(digits=((min(2, parallel.pp), last),))
    if job.model.moe is None:
        return by_name
    etp = settings.expert_tensor_parallel_size or parallel.tp
    ep = parallel.ep
    instance = per_stage // parallel.dp_replicate
    if instance % (etp * ep):
        raise ConfigError(
            "ep",
            ep,
            f"a number whose product with expert tp ({etp}) divides tp x cp x dp ({instance})",
        )
    by_name["etp"] = Group(digits=((etp, 1),))
    by_name["ep"] = Group(digits=((ep, etp),))
    by_name["tp_ep"] = Group(digits=((etp * ep, 1),))
    by_name["intra_expt_dp"] = Group(digits=((instance // (etp * ep), etp * ep),))
    by_name["expt_dp"] = Group(digits=((per_stage // (etp * ep), etp * ep),))
    by_name["expt_tp_pp"] = Group(digits=((etp, 1), (ep, etp), (parallel.pp, per_stage)))
    return by_name
