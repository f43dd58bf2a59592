"""stepmark run: the main job. What this machine is, what it does, and a report."""

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepmark.core.option_groups import MeasureOptions
from stepmark.core.options import build
from stepmark.core.train_options import TrainOptions
from stepmark.core.units import GIB, parse_duration

if TYPE_CHECKING:
    from stepmark.app.machine import Machine
    from stepmark.core.plan import Entry, Plan

NAMES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
_COLLECTIVES = {
    "cuda": {"begin": "4K", "end": "1G", "factor": 8.0, "dtype": "bf16"},
    "cpu": {"begin": "4K", "end": "4M", "factor": 32.0},
}
_MOST_MBS = 8
# Of an accelerator's memory; the rest is for what the estimate leaves out.
_SHARE = 0.85
_DOCTOR_LIMIT_S = 180.0  # it imports torch and reads every device
_SMALLER = ("gpt2-1.5b", "gpt2-125m")


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
    """Doctor, operators of a model's layer, collectives, training steps, summary, HTML."""
    from stepmark.app import delivery  # noqa: PLC0415
    from stepmark.app.machine import machine  # noqa: PLC0415
    from stepmark.app.measure import measure  # noqa: PLC0415
    from stepmark.launch import outer_launcher  # noqa: PLC0415

    values = {
        "model": model,
        "mbs": "1",
        "device": device,
        "nproc": nproc,
        "budget": budget,
        "out": out,
        "clock": "auto",
        "rate": "sustained",
        "dry_run": dry_run,
    }

    def planned() -> "Plan":
        made = plan(values, machine(device, dry_run=dry_run))
        delivery.check_outputs(build(MeasureOptions, values))
        if not dry_run and outer_launcher.is_first():
            # In a process of its own: it imports torch, which takes seconds and memory.
            command = [sys.executable, "-m", "stepmark", "doctor"]
            try:
                subprocess.run(command, timeout=_DOCTOR_LIMIT_S, check=False)
            except subprocess.TimeoutExpired:
                limit = f"{_DOCTOR_LIMIT_S:.0f} s"
                typer.echo(f"stepmark: doctor took more than {limit} and was ended.", err=True)
        return made

    if dry_run:
        from stepmark.app.dry_run import show  # noqa: PLC0415

        show(planned())
        return
    raise typer.Exit(measure(planned, lambda: machine(device).device, out))


def plan(values: dict[str, Any], machine: "Machine") -> "Plan":
    """One plan of operators, collectives and training steps. Raises ConfigError."""
    from stepmark.app import comm, train  # noqa: PLC0415
    from stepmark.app.delivery import as_options  # noqa: PLC0415
    from stepmark.cli import op  # noqa: PLC0415
    from stepmark.core.comm_options import CommOptions  # noqa: PLC0415
    from stepmark.core.plan import How, OpHow, Plan, entries  # noqa: PLC0415

    budget = values["budget"]
    values = values | _sized(values, machine)
    budget_s = parse_duration(values["budget"], "budget") if values["budget"] else None
    parts: list[Entry] = []
    notes: list[str] = []
    how = How(op=OpHow(budget_s=budget_s))
    parts += entries(op.layer_cases(values, machine))
    world_size = machine.num_ranks(values["nproc"])
    share_s = parse_duration(budget or ("60s" if machine.device == "cpu" else "240s"), "x") / 4
    count = _num_devices(values, machine)
    if count > 1:
        asked = {
            **_COLLECTIVES[machine.device],
            "names": NAMES,
            "device": values["device"],
            "nproc": str(count),
            "budget": f"{share_s:g}s",
        }
        of_comm = comm.plan(build(CommOptions, asked), machine)
        how, world_size = replace(how, comm=of_comm.how.comm), max(world_size, count)
        parts += of_comm.entries
        notes += of_comm.notes
    if training := _training(values, machine, count, share_s, notes):
        of_train = train.plan(build(TrainOptions, training), machine)
        how = replace(how, train=of_train.how.train)
        world_size = max(world_size, of_train.world_size)
        parts += of_train.entries
    return Plan(
        command="run",
        argv=tuple(sys.argv[1:]),
        options=as_options(values),
        device=machine.device,
        world_size=world_size,
        how=how,
        entries=tuple(replace(entry, position=i) for i, entry in enumerate(parts)),
        notes=tuple(notes),
    )


def _num_devices(values: dict[str, Any], machine: "Machine") -> int:
    """All accelerators, or at least two ranks of a CPU; one of a device that is only named.

    Under an outer launcher the ranks that it started.
    """
    from stepmark.launch import outer_launcher  # noqa: PLC0415

    if outer_launcher.is_rank():
        return outer_launcher.num_ranks()
    if machine.device == "cpu":
        return max(2, machine.num_ranks(values["nproc"]))
    return machine.num_accelerators or 1


def _sized(values: dict[str, Any], machine: "Machine") -> dict[str, Any]:
    """A model that fits: a CPU gets a small one, short sequences and 60 s in all."""
    if machine.device == "cpu":
        chosen = {} if values["model"] else {"model": "gpt2-125m", "seq_len": 512}
        return chosen | ({} if values["budget"] else {"budget": "60s"})
    if values["model"]:
        return {}
    fits = (machine.memory_bytes or 0) >= 40 * GIB
    return {"model": "llama-3.1-8b" if fits else "gpt2-125m"}


def _training(
    values: dict[str, Any], machine: "Machine", count: int, share_s: float, notes: list[str]
) -> dict[str, Any]:
    """Flags of `stepmark train`: FSDP on all accelerators, or a tiny model on the CPU."""
    if machine.device == "cpu":
        return {
            "model": values["model"],
            "scale": "tiny",
            "device": "cpu",
            "nproc": str(count),
            "strategy": "ddp,fsdp" if count > 1 else "single",
            "steps": 10,
            "budget": "6s",
        }
    how = {"device": values["device"], "compile": True, "steps": 10, "timeout": "15m"}
    fitting = that_fits(values["model"], count, machine.memory_bytes or 0)
    if not fitting or fitting["model"] != values["model"]:
        instead = f"{fitting['model']} instead" if fitting else "left out"
        notes.append(f"training {values['model']} does not fit, by estimate: {instead}")
    return fitting and {**fitting, **how, "budget": f"{share_s:g}s"}


def that_fits(model: str, num_ranks: int, memory_bytes: int) -> dict[str, Any]:
    """This model or a smaller one, spread over these accelerators; empty where none fits."""
    from stepmark.app import train_plan  # noqa: PLC0415

    strategy = "fsdp" if num_ranks > 1 else "single"
    for name in (model, *_SMALLER):
        asked = {"model": name, "strategy": strategy, "nproc": str(num_ranks), "compile": True}
        planned = train_plan.cases(build(TrainOptions, asked), "cuda", num_ranks)
        most = min(train_plan.largest_mbs(case, int(memory_bytes * _SHARE)) for case in planned)
        if most:
            return {**asked, "mbs": str(min(most, _MOST_MBS))}
    return {}
