"""Hosts on this machine: network namespaces with host names and addresses of their own.

A bridge joins them, so that each link can be shaped and cut. Needs root and iproute2.
"""

import subprocess
from dataclasses import dataclass

BRIDGE, GATEWAY = "br-stepmark", "10.99.0.254"


def sh(command: str) -> str:
    """Run a shell command; return its output."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Host:
    number: int

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def address(self) -> str:
        return f"10.99.0.{self.number}"

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs this one on the host."""
        # `ip netns exec` would remount /sys, which slurmd does not survive.
        shell = f'hostname {self.name}; exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts"),
            *("sh", "-c", shell, "sh", *command),
        ]

    def add(self) -> None:
        """Add the host to the bridge."""
        link = f"v{self.number}"
        sh(f"ip netns add {self.name}")
        sh(f"ip link add {link} type veth peer name eth0 netns {self.name}")
        sh(f"ip link set {link} master {BRIDGE} up")
        sh(f"ip -n {self.name} addr add {self.address}/24 dev eth0")
        sh(f"ip -n {self.name} link set eth0 up")
        sh(f"ip -n {self.name} link set lo up")

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        subprocess.run(
            ["ip", "link", "del", f"v{self.number}"], check=False, capture_output=True
        )

    def shape(self, rate_mbit: int) -> None:
        """Limit what the host sends. Latency cannot be shaped: kernels may lack netem."""
        limit = f"tbf rate {rate_mbit}mbit burst 256kb latency 50ms"
        sh(f"ip netns exec {self.name} tc qdisc replace dev eth0 root {limit}")

    def unshape(self) -> None:
        sh(f"ip netns exec {self.name} tc qdisc del dev eth0 root")

    def cut(self) -> None:
        """Take the host's link down."""
        sh(f"ip link set v{self.number} down")

    def mend(self) -> None:
        sh(f"ip link set v{self.number} up")


def up(count: int) -> list[Host]:
    """Make the bridge and so many hosts; remove what an earlier run has left."""
    hosts = [Host(number) for number in range(1, count + 1)]
    down(hosts)
    sh(f"ip link add {BRIDGE} type bridge")
    sh(f"ip addr add {GATEWAY}/24 dev {BRIDGE}")
    sh(f"ip link set {BRIDGE} up")
    for host in hosts:
        host.add()
    return hosts


def down(hosts: list[Host]) -> None:
    for host in hosts:
        host.remove()
    subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)
