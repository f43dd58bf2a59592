"""What no machine could train, and flags without effect: refused before any rank starts."""

import math
from collections.abc import Callable, Iterator

from stepmark.cli.options import Values, whole_numbers
from stepmark.core.errors import ConfigError
from stepmark.core.train_case import TrainCase
from stepmark.core.training import DataParallel, Fp8, Precision, Recompute
from stepmark.core.units import parse_duration

ATTENTION = ("auto", "cudnn", "flash", "efficient", "math")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PP_SCHEDULES = ("1f1b", "interleaved")
_GRAIN = 16  # FP8 products take widths of multiples of this
_BYTES = 256  # tokens of a text

# Field of a case -> smallest and largest value.
_RANGES: dict[str, tuple[float, float]] = {
    "grad_accum": (1, 65536),
    "loss_chunks": (1, 65536),
    "lr": (1e-12, 1e12),
    "clip": (0.0, 1e6),
    "prefetch": (1, 1024),
    "blocks_per_group": (1, 1024),
    "bucket_mb": (1, 2**20),
    "pp_microbatches": (0, 65536),
    "workers": (0, 256),
    "seed": (0, 2**31 - 1),
}
_CHOICES = {
    "attention": ATTENTION,
    "compile_mode": COMPILE_MODES,
    "pp_schedule": PP_SCHEDULES,
}
# Flags that need another one.
_NEEDS_FLAG = {
    "fp8_recipe": "fp8",
    "fp8_head": "fp8",
    "fp8_all_gather": "fp8",
    "compile_scope": "compile",
    "compile_mode": "compile",
    "profile_ranks": "profile",
}
_NEEDS: dict[str, tuple[Callable[[TrainCase], bool], str]] = {
    "reshard": (lambda case: case.data_parallel is DataParallel.FSDP, "--strategy fsdp"),
    "prefetch": (lambda case: case.data_parallel is DataParallel.FSDP, "--strategy fsdp"),
    "blocks_per_group": (
        lambda case: case.data_parallel is DataParallel.FSDP,
        "--strategy fsdp",
    ),
    "bucket_mb": (lambda case: case.data_parallel is DataParallel.DDP, "--strategy ddp"),
    "async_tp": (lambda case: case.parallel.tp > 1, "tensor parallelism (--tp)"),
    "pp_schedule": (lambda case: case.parallel.pp > 1, "pipeline stages (--pp)"),
    "pp_microbatches": (lambda case: case.parallel.pp > 1, "pipeline stages (--pp)"),
}


def check_flags(values: Values) -> None:
    """Flags that are of no case. Raises ConfigError."""
    for name, other in _NEEDS_FLAG.items():
        if values.get(name) is not None and not values.get(other):
            raise ConfigError(_flag(name), values[name], f"only with --{other}")
    for name in ("steps", "launches"):
        count = values.get(name)
        if count is not None and not 1 <= count <= 10**6:
            raise ConfigError(name, count, "a whole number from 1 to 1000000")
    for name in ("timeout", "budget"):
        if values.get(name):
            parse_duration(values[name], name)
    if values.get("compile_fallback") and not values.get("compile"):
        raise ConfigError("compile-fallback", "yes", "only with --compile")
    if values.get("find_batch") and len(_batches(values)) == 1:
        raise ConfigError("mbs", values["mbs"], "several with --find-batch, e.g. 1-8, or none")


def _batches(values: Values) -> list[int]:
    return whole_numbers(values["mbs"], "mbs") if values.get("mbs") else []


def check_run(values: Values, case: TrainCase) -> None:
    """Of how it is measured. Raises ConfigError."""
    if (steps := values.get("steps")) and steps % case.cycle:
        allowed = f"a multiple of {case.cycle}: whole optimizer steps of --schedule micro"
        raise ConfigError("steps", steps, allowed)
    profiled_ranks(values, case.num_ranks)


def profiled_ranks(values: Values, num_ranks: int) -> tuple[int, ...]:
    """--profile-ranks. Raises ConfigError."""
    text = values.get("profile_ranks") or "0"
    found = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < num_ranks for part in found):
        raise ConfigError("profile-ranks", text, f"ranks from 0 to {num_ranks - 1}, e.g. 0,1")
    return tuple(sorted({int(part) for part in found}))


def check(case: TrainCase, values: Values) -> None:
    """What is wrong with a case as such, and with flags that mean nothing to it.

    Raises ConfigError for the first such thing.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(case, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise ConfigError(_flag(name), value, f"from {low:g} to {high:g}")
    for name, choices in _CHOICES.items():
        if getattr(case, name) not in choices:
            raise ConfigError(_flag(name), getattr(case, name), f"one of {', '.join(choices)}")
    for name, (is_met, needed) in _NEEDS.items():
        if values.get(name) not in (None, False) and not is_met(case):
            raise ConfigError(_flag(name), values[name], f"only with {needed}")
    case.parallel.check(case.model)
    for part in (_axes, _pipeline, _recompute, _numbers, _fp8, _data_parallel, _graphs, _data):
        for problem in part(case):
            raise problem


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _axes(case: TrainCase) -> Iterator[ConfigError]:
    axes, model = case.parallel, case.model
    if axes.tp > 1 and (model.moe or model.mla):
        what = "experts" if model.moe else "latent attention"
        yield ConfigError("tp", axes.tp, f"1, since {model.name} has {what}")
    yield from _context(case)
    if model.seq_len // axes.cp % axes.tp:
        allowed = f"a divisor of the sequence length {model.seq_len}"
        allowed += f" over {axes.cp} cp ranks" if axes.cp > 1 else ""
        yield ConfigError("tp", axes.tp, allowed)
    for name, size in (("tp", axes.tp), ("pp", axes.pp)):
        if size > 1 and case.data_parallel is DataParallel.DDP:
            # Its buckets take no DTensors, and it reduces once per pass, not per microbatch.
            yield ConfigError(name, size, "1 with ddp; --strategy fsdp goes with it")
    if case.async_tp and case.compile == "none":
        yield ConfigError("async-tp", "yes", "only with --compile, which finds the pairs")


def _context(case: TrainCase) -> Iterator[ConfigError]:
    cp, seq_len = case.parallel.cp, case.model.seq_len
    if cp == 1:
        return
    if case.data_parallel is DataParallel.NONE:
        allowed = "1 with tp or pp alone, which reduce no gradients; --strategy fsdp does"
        yield ConfigError("cp", cp, allowed)
    if seq_len % (2 * cp):
        allowed = f"such that {2 * cp} equal parts make the sequence length {seq_len}"
        yield ConfigError("cp", cp, allowed)
    if case.attention == "cudnn":
        # Its operator has no causal mask that begins at the last key.
        allowed = "auto, flash, efficient or math with cp, whose queries are the last of many"
        yield ConfigError("attention", case.attention, allowed)


def _pipeline(case: TrainCase) -> Iterator[ConfigError]:
    pp, model = case.parallel.pp, case.model
    if pp == 1:
        return
    stages = 2 * pp if case.pp_schedule == "interleaved" else pp
    if model.num_layers < stages:
        allowed = f"at most {model.num_layers * pp // stages}: {model.name} has "
        allowed += f"{model.num_layers} layers for {stages} stages"
        yield ConfigError("pp", pp, allowed)
    if model.tied_embeddings:
        allowed = f"1, since the first and last stage of {model.name} would share a table"
        yield ConfigError("pp", pp, allowed)
    parts = case.pp_microbatches or stages
    if parts < stages:
        allowed = f"at least {stages}, the number of stages"
        yield ConfigError("pp-microbatches", parts, allowed)
    if case.mbs % parts:
        yield ConfigError("mbs", case.mbs, f"a multiple of {parts} pipeline microbatches")
    if case.loss_chunks > 1:
        yield ConfigError("loss-chunks", case.loss_chunks, "1 with a pipeline, which has parts")


def _recompute(case: TrainCase) -> Iterator[ConfigError]:
    if case.recompute is Recompute.NONE:
        return
    layers = case.model.num_layers
    shown: str = case.recompute
    if case.recompute is Recompute.BLOCKS:
        shown = "{}/{}".format(*case.recompute_blocks)
    if layers == 1:
        yield ConfigError("sac", shown, f"none: {case.model.name} has one layer")
    if case.parallel.tp > 1 and case.compile != "none" and case.recompute is not Recompute.OPS:
        # torch 2.13 keeps a DeviceMesh among the tensors for backward, and asserts.
        yield ConfigError("sac", shown, "ops with tp and --compile")
    if case.recompute is Recompute.BLOCKS and case.recompute_blocks[1] > layers:
        yield ConfigError("sac", shown, f"q/p with p at most {layers}, the number of layers")


def _numbers(case: TrainCase) -> Iterator[ConfigError]:
    reduced = case.reduce_dtype
    if case.parallel.gradient_ranks == 1 and reduced != "fp32":
        yield ConfigError("reduce-dtype", reduced, "only with several data ranks")
    is_ddp = case.data_parallel is DataParallel.DDP
    if is_ddp and case.precision in (Precision.BF16, Precision.MASTER) and reduced == "fp32":
        yield ConfigError("reduce-dtype", reduced, "bf16: ddp reduces gradients as they are")
    if case.precision is Precision.MASTER:
        if case.data_parallel is DataParallel.FSDP:
            allowed = "amp with fsdp, whose shards are fp32 and gathered in bf16"
            yield ConfigError("precision", "master", allowed)
        if case.cuda_graph or case.compiles_graphs:
            yield ConfigError("precision", "master", "amp or bf16 with CUDA graphs")
    if case.loss_chunks > 1 and case.parallel.tp > 1:
        yield ConfigError("loss-chunks", case.loss_chunks, "1 with tp")
    tokens = case.mbs * case.model.seq_len // case.parallel.cp
    if tokens % case.loss_chunks:
        yield ConfigError("loss-chunks", case.loss_chunks, f"a divisor of {tokens} tokens")


def _fp8(case: TrainCase) -> Iterator[ConfigError]:
    if case.fp8 is Fp8.NONE:
        return
    if case.precision is Precision.FP32:
        yield ConfigError("fp8", case.fp8, "only with --precision amp, master or bf16")
    if case.fp8_all_gather and case.data_parallel is not DataParallel.FSDP:
        yield ConfigError("fp8-all-gather", "yes", "only with --strategy fsdp")
    if case.fp8_all_gather and case.fp8 is not Fp8.TENSORWISE:
        yield ConfigError("fp8-all-gather", "yes", "only with --fp8-recipe tensorwise")
    if case.fp8 is Fp8.TE and case.parallel.tp > 1:
        yield ConfigError("tp", case.parallel.tp, "1 with --fp8-recipe te")
    for what, width in _widths(case):
        if width % _GRAIN:
            allowed = f"widths of multiples of {_GRAIN}: {what} is {width}"
            yield ConfigError("fp8", case.fp8, allowed)


def _widths(case: TrainCase) -> Iterator[tuple[str, int]]:
    """Of every product in FP8, on one rank."""
    model, tp = case.model, case.parallel.tp
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


def _data_parallel(case: TrainCase) -> Iterator[ConfigError]:
    if case.grad_sync == "last":
        if case.parallel.gradient_ranks == 1:
            yield ConfigError("grad-sync", "last", "every, with one data rank")
        if case.grad_accum == 1:
            yield ConfigError("grad-sync", "last", "every, with one micro-step per optimizer")
    shards = case.parallel.dp_shard * case.parallel.cp
    if case.reshard not in ("yes", "no"):
        smaller = [n for n in range(2, shards) if shards % n == 0]
        if not case.reshard.isdecimal() or int(case.reshard) not in smaller:
            allowed = ", ".join(map(str, ("yes", "no", *smaller)))
            yield ConfigError("reshard", case.reshard, f"one of {allowed} for {shards} shards")
    layers = math.ceil(case.model.num_layers / case.parallel.pp)
    if case.blocks_per_group > layers:
        yield ConfigError("blocks-per-group", case.blocks_per_group, f"at most {layers} layers")


def _graphs(case: TrainCase) -> Iterator[ConfigError]:
    if case.cuda_graph and case.num_ranks > 1:
        yield ConfigError("cuda-graph", "yes", "only with --strategy single")
    if not case.compiles_graphs:
        return
    allowed = ""
    if case.cuda_graph:
        allowed = "it cannot be combined with --cuda-graph: both capture graphs"
    # A replay overwrites what the one before it returned.
    elif case.parallel.pp > 1:
        allowed = "default with a pipeline, which has several passes under way"
    elif case.data_parallel is DataParallel.FSDP and case.grad_sync == "last":
        allowed = "default with fsdp and --grad-sync last, whose gradients wait"
    if allowed:
        yield ConfigError("compile-mode", case.compile_mode, allowed)


def _data(case: TrainCase) -> Iterator[ConfigError]:
    if case.data != "random" and case.model.vocab_size < _BYTES:
        has = f"{case.model.name} has {case.model.vocab_size} tokens"
        allowed = f"only with random data: {has}, not 256"
        yield ConfigError("text", case.data, allowed)
