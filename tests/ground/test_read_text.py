"""Files that are no files, and gzip bombs."""

import gzip
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import MAX_RATIO, read_npy, read_text, read_whole


@pytest.mark.parametrize(
    "name", ["pipe", "/dev/zero", "/dev/null", "/dev/tty", "folder", "loop"]
)
def test_what_is_no_file_is_refused_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="it must be a"):
        read_whole(Path(name), "file")


def test_a_pipe_that_is_written_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "a line\n" * 100_000  # more than a pipe holds
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    assert read_text(pipe) == text
    writer.join()


def test_a_descriptor_of_this_process_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"text")
    os.close(writer)
    assert read_text(Path(f"/dev/fd/{reader}")) == "text"
    os.close(reader)


def test_a_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"text\n") + gzip.compress(bytes(2**20)) * 4000)
    with pytest.raises(ConfigError, match=f"more than {MAX_RATIO} times"):
        read_whole(path, "file")


def test_members_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n"))
    assert read_text(path) == "a\nb\n"


@pytest.mark.parametrize(
    ("shape", "kind"), [("(10000000000000,)", "<f8"), ("(2,)", "|O"), ("(-1,)", "<f8")]
)
def test_an_array_that_its_file_does_not_hold(tmp_path: Path, shape: str, kind: str) -> None:
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    with pytest.raises(ConfigError, match="a readable"):
        read_npy(path, "samples")
    np.save(path, np.arange(3.0))
    assert read_npy(path, "samples").tolist() == [0, 1, 2]
