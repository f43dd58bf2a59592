"""Records and tables to series, and the pairs of series of two sides.

A field with one value, the same on both sides, distinguishes nothing; one that varies within a
side is part of a line's name; one that is constant in each side and differs between them is
what is compared, or a reason to refuse.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.cases.case import OpCase, Rate
from stepmark.cases.comm_case import CommCase
from stepmark.cases.fields import Role, compared, declared
from stepmark.cases.record import AnyCase, Measured, Record, RunInfo, is_busy
from stepmark.cases.replay_case import ReplayCase
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel
from stepmark.comparison.comparison import UNKNOWN, Fields, Series, Side
from stepmark.comparison.launch_noise import noise_of
from stepmark.ground.errors import ConfigError
from stepmark.ground.reading import Reading, Table
from stepmark.ground.stats import slowest_per_sample
from stepmark.ground.units import format_bytes, plural
from stepmark.job_logs.training_log.steady_state import steady_state
from stepmark.job_logs.training_log.training_log import SECONDS, TrainingLog
from stepmark.job_logs.training_log.training_log_text import (
    findings,
    span_text,
    trend_text,
)
from stepmark.model.collectives import Collective, busbw_factor
from stepmark.model.model import ModelConfig
from stepmark.model.model_names import distinct_names
from stepmark.model.ops import CUSTOM
from stepmark.text_tables.printed_figures import parse_number, rounding_error
from stepmark.text_tables.slide_tables import rate_units

# A field of what a forced resume measured: how its environment differs from the run's.
ENVIRONMENT = "environment"
TOKENS_A_STEP = "tokens_per_step"  # of a training log
Value = str | int | float | bool | None
Key = tuple[tuple[str, Value], ...]
Pair = tuple[int, Series, Series]  # place in the baseline's series, these, the other side's


def context(info: RunInfo) -> dict[str, str]:
    """Return host, device, versions and variables: what a comparison may be about."""
    environment = info.environment
    names = dict.fromkeys(device.name for device in environment.devices)
    libraries = {
        name: value
        for name, value in environment.versions.items()
        if name in ("cuda", "hip", "driver", "nccl", "rccl")
    }
    variables = {
        name: value
        for name, value in environment.variables.items()
        if not name.startswith(("TORCHELASTIC", "STEPMARK"))
    }
    where = {"host": environment.host, "device": ", ".join(names)}
    return {**where, "torch": environment.torch, **libraries, **variables}


def series_of_records(records: Iterable[Record]) -> tuple[list[Series], tuple[str, ...]]:
    """Return the correct results of a run, and notes on what does not count."""
    by_case: dict[tuple[str, ...], list[Measured]] = {}
    wrong: dict[str, None] = {}  # cases; a launch is no further result
    for record in records:
        if isinstance(record, Measured) and any(record.samples.seconds):
            if record.num_wrong:
                wrong[record.case.case_id] = None
                continue
            # The automatic clock may choose another one in another launch.
            case = record.train if isinstance(record.case, TrainCase) else record.case
            key = (case.case_id, record.samples.method, *record.differs)
            by_case.setdefault(key, []).append(record)
    notes = [f"wrong results of {plural(len(wrong), 'case')} are left out"] if wrong else []
    if any(len(by_process(launches)) < len(launches) for launches in by_case.values()):
        notes.append(
            "launches of one process count as one: other processes can differ by more; start "
            "the job several times, or without torchrun, srun and mpirun"
        )
    return list(map(_of_records, by_case.values())), tuple(notes)


def by_process(records: Iterable[Measured]) -> dict[str, list[Measured]]:
    """Return records of a case by process, under the name of the first launch in it.

    New communicators in the same processes are no new launch: what varies between processes
    does not vary between them. Records of older releases do not say, and stand alone.
    """
    names: dict[object, str] = {}
    processes: dict[str, list[Measured]] = {}
    for record in records:
        name = f"{record.run_id}/{record.launch}"
        levels = record.levels
        process = (record.run_id, levels.machine, levels.process) if levels else name
        processes.setdefault(names.setdefault(process, name), []).append(record)
    return processes


def _of_records(records: Sequence[Measured]) -> Series:
    """Return seconds of the slowest rank by launch: of each sample, or cycle of training."""
    case = records[0].case
    processes = by_process(records)
    starts = {name: min(r.started_at for r in own) for name, own in processes.items()}
    launches = {
        name: tuple(itertools.chain.from_iterable(map(_slowest, own)))
        for name, own in processes.items()
    }
    busy = frozenset(
        name for name, own in processes.items() if any(is_busy(r.telemetry) for r in own)
    )
    differs = records[0].differs
    environment: Fields = {ENVIRONMENT: "; ".join(differs)} if differs else {}
    series = Series(
        fields={**_fields(case, records[0].samples.method), **environment},
        launches=launches,
        starts=starts,
        busy=busy,
    )
    if isinstance(case, TrainCase):
        return dataclasses.replace(series, model=case.model)
    if isinstance(case, CommCase):
        factor = case.busbw_factor or None
        return dataclasses.replace(series, size_bytes=case.message_bytes, busbw_factor=factor)
    if isinstance(case, OpCase) and case.rate is Rate.SUSTAINED:
        soaks = (r.samples.soak_s for r in records if not r.samples.warmup_calls)
        return dataclasses.replace(series, soak_s=min(soaks, default=None))
    return series


def _slowest(record: Measured) -> tuple[float, ...]:
    seconds = record.samples.seconds
    if isinstance(record.case, TrainCase):
        # A median of single samples would leave out an optimizer that only some of them have.
        return mean_of_cycles(seconds, record.case.cycle)
    return tuple(slowest_per_sample(seconds))


def mean_of_cycles(seconds: Sequence[Sequence[float]], cycle: int) -> tuple[float, ...]:
    """Return the mean sample of each whole cycle, of the rank that took longest for it.

    Without a whole cycle, return the slowest rank's time of each sample.
    """
    end = len(seconds[0]) // cycle * cycle
    return tuple(
        max(math.fsum(values[first : first + cycle]) for values in seconds) / cycle
        for first in range(0, end, cycle)
    ) or tuple(slowest_per_sample(seconds))


def _fields(case: AnyCase, method: str) -> Fields:
    fields: dict[str, Value] = {"family": case.family, **compared(case)}
    fields |= {"method": method, "device_type": case.device}
    if isinstance(case, OpCase):
        for name, value in dataclasses.asdict(case.op).items():
            is_plain = isinstance(value, str | int | float | bool | None)
            fields[name] = value if is_plain else str(value)
        defaults = (word.partition("=") for word in str(fields.pop("defaults", "")).split())
        fields |= {f"{_DEFAULT}{name}": value for name, _, value in defaults}
        fields |= {"shape": case.op.shape_text, "dtype": case.dtype.value}
        return {**fields, "phase": str(fields.get("phase", ""))}
    if not isinstance(case, TrainCase):
        return fields
    # No dtype: precisions are techniques, which may be compared.
    is_sharded = case.data_parallel is DataParallel.FSDP
    return {
        **fields,
        "model": case.model.name,
        "num_ranks": case.num_ranks,
        "seq_len": case.model.seq_len,
        "strategy": case.strategy,
        # The strategy names all other axes.
        "dp_replicate": case.parallel.dp_replicate if is_sharded else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDefaults:
    """Facts from the command line, for files that do not state them."""

    collective: str | None = None
    num_ranks: int | None = None
    placement: str | None = None  # the only one that is compared
    unit: str | None = None  # "rate" or "time": of figures that say neither


def table_list(path: Path, tables: Sequence[Table]) -> str:
    """Return how to name each table of a file."""
    words = [f"{path}:{table.index} ({table.title or table.tool})" for table in tables]
    return ", ".join(words[:6]) + (f" and {len(words) - 6} more" if len(words) > 6 else "")


def series_of_tables(
    path: Path, tables: Sequence[Table], column: str, defaults: InputDefaults
) -> list[Series]:
    """Return the series of a file. Repeats in a table are values of one launch."""
    groups: dict[tuple[object, ...], tuple[Table, list[Reading]]] = {}
    for table in tables:
        for reading in table.readings:
            # nccl-tests prints rows of size 0 where a message is too small to share out.
            if reading.size_bytes == 0 or (column and reading.column != column):
                continue
            if reading.num_wrong:
                continue
            of_table = (table.collective, table.method, table.unit, table.num_ranks)
            first, readings = groups.setdefault((*of_table, *reading.measurement), (table, []))
            if first is not table:
                raise ConfigError(
                    "compare", path, f"one of its tables: {table_list(path, tables)}"
                )
            readings.append(reading)
    all_series = (_series_of_readings(path, *group, defaults) for group in groups.values())
    return [series for series in all_series if series.launches or series.below is not None]


def series_of_training_log(log: TrainingLog) -> Series:
    """Return the steady steps of a training log: one launch, however many steps it has.

    Steps of one job vary less than jobs do, and follow each other, so they are no launches.
    """
    steady = steady_state(log)
    is_time = log.unit == SECONDS
    costs = log.costs[steady.num_warmup :]
    return Series(
        fields={
            "family": "training",
            "label": "step" if is_time else log.unit,
            "num_ranks": log.facts.num_ranks,
            "seq_len": log.facts.seq_len,
            TOKENS_A_STEP: log.tokens,
        },
        unit="s" if is_time else log.unit,
        launches={log.file: tuple(cost if is_time else 1 / cost for cost in costs)},
        rounding=steady.rounding,
        num_warmup=steady.num_warmup if steady.is_steady else None,
    )


def log_notes(log: TrainingLog) -> tuple[str, ...]:
    """Return what limits the steps of a training log."""
    steady = steady_state(log)
    count = plural(steady.num_lines, "line")
    notes = [f"median of {count} after {steady.num_warmup} of warm-up"]
    if not steady.is_steady:
        notes = ["it never becomes steady: the median of its second half"]
    elif steady.doubt:
        notes.append(steady.doubt)
    if steady.trend is not None:
        notes.append(trend_text(log, steady.trend, steady.num_warmup))
    if span := span_text(log):
        notes.append(span)
    return (*notes, *(finding.text for finding in findings(log)))


def _series_of_readings(
    path: Path, table: Table, readings: Sequence[Reading], defaults: InputDefaults
) -> Series:
    first = readings[0]
    collective = table.collective or defaults.collective or ""
    num_ranks = table.num_ranks or defaults.num_ranks
    times = tuple(r.time_s for r in readings if r.time_s is not None and r.time_s > 0)
    rates = tuple(r.rate for r in readings if r.rate is not None and r.rate > 0)
    values = times or rates
    (named,) = rate_units([first.column])
    rate_unit = table.unit or (named if named != "none" else defaults.unit) or UNKNOWN
    unit = "s" if times else rate_unit
    factor = None
    if num_ranks is not None and collective in list(Collective):
        factor = busbw_factor(Collective(collective), num_ranks) or None
    return Series(
        fields={
            "family": collective,
            "label": first.label,
            "dtype": first.dtype,
            "redop": first.redop,
            "root": first.root,
            "placement": first.placement,
            "num_ranks": num_ranks,
            "method": table.method,
        },
        size_bytes=first.size_bytes,
        unit=unit,
        launches={f"{path}:{table.index}": values} if values else {},
        busbw_factor=factor if times else None,
        below=None if values else first.rate_below,
        rounding=max(map(_rounding, readings)) if times else 0.0,
        noise=noise_of(table, first.size_bytes),
    )


def _rounding(reading: Reading) -> float:
    """Return the unit of a time's last digit over the time; 0 where it is unknown."""
    text = reading.printed[0] if reading.printed else ""
    value = parse_number(text) if text else None
    return 2 * rounding_error(text) / value if value else 0.0


# Fields whose difference makes figures incomparable, unless --allow or --force is given.
STRICT = tuple(
    dict.fromkeys(
        ["method", ENVIRONMENT, "num_ranks", "seq_len", TOKENS_A_STEP, "dtype"]
        + [
            field.name
            for case in (OpCase, CommCase, TrainCase, ReplayCase)
            for field in declared(case)
            if field.role is Role.STRICT
        ]
    )
)
# Fields that always name a line: they are no settings.
NAMING = ("family", "shape", "label", "model", "phase", "pair")
_DEFAULT = "default_"  # begins the names of a function's arguments that were not given
# Fields that are worth a note where one side does not state them.
_NOTED = (*STRICT, *NAMING, "redop", "root", "api")
# Sizes of other numbers of ranks, rounded to whole parts, are still the same size.
SAME_SIZE = 0.01


def named_apart(groups: Sequence[Sequence[Side]]) -> list[tuple[Side, ...]]:
    """Return sides whose series name their model apart from others of the same name.

    The groups are what one comparison reads; a model has the same name in all of them.
    """
    sides = [side for group in groups for side in group]
    names = distinct_names([s.model for side in sides for s in side.series if s.model])
    return [tuple(_name_models(side, names) for side in group) for group in groups]


def _name_models(side: Side, names: Mapping[ModelConfig, str]) -> Side:
    series = tuple(
        dataclasses.replace(s, fields={**s.fields, "model": names[s.model]}) if s.model else s
        for s in side.series
    )
    return dataclasses.replace(side, series=series)


def join(base: Side, other: Side, allowed: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """Return pairs of series, and notes on those without a partner.

    Raises ConfigError where none may be compared.
    """
    notes, key_names = _key_names(base, other, allowed)
    pairs = _pairs(base, other, key_names)
    matched = {id(series) for _, *both in pairs for series in both}
    if not pairs:
        apart = [n for n in key_names if _values(base, n).isdisjoint(_values(other, n))]
        reason = f" ({_difference(base, other, apart)})" if apart else ""
        raise ConfigError(
            "compare",
            f"{base.name} with {other.name}",
            f"there must be something in common: {_about(base)}; {_about(other)}{reason}",
        )
    for side, against in ((base, other), (other, base)):
        if left := [series for series in side.series if id(series) not in matched]:
            notes.append(
                f"{len(left)} of {len(side.series)} of {side.name} are not in "
                f"{against.name}{_other_methods(left, against, key_names)}"
            )
    return pairs, notes


def _other_methods(left: Sequence[Series], against: Side, names: Sequence[str]) -> str:
    """Return by which methods the other side measured what is left; "" where it did not."""
    others = [name for name in names if name != "method"]
    methods = {
        f"{series.fields['method']} and {other.fields['method']}"
        for series in left
        for other in against.series
        if "method" in names
        and series.size_bytes == other.size_bytes
        and _key(series, others) == _key(other, others)
    }
    return f" by the same method ({', '.join(sorted(methods))})" if methods else ""


def _key_names(base: Side, other: Side, allowed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return notes on what differs, and the fields that name a line."""
    notes = []
    names = []
    for name in dict.fromkeys(key for s in (*base.series, *other.series) for key in s.fields):
        base_values = _values(base, name)
        other_values = _values(other, name)
        if base_values == other_values:
            names.append(name)
        elif not _stated(base_values) or not _stated(other_values):
            if name in _NOTED and (_stated(base_values) or _stated(other_values)):
                silent = other if _stated(base_values) else base
                notes.append(f"{silent.name} does not state {name}: taken as the same")
        elif (
            len(base_values) == len(other_values) == 1
            and name not in NAMING
            and not name.startswith(_DEFAULT)
        ):
            (a,), (b,) = base_values, other_values
            if name == "digest" and other.series[0].fields.get("family") == CUSTOM:
                notes.append(_edited(other))
                continue
            if name in STRICT and name not in allowed:
                sides = f"the same in {base.name} and {other.name}"
                raise ConfigError(name, f"{a} and {b}", f"{sides}; or --allow {name}, --force")
            notes.append(f"{name} differs: {base.name} {a}, {other.name} {b}")
        else:
            names.append(name)
    return notes, names


def _edited(side: Side) -> str:
    """Return that the file of the user's own operators is another one than before."""
    file = Path(str(side.series[0].fields.get("file", ""))).name
    return f"{file} was edited before {side.name}"


def _difference(base: Side, other: Side, names: Sequence[str]) -> str:
    """Say which fields differ; of a model, in what."""
    verb = "differs" if len(names) == 1 else "differ"
    text = f"{', '.join(names)} {verb}"
    models = [*_values(base, "model"), *_values(other, "model")]
    if "model" in names and len(models) == 2:
        text += f": {models[0]} and {models[1]}"
    return text


def _values(side: Side, name: str) -> set[Value]:
    absent = "that of the run" if name == ENVIRONMENT else None
    return {series.fields.get(name, absent) for series in side.series}


def _stated(values: set[Value]) -> bool:
    return bool(values - {None, ""})


def _key(series: Series, names: Iterable[str]) -> Key:
    return (("unit", series.unit), *((name, series.fields.get(name)) for name in names))


def _pairs(base: Side, other: Side, names: Sequence[str]) -> list[Pair]:
    """Pair by key and size; then sizes without a partner with the nearest that is left."""
    base_table = _by_key(base, names)
    other_table = _by_key(other, names)
    place = {id(series): number for number, series in enumerate(base.series)}
    pairs: list[Pair] = []
    for key in (key for key in base_table if key in other_table):
        base_sizes = base_table[key]
        other_sizes = other_table[key]
        same: list[tuple[int | None, int | None]] = [
            (size, size) for size in base_sizes if size in other_sizes
        ]
        left = {size for size in other_sizes.keys() - base_sizes.keys() if size is not None}
        for size in sorted(filter(None, base_sizes.keys() - other_sizes.keys())):
            near = min(left, key=lambda other_size: abs(other_size - size), default=None)
            if near is not None and abs(near - size) <= SAME_SIZE * size:
                left.remove(near)
                same.append((size, near))
        for base_size, other_size in same:
            series = _only(base, base_sizes[base_size])
            partner = _only(other, other_sizes[other_size])
            pairs.append((place[id(series)], series, partner))
    return sorted(pairs, key=lambda pair: pair[0])


def _by_key(side: Side, names: Sequence[str]) -> dict[Key, dict[int | None, list[Series]]]:
    """Return the series by key, then by size."""
    table: dict[Key, dict[int | None, list[Series]]] = {}
    for series in side.series:
        sizes = table.setdefault(_key(series, names), {})
        sizes.setdefault(series.size_bytes, []).append(series)
    return table


def _only(side: Side, group: Sequence[Series]) -> Series:
    """Return the only series. Raises ConfigError where several fit one of the other side."""
    if len(group) > 1:
        fields = group[0].fields
        others = group[1].fields
        name = next((n for n in fields if fields.get(n) != others.get(n)), "compare")
        values = f"{fields.get(name)} and {others.get(name)}"
        allowed = "one of them: the other side does not say which"
        raise ConfigError(name, f"{side.name} has {values}", allowed)
    return group[0]


def _about(side: Side) -> str:
    kinds = dict.fromkeys(
        " ".join(
            str(s.fields[name])
            for name in ("family", "dtype", "placement")
            if s.fields.get(name)
        )
        or ("times" if s.is_time else s.unit)
        for s in side.series
    )
    sizes = [s.size_bytes for s in side.series if s.size_bytes is not None]
    text = f"{side.name} has {', '.join(list(kinds)[:4])}"
    if sizes:
        text += f" from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    return text
