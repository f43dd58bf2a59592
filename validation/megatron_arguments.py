"""Check that each argument of Megatron-LM's parser is in our table.

    git clone https://github.com/NVIDIA/Megatron-LM
    python validation/megatron_arguments.py Megatron-LM

reads megatron/training/arguments.py and the dataclasses whose fields are arguments as text (no
torch, no import) and prints the names that stepmark.framework_files.megatron does not know. The
names of the last commit that was read are in validation/data/megatron_arguments.txt, which a
test compares with the table.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_ARGUMENTS = Path("megatron/training/arguments.py")


def argument_names(root: Path) -> set[str]:
    """Return all names of arguments of a checkout, with their dashes."""
    tree = ast.parse((root / _ARGUMENTS).read_text())
    classes = _classes(root)
    lists = _lists(tree)
    names: set[str] = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name == "add_argument":
            names |= {word for word in map(_text, call.args) if word.startswith("--")}
        elif name == "ArgumentGroupFactory":
            excluded: set[str] = set()
            for keyword in call.keywords:
                value = keyword.value
                words = lists[value.id] if isinstance(value, ast.Name) else _words(value)
                excluded |= set(words)
            names |= set(_of_fields(getattr(call.args[0], "id", ""), classes, excluded))
    return names


def _classes(root: Path) -> dict[str, ast.ClassDef]:
    found: dict[str, ast.ClassDef] = {}
    for path in sorted((root / "megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, node)
    return found


def _lists(tree: ast.Module) -> dict[str, list[str]]:
    return {
        target.id: _words(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _words(node: ast.expr) -> list[str]:
    return [_text(item) for item in getattr(node, "elts", ())]


def _text(node: ast.expr) -> str:
    value = getattr(node, "value", "")
    return value if isinstance(value, str) else ""


def _of_fields(
    name: str, classes: dict[str, ast.ClassDef], excluded: set[str]
) -> Iterator[str]:
    """Yield the arguments that argument_utils.ArgumentGroupFactory makes of a dataclass."""
    node = classes[name]
    for base in node.bases:
        if getattr(base, "id", "") in classes:
            yield from _of_fields(getattr(base, "id", ""), classes, excluded)
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if field.target.id in excluded:
            continue
        text = ast.unparse(field)
        if "init=False" in text or "ClassVar" in text:
            continue
        meta = [
            _text(item)
            for each in ast.walk(field)
            if isinstance(each, ast.Dict)
            for key, value in zip(each.keys, each.values, strict=True)
            if key is not None and _text(key) == "arg_names"
            for item in getattr(value, "elts", ())
        ]
        word = field.target.id.replace("_", "-")
        kind = ast.unparse(field.annotation)
        if meta:
            yield from meta
        elif kind in ("bool", "Optional[bool]", "bool | None") and _is_true(field.value):
            yield from (f"--no-{word}", f"--disable-{word}")
        else:
            yield f"--{word}"


def _is_true(value: ast.expr | None) -> bool:
    """Return whether a default is not False, of which argparse makes store_false."""
    if isinstance(value, ast.Call):
        given = (item.value for item in value.keywords if item.arg == "default")
        value = next(given, None)
    return not (isinstance(value, ast.Constant) and value.value is False)


def main() -> int:
    """Print the names that the table lacks. Returns the exit code."""
    from stepmark.framework_files import megatron  # noqa: PLC0415

    names = argument_names(Path(sys.argv[1]))
    missing = sorted(names - megatron.known_names())
    print(f"{len(names)} arguments, {len(missing)} not in the table")
    print("\n".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
