"""Tables of one value a row are judged by the noise of tables that were repeated."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from validation import launch_noise as derived

from stepmark.cli.main import status
from stepmark.comparison.compare import Options, compare
from stepmark.comparison.compare_verb import sides
from stepmark.comparison.comparison import Comparison, Series
from stepmark.comparison.launch_noise import load_noises, noise_of, noise_on_host
from stepmark.comparison.series import InputDefaults
from stepmark.comparison.sweep_race import side_by_round
from stepmark.ground.ratio import Ratio, Verdict
from stepmark.ground.units import GIB, KIB, MIB
from stepmark.store import sweeps
from stepmark.text_tables import find

RESULTS = Path(__file__).parents[2] / "results"
OURS = RESULTS / "h200-x4-nccl-tests"
CERTAIN = (Verdict.FASTER, Verdict.SLOWER)


def compared(*files: Path, noise: float | None = None) -> Comparison:
    named = sides([str(file) for file in files], RESULTS, InputDefaults())
    return compare(named, Options(noise=noise, allowed=("method",)))


def ratios(comparison: Comparison) -> list[Ratio]:
    other = comparison.names[1]
    return [ratio for line in comparison.lines if (ratio := line.cells[other].ratio)]


def table(number: int, method: str = "queued", collective: str = "all_reduce") -> Path:
    return OURS / f"nccl-tests-{method}-{collective}-{number}.txt"


def test_the_file_is_what_its_repeats_show() -> None:
    assert derived.OUTPUT.read_text() == derived.text()
    assert all(noise.source and noise.df > 0 for noise in load_noises())


def test_noise_is_that_of_the_method_the_hosts_and_the_size() -> None:
    queued, graph = (find(table(1, method))[0] for method in ("queued", "graph"))
    small, large = noise_of(queued, KIB), noise_of(queued, GIB)
    assert small is not None
    assert large is not None
    assert 0.1 < math.sqrt(small.value) < 0.2
    assert math.sqrt(large.value) < 0.005
    assert noise_of(queued, 16 * KIB) == small != noise_of(queued, 16 * KIB + 1)
    by_graph = noise_of(graph, KIB)
    assert by_graph is not None
    assert by_graph.value < small.value / 2
    several = replace(queued, num_hosts=2)
    assert noise_of(several, MIB) is None  # no such table was repeated
    assert noise_of(several, 64 * MIB) == noise_of(replace(queued, num_hosts=None), 64 * MIB)
    assert noise_of(several, 64 * MIB) != noise_of(queued, 64 * MIB)
    assert noise_of(queued, None) is None
    assert noise_of(replace(queued, tool="rccl-tests"), KIB) is None


def test_repeats_of_a_table_do_not_differ() -> None:
    """All pairs of our own repeats, each as two tables of one value."""
    wrong = tables = 0
    for collective in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "sendrecv"):
        for method in ("queued", "graph"):
            for pair in itertools.combinations((1, 2, 3), 2):
                found = ratios(compared(*(table(n, method, collective) for n in pair)))
                wrong += any(ratio.verdict in CERTAIN for ratio in found)
                tables += 1
    assert tables == 30
    assert wrong <= 1


@pytest.mark.parametrize(
    ("speed", "certain"),
    [
        (1.05, lambda size: size > 16 * MIB),
        (1.2, lambda size: size > MIB),
        (2.5, lambda size: True),
    ],
)
def test_large_ratios_are_certain_and_say_by_what(
    speed: float, certain: Callable[[int], bool]
) -> None:
    """A table whose times are those of another over this speed."""
    base, other = sides([str(table(1)), str(table(1))], RESULTS, InputDefaults())
    faster = tuple(
        replace(
            series,
            launches={
                f"{name}'": tuple(value / speed for value in values)
                for name, values in series.launches.items()
            },
        )
        for series in other.series
    )
    comparison = compare([base, replace(other, series=faster)], Options())
    for line in comparison.lines:
        ratio = line.cells[other.name].ratio
        assert ratio is not None
        assert line.size_bytes is not None
        is_certain = certain(line.size_bytes)
        assert ratio.verdict is (Verdict.FASTER if is_certain else Verdict.CANNOT_TELL)
        assert ratio.reason.endswith("of repeats")


def test_stated_noise_comes_first() -> None:
    (first, *_) = ratios(compared(table(1), table(2), noise=0.5))
    assert "of repeats" not in first.reason
    assert first.se_log == pytest.approx(0.5 * math.sqrt(2))


def test_the_line_and_the_closing_say_where_the_noise_is_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(["compare", str(table(1)), str(table(1, "graph")), "--force"]) == 0
    text = capsys.readouterr().out
    assert "% of repeats)" in text
    assert "one value is as noisy as on other machines" in text


def test_a_table_against_itself_is_the_same() -> None:
    comparison = compared(table(1), table(1))
    assert {ratio.verdict for ratio in ratios(comparison)} == {Verdict.SAME}
    assert comparison.overall[0].ratio.verdict is Verdict.SAME


def series_of(**fields: object) -> Series:
    values = {"a": (1.0,) * 20, "b": (1.0,) * 20}
    given = {"method": "queued-ahead/1", "device_type": "cuda", **fields}
    return Series(fields=given, size_bytes=8 * MIB, launches=values)  # type: ignore[arg-type]


def test_a_sweep_has_the_noise_of_repeated_runs_and_that_of_its_own_samples() -> None:
    quiet = noise_on_host(series_of())
    assert quiet is not None
    assert 0.002 < math.sqrt(quiet.value) < 0.02
    noisy = replace(series_of(), launches={"a": tuple(1 + 0.1 * (n % 2) for n in range(20))})
    wide = noise_on_host(noisy)
    assert wide is not None
    assert math.sqrt(wide.value) > 0.02
    assert wide.df == quiet.df
    assert noise_on_host(series_of(device_type="cpu")) is None
    assert noise_on_host(series_of(method="blocking/1")) is None
    assert noise_on_host(replace(series_of(), size_bytes=None)) is None
    assert noise_on_host(replace(series_of(), launches={})) is None


def test_rounds_of_the_published_sweeps_rarely_differ_by_chance() -> None:
    """Each setting against itself: a round as the baseline, the next as the other side."""
    wrong = tables = 0
    for file in sorted(RESULTS.glob("*/sweep.json")):
        sweep = sweeps.read(file.parent)
        for setting in sweep.settings:
            runs = [t.run for t in sweep.tries if t.setting == setting.name]
            rounds = [side_by_round(setting, file.parent / "runs", {run: 1}) for run in runs]
            for base, other in itertools.pairwise(rounds):
                named = [replace(base, name="base"), replace(other, name="other")]
                found = ratios(compare(named, Options()))
                wrong += any(ratio.verdict in CERTAIN for ratio in found)
                tables += 1
    assert tables > 40
    assert wrong <= 1


def test_verdicts_of_one_round_are_those_of_all_five_in_the_published_sweeps() -> None:
    agreed = 0
    for file in sorted(RESULTS.glob("*/sweep.json")):
        sweep = sweeps.read(file.parent)
        rounds = {
            setting: {t.run: t.round for t in sweep.tries if t.setting == setting.name}
            for setting in sweep.settings
        }
        folder = file.parent / "runs"
        base, *others = rounds
        for other in others:
            both = [side_by_round(each, folder, rounds[each]) for each in (base, other)]
            whole = ratios(compare(both, Options()))
            for number in range(1, sweep.repeats + 1):
                single = [
                    side_by_round(
                        each, folder, {run: n for run, n in rounds[each].items() if n == number}
                    )
                    for each in (base, other)
                ]
                pairs = list(zip(ratios(compare(single, Options())), whole, strict=True))
                agreed += sum(one.verdict in CERTAIN for one, _ in pairs)
                assert all(a.verdict is b.verdict for a, b in pairs if a.verdict in CERTAIN)
    assert agreed > 200
