"""Bad input: refused in one line, or read as far as it goes; never an exception, never long."""

import contextlib
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.comm_records import comm_run

from stepmark.collectives.peer_formats import json_document
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_bytes
from stepmark.job_logs.log_summary import rows
from stepmark.text_tables import find, looks_like_tables, tables_of
from stepmark.text_tables.validate import validate

from .nccl_samples import FAMILIES, modern
from .table_samples import RCCL_NODE, made_up_rows

SLIDES = Path(__file__).parents[2] / "examples" / "frontier-rccl.txt"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\x7fELF\x00\x01" * 40, "binary"),
        (gzip.compress(b"a text " * 999, mtime=0)[:40], "complete gzip"),
        (b"\x1f\x8b\x08 no gzip", "gzip"),
        (gzip.compress(b"PK\x00\x00" * 99, mtime=0), "binary"),
    ],
    ids=["empty", "blank", "binary", "cut gzip", "false gzip", "packed binary"],
)
def test_files_without_text_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        find(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_over_the_limit_is_refused(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    path = tmp_path / "file"
    path.write_bytes(pack(b"x" * 100))
    assert len(read_bytes(path, 100)) == 100
    with pytest.raises(ConfigError, match="at most"):
        read_bytes(path, 99)


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        find(tmp_path / "none")
    with pytest.raises(ConfigError, match="folder"):
        find(tmp_path)


def mutated(text: str, random: Random) -> str:
    """A few random injuries: cut, doubled, swapped, replaced, long."""
    for _ in range(random.randint(1, 4)):
        at, length = random.randrange(len(text) + 1), random.randint(0, 40)
        kind = random.randrange(7)
        piece = text[at : at + length]
        if kind == 0:
            text = text[:at] + text[at + length :]
        elif kind == 1:
            text = text[:at] + piece * random.randint(2, 5) + text[at:]
        elif kind == 2:
            text = text[:at] + random.choice("\t\n ,|{}[]\"'\\\0é9e-.#") * length + text[at:]
        elif kind == 3:
            text = text[:at]
        elif kind == 4:
            text = text[:at] + "9" * random.choice((20, 400)) + text[at:]
        elif kind == 5:
            lines = text.split("\n")
            random.shuffle(lines)
            text = "\n".join(lines)
        else:
            odd = random.choice(
                ("nan", "inf", "-1", "1e999", "0", "N/A", "1e-999", "null", "{")
            )
            text = text[:at] + odd + text[at + length :]
    return text


def fuzz_sources() -> list[str]:
    rows_here = made_up_rows()[:6]
    document = json.dumps(json_document(rows_here, comm_run(), ["all_reduce_perf"]))
    slides = SLIDES.read_text().split("\n\n")
    csv = RCCL_NODE + "0,AllReduce,4,1024,float,sum,0,20.5,0.05,0.07,0\n" * 3
    own = ",".join(rows_here[0]) + "\n"
    own += "".join(",".join(str(v or "") for v in row.values()) + "\n" for row in rows_here)
    return [
        *(build() for build, _, _ in FAMILIES.values()),
        document,
        csv,
        own,
        *(part for part in slides if "\t" in part or "train_" in part),
        '{"#wrong":"0","algBw":0.05,"busBw":0.08,"gpus":4,"inPlace":0,"name":"AllReduce",'
        '"redop":"sum","size":1024,"time":19.2,"type":"float"}\n' * 3,
    ]


def test_no_injury_of_a_file_ends_in_an_exception() -> None:
    random, sources = Random(20251121), fuzz_sources()
    found = 0
    for _ in range(5000):
        text = mutated(random.choice(sources), random)
        try:
            tables = tables_of(text, "x")
        except ConfigError:
            continue
        looks_like_tables(text)
        for table in tables:
            validate(table)
            found += len(table.readings)
            for reading in table.readings:
                for value in (reading.time_s, reading.rate, reading.rate_below):
                    assert value is None or 0 <= value < float("inf")
        rows([(table, ()) for table in tables])
    assert found > 20_000  # the injured files are still mostly read


@pytest.mark.parametrize(
    "line",
    [
        "1 " * 200_000,
        "\t" * 400_000,
        "| " * 200_000,
        "9" * 400_000,
        "(" * 400_000,
        "'train_runtime: " * 30_000,
        "images/s " * 40_000,
        "a: " * 100_000,
        "1,2" * 100_000,
        "#" * 400_000,
        "[0] " * 100_000,
        "x/_perf " * 50_000,
    ],
    ids=lambda line: line[:8],
)
def test_long_lines_take_no_long_time(line: str) -> None:
    before = time.perf_counter()
    tables_of(f"{line}\n{modern()}{line}\n" + "\n".join([line[:3000]] * 40), "x")
    assert time.perf_counter() - before < 5


@given(st.binary(min_size=1, max_size=400), st.booleans())
def test_any_bytes_are_tables_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "file"
    path.write_bytes(gzip.compress(data) if packed else data)
    with contextlib.suppress(ConfigError):
        assert isinstance(find(path), list)
