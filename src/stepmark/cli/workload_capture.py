"""stepmark workload capture FILE.py:FUNCTION: real code under fake tensors to a workload."""

import contextlib
import sys

from stepmark.cli import workload_output
from stepmark.cli.options import Values
from stepmark.core.errors import ConfigError


def capture(target: str, values: Values) -> None:
    """Record a rank's step and write it; without -o, show it. Raises ConfigError."""
    file, colon, function = target.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise ConfigError("capture", target, "FILE.py:FUNCTION")
    world_size, rank = values.get("world_size"), values.get("rank") or 0
    if world_size is None or not 1 <= world_size <= 2**20:
        shown = "missing" if world_size is None else world_size
        raise ConfigError("world-size", shown, "from 1 to 1048576")
    if not 0 <= rank < world_size:
        raise ConfigError("rank", rank, f"from 0 to {world_size - 1}")
    from stepmark.bench.capture.run import capture_file  # noqa: PLC0415

    # What the file prints is no part of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        made = capture_file(target, world_size, rank)
    if values.get("out"):
        workload_output.deliver(made, values)
        return
    from stepmark.cli import workload_show  # noqa: PLC0415

    workload_show.show(made, values)
