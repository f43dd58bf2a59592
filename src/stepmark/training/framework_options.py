"""A framework's file as options of `stepmark train`; flags that are typed win."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepmark.cases.fields import declared
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import OptimizerKind
from stepmark.framework_files.table import FALSE, TRUE, Options, Translation
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build, dashed
from stepmark.ground.options import options as declared_options
from stepmark.measuring.machine import Machine
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.training import train_plan
from stepmark.training.framework_table import FRAMEWORKS, OWN_WAY, REFUSED, USED
from stepmark.training.train_options import TrainOptions, given_options
from stepmark.workloads.models import read_models

_CHUNKS = "virtual_pipeline_model_parallel_size"
_DTYPES = ("dtype", "param_dtype", "shard_dtype")
_BACKENDS = {"flash": "flash", "unfused": "math", "local": "math"}  # else torch chooses
_FIELDS = {each.option_name: each for each in declared(TrainCase) if each.option}


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Options of `train` with those of a framework's file, and notes on the others.

    origin: key and value of the file by the option of `train` that they decide.
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
            names = (
                option.name
                for option in declared_options(TrainOptions)
                if word == dashed(option.name) or f"--{word}" in option.words
            )
            name = next(names, "")
            if name not in self.origin:
                raise
            key, value = self.origin[name]
            raise ConfigError(f"{self.path}: {key}", value, error.allowed) from error.__cause__


def with_file(options: TrainOptions, machine: Machine, fewest: int = 1) -> TrainingJob:
    """Return the options with those of the framework's file that they name, if they do.

    fewest: ranks on a CPU where neither options nor the file need more. Raises ConfigError.
    """
    words = ",".join((*options.models, options.model or "")).split(",")
    named = [word.strip() for word in words if word.strip()]
    paths = [name for name in named if Path(name).is_file()]
    if not paths and options.config is None:
        return TrainingJob(options=options)
    from stepmark.framework_files import configuration  # noqa: PLC0415 - 10 ms

    files = [name for name in paths if configuration.is_framework_file(name)]
    models = tuple(name for name in named if name not in files)
    files += [] if options.config is None else [options.config]
    if not files:
        return TrainingJob(options=options)
    if len(files) > 1:
        raise ConfigError("config", ", ".join(files), "one framework's file")
    typed = replace(options, models=models, model=None, config=None)
    return _Reading(typed, configuration.read(files[0]), files[0]).job(machine, fewest)


class _Reading:
    """A file beside typed options, which win.

    texts: the file's options, by the names of `workload generate`.
    """

    def __init__(self, typed: TrainOptions, file: Translation, path: str) -> None:
        self.typed = typed
        self.given = given_options(typed)
        self.file = file
        self.path = path
        self.texts: Options = file.defaults | file.options
        self.origin: dict[str, tuple[str, str]] = {}
        for option, names in USED.items():
            keys = [file.origin[name] for name in names if name in file.origin]
            if keys and option not in self.given:
                self.origin[option] = keys[0]
        if typed.models or "model" not in file.options:
            self.origin.pop("model", None)
        if "precision" in self.origin:  # which is --fp8 over another precision
            self.origin["fp8"] = self.origin["precision"]

    def job(self, machine: Machine, fewest: int) -> TrainingJob:
        """Return the job on a machine. Raises ConfigError."""
        job = TrainingJob(options=self.typed, path=self.path, origin=self.origin)
        with job.naming_keys():
            self._check()
            options = self._merged(self.typed, self._layout())
            world_size = self._num_ranks(options, machine, fewest)
            strategy = (options.strategy or (self._strategy(options, world_size),))[0]
            options = replace(options, nproc=str(world_size), strategy=(strategy,))
            if strategy == "fsdp" and "dp_replicate" in self.texts:
                options = self._merged(options, {"dp_replicate": self.texts["dp_replicate"]})
            layout = train_plan.layout(options, strategy, world_size)
            options = self._merged(options, self._batches(options, layout[1]))
            techniques = self._techniques(options)
            case = _outline(options, techniques, *layout)
            idle = [name for name in techniques if not _is_effective(name, case)]
            for name in idle:
                del techniques[name]
            options = self._merged(options, techniques)
        return replace(job, options=options, notes=self._notes(idle))

    def _merged(self, options: TrainOptions, texts: Mapping[str, object]) -> TrainOptions:
        """Return the options with the file's that are not typed. Raises ConfigError."""
        own = {name: text for name, text in texts.items() if name not in self.given}
        of_file = build(TrainOptions, own)
        return replace(options, **{name: getattr(of_file, name) for name in own})

    def _refused(self, name: str, allowed: str) -> ConfigError:
        """Return the error of an option of the file, by its key."""
        key, value = self.file.origin.get(name, (dashed(name), self.texts[name]))
        return ConfigError(f"{self.path}: {key}", value, allowed)

    def _number(self, name: str) -> int | None:
        """Return a number of the file; None where it has none. Raises ConfigError."""
        text = self.texts.get(name)
        if text is not None and not (text.isdecimal() and 1 <= int(text) <= 2**30):
            raise self._refused(name, "a whole number from 1")
        return None if text is None else int(text)

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
        strategies = self.typed.strategy or ()
        if len(strategies) > 1:
            allowed = f"one with {self.path}, whose options are of one layout"
            raise ConfigError("strategy", ",".join(strategies), allowed)
        degree = self.typed.pp
        own = self.file.fixed.get("pp")
        if own and degree and str(degree) != own and not self.typed.mbs:
            allowed = f"{own}, by which {self.path} divides its batch, or given with --mbs"
            raise ConfigError("pp", degree, allowed)

    def _layout(self) -> Options:
        """Return model, length and axes. Raises ConfigError."""
        texts = self.texts
        names = ("seq_len", "tp", "pp", "cp", "ep")
        layout = {name: texts[name] for name in names if name in texts}
        if self.typed.models:
            return layout
        if not {"num_layers", "model"} & texts.keys():
            raise ConfigError("model", None, f"a name beside {self.path}, which names none")
        return layout | {"model": self.path if "num_layers" in texts else texts["model"]}

    def _is_ddp(self, num_shards: int) -> bool:
        """Return whether data ranks have whole weights.

        num_shards: ranks that neither tp, pp nor --dp-replicate names.
        """
        texts = self.texts
        if self.file.framework == "megatron":
            return texts.get("use_distributed_optimizer") != TRUE
        if self.file.framework == "deepspeed":
            return texts.get("stage") == "0"
        if kind := texts.get("data_parallel"):
            return kind == "ddp"
        return num_shards == 1

    def _num_ranks(self, options: TrainOptions, machine: Machine, fewest: int) -> int:
        """Return --nproc, or the file's number, or the default one. Raises ConfigError."""
        nproc = options.nproc or self.texts.get("world_size")
        if not nproc and (shards := self._number("dp_shard")):
            inner = [getattr(options, axis) or 1 for axis in ("tp", "pp", "cp")]
            nproc = str(math.prod(inner) * self._copies * shards)
        default = train_plan.default_nproc(options, machine.device)
        if default.isdecimal() and not options.strategy:
            default = str(max(fewest, int(default) * self._copies))
        return machine.num_ranks(nproc, default)

    @property
    def _copies(self) -> int:
        """Copies of the weights, as far as they are given."""
        return self.typed.dp_replicate or self._number("dp_replicate") or 1

    def _strategy(self, options: TrainOptions, world_size: int) -> str:
        """Return how data ranks share the weights, or the axis of the only data rank."""
        tp, pp, ep = (getattr(options, axis) or 1 for axis in ("tp", "pp", "ep"))
        if world_size <= tp * pp:
            return "pp" if pp > 1 else "tp" if tp > 1 else "single"
        # DDP goes with none of these axes. In PyTorch's own files that is refused.
        is_divided = max(tp, pp, ep) > 1 and self.file.framework != "pytorch"
        is_ddp = self._is_ddp(world_size // (tp * pp * self._copies))
        return "ddp" if is_ddp and not is_divided else "fsdp"

    def _batches(self, options: TrainOptions, parallel: ParallelConfig) -> Options:
        """Return the batch of a pass, and the passes of a step. Raises ConfigError."""
        num_ranks = parallel.data_ranks
        gbs = self._number("gbs")
        passes = self._number("grad_accum")
        has_mbs = "mbs" in self.given or options.find_batch
        batches = {} if has_mbs else self._pass(parallel.pp, num_ranks, gbs, passes)
        if "grad_accum" in self.given or not (gbs or passes):
            return batches
        if gbs is None:
            return batches | {"grad_accum": str(passes)}
        mbs = options.mbs or (int(batches.get("mbs", "1")),)
        if options.find_batch or len(mbs) > 1:
            field = "find-batch" if options.find_batch else "mbs"
            value = "given" if options.find_batch else ",".join(map(str, mbs))
            allowed = f"only with --grad-accum, as {self.path} has {gbs} sequences in a step"
            raise ConfigError(field, value, allowed)
        count, rest = divmod(gbs, mbs[0] * num_ranks)
        if rest or not count or (passes and not has_mbs and passes != count):
            factors = f"{mbs[0]} x {num_ranks}" + (f" x {passes}" if passes else "")
            allowed = f"a multiple of micro-batch x data ranks ({factors})"
            raise self._refused("gbs", f"{allowed}; or give --mbs or --grad-accum")
        return batches | {"grad_accum": str(count)}

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

    def _techniques(self, options: TrainOptions) -> dict[str, object]:
        """Return the options of a step's techniques. Raises ConfigError."""
        techniques = self._compiled() | self._sharding(options)
        if "ac" not in self.given and "sac_freq" not in self.given:
            techniques["ac"] = self._checkpointing()
        if "pp_schedule" not in self.given:
            techniques |= self._schedule()
        if "precision" not in self.given and not options.fp8:
            techniques |= self._precision(options)
        if backend := self.texts.get("attention_backend"):
            techniques["attention"] = _BACKENDS.get(backend, "auto")
        if "optimizer" not in self.given and (optimizer := self.texts.get("optimizer")):
            if optimizer not in (*OptimizerKind, "adam"):
                allowed = "adam or muon: train's data ranks do not divide an optimizer's layers"
                raise self._refused("optimizer", f"{allowed}; or give --optimizer")
            techniques["optimizer"] = "adamw" if optimizer == "adam" else optimizer
        switches = {TRUE: "1", FALSE: "0"}
        clip = self.texts.get("clip", self.texts.get("gradient_clipping"))
        if clip is not None:
            techniques["clip"] = switches.get(clip, clip)
        return techniques

    def _checkpointing(self) -> str:
        texts = self.texts
        recompute = texts.get("recompute", texts.get("recompute_granularity", "none"))
        if recompute == "blocks":
            return f"1/{texts.get('recompute_every', '1')}"
        if self.file.framework != "megatron" or recompute == "none":
            return recompute
        if recompute == "selective":
            allowed = (
                "full or none: --ac selective keeps attention, which Megatron-LM's does not"
            )
            raise self._refused("recompute_granularity", f"{allowed}; or give --ac")
        for name, value in (("recompute_method", "uniform"), ("recompute_num_layers", "1")):
            if texts.get(name, value) != value:
                raise self._refused(name, f"{value}, as train recomputes; or give --ac")
        return recompute

    def _schedule(self) -> Options:
        texts = self.texts
        chunks = texts.get(_CHUNKS, "1")
        schedule = texts.get("pp_schedule", "1f1b" if chunks == "1" else "interleaved")
        if not PipelineSchedule(schedule).has_stages:
            return {"pp_schedule": schedule}
        stages = texts.get("pp_stages", "2") if chunks == "1" else chunks
        return {"pp_schedule": schedule, "pp_stages": stages}

    def _precision(self, options: TrainOptions) -> dict[str, object]:
        """Return the precision of weights and products. Raises ConfigError."""
        texts = self.texts
        dtypes = {name: texts.get(name, "") for name in _DTYPES}
        for name, dtype in dtypes.items():
            if dtype == "fp16":
                raise self._refused(name, "bf16 or fp32, which train has; or give --precision")
        if texts.get("fp4_format", "none") != "none":
            return {"precision": "nvfp4"}
        if texts.get("fp8_format", "none") != "none":
            return self._fp8()
        weights = "bf16" if dtypes["shard_dtype"] == "bf16" else "amp"
        if "fp32" in (dtypes["dtype"], dtypes["param_dtype"]):
            weights = "fp32"
        narrow = texts.get("precision", "bf16")
        if narrow == "bf16":
            return {"precision": weights}
        if narrow == "fp8" and weights != "fp32":
            gathers = texts.get("fp8_all_gather") == TRUE and options.strategy == ("fsdp",)
            return {"precision": weights, "fp8": True, "fp8_all_gather": gathers}
        if weights != "amp":
            raise self._refused("precision", f"left out over {weights}; or give --precision")
        return {"precision": narrow}

    def _fp8(self) -> dict[str, object]:
        """Return the precision of Megatron-LM's recipe. Raises ConfigError."""
        match self.texts.get("fp8_recipe", "delayed"):
            case "mxfp8":
                return {"precision": "mxfp8"}
            case "delayed":
                return {"precision": "fp8", "fp8_recipe": "te"}
            case "tensorwise":
                return {"precision": "fp8"}
        allowed = "delayed, tensorwise or mxfp8, which train has; or give --precision"
        raise self._refused("fp8_recipe", allowed)

    def _compiled(self) -> dict[str, object]:
        scope = self.texts.get("compile", "none")
        is_async = self.texts.get("async_tp") == TRUE
        if scope == "none" and is_async:
            scope = "block"  # torch finds products to send in compiled blocks alone
        compiled: dict[str, object] = {"async_tp": True} if is_async else {}
        if self.typed.compile is False or scope == "none":
            return {**compiled, "compile": False}
        return {**compiled, "compile": True, "compile_scope": scope}

    def _sharding(self, options: TrainOptions) -> dict[str, object]:
        """Return how ranks share weights, gradients and layers. Raises ConfigError."""
        texts = self.texts
        # torchtitan reduces in fp32 over shards of bf16, too.
        is_sharded = options.strategy == ("fsdp",)
        reduced = texts.get("reduce_dtype", "fp32" if is_sharded else None)
        match self.file.framework:
            case "megatron":
                reshard: str | None = "no"
                reduced = "bf16" if texts.get("grad_reduce_in_bf16") == TRUE else "fp32"
            case "deepspeed":
                reshard = "yes" if texts.get("stage") == "3" else "no"
                is_fp32 = self.given.get("precision", texts.get("dtype")) == "fp32"
                reduced = texts.get("communication_data_type", "fp32" if is_fp32 else "bf16")
            case _:
                reshard = texts.get("reshard_after_forward")
        bucket = None if is_sharded else texts.get("bucket_cap_mb", "0")
        sharing = {
            "reshard": reshard,
            "reduce_dtype": reduced,
            "grad_sync": texts.get("grad_sync"),
            "bucket_mb": None if bucket == "0" else bucket,  # 0: torch's own
            "pp_split": self._stage_split(),
        }
        return {name: value for name, value in sharing.items() if value is not None}

    def _stage_split(self) -> str | None:
        if self.file.framework != "megatron":
            return None
        counts = [self.texts.get(name) == TRUE for name in USED["pp_split"]]
        if any(counts) and not all(counts):
            name = USED["pp_split"][counts.index(True)]
            raise self._refused(name, "given for embedding and loss, or for neither")
        return "torchtitan" if all(counts) else "even"

    def _notes(self, idle: Sequence[str]) -> tuple[str, ...]:
        """Return notes on the file's keys. idle: options without effect in this layout."""
        notes = [*self.file.notes]
        if framework := FRAMEWORKS.get(self.file.framework):
            notes.append(framework)
        if self.texts.get("fuse_qkv") == FALSE:
            notes.append("q, k and v are one product, where torchtitan has three")
        own_way = [" ".join(self.file.origin[n]) for n in OWN_WAY if n in self.file.origin]
        if own_way:
            notes.append(f"not used, as PyTorch has ways of its own: {', '.join(own_way)}")
        without = [" ".join(self.origin[name]) for name in idle if name in self.origin]
        if without:
            notes.append(f"no effect on a step of this layout: {', '.join(without)}")
        return tuple(notes)


def _outline(
    options: TrainOptions,
    techniques: Mapping[str, object],
    strategy: str,
    parallel: ParallelConfig,
) -> TrainCase:
    """Return a case of a layout, which tells the techniques that have an effect in it."""
    (model, *_) = read_models(options.model_names[0], options.scale, parallel.tp)
    schedule = techniques.get("pp_schedule") or vars(options)["pp_schedule"]
    return TrainCase(
        model=model.with_layers(options.num_layers or model.num_layers),
        parallel=parallel,
        data_parallel=train_plan.data_parallel(strategy),
        grad_accum=vars(options)["grad_accum"] or 1,
        pp_schedule=PipelineSchedule(str(schedule)),
    )


def _is_effective(name: str, case: TrainCase) -> bool:
    if name == "reduce_dtype":
        return case.parallel.gradient_ranks > 1
    if name == "grad_sync":
        return case.grad_accum > 1
    return name not in _FIELDS or _FIELDS[name].is_effective(case)
