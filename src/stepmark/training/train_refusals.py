"""Refuse training that cannot run, and options without effect, before ranks start."""

import itertools
import math
import os
from collections.abc import Iterator

from stepmark.cases.fields import check_needs
from stepmark.cases.split_backward import split_refusals
from stepmark.cases.train_case import NARROW, TrainCase
from stepmark.cases.training import DataParallel, Fp8, OptimizerKind, Precision, Recompute
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import dashed, plain
from stepmark.model.ops.matmul import row_multiple
from stepmark.model.parallel import PipelineSchedule
from stepmark.training.model_refusals import LACKING, OF_ALL_KEYS, PARTS, UNDIVIDED, parts
from stepmark.training.scores import MASKED_KERNELS, all_scores
from stepmark.training.train_options import TrainOptions, show_blocks
from stepmark.workloads.rules.pytorch import muon
from stepmark.workloads.rules.pytorch.fsdp import SMALLER_MESH, divides_experts

_BYTES = 256  # tokens of a text

# Option -> the switch without which it has no effect.
_NEEDS_SWITCH = {
    "compile_scope": "compile",
    "compile_mode": "compile",
    "compile_fallback": "compile",
    "profile_ranks": "profile",
}


def check_options(options: TrainOptions) -> None:
    """Refuse options that contradict each other in every case. Raises ConfigError."""
    _check_precision(options)
    for name, switch in _NEEDS_SWITCH.items():
        if not getattr(options, switch):
            _refuse(options, name, f"only with --{switch}")
    if options.find_batch and options.mbs and len(options.mbs) == 1:
        allowed = "several with --find-batch, e.g. 1-8, or none"
        raise ConfigError("mbs", options.mbs[0], allowed)
    if options.ac:
        _refuse(options, "sac_freq", "it cannot be combined with --ac")
    if path := options.text_file:
        if options.text:
            raise ConfigError("text-file", path, "it cannot be combined with --text")
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if not size:
            allowed = "a file that can be read" if size is None else "a file with text in it"
            raise ConfigError("text-file", path, allowed)


def _check_precision(options: TrainOptions) -> None:
    """Refuse options of FP8 without it, and --fp8 beside another narrow --precision."""
    name = plain(options).get("precision", "")
    is_fp8 = options.fp8 or name == "fp8"
    if options.fp8 and name in NARROW and name != "fp8":
        raise ConfigError("precision", name, "fp8 with --fp8")
    for option in ("fp8_recipe", "fp8_all_gather"):
        if not is_fp8:
            _refuse(options, option, "only with --precision fp8, or --fp8")
    if not (is_fp8 or name in NARROW):
        _refuse(options, "fp8_head", "only with --precision fp8, mxfp8 or nvfp4, or --fp8")


def _refuse(options: TrainOptions, name: str, allowed: str) -> None:
    """Refuse an option if it is given. Raises ConfigError."""
    values = plain(options)
    if name in values:
        raise ConfigError(dashed(name), values[name], allowed)


def profiled_ranks(options: TrainOptions, num_ranks: int) -> tuple[int, ...]:
    """Return --profile-ranks. Raises ConfigError."""
    ranks = options.profile_ranks or (0,)
    if max(ranks) >= num_ranks:
        _refuse(options, "profile_ranks", f"ranks from 0 to {num_ranks - 1}, e.g. 0,1")
    return tuple(sorted(set(ranks)))


def check(case: TrainCase, options: TrainOptions) -> None:
    """Refuse a case that cannot run, and options that have no effect in it.

    Raises ConfigError for the first problem.
    """
    check_needs(case, options)
    case.parallel.check(case.model)
    rules = (_model, _axes, _pipeline, _checkpointing, _numbers, _fp8, _data_parallel)
    more = (_graphs, _optimizer)
    for field, value, allowed in itertools.chain(*(rule(case) for rule in (*rules, *more))):
        raise ConfigError(field, value, allowed)
    if options.steps and options.steps % case.cycle:
        allowed = f"a multiple of {case.cycle}: whole optimizer steps of --schedule micro"
        raise ConfigError("steps", options.steps, allowed)
    profiled_ranks(options, case.num_ranks)


Refused = Iterator[tuple[str, object, str]]  # field, value, rule


def _model(case: TrainCase) -> Refused:
    model = case.model
    words = parts(model, LACKING)
    if model.activation == "xielu":
        words.append("xIELU")
    if words:
        allowed = f"one without {', '.join(words)}: train cannot run them"
        yield "model", model.name, allowed
    is_masked = any(not scores.is_plain for scores in all_scores(model))
    if is_masked and case.attention not in MASKED_KERNELS:
        has = f"{model.name} has windows, chunks, sinks or capped scores"
        yield "attention", case.attention, f"{' or '.join(MASKED_KERNELS)}, since {has}"


def _axes(case: TrainCase) -> Refused:
    axes = case.parallel
    model = case.model
    if axes.tp > 1 and (model.moe or model.mla):
        what = "experts" if model.moe else "latent attention"
        yield "tp", axes.tp, f"1, since {model.name} has {what}"
    for name, size, among in (("tp", axes.tp, UNDIVIDED), ("cp", axes.cp, OF_ALL_KEYS)):
        if size > 1 and (words := parts(model, among)):
            yield name, size, f"1, since {model.name} has {', '.join(words)}"
    if axes.cp > 1:
        if case.data_parallel is DataParallel.NONE:
            yield "cp", axes.cp, "1 with tp or pp alone; with --strategy fsdp it may be more"
        if model.seq_len % (2 * axes.cp):
            allowed = f"a divisor of half the sequence length ({model.seq_len} / 2)"
            yield "cp", axes.cp, allowed
        if case.attention == "cudnn":  # it has no causal mask that begins at the last key
            allowed = "auto, flash, efficient or math with cp, which needs another causal mask"
            yield "attention", case.attention, allowed
    if model.seq_len // axes.cp % axes.tp:
        allowed = f"a divisor of the sequence length {model.seq_len}"
        yield "tp", axes.tp, allowed + (f" over {axes.cp} cp ranks" if axes.cp > 1 else "")
    for name, size in (("tp", axes.tp), ("pp", axes.pp)):
        if size > 1 and case.data_parallel is DataParallel.DDP:
            # Its buckets take no DTensors, and it reduces once per pass, not per microbatch.
            yield name, size, "1 with ddp; with --strategy fsdp it may be more"
    if case.async_tp and not case.compile.has_blocks:
        yield "async-tp", "yes", "only with --compile of the layers, which finds the pairs"


def _pipeline(case: TrainCase) -> Refused:
    pp = case.parallel.pp
    model = case.model
    if pp == 1:
        return
    stages = case.num_stages
    parts = case.num_microbatches
    if model.num_layers < stages:
        most = model.num_layers * pp // stages
        has = f"{model.name} has {model.num_layers} layers for {stages} stages"
        yield "pp", pp, f"at most {most}: {has}"
    if model.tied_embeddings:
        yield "pp", pp, f"1, since {model.name} ties its input and output embeddings"
    if model.num_mtp_layers:  # it needs the table of embeddings on the last stage
        yield "pp", pp, f"1, since {model.name} has {PARTS['num_mtp_layers']}"
    if parts < stages:
        yield "pp-microbatches", parts, f"at least {stages}, the number of stages"
    if case.mbs % parts:
        rule = f"a multiple of {parts}, because it counts all microbatches of a pipeline"
        yield "mbs", case.mbs, rule
    if case.loss_chunks > 1:
        yield "loss-chunks", case.loss_chunks, "1 with a pipeline, which has microbatches"
    if case.pp_stages == 1 and case.pp_schedule is PipelineSchedule.INTERLEAVED:
        yield "pp-stages", 1, "2 or more with interleaved; 1f1b has one"
    names = {"recompute": "ac", "reshard_after_forward": "reshard"}
    for field, value, allowed in split_refusals(
        case.pp_schedule,
        model,
        recompute=case.recompute,
        compiles=case.compile,
        is_narrow=case.fp8 is not Fp8.NONE,
        reshard=case.reshard if case.data_parallel is DataParallel.FSDP else "no",
    ):
        yield names.get(field, dashed(field)), value, allowed


def _checkpointing(case: TrainCase) -> Refused:
    if case.recompute is Recompute.NONE:
        return
    layers = case.model.num_layers
    blocks = show_blocks((case.recompute, case.recompute_blocks))
    if layers == 1:
        yield "ac", blocks, f"none: {case.model.name} has one layer"
    compiles = case.compile.has_blocks
    if case.parallel.tp > 1 and compiles and case.recompute is not Recompute.OPS:
        # torch 2.13 keeps a DeviceMesh among the tensors for backward, and asserts.
        yield "ac", blocks, "selective with tp and --compile"
    if case.recompute_blocks[1] > layers:
        yield "ac", blocks, f"q/p with p at most {layers}, the number of layers"


def _numbers(case: TrainCase) -> Refused:
    reduced = case.reduce_dtype
    if case.parallel.gradient_ranks == 1 and reduced != "fp32":
        yield "reduce-dtype", reduced, "only with several data ranks"
    is_ddp = case.data_parallel is DataParallel.DDP
    if is_ddp and case.precision in (Precision.BF16, Precision.MASTER) and reduced == "fp32":
        yield "reduce-dtype", reduced, "bf16: ddp reduces gradients as they are"
    if case.precision is Precision.MASTER:
        if case.data_parallel is DataParallel.FSDP:
            allowed = "amp with fsdp, whose shards are fp32 and gathered in bf16"
            yield "precision", "master", allowed
        if case.cuda_graph or case.compiles_graphs:
            yield "precision", "master", "amp or bf16 with CUDA graphs"
    if case.loss_chunks > 1 and case.parallel.tp > 1:
        yield "loss-chunks", case.loss_chunks, "1 with tp"
    tokens = case.mbs * case.model.seq_len // case.parallel.cp
    if tokens % case.loss_chunks:
        yield "loss-chunks", case.loss_chunks, f"a divisor of {tokens} tokens"
    if case.data != "random" and case.model.vocab_size < _BYTES:
        has = f"{case.model.name} has {case.model.vocab_size} tokens, not 256"
        yield "text", case.data, f"only with random data: {has}"


def _fp8(case: TrainCase) -> Refused:
    if case.fp8 is Fp8.NONE:
        return
    if case.precision is Precision.FP32:
        yield "fp8", case.fp8, "only with --precision amp, master or bf16"
    if case.fp8_all_gather and case.data_parallel is not DataParallel.FSDP:
        yield "fp8-all-gather", "yes", "only with --strategy fsdp"
    if case.fp8_all_gather and case.fp8 is not Fp8.TENSORWISE:
        yield "fp8-all-gather", "yes", "only with --fp8-recipe tensorwise"
    if case.fp8 is Fp8.TE and case.parallel.tp > 1:
        yield "tp", case.parallel.tp, "1 with --fp8-recipe te"
    field = "precision" if case.dtype.is_block_format else "fp8"
    if field == "precision" and case.parallel.tp > 1:
        yield field, case.fp8, "fp8 with tp, since its layers are not divided"
    for what, width in _widths(case):
        multiple = row_multiple(case.dtype)
        if width % multiple:
            allowed = f"only with widths that are multiples of {multiple}: {what} is {width}"
            yield field, case.fp8, allowed


def _widths(case: TrainCase) -> Iterator[tuple[str, int]]:
    """Yield the widths of every product in FP8, on one rank."""
    model = case.model
    tp = case.parallel.tp
    tokens = case.mbs * model.seq_len // case.parallel.cp
    yield "hidden_size", model.hidden_size
    if model.mla is None:
        heads = model.num_heads + 2 * model.num_kv_heads
        yield "q, k and v of a rank", heads * model.head_dim // tp
        yield "attention's output of a rank", model.num_heads * model.d_v // tp
    yield "ffn_hidden_size of a rank", model.ffn_hidden_size // tp
    if case.fp8_head:
        yield "vocab_size of a rank", model.vocab_size // tp
        yield "tokens of a loss chunk", tokens // case.loss_chunks
    yield "tokens of a micro-batch", tokens


def _optimizer(case: TrainCase) -> Refused:
    if case.optimizer is not OptimizerKind.MUON:
        return
    if reason := muon.refusal(case.model, case.parallel, case.data_parallel):
        yield "optimizer", case.optimizer, f"adamw here: {reason}"


def _data_parallel(case: TrainCase) -> Refused:
    if case.grad_sync == "last" and case.parallel.gradient_ranks == 1:
        yield "grad-sync", "last", "every, with one data rank"
    if case.grad_sync == "last" and case.parallel.pp > 1:
        yield "grad-sync", "last", "every with a pipeline, which reduces once per pass"
    if case.grad_sync == "last" and case.grad_accum == 1:
        yield "grad-sync", "last", "every, with one micro-step per optimizer step"
    shards = case.parallel.dp_shard * case.parallel.cp
    smaller = (str(n) for n in range(2, shards) if shards % n == 0)
    if case.reshard not in (choices := ("yes", "no", *smaller)):
        yield "reshard", case.reshard, f"one of {', '.join(choices)} for {shards} shards"
    of_experts = shards // case.parallel.ep
    if case.reshard.isdecimal() and of_experts % int(case.reshard):
        yield "reshard", case.reshard, f"a divisor of {of_experts} shards of experts"
    if case.model.moe and case.data_parallel is DataParallel.FSDP:
        is_apart = divides_experts(case.model, case.parallel.ep, of_experts)
        if is_apart and case.reshard.isdecimal():
            yield "reshard", case.reshard, SMALLER_MESH
    layers = math.ceil(case.model.num_layers / case.parallel.pp)
    if case.blocks_per_group > layers:
        yield "blocks-per-group", case.blocks_per_group, f"at most {layers} layers"


def _graphs(case: TrainCase) -> Refused:
    if case.cuda_graph and case.num_ranks > 1:
        yield "cuda-graph", "yes", "only with --strategy single"
    if not case.compiles_graphs:
        return
    mode = case.compile_mode
    if case.cuda_graph:
        allowed = "it cannot be combined with --cuda-graph: both capture graphs"
        yield "compile-mode", mode, allowed
    # A replay overwrites the outputs of the previous one.
    if case.parallel.pp > 1:
        yield "compile-mode", mode, "default with a pipeline, which has several passes at once"
    if case.data_parallel is DataParallel.FSDP and case.grad_sync == "last":
        allowed = "default with fsdp and --grad-sync last, which keeps gradients for later"
        yield "compile-mode", mode, allowed
