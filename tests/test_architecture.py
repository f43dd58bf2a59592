"""Rules of the house that no tool checks: names, sizes, tables, imports."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from stepmark.core.ops import FAMILIES
from stepmark.core.ops.shape_text import shape_text

from .core.ops_samples import PLAIN

SOURCE = Path(__file__).parents[1] / "src" / "stepmark"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 400, 60
LONG_FILES = {
    "core/model.py": "a count, its check and its scaling belong to the same fields",
}
LONG_FUNCTIONS: dict[str, str] = {
    "core/model.py:scaled": "one rounding rule per field of one constructor call",
    "cli/check.py:check": "its parameters are its flags, with their help",
    "cli/compare.py:compare": "its parameters are its flags, with their help",
}


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_file_is_a_drawer(file: Path) -> None:
    assert file.stem not in {"utils", "util", "common", "helpers", "base", "misc"}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_short(file: Path) -> None:
    lines = len(file.read_text().splitlines())
    limit = 500 if name_of(file) in LONG_FILES else MAX_FILE
    assert lines <= limit


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_functions_are_short(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            where = f"{name_of(file)}:{node.name}"
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= (120 if where in LONG_FUNCTIONS else MAX_FUNCTION), where


def test_no_exception_outlives_its_reason() -> None:
    for name in LONG_FILES:
        assert len((SOURCE / name).read_text().splitlines()) > MAX_FILE, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_in_every_table(family: str) -> None:
    from stepmark.bench.operators.table import IMPLS

    assert IMPLS[family], family
    assert IMPLS.keys() == FAMILIES.keys()
    text = shape_text(PLAIN[family])
    assert text
    assert len(text) < 60


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_are_values(family: str) -> None:
    op = PLAIN[family]
    assert hash(op) == hash(dataclasses.replace(op))


HEAVY = ("torch", "numpy", "plotly", "duckdb", "rich", "psutil", "pynvml")


def loaded_by(code: str) -> list[str]:
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].split()


def test_the_command_line_imports_nothing_heavy() -> None:
    assert loaded_by("import stepmark.cli.main") == []


@pytest.mark.parametrize("arguments", [["--help"], ["op", "gemm", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"from stepmark.cli.main import status\nassert status({arguments}) == 0"
    assert loaded_by(code) == []


def test_core_and_workload_import_no_torch() -> None:
    modules = [
        "stepmark." + name_of(file)[:-3].replace("/", ".").removesuffix(".__init__")
        for file in FILES
        if name_of(file).split("/")[0] in ("core", "workload", "launch")
    ]
    assert len(modules) > 20
    assert "torch" not in loaded_by("import " + ", ".join(modules))
