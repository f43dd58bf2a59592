"""stepmark logs: what it sniffs, what it prints, its ways out, its exit codes."""

import gzip
import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
from tests.collectives.comm_records import comm_case, comm_measured, comm_run
from tests.job_logs.flight_samples import SAMPLE, dump, entry, write
from tests.job_logs.test_inspector import header, operation
from tests.store.writers import new_run

from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.log_sources import FLIGHT, INSPECTOR, LOG, TABLES, collect, kinds_of
from stepmark.model.collectives import Collective, Mode

ROOT = Path(__file__).parents[2]
COLL = ROOT / "examples" / "coll.log"
LOGS = SAMPLE.parent / "nccl-logs" / "fsdp8"
TABLE = SAMPLE.parent / "nccl-tests" / "8xH200-all_reduce.txt"


def logs(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    code = status(["logs", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    _, out, _ = logs(capsys, *words, "--json", "-")
    return json.loads(out)


def calls(rows: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for row in rows:
        key = (row["collective"], row["from_bytes"])
        counts[key] = counts.get(key, 0) + row["calls_per_rank"]
    return counts


@pytest.fixture
def inspector(tmp_path: Path) -> Path:
    path = tmp_path / "inspector.log"
    lines = [header(rank) | operation("AllGather", 2**20, 200) for rank in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


# Laws


def test_dumps_and_logs_of_one_job_count_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, SAMPLE, LOGS)
    by_kind = {source["kind"]: calls(source["histogram"]) for source in found["sources"]}
    assert by_kind[LOG] == by_kind[FLIGHT]
    assert sum(by_kind[LOG].values()) == 260


@pytest.mark.parametrize("bins", ["craypat", "pow2", "exact", "1K,64K,128M"])
@pytest.mark.parametrize("by", ["collective", "phase", ",", "collective,dtype,group,phase"])
def test_every_way_of_counting_has_all_calls(
    capsys: pytest.CaptureFixture[str], bins: str, by: str
) -> None:
    (source,) = document(capsys, SAMPLE, "--bins", bins, "--by", by)["sources"]
    assert sum(row["calls"] for row in source["histogram"]) == 1040
    assert sum(row["bytes"] for row in source["histogram"]) == 960 * 94380032 + 80 * 262148096


def test_csv_and_json_have_the_same_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = logs(capsys, SAMPLE, "--histogram", "--csv", "-")
    (source,) = document(capsys, SAMPLE)["sources"]
    assert code == 0
    assert len(out.splitlines()) == 1 + len(source["histogram"])
    assert logs(capsys, SAMPLE, "--csv", f"{tmp_path}/", "--json", f"{tmp_path}/")[0] == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert {"histogram.csv", "ranks.csv", "findings.csv", "logs.json"} <= names


# The example


def test_the_example_says_that_ranks_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = logs(capsys, COLL, "--histogram")
    assert (code, err) == (0, "")
    assert "the number of ranks is unknown for 2 calls" in out
    assert "--ranks N" in out
    assert out.count("213913600  per rank") == 2
    _, out, _ = logs(capsys, COLL, "--histogram", "--ranks", 8)
    assert out.count(f"{8 * 213913600}  message") == 2
    assert "unknown" not in out


# Curves


def test_a_curve_of_a_file(capsys: pytest.CaptureFixture[str], inspector: Path) -> None:
    # The figures stand in the file: 8 ranks, 1048576 bytes out of place.
    inspector.write_text(inspector.read_text().replace("AllGather", "AllReduce"))
    (line,) = [
        line for line in TABLE.read_text().splitlines() if line.split()[:1] == ["1048576"]
    ]
    found = document(capsys, inspector, "--curve", TABLE, "--steps", 2)
    (source,) = found["sources"]
    (row,) = source["histogram"]
    seconds = float(line.split()[5]) / 1e6
    assert row["expected_per_rank_s"] == pytest.approx(seconds)
    assert row["times_expected"] == pytest.approx(200e-6 / seconds)
    assert source["curve"]["seconds_per_rank_and_step"] == pytest.approx(seconds / 2)
    _, out, _ = logs(capsys, inspector, "--curve", TABLE, "--steps", 2)
    assert "one after another and without waiting" in out


def test_a_curve_of_a_run(
    capsys: pytest.CaptureFixture[str], inspector: Path, tmp_path: Path
) -> None:
    # Other ways of calling are in the run as well: they are no part of the curve.
    case = comm_case(Collective.ALL_GATHER, 8 * 2**20)
    cases = {
        replace(case, in_place=True): 2e-3,
        replace(case, mode=Mode.GRAPH): 1e-3,
        case: 1e-4,
        replace(case, skew_s=1e-3): 3e-3,
        replace(case, beside="gemm:64x64x64"): 4e-3,
    }
    with new_run(tmp_path / "runs", comm_run()) as writer:
        for one, seconds in cases.items():
            writer.append(comm_measured(one, [[seconds] * 3] * 8))
    words = (inspector, "--curve", "latest", "--runs", tmp_path / "runs")
    (source,) = document(capsys, *words)["sources"]
    (row,) = source["histogram"]
    assert row["expected_per_rank_s"] == pytest.approx(1e-4)
    assert row["times_expected"] == pytest.approx(2.0)
    assert (row["curve"], row["covered_calls"]) == ("measured", 8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--curve", TABLE), "times of all_gather; it has all_reduce"),
        (
            ("--curve", "missing.txt"),
            "curve missing.txt is invalid: it must be a file that exists",
        ),
        (("--curve", COLL), "times of collectives"),
        (("--bins", "7,3"), "bins 7,3"),
        (("--bins", "3Q"), "--bins 3Q is invalid: it must be craypat, pow2, exact, or"),
        (
            ("--tables", "--histogram"),
            "--histogram is invalid: it cannot be combined with --ta",
        ),
        (("--tables", "--steps", "3"), "--steps 3 is invalid: it cannot be combined with"),
        (("--by", "rank"), "by rank"),
        (("--ranks", "0"), "from 1"),
        (("--steps", "0"), "--steps 0 is invalid: it must be from 1 to"),
        (("--html", "/nowhere/x.html"), "can be written"),
    ],
)
def test_bad_flags_are_one_line(
    capsys: pytest.CaptureFixture[str], inspector: Path, words: tuple[object, ...], said: str
) -> None:
    code, _, err = logs(capsys, inspector, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


# Findings and exit codes


def test_a_mismatch_is_exit_code_1_with_both_sides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path, {0: dump([entry(1)]), 1: dump([entry(1, "broadcast")])})
    code, out, _ = logs(capsys, tmp_path)
    assert code == 1
    assert "problem: Ranks disagree on collective 1 of group 0 default_pg" in out
    assert "nccl_trace_rank_1: rank 1: 1 broadcast of 1024 Float" in out
    # A histogram alone does not hide it.
    code, out, _ = logs(capsys, tmp_path, "--histogram")
    assert (code, "Ranks disagree" in out) == (1, True)


def test_dumps_of_a_good_job_do_not_show_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(capsys, SAMPLE, "--ended")[0] == 0
    code, out, _ = logs(capsys, SAMPLE)
    assert code == 3
    assert out.startswith("answer     unknown whether it ended: no line shows an end")
    assert "all_gather: 170 calls per rank, 2 sizes (90.01 MiB to 250 MiB)" in out
    assert "no dump of ranks 4-7" in out


def test_logs_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = logs(capsys, f"{LOGS}/*")
    assert code == 0
    for words in ("2.28.9", "Socket", "P2P/CUMEM", "24 channels", "nccl.vm.3084.log.gz:59:"):
        assert words in out, words
    assert "reduce_scatter: 90 calls per rank" in out
    _, out, _ = logs(capsys, LOGS, "--tuning")
    assert "all_gather of 250 MiB: Ring Simple, 24 channels, 10 calls" in out


def test_inspector_lines(capsys: pytest.CaptureFixture[str], inspector: Path) -> None:
    code, out, _ = logs(capsys, inspector)
    assert code == 3
    assert "8 operations of 8 ranks, format v4.0, timed by: 8 kernel_gpu" in out
    assert "8192" in out
    (source,) = document(capsys, inspector)["sources"]
    (row,) = source["histogram"]
    assert row["busbw_gb_s"] == pytest.approx(7 * 2**20 / 200e-6 / 1e9)


def test_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "logs.html"
    code, out, _ = logs(capsys, SAMPLE, COLL, "--html", page)
    assert (code, out) == logs(capsys, SAMPLE, COLL)[:2]
    text = page.read_text()
    assert escape(out.splitlines()[0].removeprefix("answer").strip()) in text
    assert "Calls by message size" in text
    assert "plotly" in text
    assert "http" not in text.split("</script>")[-2]
    assert logs(capsys, TABLE, "--html", page)[0] == 2


def test_tables_are_listed_named_and_validated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words in ((TABLE,), ("--tables", TABLE)):
        code, out, _ = logs(capsys, *words)
        assert code == 0
        assert f"{TABLE}:1" in out
        assert "ranks: 8 (8 rank lines)" in out
    (table,) = document(capsys, TABLE)["tables"]
    assert (table["collective"], table["num_ranks"]) == ("all_reduce", 8)
    wrong = tmp_path / "wrong.txt"
    (line,) = [one for one in TABLE.read_text().splitlines() if one.split()[:1] == ["1048576"]]
    wrong.write_text(TABLE.read_text().replace(line, line[:-1] + "7"))
    code, out, _ = logs(capsys, wrong)
    assert (code, "problem: " in out) == (1, True)
    assert f"{wrong}:" in out
    code, out, _ = logs(capsys, "--tables", COLL)
    assert (code, out) == (0, f"{COLL}: no table found\n")


def test_a_table_that_cannot_be_read_is_refused_and_beside_others_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    unread = "\tCOMMS-RES  total-size (B)  BusBW(GB/s)\n\tCOMMS-RES-all_reduce-float32  1024\n"
    path = tmp_path / "output.txt"
    for text in (unread, unread.splitlines()[1]):
        path.write_text(text)
        code, out, err = logs(capsys, path)
        assert (code, out) == (2, "")
        assert "that can be read" in err or "cannot be read: no row fits its headings" in err
    path.write_text(TABLE.read_text() + unread)
    code, out, _ = logs(capsys, path)
    assert code == 0
    assert "PARAM cannot be read: no row fits its headings" in out
    assert "[table-unread]" in out
    assert f"{path}:1" in out


def test_messages_of_an_output_with_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    both = tmp_path / "job.out"
    both.write_bytes(COLL.read_bytes() + TABLE.read_bytes())
    assert f"{both}:1" in logs(capsys, both)[1]
    assert f"{both}:1" not in logs(capsys, both, "--histogram")[1]


# Sniffing


def test_kinds(inspector: Path, tmp_path: Path) -> None:
    assert kinds_of(COLL) == {LOG}
    assert kinds_of(next(SAMPLE.glob("*.gz"))) == {FLIGHT}
    assert kinds_of(inspector) == {INSPECTOR}
    assert kinds_of(TABLE) == {TABLES}
    both = tmp_path / "both.txt.gz"
    both.write_bytes(gzip.compress(COLL.read_bytes() + TABLE.read_bytes()))
    assert kinds_of(both) == {LOG, TABLES}


def test_a_file_is_read_once_however_it_is_named(tmp_path: Path) -> None:
    first = tmp_path / "a[1].log"  # a name that a pattern would not match
    first.write_bytes(COLL.read_bytes())
    found = collect([str(first), str(tmp_path), f"{tmp_path}/*.log"])
    assert found.paths[LOG] == [first]


def test_a_folder_leaves_out_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "coll.log").write_bytes(COLL.read_bytes())
    (tmp_path / "notes.md").write_text("hello")
    (tmp_path / "empty").write_text("")
    code, _, err = logs(capsys, tmp_path)
    assert code == 3
    assert err.count("left out") == 2


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("exit 3",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "one is empty"),
        (b"\0\1\2" * 99, "an NCCL log, a flight-recorder dump"),
        (b"hello", "an NCCL log, a flight-recorder dump"),
        (gzip.compress(COLL.read_bytes() * 99, mtime=0)[:-9], "gzip"),
        (pickle.dumps({"entries": [_Evil()]}), "posix.system"),
        (pickle.dumps(_Evil(), protocol=0), "an NCCL log, a flight-recorder dump"),
        (b'{"coll_perf": 3}', "inspector lines"),
        (b'{"pg_config": 3, "entries": "x"}', "list of at most"),
    ],
)
def test_bad_files_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: bytes, said: str
) -> None:
    path = tmp_path / "rank0"
    path.write_bytes(data)
    code, out, err = logs(capsys, path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_names_without_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for word in (tmp_path, tmp_path / "no", f"{tmp_path}/*", "", "\0"):
        code, _, err = logs(capsys, word)
        assert (code, err.count("\n")) == (2, 1), word


def test_mutated_files_never_give_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    generator = random.Random(3)
    seeds = [
        COLL.read_bytes(),
        pickle.dumps(dump([entry(1), entry(2)])),
        json.dumps(header() | operation()).encode(),
        TABLE.read_bytes()[:1500],
    ]
    path = tmp_path / "rank0"
    for _ in range(300):
        data = bytearray(generator.choice(seeds))
        for _ in range(generator.randint(1, 9)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(bytes(data))
        assert status(["logs", str(path), "--histogram"]) in (0, 1, 2)
        _, err = capsys.readouterr()
        assert "Traceback" not in err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom stepmark.cli.main import status\n"
        "assert status(['logs', '--help']) == 0\n"
        "heavy = {'numpy', 'plotly', 'duckdb', 'rich', 'torch', 'msgspec'}\n"
        "heavy &= sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_collect_refuses_a_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder or pattern with"):
        collect([str(tmp_path)])


def test_steps_share_out_the_messages(capsys: pytest.CaptureFixture[str]) -> None:
    """Per rank 240 calls of 94,380,032 bytes and 20 of 262,148,096, in ten steps."""
    _, out, _ = logs(capsys, LOGS, "--histogram", "--steps", 10)
    assert "# 26 calls of 2.598 GiB per rank and step" in out
    _, out, _ = logs(capsys, LOGS, "--steps", 10)
    assert "  26 calls of 2.598 GiB per rank and step\n" in out
