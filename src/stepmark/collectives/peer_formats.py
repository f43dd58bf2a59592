"""Collectives in the JSON of nccl-tests -J, version 3 (src/util.cu), and PARAM's comms.py.

The oddities of nccl-tests are kept, since its readers expect them: booleans are the words
"true" and "false", a root is a padded text, microseconds and GB/s. Values are for one
collective as there; rows of several have its name in `experiment_name`. PARAM's percentiles
are over ranks, of each rank's mean; rates are from the median rank. Column widths from
facebookresearch/param, reportBenchTimeColl.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from statistics import fmean

from stepmark import __version__
from stepmark.cases.comm_case import SETTINGS, CommCase
from stepmark.cases.record import Record, RunInfo
from stepmark.collectives.nccl_tests import (
    PLACEMENTS,
    TABLE,
    Report,
    average_busbw,
    devices_of,
    lines_of,
    out_of_bounds,
    parameters_of,
    test_name,
    type_name,
)
from stepmark.ground.dtypes import DType
from stepmark.ground.stats import quantile
from stepmark.ground.units import GB
from stepmark.model.collectives import FACTS, Collective, Mode
from stepmark.tables.columns import Row, number, text
from stepmark.tables.launches import CommLaunches, pooled
from stepmark.tables.row_tables import grouped

VERSION = 3


def json_document(
    rows: Sequence[Row],
    run: RunInfo,
    arguments: Sequence[str],
    *,
    ended_at: str = "",
    report: Report | None = None,
) -> dict[str, object]:
    """Return the document of these rows; ended_at is ISO 8601, as run.created_at, or "".

    `env` holds only the variables that the run recorded, which are redacted; nccl-tests
    writes the whole environment.
    """
    variables = run.environment.variables
    report = report or Report()
    rows = report.of(rows)
    document: dict[str, object] = {
        "version": VERSION,
        "start_time": _clock_time(run.created_at),
        "args": list(arguments),
        "env": [f"{name}={value}" for name, value in variables.items()],
        "nccl_version": _version_code(run.environment.versions.get("nccl")),
        "config": _config(rows, run, report) if rows else {},
        "results": [
            _result(halves, report)
            for group in grouped(rows, ("collective",))
            for table in grouped(group, TABLE)
            for same in grouped(table, SETTINGS)
            for halves in lines_of(same)
        ],
        "out_of_bounds": {
            "count": out_of_bounds(rows),
            "okay": _bool(not out_of_bounds(rows)),
        },
        "average_bus_bandwidth": {"bandwidth": average_busbw(rows), "okay": "unchecked"},
        "errors": [str(row["message"]) for row in rows if row["message"]],
        "stepmark": {"version": __version__, "run_id": run.run_id, "command": run.command},
    }
    return document | ({"end_time": _clock_time(ended_at)} if ended_at else {})


def _clock_time(moment: str) -> str:
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M:%S")


def _version_code(version: str | None) -> int | None:
    """Return e.g. 22809 for "2.28.9", as NCCL_VERSION_CODE."""
    try:
        major, minor, patch = map(int, (version or "").split("+")[0].split("."))
    except ValueError:
        return None
    return major * 10000 + minor * 100 + patch


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _config(rows: Sequence[Row], run: RunInfo, report: Report) -> dict[str, object]:
    p = parameters_of(rows)
    widest = max(rows, key=lambda row: number(row, "num_ranks") or 0)
    return {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": p.min_bytes,
        "maximum_bytes": p.max_bytes,
        "step_factor" if p.step_is_factor else "step_bytes": p.step,
        "warmup_iters": p.warmup_iters,
        "iterations": p.iters,
        "aggregated_iterations": p.agg_iters,
        "validation": p.validation,
        "graph": p.graph,
        "blocking_collectives": _bool(rows[0]["mode"] == "blocking"),
        "per_iter_timing": _bool(report.per_iter),
        "per_iter_skip": 0,
        "parallel_init": _bool(True),  # ranks are processes
        "devices": devices_of([widest], run),
    }


def _result(halves: Mapping[str, Row], report: Report) -> dict[str, object]:
    time_key = "cpu_time" if report.cputime else "time"
    row = next(iter(halves.values()))
    samples = [int(number(half, "n") or 0) for half in halves.values() if half["n"]]
    return {
        "size": row["size_bytes"],
        "count": row["count"],
        "type": type_name(text(row, "dtype")),
        "redop": row["redop"],
        "root": f"{row['root']:6}",
        **{
            placement.replace("-", "_"): _half(halves.get(placement), time_key)
            for placement in PLACEMENTS
        },
        **_per_iteration(halves, report),
        "actual_iterations": min(samples, default=0)
        * int(number(row, "calls_per_sample") or 1),
        "experiment_name": test_name(text(row, "collective")),
    }


def _per_iteration(halves: Mapping[str, Row], report: Report) -> dict[str, object]:
    """Return what -I of nccl-tests has of the samples, without the samples."""
    columns = {"min_us": "min_s", "max_us": "max_s", "avg_us": "mean_s", "p50_us": "p50_s"}
    columns["p99_us"] = "p99_s"
    return {
        f"{placement.replace('-', '_')}_per_iter": {
            "skipped_iterations": 0,
            **{key: (number(row, name) or 0.0) * 1e6 for key, name in columns.items()},
            "cv_pct": row["cv_pct"],
        }
        for placement, row in halves.items()
        if report.per_iter and row["time_s"]
    }


def _half(row: Row | None, time_key: str) -> dict[str, object] | None:
    time_s = number(row, "table_time_s") if row else None
    if row is None or time_s is None:
        return None
    return {
        time_key: time_s * 1e6,
        "alg_bw": row["algbw_gb_s"],
        "bus_bw": row["busbw_gb_s"],
        "nwrong": row["num_wrong"],
    }


# Names in torch, as PARAM's --data-types.
_DTYPES = {
    DType.FP64: "float64",
    DType.FP32: "float32",
    DType.BF16: "bfloat16",
    DType.FP16: "float16",
    DType.FP8_E4M3: "float8_e4m3fn",
    DType.FP8_E5M2: "float8_e5m2",
}
_NAMES = {Collective.ALL_TO_ALL_V: "all_to_allv"}
_WIDTHS = (18, 18, 18, 12, 12, 12, 12, 15, 12)
_HEADINGS = (
    *("total-size (B)", "nElementsPerRank", "Time(us):p50", "p75", "p95", "Min", "Max"),
    *("AlgBW(GB/s)", "BusBW(GB/s)"),
)


def param_comms(records: Iterable[Record], run: RunInfo) -> dict[str, str]:
    """Return one block per collective and dtype, without pairs and barriers.

    PARAM's table for pairs has other columns, a barrier has no rate, and wrong data no column.
    """
    blocks: dict[str, list[CommLaunches]] = {}
    collectives = (record for record in records if isinstance(record.case, CommCase))
    for launches in pooled(collectives, CommLaunches):
        kind = launches.case.collective
        if launches.status != "measured" or FACTS[kind].pair or kind is Collective.BARRIER:
            continue
        blocks.setdefault(_name(launches.case), []).append(launches)
    return {name: _block(name, cases, run) for name, cases in blocks.items()}


def _name(case: CommCase) -> str:
    """Return the name of a table, with PARAM's --tag, which distinguishes those of one name."""
    words = [_NAMES.get(case.collective, case.collective.value)]
    words += [_DTYPES.get(case.dtype, case.dtype.value)]
    words += ["in-place"] if case.in_place else []
    words += [case.mode.value] if case.mode in (Mode.GRAPH, Mode.BLOCKING) else []
    is_smaller = case.num_ranks != case.world_size
    words += [f"{case.num_ranks}of{case.world_size}"] if is_smaller else []
    words += [f"beside-{case.beside}"] if case.beside else []
    return "-".join(words)


def _block(name: str, cases: list[CommLaunches], run: RunInfo) -> str:
    heads = "".join(f"{head:>{w}}" for head, w in zip(_HEADINGS, _WIDTHS, strict=True))
    lines = [
        f"# run {run.run_id}; percentiles are over ranks, of each rank's mean; "
        "TotalTime is not measured there: PARAM prints 0.0",
        f"\tCOMMS-RES-{name}{heads}  TotalTime(us):p50",
        *(f"\tCOMMS-RES-{name}{_cells(launches)}" for launches in cases),
    ]
    return "\n".join(lines) + "\n"


def _cells(launches: CommLaunches) -> str:
    """Return one line: microseconds with one decimal, GB/s with three."""
    means = sorted(
        fmean(value for record in launches.measured for value in record.samples.seconds[index])
        for index in range(len(launches.case.members))
    )
    p50, p75, p95 = (quantile(means, q) for q in (0.5, 0.75, 0.95))
    algbw = launches.case.message_bytes / p50 / GB
    times = (f"{value * 1e6:.1f}" for value in (p50, p75, p95, means[0], means[-1]))
    rates = (f"{algbw:.3f}", f"{algbw * launches.case.busbw_factor:.3f}")
    cells = (str(launches.case.message_bytes), str(launches.case.count), *times, *rates)
    padded = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    return "".join(padded) + f"{'0.0':>19}"
