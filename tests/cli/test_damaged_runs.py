"""Damaged runs: every verb reads the same records of them, and says what it left out."""

import csv
import io
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli import main

RESULTS = Path(__file__).parents[2] / "results"
# An operator's, a collective's and a training step's run.
NAMES = ("h200-attention-burst", "h200-x4-comm-torch-api", "h200-x4-train-proxy-ddp")
MANY = 12


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Verbs:
    """The verbs that read runs, and what each says of a run."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, list[str]]:
        code = main.status([str(word) for word in words])
        told = self.capsys.readouterr()
        assert "Traceback" not in told.err
        return (
            code,
            told.out,
            [x for x in told.err.splitlines() if x.startswith("stepmark: run")],
        )

    def listed(self, root: Path) -> tuple[int, str]:
        code, out, _ = self("runs", "list", "--runs", root, "--json", "-")
        assert code == 0
        (row,) = json.loads(out)
        return row["measured"] + row["skipped"] + row["failed"], row.get("unreadable", "")

    def queried(self, root: Path) -> tuple[int, list[str]]:
        query = "SELECT count(DISTINCT (case_id, launch)) AS n FROM records"
        code, out, said = self("runs", "sql", query, "--runs", root, "--json", "-")
        assert code == 0
        return json.loads(out)[0]["n"], said

    def shown(self, run: Path) -> tuple[set[str], list[str]]:
        """The cases that ran."""
        code, out, said = self("runs", "show", run, "--csv", "-")
        assert code == 0
        rows = csv.DictReader(io.StringIO(out))
        return {row["case_id"] for row in rows}, said

    def compared(self, run: Path) -> tuple[int, list[str]]:
        """Lines of the run with itself under another name; a run without times is refused."""
        other = run.with_name("other")
        shutil.copytree(run, other)
        code, out, _ = self("compare", run, other, "--json", "-")
        shutil.rmtree(other)
        if code == 2:
            return 0, []
        document = json.loads(out)
        return len(document["lines"]), document["notes"]


@pytest.fixture
def verbs(capsys: pytest.CaptureFixture[str]) -> Verbs:
    return Verbs(capsys)


def damaged(name: str, root: Path, seed: int) -> tuple[Path, int]:
    """A copy of a published run with some lines spoilt; how many records are whole."""
    rng = random.Random(f"{name} {seed}")
    run = root / name
    shutil.copytree(RESULTS / name, run)
    lines = (run / "records.jsonl").read_bytes().splitlines()[:8]
    spoilt = [spoil(rng, line) if rng.random() < 0.5 else line for line in lines]
    text = b"\n".join(spoilt) + b"\n"
    if rng.random() < 0.3:  # killed while it wrote
        text += lines[0][: rng.randrange(1, len(lines[0]))]
    (run / "records.jsonl").write_bytes(text)
    if rng.random() < 0.3:
        info = (run / "run.json").read_bytes()
        (run / "run.json").write_bytes(spoil(rng, info))
    return run, sum(new == old for new, old in zip(spoilt, lines, strict=True))


def spoil(rng: random.Random, line: bytes) -> bytes:
    """Bytes lost or changed, or another value somewhere in the JSON."""
    way = rng.randrange(4)
    at = rng.randrange(len(line))
    if way == 0:
        return line[:at].replace(b"\n", b" ")
    if way == 1:
        return line[:at] + bytes([rng.choice(b'\x00\xff"}-')]) + line[at + 1 :]
    plain = json.loads(line)
    places = list(_places(plain))
    samples = [place for place in places if isinstance(place[0][place[1]], float)]
    holder, key = rng.choice(samples if way == 2 and samples else places)
    wrong: list[Any] = [None, -1, 0, "x", [], {}, -0.5, 1e400, "nan", True, 2**70, ""]
    holder[key] = rng.choice(wrong)
    return json.dumps(plain).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


@pytest.mark.parametrize("seed", range(MANY))
@pytest.mark.parametrize("name", NAMES)
def test_verbs_agree_on_a_damaged_run(
    name: str, seed: int, tmp_path: Path, verbs: Verbs
) -> None:
    root = tmp_path / "runs"
    run, _ = damaged(name, root, seed)
    count, unreadable = verbs.listed(root)
    number, said_by_sql = verbs.queried(root)
    assert number == count
    cases, said_by_show = verbs.shown(run)
    assert len(cases) <= count
    assert (count == 0) == (not cases)
    assert said_by_show == said_by_sql
    assert bool(unreadable) == bool(said_by_sql)
    assert verbs("report", run, "--out", tmp_path / "x.html")[0] == 0
    lines, notes = verbs.compared(run)
    assert lines <= count
    for one in said_by_sql if lines else []:
        assert any(one.removeprefix("stepmark: ") in note for note in notes)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_whole_is_read_whatever_stands_beside_it(
    name: str, tmp_path: Path, verbs: Verbs
) -> None:
    """Lines that are surely no record: as many remain as there were others."""
    run = tmp_path / "runs" / name
    shutil.copytree(RESULTS / name, run)
    before = verbs.listed(tmp_path / "runs")
    first, *rest = (run / "records.jsonl").read_bytes().splitlines(keepends=True)
    negative = json.loads(first)
    negative["samples"]["seconds"][0][0] *= -1
    bad = [b"{}\n", b"\n", b"\xff\xfe\n", b"[1]\n", json.dumps(negative).encode() + b"\n"]
    (run / "records.jsonl").write_bytes(b"".join([*bad, first, *rest, first[:40]]))
    (run / "run.json").write_text("{")
    count, unreadable = verbs.listed(tmp_path / "runs")
    assert (before[1], count) == ("", before[0])
    total = len(bad) + 1 + len([first, *rest])
    assert f"{len(bad) + 1} of {total} records cannot be read" in unreadable
    assert verbs.queried(tmp_path / "runs")[0] == count
    cases, said = verbs.shown(run)
    assert len(cases) <= count
    assert len(said) == 2
    assert verbs.compared(run)[0] > 0
