"""What a script of several hosts runs, one after the other: one verb, or a check of nodes."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepmark.ground.options import options
from stepmark.ground.units import parse_duration
from stepmark.launching.launch_options import LaunchOptions
from stepmark.nodes.node_options import (
    LIST_S,
    MOST_FOR_ALL_PAIRS,
    TIMEOUT_S,
    DoctorOptions,
    check_budget,
)

# Options of `doctor --nodes` that hosts measure by; the others are the verdict's.
_MEASURED_BY = ("launches", "timeout")
_NETWORK_BYTES = {"cuda": "64M", "cpu": "1M"}
_NETWORK_LAUNCHES = {"cuda": "5", "cpu": "2"}
_NETWORK_BUDGET_S = 300.0  # pairs with a host that hangs take a minute each
_STARTS_S = 300.0  # of all steps: processes on all hosts, communicators, the verdict
_TIME_STEP_S = 300  # to which a time limit is rounded up
# Sets the option of the verdict that names the network's run, which may be missing.
NETWORK = (
    'network=(); for run in "$out"/network/*/run.json; do '
    'if [ -f "$run" ]; then network=(--pairs "${run%/*}"); fi; done'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a script. arguments: as a shell reads them, with "$out" for the folder.

    nproc: ranks of each host, where they are not those of the options.
    """

    why: str
    arguments: str
    on_all_hosts: bool = True
    nproc: int | None = None


def check_steps(launch: LaunchOptions, num_hosts: int) -> list[Step]:
    """Return the steps of `doctor --nodes`: devices, the network, the verdict.

    Each host checks its devices by itself, so that one that hangs delays no other.
    """
    given = _given(launch.words[1:])
    device = "cuda" if launch.gpus_per_node else "cpu"
    ranks = ["--device", device]
    if launch.nproc_per_node:
        ranks += ["--nproc", str(launch.nproc_per_node)]
    budget_s = _budget_s(given, num_hosts)
    measured_by = ["--budget", f"{budget_s:g}s"] if budget_s else []
    measured_by += [word for name in _MEASURED_BY for word in given.get(name, ())]
    judged_by = [
        word
        for name, words in given.items()
        for word in words
        if name not in (*_MEASURED_BY, "budget", "nodes")
    ]
    if launch.gpus_per_node:
        judged_by += ["--gpus-per-node", str(launch.gpus_per_node)]
    steps = [
        Step(
            why="Each host checks its devices.",
            arguments=f'doctor --nodes --out "$out" {shlex.join([*ranks, *measured_by])}',
        )
    ]
    if num_hosts > 1:
        size = _NETWORK_BYTES[device]
        pairs = ["-b", size, "-e", size, "--device", device]
        pairs += given.get("launches", ["--launches", _NETWORK_LAUNCHES[device]])
        pairs += ["--budget", f"{budget_s or _NETWORK_BUDGET_S:g}s"]
        pairs += ["--partners", "2"] if num_hosts > MOST_FOR_ALL_PAIRS else []
        steps.append(
            Step(
                why="The network between hosts, by one rank of each.",
                arguments=f'comm p2p-matrix --out "$out"/network {shlex.join(pairs)}',
                nproc=1,
            )
        )
    verdict = f'doctor --nodes --from "$out" --expect "$hosts" {shlex.join(judged_by)}'
    steps.append(
        Step(
            why="The verdict on all hosts.",
            arguments=f'{verdict.rstrip()} "${{network[@]}}"',
            on_all_hosts=False,
        )
    )
    return steps


def time_limit_s(launch: LaunchOptions, num_hosts: int) -> int:
    """Return the time within which `doctor --nodes` ends, even if a device hangs."""
    given = _given(launch.words[1:])
    timeout_s = _duration_s(given, "timeout") or TIMEOUT_S
    network_s = _budget_s(given, num_hosts) or _NETWORK_BUDGET_S
    total_s = LIST_S + 2 * timeout_s + _STARTS_S + (network_s if num_hosts > 1 else 0.0)
    return math.ceil(total_s / _TIME_STEP_S) * _TIME_STEP_S


def _budget_s(given: Mapping[str, Sequence[str]], num_hosts: int) -> float | None:
    """Return --budget of each step that measures: devices and the network have half of it."""
    budget_s = _duration_s(given, "budget")
    num_parts = min(num_hosts, 2)
    timeout_s = _duration_s(given, "timeout")
    check_budget(budget_s, timeout_s, typed=_value(given, "budget"), num_parts=num_parts)
    return budget_s and budget_s / num_parts


def _duration_s(given: Mapping[str, Sequence[str]], name: str) -> float | None:
    return parse_duration(_value(given, name), name) if name in given else None


def _value(given: Mapping[str, Sequence[str]], name: str) -> str:
    return given[name][-1].rpartition("=")[2] if name in given else ""


def _given(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of each option of `doctor`, by its name. They were checked before."""
    by_spelling = {word: option for option in options(DoctorOptions) for word in option.words}
    given: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option = by_spelling[word.partition("=")[0]]
        has_value = not option.is_switch and "=" not in word
        given[option.name] = [word, rest.pop(0)] if has_value else [word]
    return given
