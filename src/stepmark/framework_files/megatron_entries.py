"""What each of Megatron-LM's arguments is to us.

Names and defaults are those of megatron/training/arguments.py and of the dataclasses that
become arguments, at d98e8a64ddf3 (22 August 2026); validation/megatron_arguments.py checks that
each is here.
"""

from stepmark.framework_files.table import (
    FALSE,
    OFF,
    ON,
    TRUE,
    Entry,
    refused,
    same,
    switches,
    unmodelled,
    without_effect,
)

_MODEL = {
    **same("num-layers", "hidden-size", "ffn-hidden-size"),
    "num-attention-heads": Entry(option="num_heads"),
    "num-query-groups": Entry(option="num_kv_heads"),
    "kv-channels": Entry(option="head_dim"),
    "seq-length": Entry(option="seq_len"),
    "max-position-embeddings": Entry(option="max_positions"),
    "swiglu": Entry(option="swiglu", values=ON, default=FALSE),
    "normalization": Entry(
        option="norm",
        values={"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"},
        default="layernorm",
    ),
    "disable-bias-linear": Entry(option="linear_bias", values=OFF, default=TRUE),
    "add-qkv-bias": Entry(option="qkv_bias", values=ON, default=FALSE),
    "qk-layernorm": Entry(option="qk_norm", values=ON, default=FALSE),
    "untie-embeddings-and-output-weights": Entry(option="untied", values=ON, default=FALSE),
    **same("vocab-size", "make-vocab-size-divisible-by"),
    "mtp-num-layers": Entry(option="num_mtp_layers"),
    "num-experts": Entry(option="num_experts"),
    "moe-router-topk": Entry(option="top_k"),
    "moe-router-num-groups": Entry(option="expert_groups"),
    "moe-router-group-topk": Entry(option="top_groups"),
    "moe-ffn-hidden-size": Entry(option="moe_ffn_hidden_size"),
    "moe-layer-freq": Entry(option="dense_layers"),
    "moe-shared-expert-intermediate-size": Entry(option="shared_ffn_hidden_size"),
    "moe-router-enable-expert-bias": Entry(option="router_bias", values=ON),
    "q-lora-rank": Entry(option="q_lora_rank"),
    "kv-lora-rank": Entry(option="kv_lora_rank"),
    "qk-head-dim": Entry(option="qk_nope_head_dim"),
    "qk-pos-emb-head-dim": Entry(option="qk_rope_head_dim"),
    "v-head-dim": Entry(option="v_head_dim"),
}
_JOB = {
    "tensor-model-parallel-size": Entry(option="tp"),
    "pipeline-model-parallel-size": Entry(option="pp"),
    "context-parallel-size": Entry(option="cp"),
    "expert-model-parallel-size": Entry(option="ep"),
    "num-distributed-optimizer-instances": Entry(option="dp_replicate"),
    "micro-batch-size": Entry(option="mbs"),
    "global-batch-size": Entry(option="gbs"),
    "dtype": Entry(option="dtype", values={"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}),
    "world-size": Entry(option="world_size"),
}
_SETTINGS = {
    **same(
        *("expert-tensor-parallel-size", "decoder-first-pipeline-num-layers"),
        *("decoder-last-pipeline-num-layers", "pipeline-model-parallel-layout"),
        *("ddp-bucket-size", "moe-expert-capacity-factor", "moe-aux-loss-coeff"),
        *("recompute-modules", "recompute-num-layers", "muon-num-ns-steps"),
        *("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"),
        *("optimizer-offload-fraction", "offload-modules", "min-offloaded-tensor-size"),
        *("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"),
    ),
    **switches(
        *("sequence-parallel", "tp-comm-overlap", "use-distributed-optimizer"),
        *("overlap-grad-reduce", "overlap-param-gather", "grad-reduce-in-bf16"),
        *("ddp-pad-buckets-for-high-nccl-busbw", "ddp-average-in-collective"),
        *("accumulate-allreduce-grads-in-fp32", "account-for-loss-in-pipeline-split"),
        *("account-for-embedding-in-pipeline-split", "moe-pad-expert-input-to-capacity"),
        *("overlap-moe-expert-parallel-comm", "delay-wgrad-compute"),
        *("moe-shared-expert-overlap", "cross-entropy-loss-fusion", "fp8-param-gather"),
        *("calculate-per-token-loss", "first-last-layers-bf16", "muon-use-nesterov"),
        *("use-precision-aware-optimizer", "optimizer-cpu-offload"),
        *("overlap-cpu-optimizer-d2h-h2d", "fine-grained-activation-offloading"),
    ),
    "num-virtual-stages-per-pipeline-rank": Entry(
        option="virtual_pipeline_model_parallel_size"
    ),
    "microbatch-group-size-per-virtual-pipeline-stage": Entry(
        option="microbatch_group_size_per_vp_stage"
    ),
    "no-overlap-p2p-communication": Entry(option="overlap_p2p_comm", values=OFF),
    "no-align-grad-reduce": Entry(option="align_grad_reduce", values=OFF),
    "disable-align-grad-reduce": Entry(option="align_grad_reduce", values=OFF),
    "no-align-param-gather": Entry(option="align_param_gather", values=OFF),
    "no-tp-comm-overlap-ag": Entry(option="tp_comm_overlap_ag", values=OFF),
    "disable-tp-comm-overlap-ag": Entry(option="tp_comm_overlap_ag", values=OFF),
    "no-tp-comm-overlap-rs": Entry(option="tp_comm_overlap_rs", values=OFF),
    "disable-tp-comm-overlap-rs": Entry(option="tp_comm_overlap_rs", values=OFF),
    "no-masked-softmax-fusion": Entry(option="masked_softmax_fusion", values=OFF),
    "no-bias-swiglu-fusion": Entry(option="bias_swiglu_fusion", values=OFF),
    "no-gradient-accumulation-fusion": Entry(option="gradient_accumulation_fusion", values=OFF),
    "no-create-attention-mask-in-dataloader": Entry(
        option="create_attention_mask_in_dataloader", values=OFF
    ),
    "cp-comm-type": Entry(
        option="cp_comm_type",
        values={kind: kind for kind in ("p2p", "all_gather", "a2a", "a2a+p2p")},
    ),
    **same("hierarchical-context-parallel-sizes"),
    "moe-token-dispatcher-type": Entry(
        option="moe_token_dispatcher_type",
        values={name: name for name in ("allgather", "alltoall", "flex")},
    ),
    "moe-flex-dispatcher-backend": Entry(
        option="moe_flex_dispatcher_backend", values={"deepep": "deepep"}
    ),
    "moe-router-dtype": Entry(
        option="moe_router_dtype", values={"fp32": "fp32", "fp64": "fp64", "model": "model"}
    ),
    "moe-router-load-balancing-type": Entry(
        option="moe_router_load_balancing_type",
        values={name: name for name in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")},
    ),
    "recompute-granularity": Entry(
        option="recompute_granularity",
        values={"selective": "selective", "full": "full", "none": "none"},
    ),
    "recompute-method": Entry(
        option="recompute_method", values={"uniform": "uniform", "block": "block"}
    ),
    "attention-backend": Entry(
        option="attention_backend",
        values={name: name for name in ("auto", "flash", "fused", "unfused", "local")},
    ),
    "optimizer": Entry(
        option="optimizer", values={name: name for name in ("adam", "muon", "dist_muon")}
    ),
    "muon-tp-mode": Entry(
        option="muon_tp_mode",
        values={name: name for name in ("blockwise", "duplicated", "distributed")},
    ),
    "muon-no-split-qkv": Entry(option="muon_split_qkv", values=OFF),
    "muon-nesterov": Entry(option="muon_use_nesterov", values=ON),  # of later versions
    "attention-dropout": Entry(option="attention_dropout", default="0.1"),
    "hidden-dropout": Entry(option="hidden_dropout", default="0.1"),
    "fp8-format": Entry(option="fp8_format", values={"e4m3": "e4m3", "hybrid": "hybrid"}),
    "fp8-recipe": Entry(
        option="fp8_recipe",
        values={name: name for name in ("delayed", "tensorwise", "blockwise", "mxfp8")},
    ),
    "fp4-format": Entry(option="fp4_format", values={"e2m1": "e2m1"}),
    "fp4-recipe": Entry(option="fp4_recipe", values={"nvfp4": "nvfp4"}),
}

_WITHOUT_EFFECT = {
    **without_effect(
        "checkpoints",
        """
        async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm async-save
        async-strategy auto-detect-ckpt-format bert-load ckpt-assume-constant-structure
        ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format
        ckpt-drop-redundant-extra-state ckpt-format ckpt-fully-parallel-load
        ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save
        ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
        ckpt-pg-tensors-cache-path ckpt-step disable-ckpt-load-validate-sharding-integrity
        disable-save-tokenizer-assets disable-strict-fsdp-dtensor-load dist-ckpt-format
        dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness
        dist-ckpt-workers distrib-optim-fully-reshardable-mem-efficient
        exit-on-missing-checkpoint export-te-mcore-model finetune ict-load
        init-model-with-meta-device load load-main-params-from-ckpt
        no-ckpt-fully-parallel-save no-ckpt-load-validate-sharding-integrity no-load-optim
        no-load-rng no-save-optim no-save-rng no-save-tokenizer-assets
        no-strict-fsdp-dtensor-load non-persistent-ckpt-type non-persistent-global-ckpt-dir
        non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir
        non-persistent-save-interval object-storage-cache-path override-ckpt-iteration
        override-opt override-opt-param-scheduler override-opt_param-scheduler
        persistent-save-interval pretrained-checkpoint refit-method replication
        replication-factor replication-jump save save-activations-interval
        save-dgrads-interval save-interval save-params-interval save-retain-interval
        save-tokens-per-expert-interval save-wgrads-interval use-checkpoint-opt
        use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler use-dist-ckpt
        use-persistent-ckpt-worker verify-integrity
        """,
    ),
    **without_effect(
        "logs",
        """
        app-tag-run-name app-tag-run-version config-logger-dir
        disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
        disable-flight-recorder-include-only-active disable-log-loss-scale-to-tensorboard
        dump-param-to-param-group-map flight-recorder-dump-path
        flight-recorder-include-stack-trace flight-recorder-trace-buffer-size
        gpu-sniff-test-interval indexer-log-interval log-device-memory-used log-energy
        log-interval log-max-attention-logit log-memory-interval log-memory-to-tensorboard
        log-progress log-straggler log-throughput
        log-timers-to-tensorboard log-validation-ppl-to-tensorboard
        log-world-size-to-tensorboard log-learning-rate-to-tensorboard
        log-batch-size-to-tensorboard logging-level memory-snapshot-path
        moe-per-layer-logging moe-routing-trace-capture-hidden-states
        moe-routing-trace-capture-logits moe-routing-trace-dump-weights
        moe-routing-trace-max-training-iters moe-routing-trace-path
        no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
        no-flight-recorder-include-only-active no-log-loss-scale-to-tensorboard
        no-one-logger no-record-throughput nvtx-ranges one-logger-async one-logger-project
        one-logger-run-name otel-enabled otel-service-name otel-span-groups profile
        profile-ranks profile-step-end profile-step-start pytorch-profiler-collect-callstack
        pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes
        record-memory-history record-shapes run-workload-inspector-server tensorboard-dir
        tensorboard-log-interval tensorboard-queue-size timing-log-option
        use-pytorch-profiler wandb-entity wandb-exp-name wandb-project wandb-save-dir
        """,
    ),
    **without_effect(
        "failures and restarts",
        """
        adlr-autoresume adlr-autoresume-interval calc-ft-timeouts check-for-large-grads
        check-for-spiky-loss
        disable-straggler-on-startup distributed-timeout-minutes
        distributed-timeout-seconds-after-init enable-ft-package error-injection-rate
        error-injection-type exit-duration-in-mins exit-interval exit-signal
        exit-signal-handler exit-signal-handler-for-dataloader
        exit-signal-handler-for-training fault-injector-delay-start-iteration
        fault-injector-fault-delay fault-injector-fault-probabilities
        fault-injector-fault-types fault-injector-mtti-seconds fault-injector-num-ranks
        fault-injector-offset-seconds fault-injector-ranks fault-injector-seed
        ft-num-warmup-iters inprocess-active-world-size inprocess-barrier-timeout
        inprocess-completion-timeout inprocess-empty-cuda-cache inprocess-granularity
        inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
        inprocess-last-call-wait inprocess-max-iterations
        inprocess-monitor-process-interval inprocess-monitor-thread-interval
        inprocess-progress-watchdog-interval inprocess-restart inprocess-soft-timeout
        inprocess-termination-grace-time iterations-to-skip max-tokens-to-oom
        no-barrier-with-level-1-timing no-check-for-nan-in-loss-and-grad rerun-mode
        result-rejected-tracker-filename straggler-ctrlr-port straggler-minmax-count
        test-mode train-sync-interval
        """,
    ),
    **without_effect(
        "data and tokenizer",
        """
        allow-ambiguous-pad-tokens block-data-path chat-template data-args-path
        data-cache-path data-impl data-parallel-random-init data-path
        data-per-class-fraction dataloader-defer-npy-index-mmap dataloader-fast-cache-load
        dataloader-type disable-msc disable-tokenizer-sentencepiece-ignore-extra-whitespaces
        disable-use-tokenizer-model-from-checkpoint-args embedding-path enable-msc
        eod-mask-loss eval-global-batch-size eval-interval eval-iters eval-micro-batch-size
        evidence-data-path fim-data fim-eod-token fim-fragment-rate fim-middle-token
        fim-no-prefix fim-pad-token fim-prefix-token fim-rate fim-split-sample fim-spm-rate
        fim-suffix-token full-validation merge-file mid-level-dataset-surplus mock-data
        multiple-validation-sets no-data-sharding no-mmap-bin-files
        no-tokenizer-sentencepiece-ignore-extra-whitespaces
        no-use-tokenizer-model-from-checkpoint-args null-tokenizer-eod-id
        null-tokenizer-pad-id num-dataset-builder-threads num-workers
        per-dataset-sequences-path per-split-data-args-path sample-rate
        sft-tokenizer-prompt-format short-seq-prob skip-train split start-eval-at-iter
        test-data-path tiktoken-num-special-tokens tiktoken-pattern titles-data-path
        tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-metadata
        tokenizer-model tokenizer-sentencepiece-legacy tokenizer-special-tokens
        tokenizer-type train-data-path trust-remote-code use-gigatoken use-one-sent-docs
        use-same-sampling-seed-across-dp-ranks valid-data-path validation-set-names
        vocab-extra-ids vocab-file
        """,
    ),
    **without_effect(
        "rates, schedules and constants",
        """
        adam-beta1 adam-beta2 adam-eps apply-layernorm-1p apply-wd-to-qk-layernorm clip-grad
        decoupled-lr decoupled-min-lr decrease-batch-size-if-needed
        embedding-init-method-std end-weight-decay head-lr-mult hysteresis init-method-std
        init-method-xavier-uniform initial-loss-scale lion-beta1 lion-beta2 loss-scale
        loss-scale-window lr lr-decay-iters lr-decay-samples lr-decay-style
        lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples
        lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style min-loss-scale min-lr
        muon-extra-scale-factor muon-momentum muon-scale-mode
        mscale mscale-all-dim mup-attn-scale-power mup-base-head-dim mup-base-hidden-size
        mup-embedding-mult mup-output-mult mup-width-mult no-initialization
        no-weight-decay-cond-type norm-epsilon phase-transition-iterations rampup-batch-size
        rope-scaling-factor rope-type rotary-base rotary-interleaved rotary-scaling-factor
        rotary-seq-len-interpolation-factor seed sgd-momentum start-weight-decay
        step-batch-size-schedule train-iters train-samples use-cpu-initialization use-mup
        use-rope-scaling warmup weight-decay weight-decay-incr-style yarn-beta-fast
        yarn-beta-slow yarn-correction-range-round-to-int
        no-yarn-correction-range-round-to-int yarn-original-max-position-embeddings
        """,
    ),
    **without_effect(
        "which experts are chosen",
        """
        moe-router-bias-update-rate moe-router-force-biased moe-router-force-load-balancing
        moe-router-pre-softmax
        moe-router-quantile-balancing-ema moe-router-score-function
        moe-router-topk-scaling-factor moe-token-drop-policy moe-enable-routing-replay
        moe-upcycling-granularity moe-use-upcycling
        """,
    ),
    **without_effect(
        "what is fused or chosen in any case",
        """
        moe-enable-deepep
        attention-softmax-in-fp32 apply-residual-connection-post-layernorm bias-gelu-fusion
        enable-experimental fake-process-group lazy-mpu-init local-rank manual-gc
        manual-gc-interval disable-manual-gc-eval no-manual-gc-eval
        moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-single-grouped-bias
        moe-single-grouped-weight moe-use-grouped-tensor moe-use-legacy-grouped-gemm
        moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size no-persist-layer-norm
        no-position-embedding onnx-safe openai-gelu te-rng-tracker tp-comm-bootstrap-backend
        use-flash-attn use-mcore-models no-async-tensor-model-parallel-allreduce
        no-query-key-layer-scaling overlap-p2p-communication gradient-accumulation-fusion
        disable-gloo-process-groups create-all-gather-group
        """,
    ),
    **without_effect(
        "only with an option that is off",
        """
        cpu-offloading-retain-pinned-cpu-buffers cuda-graph-modules cuda-graph-scope
        cuda-graph-warmup-steps data-parallel-sharding-strategy enable-full-sharding-in-hsdp
        flash-attention-version
        fp8-amax-compute-algo fp8-amax-history-len fp8-interval fp8-margin
        fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration
        gtp-expert-remat-nccl-ub gtp-remat-nccl-ub gtp-remat-opt-in-modules
        gtp-remat-reduce-scatter-with-fp32-accumulation max-seqlen-per-dp-cp-rank
        megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-grad-comm-dtype
        megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype
        megatron-fsdp-max-pool-double-buffer megatron-fsdp-version
        moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda
        moe-paged-stash-page-size mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern
        mtp-loss-scaling-factor mtp-standalone mtp-use-repeated-layer
        outer-dp-sharding-strategy
        qk-clip-alpha qk-clip-threshold sharp-enabled-group
        suggested-communication-unit-size torch-fsdp2-no-reshard-after-forward
        use-torch-optimizer-for-cpu-offload wgrad-deferral-limit window-attn-skip-freq
        logits-load-decode-threads logits-load-ignore-errors logits-load-kd-loss-alpha
        logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dtype
        logits-save-top-k logits-save-top-p logits-save-top-p-min-k
        mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num
        mhc-sinkhorn-iterations kitchen-attention-backend mrope-section no-rope-freq
        disable-symmetric-registration no-use-layer-wise-param-layout
        ep-overlap-early-attn-memory-release mask-prob mask-type
        mask-factor relative-attention-max-distance relative-attention-num-buckets
        disable-mamba-mem-eff-path mamba-training-ssm-states-dtype
        dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32
        dsa-indexer-loss-coeff dsa-indexer-n-heads dsa-indexer-rope-interleaved
        dsa-indexer-skip-topk-offset dsa-indexer-topk dsa-indexer-topk-freq
        dsa-indexer-use-sparse-loss dsa-kernel-backend
        disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu
        no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu
        gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder
        linear-attention-freq linear-conv-kernel-dim linear-key-head-dim
        linear-num-key-heads linear-num-value-heads linear-value-head-dim
        mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype
        """,
    ),
    **without_effect(
        "inference",
        """
        cache-mla-latents decode-only-cuda-graphs enable-chunked-prefill flash-decode
        inference-batch-times-seqlen-threshold inference-coordinator-port
        inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens
        inference-cuda-graph-scope inference-disable-ep-consensus
        inference-disable-triton-nvls-kernels inference-dynamic-batching
        inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
        inference-dynamic-batching-buffer-size-gb
        inference-dynamic-batching-cuda-graph-mixed-prefill-count
        inference-dynamic-batching-cuda-graph-sizing-distribution
        inference-dynamic-batching-logprobs-mode
        inference-dynamic-batching-mamba-memory-ratio
        inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens
        inference-dynamic-batching-num-cuda-graphs
        inference-dynamic-batching-paused-buffer-size-gb
        inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-caching-coordinator-policy
        inference-dynamic-batching-prefix-caching-eviction-policy
        inference-dynamic-batching-prefix-caching-mamba-gb
        inference-dynamic-batching-prefix-caching-routing-alpha
        inference-dynamic-batching-sampling-backend
        inference-dynamic-batching-track-generated-token-events
        inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication
        inference-grouped-gemm-backend inference-logging-step-interval
        inference-max-requests inference-max-seq-length
        inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type
        inference-rng-tracker inference-shards inference-text-gen-server-logging
        inference-use-synchronous-zmq-collectives inference-wandb-logging
        mlp-chunks-for-prefill mlp-chunks-for-training
        moe-pad-experts-for-cuda-graph-inference nccl-all-reduce-for-prefill
        num-speculative-tokens symmetric-ar-type use-legacy-static-engine
        """,
    ),
}

_UNMODELLED = {
    **unmodelled(
        "the host launches each kernel",
        "cuda-graph-impl enable-cuda-graph external-cuda-graph optimizer-cuda-graph",
    ),
    **unmodelled(
        "kernels are those of the default",
        """
        batch-invariant-backend batch-invariant-mode deterministic-mode
        disable-bf16-reduced-precision-matmul disable-jit-fuser fused-residual-rmsnorm
        glu-linear-offset mla-down-proj-fusion no-bias-dropout-fusion no-bias-gelu-fusion
        no-rope-fusion use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp
        use-grouped-gemm-for-shared-expert use-te-activation-func
        use-transformer-engine-op-fuser quick-geglu squared-relu
        activation-func-clamp-value moe-apply-probs-on-input
        disable-clone-scatter-output-in-embedding no-clone-scatter-output-in-embedding
        """,
    ),
    "sft": Entry(needs="packing"),
    "cross-entropy-fusion-impl": Entry(
        unmodelled="kernels are those of the default", off=("native",)
    ),
    "rotary-percent": Entry(unmodelled="rotary positions cover whole heads", off=("1", "1.0")),
    **unmodelled("attention reaches all earlier tokens", "window-size"),
    "softmax-type": Entry(unmodelled="attention has no sinks", off=("vanilla",)),
    "position-embedding-type": Entry(unmodelled="positions are rotary, of one dimension"),
    **unmodelled("queries and keys are not normed or clipped so", "qk-l2-norm qk-clip"),
    **unmodelled(
        "communication is that of the default",
        """
        defer-embedding-wgrad-compute high-priority-a2a-comm-stream
        high-priority-stream-groups nccl-communicator-config-path
        overlap-dispatch-backward-with-experts-wgrad
        overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
        tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad
        disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag disable-tp-comm-split-rs
        no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-split-ag
        no-tp-comm-split-rs use-nccl-ub use-ring-exchange-p2p use-sharp ddp-num-buckets
        ddp-param-name-patterns-for-fp32-local-accumulation
        ddp-reduce-scatter-with-fp32-accumulation no-gradient-reduce-div-fusion
        """,
    ),
    "pipeline-model-parallel-comm-backend": Entry(
        unmodelled="communication is that of the default", off=("nccl",)
    ),
    **unmodelled(
        "tokens are exchanged by NCCL's all-to-all",
        """
        flex-dispatcher-of-another-backend
        moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute
        moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms
        moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs
        moe-ncclep-zero-copy moe-permute-fusion-into-hybridep
        """,
    ),
    **unmodelled("DeepEP takes no multiprocessors from computation", "moe-deepep-num-sms"),
    **unmodelled(
        "the router has neither noise nor this loss or padding",
        """
        moe-input-jitter-eps moe-z-loss-coeff moe-router-padding-for-fp8
        moe-router-padding-for-quantization
        """,
    ),
    **unmodelled("shared experts have no gate", "moe-shared-expert-gate"),
    **unmodelled(
        "these tensors have their usual type",
        """
        apply-query-key-layer-scaling fp16-lm-cross-entropy fp32-residual-connection
        fp4-param-gather fp8-output-proj keep-fp8-transpose-cache output-logit-dtype
        disable-fp8-wgrad no-fp8-wgrad
        """,
    ),
    **unmodelled(
        "memory is without it",
        """
        distribute-saved-activations empty-unused-memory-level moe-paged-stash
        reuse-grad-buf-for-mxfp8-param-ag
        """,
    ),
    **unmodelled("the vocabulary is padded", "disable-pad-vocab-size no-pad-vocab-size"),
    **unmodelled(
        "the architecture is the file's, not the checkpoint's",
        "use-checkpoint-args use-mp-args-from-checkpoint-args",
    ),
    **unmodelled(
        "sequences are filled by one document",
        "dataloader-inter-document-masking reset-attention-mask reset-position-ids",
    ),
    **unmodelled("layers with MLA or experts have no biases", "add-bias-linear"),
    **unmodelled("compressed queries, keys and values are normed", "no-qk-layernorm-of-mla"),
    **unmodelled("products of experts are grouped", "no-moe-grouped-gemm"),
    **unmodelled(
        "the vocabulary is --vocab-size, which Megatron-LM replaces by the tokenizer's",
        "vocab-size-with-tokenizer",
    ),
    **unmodelled(
        "nothing is computed for logs or checks",
        "log-num-zeros-in-grad log-params-norm check-weight-hash-across-dp-replicas-interval",
    ),
    **unmodelled("gradients are clipped by their norm", "no-clip-grad"),
    **unmodelled("the file names none, and counts as arguments of pretrain_gpt.py", "program"),
    "timing-log-level": Entry(unmodelled="no barriers are timed", off=("1",)),
    **unmodelled(
        "activations are offloaded as in core_v0.16.1, without this argument",
        """
        activation-offload-fraction delay-offload-until-cuda-graph
        delta-offload-bytes-across-pp-ranks fine-grained-offloading-max-inflight-offloads
        """,
    ),
    **unmodelled("copies are of pinned memory", "no-pin-cpu-grads no-pin-cpu-params"),
    **unmodelled("Muon's products are in bf16", "muon-fp32-matmul-prec", "medium"),
    **unmodelled("Muon's iterations are quintic", "muon-coefficient-type", "quintic"),
    **unmodelled("Muon's symmetric products are computed whole", "muon-use-syrk"),
    **unmodelled("Muon leaves other parameters to Adam", "muon-scalar-optimizer", "adam"),
    **unmodelled("ranks are in the order tp, cp, dp, pp", "use-tp-pp-dp-mapping"),
    **unmodelled("the router balances without iterations", "sinkhorn"),
}

OTHER_FAMILY = "left out: this family of models is not modelled"
_REFUSED = {
    **refused(
        OTHER_FAMILY,
        """
        attention-output-gate bert-embedder-type bert-no-binary-head biencoder-projection-dim
        biencoder-shared-query-context-model classes-fraction decoder-num-layers
        decoder-seq-length dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size
        dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp
        dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs enable-mhc-connections
        encoder-num-layers encoder-seq-length experimental-attention-variant
        heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path
        hybrid-layer-pattern hybrid-override-pattern ict-head-size img-h img-w
        indexer-batch-size is-hybrid-model iter-per-epoch mamba-head-dim mamba-num-groups
        mamba-num-heads mamba-state-dim moe-latent-size num-channels
        num-classes output-bert-embeddings patch-dim query-in-block-prob
        retriever-report-topk-accuracies retriever-score-scaling swin-backbone-type
        language-model-type vision-backbone-type vision-model-type vision-pretraining
        vision-pretraining-type
        """,
    ),
    **refused(
        "left out: a step of reinforcement learning is not modelled",
        """
        grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight
        grpo-filter-groups-with-same-reward grpo-group-size grpo-iterations grpo-kl-beta
        grpo-prompts-per-step langrl-env-config perform-rl-step rl-consumption-granularity
        rl-default-temperature rl-default-top-k rl-default-top-p rl-durable-rollout-bank
        rl-generation-lag rl-importance-sampling-truncation-coef
        rl-inference-expert-model-parallel-size
        rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
        rl-inference-model-unified-memory-level rl-inference-parsers
        rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size
        rl-kv-cache-management-mode rl-max-inflight-requests
        rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference
        rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir
        rl-prompts-per-eval rl-rollout-bank-dir rl-rollout-bank-max-bytes
        rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin
        rl-skip-bos-token rl-submission-granularity rl-training-cuda-graphs
        rl-use-sequence-packing rl-verify-model-weights-swap
        """,
    ),
    **refused(
        "left out: it is not modelled",
        """
        fp4-quantizer-factory fp8-quantizer-factory freeze-all-layers
        hybrid-context-parallel kitchen-config-file
        kitchen-recipe-number logits-load-dir logits-save-dir moe-combine-bwd-dtype
        moe-dispatch-fwd-dtype moe-expert-rank-capacity-factor moe-layer-recompute
        te-precision-config-file use-kitchen-attention
        use-megatron-fsdp use-torch-fsdp2 spec
        """,
    ),
    **refused(
        "0: what is copied, and when, depends on the version of TransformerEngine (2.10); use"
        " --fine-grained-activation-offloading",
        "cpu-offloading-num-layers",
        "0",
    ),
    **refused(
        "1, as weights are not gathered over more ranks",
        "tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards",
        "1",
    ),
    "vocab-size-of-another-tokenizer": Entry(
        refused="left out, or the size of the vocabulary of --tokenizer-type"
    ),
    "distributed-backend": Entry(refused="nccl", off=("nccl",)),
    "transformer-impl": Entry(
        refused="transformer_engine or local", off=("transformer_engine",)
    ),
    **refused("left out: give --micro-batch-size", "batch-size"),
    **refused("left out: give --tensor-model-parallel-size", "model-parallel-size"),
    **refused("left out: name the YAML file itself", "yaml-cfg"),
}

ENTRIES = _MODEL | _JOB | _SETTINGS | _WITHOUT_EFFECT | _UNMODELLED | _REFUSED
