"""A workload as text: what `stepmark workload show` prints."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stepmark.core.columns import COUNT, TEXT, Column, Row, View, aligned
from stepmark.core.workload import Workload
from stepmark.report import workload_pipeline
from stepmark.report.histogram import default_bins, size_of
from stepmark.report.histogram import lines as histogram_lines
from stepmark.report.histogram import rows as histogram_rows
from stepmark.report.workload_tables import (
    COLLECTIVE_COLUMNS,
    COMPUTE_COLUMNS,
    LAYER_COLUMNS,
    STAGE_COLUMNS,
    collective_rows,
    compute_rows,
    histogram,
    layer_rows,
    stage_rows,
)

Settings = Mapping[str, str | int | float | bool | None]
NO_DEFAULTS: Settings = MappingProxyType({})
_MOST_SHAPES = 24
_MOST_STAGES = 8
_MOST_LETTERS = 48
_OF_SEVERAL_RANKS = ("calls", "bytes", "size_is")  # of a histogram's columns


def header(workload: Workload, defaults: Settings = NO_DEFAULTS) -> list[str]:
    """What it is of, whose rules, which settings, and what one should know.

    defaults: the framework's, of which only what differs is said.
    """
    model = workload.model
    ranks = _many(workload.world_size, "rank")
    lines = [f"workload {workload.name}: {workload.rules}, {ranks}"]
    # What follows the version are the files that the rules were read from.
    lines += [f"rules    {workload.source.partition(': ')[0]}"] if workload.source else []
    if model is not None:
        lines.append(
            f"model    {model.name}: {model.num_layers} layers, hidden {model.hidden_size}, "
            f"heads {model.num_heads}/{model.num_kv_heads}, ffn {model.ffn_hidden_size}, "
            f"vocabulary {model.vocab_size}, seq {model.seq_len}"
        )
    groups = (
        f"{name} {group.size}" for name, group in workload.groups.items() if group.size > 1
    )
    lines.append(
        f"spread   {_many(len(workload.stages), 'stage')}, "
        f"{_many(workload.num_microbatches, 'micro-batch')} per step; "
        f"groups: {', '.join(groups) or 'none'}"
    )
    lines += _settings(workload.settings, defaults)
    lines += [f"note     {note}" for note in workload.notes]
    return lines


def _settings(settings: Settings, defaults: Settings) -> list[str]:
    """Those that are no defaults, and how many are."""
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
    """Everything, each table under its heading."""
    return [*header(workload, defaults), *tables(workload, stage)]


def tables(workload: Workload, stage: int) -> list[str]:
    """Stages, communication, sizes, computation, layers and pipeline."""
    lines: list[str] = []
    stages = stage_rows(workload)
    lines += _section("Stages (per rank and step)", _stage_lines(stages))
    of_stage = f", stage {stage}" if len(workload.stages) > 1 else ""
    lines += _section(
        f"Communication{of_stage} (per rank and step)",
        _aligned(collective_rows(workload, stage), COLLECTIVE_COLUMNS),
    )
    if sizes := _size_lines(workload, stage):
        lines += _section(
            f"Sizes{of_stage} (bytes of a message, whatever its pass and group)", sizes
        )
    computed = compute_rows(workload, stage)
    more = len(computed) - _MOST_SHAPES
    lines += _section(
        f"Computation{of_stage}",
        [
            *_aligned(computed[:_MOST_SHAPES], COMPUTE_COLUMNS),
            *([f"and {more} more; --json has all"] if more > 0 else []),
        ],
    )
    lines += _section(
        f"Layers{of_stage} (each of them; bytes: messages)",
        _aligned(layer_rows(workload, stage), LAYER_COLUMNS),
    )
    return lines + _section("Pipeline", workload_pipeline.lines(workload))


def _size_lines(workload: Workload, stage: int) -> list[str]:
    """Calls by size; by powers of two where there are many sizes, and a line says so."""
    counted = histogram(workload, stage)
    if not counted:
        return []
    table = [
        {key: value for key, value in row.items() if key not in _OF_SEVERAL_RANKS}
        for row in histogram_rows(counted, by=("collective",))
    ]
    lines = histogram_lines(table)
    if default_bins(counted).name != "exact":
        each = len({size_of(kind)[0] for kind in counted})
        lines.append(f"{each} sizes in bins, powers of two; --json and --csv have each")
    return lines


def _aligned(rows: Sequence[Row], columns: Sequence[Column[Any]]) -> list[str]:
    """Rows under headings, columns with nothing to show left out; numbers to the right."""
    visible = [
        column
        for column in columns
        if View.CONSOLE in column.views and any(_cell(row, column) for row in rows)
    ]
    cells = [[column.title for column in visible]]
    cells += [[_cell(row, column) for column in visible] for row in rows]
    return aligned(cells, [column.unit.is_numeric for column in visible])


def _cell(row: Row, column: Column[Any]) -> str:
    """A value as text: a zero with a unit is empty, words are cut."""
    value = row[column.name]
    if column.unit is TEXT:
        text = column.unit.show(value)
        return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 3] + "..."
    return "" if not value and column.unit is not COUNT else column.unit.show(value)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _stage_lines(stages: Sequence[Row]) -> list[str]:
    """Stages one after the other that do alike are one line."""
    unlike = ("stage", "which")
    merged: list[tuple[list[int], Row]] = []
    for row in stages:
        index = row["stage"]
        assert isinstance(index, int)
        alike = merged and all(
            merged[-1][1][key] == row[key] for key in row if key not in unlike
        )
        if alike and len(stages) > _MOST_STAGES:
            merged[-1][0].append(index)
        else:
            merged.append(([index], row))
    rows: list[Row] = [
        row | {"stage": str(indices[0]), "which": row["which"]}
        if len(indices) == 1
        else row | {"stage": f"{indices[0]}-{indices[-1]}", "which": "each"}
        for indices, row in merged
    ]
    return _aligned(rows, STAGE_COLUMNS)


def _many(count: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{count} {word}{plural if count != 1 else ''}"


def word(value: object) -> str:
    """A setting's value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unset" if value is None else str(value)
