"""Rules by framework: one module each, imported when its framework is needed.

A module has a settings dataclass, whose fields are the framework's own parameters with their
defaults, and `workload(job, settings)`, or `workload(settings, world_size)` where the model is
no transformer. Settings become flags (docs/adr/0005). PyTorch's are one module; fsdp, ddp, tp
and pp are older names of parts of it.
"""

import dataclasses
import importlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stepmark.cases.training import DataParallel
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.ops import Gemm, Norm
from stepmark.model.parallel import ParallelConfig
from stepmark.model.product_precision import of_operators
from stepmark.step.workload import ComputeOp, Workload
from stepmark.workloads.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A framework's rules: their module in this package; module and class of the settings.

    alias: an older name of a part of the rules. It fixes some settings and has no others whose
    names begin with `without`; its workloads are named after it.
    """

    module: str
    settings: str
    help: str
    has_job: bool = True  # False: the settings are all but the number of ranks
    has_own: bool = False  # accepts architectures that are no decoders
    alias: str = ""
    fixed: Mapping[str, object] = field(default_factory=dict)
    without: str = "-"

    def make(self, **values: Any) -> Any:
        """Return the settings of these values. Raises ConfigError."""
        return self._class()(**self.fixed, **values)

    def resolved(self, settings: Any, parallel: ParallelConfig) -> Any:
        """Return the settings with the defaults that depend on the layout."""
        return settings.resolved(parallel) if hasattr(settings, "resolved") else settings

    def fields(self) -> dict[str, "dataclasses.Field[Any]"]:
        """Return the settings by name; of an alias those that are not fixed and have effect."""
        return {
            field.name: field
            for field in dataclasses.fields(self._class())
            if field.name not in self.fixed
            and not field.name.startswith(self.without)
            and idle_with(field, self.fixed) is None
        }

    def workload(self, *arguments: Any) -> Workload:
        """Return the workload of (job, settings), or of (settings, world size) without a job.

        With a job the settings of the workload include its batches and axes, but none without
        effect.
        """
        more = (self.alias,) if self.alias else ()
        workload: Workload = _imported(self.module).workload(*arguments, *more)
        if not self.has_job:
            return workload
        own = self.fields()
        values = workload.settings
        idle = {
            field.name
            for field in dataclasses.fields(self._class())
            if field.name not in own or idle_with(field, values)
        }
        settings = {name: value for name, value in values.items() if name not in idle}
        imbalance = getattr(arguments[0], "imbalance", 1.0)
        notes = workload.notes
        if imbalance > 1:
            settings["imbalance"] = imbalance
            notes = (*notes, _IMBALANCE.format(imbalance))
        # Megatron-LM has them under its own names.
        if "micro_batch_size" not in settings:
            job = arguments[0]
            axes = dataclasses.asdict(job.parallel)
            of_job = {"mbs": job.mbs, "gbs": job.global_batch}
            of_job |= {axis: size for axis, size in axes.items() if size > 1}
            if job.products is not None:
                of_job["products"] = job.products.dtype.value
            settings = {**of_job, **settings}
        return dataclasses.replace(workload, settings=settings, notes=notes)

    def job_of(self, workload: Workload) -> tuple[Job, Any] | None:
        """Return the job and the settings of a workload of this rule; None: it has no decoder.

        Raises ConfigError for a file whose settings are not those of this version.
        """
        model = workload.model
        computed = [
            item.op
            for block in workload.blocks.values()
            for item in block
            if isinstance(item, ComputeOp)
        ]
        dtype = next((op.dtype for op in computed if isinstance(op, Norm)), None)
        narrow = (op for op in computed if isinstance(op, Gemm) and op.dtype.is_narrow)
        if model is None or dtype is None or not self.has_job:
            return None
        given = workload.settings
        axes: dict[str, Any] = {
            axis: given.get(name, given.get(axis, 1)) for axis, name in _AXES.items()
        }
        if _contradicts(workload, axes):  # a file of a version that kept no axes
            return None
        fields = self.fields()
        own = {name: value for name, value in given.items() if name in fields}
        try:
            others = ParallelConfig(**axes, dp_shard=axes["ep"]).world_size // axes["ep"]
            axes["dp_shard"] = workload.world_size // others
            job = Job(
                model=model,
                parallel=ParallelConfig(**axes),
                mbs=workload.micro_batch or 1,
                gbs=workload.num_sequences,
                dtype=dtype,
                products=next((of_operators(op.dtype, op.scaling) for op in narrow), None),
                imbalance=msgspec.convert(given.get("imbalance", 1.0), type=float),
            )
            if job.num_microbatches != workload.num_microbatches:  # on a part of its ranks
                return None
            return job, msgspec.convert({**self.fixed, **own}, type=self._class(), strict=True)
        except (TypeError, msgspec.ValidationError) as error:
            allowed = f"those of {workload.rules}: {error}"
            raise ConfigError("settings", ", ".join(own), allowed) from None

    def _class(self) -> Any:
        module, _, name = self.settings.rpartition(".")
        return getattr(_imported(module), name)


_IMBALANCE = (
    "experts: the program is that of a rank whose experts get {:g} x the mean rows, each as"
    " many, in every layer and micro-batch; the others wait for it, so FLOPs per GPU, message"
    " sizes and memory are those of the fullest rank (totals of the job: as if all were)"
)
# Axes of the mesh by their names in Megatron-LM; other rules have ours.
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp_replicate": "num_distributed_optimizer_instances",
}


def _contradicts(workload: Workload, axes: Mapping[str, int]) -> bool:
    """Return whether the groups or stages of a workload are not those of these axes."""
    sizes = {name: group.size for name, group in workload.groups.items()}
    return len(workload.stages) != axes["pp"] or any(
        sizes.get(axis, axes[axis]) != axes[axis] for axis in ("tp", "cp", "ep")
    )


def idle_with(field: "dataclasses.Field[Any]", values: Mapping[str, Any]) -> str | None:
    """Return the name of a setting with whose value another one has no effect."""
    only: Mapping[str, Container[object]] = field.metadata.get("only", {})
    names = (name for name in only if name in values and values[name] not in only[name])
    return next(names, None)


def _imported(module: str) -> Any:
    return importlib.import_module(f"stepmark.workloads.rules.{module}")


RULES: dict[str, Rule] = {
    "megatron": Rule(
        module="megatron.rule",
        settings="megatron.settings.Megatron",
        help="Megatron-LM: tp, sequence parallelism, pp, vpp, cp, ep, distributed optimizer",
    ),
    "deepspeed": Rule(
        module="deepspeed.rule",
        settings="deepspeed.settings.DeepSpeed",
        help="DeepSpeed: ZeRO stage 0 to 3",
        has_own=True,
    ),
    "pytorch": Rule(
        module="pytorch.rule",
        settings="pytorch.settings.PyTorch",
        help="PyTorch: FSDP2 or DDP, DTensor's tp, pp, cp, ep, as in torchtitan",
        has_own=True,
    ),
    "fsdp": Rule(
        module="pytorch.rule",
        settings="pytorch.settings.PyTorch",
        help="PyTorch FSDP2 (fully_shard), also with dp-replicate, tp, pp, ep",
        has_own=True,
        alias="fsdp",
        fixed={"data_parallel": DataParallel.FSDP},
    ),
    "ddp": Rule(
        module="pytorch.rule",
        settings="pytorch.settings.PyTorch",
        help="PyTorch DistributedDataParallel",
        has_own=True,
        alias="ddp",
        fixed={"data_parallel": DataParallel.DDP},
    ),
    "tp": Rule(
        module="pytorch.rule",
        settings="pytorch.settings.PyTorch",
        help="PyTorch tensor and sequence parallelism as torchtitan's, one data rank",
        alias="tp",
        fixed={"data_parallel": DataParallel.NONE},
        without="pp_",
    ),
    "pp": Rule(
        module="pytorch.rule",
        settings="pytorch.settings.PyTorch",
        help="PyTorch pipeline parallelism: 1F1B, interleaved; one data rank",
        alias="pp",
        fixed={"data_parallel": DataParallel.NONE},
    ),
    "dlrm": Rule(
        module="dlrm",
        settings="dlrm.Dlrm",
        help="facebookresearch/dlrm: tables over ranks, MLPs on all",
        has_job=False,
    ),
}

_ALIASES = {
    "megatronlm": "megatron",
    "megatroncore": "megatron",
    "mcore": "megatron",
    "deepspeedzero": "deepspeed",
    "zero": "deepspeed",
    "fsdp2": "fsdp",
    "fullyshard": "fsdp",
    "hsdp": "fsdp",
    "torch": "pytorch",
    "torchtp": "tp",
    "torchpp": "pp",
    "torchtitan": "fsdp",
    "deepseek": "megatron",  # AICB's word for DeepSeek's models under Megatron-LM
}


def find_rule(name: str) -> str:
    """Return a framework's name in RULES. Case and punctuation do not matter.

    Raises ConfigError.
    """
    key = "".join(c for c in name.lower() if c.isalnum())
    rule = _ALIASES.get(key, key)
    if rule not in RULES:
        more = "; stepmark comm NAME measures a collective" if key == "collectivetest" else ""
        raise not_one_of("framework", name, RULES, more)
    return rule
