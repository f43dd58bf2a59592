"""Levels of a measurement: which launches are of one process, and so count as one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.store.test_runs import INFO, measured, write

from stepmark.cases.record import HostLoad, Levels, Measured, Telemetry
from stepmark.comparison.compare import Options, compare
from stepmark.comparison.compare_verb import side_of_runs
from stepmark.comparison.comparison import Series, Side
from stepmark.comparison.series import by_process, series_of_records
from stepmark.ground.errors import ConfigError
from stepmark.store import codec, reader

ONE = Levels(machine="n1, n2", process="17 2026-11-26", communicator=1)


def launch(number: int, levels: Levels | None, first_s: float = 1e-3) -> Measured:
    record = measured(ranks=1)
    seconds = tuple(first_s + 1e-6 * number + 1e-7 * n for n in range(4))
    samples = dataclasses.replace(record.samples, seconds=(seconds,))
    return dataclasses.replace(
        record, samples=samples, launch=number, started_at=100.0 - number, levels=levels
    )


def communicators(*processes: str) -> list[Measured]:
    """One launch after the other, by the process that it ran in."""
    return [
        launch(n, dataclasses.replace(ONE, process=process, communicator=n))
        for n, process in enumerate(processes, 1)
    ]


def names(records: Sequence[Measured]) -> list[int]:
    return [len(own) for own in by_process(records).values()]


def test_a_record_keeps_its_levels() -> None:
    record = launch(1, dataclasses.replace(ONE, round=3))
    assert codec.decode(codec.encode(record)) == record


def test_launches_of_one_process_are_one_and_older_records_stand_alone() -> None:
    assert names(communicators("a", "a", "b")) == [2, 1]
    assert names([launch(n, None) for n in (1, 2, 3)]) == [1, 1, 1]
    elsewhere = dataclasses.replace(ONE, machine="n3")
    assert names([launch(1, ONE), launch(2, elsewhere)]) == [1, 1]


def test_samples_of_one_process_are_pooled_and_none_is_lost() -> None:
    records = communicators("a", "a", "b")
    ((series,), notes) = series_of_records(records)
    first, second = series.launches.values()
    assert first == (*records[0].samples.seconds[0], *records[1].samples.seconds[0])
    assert second == records[2].samples.seconds[0]
    assert list(series.starts.values()) == [98.0, 97.0]
    assert any("count as one" in note for note in notes)
    assert series_of_records(communicators("a", "b"))[1] == ()


def test_many_communicators_of_one_process_give_no_verdict(tmp_path: Path) -> None:
    """Under torchrun five launches show nothing of how processes differ."""

    def run(name: str, factor: float, *processes: str) -> Path:
        folder = tmp_path / name
        records = [
            dataclasses.replace(launch(r.launch, r.levels, factor * 1e-3), run_id=INFO.run_id)
            for r in communicators(*processes)
        ]
        return write(folder, *records)

    def verdict(*processes: str) -> tuple[str, str]:
        sides = [
            side_of_runs(name, [run(name + processes[-1], factor, *processes)])
            for name, factor in (("a", 1.0), ("b", 1.2))
        ]
        ratio = compare(sides, Options()).lines[0].cells["b"].ratio
        assert ratio is not None
        return ratio.verdict, ratio.reason

    assert verdict("p", "p", "p", "p") == ("cannot tell", "one launch")
    assert verdict("p", "q", "r", "s")[0] == "slower"


@pytest.mark.parametrize(("batches", "is_kept"), [((), True), ((2, 1), True), ((2, 2), False)])
def test_batches_have_all_samples(
    batches: tuple[int, ...], is_kept: bool, tmp_path: Path
) -> None:
    record = measured()
    samples = dataclasses.replace(record.samples, batches=batches)
    path = write(tmp_path, dataclasses.replace(record, samples=samples))
    run = reader.read(path)
    assert len(run.latest) == is_kept
    if not is_kept:
        assert "the 4 samples of its batches" in "; ".join(run.notes)


def test_a_busy_host_is_counted_and_a_cpu_has_no_verdict() -> None:
    """Other work slows two threads on two cores more than one, in every round."""
    busy = HostLoad(num_cores=2, own_threads=2, runnable=4.0)
    quiet = dataclasses.replace(busy, runnable=2.0)

    def side(name: str, factor: float, load: HostLoad, device: str) -> Side:
        records = [launch(n, None, factor * 1e-3) for n in range(1, 6)]
        case = dataclasses.replace(records[0].operator, device=device)
        states = (Telemetry(host=load),)
        changed = [dataclasses.replace(r, case=case, telemetry=states) for r in records]
        return Side(name=name, series=tuple(series_of_records(changed)[0]))

    def compared(device: str, load: HostLoad) -> tuple[str, bool]:
        result = compare(
            [side("a", 1.0, quiet, device), side("b", 1.3, load, device)], Options()
        )
        ratio = result.lines[0].cells["b"].ratio
        assert ratio is not None
        assert result.overall[0].ratio.verdict is ratio.verdict, "a mean is no surer"
        return ratio.verdict, "b: busy host in 5 of 5 launches" in result.notes

    assert compared("cpu", busy) == ("cannot tell", True)
    assert compared("cpu", quiet) == ("slower", False)
    assert compared("cuda", busy) == ("slower", True)


@pytest.mark.parametrize("busy_launch", [1, 2])
def test_a_process_is_busy_if_other_work_ran_in_any_of_its_launches(busy_launch: int) -> None:
    quiet = HostLoad(num_cores=2, own_threads=2, runnable=2.0)
    busy = dataclasses.replace(quiet, runnable=4.0)
    records = [
        dataclasses.replace(
            record,
            telemetry=(Telemetry(host=busy if record.launch == busy_launch else quiet),),
        )
        for record in communicators("a", "a", "b")
    ]
    ((series,), _) = series_of_records(records)
    assert [name in series.busy for name in series.launches] == [True, False]


def soaked(*soaks_s: float) -> Series:
    """A series of launches of which each had soaked the device for so long."""
    records = []
    for number, soak_s in enumerate(soaks_s, 1):
        record = launch(number, None)
        samples = dataclasses.replace(record.samples, soak_s=soak_s)
        records.append(dataclasses.replace(record, samples=samples))
    ((series,), _) = series_of_records(records)
    return series


@pytest.mark.parametrize("soaks_s", [(0.2, 4.0), (4.0, 0.2), (4.0, 0.2, 4.0)])
def test_the_shortest_soak_of_a_series_counts(soaks_s: tuple[float, ...]) -> None:
    assert soaked(*soaks_s).soak_s == 0.2


@pytest.mark.parametrize(
    ("one_s", "other_s", "is_noted"), [(0.2, 0.4, True), (0.4, 0.4, False), (2.0, 4.0, False)]
)
def test_soaks_that_differ_are_noted(one_s: float, other_s: float, is_noted: bool) -> None:
    sides = [
        Side(name=name, series=(soaked(soak_s),))
        for name, soak_s in (("a", one_s), ("b", other_s))
    ]
    notes = " ".join(compare(sides, Options()).notes)
    assert ("had different soaks" in notes) == is_noted


@pytest.mark.parametrize(
    ("one", "other", "is_noted"),
    [(27, 4, True), (4, 10, True), (4, 9, False), (4, 4, False), (None, 27, False)],
)
def test_warmups_that_differ_are_noted(one: int | None, other: int, is_noted: bool) -> None:
    steps = {"log": (1.0,) * 20}
    sides = [
        Side(name=name, series=(Series(fields={}, launches=steps, num_warmup=num_lines),))
        for name, num_lines in (("a", one), ("b", other))
    ]
    notes = " ".join(compare(sides, Options()).notes)
    assert (f"unequal: {one} lines of a and {other} of b" in notes) == is_noted


TREE = ("NCCL_ALGO: unset -> Tree",)


def test_another_environment_is_never_paired_as_the_same(tmp_path: Path) -> None:
    own = [launch(n, dataclasses.replace(ONE, process=str(n))) for n in (1, 2)]
    tree = [
        dataclasses.replace(record, differs=TREE, launch=record.launch + 2) for record in own
    ]
    before = side_of_runs("before", [write(tmp_path / "before", *own)])
    mixed = side_of_runs("mixed", [write(tmp_path / "mixed", *own, *tree)])
    compared = compare([before, mixed], Options())
    assert [len(cell.series.launches) for cell in compared.lines[0].cells.values()] == [2, 2]
    assert "1 of 2 of mixed are not in before" in compared.notes
    assert any("another environment" in note and TREE[0] in note for note in compared.notes)
    other = side_of_runs("other", [write(tmp_path / "other", *tree)])
    with pytest.raises(ConfigError, match=f"environment.*that of the run and {TREE[0]}"):
        compare([before, other], Options())
    allowed = compare([before, other], Options(allowed=("environment",)))
    assert len(allowed.lines) == 1
    assert any(
        f"environment differs: before that of the run, other {TREE[0]}" in n
        for n in allowed.notes
    )
