"""Columns of `stepmark plan` as options of a prediction: its flags and its printed headings."""

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from stepmark.ground.errors import ConfigError

DP = "dp"
_HEADINGS = {
    "rules": "framework",
    "gpus": "nproc",
    "GPUs": "nproc",
    "ckpt": "recompute",
    "tok/s/GPU": "tokens_per_s_gpu",
    "MFU": "mfu",
}
_AXES = ("tp", "pp", "cp")  # beside the data ranks


def without_headings(cells: Mapping[str, str]) -> dict[str, str]:
    """Return cells with plan's headings as names of options."""
    return {_HEADINGS.get(column, column): text for column, text in cells.items()}


def in_options(cells: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return cells in the options of the row's rules. names: of these options.

    PyTorch's rules have chunks as stages of an interleaved schedule.
    """
    own = dict(cells)
    if "vpp" in own and "vpp" not in names:
        chunks = own.pop("vpp")
        if chunks != "1":
            own = {"pp_schedule": "interleaved", "pp_stages": chunks, **own}
    replicas, _, shards = own.get(DP, "").partition("x")
    if shards:
        own = {"dp_replicate": replicas, **own}
    text = own.get("recompute")
    if text is not None and "recompute_granularity" in names:
        del own["recompute"]
        own |= _of_megatron(text)
    elif text is not None and "/" in text and "recompute_some" in names:
        some, _, every = text.partition("/")
        own |= {"recompute": "blocks", "recompute_some": some, "recompute_every": every}
    elif text is not None and "recompute" not in names:
        own["ac"] = own.pop("recompute")
    return own


def _of_megatron(text: str) -> dict[str, str]:
    count, _, unit = text.partition("/")
    if unit != "chunk":
        return {"recompute_granularity": text}
    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": count,
    }


def ranks_of(dp: str, row: Any) -> int:
    """Return the ranks of a row by its data ranks. dp: a number, or replicas x shards.

    Raises ConfigError.
    """
    sizes = dp.split("x")
    if not 1 <= len(sizes) <= 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(DP, dp, "a whole number from 1, or replicas x shards such as 2x16")
    return prod([*map(int, sizes), *(getattr(row, axis, None) or 1 for axis in _AXES)])
