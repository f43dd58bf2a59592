"""stepmark comm NAME...: collectives, with nccl-tests' flags and table."""

import sys
from typing import TYPE_CHECKING, Any

from stepmark.cli import options
from stepmark.cli.options import BUDGET, DEVICE, OUTPUT, Flag, Values, as_command
from stepmark.core.collectives import FACTS, Api, Collective, placements
from stepmark.core.dtypes import MESSAGE_DTYPES
from stepmark.core.errors import ConfigError
from stepmark.core.option_groups import MeasureOptions
from stepmark.core.options import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepmark.app.machine import Machine
    from stepmark.core.plan import Plan

NAMES = (
    Flag(
        name="names",
        kind=list[str],
        names=(),
        help=f"{', '.join(Collective)}, p2p-matrix",
        argument=True,
    ),
)
SWEEP = (
    Flag(name="begin", kind=str, names=("-b", "--begin"), help="smallest size [1K]"),
    Flag(
        name="end",
        kind=str,
        names=("-e", "--end"),
        help="largest size [1G on accelerators, 4M on a CPU]",
    ),
    Flag(name="step", kind=str, names=("-i", "--step"), help="add this many bytes per size"),
    Flag(name="factor", kind=float, names=("-f", "--factor"), help="multiply the size by [4]"),
)
OF_MODEL = (
    Flag(
        name="model",
        kind=str,
        help="message sizes of training these models, instead of a sweep",
    ),
    Flag(name="mbs", kind=str, names=("--mbs", "--bsz"), help="micro-batch: 1, 1,2 or 1-8 [1]"),
    Flag(name="seq_len", kind=int, help="sequence length instead of the model's"),
    Flag(
        name="message",
        kind=str,
        help="only these of a model: activation, layer, moe_layer, dispatch",
    ),
    Flag(
        name="from_workload",
        kind=str,
        help="the distinct collectives of a workload file, instead of a sweep",
    ),
)
WHAT = (
    Flag(
        name="dtype",
        kind=str,
        names=("-d", "--dtype"),
        help=f"type(s), or all: {', '.join(MESSAGE_DTYPES)} [fp32]",
    ),
    Flag(
        name="redop",
        kind=str,
        names=("-o", "--redop"),
        help="sum, prod, min, max, avg, mulsum or all [sum]",
    ),
    Flag(
        name="root", kind=str, names=("-r", "--root"), help="root rank; -1 = each in turn [0]"
    ),
    Flag(name="placement", kind=str, help="both, in or out (of place) [both]"),
    Flag(name="pair", kind=str, help="p2p, ping_pong: source and destination [0,1]"),
    Flag(
        name="bidirectional",
        kind=bool,
        default=False,
        names=("--bidirectional",),
        help="p2p: both directions at once",
    ),
    Flag(name="spread", kind=str, help="all_to_all_v: 0 = even, 1 = by distance [1]"),
    Flag(name="matrix", kind=str, help="all_to_all_v: file of bytes from row to column"),
)
WHO = (
    DEVICE,
    Flag(
        name="nproc",
        kind=str,
        names=("--nproc", "-g"),
        help="ranks [all accelerators; 2 on a CPU]",
    ),
    Flag(name="ranks", kind=str, help="communicators over the first 2,4,8 ranks"),
    Flag(
        name="group_split",
        kind=str,
        help="communicators side by side: mod 4, div 8, and 0x7 (NCCL_TESTS_SPLIT)",
    ),
    Flag(name="api", kind=str, help="torch (torch.distributed) or nccl (libnccl) [torch]"),
    Flag(name="backend", kind=str, help="of torch.distributed [nccl; gloo on a CPU]"),
    Flag(name="max_ctas", kind=str, help="thread blocks per communicator, e.g. 1,4,16"),
)
HOW = (
    Flag(name="mode", kind=str, help="queued, graph or blocking [queued]"),
    Flag(
        name="cudagraph",
        kind=int,
        names=("-G", "--cudagraph"),
        help="above 0: as --mode graph",
    ),
    Flag(
        name="blocking",
        kind=int,
        names=("-z", "--blocking"),
        help="1 and 3: as --mode blocking; 2: without a common start",
    ),
    Flag(
        name="no_align",
        kind=bool,
        default=False,
        names=("--no-align",),
        help="blocking: no common start of each call",
    ),
    Flag(
        name="iters",
        kind=int,
        names=("-n", "--iters"),
        help="timed calls [until the median is within 0.5 %, at most 1 s]",
    ),
    Flag(
        name="warmup_iters", kind=int, names=("-w", "--warmup-iters"), help="calls before [5]"
    ),
    Flag(name="check", kind=int, names=("-c", "--check"), help="checked calls; 0 = none [1]"),
    Flag(
        name="agg_iters",
        kind=int,
        names=("-m", "--agg-iters"),
        help="operations issued as one [1]",
    ),
    Flag(name="launches", kind=int, help="times that communicators are made anew [1]"),
    Flag(name="skew", kind=str, help="the last rank arrives this late, e.g. 50us"),
    Flag(
        name="beside",
        kind=str,
        names=("--with",),
        help="compute beside: gemm:8192, copy:256M, attention:BxSxHxD",
    ),
    Flag(
        name="timeout",
        kind=str,
        names=("--timeout", "-T"),
        help="a case that takes longer has failed [60s]",
    ),
    BUDGET,
)
SHOWN = (
    Flag(
        name="wide",
        kind=bool,
        default=False,
        names=("--wide",),
        help="p50, p99, min, max, spread, slowest rank, % of link",
    ),
    Flag(
        name="output_file",
        kind=str,
        names=("-J", "--output-file"),
        help="nccl-tests' JSON; never overwrites",
    ),
    Flag(name="style", kind=str, help="param: that tool's columns"),
    Flag(
        name="print_as",
        kind=str,
        names=("--print",),
        help="nccl-tests or rccl-tests: their commands for the same, run nothing",
    ),
    Flag(
        name="list_all",
        kind=bool,
        default=False,
        names=("--list",),
        help="what there is to measure",
    ),
)
ALL = (SWEEP, OF_MODEL, WHAT, WHO, HOW, OUTPUT, SHOWN)


def measure(values: dict[str, Any]) -> None:
    """Plan, then measure on ranks of this host, or as one rank of an outer launcher."""
    import typer  # noqa: PLC0415

    from stepmark.app import comm as app  # noqa: PLC0415
    from stepmark.app.measure import measure_or_list  # noqa: PLC0415
    from stepmark.cli import comm_workload  # noqa: PLC0415

    names = values.pop("names") or []
    if values.get("list_all"):
        typer.echo(table())
        return
    if values.get("print_as"):
        _check(names, values)
        comm_workload.print_commands(names, values)
        return

    def planned(here: "Callable[[], Machine]") -> "Plan":
        _check(names, values)
        app.check(values)
        return plan(names, values, here())

    raise typer.Exit(measure_or_list(planned, build(MeasureOptions, values)))


def _check(names: list[str], values: Values) -> None:
    from stepmark.cli import comm_values  # noqa: PLC0415

    if not names and not values.get("from_workload"):
        raise ConfigError("collective", "missing", "a name; `stepmark comm --list` shows them")
    comm_values.check_calls(values)


def plan(names: list[str], values: Values, machine: "Machine") -> "Plan":
    """The plan of a command line. Raises ConfigError."""
    from stepmark.app import comm as app  # noqa: PLC0415
    from stepmark.app.delivery import as_options  # noqa: PLC0415
    from stepmark.cli import comm_plan, comm_workload  # noqa: PLC0415
    from stepmark.core.plan import How, Plan, entries  # noqa: PLC0415

    device = machine.device
    world_size = machine.num_ranks(values.get("nproc"), "all" if device == "cuda" else "2")
    make_cases = comm_workload.plan if values.get("from_workload") else comm_plan.plan
    found = make_cases(names, values, device, world_size)
    return Plan(
        command="comm",
        argv=tuple(sys.argv[1:]),
        options=as_options({**values, "names": names}),
        device=device,
        world_size=world_size,
        how=How(comm=app.how(values)),
        entries=entries(found.cases, values.get("launches") or 1),
        notes=tuple(found.notes),
    )


def table() -> str:
    """`comm --list`: every collective and what it can do."""
    lines = [f"{'name':<15}{'busbw/algbw':<13}{'size counts':<16}{'torch':<14}nccl"]
    for one in Collective:
        facts = FACTS[one]
        forms = {
            api: "/".join("in" if inside else "out" for inside in placements(one, api))
            for api in Api
        }
        lines.append(
            f"{one:<15}{facts.busbw:<13}{facts.parts:<16}"
            f"{forms[Api.TORCH]:<14}{forms[Api.NCCL]}"
        )
    lines.append("p2p-matrix     every ordered pair: bandwidth and latency, one pair at a time")
    lines.append("out, in: of place. Reductions: sum, prod, min, max, avg, mulsum.")
    return "\n".join(lines)


def as_arguments(names: list[str], values: Values) -> list[str]:
    """The command line that gives these values."""
    return options.as_arguments(["comm", *names], values, *ALL)


command = as_command(
    measure, "Measure collectives: nccl-tests' flags, table and figures; no MPI.", NAMES, *ALL
)
