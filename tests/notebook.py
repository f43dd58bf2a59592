"""Execute the code cells of a notebook, as Jupyter would, without Jupyter.

    python tests/notebook.py FILE.ipynb           execute it; the first error ends it
    python tests/notebook.py FILE.ipynb --write   also keep what its cells print and return

Run it in the notebook's folder, since its paths are relative.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def execute(source: str, names: dict[str, object]) -> list[Cell]:
    """Execute a cell and return its outputs; the value of a last expression is one."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[Cell] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(text)})
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = lines(value._repr_html_())
        outputs.append({"output_type": "execute_result", "metadata": {}, "data": data})
    return outputs


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(file: Path, *, keeps: bool) -> None:
    notebook = json.loads(file.read_text())
    names: dict[str, object] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        outputs = execute("".join(cell["source"]), names)
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
        cell |= {"execution_count": number, "outputs": outputs}
    if keeps:
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), keeps="--write" in sys.argv)
