"""Options that choose a network, of every verb that has one."""

from dataclasses import dataclass
from typing import Annotated

from stepmark.ground.errors import ConfigError
from stepmark.ground.option_groups import Degree
from stepmark.ground.options import Duration, Reader, between, flag, group
from stepmark.model.network import Reduction

_BITS = {"g": 1e9, "t": 1e12}


def parse_bits(text: str, field: str) -> float:
    """Parse the speed of a NIC, such as 400G (bits/s), into bytes/s."""
    squeezed = text.strip().lower().removesuffix("/s").removesuffix("bit").removesuffix("b")
    try:
        bytes_per_s = float(squeezed[:-1]) * _BITS[squeezed[-1:]] / 8
    except (ValueError, KeyError):
        bytes_per_s = 0.0
    if not 1e6 <= bytes_per_s <= 1e14:
        raise ConfigError(field, text, "bits per second of a NIC, such as 400G")
    return bytes_per_s


Bits = Annotated[
    float,
    Reader(read=parse_bits, show=lambda value: f"{8 * value / 1e9:g}G", metavar="400G"),
]


@group
class NetworkOptions:
    """Prediction."""

    network: str | None = flag(
        "links between hosts: dgx-h100, p5, ... or a file [the device's]",
        metavar="NAME|FILE",
        names="network",
    )
    gpus_per_host: Degree | None = flag("GPUs of a host [the network's]", rare=True)
    nics: Degree | None = flag("NICs of a host [the network's]", rare=True)
    nic: Bits | None = flag("speed of a NIC in bits per second [the network's]", rare=True)
    latency: Duration | None = flag(
        "of a hop between hosts, beyond what NCCL's tuner counts [0]", rare=True
    )
    oversubscription: Annotated[float, between(1.0, 1000.0)] | None = flag(
        "of the links above a leaf switch, or of NICs where leaves are not known [1]",
        rare=True,
    )
    reduction: Reduction | None = flag(
        "switches that sum an all-reduce: none, nvls or sharp [nvls where the GPUs have it]",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class NetworkChoice(NetworkOptions):
    """The options of a network alone."""
