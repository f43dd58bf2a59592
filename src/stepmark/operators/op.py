"""stepmark op: from its options to a plan of operators."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stepmark.cases.case import Label, OpCase, Rate
from stepmark.cases.plan import How, OpHow, Plan, entries
from stepmark.cases.record import Measured
from stepmark.ground import outer_launcher
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of, worst
from stepmark.ground.options import plain
from stepmark.measuring import delivery
from stepmark.measuring.machine import Machine, machine
from stepmark.measuring.measure import measure_or_list, measure_quietly, show_run
from stepmark.model.ops import FAMILY_OF, Gemm
from stepmark.operators import op_plan, styles
from stepmark.operators.op_options import (
    FAMILY_WORDS,
    CustomOptions,
    FamilyOptions,
    LayerOptions,
    OpOptions,
)
from stepmark.operators.op_plan import Placed, custom_cases, family_cases, layer_cases
from stepmark.store.reader import read_records
from stepmark.store.view import median_s
from stepmark.workloads.formats.shapes import read_config
from stepmark.workloads.models import notes_of, read_models

Plans = Callable[[Machine], list[OpCase]]


def run(options: OpOptions) -> int:
    """Plan, then measure or list. Returns the exit code."""
    options = with_models(options)
    if isinstance(options, FamilyOptions) and options.field("find_max"):
        return find_max(options)
    return execute(_cases_of(options), options)


def plan_of(options: OpOptions, machine: Machine) -> Plan:
    """Plan every operator of the options. Raises ConfigError."""
    options = with_models(options)
    check(options)
    if options.field("find_max"):
        rule = "it is a search over several runs, which only stepmark op --find-max makes"
        raise ConfigError("find-max", "given", rule)
    return plan(_cases_of(options)(machine), options)


def with_models(options: OpOptions) -> OpOptions:
    """Return the options with the models of the arguments as --model. Raises ConfigError."""
    models = options.field("models")
    if not models:
        return options
    if model := options.field("model"):
        raise ConfigError("model", model, "it cannot be combined with MODEL, which is the same")
    return dataclasses.replace(options, models=(), model=",".join(models))  # type: ignore[call-arg]


def _cases_of(options: OpOptions) -> Plans:
    if isinstance(options, CustomOptions):
        return lambda machine: custom_cases(options, machine)
    if isinstance(options, LayerOptions):
        return lambda machine: layer_cases(options, machine)
    if isinstance(options, FamilyOptions):
        return lambda machine: family_cases(options, machine)
    return _config_cases(options)


def execute(make_cases: Plans, options: OpOptions) -> int:
    """List for --dry-run; otherwise measure."""
    return measure_or_list(
        lambda machine: plan(make_cases(machine), options), options, lambda: check(options)
    )


def plan(cases: Sequence[OpCase], options: OpOptions, *, how: OpHow | None = None) -> Plan:
    """Return the plan of these cases. Raises ConfigError."""
    how = how or OpHow(budget_s=options.budget, steps=options.steps, warmups=options.warmups)
    dataset = options.field("dataset")
    return Plan(
        command="op",
        argv=tuple(sys.argv[1:]),
        options=plain(options),
        device=cases[0].device,
        world_size=max(case.num_ranks for case in cases),
        how=How(op=dataclasses.replace(how, timeout_s=options.timeout or how.timeout_s)),
        entries=entries(cases, options.launches),
        settings={"dataset": dataset.upper()} if dataset else {},
        notes=notes_of(read_models(options.field("model"))),
    )


def check(options: OpOptions) -> None:
    """Validate options before measuring. Raises ConfigError."""
    for name in ("steps", "warmups"):
        if options.budget and getattr(options, name):
            allowed = f"it cannot be combined with --{name}, which fixes how long a case takes"
            raise ConfigError("budget", f"{options.budget:g}s", allowed)
    if options.style and not options.dry_run and options.style not in styles.STYLES:
        raise not_one_of("style", options.style, styles.STYLES)


def _config_cases(options: OpOptions) -> Plans:
    """Return the plans of PARAM's operator config; operators that we lack are named."""
    path = options.field("config")
    if path is None:
        raise not_one_of("family", "missing", FAMILY_WORDS)
    if scale := options.field("scale"):
        raise ConfigError("scale", scale, "it cannot be combined with --config")
    config = read_config(path)
    if not config.ops:
        raise ConfigError("config", path, "at least one operator that stepmark has")
    placed: dict[str, list[Placed]] = {"gemm": [], "bmm": []}
    for name, op in config.ops:
        placed[FAMILY_OF[type(op)]].append((Label(role=name), op))

    def make_cases(machine: Machine) -> list[OpCase]:
        planned = [
            case
            for family, ops in placed.items()
            for case in op_plan.cases(family, ops, options, machine)
        ]
        for name in config.lacking:
            sys.stderr.write(f"not measured: {name}: no such operator here\n")
        return planned

    return make_cases


_MAX_SIDES = {"cuda": (4096, 8192, 12288, 16384), "cpu": (256, 512, 1024)}
_MAX_DEPTHS = {"cuda": (4096, 8192, 16384), "cpu": (256, 1024)}


def find_max(options: FamilyOptions) -> int:
    """Measure many shapes briefly, then the best few in burst and sustained.

    The sides are multiples of common tile sizes; the search is coarse on purpose: the best
    shape is a property of the library's tiles, not of a model.
    """
    delivery.check_outputs(options, options.out, dry_run=options.dry_run)
    check(options)
    op_plan.shape_source(options)
    here = machine(options.device, dry_run=options.dry_run)
    ranks = here.num_ranks(options.nproc)
    if options.resume or ranks > 1 or outer_launcher.is_rank():
        raise ConfigError("find-max", "given", "it needs one rank, and has no --resume")
    sustained = dataclasses.replace(options, rate=Rate.SUSTAINED)
    searches = [
        op_plan.cases("gemm", _largest(dtype, here.device), sustained, here)
        for dtype in op_plan.dtypes(options, here.device)
    ]
    if options.dry_run:
        return execute(lambda _: [case for search in searches for case in search], options)
    codes: list[int] = []
    # Half of the time is for the search, half for the best, of each type.
    share_s = options.budget and options.budget / (2 * len(searches))
    options = dataclasses.replace(options, budget=share_s)
    for search in searches:
        brief = dataclasses.replace(options, launches=1)
        first = plan(
            search, brief, how=OpHow(budget_s=options.budget, soak_s=0.1, sample_s=0.1)
        )
        code, path = measure_quietly(first, options.out, {"stage": "search"})
        if code not in (0, 3):
            return worst(0, *codes, code)
        if not (shapes := fastest(path)):
            codes.append(show_run(path, code))  # it says why nothing was measured
            continue
        rates = (Rate.BURST, Rate.SUSTAINED)
        best = [dataclasses.replace(case, rate=rate) for rate in rates for case in shapes]
        code, path = measure_quietly(plan(best, options), options.out, {"stage": "best"})
        codes.append(show_run(path, code))
    return worst(0, *codes)


def _largest(dtype: DType, device: str) -> list[tuple[Label, Gemm]]:
    sides = _MAX_SIDES[device]
    depths = _MAX_DEPTHS[device]
    return [
        (Label(role="find-max"), Gemm(m=m, n=n, k=k, dtype=dtype))
        for m in sides
        for n in sides
        for k in depths
        if m * n * k <= sides[-1] * sides[-2] * depths[-1]
    ]


def fastest(path: Path) -> list[OpCase]:
    """Return the four products of a run with the highest rate."""
    rates = {
        record.operator: record.operator.op.flops / median_s(record)
        for record in read_records(path)
        if isinstance(record, Measured)
    }
    return sorted(rates, key=lambda case: rates[case], reverse=True)[:4]
