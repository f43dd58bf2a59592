"""Output files appear whole or not at all; what is no regular file is never replaced."""

import os
import stat
import threading
from pathlib import Path

import pytest

from stepmark.ground import files
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import new_file, write_text, written

from .devices import device


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("old")
    path.chmod(0o640)
    with written(path) as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_text() == "old"
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "x", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def interrupted() -> None:
        with written(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_followed(tmp_path: Path, dangling: bool) -> None:
    target, link = tmp_path / "deep" / "target", tmp_path / "link"
    target.parent.mkdir()
    if not dangling:
        target.write_text("old")
    link.symlink_to("deep/target")
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join(10)
    assert got == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_in_place(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    link = tmp_path / "link"
    link.symlink_to(device(tmp_path / "dev", "null"))
    write_text(link, "gone")
    assert link.is_symlink()
    assert stat.S_ISCHR(link.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_an_open_descriptor_keeps_what_it_has(tmp_path: Path, name: str) -> None:
    """As `stepmark ... --csv /dev/stdout > file`, after a line on stdout."""
    with (tmp_path / "x").open("w") as stream:
        stream.write("before\n")
        stream.flush()
        write_text(name.format(stream.fileno()), "row\n")
        stream.write("after\n")
    assert (tmp_path / "x").read_text() == "before\nrow\nafter\n"


@pytest.mark.parametrize("name", ["full", ".", "missing/x", "a\0b", "loop"])
def test_what_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    before = sorted(os.listdir())
    name = str(device(tmp_path, name)) if name == "full" else name
    with pytest.raises(ConfigError, match="can be written") as caught:
        write_text(name, "text", "html")
    assert caught.value.field == "html"
    assert set(os.listdir()) - {"full"} == set(before)


def test_a_read_only_file_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write it all the same, so the answer of the system is made up here."""
    path = tmp_path / "x"
    path.write_text("old")
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="read-only"):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_a_new_file_is_never_another(tmp_path: Path) -> None:
    made = [new_file(tmp_path / "out.json") for _ in range(3)]
    assert [path.name for path in made] == ["out.json", "out.json.0", "out.json.1"]
    with pytest.raises(ConfigError, match="can be written"):
        new_file(tmp_path / "missing" / "out.json")


def test_a_lock_that_another_has_leaves_no_open_file(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    with files.Lock(first, "run", tmp_path, "one that no other process writes"):
        with pytest.raises(ConfigError, match="no other process"):
            files.Lock(second, "run", tmp_path, "one that no other process writes")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(second)
