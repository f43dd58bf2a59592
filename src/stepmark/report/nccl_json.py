"""Rows of collectives in the JSON schema of nccl-tests -J, version 3 (its src/util.cu).

Its oddities are kept, since its readers expect them: booleans are the words "true" and
"false", a root is a padded text, microseconds and GB/s. Values are for one collective as
there; rows of several carry its name in `experiment_name`.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from stepmark import __version__
from stepmark.core.columns import Row, number, text
from stepmark.core.record import RunInfo
from stepmark.report.nccl_tests import (
    PLACEMENTS,
    Parameters,
    average_busbw,
    devices_of,
    grouped,
    lines_of,
    out_of_bounds,
    parameters_of,
    tables_of,
    test_name,
    type_name,
)

VERSION = 3


def json_document(
    rows: Sequence[Row],
    run: RunInfo,
    arguments: Sequence[str],
    *,
    parameters: Parameters | None = None,
    ended_at: str = "",
) -> dict[str, object]:
    """The document of these rows. ended_at is ISO 8601, as run.created_at; "" leaves it out.

    `env` holds only the variables that the run recorded, which are redacted; nccl-tests
    writes the whole environment.
    """
    variables = run.environment.variables
    document: dict[str, object] = {
        "version": VERSION,
        "start_time": _clock_time(run.created_at),
        "args": list(arguments),
        "env": [f"{name}={value}" for name, value in variables.items()],
        "nccl_version": _version_code(run.environment.versions.get("nccl")),
        "config": _config(rows, run, parameters or parameters_of(rows)) if rows else {},
        "results": [
            _result(halves)
            for held in grouped(rows, ("collective",))
            for table in tables_of(held)
            for same in grouped(table, ("num_ranks", "mode", "api", "split", "beside"))
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
    """22809 of "2.28.9", as NCCL_VERSION_CODE."""
    try:
        major, minor, patch = map(int, (version or "").split("+")[0].split("."))
    except ValueError:
        return None
    return major * 10000 + minor * 100 + patch


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _config(rows: Sequence[Row], run: RunInfo, parameters: Parameters) -> dict[str, object]:
    p = parameters
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
        "per_iter_timing": _bool(False),
        "per_iter_skip": 0,
        "parallel_init": _bool(False),
        "devices": devices_of([widest], run),
    }


def _result(halves: Mapping[str, Row]) -> dict[str, object]:
    row = next(iter(halves.values()))
    samples = [int(number(half, "n") or 0) for half in halves.values() if half["n"]]
    return {
        "size": row["size_bytes"],
        "count": row["count"],
        "type": type_name(text(row, "dtype")),
        "redop": row["redop"],
        "root": f"{row['root']:6}",
        **{
            placement.replace("-", "_"): _half(halves.get(placement))
            for placement in PLACEMENTS
        },
        "actual_iterations": min(samples, default=0)
        * int(number(row, "calls_per_sample") or 1),
        "experiment_name": test_name(text(row, "collective")),
    }


def _half(row: Row | None) -> dict[str, object] | None:
    time_s = number(row, "time_s") if row else None
    if row is None or time_s is None:
        return None
    return {
        "time": time_s * 1e6,
        "alg_bw": row["algbw_gb_s"],
        "bus_bw": row["busbw_gb_s"],
        "nwrong": row["num_wrong"],
    }
