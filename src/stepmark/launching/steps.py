"""What a script of several hosts runs, one after the other: one verb, or a check of nodes."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.ground.options import options
from stepmark.launching.launch_options import LaunchOptions
from stepmark.nodes.node_options import MOST_FOR_ALL_PAIRS, DoctorOptions

# Options of `doctor --nodes` that hosts measure by; the others are the verdict's.
_MEASURED_BY = ("budget", "launches", "timeout")
_NETWORK_BYTES = {"cuda": "64M", "cpu": "1M"}
_NETWORK_LAUNCHES = {"cuda": "5", "cpu": "2"}
_NETWORK_BUDGET = "300s"  # pairs with a host that hangs take a minute each
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
    measured_by = [word for name in _MEASURED_BY for word in given.get(name, ())]
    judged_by = [
        word
        for name, words in given.items()
        for word in words
        if name not in (*_MEASURED_BY, "nodes")
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
        pairs += given.get("budget", ["--budget", _NETWORK_BUDGET])
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
