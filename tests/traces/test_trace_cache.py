"""Parsed columns of traces in the cache: as those that are read, never of another file."""

import gzip
import multiprocessing
import os
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from stepmark.cli.main import status
from stepmark.ground.read_text import read_head
from stepmark.timeline.trace_columns import RankTrace
from stepmark.traces import trace_cache
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.kineto.stream import looks_like_trace
from stepmark.traces.trace_cache import read_cached

pytestmark = pytest.mark.ranks

DATA = Path(__file__).parents[1] / "data"
TRACES = sorted(file for file in DATA.rglob("*.json*") if looks_like_trace(read_head(file)))
A100 = DATA / "traces" / "a100-nccl" / "rank0.json.gz"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a cache that keeps small traces, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trace_cache, "LEAST_BYTES", 1)
    return tmp_path / "cache" / "stepmark" / "traces"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace that a test may change."""
    file = tmp_path / "rank0.json"
    file.write_bytes(gzip.decompress(A100.read_bytes()))
    return file


def unread(path: Path) -> RankTrace:
    raise AssertionError(f"{path} is read")


def assert_equal(a: object, b: object) -> None:
    """Compare all that a trace has, and the types of its columns."""
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif is_dataclass(a):
        assert type(a) is type(b)
        for field in fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


def test_there_are_traces_of_every_kind() -> None:
    assert len(TRACES) > 30


@pytest.mark.parametrize("file", TRACES, ids=lambda file: str(file.relative_to(DATA)))
def test_what_is_kept_equals_what_was_read(file: Path) -> None:
    whole = read_cached(file, read_trace)
    assert_equal(whole, read_trace(file))
    if not whole.info.cut:
        assert_equal(whole, read_cached(file, unread))


@pytest.mark.parametrize("verb", ["breakdown", "ledger", "messages", "kernels"])
def test_reports_are_the_same(
    verb: str, trace: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for flags in (["--no-cache"], [], []):
        assert status(["trace", verb, str(trace), "--json", "-", *flags]) == 0
        outputs.append(capsys.readouterr().out)
        assert cache.exists() != bool(flags)
    assert len(set(outputs)) == 1


def test_without_duckdb_traces_are_read_and_not_kept(
    trace: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert_equal(read_cached(trace, read_trace), read_trace(trace))
    assert not cache.exists()


def test_a_changed_file_is_read_even_if_its_size_and_time_are_the_same(trace: Path) -> None:
    stat = trace.stat()
    first = read_cached(trace, read_trace)
    text = trace.read_bytes()
    place = text.index(b'"dur": ', len(text) // 2) + 7
    digit = b"1" if text[place : place + 1] != b"1" else b"2"
    trace.write_bytes(text[:place] + digit + text[place + 1 :])
    os.utime(trace, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = read_cached(trace, read_trace)
    assert_equal(changed, read_trace(trace))
    with pytest.raises(AssertionError):
        assert_equal(changed, first)


def test_a_file_that_changes_while_it_is_read_is_not_kept(trace: Path, cache: Path) -> None:
    def read(path: Path) -> RankTrace:
        result = read_trace(path)
        path.write_bytes(path.read_bytes() + b" ")
        return result

    read_cached(trace, read)
    assert not cache.exists()


def test_a_copy_is_answered_with_its_own_name(trace: Path, tmp_path: Path) -> None:
    first = read_cached(trace, read_trace)
    copy = tmp_path / "copy.json"
    shutil.copy(trace, copy)
    info = replace(first.info, file=str(copy))
    assert_equal(read_cached(copy, unread), replace(first, info=info))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "empty"])
@pytest.mark.parametrize("name", ["gpu.parquet", "trace.json"])
def test_a_damaged_entry_is_made_again(
    name: str, damage: str, trace: Path, cache: Path
) -> None:
    first = read_cached(trace, read_trace)
    (entry,) = cache.iterdir()
    file = entry / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        kept = {"flip": len(content), "cut": len(content) // 2, "empty": 0}[damage]
        file.write_bytes(content[:kept])
    with pytest.raises(AssertionError, match="is read"):
        read_cached(trace, unread)
    assert_equal(read_cached(trace, read_trace), first)
    assert_equal(read_cached(trace, unread), first)


def _read_and_die(path: Path) -> None:
    trace_cache._digest = lambda _: os._exit(9)  # a table is written, and not all
    read_cached(path, read_trace)


def test_a_killed_writer_leaves_no_entry(trace: Path, cache: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_read_and_die, args=(trace,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    (left,) = cache.iterdir()
    assert left.name.startswith("unfinished-")
    first = read_cached(trace, read_trace)
    assert_equal(read_cached(trace, unread), first)
    os.utime(left, (0, 0))
    read_cached(A100, read_trace)
    assert not left.exists()


def test_several_processes_keep_one_entry(trace: Path, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    work = [context.Process(target=read_cached, args=(trace, read_trace)) for _ in range(4)]
    for process in work:
        process.start()
    for process in work:
        process.join(60)
    assert [process.exitcode for process in work] == [0] * 4
    assert len(list(cache.iterdir())) == 1
    assert_equal(read_cached(trace, unread), read_trace(trace))


def test_the_entry_that_was_used_longest_ago_is_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [DATA / "traces" / "fsdp8" / f"rank{rank}.json.gz" for rank in range(3)]
    for age, file in enumerate(files[:2]):
        read_cached(file, read_trace)
        for entry in cache.iterdir():
            os.utime(entry, (1000 + age, 1000 + age))
    read_cached(files[0], unread)  # which makes the other one the oldest
    size = sum(file.stat().st_size for file in cache.rglob("*.*"))
    monkeypatch.setattr(trace_cache, "MOST_BYTES", size + size // 4)  # of about two
    read_cached(files[2], read_trace)
    read_cached(files[0], unread)
    read_cached(files[2], unread)
    with pytest.raises(AssertionError, match="is read"):
        read_cached(files[1], unread)


def test_small_and_cut_traces_are_not_kept(
    trace: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trace.read_bytes()
    trace.write_bytes(whole[: len(whole) // 2])
    read_cached(trace, read_trace)
    trace.write_bytes(whole)
    monkeypatch.setattr(trace_cache, "LEAST_BYTES", len(whole) + 1)
    read_cached(trace, read_trace)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(
    trace: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert_equal(read_cached(trace, read_trace), read_trace(trace))
    assert not cache.exists()


def test_duckdb_is_imported_for_the_cache_alone(trace: Path) -> None:
    code = (
        "import sys; from stepmark.cli.main import status; "
        f"assert status(['trace', {str(trace)!r}, '--json', '/dev/null']) == 0; "
        "assert status(['trace', '--help']) == 0; assert 'duckdb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
