"""docs/python.md and the notebooks are true: their code runs, their outputs are real."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests import fork_server, notebook, python_docs
from tests.cli.process import environment

import stepmark as sm

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# Code, and its output where it prints something.
_BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)


def test_the_reference_is_that_of_the_functions() -> None:
    """Renew it with: python tests/python_docs.py."""
    assert python_docs.FILE.read_text() == python_docs.guide() + python_docs.reference()
    shown = set(python_docs.ORDER)
    errors = {"ConfigError", "NothingToMeasureError", "StepmarkError"}
    assert shown == set(sm.__all__) - errors - {"__version__"}
    assert all(f"`sm.{name}`" in python_docs.guide() for name in errors)


def test_examples_print_what_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before the measurements, whose figures differ each time."""
    for name in ("examples", "results", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    guide, _, rest = python_docs.guide().partition("## Measure\n")
    assert len(_BLOCK.findall(rest)) > 3
    names: dict[str, object] = {}
    blocks = _BLOCK.findall(guide)
    assert len(blocks) > 7
    for code, expected in blocks:
        outputs = notebook.execute(code, names)
        assert "".join(text for each in outputs for text in each["text"]) == expected


@pytest.mark.ranks
def test_notebooks_run(tmp_path: Path) -> None:
    """Each in a process of its own; together they take less than 30 s on two idle cores."""
    shutil.copy(ROOT / "examples" / "frontier-rccl.txt", tmp_path)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    variables = environment() | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    assert len(NOTEBOOKS) == 3
    for file in NOTEBOOKS:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = fork_server.server().fork_command(
                ["tests.forking", "tests.notebook", str(file)],
                variables,
                str(folder),
                (out.fileno(), err.fileno()),
            )
            code = process.wait(200)
            err.seek(0)
            assert code == 0, err.read()


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_are_kept_with_their_outputs(file: Path) -> None:
    document: dict[str, Any] = json.loads(file.read_text())
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) - 1
    assert len(file.read_bytes()) < 100_000


def test_a_cell_s_outputs_are_what_it_prints_and_its_last_value() -> None:
    names: dict[str, object] = {"sm": sm}
    outputs = notebook.execute("print(1)\nprint(2)\nsm.Table([{'a': 3}])", names)
    assert [output["output_type"] for output in outputs] == ["stream", "execute_result"]
    assert outputs[0]["text"] == ["1\n", "2\n"]
    assert "<td" in "".join(outputs[1]["data"]["text/html"])
    assert notebook.execute("x = 1", names) == []
    with pytest.raises(ZeroDivisionError):
        notebook.execute("1 / 0", names)
