"""The flags of `stepmark train`, llm-train-bench's spellings among them."""

from stepmark.cli.options import BUDGET, DEVICE, OUTPUT, Flag

MODELS = (
    Flag(
        name="models",
        kind=list[str],
        help="model name(s), a config.json of Hugging Face or of llm-train-bench",
        argument=True,
    ),
)
MODEL = (
    Flag(name="model", kind=str, help="the same as a flag: one, or several with commas"),
    Flag(name="scale", kind=str, help="1/64: scaled-down widths; tiny: a tiny model"),
    Flag(
        name="mbs",
        kind=str,
        names=("--mbs", "--bsz"),
        help="micro-batch per data rank: 1, 1,2 or 1-8 [1]",
    ),
    Flag(name="seq_len", kind=int, help="sequence length instead of the model's"),
    Flag(
        name="text",
        kind=bool,
        default=False,
        names=("--text",),
        help="real text by bytes, so that the loss must fall, instead of random tokens",
    ),
    Flag(name="text_file", kind=str, help="this text"),
    Flag(
        name="workers",
        kind=int,
        names=("--workers", "--n-workers", "--n_workers"),
        help="processes of the data loader [2 on accelerators, 0 on a CPU]",
    ),
    Flag(name="seed", kind=int, help="of weights and data [0]"),
)
SPREAD = (
    DEVICE,
    Flag(
        name="nproc",
        kind=str,
        names=("--nproc", "-g"),
        help="ranks [all accelerators; on a CPU 1, or 2 where the strategy needs them]",
    ),
    Flag(
        name="strategy",
        kind=str,
        help="single, ddp, fsdp, tp, pp, cp, or several [single for one rank, else fsdp]",
    ),
    Flag(name="tp", kind=int, help="tensor-parallel degree, with sequence parallelism [1]"),
    Flag(name="pp", kind=int, help="pipeline stages' ranks [1]"),
    Flag(name="cp", kind=int, help="context-parallel degree: ranks of a sequence [1]"),
    Flag(name="ep", kind=int, help="expert-parallel degree, within the FSDP ranks [1]"),
    Flag(name="dp_replicate", kind=int, help="fsdp: copies, each over the other ranks (HSDP)"),
)
STEP = (
    Flag(
        name="schedule",
        kind=str,
        help="timed is: step (with optimizer), micro (optimizer every Nth), or both [step]",
    ),
    Flag(
        name="grad_accum",
        kind=int,
        names=("--grad-accum", "--grad-acc-steps", "--grad_acc_steps"),
        help="micro-steps per optimizer step [1; 8 with --schedule micro]",
    ),
    Flag(
        name="grad_sync", kind=str, help="reduce gradients: every micro-step, or last [every]"
    ),
    Flag(name="lr", kind=float, help="learning rate of AdamW [0.0003]"),
    Flag(name="clip", kind=float, help="gradient norm to clip to; 0 = not [1]"),
)
NUMBERS = (
    Flag(
        name="precision",
        kind=str,
        help="amp (fp32 weights, autocast to bf16), master (the same with bf16 copies that "
        "the optimizer renews), bf16, fp32 [amp; fp32 on a CPU]",
    ),
    Flag(
        name="reduce_dtype",
        kind=str,
        help="of gradients between data ranks: fp32 or bf16 [bf16 for fsdp with amp and for "
        "bf16 weights, else fp32]",
    ),
    Flag(
        name="fp8",
        kind=bool,
        default=False,
        names=("--fp8", "--use-fp8", "--use_fp8"),
        help="linear layers in FP8",
    ),
    Flag(
        name="fp8_recipe",
        kind=str,
        help="tensorwise, rowwise (torchao), te (TransformerEngine) [tensorwise]",
    ),
    Flag(
        name="fp8_head",
        kind=bool,
        names=("--fp8-head/--no-fp8-head",),
        help="the output head, too [no]",
    ),
    Flag(
        name="fp8_all_gather",
        kind=bool,
        names=("--fp8-all-gather/--no-fp8-all-gather",),
        help="fsdp gathers weights in FP8 [yes for tensorwise]",
    ),
)
TECHNIQUES = (
    Flag(
        name="compile",
        kind=bool,
        default=False,
        names=("--compile", "--pt-compile", "--pt_compile"),
        help="torch.compile",
    ),
    Flag(name="compile_scope", kind=str, help="one graph per block, or model [block]"),
    Flag(
        name="compile_mode",
        kind=str,
        names=("--compile-mode", "--compile_mode"),
        help="default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs [default]",
    ),
    Flag(
        name="compile_fallback",
        kind=bool,
        default=False,
        names=("--compile-fallback",),
        help="run eagerly where compiling fails",
    ),
    Flag(
        name="sac",
        kind=str,
        help="activation checkpointing: none, full, ops, or Q/P: Q of every P blocks [none]",
    ),
    Flag(
        name="sac_freq",
        kind=str,
        names=("--sac-freq", "--sac_freq"),
        help="as llm-train-bench's: --sac, but 1/1 is none",
    ),
    Flag(name="attention", kind=str, help="auto, cudnn, flash, efficient or math [auto]"),
    Flag(name="loss_chunks", kind=int, help="head and loss over so many parts of tokens [1]"),
    Flag(
        name="cuda_graph",
        kind=bool,
        default=False,
        names=("--cuda-graph",),
        help="single: the whole step as one CUDA graph",
    ),
)
SHARDING = (
    Flag(name="reshard", kind=str, help="fsdp, after forward: yes, no, or ranks [yes]"),
    Flag(name="prefetch", kind=int, help="fsdp: groups gathered ahead [1]"),
    Flag(name="blocks_per_group", kind=int, help="fsdp: blocks gathered as one [1]"),
    Flag(name="bucket_mb", kind=int, help="ddp: gradients reduced as one [25]"),
    Flag(
        name="async_tp",
        kind=bool,
        default=False,
        names=("--async-tp",),
        help="tp with --compile: products in pieces beside their communication",
    ),
    Flag(name="pp_schedule", kind=str, help="1f1b or interleaved [1f1b]"),
    Flag(name="pp_microbatches", kind=int, help="parts of a micro-batch [as many as stages]"),
)
HOW = (
    Flag(
        name="steps",
        kind=int,
        names=("--steps", "--n-steps", "--n_steps"),
        help="steady samples, at least [30; with --schedule micro 10 optimizer steps' worth]",
    ),
    BUDGET,
    Flag(name="timeout", kind=str, help="a case that takes longer has failed [600s]"),
    Flag(name="launches", kind=int, help="times that all is measured in new processes [1]"),
    Flag(
        name="find_batch",
        kind=bool,
        default=False,
        names=("--find-batch",),
        help="search the fastest micro-batch that fits",
    ),
    Flag(
        name="profile",
        kind=bool,
        default=False,
        names=("--profile",),
        help="Kineto traces of a few more steps, and their table",
    ),
    Flag(name="profile_ranks", kind=str, help="ranks that write one, e.g. 0,1 [0]"),
    Flag(
        name="messages",
        kind=bool,
        default=False,
        names=("--messages",),
        help="every collective of one more step, as a histogram",
    ),
)
ALL = (MODEL, SPREAD, STEP, NUMBERS, TECHNIQUES, SHARDING, HOW, OUTPUT)
