"""Rules by framework: one module each, imported when its framework is needed.

A module has a settings dataclass, whose fields are the framework's own parameters with their
defaults, and `workload(job, settings)`, or `workload(settings, world_size)` where the model is
no transformer. Settings become flags (docs/adr/0005).
"""

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any

from stepmark.ground.errors import not_one_of
from stepmark.step.workload import Workload


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

        With a job the settings of the workload include its batches.
        """
        workload: Workload = _imported(self.module).workload(*arguments)
        # Megatron-LM has batches under its own names.
        if not self.has_job or "micro_batch_size" in workload.settings:
            return workload
        job = arguments[0]
        batches = {"mbs": job.mbs, "gbs": job.global_batch}
        if job.products is not None:
            batches["products"] = job.products.dtype.value
        return dataclasses.replace(workload, settings={**batches, **workload.settings})


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
