"""The training step of `stepmark run`: one that this machine can hold."""

import sys
from typing import Any

from stepmark.cli.options import Values
from stepmark.core.train_memory import largest_mbs
from stepmark.core.units import parse_duration

_MOST_MBS = 8
# Of an accelerator's memory; the rest is for what the estimate leaves out.
_SHARE = 0.85
_SMALLER = ("gpt2-1.5b", "gpt2-125m")


def flags(values: Values, device: str) -> dict[str, Any]:
    """For `stepmark train`: FSDP on all accelerators, or a tiny model on the CPU."""
    if device == "cpu":
        return {
            "model": values["model"],
            "scale": "tiny",
            "device": device,
            "nproc": "2",
            "strategy": "ddp,fsdp",
            "steps": 10,
            "budget": "6s",
        }
    import torch  # noqa: PLC0415

    memory = torch.cuda.get_device_properties(0).total_memory
    share_s = parse_duration(values["budget"] or "240s", "budget") / 4
    how = {"device": device, "compile": True, "steps": 10, "timeout": "15m"}
    fitting = that_fits(values["model"], torch.cuda.device_count(), memory)
    if not fitting or fitting["model"] != values["model"]:
        instead = f"{fitting['model']} instead" if fitting else "left out"
        sys.stderr.write(f"# training {values['model']} does not fit, by estimate: {instead}\n")
    return fitting and {**fitting, **how, "budget": f"{share_s:g}s"}


def that_fits(model: str, num_ranks: int, memory_bytes: int) -> dict[str, Any]:
    """This model or a smaller one, spread over these accelerators; empty where none fits."""
    from stepmark.cli import train_plan  # noqa: PLC0415

    strategy = "fsdp" if num_ranks > 1 else "single"
    for name in (model, *_SMALLER):
        asked = {"model": name, "strategy": strategy, "nproc": str(num_ranks), "compile": True}
        planned = train_plan.cases(asked, "cuda", num_ranks)
        most = min(largest_mbs(case, int(memory_bytes * _SHARE)) for case in planned)
        if most:
            return {**asked, "mbs": str(min(most, _MOST_MBS))}
    return {}
