"""A workload as text: what `stepmark workload show` prints.

Over 250 lines because of the tables of columns.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from stepmark.core.columns import Row, digits, number, text
from stepmark.core.units import format_bytes, format_time
from stepmark.core.workload import Workload
from stepmark.report import workload_pipeline
from stepmark.report.histogram import default_bins, size_of
from stepmark.report.histogram import lines as histogram_lines
from stepmark.report.histogram import rows as histogram_rows
from stepmark.report.workload_tables import (
    collective_rows,
    compute_rows,
    histogram,
    layer_rows,
    stage_rows,
)

Shown = Callable[[Row, str], str]
Settings = Mapping[str, str | int | float | bool | None]
NO_DEFAULTS: Settings = MappingProxyType({})
_MOST_SHAPES = 24
_MOST_STAGES = 8
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
    said = [
        f"{name} {word(value)}"
        for name, value in settings.items()
        if name not in defaults or defaults[name] != value
    ]
    rest = len(settings) - len(said)
    said += [f"{rest} {'more are' if said else 'are'} defaults"] if rest else []
    return [f"settings {', '.join(said)}"]


def lines(workload: Workload, stage: int, defaults: Settings = NO_DEFAULTS) -> list[str]:
    """Everything, each table under its heading."""
    return [*header(workload, defaults), *tables(workload, stage)]


def tables(workload: Workload, stage: int) -> list[str]:
    """Stages, communication, sizes, computation, layers and pipeline."""
    found: list[str] = []
    stages = stage_rows(workload)
    found += _section("Stages (per rank and step)", _stage_lines(stages))
    of_stage = f", stage {stage}" if len(workload.stages) > 1 else ""
    found += _section(
        f"Communication{of_stage} (per rank and step)",
        aligned(collective_rows(workload, stage), _COLLECTIVES),
    )
    if sizes := _size_lines(workload, stage):
        found += _section(
            f"Sizes{of_stage} (bytes of a message, whatever its pass and group)", sizes
        )
    computed = compute_rows(workload, stage)
    more = len(computed) - _MOST_SHAPES
    found += _section(
        f"Computation{of_stage}",
        [
            *aligned(computed[:_MOST_SHAPES], _COMPUTE),
            *([f"and {more} more; --json has all"] if more > 0 else []),
        ],
    )
    found += _section(
        f"Layers{of_stage} (each of them; bytes: messages)",
        aligned(layer_rows(workload, stage), _LAYERS),
    )
    return found + _section("Pipeline", workload_pipeline.lines(workload))


def _size_lines(workload: Workload, stage: int) -> list[str]:
    """Calls by size; by powers of two where there are many sizes, and a line says so."""
    counted = histogram(workload, stage)
    if not counted:
        return []
    table = [
        {key: value for key, value in row.items() if key not in _OF_SEVERAL_RANKS}
        for row in histogram_rows(counted, by=("collective",))
    ]
    found = histogram_lines(table)
    if default_bins(counted).name != "exact":
        each = len({size_of(kind)[0] for kind in counted})
        found.append(f"{each} sizes in bins, powers of two; --json and --csv have each")
    return found


def aligned(rows: Sequence[Row], columns: Mapping[str, tuple[str, Shown]]) -> list[str]:
    """Rows under headings, columns with nothing to say left out; numbers to the right."""
    shown = {
        key: [heading, *(form(row, key) for row in rows)]
        for key, (heading, form) in columns.items()
        if any(form(row, key) for row in rows)
    }
    right = {key for key in shown if any(number(row, key) is not None for row in rows)}
    padded = []
    for key, cells in shown.items():
        width = max(map(len, cells))
        padded.append([c.rjust(width) if key in right else c.ljust(width) for c in cells])
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def _section(title: str, found: Sequence[str]) -> list[str]:
    return ["", title, *found] if found else []


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
    shown: list[Row] = [
        row | {"stage": str(held[0]), "which": row["which"]}
        if len(held) == 1
        else row | {"stage": f"{held[0]}-{held[-1]}", "which": "each"}
        for held, row in merged
    ]
    return aligned(shown, _STAGES)


def _many(count: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{count} {word}{plural if count != 1 else ''}"


def word(value: object) -> str:
    """A setting's value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unset" if value is None else str(value)


def _text(row: Row, key: str) -> str:
    return text(row, key)


def _bytes(row: Row, key: str) -> str:
    value = number(row, key)
    return "" if value is None else format_bytes(value)


def _nonzero(form: Shown) -> Shown:
    return lambda row, key: form(row, key) if number(row, key) else ""


def _flops(row: Row, key: str) -> str:
    value = number(row, key)
    if value is None:
        return ""
    scale, unit = next(
        ((scale, unit) for scale, unit in _FLOP_UNITS if value >= scale), (1.0, "")
    )
    return f"{digits(value / scale)} {unit}".rstrip()


_FLOP_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _percent(row: Row, key: str) -> str:
    value = number(row, key)
    return "" if value is None else f"{value:.1f}"


def _time(row: Row, key: str) -> str:
    value = number(row, key)
    return "" if value is None else format_time(value)


def _short(row: Row, key: str) -> str:
    shown = text(row, key)
    return shown if len(shown) <= 48 else shown[:45] + "..."


_STAGES: dict[str, tuple[str, Shown]] = {
    "stage": ("stage", _text),
    "layers": ("layers", _text),
    "which": ("which", _short),
    "has": ("and", _text),
    "operations": ("operations", _text),
    "collectives": ("collectives", _nonzero(_text)),
    "forward_flops": ("fwd FLOP", _flops),
    "backward_flops": ("bwd FLOP", _flops),
    "comm_bytes": ("messages", _nonzero(_bytes)),
    "bus_bytes": ("on the bus", _nonzero(_bytes)),
    "time_s": ("compute", _nonzero(_time)),
}
_COLLECTIVES: dict[str, tuple[str, Shown]] = {
    "pass": ("pass", _text),
    "collective": ("collective", _text),
    "dtype": ("dtype", _text),
    "group": ("group", _text),
    "num_ranks": ("ranks", _text),
    "size_bytes": ("size", _bytes),
    "count": ("count", _text),
    "calls": ("calls", _text),
    "bytes": ("bytes", _bytes),
    "bus_bytes": ("on the bus", _bytes),
    "stream": ("stream", _text),
    "modules": ("of", _short),
}
_COMPUTE: dict[str, tuple[str, Shown]] = {
    "family": ("operator", _text),
    "pass": ("pass", _text),
    "shape": ("shape", _short),
    "dtype": ("dtype", _text),
    "calls": ("calls", _text),
    "flops": ("FLOP", _nonzero(_flops)),
    "pct_flops": ("%", _percent),
    "bytes_moved": ("memory", _nonzero(_bytes)),
    "time_s": ("time each", _time),
    "modules": ("of", _short),
}
_LAYERS: dict[str, tuple[str, Shown]] = {
    "layers": ("layers", _text),
    "number": ("number", _text),
    "forward_flops": ("fwd FLOP", _nonzero(_flops)),
    "backward_flops": ("bwd FLOP", _nonzero(_flops)),
    "forward_comm_bytes": ("fwd bytes", _nonzero(_bytes)),
    "backward_comm_bytes": ("bwd bytes", _nonzero(_bytes)),
    "optimizer_comm_bytes": ("optimizer bytes", _nonzero(_bytes)),
}
