"""Systems of hosts and their networks: those of data/networks.toml, and files of users."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.package_data import data_text
from stepmark.ground.read_text import read_toml
from stepmark.ground.units import parse_duration
from stepmark.model.device import DeviceSpec
from stepmark.model.network import Law, Network, Reduction, Tier
from stepmark.model.network_options import NetworkChoice, NetworkOptions, parse_bits

IN_HOST = 8  # GPUs
_LEAF = "leaf"
_OUTSIDE = ("nics", "nic", "latency", "oversubscription")  # of links between hosts
_CHANGES = ("gpus_per_host", *_OUTSIDE)


# Whole numbers but for the last one, from 1 on.
_MOST = {"nics": 1024, "gpus_per_host": 1024, "leaf_gpus": 2**24, "oversubscription": 1000.0}
_TEXTS = ("nic", "latency", "law", "device", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Hosts with NICs. Keys of networks.toml, which explains them, and of a user's file.

    nic: bits/s such as "400G". latency: of a hop between hosts, beyond that of NCCL's tuner.
    oversubscription: of links above a leaf, or of all NICs where leaf_gpus is not known.
    """

    nics: int
    nic: str
    gpus_per_host: int = IN_HOST
    leaf_gpus: int | None = None
    latency: str | None = None
    oversubscription: float = 1.0
    law: str = "rdma"
    device: str = ""
    aliases: tuple[str, ...] = ()
    source: str = ""


def _system(table: Mapping[str, Any]) -> System:
    """Return the system of a table. Raise ValueError that names the malformed key."""
    if unknown := table.keys() - {field.name for field in fields(System)}:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
    if missing := {"nics", "nic"} - table.keys():
        raise ValueError(f"missing {', '.join(sorted(missing))}")
    for name in table.keys() & _MOST.keys():
        most, value = _MOST[name], table[name]
        kinds = (int,) if isinstance(most, int) else (int, float)
        if type(value) not in kinds or not 1 <= value <= most:
            raise ValueError(f"{name} {value!r} is not a number from 1 to {most}")
    for name in table.keys() & {*_TEXTS}:
        if not isinstance(table[name], str):
            raise ValueError(f"{name} {table[name]!r} is not a text")
    return System(**{**table, "aliases": tuple(table.get("aliases", ()))})


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(data_text("networks.toml"))


@cache
def load_systems() -> Mapping[str, System]:
    """Return the systems of networks.toml by name."""
    return {name: _system(table) for name, table in _tables()["network"].items()}


@cache
def load_laws() -> Mapping[str, Law]:
    """Return the constants of collectives by name."""
    return {
        name: Law(
            latency=law["latency"],
            transfer=law.get("transfer", 1.0),
            ramp=law["ramp"],
            shares={
                kind: {int(ranks): share for ranks, share in shares.items()}
                for kind, shares in law.get("shares", {}).items()
            },
        )
        for name, law in _tables()["law"].items()
    }


def law_of_links(device: DeviceSpec) -> Law:
    """Return the constants of collectives inside a domain of the device's links."""
    kind = device.link_kind or ""
    for name, law in _tables()["law"].items():
        if any(map(kind.startswith, law.get("links", ()))):
            return load_laws()[name]
    return Law()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSystem:
    """A system and how a sentence names it."""

    system: System
    name: str
    about: str = ""  # why it is this one


def find_system(name: str) -> NamedSystem:
    """Return a system by name or alias, or that of a file. Raises ConfigError."""
    alias = name.strip().lower()
    for key, system in load_systems().items():
        if alias in (key, *system.aliases):
            return NamedSystem(system=system, name=key)
    if name.endswith(".toml") or Path(name).is_file():
        return NamedSystem(system=_read(name), name=name)
    others = [alias for system in load_systems().values() for alias in system.aliases]
    raise not_one_of("network", name, [*load_systems(), *others], " or a TOML file")


def _read(name: str) -> System:
    table = read_toml(Path(name), "network")
    try:
        system = _system(table)
    except ValueError as error:
        raise ConfigError("network", name, f"a file of a network: {error}") from None
    if system.law not in load_laws():
        raise not_one_of(f"{name}: law", system.law, [*load_laws()])
    parse_bits(system.nic, f"{name}: nic")
    return system


def network_of(
    device: DeviceSpec, num_gpus: int, options: NetworkOptions | None = None
) -> Network | None:
    """Return the network of a job of this many GPUs; None where its links are not known.

    Without a network that is given, a job inside a host has the links of its device, and a
    larger one those of the system in which the device is usually sold. Raises ConfigError.
    """
    given = options or NetworkChoice()
    if device.link_bytes_per_s is None:
        if given.network:
            raise ConfigError("device", device.key, "a device whose links are known")
        return None
    inner = _inner(device, IN_HOST)
    reduction = given.reduction
    if reduction is None:
        reduction = Reduction.NVLS if "nvls" in inner[0].law.shares else Reduction.NONE
    bridges = ""
    if device.pcie_bytes_per_s:
        bridges = f"bridges that join {device.link_domain} GPUs each are assumed, PCIe beyond"
    named = _system_of(device, num_gpus, given)
    if named is None:
        return Network(
            name=device.key,
            tiers=inner,
            gpus_per_host=inner[-1].num_gpus or IN_HOST,
            reduction=reduction,
            num_inner=len(inner),
            about=f"{device.key}: {bridges}" if bridges else "",
        )
    system = _changed(named.system, given)
    inner = _inner(device, system.gpus_per_host)
    _refuse_unused(system, inner[-1], num_gpus, given)
    tiers = (*inner, *_outside(system))
    _check_sizes(tiers, named.name)
    about = f"{named.name}: {_figures(system)}{named.about}"
    return Network(
        name=named.name,
        tiers=tiers,
        gpus_per_host=system.gpus_per_host,
        reduction=reduction,
        num_inner=len(inner),
        about=f"{about}; {bridges}" if bridges else about,
    )


def _inner(device: DeviceSpec, gpus_per_host: int) -> tuple[Tier, ...]:
    """Return the links inside a host or domain: the device's, and beyond bridges PCIe."""
    assert device.link_bytes_per_s
    links = Tier(
        name=device.link_kind or "links",
        num_gpus=device.link_domain or gpus_per_host,
        bytes_per_s=device.link_bytes_per_s,
        law=law_of_links(device),
    )
    if device.pcie_bytes_per_s is None:
        return (links,)
    pcie = replace(
        links,
        name="PCIe",
        num_gpus=gpus_per_host,
        bytes_per_s=device.pcie_bytes_per_s,
        law=load_laws()["pcie-bridged"],
    )
    return replace(links, num_gpus=min(device.link_domain or 1, gpus_per_host)), pcie


def _check_sizes(tiers: Sequence[Tier], name: str) -> None:
    """Raise ConfigError where units of a tier do not divide those of the next one."""
    for lower, upper in pairwise(tiers):
        if lower.num_gpus and upper.num_gpus and upper.num_gpus % lower.num_gpus:
            size = "leaf_gpus" if upper.name == _LEAF else "gpus_per_host"
            allowed = f"one whose {size} ({upper.num_gpus}) is a multiple of the"
            allowed += f" {lower.num_gpus} GPUs that {lower.name} joins"
            raise ConfigError("network", name, allowed)


def _refuse_unused(system: System, inside: Tier, num_gpus: int, given: NetworkOptions) -> None:
    """Raise ConfigError for an option of links that no message of the job crosses."""
    joined = num_gpus <= (inside.num_gpus or 0)
    for name in _OUTSIDE:
        if getattr(given, name) is not None and joined:
            allowed = (
                f"left out: {inside.name} joins all {num_gpus} GPUs of the job, which send "
                "nothing between hosts"
            )
            raise ConfigError(name, getattr(system, name), allowed)
    leaf = system.leaf_gpus
    if given.oversubscription is not None and leaf and num_gpus <= leaf:
        allowed = f"left out: the job's {num_gpus} GPUs are below one leaf switch, of {leaf}"
        raise ConfigError("oversubscription", f"{given.oversubscription:g}", allowed)


def _system_of(device: DeviceSpec, num_gpus: int, given: NetworkOptions) -> NamedSystem | None:
    """Return the system that is given, or the usual one of the device where one is needed."""
    if given.network:
        return find_system(given.network)
    is_changed = any(getattr(given, name) is not None for name in _CHANGES)
    if num_gpus <= (_inner(device, IN_HOST)[-1].num_gpus or IN_HOST) and not is_changed:
        return None
    for name, system in load_systems().items():
        if system.device == device.key:
            about = f"; the usual one of {device.key}, because no --network is given"
            return NamedSystem(system=system, name=name, about=about)
    if given.nics and given.nic:
        system = System(nics=given.nics, nic=f"{8 * given.nic / 1e9:g}G")
        return NamedSystem(system=system, name="options")
    allowed = f"one of {', '.join(load_systems())}, a TOML file, or --nics and --nic"
    raise ConfigError("network", None, f"{allowed}: {device.key} has no usual one")


def _figures(system: System) -> str:
    """Return what a host has, in words."""
    gpus = "1 GPU" if system.gpus_per_host == 1 else f"{system.gpus_per_host} GPUs"
    text = f"{gpus} and {system.nics} x {system.nic} a host"
    if system.oversubscription > 1:
        above = " above a leaf" if system.leaf_gpus else ""
        text += f", oversubscribed {system.oversubscription:g} times{above}"
    return text


def _changed(system: System, given: NetworkOptions) -> System:
    """Return the system with what options change."""
    changes: dict[str, Any] = {name: getattr(given, name) for name in _CHANGES}
    if given.nic is not None:
        changes["nic"] = f"{8 * given.nic / 1e9:g}G"
    if given.latency is not None:
        changes["latency"] = f"{given.latency!r}s"
    if given.gpus_per_host and system.leaf_gpus:  # a leaf has ports for as many hosts
        hosts = system.leaf_gpus // system.gpus_per_host
        changes["leaf_gpus"] = hosts * given.gpus_per_host
    known = {name: value for name, value in changes.items() if value is not None}
    return replace(system, **known)


def _outside(system: System) -> tuple[Tier, ...]:
    """Return the tiers outside the links of the GPUs."""
    rate = system.nics * parse_bits(system.nic, "nic") / system.gpus_per_host
    hop_s = parse_duration(system.latency, "latency") if system.latency else 0.0
    whole = Tier(
        name="network",
        num_gpus=None,
        bytes_per_s=rate / system.oversubscription,
        law=load_laws()[system.law],
        hop_s=hop_s,
    )
    if system.leaf_gpus is None:
        return (whole,)
    leaf = replace(whole, name=_LEAF, num_gpus=system.leaf_gpus, bytes_per_s=rate)
    return leaf, replace(whole, name="spine")
