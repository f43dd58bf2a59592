"""Rules by framework: one module each, imported when its framework is needed.

A module has a settings dataclass, whose fields are the framework's own parameters with their
defaults, and `workload(job, settings)`, or `workload(settings, world_size)` where the model is
no transformer. Settings become flags (docs/adr/0005).
"""

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any

import msgspec

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.ops import Norm
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import ComputeOp, Workload
from stepmark.workloads.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A framework's rules: their module in this package; module and class of the settings."""

    module: str
    settings: str
    help: str
    data_axis: str = "dp_shard"  # default mesh axis of data-parallel ranks; "": there are none
    has_job: bool = True  # False: the settings are all but the number of ranks
    has_own: bool = False  # accepts architectures that are no decoders

    def settings_class(self) -> Any:
        module, _, name = self.settings.rpartition(".")
        return getattr(_imported(module), name)

    def fields(self) -> dict[str, "dataclasses.Field[Any]"]:
        """Return the settings by name."""
        return {field.name: field for field in dataclasses.fields(self.settings_class())}

    def workload(self, *arguments: Any) -> Workload:
        """Return the workload of (job, settings), or of (settings, world size) without a job.

        With a job the settings of the workload include its batches and its axes.
        """
        workload: Workload = _imported(self.module).workload(*arguments)
        # Megatron-LM has them under its own names.
        if not self.has_job or "micro_batch_size" in workload.settings:
            return workload
        job = arguments[0]
        axes = dataclasses.asdict(job.parallel)
        own = {"mbs": job.mbs, "gbs": job.global_batch}
        own |= {axis: size for axis, size in axes.items() if size > 1}
        return dataclasses.replace(workload, settings={**own, **workload.settings})

    def job_of(self, workload: Workload) -> tuple[Job, Any] | None:
        """Return the job and the settings of a workload of this rule; None: it has no decoder.

        Raises ConfigError for a file whose settings are not those of this version.
        """
        model = workload.model
        norms = (
            item.op.dtype
            for block in workload.blocks.values()
            for item in block
            if isinstance(item, ComputeOp) and isinstance(item.op, Norm)
        )
        dtype = next(norms, None)
        if model is None or dtype is None or not self.has_job:
            return None
        given = workload.settings
        axes: dict[str, Any] = {
            axis: given.get(name, given.get(axis, 1)) for axis, name in _AXES.items()
        }
        own = {name: value for name, value in given.items() if name in self.fields()}
        try:
            others = ParallelConfig(**axes, dp_shard=axes["ep"]).world_size // axes["ep"]
            axes["dp_shard"] = workload.world_size // others
            batches = {"mbs": workload.micro_batch or 1, "gbs": workload.num_sequences}
            job = Job(model=model, parallel=ParallelConfig(**axes), **batches, dtype=dtype)
            if job.num_microbatches != workload.num_microbatches:  # on a part of its ranks
                return None
            return job, msgspec.convert(own, type=self.settings_class(), strict=True)
        except (TypeError, msgspec.ValidationError) as error:
            allowed = f"those of {workload.rules}: {error}"
            raise ConfigError("settings", ", ".join(own), allowed) from None


# Axes of the mesh by their names in Megatron-LM; other rules have ours.
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp_replicate": "num_distributed_optimizer_instances",
}


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
    "fsdp": Rule(
        module="pytorch.fsdp",
        settings="pytorch.fsdp.Fsdp",
        help="PyTorch FSDP2 (fully_shard), also with dp-replicate, tp, pp, ep",
        has_own=True,
    ),
    "ddp": Rule(
        module="pytorch.ddp",
        settings="pytorch.ddp.Ddp",
        help="PyTorch DistributedDataParallel",
        data_axis="dp_replicate",
        has_own=True,
    ),
    "tp": Rule(
        module="pytorch.plain",
        settings="pytorch.plain.Tp",
        help="PyTorch tensor and sequence parallelism as torchtitan's, one data rank",
        data_axis="",
    ),
    "pp": Rule(
        module="pytorch.plain",
        settings="pytorch.plain.Pp",
        help="PyTorch pipeline parallelism: 1F1B, interleaved; one data rank",
        data_axis="",
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
