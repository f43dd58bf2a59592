"""Megatron-LM's parameters that affect a step.

Names and defaults are those of megatron/training/arguments.py of core_v0.16.1.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.workloads.job import (
    check_at_least,
    refuse_first,
    setting,
)
from stepmark.workloads.rules.megatron import narrow
from stepmark.workloads.rules.megatron.narrow import Fp4Format, Fp4Recipe, Fp8Format, Fp8Recipe


class Dispatcher(StrEnum):
    """Exchange of tokens with experts (megatron/core/transformer/moe/token_dispatcher.py)."""

    ALLTOALL = "alltoall"
    ALLGATHER = "allgather"
    FLEX = "flex"  # DeepEP's two hops


class FlexBackend(StrEnum):
    """Library of the flex dispatcher."""

    DEEPEP = "deepep"
    HYBRIDEP = "hybridep"


class DispatchDtype(StrEnum):
    """Type of rows that are sent to experts, and of their gradients; sums are in bf16."""

    BF16 = "bf16"
    FP8 = "fp8"  # with an fp32 scale for 128 elements, as DeepSeek-V3


class CpComm(StrEnum):
    """Exchange of keys and values, or of heads, among context-parallel ranks."""

    P2P = "p2p"
    ALL_GATHER = "all_gather"
    A2A = "a2a"  # of heads, as Ulysses
    A2A_P2P = "a2a+p2p"  # of heads among neighbours, of keys and values in rings of these


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


class MegatronOptimizer(StrEnum):
    """Optimizer: Adam, or Muon of hidden layers' matrices.

    dist_muon: data ranks update whole parameters, each some of them (layer-wise optimizer).
    """

    ADAM = "adam"
    MUON = "muon"
    DIST_MUON = "dist_muon"

    @property
    def is_muon(self) -> bool:
        return self is not MegatronOptimizer.ADAM

    @property
    def is_divided(self) -> bool:
        return self is MegatronOptimizer.DIST_MUON


class StateDtype(StrEnum):
    """Type of what Adam keeps. fp8: E4M3 with a scale per tensor."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def itemsize(self) -> int:
        return {"fp32": 4, "fp8": 1}.get(self, 2)


class MuonTpMode(StrEnum):
    """What Muon orthogonalizes of a matrix that tp divides."""

    BLOCKWISE = "blockwise"  # each rank its part, without messages
    DUPLICATED = "duplicated"  # each rank the whole matrix, which is gathered
    DISTRIBUTED = "distributed"  # all ranks together, with sums in each iteration


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
_OFFLOADED = {"optimizer_cpu_offload": (True,)}
_ACTIVATIONS = {"fine_grained_activation_offloading": (True,)}
_AWARE = {"use_precision_aware_optimizer": (True,)}
_MUON = {"optimizer": (MegatronOptimizer.MUON, MegatronOptimizer.DIST_MUON)}
_FLEX = {"moe_token_dispatcher_type": (Dispatcher.FLEX,)}
RECOMPUTE_MODULES = (
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
)
OFFLOAD_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
)
# Linear layers by Megatron-Bridge's names, and what step/lora.py calls them.
LORA_TARGETS = {
    "linear_qkv": ("q", "k", "v"),
    "linear_proj": ("out",),
    "linear_fc1": ("gate", "up"),
    "linear_fc2": ("down",),
}
_Refusal = tuple[object, str, object, str]  # of job.refuse_first
_COEFFICIENTS = 5  # sets of the quintic iteration
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
    optimizer: MegatronOptimizer = setting(
        MegatronOptimizer.ADAM, "adam, muon, or dist_muon: data ranks divide its parameters"
    )
    use_precision_aware_optimizer: bool = setting(
        False, "TransformerEngine's Adam with narrower states"
    )
    main_grads_dtype: StateDtype = setting(
        StateDtype.FP32, "of gradients: fp32, or bf16, which is also reduced", only=_AWARE
    )
    main_params_dtype: StateDtype = setting(
        StateDtype.FP32, "of main weights: fp32 or fp16", only=_AWARE
    )
    exp_avg_dtype: StateDtype = setting(StateDtype.FP32, "of first moments", only=_AWARE)
    exp_avg_sq_dtype: StateDtype = setting(StateDtype.FP32, "of second moments", only=_AWARE)
    optimizer_cpu_offload: bool = setting(False, "run Adam on the host, with its states there")
    optimizer_offload_fraction: float = setting(
        1.0, "of the parameters, whose Adam runs on the host", only=_OFFLOADED
    )
    overlap_cpu_optimizer_d2h_h2d: bool = setting(
        False, "copies of gradients and weights have streams of their own", only=_OFFLOADED
    )
    muon_tp_mode: MuonTpMode = setting(
        MuonTpMode.BLOCKWISE,
        "matrices that tp divides: blockwise, duplicated or distributed",
        only=_MUON,
    )
    muon_num_ns_steps: int = setting(5, "Newton-Schulz iterations", only=_MUON)
    muon_split_qkv: bool = setting(True, "orthogonalize q, k and v apart", only=_MUON)
    muon_use_nesterov: bool = setting(False, "Nesterov momentum", only=_MUON)
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
    cp_comm_type: CpComm = setting(
        CpComm.P2P, "keys and values: p2p (ring) or all_gather; heads: a2a (Ulysses); a2a+p2p"
    )
    hierarchical_context_parallel_sizes: str = setting(
        "",
        "with a2a+p2p: ranks that exchange heads, and those of a ring, such as 8,2",
        only={"cp_comm_type": (CpComm.A2A_P2P,)},
    )
    expert_tensor_parallel_size: int | None = setting(
        None, "tensor parallelism of experts [tp]"
    )
    moe_token_dispatcher_type: Dispatcher = setting(
        Dispatcher.ALLTOALL, "token dispatcher: alltoall, allgather or flex (two hops)"
    )
    moe_flex_dispatcher_backend: FlexBackend = setting(
        FlexBackend.DEEPEP, "library of the flex dispatcher", only=_FLEX
    )
    moe_deepep_gpus_per_host: int = setting(
        8,
        "GPUs that DeepEP joins by NVLink: 2, 4 or 8; its kernels are built for 8",
        only=_FLEX,
    )
    dispatch_dtype: DispatchDtype = setting(
        DispatchDtype.BF16,
        "of rows to experts; fp8 is DeepSeek-V3's (not core_v0.16.1)",
        only=_FLEX,
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
    fine_grained_activation_offloading: bool = setting(
        False, "copy what offload-modules save to the host until the backward pass"
    )
    offload_modules: str = setting(
        "", f"several by comma: {', '.join(OFFLOAD_MODULES)}", only=_ACTIVATIONS
    )
    min_offloaded_tensor_size: int = setting(
        2**20, "elements of the smallest tensor that is offloaded", only=_ACTIVATIONS
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
    fp8_dot_product_attention: bool = setting(
        False, "attention in FP8, with fp8_recipe delayed or tensorwise"
    )
    fp8_multi_head_attention: bool = setting(
        False, "the same with delayed: megatron-core's linear layers stay without FP8 outputs"
    )
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
        gpus = self.moe_deepep_gpus_per_host
        loss = self.moe_aux_loss_coeff
        method = self.recompute_method
        pads = self.moe_pad_expert_input_to_capacity
        reduces = self.use_distributed_optimizer and self.overlap_grad_reduce
        refuse_first(
            (gpus not in (2, 4, 8), "moe_deepep_gpus_per_host", gpus, "2, 4 or 8"),
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
        _check_offload(self)
        _check_muon(self)
        _check_split(self)

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that selective recompute names."""
        if self.recompute_granularity is not Granularity.SELECTIVE:
            return ()
        return tuple(word.strip() for word in self.recompute_modules.split(",") if word.strip())

    @property
    def offload_words(self) -> tuple[str, ...]:
        """Modules whose saved tensors are offloaded."""
        if not self.fine_grained_activation_offloading:
            return ()
        words = (word.strip() for word in self.offload_modules.split(","))
        return tuple(dict.fromkeys(filter(None, words)))

    @property
    def adapted_layers(self) -> tuple[str, ...]:
        """Linear layers that lora_targets names."""
        return tuple(word.strip() for word in self.lora_targets.split(",") if word.strip())


def _check_offload(settings: Megatron) -> None:
    """Raise ConfigError for what TransformerConfig refuses of offloaded activations."""
    check_at_least(settings, 1, "min_offloaded_tensor_size")
    if not settings.fine_grained_activation_offloading:
        return
    words = settings.offload_words
    for word in words or (None,):
        if word not in OFFLOAD_MODULES:
            raise not_one_of("offload_modules", word, OFFLOAD_MODULES)
    if "attn_proj" in words and "core_attn" not in words:
        rule = "with core_attn, too, whose backward pass needs the input of attn_proj"
        raise ConfigError("offload_modules", "attn_proj", rule)


def _check_muon(settings: Megatron) -> None:
    """Raise ConfigError for what validate_args refuses with Muon, or newton_schulz."""
    if not settings.optimizer.is_muon:
        return
    for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        if getattr(settings, name):
            raise ConfigError(name, True, f"false with --optimizer {settings.optimizer}")
    steps = settings.muon_num_ns_steps
    if steps < 1 or steps % _COEFFICIENTS:
        allowed = f"a multiple of {_COEFFICIENTS}, the coefficients of Emerging-Optimizers"
        raise ConfigError("muon_num_ns_steps", steps, allowed)


def _check_split(settings: Megatron) -> None:
    """Raise ConfigError for two ways to divide the layers among stages."""
    uneven = [name for name in _UNEVEN if getattr(settings, name) is not None]
    accounts = [name for name in _ACCOUNTS if getattr(settings, name)]
    if uneven and accounts:
        raise ConfigError(accounts[0], True, f"only without {uneven[0]}")
    if (layout := settings.pipeline_model_parallel_layout) and (uneven or accounts):
        rule = f"only without {(*uneven, *accounts)[0]}"
        raise ConfigError("pipeline_model_parallel_layout", layout, rule)


def _check_dropout(settings: Megatron) -> None:
    for name in ("attention_dropout", "hidden_dropout"):
        probability = getattr(settings, name)
        if not 0 <= probability < 1:
            raise ConfigError(name, probability, "from 0 to below 1")
