"""Processes that a torn line seems to name: their name is a part of another one's."""

from collections.abc import Mapping

# A process writes at least so many times as many lines as torn ones of it look like another.
MIN_RATIO = 8


def torn_names(num_lines: Mapping[str, int]) -> set[str]:
    """Return the processes (host:pid) that only torn lines name, given the lines of each.

    A line cut in front names a host that ends like the right one; one that begins inside
    another line names a host that ends with the right one.
    """
    by_pid: dict[str, dict[str, int]] = {}
    for process, lines in num_lines.items():
        host, _, pid = process.rpartition(":")
        by_pid.setdefault(pid, {})[host] = lines
    torn = set()
    for pid, hosts in by_pid.items():
        frequent = sorted(((lines, host) for host, lines in hosts.items()), reverse=True)
        for host, lines in hosts.items():
            for others, other in frequent:
                if others < lines * MIN_RATIO:
                    break
                is_part = other.endswith(host) or host.endswith(other)
                if host and host != other and is_part:
                    torn.add(f"{host}:{pid}")
                    break
    return torn
