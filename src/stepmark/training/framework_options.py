"""A framework's file as options of `stepmark train`; flags that are typed win.

PyTorch trains the model, the ranks and axes, and the batches of any framework. What it does by
itself, such as kernels, overlaps and buckets, a note lists; another step is refused.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepmark.cases.fields import declared
from stepmark.cases.train_case import TrainCase
from stepmark.framework_files.architecture import NAMES
from stepmark.framework_files.table import FALSE, TRUE, Options, Translation
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build, dashed
from stepmark.ground.options import options as options_of_class
from stepmark.measuring.machine import Machine
from stepmark.model.parallel import ParallelConfig
from stepmark.training import train_plan
from stepmark.training.train_options import TrainOptions, given_options
from stepmark.workloads.models import read_models

# Options of `train`, and the options of `workload generate` that decide each.
USED: Mapping[str, tuple[str, ...]] = {
    "models": ("model", "model_name", "make_vocab_size_divisible_by", *NAMES),
    "seq_len": ("seq_len",),
    "nproc": ("world_size", "dp_shard"),
    "strategy": ("data_parallel", "stage", "use_distributed_optimizer"),
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "dp_replicate": ("dp_replicate",),
    "mbs": ("mbs",),
    "grad_accum": ("gbs", "grad_accum"),
    "pp_microbatches": ("pp_microbatches",),
    "pp_schedule": ("pp_schedule", "virtual_pipeline_model_parallel_size", "pp_stages"),
    "pp_split": (
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ),
    "precision": (
        *("precision", "dtype", "param_dtype", "shard_dtype"),
        *("fp8_format", "fp4_format", "fp4_recipe"),
    ),
    "fp8_recipe": ("fp8_recipe",),
    "fp8_all_gather": ("fp8_all_gather",),
    "reduce_dtype": ("reduce_dtype", "grad_reduce_in_bf16", "communication_data_type"),
    "reshard": ("reshard_after_forward",),
    "clip": ("clip", "gradient_clipping"),
    "ac": (
        *("recompute", "recompute_every", "recompute_granularity", "recompute_method"),
        "recompute_num_layers",
    ),
    "compile": ("compile",),
    "async_tp": ("async_tp",),
    "attention": ("attention_backend",),
}
# Options of kernels, buckets and overlaps: PyTorch has its own for the same model and batches.
OWN_WAY = (
    *("sequence_parallel", "tp_comm_overlap", "tp_comm_overlap_ag", "fuse_qkv"),
    *("tp_comm_overlap_rs", "overlap_grad_reduce", "overlap_param_gather"),
    *("align_grad_reduce", "align_param_gather", "ddp_bucket_size"),
    *("ddp_pad_buckets_for_high_nccl_busbw", "ddp_average_in_collective"),
    *("accumulate_allreduce_grads_in_fp32", "microbatch_group_size_per_vp_stage"),
    *("overlap_p2p_comm", "cp_comm_type", "moe_aux_loss_coeff", "moe_router_dtype"),
    *("moe_router_load_balancing_type", "moe_shared_expert_overlap"),
    "moe_token_dispatcher_type",
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "attention_dropout"),
    *("hidden_dropout", "bias_swiglu_fusion", "masked_softmax_fusion"),
    *("gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
    *("create_attention_mask_in_dataloader", "calculate_per_token_loss"),
    *("fp8_param_gather", "recompute_modules"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "overlap_comm"),
    *("check_grad_overflow", "contiguous_gradients", "grad_accum_dtype", "reduce_scatter"),
    *("round_robin_gradients", "use_multi_rank_bucket_allreduce", "zero_init"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_model_persistence_threshold", "stage3_param_persistence_threshold"),
    "stage3_prefetch_bucket_size",
)
# Options that are refused, the values that pass, and what `train` has instead.
REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(
        ("offload_optimizer", "offload_param"),
        (("none",), "none: train keeps weights and optimizer states on the device"),
    ),
    **dict.fromkeys(
        (
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
            "pipeline_model_parallel_layout",
        ),
        ((), "left out: train divides layers evenly among stages, or with embedding and head"),
    ),
    "expert_tensor_parallel_size": (("1",), "1: train divides no experts by tp"),
    "first_last_layers_bf16": ((FALSE,), "left out: train has one precision for all layers"),
    "moe_expert_capacity_factor": ((), "left out: train sends each token to all its experts"),
    "moe_pad_expert_input_to_capacity": ((FALSE,), "left out: train has no capacities"),
}
_FRAMEWORKS = {
    "megatron": "Megatron-LM's job is trained by PyTorch: weights in fp32 under autocast, "
    "sequence parallelism with tp, FSDP in place of the distributed optimizer",
    "deepspeed": "DeepSpeed's job is trained by PyTorch: weights in fp32 under autocast, "
    "FSDP in place of ZeRO, which keeps gathered weights for the backward pass but at stage 3",
}
_AXES = ("tp", "pp", "cp", "ep")
_CHUNKS = "virtual_pipeline_model_parallel_size"
_FIELDS = {each.option_name: each for each in declared(TrainCase) if each.option}


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Options of `train` with those of a framework's file, and notes on the others.

    origin: key and value of the file by the option of `train` that is from there.
    """

    options: TrainOptions
    notes: tuple[str, ...] = ()
    path: str = ""
    origin: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def naming_keys(self) -> Iterator[None]:
        """Name the file and its key in a ConfigError about an option that is from there."""
        try:
            yield
        except ConfigError as error:
            word = dashed(error.field.lstrip("-"))
            option = next(
                (
                    each.name
                    for each in options_of_class(TrainOptions)
                    if word == dashed(each.name) or f"--{word}" in each.words
                ),
                "",
            )
            if option not in self.origin:
                raise
            key, value = self.origin[option]
            raise ConfigError(f"{self.path}: {key}", value, error.allowed) from error.__cause__


def with_file(options: TrainOptions, machine: Machine, fewest: int = 1) -> TrainingJob:
    """Return the options, with those of the framework's file that they name.

    fewest: ranks on a CPU where neither options nor the file give a number. Raises ConfigError.
    """
    named = options.model_names if options.models or options.model else ()
    # Only a file is looked into: the readers of files take 10 ms to import.
    paths = [name for name in named if Path(name).is_file()]
    if not paths and options.config is None:
        return TrainingJob(options=options)
    from stepmark.framework_files import configuration  # noqa: PLC0415 - only with a file

    files = [name for name in paths if configuration.is_framework_file(name)]
    models = tuple(name for name in named if name not in files)
    if options.config is not None:
        files.append(options.config)
    if not files:
        return TrainingJob(options=options)
    if len(files) > 1:
        raise ConfigError("config", ", ".join(files), "one framework's file")
    typed = replace(options, models=models, model=None, config=None)
    return _Reading(typed, configuration.read(files[0]), files[0]).job(machine, fewest)


class _Reading:
    """The reading of a file beside typed options."""

    def __init__(self, typed: TrainOptions, file: Translation, path: str) -> None:
        self.typed = typed
        self.given = given_options(typed)
        self.file = file
        self.path = path
        self.texts: Options = file.defaults | file.options

    def job(self, machine: Machine, fewest: int) -> TrainingJob:
        """Return the job on a machine. Raises ConfigError."""
        origin = self._origin()
        reading = TrainingJob(options=self.typed, path=self.path, origin=origin)
        with reading.naming_keys():
            self._check()
            options = self._merged(self.typed, self._layout())
            world_size = self._num_ranks(options, machine, fewest)
            options = replace(options, nproc=str(world_size))
            if not options.strategy:
                options = replace(options, strategy=self._strategy(options, world_size))
            layouts = [
                train_plan.layout(options, strategy, world_size)
                for strategy in options.strategy or ("",)
            ]
            options = self._merged(options, self._batches(options, [axes for _, axes in layouts]))
            techniques = self._techniques(options)
            cases = [self._outline(options, techniques, *each) for each in layouts]
            idle = [name for name in techniques if not _is_effective(name, cases)]
            for name in idle:
                del techniques[name]
            options = self._merged(options, techniques)
        return replace(reading, options=options, notes=self._notes(idle))

    def _origin(self) -> dict[str, tuple[str, str]]:
        """Return the key and the value of the file by the option of `train` they decide."""
        origin: dict[str, tuple[str, str]] = {}
        for option, names in USED.items():
            keys = [self.file.origin[name] for name in names if name in self.file.origin]
            if keys and option not in self.given:
                origin[option] = keys[0]
        return origin

    def _merged(self, options: TrainOptions, texts: Mapping[str, object]) -> TrainOptions:
        """Return the options with the file's that are not typed. Raises ConfigError."""
        own = {name: text for name, text in texts.items() if name not in self.given}
        of_file = build(TrainOptions, own)
        return replace(options, **{name: getattr(of_file, name) for name in own})

    def _check(self) -> None:
        """Raise ConfigError for what no step of `train` has, or what a flag must give."""
        for name, (key, value) in self.file.requested.items():
            option = "precision" if name == "dtype" else name
            if option not in self.given:
                allowed = f"left to a trainer: give --{option}"
                raise ConfigError(f"{self.path}: {key}", value, allowed)
        for name, text in self.texts.items():
            values, allowed = REFUSED.get(name, ((text,), ""))
            if text not in values:
                raise self._refused(name, allowed)
        if "pp" in self.file.fixed and self.typed.pp and not self.typed.mbs:
            own = self.file.fixed["pp"]
            if str(self.typed.pp) != own:
                allowed = f"{own}, by which {self.path} divides its batch, or with --mbs"
                raise ConfigError("pp", self.typed.pp, allowed)

    def _refused(self, name: str, allowed: str) -> ConfigError:
        """Return the error of an option of the file, which names its key."""
        key, value = self.file.origin.get(name, (dashed(name), self.texts[name]))
        return ConfigError(f"{self.path}: {key}", value, allowed)

    def _layout(self) -> Options:
        """Return model, length and axes."""
        texts = self.texts
        layout = {name: texts[name] for name in ("seq_len", *_AXES) if name in texts}
        if not self.is_ddp and "dp_replicate" in texts:
            layout["dp_replicate"] = texts["dp_replicate"]
        if self.typed.models:
            return layout
        if "num_layers" not in texts and "model" not in texts:
            raise ConfigError("model", None, f"a name beside {self.path}, which names none")
        own = self.path if "num_layers" in texts else texts["model"]
        return layout | {"model": own}

    @property
    def is_ddp(self) -> bool:
        """Return whether data ranks have whole weights."""
        texts = self.texts
        if self.file.framework == "megatron":
            return texts.get("use_distributed_optimizer") != TRUE
        if self.file.framework == "deepspeed":
            return texts.get("stage") == "0"
        if kind := texts.get("data_parallel"):
            return kind == "ddp"
        # torchtitan shards over dp_shard x cp, and replicates where that is 1.
        is_whole = texts.get("dp_shard") == "1" and texts.get("cp", "1") == "1"
        return is_whole and texts.get("dp_replicate", "1") != "1"

    def _num_ranks(self, options: TrainOptions, machine: Machine, fewest: int) -> int:
        """Return --nproc, or the file's number, or the default one. Raises ConfigError."""
        nproc = options.nproc or self.texts.get("world_size")
        shards = self.texts.get("dp_shard", "")
        if not nproc and shards.isdecimal():
            sizes = [getattr(options, axis) or 1 for axis in ("tp", "pp", "cp")]
            copies = self._number("dp_replicate") or 1
            nproc = str(math.prod(sizes) * copies * int(shards))
        default = train_plan.default_nproc(options, machine.device)
        is_one = default == "1" and machine.device == "cpu" and not options.strategy
        return machine.num_ranks(nproc, str(fewest) if is_one else default)

    def _strategy(self, options: TrainOptions, world_size: int) -> tuple[str, ...]:
        """Return how data ranks share the weights, or the axis of the only one."""
        tp, pp, ep = (getattr(options, axis) or 1 for axis in ("tp", "pp", "ep"))
        if world_size <= tp * pp:
            return ("pp" if pp > 1 else "tp" if tp > 1 else "single",)
        # DDP goes with none of these axes. Of PyTorch's own files that is refused.
        is_divided = max(tp, pp, ep) > 1 and self.file.framework != "pytorch"
        return ("ddp",) if self.is_ddp and not is_divided else ("fsdp",)

    def _batches(self, options: TrainOptions, layouts: Sequence[ParallelConfig]) -> Options:
        """Return the batch of a pass, and the passes of a step. Raises ConfigError."""
        ranks = {axes.data_ranks for axes in layouts}
        num_ranks = min(ranks)
        gbs = self._number("gbs")
        passes = self._number("grad_accum")
        batches = {}
        if "mbs" not in self.given:
            batches = self._pass(layouts[0].pp, num_ranks, gbs, passes)
        if "grad_accum" in self.given or not (gbs or passes):
            return batches
        sizes = options.mbs or (int(batches.get("mbs", "1")),)
        if gbs and (len(sizes) > 1 or len(ranks) > 1 or options.find_batch):
            name, values = "mbs", ",".join(map(str, sizes))
            if options.find_batch:
                name, values = "find-batch", "given"
            elif len(ranks) > 1:
                name, values = "strategy", ",".join(options.strategy or ())
            allowed = f"one, by which {self.path} divides {gbs} sequences; or with --grad-accum"
            raise ConfigError(name, values, allowed)
        at_once = sizes[0] * num_ranks
        is_other = passes and gbs and "mbs" not in self.given and gbs != passes * at_once
        if gbs and (gbs % at_once or is_other):
            allowed = f"a multiple of micro-batch x data ranks ({sizes[0]} x {num_ranks})"
            if is_other:
                allowed = f"{sizes[0]} x {passes} micro-batches x {num_ranks} data ranks"
            raise self._refused("gbs", f"{allowed}; or give --mbs or --grad-accum")
        return batches | {"grad_accum": str(gbs // at_once if gbs else passes)}

    def _pass(self, pp: int, num_ranks: int, gbs: int | None, passes: int | None) -> Options:
        """Return the batch of a pass, which a pipeline divides into micro-batches."""
        micro = self._number("mbs")
        if micro is None:  # DeepSpeed divides the batch by the passes
            micro = max(1, gbs // (num_ranks * passes)) if gbs and passes else 1
        if pp == 1:
            return {"mbs": str(micro)}
        # Megatron-LM runs the whole batch in one pass.
        count = self._number("pp_microbatches") or max(1, (gbs or 1) // (micro * num_ranks))
        return {"mbs": str(micro * count), "pp_microbatches": str(count)}

    def _number(self, name: str) -> int | None:
        """Return a number of the file; None where it has none. Raises ConfigError."""
        text = self.texts.get(name)
        if text is None:
            return None
        if not text.isdecimal() or not 1 <= int(text) <= 2**30:
            raise self._refused(name, "a whole number from 1")
        return int(text)

    def _techniques(self, options: TrainOptions) -> dict[str, object]:
        """Return the options of a step's techniques. Raises ConfigError."""
        techniques: dict[str, object] = {}
        if "ac" not in self.given and "sac_freq" not in self.given:
            techniques["ac"] = self._checkpointing()
        if "pp_schedule" not in self.given:
            techniques["pp_schedule"] = self._schedule()
        if "precision" not in self.given and not options.fp8:
            techniques |= self._precision(options)
        return techniques | self._compiled() | self._sharding() | _attention(self.texts)

    def _checkpointing(self) -> str:
        texts = self.texts
        if self.file.framework == "pytorch":
            recompute = texts.get("recompute", "none")
            return f"1/{texts.get('recompute_every', '1')}" if recompute == "blocks" else recompute
        granularity = texts.get("recompute_granularity", "none")
        if granularity == "selective":
            allowed = "full or none: train --ac selective keeps attention, which this recomputes"
            raise self._refused("recompute_granularity", f"{allowed}; or give --ac")
        if granularity == "full":
            for name, value in (("recompute_method", "uniform"), ("recompute_num_layers", "1")):
                if texts.get(name, value) != value:
                    raise self._refused(name, f"{value}, as train recomputes; or give --ac")
        return granularity

    def _schedule(self) -> str:
        texts = self.texts
        if (chunks := texts.get(_CHUNKS, "1")) not in ("1", "2"):
            raise self._refused(_CHUNKS, "1 or 2, the stages of a rank that train has")
        schedule = texts.get("pp_schedule", "1f1b" if chunks == "1" else "interleaved")
        if schedule == "gpipe":
            raise self._refused("pp_schedule", "1F1B or Interleaved1F1B; or give --pp-schedule")
        if schedule == "interleaved" and texts.get("pp_stages", "2") != "2":
            raise self._refused("pp_stages", "2, the stages of a rank that train has")
        return schedule

    def _precision(self, options: TrainOptions) -> Options:
        """Return the precision of weights and products. Raises ConfigError."""
        texts = self.texts
        dtypes = [texts.get(name, "") for name in ("dtype", "param_dtype", "shard_dtype")]
        if "fp16" in dtypes:
            name = ("dtype", "param_dtype", "shard_dtype")[dtypes.index("fp16")]
            raise self._refused(name, "bf16 or fp32, which train has; or give --precision")
        if texts.get("fp4_format", "none") != "none":
            return {"precision": "nvfp4"}
        if texts.get("fp8_format", "none") != "none":
            recipe = texts.get("fp8_recipe", "delayed")
            if recipe == "blockwise":
                allowed = "delayed, tensorwise or mxfp8, which train has; or give --precision"
                raise self._refused("fp8_recipe", allowed)
            if recipe == "mxfp8":
                return {"precision": "mxfp8"}
            return {"precision": "fp8", "fp8_recipe": "te" if recipe == "delayed" else recipe}
        if (narrow := texts.get("precision", "bf16")) != "bf16":
            gathers = texts.get("fp8_all_gather") == TRUE and options.strategy == ("fsdp",)
            return {"precision": narrow} | (
                {"fp8_all_gather": str(gathers)} if narrow == "fp8" else {}
            )
        if "fp32" in dtypes[:2]:
            return {"precision": "fp32"}
        return {"precision": "bf16" if dtypes[2] == "bf16" else "amp"}

    def _compiled(self) -> dict[str, object]:
        scope = self.texts.get("compile", "none")
        if scope == "none" and self.texts.get("async_tp") == TRUE:
            scope = "block"  # as torch finds products to send in compiled blocks alone
        if self.given.get("compile") is False or scope == "none":
            return {"compile": False}
        return {"compile": True, "compile_scope": scope}

    def _sharding(self) -> dict[str, object]:
        """Return the options of how ranks share weights, gradients and layers."""
        texts = self.texts
        sharding: dict[str, object] = {}
        if self.file.framework == "pytorch":
            reshard = texts.get("reshard_after_forward")
        else:
            reshard = "yes" if texts.get("stage") == "3" else "no"
        if reshard is not None:
            sharding["reshard"] = reshard
        dtype = texts.get("communication_data_type") or texts.get("reduce_dtype")
        if self.file.framework == "deepspeed":
            dtype = dtype or texts.get("dtype", "bf16")
        if texts.get("grad_reduce_in_bf16") == TRUE:
            dtype = "bf16"
        if dtype is not None:
            sharding["reduce_dtype"] = dtype
        if self.file.framework == "megatron":
            sharding["pp_split"] = self._stage_split()
        if texts.get("async_tp") == TRUE:
            sharding["async_tp"] = True
        clip = texts.get("gradient_clipping") or {TRUE: "1", FALSE: "0"}.get(
            texts.get("clip", "")
        )
        if clip is not None:
            sharding["clip"] = clip
        return sharding

    def _stage_split(self) -> str:
        counts = [self.texts.get(name) == TRUE for name in USED["pp_split"]]
        if all(counts):
            return "torchtitan"
        if any(counts):
            name = USED["pp_split"][counts.index(True)]
            raise self._refused(name, "with that of the other end of the model, or left out")
        return "even"

    def _outline(
        self,
        options: TrainOptions,
        techniques: Mapping[str, object],
        strategy: str,
        parallel: ParallelConfig,
    ) -> TrainCase:
        """Return a case of the layout, which tells the techniques that have an effect in it."""
        (model, *_) = read_models(options.model_names[0], options.scale, parallel.tp)
        return TrainCase(
            model=model.with_layers(options.num_layers or model.num_layers),
            parallel=parallel,
            data_parallel=train_plan.data_parallel(strategy),
            pp_schedule=str(techniques.get("pp_schedule") or vars(options)["pp_schedule"]),
        )

    def _notes(self, idle: Sequence[str]) -> tuple[str, ...]:
        """Return notes on the file's keys. idle: options without effect in this layout."""
        notes = [*self.file.notes]
        if framework := _FRAMEWORKS.get(self.file.framework):
            notes.append(framework)
        if self.texts.get("fuse_qkv") == FALSE:
            notes.append("q, k and v are one product, where torchtitan has three")
        own_way = [name for name in OWN_WAY if name in self.file.origin]
        words = [" ".join(self.file.origin[name]) for name in own_way]
        if words:
            notes.append(f"not used, as PyTorch has ways of its own: {', '.join(words)}")
        if lost := [" ".join(self._origin()[name]) for name in idle if name in self._origin()]:
            notes.append(f"no effect on a step of this layout: {', '.join(lost)}")
        return tuple(notes)


def _attention(texts: Options) -> dict[str, object]:
    """Return the kernels of attention, of which TransformerEngine's are torch's choice."""
    backend = texts.get("attention_backend")
    if backend is None:
        return {}
    return {"attention": {"flash": "flash", "unfused": "math", "local": "math"}.get(backend, "auto")}


def _is_effective(name: str, cases: Sequence[TrainCase]) -> bool:
    """Return whether an option has an effect in some of the cases."""
    if name == "reduce_dtype":
        return any(case.parallel.gradient_ranks > 1 for case in cases)
    declaration = _FIELDS.get(name)
    return declaration is None or any(map(declaration.is_effective, cases))
