"""stepmark run: the main job. What this machine is, what it does, and a report."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepmark.core.errors import worst
from stepmark.core.units import parse_duration

if TYPE_CHECKING:
    from stepmark.core.case import OpCase

GIB = 2**30
NAMES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


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
    from stepmark.cli import comm, op, run_training, session, train  # noqa: PLC0415
    from stepmark.launch import torchrun  # noqa: PLC0415

    values = _values(model, device, nproc, budget, out)
    kind = session.device_type(values)
    values |= _sized(values, kind)
    ranks = session.num_ranks(values, kind)
    cases = op.layer_cases(values, kind, ranks)
    if dry_run:
        op.listed(cases, values)
        then = (
            [comm.as_arguments(NAMES, asked)] if (asked := _collectives(values, kind)) else []
        )
        then += [train.as_arguments(how)] if (how := run_training.flags(values, kind)) else []
        for words in then:
            typer.echo("then: stepmark " + " ".join(words), err=True)
        return
    session.check_outputs(values)
    if torchrun.is_rank():
        raise typer.Exit(_as_rank(cases, values, kind))
    code, path = _operators_of(cases, values, kind, ranks)
    if path and code not in (2, 130, 143) and (asked := _collectives(values, kind)):
        code = worst(code, comm.beside_operators(NAMES, asked, path))
    if path and code not in (2, 130, 143) and (how := run_training.flags(values, kind)):
        code = worst(code, train.beside_operators(how, path))
    raise typer.Exit(_show(path, code) if path else code)


def _operators_of(
    cases: "list[OpCase]", values: dict[str, Any], kind: str, ranks: int
) -> tuple[int, Path | None]:
    """Here, or on ranks of this host; the exit code and the run they wrote."""
    from stepmark.launch import torchrun  # noqa: PLC0415
    from stepmark.store.reader import list_runs  # noqa: PLC0415

    folder = Path(values["out"])
    before = set(list_runs(folder)) if folder.is_dir() else set()
    code = torchrun.run(sys.argv[1:], ranks) if ranks > 1 else _as_rank(cases, values, kind)
    made = sorted(set(list_runs(folder)) - before)
    return code, made[-1] if made else None


def _as_rank(cases: "list[OpCase]", values: dict[str, Any], kind: str) -> int:
    """Measure operators as one rank, or the only one. An outer launcher gets a page, too."""
    from stepmark.app import doctor  # noqa: PLC0415
    from stepmark.bench.context import make_context  # noqa: PLC0415
    from stepmark.cli import session  # noqa: PLC0415
    from stepmark.core.verb_options import DoctorOptions  # noqa: PLC0415
    from stepmark.launch import torchrun  # noqa: PLC0415

    context = make_context(kind)
    try:
        if context.ranks.rank == 0:
            doctor.run(DoctorOptions())
        outcome = session.measure(cases, values, context)
    finally:
        context.ranks.close()
    if outcome is None:
        return 0
    outer = torchrun.is_rank() and not torchrun.has_parent()
    return _show(outcome.path, outcome.exit_code) if outer else outcome.exit_code


def _show(path: Path, code: int) -> int:
    """Tables, summary and page of a run; the exit code."""
    from stepmark.app import report  # noqa: PLC0415
    from stepmark.app.view import console, show_rows, view  # noqa: PLC0415
    from stepmark.cli import session  # noqa: PLC0415
    from stepmark.report import comm_summary, summary, training_summary  # noqa: PLC0415

    seen = view(path)
    page = report.write(path)
    show_rows(seen)
    lines = comm_summary.comm_lines(seen.comm_rows)
    for line in (*lines, *training_summary.train_lines(seen.train_rows)):
        console().print(line, markup=False, highlight=False, soft_wrap=True)
    summary.terminal_summary(seen.run, seen.rows, console(), report=page)
    return code or session.exit_code(seen)


def _collectives(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """Flags for this machine: all its accelerators, or two ranks of its CPU. None: empty."""
    import torch  # noqa: PLC0415

    count = torch.cuda.device_count() if kind == "cuda" else 2
    if count < 2:
        return {}
    of_kind = {
        "cuda": {"begin": "4K", "end": "1G", "factor": 8.0, "dtype": "bf16"},
        "cpu": {"begin": "4K", "end": "4M", "factor": 32.0},
    }
    share_s = parse_duration(values["budget"] or "240s", "budget") / 4
    return {
        **of_kind[kind],
        "device": kind,
        "nproc": str(count),
        "budget": f"{share_s:g}s",
    }


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
