"""Noise of one launch of a collective, for tables of one value a row: data/launch_noise.toml.

It is that of other machines, whose tables were repeated (validation/launch_noise.py).
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from stepmark.ground.reading import Table
from stepmark.ground.variance import Variance


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchNoise:
    """Standard deviation of the logarithm of a time, for sizes from and up to these."""

    method: str
    hosts: str  # "1" or "several"
    from_bytes: int
    up_to_bytes: int
    sd: float
    df: int
    source: str


@cache
def load_noises() -> tuple[LaunchNoise, ...]:
    """Return the noise of each method, number of hosts and range of sizes."""
    text = files("stepmark").joinpath("data", "launch_noise.toml").read_text(encoding="utf-8")
    return tuple(LaunchNoise(**entry) for entry in tomllib.loads(text)["noise"])


def noise_of(table: Table, size_bytes: int | None) -> Variance | None:
    """Return the variance of a row of a table of nccl-tests; None if no such was repeated.

    A table that does not state its hosts counts as one of several.
    """
    if size_bytes is None or table.tool != "nccl-tests":
        return None
    hosts = "1" if table.num_hosts == 1 else "several"
    for noise in load_noises():
        is_like = (noise.method, noise.hosts) == (table.method, hosts)
        if is_like and noise.from_bytes <= size_bytes <= noise.up_to_bytes:
            return Variance(noise.sd**2, noise.df)
    return None
