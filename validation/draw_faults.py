"""Draw one-line faults by a seed, and find the test that notices each.

    python validation/draw_faults.py draw FAULTS.toml            the faults, without tests
    python validation/draw_faults.py find FAULTS.toml [A-B]      run tests until one fails

The faults are drawn evenly over the rooms and operators below, so that nobody chooses them.
`find` tries tests that import the fault's file, then frozen outputs, then tests of the room; it
writes the test into the file, and prints faults that survive. Found ones join mutations.toml.
"""

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepmark"
sys.path.insert(0, str(ROOT))

from tests import mutate  # noqa: E402

SEED = 20261127
COUNT = 60
# By room: its files.
ROOMS: dict[str, tuple[str, ...]] = {
    "predict": ("predictions", "step_memory"),
    "trace": ("traces", "job_logs", "text_tables"),
    "replay": ("replays",),
    "launch": ("measuring/*.py", "launching"),
    "verdicts": (
        *(f"ground/{name}.py" for name in ("verdicts", "ratio", "variance", "launches")),
        *(f"comparison/{name}.py" for name in ("acceptance", "racing")),
    ),
    "store": ("store",),
}
# By room: frozen outputs of its commands, and tests that run them. They are tried after those
# that import the file of a fault.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "predict": ("predict", "predictions"),
    "trace": ("trace", "logs", "compare"),
    "replay": ("dry-run",),
    "launch": ("dry-run",),
    "verdicts": ("compare",),
    "store": ("runs", "compare"),
}
OF_ROOM: dict[str, tuple[str, ...]] = {
    "predict": ("predictions/test_timeline.py", "predictions/test_predicted_steps.py"),
    "trace": ("traces", "job_logs", "text_tables"),
    "replay": ("replays", "cli/test_replay.py"),
    "launch": ("measuring", "cli/test_launch.py", "cli/test_ranks.py"),
    "verdicts": ("comparison/test_compare.py", "cli/test_check.py", "cli/test_sweep.py"),
    "store": ("store", "cli/test_runs_cli.py", "cli/test_compare.py"),
}
OPERATORS = ("constant", "comparison", "sign", "any or all", "dropped line")
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
}
OTHER_ONE = {"any": "all", "all": "any", "min": "max", "max": "min"}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A node of a file and the text that takes its place, both within one line."""

    operator: str
    line: int  # from 0
    start: int
    end: int
    text: str


def changes(source: str) -> Iterator[Change]:
    """Yield every one-line fault that can be put into a file."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        is_expr = isinstance(node, ast.expr | ast.stmt)
        if (
            not is_expr
            or node.lineno != node.end_lineno
            or not lines[node.lineno - 1].isascii()
        ):
            continue
        for operator, text in _replacements(node, source):
            yield Change(
                operator=operator,
                line=node.lineno - 1,
                start=node.col_offset,
                end=node.end_col_offset or 0,
                text=text,
            )


def _replacements(node: ast.expr | ast.stmt, source: str) -> Iterator[tuple[str, str]]:
    """Yield operators that apply to a node, with the text that replaces it."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int(value)):
            yield "constant", str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", str(2 * value or 1.0)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "comparison", f"{text(left)} {COMPARISONS[type(op)]} {text(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
            yield "sign", f"{text(left)} {SIGNS[type(op)]} {text(right)}"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "sign", text(operand)
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_ONE:
            yield "any or all", OTHER_ONE[name] + text(node).removeprefix(name)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue():
            yield "dropped line", "pass"


def draw(seed: int = SEED, count: int = COUNT) -> list[dict[str, object]]:
    """Return faults as tests/mutations.toml has them, drawn evenly over rooms and operators."""
    choice = random.Random(seed).choice
    candidates = {room: list(_candidates(files)) for room, files in ROOMS.items()}
    rooms = list(ROOMS)
    faults: list[dict[str, object]] = []
    while len(faults) < count:
        room = rooms[len(faults) % len(rooms)]
        operator = OPERATORS[len(faults) % len(OPERATORS)]
        path, change = choice(
            [each for each in candidates[room] if each[1].operator == operator]
        )
        fault = _fault(path, change) | {"room": room}
        if fault not in faults:
            faults.append(fault)
    return faults


def _candidates(patterns: tuple[str, ...]) -> Iterator[tuple[Path, Change]]:
    for pattern in patterns:
        folder = SOURCE / pattern
        for path in sorted(folder.rglob("*.py") if folder.is_dir() else SOURCE.glob(pattern)):
            for change in changes(path.read_text()):
                yield path, change


def _fault(path: Path, change: Change) -> dict[str, object]:
    """Return a fault with as many lines before it as make its place unique."""
    source = path.read_text()
    lines = source.splitlines()
    line = lines[change.line]
    wrong = line[: change.start] + change.text + line[change.end :]
    first = change.line
    while source.count("\n".join(lines[first : change.line + 1])) > 1:
        first -= 1
    before = lines[first : change.line]
    return {
        "what": f"{change.operator}: {line[change.start : change.end]} -> {change.text}",
        "file": path.relative_to(SOURCE).as_posix(),
        "old": "\n".join([*before, line]),
        "new": "\n".join([*before, wrong]),
        "tests": [],
    }


def importers(file: str) -> tuple[str, ...]:
    """Return the test files that import a file of the package, the shortest first."""
    *folders, name = file.removesuffix(".py").removesuffix("/__init__").split("/")
    package = ".".join(["stepmark", *folders])
    is_import = re.compile(
        rf"from {package}\.{name} import|from {package} import [^\n]*\b{name}\b"
    )
    folder = ROOT / "tests"
    files = [path for path in folder.rglob("test_*.py") if is_import.search(path.read_text())]
    files.sort(key=lambda path: path.stat().st_size)
    return tuple(path.relative_to(folder).as_posix() for path in files)


def find(faults: list[dict[str, object]], places: range, target: Path) -> int:
    """Try tests until one notices each fault. Returns how many survive."""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = mutate.copied(Path(folder))
        for place in places:
            plain = faults[place]
            if plain["tests"]:
                continue
            test = None
            room = str(plain["room"])
            frozen = tuple(
                f"test_outputs.py::test_a_command_prints_what_it_did[{name}]"
                for name in OUTPUTS[room]
            )
            for tests in (importers(str(plain["file"])), frozen, OF_ROOM[room]):
                fault = mutate.Fault(
                    what=str(plain["what"]),
                    file=str(plain["file"]),
                    old=str(plain["old"]),
                    new=str(plain["new"]),
                    tests=tests,
                )
                if not tests:
                    continue
                try:
                    test = mutate.found_by(tree, fault)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(error, file=sys.stderr)
                if test:
                    break
            survivors += test is None
            print(f"{place} {plain['file']} {plain['what']}: {test}", flush=True)
            if test:
                plain["tests"] = [test.partition("::")[0]]
                plain["found by"] = test
                write(target, faults)
    return survivors


def write(target: Path, faults: list[dict[str, object]]) -> None:
    """Write faults as TOML; strings of JSON are strings of TOML."""
    tables = []
    for fault in faults:
        rows = [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in fault.items()]
        tables.append("[[fault]]\n" + "\n".join(rows) + "\n")
    target.write_text("\n".join(tables))


def main() -> int:
    """Draw faults, or find their tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["draw", "find"])
    parser.add_argument("faults", type=Path)
    parser.add_argument("places", nargs="?", help="numbers of faults, e.g. 0-29")
    arguments = parser.parse_args()
    if arguments.action == "draw":
        write(arguments.faults, draw())
        return 0
    faults = tomllib.loads(arguments.faults.read_text())["fault"]
    first, _, last = (arguments.places or f"0-{len(faults) - 1}").partition("-")
    places = range(int(first), int(last or first) + 1)
    return 1 if find(faults, places, arguments.faults) else 0


if __name__ == "__main__":
    sys.exit(main())
