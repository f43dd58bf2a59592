"""The flags of `stepmark workload generate`: ours, and AICB's spellings of the same.

Every flag may be written with - or with _. The settings of the framework's rules are flags,
too: their fields are read from the rules when the framework is known. Over 250 lines: flags are
a table.
"""

import dataclasses
import types
import typing
from collections.abc import Container, Mapping, Sequence
from typing import Any

from stepmark.cli.options import Flag
from stepmark.core.errors import ConfigError

MODEL = (
    Flag(
        name="model",
        kind=str,
        help="model name, config.json (Hugging Face's) or FILE.py:function",
    ),
    Flag(
        name="model_size",
        kind=str,
        names=("-m", "--model-size"),
        help="AICB's preset: 7, 13, 22, 30, 65, 175, 405, moe, deepseek16, 236, 671",
    ),
    Flag(name="model_name", kind=str, help="what the workload is called"),
    Flag(name="scale", kind=str, help="1/64: scaled-down widths; tiny: a tiny model"),
    Flag(name="num_layers", kind=int, help="transformer layers"),
    Flag(name="hidden_size", kind=int, help="width of the residual stream"),
    Flag(name="ffn_hidden_size", kind=int, help="width of the MLP [4 x hidden; swiglu 8/3 x]"),
    Flag(
        name="num_heads",
        kind=int,
        names=("--num-heads", "--num-attention-heads"),
        help="attention heads",
    ),
    Flag(
        name="num_kv_heads",
        kind=int,
        names=("--num-kv-heads", "--num-key-value-heads", "--num-query-groups"),
        help="key and value heads [as attention heads]",
    ),
    Flag(name="vocab_size", kind=int, help="tokens before padding"),
    Flag(
        name="make_vocab_size_divisible_by",
        kind=int,
        help="megatron pads the vocabulary to a multiple of this x tp [128]",
    ),
    Flag(
        name="max_positions",
        kind=int,
        names=("--max-positions", "--max-position-embeddings"),
        help="rows of a learned position table; 0: none",
    ),
    Flag(
        name="seq_len",
        kind=int,
        names=("--seq-len", "--seq-length"),
        help="tokens per sequence [the model's]",
    ),
    Flag(name="swiglu", kind=bool, names=("--swiglu/--no-swiglu",), help="gated MLP with SiLU"),
    Flag(
        name="linear_bias",
        kind=bool,
        names=(
            "--linear-bias/--no-linear-bias",
            "--add-bias-linear/--no-add-bias-linear",
        ),
        help="biases of linear layers",
    ),
    Flag(
        name="untied",
        kind=bool,
        names=(
            "--untied/--tied",
            "--untie-embeddings-and-output-weights/--no-untie-embeddings-and-output-weights",
        ),
        help="head with weights of its own",
    ),
)
EXPERTS = (
    Flag(
        name="num_experts",
        kind=int,
        names=("--num-experts", "--num-moe-experts", "--experts"),
        help="routed experts per layer",
    ),
    Flag(
        name="top_k",
        kind=int,
        names=("--top-k", "--moe-router-topk", "--topk"),
        help="routed experts per token [2]",
    ),
    Flag(
        name="moe_ffn_hidden_size", kind=int, help="width of a routed expert [ffn-hidden-size]"
    ),
    Flag(
        name="dense_layers",
        kind=int,
        names=("--dense-layers", "--n-dense-layers", "--n-dense-layer"),
        help="leading layers without experts",
    ),
    Flag(
        name="shared_experts",
        kind=int,
        names=("--shared-experts", "--n-shared-expert"),
        help="experts that see every token",
    ),
    Flag(
        name="moe_enable",
        kind=bool,
        names=("--moe-enable/--no-moe-enable", "--moe-enabled/--no-moe-enabled"),
        help="AICB: the model has experts",
    ),
    Flag(name="q_lora_rank", kind=int, help="MLA: width queries are compressed to"),
    Flag(name="kv_lora_rank", kind=int, help="MLA: width keys and values are compressed to"),
    Flag(
        name="qk_rope_head_dim",
        kind=int,
        names=("--qk-rope-head-dim", "--qk-rope-dim"),
        help="MLA: rotated part of a head",
    ),
    Flag(
        name="qk_nope_head_dim",
        kind=int,
        names=("--qk-nope-head-dim", "--qk-nope-dim"),
        help="MLA: unrotated part of a head",
    ),
    Flag(name="v_head_dim", kind=int, help="MLA: width of a value head"),
)
SPREAD = (
    Flag(name="world_size", kind=int, help="ranks in all [the product of the axes]"),
    Flag(
        name="tp",
        kind=int,
        names=("--tp", "--tp-num", "--tensor-model-parallel-size"),
        help="tensor-parallel degree [1]",
    ),
    Flag(
        name="pp",
        kind=int,
        names=(
            *("--pp", "--pp-num", "--pipeline-model-parallel"),
            "--pipeline-model-parallel-size",
        ),
        help="pipeline stages' ranks [1]",
    ),
    Flag(
        name="cp",
        kind=int,
        names=("--cp", "--context-parallel-size"),
        help="context-parallel degree: ranks of a sequence [1]",
    ),
    Flag(
        name="ep",
        kind=int,
        names=(
            *("--ep", "--expert-model-parallel-size", "--expert-parallel-size"),
            "--ep-num",
        ),
        help="expert-parallel degree, within the data ranks [1]",
    ),
    Flag(name="dp_shard", kind=int, help="ranks that shard [what world-size leaves]"),
    Flag(
        name="dp_replicate",
        kind=int,
        names=("--dp-replicate", "--num-distributed-optimizer-instances"),
        help="copies, each over the other ranks (HSDP)",
    ),
    Flag(
        name="gbs",
        kind=int,
        names=("--gbs", "--global-batch", "--global-batch-size"),
        help="sequences per optimizer step [one micro-batch per data rank]",
    ),
    Flag(
        name="mbs",
        kind=int,
        names=("--mbs", "--bsz", "--micro-batch", "--micro-batch-size", "--batch-size"),
        help="sequences per micro-batch [1]",
    ),
    Flag(name="dtype", kind=str, help="of weights and activations [bf16]"),
)
WHAT = (
    Flag(
        name="framework",
        kind=str,
        names=("--framework", "--frame", "--comm-frame"),
        help="whose behaviour, and whose settings below [megatron]",
    ),
)
COMPUTE_FROM = Flag(
    name="compute_from",
    kind=str,
    help="times of computation: a run, an AIOB file, roofline:DEVICE, fixed:1ns",
)
FORMAT = Flag(name="to", kind=str, names=("--format", "--to"), help="of the file [native]")
OUT = Flag(
    name="out",
    kind=str,
    names=("-o", "--out"),
    help="file to write, - = stdout; a folder/: all ranks",
)
RANK = Flag(name="rank", kind=int, help="rank, for formats of one rank [the stage's first]")
LEFT_OUT = (
    Flag(
        name="group_sizes",
        kind=str,
        help="ranks of groups that an AICB file does not tell, e.g. ep=16",
    ),
    Flag(name="world_size", kind=int, help="ranks in all, where a SimAI file does not tell"),
)
STAGE = Flag(name="stage", kind=int, help="pipeline stage [0]")
# Of frameworks that have no ZeRO stages.
PIPELINE_STAGE = Flag(
    name="pipeline_stage",
    kind=int,
    names=("--stage",),
    help="pipeline stage, as --pp-rank; of DeepSpeed it is ZeRO's",
)
DISTINCT = Flag(
    name="distinct",
    kind=bool,
    default=False,
    names=("--distinct",),
    help="distinct collectives and shapes as stepmark comm and op commands",
)
TABLES = (
    Flag(name="json", kind=str, help="the tables as JSON; - = stdout"),
    Flag(name="csv", kind=str, help="the tables as CSV; - = stdout; a folder: a file each"),
)
WRITE = (
    FORMAT,
    OUT,
    COMPUTE_FROM,
    Flag(
        name="comp_filepath",
        kind=str,
        help="AICB's --compute-from FILE; what that has not gets 1 ns, AICB's filler",
    ),
    Flag(
        name="pp_rank",
        kind=int,
        help="pipeline stage for formats of one stage, and for tables; -1: the first [-1]",
    ),
    RANK,
    DISTINCT,
    *TABLES,
)

# Other names of the rules' settings, AICB's and Megatron's, beside the fields' own.
SETTING_NAMES: Mapping[str, tuple[str, ...]] = {
    "sequence_parallel": ("--sp", "--enable-sequence-parallel", "--sp-enable"),
    "virtual_pipeline_model_parallel_size": ("--vpp",),
    "stage": ("--zero-stage",),
    "stage3_prefetch_bucket_size": ("--prefetch-bucket-size",),
    "stage3_param_persistence_threshold": ("--param-persistence-threshold",),
    "stage3_model_persistence_threshold": ("--model-persistence-threshold",),
    "stage3_max_live_parameters": ("--max-live-parameters",),
}


def spelled(word: str, switches: Container[str]) -> str:
    """An option as it is declared: --seq_len=4 is --seq-len=4. Other words stay.

    switches: options without a value, and their opposites; --aiob_enable=True is --aiob-enable,
    =False the opposite, and "" where there is none.
    """
    if not word.startswith("--"):
        return word
    name, is_, value = word.partition("=")
    name = name.replace("_", "-")
    if is_ and name in switches and value.lower() in _YES:
        return name
    if is_ and name in switches and value.lower() in _NO:
        opposite = "--no-" + name.removeprefix("--")
        return opposite if opposite in switches else ""
    return name + is_ + value


def framework_of(args: Sequence[str]) -> str:
    """What the command line says of --framework, before it is parsed; "" for nothing."""
    (flag,) = WHAT
    found = ""
    for word, after in zip(args, [*args[1:], ""], strict=False):
        name, is_, value = spelled(word, ()).partition("=")
        if name in flag.names:
            found = value if is_ else after
    return found


def with_bare_recompute(args: list[str]) -> list[str]:
    """AICB's --recompute has no value and means --recompute-activations."""
    return [
        "--recompute-activations" if word == "--recompute" and after.startswith("-") else word
        for word, after in zip(args, [*args[1:], "-"], strict=False)
    ]


def refuse_two_formats(args: Sequence[str]) -> None:
    """--to and --format that differ: ConfigError. The last one of other flags wins."""
    said: dict[str, str] = {}
    for word, after in zip(args, [*args[1:], ""], strict=False):
        name, is_, value = word.partition("=")
        if name in FORMAT.names:
            said[name] = value if is_ else after
    if len(set(said.values())) > 1:
        raise ConfigError("format", " and ".join(said.values()), "one format")


def kinds(fields: Mapping[str, "dataclasses.Field[Any]"]) -> str:
    """The words that a framework's --recompute takes."""
    return ", ".join(one for one in kind_of(fields["recompute"]) if one != "none")


_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "none")


def of_settings(fields: Mapping[str, "dataclasses.Field[Any]"]) -> tuple[Flag, ...]:
    """A flag for each setting of a framework that no other flag stands for.

    Numbers and words are text here; they are read when the settings are made.
    """
    general = (*MODEL, *EXPERTS, *SPREAD, *WHAT, *WRITE)
    taken = {name for flag in general for name in words(flag)}
    return tuple(
        _setting_flag(name, field) for name, field in fields.items() if name not in taken
    )


def words(flag: Flag) -> set[str]:
    """All names of a flag, with _ and without dashes in front."""
    names = {part for name in flag.names for part in name.split("/")}
    return {flag.name, *(name.lstrip("-").replace("-", "_") for name in names)}


def _setting_flag(name: str, field: "dataclasses.Field[Any]") -> Flag:
    dash = name.replace("_", "-")
    aliases = SETTING_NAMES.get(name, ())
    text = str(field.metadata.get("help", name))
    if kind_of(field) is bool:
        text += f" [{'yes' if field.default else 'no'}]"
        switches = (f"{one}/--no-{one.removeprefix('--')}" for one in (f"--{dash}", *aliases))
        return Flag(name=name, kind=bool, names=tuple(switches), help=text)
    if field.default not in (None, ""):
        text += f" [{field.default}]"
    shown = {int: "<int>", float: "<float>"}.get(kind_of(field), "<str>")
    names = (f"--{dash}", *aliases)
    return Flag(name=name, kind=str, names=names, help=text, metavar=shown)


def kind_of(field: "dataclasses.Field[Any]") -> Any:
    """The type of a setting; of `int | None` it is int."""
    kind = field.type
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
    return kind
