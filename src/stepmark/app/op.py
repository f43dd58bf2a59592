"""stepmark op: a plan of operators, and what is shown of a run of them."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.app import delivery
from stepmark.app.delivery import Values
from stepmark.app.machine import Machine
from stepmark.core.case import OpCase
from stepmark.core.errors import ConfigError
from stepmark.core.ops.backends import MODULES, Capabilities
from stepmark.core.option_groups import MeasureOptions
from stepmark.core.options import build
from stepmark.core.plan import How, OpHow, Plan, entries
from stepmark.core.record import Measured
from stepmark.core.stats import slowest_per_sample, summarize
from stepmark.core.units import parse_duration
from stepmark.store.reader import read_records

if TYPE_CHECKING:
    from stepmark.app.view import View


def plan(
    cases: Sequence[OpCase], values: Values, machine: Machine, *, how: OpHow | None = None
) -> Plan:
    """The plan of these cases. Raises ConfigError."""
    budget = values.get("budget")
    budget_s = None if budget is None else parse_duration(budget, "budget")
    timeout_s = parse_duration(values.get("timeout") or "600s", "timeout")
    dataset = values.get("dataset")
    return Plan(
        command="op",
        argv=tuple(sys.argv[1:]),
        options=delivery.as_options(values),
        device=machine.device,
        world_size=max((case.num_ranks for case in cases), default=1),
        how=How(op=replace(how or OpHow(budget_s=budget_s), timeout_s=timeout_s)),
        entries=entries(cases),
        settings={"dataset": dataset.upper()} if dataset else {},
    )


def capabilities(machine: Machine) -> Capabilities:
    """What support is decided from. Of another machine its packages are not known: as here."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    has_compiler = not machine.is_here or any(name and shutil.which(name) for name in names)
    return Capabilities(
        device_type=machine.device,
        capability=machine.capability,
        is_rocm=machine.is_rocm,
        has_compiler=has_compiler,
        modules=frozenset(name for name in MODULES if importlib.util.find_spec(name)),
    )


def check(values: Values) -> None:
    """Refuse outputs that cannot be written before an hour of measuring."""
    from stepmark.report import styles  # noqa: PLC0415

    delivery.check_outputs(build(MeasureOptions, values))
    style = values.get("style")
    if style and not values.get("dry_run") and style not in styles.STYLES:
        raise ConfigError("style", style, f"one of {', '.join(styles.STYLES)}")


def show(path: Path, values: Values, code: int) -> int:
    """Show the run, write the files that were asked for; the exit code of it all."""
    from stepmark.app.view import show_rows  # noqa: PLC0415
    from stepmark.report import styles  # noqa: PLC0415

    style = values.get("style")

    def files(run: "View", options: MeasureOptions) -> None:
        if style:
            sys.stdout.write(styles.as_text(styles.STYLES[style](run.records, run.run)))
        delivery.write_rows(run.rows, options)

    return delivery.deliver(
        path,
        build(MeasureOptions, values),
        code,
        files=files,
        show=lambda run, _: None if style else show_rows(run),
    )


def fastest(run: Path) -> list[OpCase]:
    """The four products of a run with the highest rate."""
    rates = {
        r.operator: r.operator.op.flops
        / summarize(slowest_per_sample(r.samples.seconds)).median
        for r in read_records(run)
        if isinstance(r, Measured)
    }
    return sorted(rates, key=lambda case: rates[case], reverse=True)[:4]
