"""stepmark comm: measure a plan of collectives; show nccl-tests' table, wide columns, files."""

import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.app import delivery
from stepmark.app.delivery import Rows, Values
from stepmark.core.errors import ConfigError
from stepmark.core.option_groups import MeasureOptions
from stepmark.core.options import build
from stepmark.core.plan import CommHow
from stepmark.core.record import Record, RunInfo
from stepmark.core.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from stepmark.app.view import View

_DEFAULT_STEP = (4, True)


def how(values: Values) -> CommHow:
    """-n, -w, -c, --timeout and --budget."""
    given: dict[str, Any] = {
        "iterations": values.get("iters"),
        "graphs": values.get("cudagraph"),
        "warmups": values.get("warmup_iters"),
        "checks": values.get("check"),
        "timeout_s": _seconds(values, "timeout"),
        "budget_s": _seconds(values, "budget"),
    }
    return CommHow(**{name: value for name, value in given.items() if value is not None})


def _seconds(values: Values, name: str) -> float | None:
    return parse_duration(values[name], name) if values.get(name) else None


def check(values: Values) -> None:
    """Refuse outputs that cannot be written before an hour of measuring."""
    delivery.check_outputs(build(MeasureOptions, values))
    style = values.get("style")
    if style and style not in _styles():
        raise ConfigError("style", style, f"one of {', '.join(_styles())}")
    if target := values.get("output_file"):
        if Path(target).suffix != ".json":
            raise ConfigError("-J", target, "a name that ends in .json")
        if not values.get("dry_run"):
            delivery.make_folder("-J", Path(target).parent)


def _styles() -> dict[str, Callable[[Iterable[Record], RunInfo], dict[str, str]]]:
    from stepmark.report.param_comms import param_comms  # noqa: PLC0415

    return {"param": param_comms}


def show(path: Path, values: Values, code: int) -> int:
    """Show the run, write the files that were asked for; the exit code of it all."""
    return delivery.deliver(
        path,
        build(MeasureOptions, values),
        code,
        files=lambda run, _: _files(run, values),
        show=lambda run, _: _show(run, values),
    )


def _show(run: "View", values: Values) -> None:
    from stepmark.app.view import show_rows  # noqa: PLC0415
    from stepmark.report import nccl_tests, p2p_matrix  # noqa: PLC0415

    if style := values.get("style"):
        sys.stdout.write("\n".join(_styles()[style](run.records, run.run).values()))
        return
    if values.get("wide"):
        show_rows(run)
        return
    matrices = [m for m in p2p_matrix.matrices(run.comm_rows) if len(m.known) > 1]
    drawn = {matrix.family for matrix in matrices}
    for matrix in matrices:
        sys.stdout.write(p2p_matrix.matrix_text(matrix) + "\n")
    rest = [row for row in run.comm_rows if row["family"] not in drawn]
    if rest:
        sys.stdout.write(nccl_tests.text_of(rest, run.run, step=step_asked(values)))


def step_asked(values: Values) -> tuple[int, bool] | None:
    """Return the step of the sizes and whether it is a factor; None for sizes of a model."""
    if values.get("model") or values.get("from_workload"):
        return None
    if factor := values.get("factor"):
        return round(factor), True
    if step := values.get("step"):
        return parse_bytes(str(step), "step"), False
    # One size alone has nccl-tests' own default.
    one = values.get("begin") is not None and values.get("begin") == values.get("end")
    return None if one else _DEFAULT_STEP


def _files(run: "View", values: Values) -> None:
    from stepmark.report import nccl_json  # noqa: PLC0415
    from stepmark.store.export import write_json, write_tables  # noqa: PLC0415
    from stepmark.store.files import new_file  # noqa: PLC0415

    rows = run.comm_rows
    by_name: dict[str, Rows] = {}
    for row in rows:
        by_name.setdefault(str(row["family"]), []).append(row)
    for kind in ("json", "csv"):
        if target := values.get(kind):
            tables = by_name if delivery.is_folder(target) else {"rows": rows}
            write_tables(tables, target, kind)
    if target := values.get("output_file"):
        document = nccl_json.json_document(
            rows, run.run, sys.argv, ended_at=datetime.now(UTC).isoformat(timespec="seconds")
        )
        file = new_file(Path(target))
        write_json(document, file)
        if file != Path(target):
            sys.stderr.write(f"{target} exists: written to {file}\n")
