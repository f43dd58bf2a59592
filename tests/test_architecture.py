"""Rules of the package that no tool checks: names, sizes, tables, imports."""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.model.ops_samples import PLAIN
from validation import statements

from stepmark.model.ops import FAMILIES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepmark"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE = 800
MAX_FUNCTION = 60
# Raised where new work has been given room of its own, never to make a change fit: 80 for
# readers of messages' groups, 110 for figures of recomputed products and names of models, 25
# for imports of modules that lie in several folders, and for the entry of earlier versions, 20
# for what a package did before: pages of help, and completions; 2,860 for diagnosis of jobs:
# reports of launchers, RAS and torch's analyzer, six formats of tables, and their judgement;
# 170 for verdicts on tables of unlike rows, and the noise of tables of one value; 610 for
# limits: bounded readers, redaction, codes between agents, budgets, what the system lacks; 540
# for networks, devices of users, and predictions of a framework's job; 1,960 for techniques of
# frameworks: narrow products 395, PyTorch's rule, adapters and offload 390, Megatron-LM's
# overlaps and layouts 600, memory of any job 450, links inside hosts and uneven groups 125;
# 1,890 for clusters by data sheet: times of kernels 215, the host 155, kernels of Megatron-LM
# 270, anchors and intervals 450, tables, measured steps, days and cost 550; 1,280 for files of
# frameworks: six tables of keys with what joins them, a reader of shell scripts, and writing,
# 150 for what these ask for or refuse, 300 for scripts' functions, cases and tests, and 100 for
# what files leave to recipes, programs and flags;
# 730 for training logs of eight trainers; 220 for contention by data sheet and a trainer's
# kernels, and parts of programs that are simulated once; 140 for pages of training logs and for
# jobs, batches and starts in them that are told apart; 400 for an interpreter of shell scripts;
# 310 for steps of frameworks' files that PyTorch trains; 700 for the search of layouts; 250 for
# its files and for layouts that are measured; 650 for families that transformers
# builds: a trace of a class, its units, and the process in which it runs; 2,050 for patterns
# of layers: the noun and its tree 420, 75 families of configurations 850, what trains them 550,
# attention with sinks and softcap 120, rules and memory 110; 300 for Gemma 4, with an
# embedding per layer, shared keys and experts with norms, and for families after it; 200 for
# multi-token prediction by Megatron-LM's rules and for the kernels of gpt-oss's activation; 80
# for context parallelism by heads, xIELU's kernels, and what attention's kernels lack; 510 for
# offloaded activations, 390 for flags of nccl-tests and a compiled loop, 180 for unequal ranks;
# 65 for a light install, 165 for the answer first, 320 for figures in Python; 150 for pasted
# tables and measured rows in plans, 390 for answers of what first users looked for.
MAX_STATEMENTS = 75_280

# Names that say nothing of what a file holds.
NAMELESS = {"utils", "util", "common", "helpers", "base", "misc"}


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def test_files_have_names_that_say_what_they_hold() -> None:
    assert [name_of(file) for file in FILES if file.stem in NAMELESS] == []


def test_a_file_is_one_noun() -> None:
    lines = {name_of(file): len(file.read_text().splitlines()) for file in FILES}
    assert {name: count for name, count in lines.items() if count > MAX_FILE} == {}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function, with "file:name"."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{name_of(file)}:{node.name}", node


def test_a_function_is_one_thought() -> None:
    lengths = {where: (node.end_lineno or 0) - node.lineno + 1 for where, node in functions()}
    assert {name: count for name, count in lengths.items() if count > MAX_FUNCTION} == {}


def test_the_package_does_not_grow() -> None:
    """Statements of the whole package, as validation/statements.py counts them."""
    counts = statements.by_folder()
    assert sum(counts.values()) <= MAX_STATEMENTS, counts


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("a = 1", 1),
        ("a, b = 1, 2", 2),
        ("a, b = pair", 1),
        ("print(a := 1)", 2),
        ('def f():\n    """Return one."""\n    return 1', 2),
        ("if a:\n    b = 1\nelse:\n    b = 2", 3),
    ],
)
def test_denser_lines_are_no_smaller(code: str, count: int) -> None:
    assert statements.num_statements(ast.parse(code)) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_in_every_table(family: str) -> None:
    from stepmark.operators.bench import IMPLS

    assert IMPLS[family], family
    assert IMPLS.keys() == FAMILIES.keys()
    text = PLAIN[family].shape_text
    assert text
    assert len(text) < 60


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_are_values(family: str) -> None:
    op = PLAIN[family]
    assert hash(op) == hash(dataclasses.replace(op))


def folders() -> list[str]:
    """Folders of the package, the lowest last, as import-linter's contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = (each["layers"] for each in contracts["contracts"] if "layers" in each)
    return [name.removeprefix("stepmark.") for name in " | ".join(layers).split(" | ")]


def test_every_folder_has_its_place() -> None:
    """Names of earlier versions are in `app`."""
    found = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert found == {*folders(), "app"}


def test_contributing_has_a_sentence_for_each_folder() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("| folder |")[2]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text.partition("\n\n")[0], re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == folders()


@pytest.mark.parametrize("folder", [name for name in folders() if name not in ("cli", "api")])
def test_the_map_of_a_folder_has_its_files(folder: str) -> None:
    text = ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text())) or ""
    listed = re.findall(r"\b(\w+)(?:\.py|/)", text)
    assert len(listed) == len({*listed})
    found = {
        path.stem
        for path in (SOURCE / folder).iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    }
    assert {*listed} == found - {"__init__"}


def test_modules_are_named_by_text_in_two_places() -> None:
    """`kinds.py`, and the command line, whose --help imports no feature."""
    named = [name_of(f) for f in FILES if re.search(r'"stepmark\.[\w.]+:\w+"', f.read_text())]
    assert [name for name in named if not name.startswith(("cli/", "kinds.py"))] == []


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


def test_pages_need_plotly_js_alone() -> None:
    """Figures are data, which `draw` puts in the format of plotly.js: none imports plotly."""
    importing = [
        name_of(file)
        for file in FILES
        if re.search(r"import plotly|from plotly", file.read_text())
    ]
    assert importing == []


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


def test_a_prediction_by_data_sheet_imports_nothing_heavy() -> None:
    """They take a third of its time, and only traces, anchors and pages need them."""
    words = ["predict", "gpt-7b", "--strategy", "fsdp", "--nproc", "8", "--device", "h100-sxm"]
    code = f"from stepmark.cli.main import status\nassert status({words}) == 0"
    assert loaded_by(code) == []


def test_nouns_and_workloads_import_no_torch() -> None:
    modules = [
        "stepmark." + name_of(file)[:-3].replace("/", ".").removesuffix(".__init__")
        for file in FILES
        if name_of(file).split("/")[0]
        in ("ground", "model", "cases", "step", "workloads", "launching")
    ]
    assert len(modules) > 20
    assert "torch" not in loaded_by("import " + ", ".join(modules))


def test_tests_of_a_file_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """What they share is made once, and ranks of two tests never wait for each other."""
    is_worker = hasattr(request.config, "workerinput")
    assert request.node.nodeid.endswith("@test_architecture") is is_worker


def test_scripts_of_figures_are_listed() -> None:
    """validation/README.md names each script, its figure, and how to repeat it."""
    page = (ROOT / "validation" / "README.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and all(map(str.strip, row)) for row in rows)
    listed = [name for script, _, _ in rows for name in re.findall(r"`(\w+\.py)`", script)]
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("validation/*.py"))
    repeated = {name for *_, how in rows for name in re.findall(r"validation/(\w+\.py)", how)}
    assert repeated == {script.split("`")[1] for script, _, _ in rows}
