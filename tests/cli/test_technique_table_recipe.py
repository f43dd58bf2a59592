"""The recipe's bookkeeping: which ranks run which cells, what is kept, what the table says."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parents[2] / "recipes"
ABOUT = {"device": "cpu", "model": "llama-3.1-8b", "nproc": 2}
CELLS = [("amp", "amp"), ("amp", "chk"), ("chk", "chk")]


def loaded() -> ModuleType:
    sys.path.insert(0, str(FOLDER))  # as for a program that lies there
    try:
        return importlib.import_module("technique_table")
    finally:
        sys.path.remove(str(FOLDER))


RECIPE = loaded()


def results(folder: Path, *, resume: bool = False, about: dict[str, Any] | None = None) -> Any:
    return RECIPE.Results(folder / "x.md", about or ABOUT, resume=resume)


def line(cell: tuple[str, str], mark: str, text: str = "") -> dict[str, Any]:
    return {"cell": "+".join(cell), "mark": mark, "text": text}


@given(st.dictionaries(st.sampled_from(["single", "ddp", "tp"]), st.integers(0, 40)), st.data())
def test_every_cell_is_dealt_once_and_evenly(counts: dict[str, int], data: Any) -> None:
    jobs = data.draw(st.integers(1, 12))
    todo = {name: RECIPE.pairs("cuda")[:count] for name, count in counts.items()}
    dealt = RECIPE.dealt(todo, jobs)
    for name, cells in todo.items():
        slices = [some for layout, some in dealt if layout == name]
        assert sorted(cell for some in slices for cell in some) == sorted(cells)
        share = -(-jobs // max(1, sum(map(bool, todo.values()))))
        assert len(slices) == min(share, len(cells))
        sizes = {len(some) for some in slices}
        assert not sizes or max(sizes) - min(sizes) <= 1


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 30))
def test_sets_take_turns_at_gpus(count: int, ranks: int, number: int) -> None:
    """Each set has GPUs of its own kind, and the next one begins where it ended."""
    gpus = [f"GPU-{index}" for index in range(count)]
    ranks = min(ranks, count)
    mine, following = (RECIPE.turn(gpus, ranks, one) for one in (number, number + 1))
    assert len(set(mine)) == ranks
    assert following[0] == gpus[(gpus.index(mine[-1]) + 1) % count]


def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECIPE.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert RECIPE.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert RECIPE.visible_gpus() == ["5", "GPU-7"]


def test_resume_keeps_outcomes_and_tries_the_rest_again(tmp_path: Path) -> None:
    first = results(tmp_path)
    assert first.open("ddp", CELLS) == CELLS
    first.take("ddp", [line(CELLS[0], "V"), line(CELLS[1], "X", "broke")])
    first.open("tp", CELLS)
    first.take("tp", [line(cell, "refused", "no") for cell in CELLS])
    again = results(tmp_path, resume=True)
    assert again.open("ddp", CELLS) == CELLS[1:]
    assert again.open("tp", CELLS) == []
    assert again.open("pp", CELLS[:1]) == CELLS[:1]
    assert [again.mark("ddp", cell) for cell in CELLS] == ["V", "not run", "not run"]
    assert results(tmp_path).open("ddp", CELLS) == CELLS  # not asked to resume


def test_resume_is_of_one_machine_and_model(tmp_path: Path) -> None:
    results(tmp_path).open("ddp", CELLS)
    with pytest.raises(SystemExit, match="'nproc': 4"):
        results(tmp_path, resume=True, about=ABOUT | {"nproc": 4})


def test_the_first_line_of_a_cell_counts_and_lies_on_disk_at_once(tmp_path: Path) -> None:
    found = results(tmp_path)
    found.open("ddp", CELLS)
    found.take("ddp", [line(CELLS[0], "X", "why"), line(CELLS[0], "X", "peer is gone")])
    found.take("ddp", [line(CELLS[0], "V")])
    rows = json.loads((tmp_path / "x.json").read_text())["layouts"]["ddp"]
    assert [(row["mark"], row["text"]) for row in rows] == [
        ("X", "why"),
        ("not run", "not run"),
        ("not run", "not run"),
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.json", "x.md"]


def test_the_table_says_what_was_not_run(tmp_path: Path) -> None:
    found = results(tmp_path)
    found.open("single", CELLS)
    found.open("ddp", CELLS[:2])
    found.take("single", [line(cell, "V") for cell in CELLS])
    found.take("ddp", [line(CELLS[0], "refused", "why not")])
    lines = (tmp_path / "x.md").read_text().splitlines()
    assert lines[2:6] == [
        "| | bf16 autocast | loss in 4 chunks |",
        "|---|---|---|",
        "| bf16 autocast | S; r1: D | S; not run: D |",
        "| loss in 4 chunks |  | S; not run: D |",
    ]
    assert "| single | 1 | 3 V |" in lines
    assert "| ddp | 2 | 2 not run, 1 refused |" in lines
    assert "r1: why not  " in lines


def test_lines_of_ranks_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "outcomes"
    assert RECIPE.read_outcomes(file) is None
    file.write_text("rea")
    assert RECIPE.read_outcomes(file) is None
    file.write_text("ready\n")
    assert RECIPE.read_outcomes(file) == []
    file.write_text('ready\n{"cell": "amp+amp"}\n{"cel')
    assert RECIPE.read_outcomes(file) == [{"cell": "amp+amp"}]


class Ends:
    """In place of a set's ranks: what each start of them says."""

    def __init__(self, *starts: tuple[int, list[dict[str, Any]] | None]) -> None:
        self.starts = list(starts)
        self.asked: list[list[tuple[str, str]]] = []

    def __call__(self, cells: Any, found: Any, *_: Any) -> Any:
        self.asked.append(list(cells))
        code, lines = self.starts.pop(0)
        found.take("ddp", lines or [])
        return code, lines


def worked(folder: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Marks and texts of CELLS once all starts of ranks are over."""
    found = results(folder)
    found.open("ddp", CELLS)
    setting = RECIPE.Setting(layout="ddp", num_ranks=2, device="cpu", model="m")
    one = RECIPE.RankSet(
        setting=setting,
        cells=CELLS,
        variables=dict(os.environ),
        log=folder / "x.logs" / "ddp-0.log",
    )
    monkeypatch.setattr(RECIPE.RankSet, "_start", ends)
    one.work(found, RECIPE.threading.Event(), float("inf"))
    assert not ends.starts
    return [
        (found.outcomes["ddp"][cell]["mark"], found.outcomes["ddp"][cell]["text"])
        for cell in CELLS
    ]


def test_ranks_go_on_after_a_cell_that_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says so, and one in which they end without a word."""
    said = line(CELLS[0], "X", "ValueError") | {"ended": True}
    ends = Ends((1, [said]), (-11, []), (0, [line(CELLS[2], "V") | {"ended": False}]))
    assert worked(tmp_path, ends, monkeypatch) == [
        ("X", "ValueError"),
        ("X", "ranks ended with exit code -11; see ddp-0.log"),
        ("V", ""),
    ]
    assert ends.asked == [CELLS, CELLS[1:], CELLS[2:]]


def test_a_layout_that_does_not_train_at_all_is_x(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ddp does not train at all; see x.logs/"
    assert worked(tmp_path, Ends((1, None)), monkeypatch) == [("X", text)] * 3
