"""stepmark train MODEL...: real training steps, spread and sped up as the flags say."""

from pathlib import Path
from typing import Any

from stepmark.cli import options, train_flags
from stepmark.cli.options import Values, as_command
from stepmark.core.errors import ConfigError


def measure(values: dict[str, Any]) -> None:
    """Plan; then, started plainly, start ranks and watch them, or be one of them."""
    import typer  # noqa: PLC0415

    from stepmark.cli import (  # noqa: PLC0415
        delivery,
        rank_parent,
        session,
        train_output,
        train_plan,
        train_spread,
    )
    from stepmark.launch import torchrun  # noqa: PLC0415

    values = with_models(values)
    train_output.check(values)
    device = session.device_type(values)
    values["nproc"] = train_spread.default_nproc(values, device)
    world_size = session.num_ranks(values, device)
    cases = train_plan.cases(values, device, world_size)
    if values.get("dry_run"):
        delivery.listed(cases)
        return
    places = rank_parent.positions(cases, values.get("launches") or 1)
    if torchrun.is_rank():
        from stepmark.cli import train_rank  # noqa: PLC0415

        raise typer.Exit(train_rank.work(places, values, device))
    # Ranks get all that was decided here, whatever it was decided from.
    told = as_arguments({**values, "device": device, "nproc": str(world_size)})
    deliver = train_output.deliver
    raise typer.Exit(rank_parent.as_parent(told, places, values, world_size, deliver))


def beside_operators(values: dict[str, Any], run: Path) -> int:
    """Training steps into a run that exists, for `stepmark run`; the exit code."""
    from stepmark.cli import rank_parent, train_plan  # noqa: PLC0415

    world_size = int(values["nproc"])
    cases = train_plan.cases(values, values["device"], world_size)
    places = rank_parent.positions(cases, 1)
    return rank_parent.watched(as_arguments(values), places, world_size, going_on=run)[0]


def with_models(values: Values) -> dict[str, Any]:
    """Models given as words and as a flag are one list."""
    words = values.get("models") or []
    if words and values.get("model"):
        raise ConfigError("model", values["model"], "given once: as words or as --model")
    given = ",".join(words) if words else values.get("model")
    return {**values, "models": None, "model": given}


def as_arguments(values: Values) -> list[str]:
    """The command line that gives these values."""
    models = options.words(values.get("model"))
    return options.as_arguments(["train", *models], {**values, "model": None}, *train_flags.ALL)


command = as_command(
    measure,
    "Train for real: steps of single, DDP, FSDP, TP, PP by phase, MFU by convention.",
    train_flags.MODELS,
    *train_flags.ALL,
)
