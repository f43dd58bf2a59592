"""The launcher process: torch.distributed.run on this host, in a session of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepmark.launch.death import tie_child


def command(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    module: str = "stepmark",
    options: Sequence[str] = (),
) -> list[str]:
    """torchrun's own options, then `-m MODULE ARGUMENTS` as each rank is to run it."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        *options,
        "-m",
        # torchrun reads abbreviated options anywhere before this: --m would be ambiguous.
        "--",
        module,
        *arguments,
    ]


def environment(num_ranks: int, more: Mapping[str, str]) -> dict[str, str]:
    """Ours and more; cores shared among ranks; this package importable in them."""
    found = os.environ | more
    found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return found


def start(
    command: Sequence[str], environment: Mapping[str, str], *, death: signal.Signals
) -> "subprocess.Popen[bytes]":
    """The launcher gets `death` when the calling thread ends.

    A terminal sends Ctrl-C to its whole foreground group. In a session of its own the
    launcher gets what we send it, once; its ranks have sessions of their own anyway.
    """
    return subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        # Two system calls, loaded before the fork: safe even where we have threads.
        preexec_fn=tie_child(death),  # noqa: PLW1509
    )
