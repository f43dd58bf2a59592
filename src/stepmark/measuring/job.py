"""The hosts of a job, as the script of its launcher names them."""

import os
import socket
import sys
from dataclasses import dataclass

from stepmark.ground.errors import ConfigError
from stepmark.ground.outer_launcher import BIND, HOSTS, is_agent

# Set by the script that `stepmark launch` prints. One process per host, its agent, starts and
# watches the ranks of its host; the agent of the first host leads.
HOST_RANK = "STEPMARK_HOST_RANK"
NPROC = "STEPMARK_NPROC"
PORT = "STEPMARK_PORT"
KEY = "STEPMARK_KEY"
KEY_FD = "STEPMARK_KEY_FD"
JOIN_S = "STEPMARK_JOIN_S"
# Slurm last: in its jobs mpirun's processes have its variables, too.
_RANKS = (HOST_RANK, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_MAX_KEY = 1024
_DEFAULT_JOIN_S = 300.0  # hosts of a large job import at different speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Hosts of a job by host rank; `rank` is that of this one.

    key: secret by which the agents of a job recognise each other. nproc: ranks per host.
    """

    hosts: tuple[str, ...]
    rank: int
    port: int
    key: bytes
    nproc: str | None
    join_s: float  # time in which all hosts must have joined

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)


def listen(port: int) -> socket.socket:
    """Return a socket that listens on all addresses. Raises ConfigError for a used port."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=1024, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise ConfigError(PORT, port, f"a free port ({error.strerror})") from None


def _addresses() -> dict[str, set[str]]:
    """Return the addresses of each network interface."""
    import psutil  # noqa: PLC0415 - 7 ms, for jobs of several hosts alone

    return {
        interface: {each.address for each in addresses}
        for interface, addresses in psutil.net_if_addrs().items()
    }


def network_environment(address: str, name: str) -> dict[str, str]:
    """Return what ranks need to reach other hosts through the interface of this address.

    Gloo would choose the interface of the host's name, which may be the loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    plain = address.removeprefix("::ffff:")
    for interface, addresses in _addresses().items():
        if any(address.partition("%")[0] == plain for address in addresses):
            sys.stderr.write(f"# host {name}: GLOO_SOCKET_IFNAME={interface} ({plain})\n")
            return {"GLOO_SOCKET_IFNAME": interface}
    return {}


def current() -> Job | None:
    """Return the job that this process is an agent of. Raises ConfigError."""
    if not is_agent():
        return None
    hosts = tuple(name.strip() for name in os.environ[HOSTS].split(","))
    if not all(hosts) or len(set(hosts)) < len(hosts):
        raise ConfigError(HOSTS, os.environ[HOSTS], "different host names, with commas between")
    if len(hosts) == 1:
        rank = 0
        port = 0
        key = b""
    else:
        rank = _host_rank(hosts)
        port = _number(PORT, 1, 65_535)
        if len(key := _key().encode()) < 16:
            raise ConfigError(KEY, None, "16 random characters or more, the same on all hosts")
    if (bind := os.environ.get(BIND)) not in (None, "closest"):
        raise ConfigError(BIND, bind, "closest, or unset")
    nproc = os.environ.get(NPROC)
    join_s = float(_number(JOIN_S, 1, 86_400)) if JOIN_S in os.environ else _DEFAULT_JOIN_S
    return Job(hosts=hosts, rank=rank, port=port, key=key, nproc=nproc, join_s=join_s)


def _key() -> str:
    """Return the key of the environment, or the line that an open descriptor has.

    The descriptor is read once. Ranks, which have the key in their environment, get it from us.
    """
    if (descriptor := os.environ.pop(KEY_FD, None)) is not None:
        try:
            with open(int(descriptor), encoding="ascii") as file:
                os.environ[KEY] = file.readline(_MAX_KEY).strip()
        except (OSError, ValueError):
            allowed = "a descriptor that is open, with the key as a line of ASCII"
            raise ConfigError(KEY_FD, descriptor, allowed) from None
    return os.environ.get(KEY, "")


def _host_rank(hosts: tuple[str, ...]) -> int:
    for name in _RANKS:
        if name in os.environ:
            return _number(name, 0, len(hosts) - 1)
    own = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    own |= set().union(*_addresses().values())
    places = [place for place, host in enumerate(hosts) if host in own]
    if not places:  # the list has full names, this host does not
        places = [place for place, host in enumerate(hosts) if host.partition(".")[0] in own]
    if len(places) != 1:
        allowed = f"the index of this host among the {len(hosts)} of {HOSTS}"
        why = "several are its names" if places else "its name is not one of them"
        raise ConfigError(HOST_RANK, None, f"{allowed}: {why}")
    return places[0]


def _number(name: str, low: int, high: int) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError(name, text, f"from {low} to {high}")
    return int(text)
