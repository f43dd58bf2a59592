"""A module of the tests, run under torchrun with ranks of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def said_on_ranks(module: str, num_ranks: int, *, timeout_s: float) -> str:
    """What a module ("tests.bench.two_ranks") writes to stdout; fails with its errors."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", module),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",  # or two cores fight
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-500:]}\n{done.stderr[-4000:]}"
    return done.stdout
