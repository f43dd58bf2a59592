"""stepmark workload capture: what PyTorch code does, on fake tensors and fake ranks."""

import contextlib
import sys

from stepmark.capture.watch import Watch
from stepmark.ground.errors import ConfigError
from stepmark.ground.packages import require
from stepmark.ground.waiting import Waiting
from stepmark.workloads import workload_files, workload_show
from stepmark.workloads.workload_files import Target
from stepmark.workloads.workload_options import CaptureOptions, Rows


def run(options: CaptureOptions) -> None:
    """Record a rank's step on fake tensors and fake ranks; without -o, print it."""
    require("torch")
    from stepmark.capture.run import capture_file  # noqa: PLC0415 # it loads torch

    file, colon, function = options.file.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise ConfigError("capture", options.file, "FILE.py:FUNCTION")
    world_size = options.world_size
    rank = options.rank
    if not 0 <= rank < world_size:
        raise ConfigError("rank", rank, f"from 0 to {world_size - 1}")
    watch = Watch(
        options.timeout, lambda text: sys.stderr.write(f"{text}\n"), ends_process=True
    )
    counts = options.tokens_per_expert
    # The user's file may print.
    with contextlib.redirect_stdout(sys.stderr), Waiting(f"capturing rank {rank} of {file}"):
        workload = capture_file(
            options.file, world_size, rank, tokens_per_expert=counts, watch=watch
        )
    if options.out:
        for note in workload.notes:
            sys.stderr.write(f"# {note}\n")
        workload_files.deliver(workload, Target(out=options.out))
    else:
        workload_show.show(workload, Rows())
