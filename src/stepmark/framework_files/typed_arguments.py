"""Megatron-LM's arguments that are typed beside options of ours."""

from stepmark.framework_files.layer_frequency import dense_layers
from stepmark.framework_files.megatron import JOINED, TABLE, VPP, replaced
from stepmark.framework_files.table import Entry
from stepmark.ground.errors import ConfigError

# What is typed instead of others.
_INSTEAD = {
    VPP: "written as --virtual-pipeline-model-parallel-size N, chunks of a stage",
    "group-query-attention": "left out: --num-query-groups N is enough",
}


def typed_option(name: str, value: str) -> tuple[str, str]:
    """Return an argument that is typed beside options of ours as one of these.

    Megatron-LM's defaults of what is not typed do not hold. Raises ConfigError.
    """
    ((argument, text),) = replaced({name: value}).items()
    entry = TABLE.entries.get(argument, Entry())
    if entry.option:
        text = dense_layers(text) if argument == "moe-layer-freq" else text
        return entry.option, TABLE.value_of(argument, text)
    if name in JOINED:
        allowed = _INSTEAD.get(name, "in a file with the model's other arguments (--config)")
    elif entry.refused:
        allowed = f"left out here; in a file (--config) it must be {entry.refused}"
    elif entry.unmodelled:
        allowed = f"left out: {entry.unmodelled}"
    else:
        allowed = f"left out, as it has no effect on time and memory ({entry.no_effect})"
    raise ConfigError(f"--{name}", "given", allowed)
