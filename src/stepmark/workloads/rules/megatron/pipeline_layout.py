"""Layers of each model chunk by Megatron-LM's --pipeline-model-parallel-layout.

A layout such as "Et*3|(tt|)*29,L" has a part per model chunk, divided by "|": the first chunks
of all stages, then the second ones. E is the embedding, t a layer, L the head with its loss,
m a layer of multi-token prediction; (...)*n and t*n repeat, commas mean nothing.

Source: megatron-core 0.16.1, transformer/pipeline_parallel_layer_layout.py (parse_str_to_list,
validate_layer_layout).
"""

import re

from stepmark.ground.errors import ConfigError

_FIELD = "pipeline_model_parallel_layout"
_REPEATED_GROUP = r"\(([^)]+)\)\*(\d+)"
_REPEATED_LETTER = r"(.)\*(\d+)"
_MOST_LETTERS = 1_000_000


def chunks_of(layout: str) -> list[str]:
    """Return the letters of each model chunk. Raises ConfigError for other letters."""
    text = layout.replace(",", "")
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
        repeats = re.findall(pattern, text)
        if sum(len(part) * int(times) for part, times in repeats) > _MOST_LETTERS:
            raise ConfigError(_FIELD, layout, f"at most {_MOST_LETTERS} layers")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    if unknown := sorted(set(text) - set("EtmL|")):
        rule = f"of E, t, m, L and |, with (...)*n and t*n, not {''.join(unknown)}"
        raise ConfigError(_FIELD, layout, rule)
    return text.split("|")


def num_chunks(layout: str, pp: int) -> int:
    """Return the model chunks per stage. Raises ConfigError."""
    total = len(chunks_of(layout))
    if total % pp:
        raise ConfigError(_FIELD, layout, f"a multiple of pp ({pp}) parts, not {total}")
    return total // pp


def sizes_of(layout: str, num_layers: int, num_mtp: int, pp: int) -> list[list[int]]:
    """Return the layers of each stage's chunks. Raises ConfigError."""
    chunks = chunks_of(layout)
    text = "".join(chunks)
    layers = text.count("t")
    is_valid = chunks[0].startswith("E") and chunks[-1].endswith("L")
    if not is_valid or text.count("E") > 1 or text.count("L") > 1:
        raise ConfigError(_FIELD, layout, "one E at its beginning and one L at its end")
    if text.count("m") != num_mtp:
        rule = f"{num_mtp} of m, as many as --num-mtp-layers, not {text.count('m')}"
        raise ConfigError(_FIELD, layout, rule)
    if not chunks[-1].endswith("m" * num_mtp + "L"):
        rule = "m directly before L (other places are not modelled)"
        raise ConfigError(_FIELD, layout, rule)
    if layers != num_layers:
        raise ConfigError(_FIELD, layout, f"{num_layers} layers (t), not {layers}")
    return [[chunk.count("t") for chunk in chunks[stage::pp]] for stage in range(pp)]


def written(sizes: list[int]) -> str:
    """Return a layout of chunks of these sizes, equal ones in a row as one group."""
    parts = [f"t*{size}" if size > 1 else "t" * size for size in sizes]
    first, *middle, last = parts
    text = f"E{first}|"
    while middle:
        repeats = next((n for n, part in enumerate(middle) if part != middle[0]), len(middle))
        text += f"({middle[0]}|)*{repeats}," if repeats > 1 else f"{middle[0]}|"
        del middle[:repeats]
    return f"{text}{last}L"
