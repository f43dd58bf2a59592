"""stepmark op FAMILY: one operator family, or every operator of a model's layer."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepmark.cli.flags import Command
from stepmark.cli.options import MEASURE, MODEL, SELECT, Flag, Values, as_command, of_operator
from stepmark.core.case import Label, OpCase, Rate
from stepmark.core.dtypes import OPERATOR_DTYPES
from stepmark.core.errors import ConfigError
from stepmark.core.ops import FAMILIES, Copy, Gemm
from stepmark.core.plan import OpHow
from stepmark.core.record import Measured

if TYPE_CHECKING:
    from stepmark.bench.operators.call import Capabilities

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure operators: one family, or all of a model's layer.",
)

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
# Worth measuring but not what a layer runs by default.
_NOT_IN_ALL = ("math", "loop")


def measure_family(family: str, values: dict[str, Any]) -> None:
    """Plan, then run or list."""
    from stepmark.cli import plan, session  # noqa: PLC0415

    session.check_outputs(values)
    device = session.device_type(values)
    if values.get("find_max"):
        find_max(values, device)
        return
    ranks = session.num_ranks(values, device)
    placed = plan.placed_ops(family, values, device)
    if not placed:
        raise ConfigError("model", values.get("model"), f"a model with {family} operators")
    execute(of_family(family, placed, values, device, ranks), values, device, ranks)


def of_family(
    family: str,
    placed: Any,
    values: Values,
    device: str,
    ranks: int,
    leave_out: Sequence[str] = (),
) -> list[OpCase]:
    """Cases of every backend that runs here, unless --backend says which."""
    from stepmark.bench.operators.table import IMPLS  # noqa: PLC0415
    from stepmark.cli import plan  # noqa: PLC0415

    known = IMPLS[family]
    found = plan.cases(family, placed, values, device=device, num_ranks=ranks, backends=known)
    if values.get("backend"):
        return found
    kept: dict[Any, list[OpCase]] = {}
    for case in found:
        reason = known[case.backend].unsupported(case.op, _capabilities(device))
        if reason is None and case.backend not in leave_out:
            kept.setdefault(case.op, []).append(case)
    # An operator that nothing runs stays once, so that its reason is recorded.
    first = {case.op: case for case in reversed(found)}
    return [case for op, one in reversed(first.items()) for case in kept.get(op, [one])]


def _capabilities(device: str) -> "Capabilities":
    import torch  # noqa: PLC0415

    from stepmark.bench.environment import capabilities  # noqa: PLC0415

    return capabilities(torch.device(device))


def all_families(values: dict[str, Any]) -> None:
    """Every operator of one layer, the head, the loss, the optimizer, and a copy."""
    from stepmark.cli import session  # noqa: PLC0415

    session.check_outputs(values)
    device = session.device_type(values)
    ranks = session.num_ranks(values, device)
    execute(layer_cases(values, device, ranks), values, device, ranks)


def layer_cases(values: Values, device: str, ranks: int) -> list[OpCase]:
    """The cases of `op all`."""
    from stepmark.cli import plan  # noqa: PLC0415
    from stepmark.workload.layers import BY_FAMILY  # noqa: PLC0415

    if not values.get("model"):
        raise ConfigError("model", "missing", "a model name or config.json for op all")
    shapes = plan.layer_shapes(values, device)
    leave_out = _NOT_IN_ALL if device == "cuda" else (*_NOT_IN_ALL, "compile")
    size = 2**30 if device == "cuda" else 2**27
    copy = [(Label(role="copy"), Copy(num_bytes=size))]
    # First, so that a short budget does not leave the ceiling of all others to the end.
    found = of_family("copy", copy, {**values, "scale": ""}, device, ranks)
    for family, operators in BY_FAMILY.items():
        placed = [item for shape in shapes for item in operators(shape)]
        found += of_family(family, placed, values, device, ranks, leave_out)
    return found


def execute(cases: Sequence[OpCase], values: Values, device: str, ranks: int) -> None:
    """List for --dry-run; otherwise start ranks where several are asked for, and measure."""
    from stepmark.cli import session  # noqa: PLC0415
    from stepmark.launch import torchrun  # noqa: PLC0415

    if values.get("dry_run"):
        listed(cases, values)
        return
    if ranks > 1 and not torchrun.is_rank():
        raise typer.Exit(torchrun.run(sys.argv[1:], ranks))
    from stepmark.bench.context import make_context  # noqa: PLC0415

    context = make_context(device)
    try:
        asked = {"dataset": values["dataset"].upper()} if values.get("dataset") else {}
        outcome = session.measure(cases, values, context, settings=asked)
    finally:
        context.ranks.close()
    if outcome is None:
        return
    session.deliver(outcome, values)
    raise typer.Exit(outcome.exit_code)


def listed(cases: Sequence[OpCase], values: Values) -> None:
    """The plan: one line per case, or JSON/CSV of the same."""
    from stepmark.store.export import write_csv, write_json  # noqa: PLC0415

    rows: list[dict[str, object]] = [
        {
            "family": case.family,
            "model": label.model,
            "role": label.role,
            "pass": str(label.phase or ""),
            "mbs": label.mbs,
            "shape": case.op.shape_text,
            "dtype": str(case.dtype),
            "backend": case.backend,
            "memory_bytes": case.op.memory_bytes,
            "case_id": case.case_id,
            "command": case.command(),
        }
        for case in cases
        for label in case.labels or (Label(),)
    ]
    # A plan goes to stdout; files are for results, except where stdout is asked for.
    if values.get("json") == "-":
        write_json(rows, "-")
    elif values.get("csv") == "-":
        write_csv(rows, "-")
    else:
        for row in rows:
            words = (row["family"], row["model"], row["role"], row["pass"], row["shape"])
            typer.echo(" ".join(str(w) for w in (*words, row["dtype"], row["backend"]) if w))
    typer.echo(f"{len(cases)} cases, {len(rows)} rows; none was run", err=True)


_MAX_SIDES = (4096, 8192, 12288, 16384)
_MAX_DEPTHS = (4096, 8192, 16384)


def find_max(values: dict[str, Any], device: str) -> None:
    """A quick look at many shapes, then the best few in burst and sustained.

    The sides are multiples of common tile sizes; the search is coarse on purpose: the best
    shape is a property of the library's tiles, not of a model.
    """
    from stepmark.bench.context import make_context  # noqa: PLC0415
    from stepmark.cli import plan, session  # noqa: PLC0415
    from stepmark.core.stats import slowest_per_sample, summarize  # noqa: PLC0415

    if values.get("resume") or session.num_ranks(values, device) > 1:
        raise ConfigError("find-max", "--resume or --nproc", "one rank, in one go")
    sides = _MAX_SIDES if device == "cuda" else (256, 512, 1024)
    depths = _MAX_DEPTHS if device == "cuda" else (256, 1024)
    context = make_context(device)
    codes = []
    for dtype in plan.default_dtypes(values, device):
        shapes = [
            Gemm(m=m, n=n, k=k, dtype=dtype)
            for m in sides
            for n in sides
            for k in depths
            if m * n * k <= sides[-1] * sides[-2] * depths[-1]
        ]
        placed = [(Label(role="find-max"), op) for op in shapes]
        cases = of_family("gemm", placed, values | {"rate": "sustained"}, device, 1)
        if values.get("dry_run"):
            listed(cases, values)
            continue
        quick = OpHow(soak_s=0.1, sample_s=0.1)
        first = session.measure(cases, values, context, settings={"stage": "search"}, how=quick)
        assert first is not None
        rates = {
            r.operator: r.operator.op.flops
            / summarize(slowest_per_sample(r.samples.seconds)).median
            for r in first.view.records
            if isinstance(r, Measured)
        }
        best = sorted(rates, key=lambda case: rates[case], reverse=True)[:4]
        final = [dataclasses.replace(c, rate=rate) for rate in Rate for c in best]
        last = session.measure(final, values, context, settings={"stage": "best"})
        assert last is not None
        session.deliver(last, values)
        codes.append(last.exit_code)
    raise typer.Exit(max(codes, default=0))


@app.callback(invoke_without_command=True)
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
    from stepmark.cli import session  # noqa: PLC0415
    from stepmark.core.ops import FAMILY_OF  # noqa: PLC0415
    from stepmark.workload.formats.param import read_config  # noqa: PLC0415

    found = read_config(path)
    for name in found.lacking:
        typer.echo(f"not measured: {name}: no such operator here", err=True)
    if not found.ops:
        raise ConfigError("config", path, "at least one operator that stepmark has")
    session.check_outputs(values)
    device = session.device_type(values)
    cases: list[OpCase] = []
    for family in ("gemm", "bmm"):
        placed = [
            (Label(role=name), op) for name, op in found.ops if FAMILY_OF[type(op)] == family
        ]
        cases += of_family(family, placed, values, device, 1)
    execute(cases, values, device, 1)


def _register() -> None:
    for family, kind in FAMILIES.items():
        extra: tuple[Flag, ...] = (
            (DATASET,) if family in ("gemm", "embedding-bag", "mlp") else ()
        )
        extra += (FIND_MAX,) if family == "gemm" else ()
        # Its pass is no field of a product: it permutes the dimensions.
        extra += (PASS,) if family in ("gemm", "bmm") else ()

        def handler(values: dict[str, Any], family: str = family) -> None:
            measure_family(family, values)

        text = (kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        groups = (of_operator(kind), (SHAPES,), extra, MODEL, SELECT, MEASURE)
        app.command(family, cls=Command)(as_command(handler, " ".join(text.split()), *groups))
    doc = "Every operator of one layer of a model, its head, loss and optimizer."
    dtype = Flag(name="dtype", kind=str, help=f"element type(s): {', '.join(OPERATOR_DTYPES)}")
    skew = Flag(name="skew", kind=str, help="Zipf exponent of tokens per expert; 0 = balanced")
    app.command("all", cls=Command)(
        as_command(all_families, doc, (dtype, skew), MODEL, SELECT, MEASURE)
    )


_register()
