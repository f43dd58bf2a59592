"""stepmark run: the main job. What this machine is, what it does, and a report."""

import sys
from typing import Annotated, Any

import typer

GIB = 2**30


def run(
    model: Annotated[
        str | None, typer.Option("--model", help="default: sized for the machine")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda or cpu")] = None,
    nproc: Annotated[
        str, typer.Option("--nproc", help="devices at once: a number or all")
    ] = "1",
    budget: Annotated[str | None, typer.Option("--budget", help="time for all cases")] = None,
    out: Annotated[str, typer.Option("--out", help="folder for run directories")] = "runs",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list the cases, run none")
    ] = False,
) -> None:
    """Doctor, every operator of a model's layer, summary and HTML report."""
    from stepmark.cli import doctor, op, session  # noqa: PLC0415
    from stepmark.cli import report as pages  # noqa: PLC0415
    from stepmark.cli.view import console  # noqa: PLC0415
    from stepmark.launch import torchrun  # noqa: PLC0415
    from stepmark.report.printing import print_rows  # noqa: PLC0415
    from stepmark.report.summary import terminal_summary  # noqa: PLC0415

    values = _values(model, device, nproc, budget, out)
    kind = session.device_type(values)
    values |= _sized(values, kind)
    ranks = session.num_ranks(values, kind)
    cases = op.layer_cases(values, kind, ranks)
    if dry_run:
        op.listed(cases, values)
        return
    session.check_outputs(values)
    if ranks > 1 and not torchrun.is_rank():
        raise typer.Exit(torchrun.run(sys.argv[1:], ranks))
    rig = session.make_rig(kind)
    try:
        if rig.ranks.rank == 0:
            doctor.doctor()
        outcome = session.measure(cases, values, rig)
    finally:
        rig.ranks.close()
    if outcome is None:
        return
    page = pages.write(outcome.path)
    print_rows(outcome.view.rows, console())
    terminal_summary(outcome.view.run, outcome.view.rows, console(), report=page)
    raise typer.Exit(outcome.exit_code)


def _values(
    model: str | None, device: str | None, nproc: str, budget: str | None, out: str
) -> dict[str, Any]:
    return {
        "model": model,
        "mbs": "1",
        "device": device,
        "nproc": nproc,
        "budget": budget,
        "out": out,
        "clock": "auto",
        "rate": "sustained",
    }


def _sized(values: dict[str, Any], device: str) -> dict[str, Any]:
    """A model that fits: a CPU gets a small one, short sequences and 60 s in all."""
    import torch  # noqa: PLC0415

    if device == "cpu":
        chosen = {} if values["model"] else {"model": "gpt2-125m", "seq_len": 512}
        return chosen | ({} if values["budget"] else {"budget": "60s"})
    if values["model"]:
        return {}
    memory = torch.cuda.get_device_properties(0).total_memory
    return {"model": "llama-3.1-8b" if memory >= 40 * GIB else "gpt2-125m"}
