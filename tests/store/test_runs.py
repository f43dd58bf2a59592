"""Laws of runs on disk: nothing written is lost, nothing half written is read."""

import codecs
import dataclasses
import errno
import gzip
import json
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from tests.store.writers import new_run

from stepmark.cases.case import OpCase
from stepmark.cases.plan import Entry, Plan, Profile
from stepmark.cases.record import (
    DeviceInfo,
    Environment,
    Failed,
    Measured,
    Record,
    RunInfo,
    Samples,
)
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Copy
from stepmark.store import codec, plans, reader, runs
from stepmark.store.runs import RunWriter, StoreError

DEVICES = tuple(
    DeviceInfo(
        rank=r,
        index=r,
        name="NVIDIA H200",
        power_limit_w=700.0,
        max_sm_clock_hz=1.98e9,
        max_memory_clock_hz=2.619e9,
    )
    for r in (0, 1)
)
ENVIRONMENT = Environment(
    host="node1",
    os="Ubuntu 24.04",
    kernel="6.8",
    cpu="x",
    num_cores=64,
    memory_bytes=2**38,
    python="3.11.7",
    torch="2.12.0",
    versions={"driver": "570.1", "cuda": "12.8"},
    devices=DEVICES,
    git_commit="abc",
    stepmark="0.1.0",
    variables={"NCCL_DEBUG": "INFO"},
)
INFO = RunInfo(
    run_id="20261120-221300-ab12",
    created_at="2026-11-20T22:13:00+00:00",
    command="stepmark op copy",
    environment=ENVIRONMENT,
    num_cases=3,
)


def measured(num_bytes: int = 4096, ranks: int = 2, n: int = 3) -> Measured:
    seconds = tuple(tuple(1e-3 * (r + 1) + 1e-6 * i for i in range(n)) for r in range(ranks))
    return Measured(
        run_id=INFO.run_id,
        case=OpCase(op=Copy(num_bytes=num_bytes), backend="torch", num_ranks=ranks),
        samples=Samples(seconds=seconds, method="graph-rotate/1"),
        checks=(),
        telemetry=(),
        backend_run="memcpy",
        peak_memory_bytes=8192,
        started_at=0.0,
    )


def failed(num_bytes: int) -> Failed:
    case = measured(num_bytes).case
    return Failed(run_id=INFO.run_id, case=case, cause="oom", message="no", ranks=(0,))


def write(root: Path, *records: Record) -> Path:
    with new_run(root, INFO) as writer:
        for record in records:
            writer.append(record)
    return root / INFO.run_id


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    records = [measured(4), failed(8), measured(12)]
    path = write(tmp_path, *records)
    assert reader.read_records(path) == records
    assert reader.read_info(path) == INFO
    assert not list(path.glob("**/*.tmp"))


def test_every_record_is_readable_when_append_returns(tmp_path: Path) -> None:
    with new_run(tmp_path, INFO) as writer:
        for count in range(1, 4):
            writer.append(measured(4 * count))
            assert len(reader.read_records(writer.path)) == count


@pytest.mark.parametrize(
    ("ranks", "n"), [(1, 4096), (2, 2048), (1, 4097), (8, 1000), (4, 5000)]
)
def test_samples_are_conserved(tmp_path: Path, ranks: int, n: int) -> None:
    record = measured(ranks=ranks, n=n)
    path = write(tmp_path, record)
    (back,) = reader.read_records(path)
    assert isinstance(back, Measured)
    (whole,) = reader.with_all_samples(path, [back])
    assert isinstance(whole, Measured)
    assert whole.samples.seconds == record.samples.seconds
    outside = ranks * n > 4096
    assert back.samples.file == (f"samples/{record.case.case_id[:16]}.npy" if outside else "")
    # Either way the line gives the same maximum over ranks per sample.
    maxima = [max(column) for column in zip(*back.samples.seconds, strict=True)]
    assert maxima == list(record.samples.seconds[-1])


def test_killed_at_any_byte_of_the_last_line(tmp_path: Path) -> None:
    path = write(tmp_path, measured(4), measured(8))
    file = path / "records.jsonl"
    text = file.read_bytes()
    start = text.index(b"\n") + 1
    for end in range(start, len(text)):
        file.write_bytes(text[:end])
        assert reader.read_records(path) == [measured(4)], end
    for end in range(start, len(text), 97):
        file.write_bytes(text[:end])
        writer, done = RunWriter.resume(path, ENVIRONMENT)
        assert done == {(measured(4).case.case_id, 1)}
        with writer:
            writer.append(measured(8))
        assert file.read_bytes() == text


def test_a_corrupt_line_in_the_middle_is_named_and_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, measured(4), measured(8))
    file = path / "records.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\x00\x00{\n" + lines[1] + b"{")
    found = reader.read(path)
    assert found.records == [measured(4), measured(8)]
    (note,) = found.notes
    assert f"run {path.name}: 2 of 4 records cannot be read" in note
    assert "records.jsonl:2" in note
    assert "\n" not in note


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_record_that_nests_too_deep_is_left_out(tmp_path: Path, depth: int) -> None:
    path = write(tmp_path, measured(4), measured(8))
    file = path / "records.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    nested = b'"checks":' + b"[" * depth + b"]" * depth + b","
    deep = first.replace(b"{", b"{" + nested, 1)
    file.write_bytes(deep + second)
    found = reader.read(path)
    assert found.records == [measured(8)]
    assert "records.jsonl:1: " in found.notes[0]
    assert "deeper than 100 levels" in found.notes[0]


def test_what_follows_very_many_damaged_lines_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, measured(4), measured(8))
    file = path / "records.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b"{}\n" * 10_001 + second)
    found = reader.read(path)
    assert found.records == [measured(4)]
    assert "10002 of 10003 records cannot be read" in found.notes[0]
    assert "lines from 10003 on are not read" in found.notes[0]


def test_resume_redoes_what_failed(tmp_path: Path) -> None:
    path = write(tmp_path, failed(4), measured(8), measured(12), failed(12))
    writer, done = RunWriter.resume(path, ENVIRONMENT)
    assert done == {(measured(8).case.case_id, 1)}
    with writer:
        writer.append(measured(4))
    last = reader.latest(reader.read_records(path))
    assert last == [measured(4), measured(8), failed(12)]


def with_devices(**change: object) -> dict[str, object]:
    return {"devices": tuple(dataclasses.replace(d, **change) for d in DEVICES)}  # type: ignore[arg-type]


CHANGES = [
    ("device", "2 x NVIDIA H200", "2 x NVIDIA H100", with_devices(name="NVIDIA H100")),
    ("device", "2 x NVIDIA H200", "1 x NVIDIA H200", {"devices": DEVICES[:1]}),
    (
        "ranks per host",
        "[2]",
        "[1, 1]",
        {"devices": (DEVICES[0], dataclasses.replace(DEVICES[1], host="another"))},
    ),
    ("torch", "2.12.0", "2.11.0", {"torch": "2.11.0"}),
    ("driver", "570.1", "580.2", {"versions": {"driver": "580.2"}}),
    ("power limit", "2 x 700.0 W", "2 x 500.0 W", with_devices(power_limit_w=500.0)),
    ("stepmark commit", "abc", "abc+dirty", {"git_commit": "abc+dirty"}),
    ("triton", "unset", "3.4.0", {"versions": {**ENVIRONMENT.versions, "triton": "3.4.0"}}),
    (
        "clocks",
        "1980 MHz, 2619 MHz",
        "1500 MHz, 2619 MHz",
        with_devices(max_sm_clock_hz=1.5e9),
    ),
    ("NCCL_DEBUG", "INFO", "unset", {"variables": {}}),
    *(
        (name, "unset", "1", {"variables": {**ENVIRONMENT.variables, name: "1"}})
        for name in (
            *("NCCL_ALGO", "RCCL_MSCCL_ENABLE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"),
            *("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "HSA_ENABLE_SDMA", "FI_PROVIDER"),
            *("TORCH_NCCL_HIGH_PRIORITY", "PYTORCH_CUDA_ALLOC_CONF", "UCX_TLS"),
        )
    ),
]


@pytest.mark.parametrize(("field", "before", "now", "change"), CHANGES)
def test_resume_refuses_another_machine(
    tmp_path: Path, field: str, before: str, now: str, change: dict[str, object]
) -> None:
    path = write(tmp_path, measured())
    other = dataclasses.replace(ENVIRONMENT, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        RunWriter.resume(path, other)
    message = str(caught.value)
    assert message.startswith(field)
    assert f"it was {before!r} in run" in message
    assert now in message.partition(" is invalid")[0]
    assert "use --force" in message
    assert "\n" not in message
    writer, done = RunWriter.resume(path, other, force=True)
    with writer:
        writer.append(measured(8192))
    assert done == {(measured().case.case_id, 1)}
    assert reader.read_info(path) == INFO
    first, second = reader.read_records(path)
    assert first.differs == ()
    assert second.differs[0] == f"{field}: {before} -> {now}"


def test_a_reader_is_told_of_each_other_environment_once(tmp_path: Path) -> None:
    path = write(tmp_path, measured(4), measured(8), failed(12))
    tree = dataclasses.replace(ENVIRONMENT, torch="2.11.0", variables={"NCCL_ALGO": "Tree"})
    for environment, case in (
        (tree, measured(12)),
        (tree, measured(16)),
        (ENVIRONMENT, failed(4)),
    ):
        writer, _ = RunWriter.resume(path, environment, force=True)
        with writer:
            writer.append(case)
    run = reader.read(path)
    what = "torch: 2.12.0 -> 2.11.0; NCCL_DEBUG: INFO -> unset; NCCL_ALGO: unset -> Tree"
    assert run.notes == (
        f"run {INFO.run_id}: 2 of 4 records were measured in another environment "
        f"(resume --force): {what}",
    )
    assert run.info.environment.warnings == run.notes


def test_the_first_of_several_changes_is_refused_and_the_others_are_named(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, measured())
    other = dataclasses.replace(ENVIRONMENT, torch="2.11.0", variables={"NCCL_ALGO": "Tree"})
    with pytest.raises(ConfigError, match="and NCCL_DEBUG, NCCL_ALGO changed; use --force"):
        RunWriter.resume(path, other)


def test_resume_accepts_what_does_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path, measured())
    job = {"SLURM_JOB_ID": "7", "NCCL_DEBUG_FILE": "/tmp/log", "TORCH_HOME": "/tmp"}
    variables = {**ENVIRONMENT.variables, **job}
    other = dataclasses.replace(ENVIRONMENT, host="node2", variables=variables, memory_bytes=1)
    writer, _ = RunWriter.resume(path, other)
    with writer:
        writer.append(measured(8))
    assert reader.read_info(path) == INFO
    assert reader.read_records(path)[-1] == measured(8)


def test_a_run_has_one_writer(tmp_path: Path) -> None:
    with new_run(tmp_path, INFO) as writer:
        with pytest.raises(ConfigError, match="no other process"):
            RunWriter.resume(writer.path, ENVIRONMENT)
        writer.append(measured())
    RunWriter.resume(writer.path, ENVIRONMENT)[0].close()


def test_a_full_disk_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 300:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data[: len(data) // 2])

    with new_run(tmp_path, INFO) as writer:
        writer.append(measured(4))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(StoreError, match="No space left") as caught:
                writer.append(measured(8))
        assert caught.value.exit_code == 3
        assert "\n" not in str(caught.value)
        writer.append(measured(12))
        assert reader.read_records(writer.path) == [measured(4), measured(12)]


def test_a_lost_file_system_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line is written, cannot be removed, and is gone once the record is written."""
    failures, real_write, real_truncate = [3], os.write, os.ftruncate

    def write_half(fd: int, data: bytes) -> int:
        if failures[0]:
            real_write(fd, bytes(data[: len(data) // 2]))
            raise OSError(errno.EIO, "Input/output error")
        return real_write(fd, data)

    def truncate(fd: int, size: int) -> None:
        failures[0] -= 1
        if failures[0] > 0:
            raise OSError(errno.EIO, "Input/output error")
        real_truncate(fd, size)

    monkeypatch.setattr(runs, "_RETRY_S", 0.01)
    with new_run(tmp_path, INFO) as writer:
        writer.append(measured(4))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_half)
            patch.setattr(os, "ftruncate", truncate)
            writer.append(measured(8))
        assert reader.read_records(writer.path) == [measured(4), measured(8)]
        monkeypatch.setattr(runs, "_LOST_S", 0.05)
        failures[0] = 10**6
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_half)
            with pytest.raises(StoreError, match="Input/output error"):
                writer.append(measured(12))
        assert reader.read_records(writer.path) == [measured(4), measured(8)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_device_without_space(tmp_path: Path) -> None:
    path = write(tmp_path)
    (path / "records.jsonl").unlink()
    (path / "records.jsonl").symlink_to("/dev/full")
    with RunWriter(path) as writer, pytest.raises(StoreError, match="No space"):
        writer.append(measured())


def test_full_disk_while_samples_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with new_run(tmp_path, INFO) as writer:
        monkeypatch.setattr(np, "save", full)
        with pytest.raises(StoreError):
            writer.append(measured(n=5000))
        assert reader.read_records(writer.path) == []


def test_creation_where_nothing_can_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", Path("/proc/nowhere"), tmp_path):
        with pytest.raises(ConfigError, match="out"):
            RunWriter.begin(root / "run", INFO)


def test_new_run_id_is_utc_and_sorts() -> None:
    now = datetime(2026, 11, 20, 22, 13, tzinfo=UTC)
    later = (0, 20, 999_999, 1_000_000, 3_600_000_000)
    ids = [runs.new_run_id(now + timedelta(microseconds=time_us)) for time_us in later]
    assert ids == sorted({*ids})
    assert [re.fullmatch(r"20261120-221300-[0-9a-f]{4}", each) is None for each in ids] == [
        *(False, False, False),
        *(True, True),
    ]


def test_find_run(tmp_path: Path) -> None:
    for name in ("20261120-1", "20261120-2", "20261121-1"):
        new_run(tmp_path, dataclasses.replace(INFO, run_id=name)).close()
    (tmp_path / "no-run").mkdir()
    found = [path.name for path in reader.list_runs(tmp_path)]
    assert found == ["20261120-1", "20261120-2", "20261121-1"]
    for name, run_id in (
        ("latest", "20261121-1"),
        ("20261121", "20261121-1"),
        ("20261120-1", "20261120-1"),
        (str(tmp_path / "20261120-2"), "20261120-2"),
    ):
        assert reader.find_run(tmp_path, name) == tmp_path / run_id
    for name in ("20261120", "x", "", "no-run"):
        with pytest.raises(ConfigError, match="run"):
            reader.find_run(tmp_path, name)
    with pytest.raises(ConfigError, match=r"in the folder .*absent: none"):
        reader.find_run(tmp_path / "absent", "latest")


def test_a_sweep_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "some-sweep").mkdir()
    (tmp_path / "some-sweep" / "sweep.json").touch()
    for name in ("some-sweep", str(tmp_path / "some-sweep")):
        with pytest.raises(ConfigError, match="it is a sweep: stepmark sweep --resume"):
            reader.find_run(tmp_path, name)


def test_a_watched_job_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "watch.json").touch()
    for name in ("watched", str(tmp_path / "watched")):
        with pytest.raises(ConfigError, match="it is a watched job and no run") as raised:
            reader.find_run(tmp_path, name)
        for verb in ("logs", "trace breakdown"):
            assert f"`stepmark {verb} {tmp_path / 'watched'}`" in str(raised.value)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for read in (reader.read_info, reader.read):
        with pytest.raises(ConfigError):
            read(tmp_path)


def test_runs_in_sub_folders_are_found(tmp_path: Path) -> None:
    for folder in (".", "sweeps/one/runs", "checks"):
        root = tmp_path / folder
        info = dataclasses.replace(INFO, run_id=f"2026-{len(folder)}")
        new_run(root, info).close()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / ".hidden" / "x").mkdir(parents=True)
    (tmp_path / ".hidden" / "x" / "run.json").touch()
    names = ["2026-1", "2026-15", "2026-6"]
    assert [path.name for path in reader.list_runs(tmp_path)] == names
    assert reader.find_run(tmp_path, "2026-15") == tmp_path / "sweeps/one/runs/2026-15"
    with pytest.raises(ConfigError, match="one run, not 3"):
        reader.find_run(tmp_path, "2026")
    assert reader.find_run(tmp_path, "latest").name == "2026-6"


def test_a_plan_alone_is_a_run_without_a_result(tmp_path: Path) -> None:
    (tmp_path / "planned").mkdir()
    (tmp_path / "planned" / "plan.jsonl").write_text("{}\n")
    (path,) = reader.list_runs(tmp_path)
    found = reader.read(path)
    assert (found.records, found.is_known) == ([], False)
    assert "nothing was measured yet" in found.notes[0]


def test_the_file_may_have_passed_through_other_hands(tmp_path: Path) -> None:
    path = write(tmp_path, measured(4), failed(8))
    for name in ("run.json", "records.jsonl"):
        plain = (path / name).read_bytes()
        windows = codecs.BOM_UTF8 + plain.replace(b"\n", b"\r\n")
        (path / name).write_bytes(gzip.compress(windows))
    found = reader.read(path)
    assert (found.records, found.info, found.notes) == ([measured(4), failed(8)], INFO, ())


def test_a_newer_run_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    (path / "run.json").write_bytes(codec.encode_run(dataclasses.replace(INFO, schema=99)))
    with pytest.raises(ConfigError, match="newer stepmark"):
        reader.read_info(path)


def test_a_broken_samples_file_is_a_damaged_record(tmp_path: Path) -> None:
    path = write(tmp_path, measured(n=5000), failed(8))
    (back, _) = reader.read_records(path)
    assert isinstance(back, Measured)
    file = path / back.samples.file
    file.write_bytes(file.read_bytes()[:50])
    found = reader.read(path)
    assert found.records == [failed(8)]
    assert "npy" in found.notes[0]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "x", None, [1.0]])
def test_an_impossible_sample_is_a_damaged_record(tmp_path: Path, value: object) -> None:
    path = write(tmp_path, measured(4), measured(8))
    file = path / "records.jsonl"
    first, second = file.read_bytes().splitlines()
    plain = json.loads(first)
    plain["samples"]["seconds"][0][0] = value
    file.write_bytes(json.dumps(plain).encode() + b"\n" + second + b"\n")
    found = reader.read(path)
    assert found.records == [measured(8)]
    assert "1 of 2 records" in found.notes[0]


def test_a_plan_keeps_how_each_case_is_profiled_and_older_plans_have_none() -> None:
    entries = tuple(
        Entry(
            position=place,
            launch=1,
            case=OpCase(op=Copy(num_bytes=place + 1), backend="torch"),
            profile=profile,
        )
        for place, profile in enumerate((Profile.NONE, Profile.PAUSED))
    )
    plan = Plan(command="op", device="cuda", world_size=1, entries=entries)
    text = plans.encode(plan)
    assert plans.decode(text) == plan
    older = text.replace(b'"profile":"paused",', b"")
    assert [entry.profile for entry in plans.decode(older).entries] == [""] * 2
    with pytest.raises(ConfigError, match="profile"):
        plans.decode(text.replace(b'"paused"', b'"sometimes"'))
