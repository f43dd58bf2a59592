"""The options of `stepmark workload`: ours, and AICB's spellings of the same.

Every option may be written with - or with _. The settings of the framework's rules are options,
too: `stepmark.workloads.workload_flags` adds them when the framework is known.
"""

from dataclasses import dataclass
from typing import Annotated

from stepmark.cases.train_case import NARROW
from stepmark.ground.option_groups import (
    MBS,
    MICRO_BATCH,
    OUT,
    Axes,
    Device,
    Files,
    ModelChoice,
    TimeLimits,
)
from stepmark.ground.options import (
    REQUIRED,
    Duration,
    Words,
    between,
    comma_list,
    flag,
    group,
    words_of,
)
from stepmark.model.packing import PackingOption

_FILE = "file to write, - = stdout; DIR/ = all ranks"


@group
class Model(ModelChoice):
    """Model."""

    model: str | None = flag("model name, config.json or FILE.py:function", names="model")
    model_size: str | None = flag(
        "AICB's preset: 7, 13, 22, 30, 65, 175, 405, moe, deepseek16, 236, 671",
        "-m",
        "--model-size",
        rare=True,
        metavar="PRESET",
    )
    model_name: str | None = flag("what the workload is called", rare=True)
    packing: PackingOption | None = flag(
        "sequences are packed from pieces of this mean and greatest length, masked apart",
        rare=True,
    )
    num_layers: int | None = flag("transformer layers", rare=True)
    hidden_size: int | None = flag("width of the residual stream", rare=True)
    ffn_hidden_size: int | None = flag("width of the MLP [4 x hidden; swiglu 8/3 x]", rare=True)
    num_heads: int | None = flag(
        "attention heads", "--num-heads", "--num-attention-heads", rare=True
    )
    num_kv_heads: int | None = flag(
        "key and value heads [as attention heads]",
        "--num-kv-heads",
        "--num-key-value-heads",
        "--num-query-groups",
        rare=True,
    )
    head_dim: int | None = flag(
        "width of a head [hidden / heads]", "--head-dim", "--kv-channels", rare=True
    )
    norm: Annotated[str, words_of("rmsnorm", "layernorm")] | None = flag(
        "norms before attention and MLP", rare=True
    )
    vocab_size: int | None = flag("tokens before padding", rare=True)
    make_vocab_size_divisible_by: int | None = flag(
        "megatron pads the vocabulary to a multiple of this x tp [128]", rare=True
    )
    max_positions: int | None = flag(
        "rows of a learned position table; 0: none",
        "--max-positions",
        "--max-position-embeddings",
        rare=True,
    )
    swiglu: bool | None = flag("gated MLP with SiLU", "--swiglu/--no-swiglu", rare=True)
    linear_bias: bool | None = flag(
        "biases of linear layers",
        "--linear-bias/--no-linear-bias",
        "--add-bias-linear/--no-add-bias-linear",
        rare=True,
    )
    qkv_bias: bool | None = flag(
        "biases of q, k and v alone",
        "--qkv-bias/--no-qkv-bias",
        "--add-qkv-bias/--no-add-qkv-bias",
        rare=True,
    )
    qk_norm: bool | None = flag(
        "norms of each query and key head",
        "--qk-norm/--no-qk-norm",
        "--qk-layernorm/--no-qk-layernorm",
        rare=True,
    )
    untied: bool | None = flag(
        "head with weights of its own",
        "--untied/--tied",
        "--untie-embeddings-and-output-weights/--no-untie-embeddings-and-output-weights",
        rare=True,
    )
    num_mtp_layers: int | None = flag(
        "modules of multi-token prediction behind the last layer",
        "--num-mtp-layers",
        "--mtp-num-layers",
        rare=True,
    )


@group
class Experts:
    """Experts and MLA."""

    num_experts: int | None = flag(
        "routed experts per layer", "--num-experts", "--num-moe-experts", "--experts", rare=True
    )
    top_k: int | None = flag(
        "routed experts per token [2]", "--top-k", "--moe-router-topk", "--topk", rare=True
    )
    moe_ffn_hidden_size: int | None = flag(
        "width of a routed expert [ffn-hidden-size]", rare=True
    )
    dense_layers: int | None = flag(
        "leading layers without experts",
        "--dense-layers",
        "--n-dense-layers",
        "--n-dense-layer",
        rare=True,
    )
    shared_experts: int | None = flag(
        "experts that see every token", "--shared-experts", "--n-shared-expert", rare=True
    )
    shared_ffn_hidden_size: int | None = flag(
        "width of all shared experts together",
        "--shared-ffn-hidden-size",
        "--moe-shared-expert-intermediate-size",
        rare=True,
    )
    expert_groups: int | None = flag(
        "groups of experts, of which a token uses --top-groups [1]",
        "--expert-groups",
        "--moe-router-num-groups",
        rare=True,
    )
    top_groups: int | None = flag(
        "groups whose experts a token uses [all]",
        "--top-groups",
        "--moe-router-group-topk",
        rare=True,
    )
    router_bias: bool | None = flag(
        "a bias of each expert in the router",
        "--router-bias/--no-router-bias",
        "--moe-router-enable-expert-bias/--no-moe-router-enable-expert-bias",
        rare=True,
    )
    moe_enable: bool | None = flag(
        "AICB: the model has experts",
        "--moe-enable/--no-moe-enable",
        "--moe-enabled/--no-moe-enabled",
        rare=True,
    )
    q_lora_rank: int | None = flag("MLA: width queries are compressed to; 0: none", rare=True)
    kv_lora_rank: int | None = flag("MLA: width keys and values are compressed to", rare=True)
    qk_rope_head_dim: int | None = flag(
        "MLA: rotated part of a head", "--qk-rope-head-dim", "--qk-rope-dim", rare=True
    )
    qk_nope_head_dim: int | None = flag(
        "MLA: unrotated part of a head", "--qk-nope-head-dim", "--qk-nope-dim", rare=True
    )
    v_head_dim: int | None = flag("MLA: width of a value head", rare=True)


@group
class Layout(Axes):
    """Layout."""

    world_size: int | None = flag("ranks in all [the product of the axes]")
    dp_shard: int | None = flag("ranks that shard [what world-size leaves]", rare=True)
    gbs: int | None = flag(
        "global batch [mbs x data ranks, torch: x stages]",
        "--gbs",
        "--global-batch",
        "--global-batch-size",
    )
    mbs: int | None = flag(
        f"{MBS} [1]",
        *MICRO_BATCH,
    )
    dtype: str | None = flag("of weights and activations [bf16]", rare=True)
    precision: Annotated[str, words_of("bf16", *NARROW)] | None = flag(
        "of linear layers' products [as --dtype]"
    )
    imbalance: float | None = flag(
        "rows of the fullest rank's experts / the mean of ep ranks [1]", rare=True
    )


@group
class FrameworkChoice:
    """Framework."""

    framework: str | None = flag(
        "whose behaviour and settings [megatron]",
        "--framework",
        "--frame",
        "--comm-frame",
        names="framework",
    )
    config: str | None = flag(
        "the framework's own file: Megatron arguments, torchtitan, DeepSpeed; flags win",
        metavar="FILE",
        rare=True,
    )


@group
class MissingFacts:
    """What a file leaves out."""

    group_sizes: str | None = flag(
        "ranks of groups that an AICB file does not tell, e.g. ep=16",
        rare=True,
        metavar="AXIS=N,...",
    )
    world_size: int | None = flag("ranks in all, where a SimAI file does not tell", rare=True)


@dataclass(frozen=True, kw_only=True)
class Rows(Files):
    """Tables."""

    distinct: bool = flag("distinct collectives and shapes, as commands", default=False)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(FrameworkChoice, Model, Experts, Layout, Rows):
    """Output."""

    to: str | None = flag("of the file [native]", "--format", "--to", names="format")
    out: str | None = flag(_FILE, *OUT, metavar="FILE|DIR/")
    compute_from: str | None = flag(
        "compute times: a run, an AIOB file, roofline:DEVICE, fixed:1ns",
        metavar="SOURCE",
    )
    comp_filepath: str | None = flag(
        "AICB's --compute-from FILE; what that has not gets 1 ns, AICB's filler",
        rare=True,
        metavar="FILE",
    )
    pp_rank: int | None = flag(
        "pipeline stage for formats of one stage, and for tables; -1: the first [-1]",
        rare=True,
        metavar="STAGE",
    )
    rank: int | None = flag(
        "rank, for formats of one rank [the stage's first]", rare=True, metavar="RANK"
    )


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Rows, MissingFacts):
    """Page."""

    file: str = flag(
        "workload, in any format; - = stdin", default=REQUIRED, argument=True, metavar="FILE"
    )
    stage: int | None = flag("pipeline stage [0]", metavar="STAGE")
    html: str | None = flag(
        "page with the figures; needs no network; - = stdout", metavar="PATH"
    )


@group
class NewFile(MissingFacts):
    """Output."""

    file: str = flag(
        "workload, in any format; - = stdin", default=REQUIRED, argument=True, metavar="FILE"
    )
    to: str | None = flag("of the new file [native]", "--to", "--format", names="format")
    stage: int | None = flag(
        "pipeline stage, for formats of one stage [0]", rare=True, metavar="STAGE"
    )
    rank: int | None = flag(
        "rank, for formats of one rank [the stage's first]", rare=True, metavar="RANK"
    )


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(NewFile):
    """Output."""

    out: str | None = flag(_FILE, *OUT, metavar="FILE|DIR/")
    compute_from: str | None = flag(
        "compute times: a run, an AIOB file, roofline:DEVICE, fixed:1ns",
        metavar="SOURCE",
    )


@group
class FillMeasuring(TimeLimits, Device):
    """Measuring."""

    measure: bool = flag(
        "time the operators on this device, each shape once, as stepmark op does", default=False
    )
    backend: Words = flag(
        "backend(s) for the families that have them, comma-separated [the first that runs]",
        default=(),
    )
    runs: str | None = flag("folder for run directories [runs]", metavar="DIR")
    dry_run: bool = flag("list the operators, measure none", default=False)
    resume: str | None = flag(
        "go on with this run: skip measured operators, retry failed", metavar="RUN"
    )
    force: bool = flag("resume although the environment differs", default=False, rare=True)


@dataclass(frozen=True, kw_only=True)
class FillOptions(FillMeasuring, NewFile):
    """Output."""

    # Not `out`, which in a plan is the folder of runs.
    output: str | None = flag(_FILE, *OUT, metavar="FILE|DIR/")
    compute_from: str | None = flag(
        "times of what is not measured: a run, an AIOB file, roofline:DEVICE, fixed:1ns",
        metavar="SOURCE",
    )


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Capture."""

    file: str = flag(
        "FILE.py:FUNCTION that builds the job", default=REQUIRED, argument=True, metavar="FILE"
    )
    world_size: Annotated[int, between(1, 2**20)] = flag("ranks of the job", default=REQUIRED)
    rank: int = flag("the rank that is recorded", default=0, metavar="RANK")
    tokens_per_expert: Annotated[tuple[int, ...], comma_list(between(0, 2**40))] = flag(
        "tokens that a rank routes to each expert, one number for all or one each [even share]",
        default=(),
    )
    timeout: Duration = flag("stop if capturing a rank takes longer", default=600.0)
    out: str | None = flag(_FILE, *OUT, metavar="FILE|DIR/")
