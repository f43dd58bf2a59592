"""Handlers of lines on the topology: speeds of adapters, their distance from GPUs, graphs."""

import re

from stepmark.findings.log_facts import PATHS, AdapterSpeed, NicPath
from stepmark.job_logs.nccl_log.collector import Collector
from stepmark.job_logs.nccl_log.lines import LogMessage

_PORT = re.compile(
    r"^NET/IB\w* ?: \[\d{1,4}\] ([\w.\-]+):\w*:?\d{1,4}/\w+ .*?speed=(\d{1,9})\b"
)
_NODE = re.compile(
    r"^ *\+ NET\[[\d.]{1,12}\] - (NET/(?:[0-9a-f]{1,16}-)?([0-9a-f]{1,16})) "
    r"\(.*/([\d.]{1,12})\)$"
)
_FROM_GPU = re.compile(r"^(GPU/[0-9a-f\-]{1,40}) ?:(.*)$")
_TO_NET = re.compile(r"NET/\S{1,40} \(\d+/[\d.]+/([A-Z0-9]{2,3})\)")
_GRAPH = re.compile(
    r"^Pattern (\d{1,9}), crossNic \d+, nChannels (\d{1,9}), "
    r"(?:bw|speed) [\d.]{1,20}/[\d.]{1,20}, type (\w+)/(\w+)"
)
_RING = "4"  # pattern
_GBIT_PER_MBIT = 1e-3
_GBIT_PER_GB = 8.0


def port(collector: Collector, message: LogMessage) -> None:
    """Record NET/IB: [0] mlx5_0:uverbs0:1/IB provider=Mlx5 speed=400000 (Mb/s) ..."""
    if match := _PORT.match(message.text):
        speed = AdapterSpeed(message.host, match[1], None, int(match[2]) * _GBIT_PER_MBIT)
        collector.count(collector.adapter_speeds, speed, message)


def node(collector: Collector, message: LogMessage) -> None:
    """Record + NET[25.0] - NET/0-c (0/guid/1/25.000000) of the topology, in GB/s."""
    match = _NODE.match(message.text)
    if match and match[3].count(".") == 1:
        gbit = float(match[3]) * _GBIT_PER_GB
        speed = AdapterSpeed(message.host, match[1], int(match[2], 16), gbit)
        collector.count(collector.adapter_speeds, speed, message)


def paths(collector: Collector, message: LogMessage) -> None:
    """Record the nearest of GPU/84000 :GPU/2000 (3/6.0/SYS) NET/0 (4/1.2/SYS) NET/2 ..."""
    if match := _FROM_GPU.match(message.text):
        known = [PATHS.index(path) for path in _TO_NET.findall(match[2]) if path in PATHS]
        if known:
            path = NicPath(message.host, match[1], PATHS[min(known)])
            collector.count(collector.nic_paths, path, message)


def graph(collector: Collector, message: LogMessage) -> None:
    """Record Pattern 4, crossNic 0, nChannels 12, bw 30.0/30.0, type NVL/PIX, ..."""
    match = _GRAPH.match(message.text)
    handle = collector.communicators.latest(message)
    if match and match[1] == _RING and match[2] != "0" and match[4] in PATHS:
        path = NicPath(message.host, "", match[4])
        collector.count(collector.nic_paths, path, message)
    if match and handle:
        handle.over_nvlink = handle.over_nvlink or match[3] == "NVL"
