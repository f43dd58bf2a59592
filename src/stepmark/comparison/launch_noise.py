"""Noise of one launch of a collective on other machines: data/launch_noise.toml.

It is that of repeated tables and runs (validation/launch_noise.py), for tables of one value a
row and for sweeps of so few rounds that they do not show their own.
"""

import tomllib
from dataclasses import dataclass
from functools import cache

from stepmark.comparison.comparison import Series
from stepmark.ground.package_data import data_text
from stepmark.ground.reading import Table
from stepmark.ground.stats import Z_95, summarize
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
    noises = tomllib.loads(data_text("launch_noise.toml"))["noise"]
    return tuple(LaunchNoise(**entry) for entry in noises)


def noise_of(table: Table, size_bytes: int | None) -> Variance | None:
    """Return the variance of a row of a table of nccl-tests; None if no such was repeated.

    A table that does not state its hosts counts as one of several.
    """
    if size_bytes is None or table.tool != "nccl-tests":
        return None
    return _find(table.method, "1" if table.num_hosts == 1 else "several", size_bytes)


def noise_on_host(series: Series) -> Variance | None:
    """Return the variance of a launch of a run on one host; None if no such was repeated.

    The error of its own samples' median is added: this machine may be noisier.
    """
    if series.size_bytes is None or series.fields.get("device_type") != "cuda":
        return None
    noise = _find(str(series.fields.get("method")), "1", series.size_bytes)
    errors = [summarize(values).ci_rel / Z_95 for values in series.launches.values()]
    return noise.plus(max(error**2 for error in errors)) if noise and errors else None


def _find(method: str, hosts: str, size_bytes: int) -> Variance | None:
    for noise in load_noises():
        is_like = (noise.method, noise.hosts) == (method, hosts)
        if is_like and noise.from_bytes <= size_bytes <= noise.up_to_bytes:
            return Variance(noise.sd**2, noise.df)
    return None
