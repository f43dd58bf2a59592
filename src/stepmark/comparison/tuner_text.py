"""Configuration file of NCCL's example tuner plugin, from the choice for each size.

Facts of the plugin and of NCCL's core (plugins/tuner/example/plugin.c, src/enqueue.cc of NCCL
2.30): the first line that matches and that NCCL can run decides; bounds are inclusive; bytes
are the largest buffer of any rank. A line is cut after 255 characters and the rest read as a
line of its own, so comments are wrapped. A call that no line serves runs with one channel;
0 channels leaves NCCL its own number, and algorithm and protocol cannot be left to it.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from stepmark.cases.sweep import TunerChoice, cut
from stepmark.ground.errors import ConfigError

# Our names and the plugin's.
COLLECTIVES = {
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
}
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
MOST_BYTES = 2**63 - 1
ANY = -1
NCCLS_OWN = 0  # channels
_WIDTH = 96
_FIELDS = (
    "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,"
    "numPipeOps,regBuff"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the file. `collective` is our name; nodes and ranks may be ANY."""

    collective: str
    first_bytes: int
    last_bytes: int
    algorithm: str
    protocol: str
    num_channels: int
    num_nodes: int
    num_ranks: int

    def serves(self, collective: str, num_bytes: int, num_nodes: int, num_ranks: int) -> bool:
        return (
            self.collective == collective
            and self.first_bytes <= num_bytes <= self.last_bytes
            and self.num_nodes in (ANY, num_nodes)
            and self.num_ranks in (ANY, num_ranks)
        )

    def text(self) -> str:
        bounds = f"{COLLECTIVES[self.collective]},{self.first_bytes},{self.last_bytes}"
        how = f"{self.algorithm},{self.protocol},{self.num_channels}"
        return f"{bounds},{how},{self.num_nodes},{self.num_ranks},{ANY},{ANY}"


def spelled(name: str) -> str | None:
    """Spell an algorithm or protocol as the plugin does: NVLSTree, NVLS_TREE -> nvls_tree."""
    spellings = {each.replace("_", ""): each for each in (*ALGORITHMS, *PROTOCOLS)}
    return spellings.get(name.lower().replace("_", ""))


def rules(choices: Iterable[TunerChoice], *, num_nodes: int, num_ranks: int) -> list[Rule]:
    """Return rules for all sizes of all five collectives; sizes take the nearer choice.

    Then, for communicators of other sizes and for types and operations that an algorithm does
    not serve, follows Ring with NCCL's own number of channels.
    Raises ConfigError for a collective without a choice, and for unknown names.
    """
    by_name: dict[str, dict[int, TunerChoice]] = {name: {} for name in COLLECTIVES}
    for choice in choices:
        if choice.collective in by_name:
            by_name[choice.collective][choice.size_bytes] = _checked(choice)
    if missing := ", ".join(name for name, by_size in by_name.items() if not by_size):
        raise ConfigError("emit-tuner", missing, "collectives whose choice NCCL has logged")
    measured = [
        rule
        for name, by_size in by_name.items()
        for rule in _of_collective(name, by_size, num_nodes, num_ranks)
    ]
    return measured + _merged([_fallback(rule) for rule in measured])


def _checked(choice: TunerChoice) -> TunerChoice:
    """Return a valid choice. The plugin silently reads an unknown name as another one."""
    if choice.algorithm not in ALGORITHMS or choice.protocol not in PROTOCOLS:
        how = f"{choice.algorithm}/{choice.protocol}"
        raise ConfigError("emit-tuner", how, "algorithms and protocols of NCCL's tuner")
    if choice.num_channels < 1:
        raise ConfigError("emit-tuner", choice.num_channels, "at least 1 channel")
    return choice


def _of_collective(
    name: str, by_size: dict[int, TunerChoice], num_nodes: int, num_ranks: int
) -> list[Rule]:
    sizes = sorted(by_size)
    lasts = [*(cut(a, b) for a, b in pairwise(sizes)), MOST_BYTES]
    firsts = [0, *(last + 1 for last in lasts[:-1])]
    return _merged(
        [
            Rule(
                collective=name,
                first_bytes=first,
                last_bytes=last,
                algorithm=by_size[size].algorithm,
                protocol=by_size[size].protocol,
                num_channels=by_size[size].num_channels,
                num_nodes=num_nodes,
                num_ranks=num_ranks,
            )
            for size, first, last in zip(sizes, firsts, lasts, strict=True)
        ]
    )


def _fallback(rule: Rule) -> Rule:
    """Return a rule of Ring, which runs everything, without LL128, which does not."""
    return replace(
        rule,
        algorithm="ring",
        protocol="simple" if rule.protocol == "simple" else "ll",
        num_channels=NCCLS_OWN,
        num_nodes=ANY,
        num_ranks=ANY,
    )


def _merged(rules: Sequence[Rule]) -> list[Rule]:
    merged: list[Rule] = []
    for rule in rules:
        before = merged[-1] if merged else None
        if before and replace(before, last_bytes=rule.last_bytes) == replace(
            rule, first_bytes=before.first_bytes
        ):
            merged[-1] = replace(before, last_bytes=rule.last_bytes)
        else:
            merged.append(rule)
    return merged


def text_of(rules: Sequence[Rule], facts: Sequence[str]) -> str:
    """Return the file. Its head has the `facts`: what was measured, where, when."""
    head = [
        *facts,
        "Use it with the NCCL and the machine that it was measured with.",
        "A call that no line serves runs with ONE channel in the plugin as NCCL 2.30 ships it, "
        "although its README says that the default is kept. So every collective and every "
        "size has a line, and every line an explicit number of channels.",
        "Build the plugin from NCCL 2.30 (plugins/tuner/example), which serves 2.28, too: that "
        "of 2.28.9 crashes at the first call that a line serves, and 2.27.7 to 2.29.7 read "
        "alike.",
        "The last lines serve other communicators than the measured one, and types and "
        "operations that an algorithm above cannot run. They are not measured: Ring, "
        "0 = NCCL's own number of channels.",
        _FIELDS,
    ]
    comments = [
        line for fact in head for line in textwrap.wrap(" ".join(fact.split()), _WIDTH - 2)
    ]
    lines = [f"# {line}" for line in comments] + [rule.text() for rule in rules]
    return "\n".join(lines) + "\n"


def first_match(
    rules: Iterable[Rule], collective: str, num_bytes: int, *, num_nodes: int, num_ranks: int
) -> Rule | None:
    """Return the line that decides, if NCCL can run its choice."""
    call = (collective, num_bytes, num_nodes, num_ranks)
    return next((rule for rule in rules if rule.serves(*call)), None)


def mismatches(
    rules: Sequence[Rule], choices: Iterable[TunerChoice], *, num_nodes: int, num_ranks: int
) -> list[str]:
    """Return sentences on calls that NCCL, run with the file, did not serve by its line."""
    sentences = []
    for choice in choices:
        rule = first_match(
            rules,
            choice.collective,
            choice.size_bytes,
            num_nodes=num_nodes,
            num_ranks=num_ranks,
        )
        if rule is None:
            continue  # a collective that the tuner does not know
        expected = (rule.algorithm, rule.protocol, rule.num_channels)
        if expected != choice.how:
            texts = [f"{a}/{p} with {c} channels" for a, p, c in (expected, choice.how)]
            sentences.append(
                f"{choice.collective} {choice.size_bytes} bytes: the file says {texts[0]}, "
                f"NCCL ran {texts[1]}"
            )
    return sentences
