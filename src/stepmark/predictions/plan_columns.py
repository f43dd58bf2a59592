"""Columns of `stepmark plan` as options of a prediction: its flags and its printed headings."""

import re
from collections.abc import Collection, Mapping, Set
from math import prod
from typing import Any

from stepmark.ground.errors import ConfigError

Varied = Mapping[str, Set[str]]  # columns that state an option, by its name
DP = "dp"
LABEL = "label"
NOTES = ("notes", "note", "comment", "comments", "remark", "remarks")
IGNORED = (DP, LABEL, "gib", "win_%", "win%", "days", "cost", *NOTES)  # no option
_HEADINGS = {
    "seq": "seq_len",
    "sequence_length": "seq_len",
    "rules": "framework",
    "gpus": "nproc",
    "ckpt": "recompute",
    "mfu_%": "mfu",
    "mfu_(%)": "mfu",
    "mfu%": "mfu",
    "mfu_pct": "mfu",
    "layout": LABEL,
    "name": LABEL,
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "micro_batch_size": "mbs",
}
_TIME = re.compile(  # of a step, with its unit: step time (ms), ms/step
    r"(?:step|time|(?:step|iter|iteration)_time|time(?:/|_per_)(?:step|iter|iteration))"
    r"(?:_?[(\[]([a-z]+)[)\]]|_(s|ms))?"
    r"|(s|ms|sec|seconds)(?:/|_per_)(?:step|it|iter|iteration)"
)
_RATE = re.compile(r"(?:tokens|tok|token)(?:/|_per_)(?:s|sec|second)(?:(/|_per_)gpu)?")
_UNITS = {"sec": "s", "seconds": "s", "msec": "ms"}
_ABOUT = re.compile(r"[~\u2248] *(?=\d)")  # before a number
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
PLAN_COLUMNS = ("vpp", "recompute", "ac", "pp_schedule", "pp_stages")  # some rules lack them
_LAYOUT = ("framework", "tp", "pp", "vpp", "cp", "ep", DP, "nproc", "mbs", "recompute")
_AXES = ("tp", "pp", "cp")  # with the data ranks these are all ranks
# Axes that plan's tables leave out where they are 1 in all rows.
_RARE = ("vpp", "cp", "ep")
_OF_A_LAYOUT = ("pp_schedule", "pp_stages", "dp_replicate")
_OF_RECOMPUTE = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("recompute_some", "recompute_every", "ac"),
)


def column_of(heading: str) -> tuple[str, str]:
    """Return the name of a column by its heading, and the unit of its cells or ""."""
    name = re.sub(r"[-\s]+", "_", heading.strip().lstrip("-").lower())
    if own := _TIME.fullmatch(name):
        unit = next(filter(None, own.groups()), "")
        return "step", _UNITS.get(unit, unit)
    if own := _RATE.fullmatch(name):
        return ("tokens_per_s_gpu" if own[1] else "tokens_per_s"), ""
    return _HEADINGS.get(name, name), ""


def value_of(text: str, unit: str) -> str:
    """Return a cell without marks of numbers, with the unit of its column."""
    value = _ABOUT.sub("", text)
    value = value.replace(",", "") if _THOUSANDS.fullmatch(value) else value
    return value + unit if value[-1:].isdecimal() else value


def axes_left_out(cells: Mapping[str, str]) -> tuple[str, ...]:
    """Return the axes that are 1 in a row that has a layout, but no cell of theirs."""
    own = cells.keys() | ({"vpp"} if "pp_stages" in cells else set())
    has_layout = {"tp", "pp", DP} & own
    return tuple(axis for axis in _RARE if axis not in own) if has_layout else ()


def layout_of(cells: Mapping[str, str]) -> str:
    """Return the layout of a row in brackets."""
    words = [f"{name} {cells[name]}" for name in _LAYOUT if name in cells]
    return f" ({', '.join(words)})" if words else ""


def replaced_by(cells: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options of a command that do not hold for a row."""
    of_layout = _OF_A_LAYOUT if {"tp", "pp", DP} & cells.keys() else ()
    return (*of_layout, *(_OF_RECOMPUTE if "recompute" in cells else ()))


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
