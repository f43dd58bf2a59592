"""Whose behaviour a workload follows: one module per framework, read when it is asked for.

A module has a settings dataclass, whose fields are the framework's own parameters with their
defaults, and `workload(job, settings)`, or `workload(settings, world_size)` where what is
trained is no transformer. Settings become flags (docs/adr/0005).
"""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepmark.core.errors import ConfigError
from stepmark.core.workload import Workload
from stepmark.workload.architecture import AnyJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Where a framework's rules lie: a module here, and of its settings module and class."""

    module: str
    settings: str
    help: str
    # The axis of the job's mesh that data-parallel ranks lie on when nobody says which; "":
    # there are none.
    data_axis: str = "dp_shard"
    has_job: bool = True  # no: the settings say all but the number of ranks
    has_own: bool = False  # takes architectures that are no decoders

    def settings_class(self) -> Any:
        module, _, name = self.settings.rpartition(".")
        return getattr(_imported(module), name)

    def fields(self) -> dict[str, "dataclasses.Field[Any]"]:
        """The settings by name."""
        return {field.name: field for field in dataclasses.fields(self.settings_class())}

    def function(self) -> Callable[..., Workload]:
        """What makes a workload; its settings have the batches, whatever the framework."""
        found: Callable[..., Workload] = _imported(self.module).workload
        return _with_batches(found) if self.has_job else found


def _with_batches(function: Callable[..., Workload]) -> Callable[..., Workload]:
    def made(job: AnyJob, settings: object) -> Workload:
        workload = function(job, settings)
        if "micro_batch_size" in workload.settings:  # Megatron-LM's own names
            return workload
        gbs = job.mbs * job.num_microbatches * job.parallel.data_ranks
        batches = {"mbs": job.mbs, "gbs": gbs}
        return dataclasses.replace(workload, settings={**batches, **workload.settings})

    return made


def _imported(module: str) -> Any:
    return importlib.import_module(f"stepmark.workload.rules.{module}")


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
    """The name in RULES of a framework; case and punctuation do not matter.

    Raises ConfigError.
    """
    key = "".join(c for c in name.lower() if c.isalnum())
    found = _ALIASES.get(key, key)
    if found not in RULES:
        more = "; stepmark comm NAME measures a collective" if key == "collectivetest" else ""
        raise ConfigError("framework", name, f"one of {', '.join(RULES)}{more}")
    return found
