"""stepmark train MODEL...: real training steps, spread and sped up as the flags say."""

import sys
from typing import TYPE_CHECKING, Any

from stepmark.cli import train_flags
from stepmark.cli.options import Values, as_command
from stepmark.core.errors import ConfigError
from stepmark.core.option_groups import MeasureOptions
from stepmark.core.options import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepmark.app.machine import Machine
    from stepmark.core.plan import Plan


def measure(values: dict[str, Any]) -> None:
    """Plan, then measure on ranks of this host, or as one rank of an outer launcher."""
    import typer  # noqa: PLC0415

    from stepmark.app.delivery import check_outputs  # noqa: PLC0415
    from stepmark.app.measure import measure_or_list  # noqa: PLC0415

    values = with_models(values)
    options = build(MeasureOptions, values)

    def planned(here: "Callable[[], Machine]") -> "Plan":
        check_outputs(options)
        return plan(values, here())

    raise typer.Exit(measure_or_list(planned, options))


def plan(values: Values, machine: "Machine") -> "Plan":
    """The plan of a command line. Raises ConfigError."""
    from stepmark.app import train as app  # noqa: PLC0415
    from stepmark.app.delivery import as_options  # noqa: PLC0415
    from stepmark.cli import train_plan, train_refusals, train_spread  # noqa: PLC0415
    from stepmark.core.plan import How, Plan, entries  # noqa: PLC0415

    device = machine.device
    world_size = machine.num_ranks(train_spread.default_nproc(values, device))
    cases = train_plan.cases(values, device, world_size)
    profiled = train_refusals.profiled_ranks(values, world_size)
    return Plan(
        command="train",
        argv=tuple(sys.argv[1:]),
        options=as_options(values),
        device=device,
        world_size=world_size,
        how=How(train=app.how(values, profiled)),
        entries=entries(cases, values.get("launches") or 1),
    )


def with_models(values: Values) -> dict[str, Any]:
    """Models given as words and as a flag are one list."""
    words = values.get("models") or []
    if words and values.get("model"):
        raise ConfigError("model", values["model"], "given once: as words or as --model")
    given = ",".join(words) if words else values.get("model")
    return {**values, "models": None, "model": given}


command = as_command(
    measure,
    "Train for real: steps of single, DDP, FSDP, TP, PP by phase, MFU by convention.",
    train_flags.MODELS,
    *train_flags.ALL,
)
