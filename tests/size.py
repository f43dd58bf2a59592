"""How many lines and files each room of the package has, and how many it may have.

Beside them what should become rare: options as mappings of anything, which have no names that
a type checker knows, and imports inside functions.

    python tests/size.py              print sizes beside limits
    python tests/size.py all          lower the limits to what is there
    python tests/size.py ROOM ...     lower them, and raise those of these rooms

A room grows only where that is decided, so raising its limit is a change that a review sees.
"""

import ast
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "stepmark"
TABLE = Path(__file__).parent / "size.toml"
# How far a limit may lie above what is there: 2 % of the lines, or a few lines.
SLACK, FEW_LINES = 0.02, 20
HEAD = """\
# Lines and files of each room that may be there: see size.py.
# `make size ARGS=all` lowers them; `make size ARGS=core` also raises core's.
"""
LOWER = "make size ARGS=all"
MAPPINGS = ("Mapping[str, Any]", "dict[str, Any]", "Values")
Sizes = dict[str, tuple[int, int]]  # lines, files
Counts = dict[str, int]


def found() -> Sizes:
    """Return the size of each room, of what lies beside them ("."), and of "all"."""
    sizes: Sizes = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).parts
        count = len(file.read_text().splitlines())
        for room in (parts[0] if len(parts) > 1 else ".", "all"):
            lines, files = sizes.get(room, (0, 0))
            sizes[room] = lines + count, files + 1
    return dict(sorted(sizes.items()))


def found_counts() -> Counts:
    """Return how many parameters of cli and app are mappings, and how many imports are late."""
    mappings = 0
    for file in (*SOURCE.glob("cli/**/*.py"), *SOURCE.glob("app/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.arg) and node.annotation is not None:
                mappings += ast.unparse(node.annotation) in MAPPINGS
    late = sum(file.read_text().count("noqa: PLC0415") for file in SOURCE.rglob("*.py"))
    return {"mapping_options": mappings, "late_imports": late}


def limits() -> tuple[Sizes, Counts]:
    plain = tomllib.loads(TABLE.read_text())
    rooms = {room: (value["lines"], value["files"]) for room, value in plain["rooms"].items()}
    return rooms, plain["counts"]


def problems(allowed: Mapping[str, tuple[int, int]], sizes: Sizes) -> list[str]:
    """Return what is larger than allowed, and limits that are no longer near."""
    texts = []
    for room, (lines, files) in sizes.items():
        most_lines, most_files = allowed.get(room, (0, 0))
        if lines > most_lines or files > most_files:
            texts.append(
                f"{room} grew: {lines} lines in {files} files, "
                f"where {most_lines} in {most_files} are allowed"
            )
        elif most_lines - lines > max(SLACK * lines, FEW_LINES):
            texts.append(f"{room} has {lines} lines, {most_lines} are allowed: {LOWER}")
    return texts + [f"{room} is gone: {LOWER}" for room in allowed if room not in sizes]


def show() -> str:
    """Return a line per room: its lines and files, and how many are allowed."""
    allowed = limits()[0]
    lines = [f"{'room':10}{'lines':>8}{'limit':>8}{'files':>8}{'limit':>8}"]
    for room, sizes in found().items():
        pairs = zip(sizes, allowed.get(room, (0, 0)), strict=True)
        lines.append(f"{room:10}" + "".join(f"{now:8}{most:8}" for now, most in pairs))
    return "\n".join(lines)


def write(raised: list[str]) -> None:
    """Write the table. raised: rooms whose limits may grow."""
    allowed, counts = limits()
    rows = ["[rooms]\n"]
    for room, sizes in found().items():
        before = allowed.get(room, sizes)
        grows = raised != ["all"] and room in (*raised, "all")
        lines, files = (
            now if grows else min(now, then) for now, then in zip(sizes, before, strict=True)
        )
        rows.append(f'"{room}" = {{ lines = {lines}, files = {files} }}\n')
    rows.append("\n[counts]\n")
    for name, count in found_counts().items():
        rows.append(f"{name} = {min(count, counts.get(name, count))}\n")
    TABLE.write_text(HEAD + "".join(rows))


def main(arguments: list[str]) -> str:
    """Print the sizes, or write the table. Return what is wrong with the arguments."""
    rooms = found()
    if unknown := [word for word in arguments if word not in rooms]:
        return f"{unknown[0]} is no room: give one of {', '.join(rooms)}, or nothing"
    if arguments:
        write(arguments)
    sys.stdout.write(f"{show()}\n")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
