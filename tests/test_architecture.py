"""Rules of the package that no tool checks: names, sizes, tables, imports."""

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import size

from stepmark.core.ops import FAMILIES

from .core.ops_samples import PLAIN

SOURCE = Path(__file__).parents[1] / "src" / "stepmark"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 400, 60
LONG_FILES = {
    "core/model.py": "a count, its check and its scaling belong to the same fields",
}
LONG_FUNCTIONS: dict[str, str] = {}


# Names that say nothing of what a file holds.
NAMELESS = {"utils", "util", "common", "helpers", "base", "misc"}


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def test_files_have_names_that_say_what_they_hold() -> None:
    assert [name_of(file) for file in FILES if file.stem in NAMELESS] == []


def test_files_are_short() -> None:
    lines = {name_of(file): len(file.read_text().splitlines()) for file in FILES}
    limits = {name: 500 if name in LONG_FILES else MAX_FILE for name in lines}
    assert {name: count for name, count in lines.items() if count > limits[name]} == {}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function, with "file:name"."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{name_of(file)}:{node.name}", node


def test_functions_are_short() -> None:
    lengths = {where: (node.end_lineno or 0) - node.lineno + 1 for where, node in functions()}
    limits = {where: 120 if where in LONG_FUNCTIONS else MAX_FUNCTION for where in lengths}
    assert {name: count for name, count in lengths.items() if count > limits[name]} == {}


def test_no_exception_outlives_its_reason() -> None:
    for name in LONG_FILES:
        assert len((SOURCE / name).read_text().splitlines()) > MAX_FILE, name
    lengths = {where: (node.end_lineno or 0) - node.lineno + 1 for where, node in functions()}
    assert [where for where in LONG_FUNCTIONS if lengths.get(where, 0) <= MAX_FUNCTION] == []


def test_the_package_does_not_grow() -> None:
    """Lines and files by room, and in all. `make size ARGS=all` lowers the limits."""
    assert size.problems(size.limits()[0], size.found()) == []


@pytest.mark.parametrize("name", ["mapping_options", "late_imports"])
def test_what_should_be_rare_becomes_rarer(name: str) -> None:
    """`make size ARGS=all` lowers the limit."""
    count, most = size.found_counts()[name], size.limits()[1][name]
    assert count <= most
    assert most <= max(1.02 * count, count + 3), "make size"


@pytest.mark.parametrize(
    ("limit", "lines", "words"),
    [(1000, 1001, "grew"), (1000, 980, None), (1000, 1000, None), (1000, 940, "make size")],
)
def test_a_limit_is_what_is_there(limit: int, lines: int, words: str | None) -> None:
    problems = size.problems({"core": (limit, 9)}, {"core": (lines, 9)})
    assert len(problems) == (words is not None)
    assert not words or words in problems[0]


def test_only_rooms_write_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "size.toml"
    lines, files = size.found()["core"]
    text = f"{{ lines = {lines - 1}, files = {files} }}"
    table.write_text(f"[rooms]\ncore = {text}\n[counts]\n")
    before = table.read_text()
    monkeypatch.setattr(size, "TABLE", table)
    assert size.main(["--help"]).startswith("--help is no room: give one of ")
    assert size.main(["core", "attic"]).startswith("attic is no room")
    assert size.main([]) == ""
    assert table.read_text() == before
    assert size.main(["all"]) == ""
    assert size.limits()[0]["core"] == (lines - 1, files)
    assert size.main(["core"]) == ""
    assert size.limits()[0]["core"] == (lines, files)


def test_a_new_room_needs_a_limit() -> None:
    assert len(size.problems({}, {"attic": (3, 1)})) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_in_every_table(family: str) -> None:
    from stepmark.bench.operators import IMPLS

    assert IMPLS[family], family
    assert IMPLS.keys() == FAMILIES.keys()
    text = PLAIN[family].shape_text
    assert text
    assert len(text) < 60


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_are_values(family: str) -> None:
    op = PLAIN[family]
    assert hash(op) == hash(dataclasses.replace(op))


def test_what_is_imported_by_its_name_is_there() -> None:
    """Handlers and the like stand as text, "module:name", which no type checker reads."""
    missing = []
    for file in FILES:
        for module, name in re.findall(r'"stepmark\.([a-z_.]+):(\w+)"', file.read_text()):
            path = SOURCE / module.replace(".", "/")
            target = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            text = target.read_text() if target.is_file() else ""
            if not re.search(rf"^(?:def |class )?{name}\b", text, re.MULTILINE):
                missing.append(f"{name_of(file)}: {module}:{name}")
    assert missing == []


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
