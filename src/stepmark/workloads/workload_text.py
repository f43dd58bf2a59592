"""A workload as text: what `stepmark workload show` prints."""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from stepmark.findings.histogram import default_bins, size_of
from stepmark.findings.histogram import lines as histogram_lines
from stepmark.findings.histogram import rows as histogram_rows
from stepmark.model.model_tables import params_text
from stepmark.step.workload import Workload
from stepmark.step.workload_stages import missing_pipeline
from stepmark.tables.columns import Row
from stepmark.tables.table import Table
from stepmark.workloads import workload_pipeline
from stepmark.workloads.workload_tables import (
    COLLECTIVE_COLUMNS,
    COMPUTE_COLUMNS,
    LAYER_COLUMNS,
    STAGE_COLUMNS,
    TOTAL_COLUMNS,
    collective_rows,
    compute_rows,
    histogram,
    layer_rows,
    stage_rows,
    total_rows,
)

Settings = Mapping[str, str | int | float | bool | None]
NO_DEFAULTS: Settings = MappingProxyType({})
_MOST_SHAPES = 24
_MOST_STAGES = 8
_OF_SEVERAL_RANKS = ("calls", "bytes", "size_is")  # of a histogram's columns


def header(workload: Workload, defaults: Settings = NO_DEFAULTS) -> list[str]:
    """Return the model, rules, groups, settings and notes.

    Settings that equal the framework's `defaults` are only counted.
    """
    model = workload.model
    ranks = _count(workload.world_size, "rank")
    lines = [f"workload {workload.name}: {workload.rules}, {ranks}"]
    # The version is followed by the files that the rules were read from.
    lines += [f"rules    {workload.source.partition(': ')[0]}"] if workload.source else []
    if model is not None:
        lines.append(
            f"model    {model.name}: {model.num_layers} layers, hidden {model.hidden_size}, "
            f"heads {model.num_heads}/{model.num_kv_heads}, ffn {model.ffn_hidden_size}, "
            f"vocabulary {model.vocab_size}, seq {model.seq_len}; {params_text(model)}"
        )
    groups = (
        f"{name} {group.size}" for name, group in workload.groups.items() if group.size > 1
    )
    spread = missing_pipeline(workload) or _count(len(workload.stages), "stage")
    if workload.num_microbatches > 1 or workload.numbers("microbatch"):
        spread += f", {_count(workload.num_microbatches, 'micro-batch')} per step"
        spread += _sequences(workload.settings)
    lines.append(f"spread   {spread}; groups: {', '.join(groups) or 'none'}")
    lines += _settings(workload.settings, defaults)
    lines += [f"note     {note}" for note in workload.all_notes]
    return lines


def _sequences(settings: Settings) -> str:
    """Return the sequences of a micro-batch and of a step, if the settings have them."""
    mbs, gbs = (settings.get(f"{name}_batch_size") for name in ("micro", "global"))
    mbs = mbs or settings.get("mbs")
    gbs = gbs or settings.get("gbs")
    return f" (mbs {mbs}, {gbs} sequences of all data ranks)" if mbs and gbs else ""


def _settings(settings: Settings, defaults: Settings) -> list[str]:
    """Return settings that differ from their defaults, and the number of the others."""
    if not settings:
        return []
    texts = [
        f"{name} {word(value)}"
        for name, value in settings.items()
        if name not in defaults or defaults[name] != value
    ]
    rest = len(settings) - len(texts)
    texts += [f"{rest} {'more are' if texts else 'are'} defaults"] if rest else []
    return [f"settings {', '.join(texts)}"]


def lines(workload: Workload, stage: int, defaults: Settings = NO_DEFAULTS) -> list[str]:
    """Return everything, each table under its heading."""
    return [*header(workload, defaults), *tables(workload, stage)]


def tables(workload: Workload, stage: int) -> list[str]:
    """Return stages, totals, communication, sizes, computation, layers and pipeline."""
    lines = _section(
        "Stages (per rank and step)", Table(_merged(stage_rows(workload)), STAGE_COLUMNS).text()
    )
    lines += _section(
        "Totals (per step; stages: one rank of each, job: all ranks)",
        Table(total_rows(workload), TOTAL_COLUMNS).text(),
    )
    of_stage = f", stage {stage}" if len(workload.stages) > 1 else ""
    lines += _section(
        f"Communication{of_stage} (per rank and step)",
        Table(collective_rows(workload, stage), COLLECTIVE_COLUMNS).text(),
    )
    if sizes := _size_lines(workload, stage):
        lines += _section(
            f"Sizes{of_stage} (bytes of a message, whatever its pass and group)", sizes
        )
    computed = compute_rows(workload, stage)
    more = len(computed) - _MOST_SHAPES
    lines += _section(
        f"Computation{of_stage} (per rank and step; FLOP as for MFU: backward twice forward)",
        [
            *Table(computed[:_MOST_SHAPES], COMPUTE_COLUMNS).text(),
            *([f"and {more} more; --json has all"] if more > 0 else []),
        ],
    )
    if workload.numbers("layer"):
        lines += _section(
            f"Layers{of_stage} (each of them; bytes: messages)",
            Table(layer_rows(workload, stage), LAYER_COLUMNS).text(),
        )
    return lines + _section("Pipeline", workload_pipeline.lines(workload))


def _size_lines(workload: Workload, stage: int) -> list[str]:
    """Return calls by size; by powers of two where there are many sizes."""
    counted = histogram(workload, stage)
    if not counted:
        return []
    table = histogram_rows(counted, by=("collective",))
    lines = histogram_lines(table, _OF_SEVERAL_RANKS)
    if default_bins(counted).name != "exact":
        each = len({size_of(kind)[0] for kind in counted})
        lines.append(f"{each} sizes in bins, powers of two; --json and --csv have each")
    return lines


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _merged(stages: Sequence[Row]) -> list[Row]:
    """Return the stages; many that are alike and follow each other share a row."""
    if len(stages) <= _MOST_STAGES:
        return list(stages)
    groups = (
        list(group)
        for _, group in itertools.groupby(
            stages, lambda stage: stage | {"stage": None, "which": None}
        )
    )
    return [
        first | {"stage": f"{first['stage']}-{others[-1]['stage']}", "which": "each"}
        if others
        else first
        for first, *others in groups
    ]


def _count(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural if count != 1 else ''}"


def word(value: object) -> str:
    """Return the value of a setting in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unset" if value is None else str(value)
