"""Record the messages of a training step of megatron-core 0.16.1, for tests/data/megatron.

Every case is a job with settings of the megatron rules, run by megatron-core on 2 or 4 ranks
(gloo on a CPU, NCCL with --device cuda). After two warm-up steps, every message of one step is
recorded on every rank. One file per case is written.

    pip install --no-deps megatron-core==0.16.1 einops six absl-py
    pip install --no-deps git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.1.0
    python validation/megatron_messages.py tests/data/megatron [CASE ...]

With --checkout, a clone of Megatron-LM at core_v0.16.1 runs the step, so that the messages of
megatron/training are included: data to the tp ranks, and logging.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_cases import CASES, Case

from stepmark.workloads.rules.megatron.settings import Megatron

LIMIT_S, LIMIT_PER_CASE_S = 240, 20
WARM_UP = 2

# Per rank: messages of setup and step in order, matrix products of the step.
Recorded = dict[str, list[list[Any]]]


def written(case: Case, by_rank: Sequence[Recorded], versions: Mapping[str, str]) -> str:
    """Return JSON with each distinct message once, and per rank their numbers in order."""
    groups: dict[str, int] = {}
    rows: dict[str, int] = {}

    def number(message: list[Any]) -> int:
        collective, dtype, count, members, phase, peer = message
        group = groups.setdefault(json.dumps(members), len(groups))
        row = json.dumps([collective, dtype, count, group, phase, peer])
        return rows.setdefault(row, len(rows))

    head = {
        "versions": versions,
        "model": asdict(case.model),
        "mesh": dict(case.mesh),
        "mbs": case.job.mbs,
        "gbs": case.job.gbs,
        "dtype": str(case.dtype),
        "settings": dict(case.settings),
    }
    programs = {
        part: [[number(message) for message in record[part]] for record in by_rank]
        for part in ("setup", "step")
    }
    lines = [f'"case": {json.dumps(head)}', f'"groups": [{", ".join(groups)}]']
    lines.append('"messages": [\n' + ",\n".join(rows) + "\n]")
    for part, numbers in programs.items():
        shown = ",\n".join(json.dumps(row, separators=(",", ":")) for row in numbers)
        lines.append(f'"{part}": [\n{shown}\n]')
    products = [json.dumps(record["matmuls"], separators=(",", ":")) for record in by_rank]
    first = [products.index(text) for text in products]
    lines.append(
        '"matmuls": [\n'
        + ",\n".join(
            text if first[rank] == rank else str(first[rank])
            for rank, text in enumerate(products)
        )
        + "\n]"
    )
    return "{" + ",\n".join(lines) + "}\n"


def record(case: Case, checkout: bool) -> Recorded:
    """Return this rank's messages of setup and of one step, and its products."""
    import megatron_step as step  # noqa: PLC0415 - only ranks need it
    from megatron_recorder import Recorder  # noqa: PLC0415

    recorder, settings = Recorder(), Megatron(**case.settings)
    step.join(case.job, settings)
    trainee = step.build(case.job, settings, recorder)
    setup = recorder.messages()
    for _ in range(WARM_UP + 1):
        recorder.clear()
        if checkout:
            import megatron_training  # noqa: PLC0415

            megatron_training.step(trainee, recorder)
        else:
            trainee.step(recorder)
    return {"setup": setup, "step": recorder.messages(), "matmuls": recorder.matmuls()}


def rank_main(
    names: Sequence[str], directory: Path, device: str, checkout: Path | None
) -> None:
    """Run all cases one after the other, each in new groups; rank 0 writes the files."""
    if checkout:
        sys.path.insert(0, str(checkout))
    import megatron_stand_ins  # noqa: PLC0415
    import megatron_step as step  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    logging.disable(logging.WARNING)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        megatron_stand_ins.on_cpu()
    megatron_stand_ins.replay_compute()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, rank == 0)
    for name in names:
        case_store = dist.PrefixStore(name, store)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=case_store, rank=rank, world_size=world)
        records: list[Any] = [None] * world
        dist.all_gather_object(records, attempted(CASES[name], bool(checkout)))
        if rank == 0:
            problem = next((record for record in records if isinstance(record, str)), "")
            sys.stdout.write(
                f"{name}: {problem or [len(record['step']) for record in records]}\n"
            )
            sys.stdout.flush()
            if not problem:
                versions = {"megatron-core": step.version(), "torch": torch.__version__}
                text = written(CASES[name], records, versions | {"backend": backend})
                (directory / f"{name}.json").write_text(text)
        step.leave()
        dist.destroy_process_group()


def attempted(case: Case, checkout: bool) -> Recorded | str:
    """Return the messages, or the error."""
    try:
        return record(case, checkout)
    except Exception:  # noqa: BLE001 - the next case may work
        return "\n".join(traceback.format_exc().splitlines()[-5:])


def run(names: Sequence[str], world: int, port: int, args: argparse.Namespace) -> int:
    """Run the ranks as processes; kill them at the deadline or when one fails."""
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, __file__, str(args.directory), *names, "--device", args.device]
    if args.checkout:
        command += ["--checkout", str(args.checkout)]
    workers = [
        subprocess.Popen([*command, "--rank"], env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(world)
    ]
    deadline = time.monotonic() + LIMIT_S + LIMIT_PER_CASE_S * len(names)
    while any(worker.poll() is None for worker in workers):
        if time.monotonic() > deadline or any(worker.poll() for worker in workers):
            for worker in workers:
                worker.kill()
        time.sleep(0.2)
    return max(abs(worker.returncode) for worker in workers)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--checkout",
        type=Path,
        help="clone of Megatron-LM whose megatron/training runs the step",
    )
    parser.add_argument("--ranks", type=int, help="only cases with this number of ranks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.names or list(CASES)
    if args.rank:
        rank_main(names, args.directory, args.device, args.checkout)
        return 0
    status = 0
    for number, world in enumerate((args.ranks and [args.ranks]) or (2, 4)):
        chosen = [name for name in names if CASES[name].job.parallel.world_size == world]
        if chosen:
            status |= run(chosen, world, 29631 + number, args)
    return status


if __name__ == "__main__":
    sys.exit(main())
