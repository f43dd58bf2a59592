"""Inputs with a known truth, changed as files are on their way: no wrong answer goes unsaid.

Of harmless changes at least 99.5 % read right and without a sign of damage. Of changes that can
be detected none reads wrong without one. Changes that cannot are listed with their rates.
"""

import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from tests.damage import logs, profiler_tables, tables, traces, workload_files
from tests.damage.mutators import Effect, Inputs, Mutator

FORMATS = ("native", "simai", "aicb", "param", "chakra")
FAMILIES: dict[str, Inputs] = {
    "tables": tables.Tables(),
    "logs": logs.Logs(),
    "sick logs": logs.SickLogs(),
    "profiler tables": profiler_tables.ProfilerTables(),
    "traces": traces.Traces(),
    **{f"{name} workload": workload_files.Files(name) for name in FORMATS},
}
CASES = [
    pytest.param(family, mutator, id=f"{family}-{mutator.name}")
    for family, inputs in FAMILIES.items()
    for mutator in inputs.mutators
]


def outcomes(family: str, mutator: Mutator, number: int, folder: Path) -> Counter[str]:
    """Return how many inputs read right or wrong, with or without a sign of damage."""
    inputs, path = FAMILIES[family], folder / workload_files.FILE
    counts: Counter[str] = Counter()
    for seed in range(number):
        random = Random(f"{mutator.name} {seed}")
        output = inputs.output(random)
        for left in folder.iterdir():
            left.unlink()
        for name, content in output.beside.items():
            (folder / name).write_bytes(content)
        path.write_bytes(mutator.apply(output.lines, random))
        counts[inputs.verdict(output, mutator, path)] += 1
    return counts


def check(mutator: Mutator, counts: Counter[str]) -> None:
    number = counts.total()
    if mutator.effect is Effect.HARMLESS:
        assert counts["right"] >= 0.995 * number, counts
    elif mutator.effect is Effect.DETECTABLE:
        assert counts["wrong"] == 0, counts


@pytest.mark.parametrize(("family", "mutator"), CASES)
def test_a_sample_of_changed_inputs(family: str, mutator: Mutator, tmp_path: Path) -> None:
    check(mutator, outcomes(family, mutator, FAMILIES[family].samples, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mutator"), CASES)
def test_all_changed_inputs(
    family: str, mutator: Mutator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = outcomes(family, mutator, FAMILIES[family].all_samples, tmp_path)
    with capsys.disabled():
        sys.stdout.write(f"\n{family:16} {mutator.name:22} {mutator.effect:12} {dict(counts)}")
    check(mutator, counts)
