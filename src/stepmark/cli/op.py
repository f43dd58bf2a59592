"""stepmark op FAMILY: one operator family, or every operator of a model's layer."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepmark.cli.flags import Command, Group
from stepmark.cli.options import MEASURE, MODEL, SELECT, Flag, Values, as_command, of_operator
from stepmark.core.case import Label, OpCase, Rate
from stepmark.core.dtypes import OPERATOR_DTYPES
from stepmark.core.errors import ConfigError, worst
from stepmark.core.ops import FAMILIES, Copy, Gemm
from stepmark.core.option_groups import MeasureOptions
from stepmark.core.options import build

if TYPE_CHECKING:
    from stepmark.app.machine import Machine
    from stepmark.core.dtypes import DType
    from stepmark.core.plan import Plan

SHAPES = Flag(
    name="shapes", kind=str, help="JSON list of shapes (or Primus' attention_shapes.json)"
)
DATASET = Flag(name="dataset", kind=str, help="PARAM's built-in shapes: A, B or C")
PASS = Flag(
    name="phase", kind=str, names=("--pass",), help="pass of a linear layer: fwd, dgrad, wgrad"
)
FIND_MAX = Flag(
    name="find_max",
    kind=bool,
    default=False,
    names=("--find-max",),
    help="sweep for the highest matmul rate; burst and sustained",
)
AS = (
    Flag(
        name="run_as",
        kind=str,
        names=("--as",),
        help="whose products --model stands for: train (default), megatron, fsdp",
    ),
    Flag(name="etp", kind=int, help="tensor-parallel degree of experts; default tp"),
)
# Worth measuring but not what a layer runs by default.
_NOT_IN_ALL = ("math", "loop")


def measure_family(family: str, values: dict[str, Any]) -> None:
    """Plan, then measure or list."""
    if values.get("find_max"):
        find_max(values)
        return

    def cases(machine: "Machine") -> list[OpCase]:
        from stepmark.cli import plan  # noqa: PLC0415

        ranks = machine.num_ranks(values.get("nproc"))
        placed = plan.placed_ops(family, values, machine.device)
        if not placed:
            raise ConfigError("model", values.get("model"), f"a model with {family} operators")
        return of_family(family, placed, values, machine, ranks)

    execute(cases, values)


def of_family(
    family: str,
    placed: Any,
    values: Values,
    machine: "Machine",
    ranks: int,
    leave_out: Sequence[str] = (),
) -> list[OpCase]:
    """Cases of every backend that runs there, unless --backend says which."""
    from stepmark.app.op import capabilities  # noqa: PLC0415
    from stepmark.cli import plan  # noqa: PLC0415
    from stepmark.core.ops.backends import BACKENDS, unsupported  # noqa: PLC0415

    device = machine.device
    known = BACKENDS[family]
    found = plan.cases(family, placed, values, device=device, num_ranks=ranks, backends=known)
    if values.get("backend"):
        return found
    limits = capabilities(machine)
    kept: dict[Any, list[OpCase]] = {}
    for case in found:
        reason = unsupported(family, case.backend, case.op, limits)
        if reason is None and case.backend not in leave_out:
            kept.setdefault(case.op, []).append(case)
    # An operator that nothing runs stays once, so that its reason is recorded.
    first = {case.op: case for case in reversed(found)}
    return [case for op, one in reversed(first.items()) for case in kept.get(op, [one])]


def all_families(values: dict[str, Any]) -> None:
    """Every operator of one layer, the head, the loss, the optimizer, and a copy."""
    execute(lambda machine: layer_cases(values, machine), values)


def layer_cases(values: Values, machine: "Machine") -> list[OpCase]:
    """The cases of `op all`."""
    from stepmark.cli import plan  # noqa: PLC0415
    from stepmark.workload.operators import BY_FAMILY  # noqa: PLC0415

    if not values.get("model"):
        raise ConfigError("model", "missing", "a model name or config.json for op all")
    ranks = machine.num_ranks(values.get("nproc"))
    on_gpu = machine.device == "cuda"
    shapes = plan.layer_shapes(values, machine.device)
    leave_out = _NOT_IN_ALL if on_gpu else (*_NOT_IN_ALL, "compile")
    copy = [(Label(role="copy"), Copy(num_bytes=2**30 if on_gpu else 2**27))]
    # First, so that a short budget does not leave the ceiling of all others to the end.
    found = of_family("copy", copy, {**values, "scale": ""}, machine, ranks)
    for family, operators in BY_FAMILY.items():
        placed = [item for shape in shapes for item in operators(shape)]
        found += of_family(family, placed, values, machine, ranks, leave_out)
    return found


def execute(cases: "Callable[[Machine], list[OpCase]]", values: Values) -> None:
    """List for --dry-run; otherwise measure."""
    from stepmark.app import op as app_op  # noqa: PLC0415
    from stepmark.app.measure import measure_or_list  # noqa: PLC0415

    def planned(here: "Callable[[], Machine]") -> "Plan":
        app_op.check(values)
        machine = here()
        return app_op.plan(cases(machine), values, machine)

    raise typer.Exit(measure_or_list(planned, build(MeasureOptions, values)))


_MAX_SIDES = (4096, 8192, 12288, 16384)
_MAX_DEPTHS = (4096, 8192, 16384)


def find_max(values: dict[str, Any]) -> None:
    """A quick look at many shapes, then the best few in burst and sustained.

    The sides are multiples of common tile sizes; the search is coarse on purpose: the best
    shape is a property of the library's tiles, not of a model.
    """
    from stepmark.app import op as app_op  # noqa: PLC0415
    from stepmark.app.machine import machine  # noqa: PLC0415
    from stepmark.app.measure import measure_quietly, shown  # noqa: PLC0415
    from stepmark.cli import plan  # noqa: PLC0415
    from stepmark.core.plan import OpHow  # noqa: PLC0415
    from stepmark.launch import outer_launcher  # noqa: PLC0415

    app_op.check(values)
    here = machine(values.get("device"), dry_run=bool(values.get("dry_run")))
    ranks = here.num_ranks(values.get("nproc"))
    if values.get("resume") or ranks > 1 or outer_launcher.is_rank():
        raise ConfigError("find-max", "--resume or --nproc", "one rank, in one go")
    searches = []
    for dtype in plan.default_dtypes(values, here.device):
        placed = [(Label(role="find-max"), op) for op in _shapes(dtype, here.device)]
        searches.append(of_family("gemm", placed, values | {"rate": "sustained"}, here, 1))
    if values.get("dry_run"):
        from stepmark.app import dry_run  # noqa: PLC0415

        everything = [case for cases in searches for case in cases]
        dry_run.show_cases(everything, values.get("json"), values.get("csv"))
        return
    codes = []
    for cases in searches:
        quick = OpHow(soak_s=0.1, sample_s=0.1)
        first = app_op.plan(cases, values, here, how=quick)
        code, run = measure_quietly(first, values.get("out"), {"stage": "search"})
        if code not in (0, 3):
            raise typer.Exit(code)
        final = [
            dataclasses.replace(c, rate=rate) for rate in Rate for c in app_op.fastest(run)
        ]
        last = app_op.plan(final, values, here)
        code, run = measure_quietly(last, values.get("out"), {"stage": "best"})
        codes.append(shown(run, code))
    raise typer.Exit(worst(0, *codes))


def _shapes(dtype: "DType", device: str) -> list[Gemm]:
    sides = _MAX_SIDES if device == "cuda" else (256, 512, 1024)
    depths = _MAX_DEPTHS if device == "cuda" else (256, 1024)
    return [
        Gemm(m=m, n=n, k=k, dtype=dtype)
        for m in sides
        for n in sides
        for k in depths
        if m * n * k <= sides[-1] * sides[-2] * depths[-1]
    ]


def operators(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", help="run PARAM's JSON operator config")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda or cpu")] = None,
    budget: Annotated[str | None, typer.Option("--budget", help="time for all cases")] = None,
    out: Annotated[str | None, typer.Option("--out", help="folder for runs")] = None,
    json: Annotated[str | None, typer.Option("--json", help="rows as JSON")] = None,
    csv: Annotated[str | None, typer.Option("--csv", help="rows as CSV")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the cases")] = False,
) -> None:
    """Measure operators: one family, or all of a model's layer."""
    if context.invoked_subcommand:
        return
    if config is None:
        typer.echo(context.get_help())
        raise typer.Exit(0)
    values = {
        "device": device,
        "budget": budget,
        "out": out,
        "json": json,
        "csv": csv,
        "dry_run": dry_run,
        "clock": "auto",
        "rate": "sustained",
    }
    run_config(Path(config), values)


def run_config(path: Path, values: dict[str, Any]) -> None:
    """PARAM's operator config: what we have is measured, what we lack is named."""
    from stepmark.core.ops import FAMILY_OF  # noqa: PLC0415
    from stepmark.workload.formats.param import read_config  # noqa: PLC0415

    found = read_config(path)
    for name in found.lacking:
        typer.echo(f"not measured: {name}: no such operator here", err=True)
    if not found.ops:
        raise ConfigError("config", path, "at least one operator that stepmark has")

    def cases(machine: "Machine") -> list[OpCase]:
        planned: list[OpCase] = []
        for family in ("gemm", "bmm"):
            placed = [
                (Label(role=name), op)
                for name, op in found.ops
                if FAMILY_OF[type(op)] == family
            ]
            planned += of_family(family, placed, values, machine, 1)
        return planned

    execute(cases, values)


def app(arguments: Sequence[str]) -> typer.Typer:
    """All families by name, and the flags of those that are in the command line.

    The flags of all of them take longer than the answer of --help may.
    """
    made = typer.Typer(
        cls=Group,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Measure operators: one family, or all of a model's layer.",
    )
    made.callback(invoke_without_command=True)(operators)
    for family, kind in FAMILIES.items():
        text = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        if family not in arguments:
            made.command(family, help=text)(_unread)
            continue
        extra: tuple[Flag, ...] = (
            (DATASET,) if family in ("gemm", "embedding-bag", "mlp") else ()
        )
        extra += (FIND_MAX,) if family == "gemm" else ()
        # Its pass is no field of a product: it permutes the dimensions.
        extra += (PASS,) if family in ("gemm", "bmm") else ()

        def handler(values: dict[str, Any], family: str = family) -> None:
            measure_family(family, values)

        groups = (of_operator(kind), (SHAPES,), extra, MODEL, AS, SELECT, MEASURE)
        made.command(family, cls=Command)(as_command(handler, text, *groups))
    doc = "Every operator of one layer of a model, its head, loss and optimizer."
    dtype = Flag(name="dtype", kind=str, help=f"element type(s): {', '.join(OPERATOR_DTYPES)}")
    skew = Flag(name="skew", kind=str, help="Zipf exponent of tokens per expert; 0 = balanced")
    made.command("all", cls=Command)(
        as_command(all_families, doc, (dtype, skew), MODEL, AS, SELECT, MEASURE)
    )
    return made


def _unread() -> None:
    raise AssertionError("the flags of a family that is asked for are read")
