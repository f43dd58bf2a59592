"""The tuner plugin's reading of its file."""

from stepmark.comparison.tuner_text import COLLECTIVES, Rule


def parse(text: str) -> list[Rule]:
    """Return the rules of a file of ours."""
    names = {plugin_name: name for name, plugin_name in COLLECTIVES.items()}
    rules = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        collective, first, last, algorithm, protocol, *numbers = line.split(",")
        channels, nodes, ranks, _, _ = map(int, numbers)
        rules.append(
            Rule(
                collective=names[collective],
                first_bytes=int(first),
                last_bytes=int(last),
                algorithm=algorithm,
                protocol=protocol,
                num_channels=channels,
                num_nodes=nodes,
                num_ranks=ranks,
            )
        )
    return rules
