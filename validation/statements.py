"""Print the statements of each folder of the package: the measure of its size.

    python validation/statements.py

A docstring counts nothing. Each further target of a tuple assignment (`a, b = 1, 2`) and each
assignment in an expression (`:=`) counts as one more, so that denser lines are no smaller.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "stepmark"


def num_statements(tree: ast.AST) -> int:
    """Return the statements of parsed code, without docstrings."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            count += 1
        if isinstance(node, ast.NamedExpr):
            count += 1
        if isinstance(node, ast.Assign):
            count += _further_targets(node)
    return count


def _is_docstring(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text and isinstance(node.value.value, str)


def _further_targets(node: ast.Assign) -> int:
    """Return how many assignments of a tuple to names one line hides; unpacking hides none."""
    target = node.targets[0]
    is_pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
    return len(target.elts) - 1 if is_pair else 0


def by_folder(source: Path = SOURCE) -> dict[str, int]:
    """Return the statements of each folder of the package; "." is the package itself."""
    counts: Counter[str] = Counter()
    for file in source.rglob("*.py"):
        parts = file.relative_to(source).parts
        folder = parts[0] if len(parts) > 1 else "."
        counts[folder] += num_statements(ast.parse(file.read_text()))
    return dict(sorted(counts.items()))


def main() -> int:
    """Print a row per folder and the sum."""
    counts = by_folder()
    for folder, count in counts.items():
        print(f"{folder:14}{count:7,}")
    print(f"{'all':14}{sum(counts.values()):7,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
