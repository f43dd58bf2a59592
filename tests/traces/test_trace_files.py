"""Traces of one job: which files, of which ranks, and what is refused or said."""

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.traces.comm_traces import MAIN, TraceWriter

from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build
from stepmark.timeline.trace_columns import RankTrace
from stepmark.traces import trace_kernels_verb, trace_messages_verb, trace_path_verb
from stepmark.traces.trace_files import map_traces
from stepmark.traces.trace_options import (
    BreakdownOptions,
    CriticalPathOptions,
    KernelsOptions,
    MessagesOptions,
)

pytestmark = pytest.mark.ranks

KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10, "dur": 5}


def write(path: Path, rank: int | None, world_size: int = 2, start: int = 10) -> Path:
    info = {} if rank is None else {"rank": rank, "world_size": world_size, "backend": "nccl"}
    document = {"distributedInfo": info, "traceEvents": [KERNEL | {"ts": start}]}
    path.write_text(json.dumps(document))
    return path


def kernels(trace: RankTrace, times: int = 1) -> int:
    return trace.gpu.start.size * times


def options(*words: object, **more: object) -> BreakdownOptions:
    return BreakdownOptions(files=tuple(map(str, words)), **more)  # type: ignore[arg-type]


def test_each_rank_is_reduced_once_and_the_missing_are_named(tmp_path: Path) -> None:
    for rank in (3, 0, 1):
        write(tmp_path / f"{rank}.json", rank, world_size=5)
    (tmp_path / "plan.json").write_text('{"no": "trace"}')
    traces = map_traces(options(tmp_path), partial(kernels, times=7))
    assert traces is not None
    assert [result.info.rank for result in traces.results] == [0, 1, 3]
    assert [result.value for result in traces.results] == [7, 7, 7]
    assert (traces.world_size, traces.missing) == (5, (2, 4))
    assert "ranks 2, 4" in traces.notes[0]


def test_a_rank_is_known_from_the_name_of_a_file_that_does_not_state_it(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, None) for name in ("job-rank1.json", "job-rank0.json")]
    traces = map_traces(options(*paths), kernels)
    assert traces is not None
    assert [result.info.rank for result in traces.results] == [0, 1]
    assert "file's name" in traces.notes[0]
    with pytest.raises(ConfigError, match="states its rank"):
        map_traces(options(write(tmp_path / "a.json", None), paths[0]), kernels)


def test_traces_of_two_jobs_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", 0, world_size=8)
    write(tmp_path / "b.json", 1, world_size=2)
    with pytest.raises(ConfigError, match="traces of one job"):
        map_traces(options(tmp_path), kernels)


def test_two_windows_of_one_rank_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", 0)
    write(tmp_path / "b.json", 0)
    with pytest.raises(ConfigError, match=r"Here are 2: .*/a.json \(1 rank\); .*/b.json"):
        map_traces(options(tmp_path), kernels)


def test_jobs_in_folders_are_named_by_folder(tmp_path: Path) -> None:
    for job, name in (("a", "rank"), ("b", "rank"), ("c", "worker")):
        for rank in range(2):
            (tmp_path / job).mkdir(exist_ok=True)
            write(tmp_path / job / f"{name}{rank}.json", rank)
    write(tmp_path / "unknown.json", None)
    with pytest.raises(ConfigError, match="Here are 4: ") as refused:
        map_traces(options(tmp_path), kernels)
    for word in ("/a/rank*.json' (2 ranks)", "/b/rank*.json' (2 ranks)", "/c (2 ranks)"):
        assert word in str(refused.value)


def test_each_of_several_windows_has_its_step_and_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for window in range(8):
        for rank in range(2):
            path = _steps_of(tmp_path / "rank0.json", [104 + window, 105 + window], rank=rank)
            path.rename(tmp_path / f"train-{window}-rank{rank}.json")
    assert status(["trace", "messages", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "\n" not in error.rstrip()
    assert "Here are 8: " in error
    assert error.endswith("; and 2 more.\n")
    listed = error.partition("Here are 8: ")[2].split("; ")
    command, _, facts = listed[1].partition(" (")
    assert facts == "step of 0.1055 ms, 2 ranks)"
    assert status(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.startswith("steps 5-6 of ranks 0-1")


def test_traces_that_do_not_overlap_in_time_are_said(tmp_path: Path) -> None:
    write(tmp_path / "a.json", 0)
    write(tmp_path / "b.json", 1, start=1000)
    traces = map_traces(options(tmp_path), kernels)
    assert traces is not None
    assert "do not overlap in time" in traces.lead["disjoint"]


@pytest.mark.parametrize("word", ["", "nowhere", "*.json"])
def test_no_files_are_refused_in_one_line(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        map_traces(options(word), kernels)


def test_ranks_selects_and_an_absent_rank_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", 0)
    write(tmp_path / "b.json", 1)
    traces = map_traces(options(tmp_path, ranks=(1,), jobs=1), kernels)
    assert traces is not None
    assert [result.info.rank for result in traces.results] == [1]
    with pytest.raises(ConfigError, match="ranks 0-1"):
        map_traces(options(tmp_path, ranks=(5,)), kernels)
    given = build(BreakdownOptions, {"files": [str(tmp_path)], "ranks": "0-2,4"})
    assert given.ranks == (0, 1, 2, 4)


def test_a_pattern_has_the_traces_of_folders_and_a_file_counts_once(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"part{rank}").mkdir()
        write(tmp_path / f"part{rank}" / "a.json", rank)
    traces = map_traces(options(tmp_path / "part*"), kernels)
    assert traces is not None
    assert [result.info.rank for result in traces.results] == [0, 1]
    with pytest.raises(ConfigError, match="given once"):
        map_traces(options(tmp_path, tmp_path / "part1"), kernels)


def test_a_job_has_as_many_ranks_as_its_groups_say(tmp_path: Path) -> None:
    kernel = KERNEL | {
        "args": {"Collective name": "allreduce", "Process Group Ranks": "[0, 4]"}
    }
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [kernel]}))
    traces = map_traces(options(tmp_path), kernels)
    assert traces is not None
    assert (traces.world_size, traces.missing) == (5, (1, 2, 3, 4))
    (tmp_path / "rank1.json").write_text(json.dumps({"traceEvents": [KERNEL]}))
    traces = map_traces(options(tmp_path), kernels)
    assert traces is not None
    assert (traces.world_size, traces.missing) == (5, (2, 3, 4)), "one rank's groups are enough"


def test_steps_that_other_ranks_lack_are_said_and_damage_once_for_all_ranks(
    tmp_path: Path,
) -> None:
    for rank in range(4):
        writer = TraceWriter(rank=rank, world_size=4)
        for number in range(5, 7 + (rank == 2)):
            writer.step(number, 1000 * number, 900)
        for correlation in range(rank):
            writer.add("cuda_runtime", "cudaLaunchKernel", 0, 1, 11, correlation=correlation)
        writer.write(tmp_path)
    traces = map_traces(options(tmp_path), kernels)
    assert traces is not None
    assert traces.notes == (
        "rank 2: steps 5-7 are marked, on the other ranks steps 5-6: means over ranks are of "
        "different steps",
        "ranks 1-3: 3 launches have no GPU event (3 cudaLaunchKernel): work of the GPU is "
        "missing (rank 3, the most)",
    )


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        (trace_messages_verb.messages, MessagesOptions),
        (trace_kernels_verb.kernels, KernelsOptions),
        (trace_path_verb.run, CriticalPathOptions),
    ],
)
def test_every_command_says_what_is_wrong_with_a_trace(
    verb: Callable[..., int],
    kind: Callable[..., object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("gemm", 0, 10, 50)
    writer.add("cuda_runtime", "cudaLaunchKernel", 70, 1, 11, correlation=999)
    writer.write(tmp_path)
    assert verb(kind(files=(str(tmp_path),), json="-")) == 0
    assert "launches have no GPU event" in json.loads(capsys.readouterr().out)["notes"][0]


@pytest.mark.parametrize("text", ['{"traceEvents": [{"a": 1}]}', '[{"m": 1, "n": 2}]'])
def test_a_list_of_other_things_is_no_trace(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="its list has no events"):
        map_traces(options(tmp_path / "a.json"), kernels)


def test_steps_are_numbers_and_ranges() -> None:
    given = build(BreakdownOptions, {"files": ["a"], "steps": "5,7-9"})
    assert [number for number in range(12) if given.has_step(number)] == [5, 7, 8, 9]
    with pytest.raises(ConfigError, match="rising"):
        build(BreakdownOptions, {"files": ["a"], "steps": "9-7"})


def _steps_of(
    path: Path, durations_us: Sequence[int], *, is_on_gpu: bool = True, rank: int = 0
) -> Path:
    writer = TraceWriter(rank, 2)
    start = 0
    for number, duration in enumerate(durations_us, 5):
        writer.step(number, start, duration)
        if is_on_gpu:
            writer.kernel("gemm", start + 1, start + 2, duration - 2)
        else:
            writer.add("cpu_op", "aten::mm", start + 1, duration - 2, MAIN)
        start += duration
    return writer.write(path.parent).rename(path)


VERBS = ("breakdown", "ledger", "messages", "kernels", "critical-path")


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_begins_with_steps_that_fall_in_two_groups(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trace", verb, str(_steps_of(tmp_path / "rank0.json", [104, 1007, 105, 1009]))]
    assert status(words) == 0
    first = capsys.readouterr().out.splitlines()[0]
    groups = "2 of 0.1045 ms (--steps 5,7); 2 of 1.008 ms (--steps 6,8)"
    assert first.startswith(f"The steps fall in two groups: {groups}.")
    assert status([*words, "--steps", "5,7"]) == 0
    assert "two groups" not in capsys.readouterr().out
    assert status([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["step_groups"] == first


@pytest.mark.parametrize("verb", VERBS)
def test_a_paused_profile_of_a_calibration_is_its_steps_back_to_back(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _steps_of(tmp_path / "train-0a-paused-rank0.json", [104, 105, 1007, 1009])
    plain = _steps_of(tmp_path / "rank0.json", [104, 105, 1007, 1009])
    assert status(["trace", verb, str(plain), "--steps", "5-6"]) == 0
    expected = capsys.readouterr().out
    assert status(["trace", verb, str(path)]) == 0
    text = capsys.readouterr().out
    note = "steps 7-8 of this calibration's profile have pauses on purpose"
    assert note in text
    if verb != "critical-path":  # which is of one step
        assert text.startswith(expected.rstrip("\n").rpartition("\n\nDefinitions")[0])
    assert status(["trace", verb, str(path), "--steps", "7-8"]) == 0
    assert note not in capsys.readouterr().out


def test_steps_on_a_host_fall_in_two_groups_by_their_marks_and_noise_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _steps_of(tmp_path / "rank0.json", [100, 1000], is_on_gpu=False)
    assert status(["trace", str(path)]) == 0
    assert capsys.readouterr().out.startswith("The steps fall in two groups: 1 of 0.1 ms")
    assert status(["trace", str(_steps_of(tmp_path / "rank0.json", [100, 250, 600]))]) == 0
    assert "two groups" not in capsys.readouterr().out
